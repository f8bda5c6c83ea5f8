//! What replicas tell each other: an event at one replica wakes the waiters of the others.

use crate::ids::{PolicyName, ReplicaId};

/// What a waiter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaited {
    Batch,
    /// A new weight version.
    Version,
    /// Work for scorers.
    Work,
}

/// An event at a replica that waiters elsewhere may wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeUp {
    /// The replica where it happened.
    pub replica: ReplicaId,
    /// What may be available now.
    pub awaited: Awaited,
    /// The policy that it concerns.
    pub policy: PolicyName,
}

/// What a replica receives from all replicas, itself included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification {
    /// A replica published this.
    WakeUp(WakeUp),
    /// Notifications arrive from now on. Earlier ones may have been lost.
    Arrive,
    /// Notifications are lost from now on, because the connection on which they arrive is.
    Lost,
}
