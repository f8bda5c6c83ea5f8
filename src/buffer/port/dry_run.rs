//! Dry runs in the store: the groups that were decided last, with everything that their decisions depended on.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, Version},
    looking::dry_run::{FindPastGroups, PastGroups},
};

use crate::buffer::port::error::StoreError;

/// Past decisions.
#[async_trait]
pub trait DryRunStore: Send + Sync {
    /// Groups that rules decided, the newest first.
    async fn past_groups(&self, find: FindPastGroups) -> Result<PastGroups, StoreError>;
    /// The versions of a policy and when each was published, in the order of the versions.
    async fn published(&self, policy: PolicyPk) -> Result<Vec<(Version, Timestamp)>, StoreError>;
}
