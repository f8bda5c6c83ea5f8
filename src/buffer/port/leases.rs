//! Stages 4 and 5 in the store: batches are cut and delivered under leases.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::BatchId,
    lease::{Ack, Batch, BatchFilter, Claim, ClaimAnswer, ExpiredLeases, Extend, Nack, Readmit},
    pages::Page,
};

use crate::buffer::port::error::{Answer, StoreError};

/// The stages of the cut and the delivery.
#[async_trait]
pub trait LeaseStore: Send + Sync {
    /// Gives the batch that the request holds already, else one that came back, else a new one.
    async fn claim(&self, claim: Claim) -> Answer<ClaimAnswer>;
    /// Heartbeat.
    async fn extend(&self, extend: Extend) -> Answer<Batch>;
    /// Records that a step consumed the batch.
    async fn ack(&self, ack: Ack) -> Answer<Batch>;
    /// Gives the batch back. The named groups are quarantined and the batch is split.
    async fn nack(&self, nack: Nack) -> Answer<Batch>;
    /// Makes a quarantined batch, or the quarantined groups of a split batch, available again with a fresh count.
    async fn readmit(&self, readmit: Readmit) -> Answer<Batch>;
    /// Sweep: takes back expired leases, up to `limit`.
    async fn expire_leases(&self, now: Timestamp, limit: u32) -> Result<Vec<ExpiredLeases>, StoreError>;
    /// One batch.
    async fn batch(&self, batch_id: BatchId) -> Result<Option<Batch>, StoreError>;
    /// Batches in the order in which they were cut.
    async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, StoreError>;
}
