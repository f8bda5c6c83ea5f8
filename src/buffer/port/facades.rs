//! Foreign protocols in the store: what they remember besides data, and what they tell about the line of ready groups.

use async_trait::async_trait;
use forebay_domain::{
    facades::{FacadeState, ReadyGroup},
    ids::PolicyName,
    samples::BatchMember,
};

use crate::buffer::port::error::StoreError;

/// What the protocols of other rollout buffers need besides the stages.
#[async_trait]
pub trait FacadeStore: Send + Sync {
    /// The state with this name. None if there is none, or if its revision is `known`.
    async fn facade_state(&self, name: String, known: u64) -> Result<Option<FacadeState>, StoreError>;
    /// Replaces a state, if it still has the revision before this one. Returns whether it had.
    async fn write_facade_state(&self, name: String, state: FacadeState) -> Result<bool, StoreError>;
    /// The first ready groups of the policy's run, in the order in which they became ready.
    async fn ready_groups(&self, policy: PolicyName, limit: u32) -> Result<Vec<ReadyGroup>, StoreError>;
    /// The rollouts of the newest group of the policy's run that is ready or in a batch. Empty if none of the newest
    /// groups is, or if its payloads are purged.
    async fn newest_members(&self, policy: PolicyName) -> Result<Vec<BatchMember>, StoreError>;
}
