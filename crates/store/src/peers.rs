//! The connection to the replicas that share the store's database.

use async_trait::async_trait;
use forebay_domain::peers::{Notification, WakeUp};

use crate::error::StoreError;

/// Sends to and receives from the other replicas. A lost message only costs time.
#[async_trait]
pub trait Peers: Send + Sync + 'static {
    /// Publishes to all replicas, this one included.
    async fn publish(&self, wake_ups: Vec<WakeUp>) -> Result<(), StoreError>;
    /// Passes published messages to `notify` until the store is closed.
    async fn listen(&self, notify: &(dyn Fn(Notification) + Send + Sync));
}
