//! Stage 7 in the store: changes that time alone makes due, and rules that are no longer used.
//!
//! The sweeps of admissions, groups and leases are declared with their stages.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::GroupPk,
    sweep::{PayloadMoves, RulesOfGroups},
};

use crate::buffer::port::error::StoreError;

/// The stage of the sweep.
#[async_trait]
pub trait SweepStore: Send + Sync {
    /// Whether time has made anything due. This only reads, so that an idle service writes nothing.
    async fn anything_due(&self, now: Timestamp) -> Result<bool, StoreError>;
    /// Adds appended changes to the tallies, in a database that appends them.
    async fn fold_tallies(&self) -> Result<(), StoreError>;
    /// Purges payloads and deletes tombstones that are due, up to `limit` groups each. Returns how many were done.
    async fn retire(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
    /// Moves a slice of payloads to where the configuration wants them, and removes objects that are no longer needed.
    async fn look_after_payloads(&self, now: Timestamp) -> Result<PayloadMoves, StoreError>;
    /// Rules that no policy uses now, up to `limit`.
    async fn superseded_rules(&self, limit: u32) -> Result<Vec<i64>, StoreError>;
    /// The rules of the groups after a group, up to `limit` groups.
    async fn rules_of_groups(&self, after: GroupPk, limit: u32) -> Result<RulesOfGroups, StoreError>;
    /// Deletes rules, except those of policies. Returns how many were deleted.
    async fn forget_rules(&self, rules: Vec<i64>) -> Result<u64, StoreError>;
}
