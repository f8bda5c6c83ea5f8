//! The health of a store, and its shutdown.

use std::sync::Arc;

use async_trait::async_trait;
use forebay_domain::health::Health;
use tokio::sync::watch;

use super::Peers;
use crate::buffer::port::error::StoreError;

/// Health, connection and shutdown of a store, independent of the stages.
#[async_trait]
pub trait HealthStore: Send + Sync {
    /// What the last writes say about the next one.
    fn health(&self) -> watch::Receiver<Health>;
    /// Returns when the database can read and write. After a failed write, it writes to find that out.
    async fn ping(&self) -> Result<(), StoreError>;
    /// Writes to find out whether the database and the object store can be written.
    async fn probe(&self) -> Result<(), StoreError>;
    /// The connection to the other replicas, if the database can be shared.
    fn peers(&self) -> Option<Arc<dyn Peers>>;
    /// Flushes and closes the store. Later calls fail.
    async fn close(&self);
}
