//! The ledger in the store: the history of rollouts and groups.

use async_trait::async_trait;
use forebay_domain::{
    groups::Group,
    ids::{ExecutionId, PolicyName},
    looking::ledger::{GroupFilter, LatestGroup, Story, StoryFilter},
    pages::Page,
};

use crate::buffer::port::error::StoreError;

/// Lists of rollouts and groups.
#[async_trait]
pub trait LedgerStore: Send + Sync {
    /// Rollouts in the order in which they arrived, or the newest first.
    async fn stories(&self, filter: StoryFilter) -> Result<Page<Story>, StoreError>;
    /// Groups in the order in which they were opened, or the newest first.
    async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, StoreError>;
    /// The group of the newest rollout of an execution, in the current run of a policy.
    async fn latest_group(
        &self,
        policy: PolicyName,
        execution_id: ExecutionId,
    ) -> Result<Option<LatestGroup>, StoreError>;
}
