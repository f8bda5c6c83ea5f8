//! The journal in the store: what operators and time did to policies.

use async_trait::async_trait;
use serde_json::Value;

use super::{Cursor, Page, StoreError};
use crate::{
    buffer::{
        ids::{CallerId, PolicyName, PolicyPk},
        journal::Happening,
    },
    clock::Timestamp,
};

/// The journals of policies.
#[async_trait]
pub trait JournalStore: Send + Sync {
    /// Entries of a policy.
    async fn journal(&self, read: ReadJournal) -> Result<Page<JournalEntry>, StoreError>;
    /// Writes what processes noticed, except what the journal has already.
    async fn note(&self, notices: Vec<Notice>) -> Result<(), StoreError>;
}

/// Which page of a journal to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadJournal {
    /// The policy.
    pub policy: PolicyPk,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries.
    pub limit: u32,
}

/// An entry as it is stored. Other versions may have written kinds that this one does not know.
#[derive(Clone, Debug)]
pub struct JournalEntry {
    /// When it happened.
    pub at: Timestamp,
    /// What happened.
    pub kind: String,
    /// The key of the person who did it; none if time did it, or if the service needs no keys.
    pub key_id: Option<CallerId>,
    /// More about it.
    pub detail: Value,
}

/// Something that a process noticed. Several processes may notice the same.
#[derive(Clone, Debug)]
pub struct Notice {
    /// The policy.
    pub policy: PolicyName,
    /// What it is.
    pub happening: Happening,
    /// When.
    pub at: Timestamp,
}
