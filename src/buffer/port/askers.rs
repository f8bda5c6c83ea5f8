//! Consumers that wait for a batch, in the store.

use async_trait::async_trait;

use super::StoreError;
use crate::{buffer::ids::PolicyName, clock::Timestamp};

/// What all replicas know of the consumers that wait at each of them.
#[async_trait]
pub trait AskerStore: Send + Sync {
    /// Writes which consumers wait at this process, and which do not wait any more.
    async fn write_askers(&self, askers: Vec<Asker>, now: Timestamp) -> Result<(), StoreError>;
}

/// A consumer that waits at a process.
#[derive(Clone, Debug)]
pub struct Asker {
    /// The policy.
    pub policy: PolicyName,
    /// Its name; empty if it has none.
    pub consumer: String,
    /// Since when it waits.
    pub since: Timestamp,
    /// When it asked last.
    pub asked_at: Timestamp,
    /// From then on it does not wait any more, unless it has asked again.
    pub until: Timestamp,
    /// It does not wait any more.
    pub is_over: bool,
}
