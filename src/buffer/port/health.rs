//! The health of a store, and its shutdown.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

use super::{Peers, StoreError};

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

/// What the last writes say about the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Writes are expected to succeed.
    #[default]
    Writable,
    /// The database writes, but the object store took no payload. Posts fail, and everything else goes on. A task tries
    /// again.
    WithoutPayloads,
    /// The last write failed for a reason that may pass, such as a full disk or a database that cannot be reached. The
    /// sweep tries again.
    Failing,
    /// The process has to end, for one of two reasons. A write to the file failed, so only a restart shows what is on
    /// disk: after a failed fsync the kernel may have dropped the pages and would report success to a second one. Or
    /// the file was removed or replaced, so everything written to it is lost.
    Broken,
}
