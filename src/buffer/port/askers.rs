//! Consumers that wait for a batch, in the store.

use async_trait::async_trait;
use forebay_domain::{askers::Asker, clock::Timestamp};

use crate::buffer::port::error::StoreError;

/// What all replicas know of the consumers that wait at each of them.
#[async_trait]
pub trait AskerStore: Send + Sync {
    /// Writes which consumers wait at this process, and which do not wait any more.
    async fn write_askers(&self, askers: Vec<Asker>, now: Timestamp) -> Result<(), StoreError>;
}
