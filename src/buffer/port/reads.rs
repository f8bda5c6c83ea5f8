//! Stage 5 in the store, for consumers whose next read acks the previous one.

use async_trait::async_trait;
use forebay_domain::{
    lease::Batch,
    reads::{AckReads, GiveBackReads, MarkRead, ReleaseRead},
};

use crate::buffer::port::error::Answer;

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
