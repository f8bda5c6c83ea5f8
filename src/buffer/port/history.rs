//! The history of policies in the store: the totals of their tallies at the end of minutes.

use async_trait::async_trait;

use super::StoreError;
use crate::{
    buffer::{ids::PolicyPk, tally::Tallies},
    clock::Timestamp,
};

/// Snapshots of tallies over time.
#[async_trait]
pub trait HistoryStore: Send + Sync {
    /// Once a minute, writes the totals of each policy whose totals have changed, and deletes what is too old to be read.
    /// One replica does it in each minute. Writes nothing while this process has written nothing since the last snapshot.
    async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError>;
    /// The totals of a policy at the ends of buckets.
    async fn history(&self, read: ReadHistory) -> Result<History, StoreError>;
}

/// Which part of the history to read. All numbers are minutes since the Unix epoch.
#[derive(Clone, Copy, Debug)]
pub struct ReadHistory {
    /// The policy.
    pub policy: PolicyPk,
    /// The first minute.
    pub from: i64,
    /// The minute behind the last one.
    pub to: i64,
    /// The width of a bucket, at least 1.
    pub step: i64,
}

/// The part of the history of a policy that a series is made of.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// In the order of their minutes. The first one may be older than the part, and has what was counted before.
    pub snapshots: Vec<Snapshot>,
    /// The totals now.
    pub now: Totals,
}

/// The totals of a policy at the end of some minutes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The first minute in which something of it can have happened that is not in the snapshot before.
    pub since: i64,
    /// The minute behind the last one. The snapshot of minute 0 has what was counted before the history begins.
    pub minute: i64,
    /// The totals.
    pub totals: Totals,
}

/// The tallies of a policy, and its version.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// The tallies.
    pub tallies: Tallies,
    /// The current version.
    pub version: i64,
}

impl Totals {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tallies.counts.is_empty() && self.version == 0
    }
}
