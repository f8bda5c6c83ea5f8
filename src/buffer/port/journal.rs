//! The journal in the store: what operators and time did to policies.

use async_trait::async_trait;
use forebay_domain::{
    looking::journal::{JournalEntry, Notice, ReadJournal},
    pages::Page,
};

use crate::buffer::port::error::StoreError;

/// The journals of policies.
#[async_trait]
pub trait JournalStore: Send + Sync {
    /// Entries of a policy.
    async fn journal(&self, read: ReadJournal) -> Result<Page<JournalEntry>, StoreError>;
    /// Writes what processes noticed, except what the journal has already.
    async fn note(&self, notices: Vec<Notice>) -> Result<(), StoreError>;
}
