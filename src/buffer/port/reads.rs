//! Stage 5 in the store, for consumers whose next read acks the previous one.

use async_trait::async_trait;

use super::{Answer, Batch, LeaseProof};
use crate::{
    buffer::ids::{ConsumerName, PolicyName},
    clock::Timestamp,
};

/// The leases of consumers that are known by their names.
#[async_trait]
pub trait ReadStore: Send + Sync {
    /// Acks and settles all batches that a consumer holds, with the step after the last one. Returns them.
    async fn ack_reads(&self, ack: AckReads) -> Answer<Vec<Batch>>;
    /// Makes a consumer the holder of leases, all or none.
    async fn mark_read(&self, mark: MarkRead) -> Answer<()>;
    /// Ends a lease whose batch was not sent, which counts as no delivery.
    async fn release_read(&self, release: ReleaseRead) -> Answer<()>;
    /// Ends the leases of consumers. Returns their number.
    async fn give_back_reads(&self, give_back: GiveBackReads) -> Answer<u64>;
}

/// A request to ack what a consumer holds.
#[derive(Clone, Debug)]
pub struct AckReads {
    /// Policy.
    pub policy: PolicyName,
    /// The holder of the leases.
    pub consumer: ConsumerName,
    /// The time of the call.
    pub now: Timestamp,
}

/// A report that a consumer was sent batches.
#[derive(Clone, Debug)]
pub struct MarkRead {
    /// Policy of all of them.
    pub policy: PolicyName,
    /// The new holder.
    pub consumer: ConsumerName,
    /// The leases, by which they were sent.
    pub proofs: Vec<LeaseProof>,
    /// The new end of the leases.
    pub expires_at: Timestamp,
}

/// A request to end a lease whose batch was not sent.
#[derive(Clone, Debug)]
pub struct ReleaseRead {
    /// Policy of the batch.
    pub policy: PolicyName,
    /// The lease.
    pub proof: LeaseProof,
}

/// A request to end the leases of consumers.
#[derive(Clone, Debug)]
pub struct GiveBackReads {
    /// Policy.
    pub policy: PolicyName,
    /// The holders.
    pub consumers: [ConsumerName; 2],
    /// The time of the call.
    pub now: Timestamp,
}
