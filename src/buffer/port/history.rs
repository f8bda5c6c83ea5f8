//! The history of policies in the store: the totals of their tallies at the end of minutes.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    looking::history::{History, ReadHistory},
};

use crate::buffer::port::error::StoreError;

/// Snapshots of tallies over time.
#[async_trait]
pub trait HistoryStore: Send + Sync {
    /// Once a minute, writes the totals of each policy whose totals have changed, and deletes what is too old to be read.
    /// One replica does it in each minute. Writes nothing while this process has written nothing since the last snapshot.
    async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError>;
    /// The totals of a policy at the ends of buckets.
    async fn history(&self, read: ReadHistory) -> Result<History, StoreError>;
}
