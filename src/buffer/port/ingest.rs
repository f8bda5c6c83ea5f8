//! Stage 2 in the store: bundles of rollouts, each stored whole or not at all.

use async_trait::async_trait;
use forebay_domain::{
    formats::payload::Codec,
    ingest::{BundleOutcome, Ingest},
};

use crate::buffer::port::error::StoreError;

/// The stage of ingest.
#[async_trait]
pub trait IngestStore: Send + Sync {
    /// The form in which the store wants payloads to be packed.
    fn payload_codec(&self) -> Codec;
    /// Stores bundles, each all or nothing, and decides the groups that they complete.
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError>;
}
