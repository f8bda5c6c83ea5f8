//! Stage 5, lease, for consumers whose next read acks the previous one.

use crate::{
    clock::Timestamp,
    ids::{ConsumerName, PolicyName},
    lease::LeaseProof,
};

/// A request to ack what a consumer holds.
#[derive(Clone, Debug)]
pub struct AckReads {
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
    pub proof: LeaseProof,
}

/// A request to end the leases of consumers.
#[derive(Clone, Debug)]
pub struct GiveBackReads {
    pub policy: PolicyName,
    /// The holders.
    pub consumers: [ConsumerName; 2],
    /// The time of the call.
    pub now: Timestamp,
}
