//! Stage 5 in the store: the contents of a batch.

use async_trait::async_trait;

use super::{Batch, StoreError};
use crate::buffer::{
    ids::{BatchId, GroupPk, RolloutPk, Version},
    payload::Payload,
    seal::SEAL_BYTES,
    staleness::TrainedSpan,
    states::Verdict,
};

/// The stage of the contents.
#[async_trait]
pub trait SampleStore: Send + Sync {
    /// The rollouts of a batch in order, without payloads. None if the payloads are purged.
    async fn batch_members(&self, batch: Batch) -> Result<Option<Vec<BatchMember>>, StoreError>;
    /// Payloads of rollouts, in the order of the argument. Missing ones are left out.
    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError>;
    /// Quarantines a group with a damaged payload before it is delivered.
    async fn quarantine_damaged(&self, batch_id: BatchId, group: GroupPk) -> Result<(), StoreError>;
}

/// A rollout of a batch, without its payload.
#[derive(Clone, Debug)]
pub struct BatchMember {
    /// Key of the row.
    pub rollout_pk: RolloutPk,
    /// Its group.
    pub group_pk: GroupPk,
    /// Its group's id.
    pub group_id: String,
    /// Its id.
    pub rollout_id: String,
    /// Kept or masked.
    pub verdict: Verdict,
    /// Reward as sent.
    pub reward: Option<f64>,
    /// Advantage.
    pub advantage: f64,
    /// Its version.
    pub policy_version: Version,
    /// Segments.
    pub segments: u32,
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Trained tokens.
    pub trained_tokens: u64,
    /// The number of bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// Tokens of versions below this one are delivered with mask 0.
    pub mask_below: Option<Version>,
    /// Trained tokens by version as sent. Recorded if the policy masks stale tokens.
    pub trained_spans: Option<Vec<TrainedSpan>>,
    /// Checksum of its row; none in rows of versions that stored no seals.
    pub seal: Option<[u8; SEAL_BYTES]>,
    /// Checksum of the advantages of its group.
    pub group_seal: Option<[u8; SEAL_BYTES]>,
}

/// A payload with the key of its rollout.
#[derive(Clone, Debug)]
pub struct StoredPayload {
    /// Key of the rollout.
    pub rollout_pk: RolloutPk,
    /// The payload.
    pub payload: Payload,
}
