//! Consumers that wait for a batch, as all replicas see them.

use crate::{clock::Timestamp, ids::PolicyName};

/// A consumer that waits at a process.
#[derive(Clone, Debug)]
pub struct ConsumerWait {
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
