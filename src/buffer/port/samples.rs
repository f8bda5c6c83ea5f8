//! Stage 5 in the store: the contents of a batch.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchId, GroupPk, RolloutPk},
    lease::Batch,
    samples::{BatchMember, FindContent, StoredContent, StoredPayload},
};

use crate::buffer::port::error::StoreError;

/// The stage of the contents.
#[async_trait]
pub trait SampleStore: Send + Sync {
    /// The rollouts of a batch in order, without payloads. None if the payloads are purged.
    async fn batch_members(&self, batch: Batch) -> Result<Option<Vec<BatchMember>>, StoreError>;
    /// Payloads of rollouts, in the order of the argument. Missing ones are left out.
    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError>;
    /// One rollout of the current run, without its payload, in whichever state it is.
    async fn content(&self, find: FindContent) -> Result<Option<StoredContent>, StoreError>;
    /// Quarantines a group with a damaged payload before it is delivered.
    async fn quarantine_damaged(&self, batch_id: BatchId, group: GroupPk, now: Timestamp) -> Result<(), StoreError>;
}
