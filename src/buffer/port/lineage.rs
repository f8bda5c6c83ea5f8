//! Stage 6 in the store: the lineage of the weights, which batches they were trained on.

use async_trait::async_trait;
use forebay_domain::{
    ids::Epoch,
    lineage::{Checkpoint, Checkpointed, Publish, Reset, ResetDone, Resume, Resumed},
};

use crate::buffer::port::error::{Answer, StoreError};

/// The stage of the lineage.
#[async_trait]
pub trait LineageStore: Send + Sync {
    /// Settles batches that were acked at or before the step.
    async fn checkpoint(&self, checkpoint: Checkpoint) -> Answer<Checkpointed>;
    /// Restarts a trainer from a step.
    async fn resume(&self, resume: Resume) -> Answer<Resumed>;
    /// Starts the policy afresh.
    async fn reset(&self, reset: Reset) -> Answer<ResetDone>;
    /// Publishes a weight version. True unless it was an identical repeat.
    async fn publish(&self, publish: Publish) -> Answer<bool>;
    /// Begins an epoch of every policy after a restore: this epoch or a later one. All leases end. Returns the number
    /// of policies.
    async fn begin_epochs(&self, first: Epoch) -> Result<u64, StoreError>;
}
