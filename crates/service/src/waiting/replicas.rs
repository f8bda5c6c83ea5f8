//! Replicas: an event at one replica wakes the waiters of the others.
//!
//! Separate from `wakers`, which serves one process. A lost notification only costs time, because waiters also poll.
//!
//! One task per replica sends the notifications that have accumulated since its last statement, after the commits that
//! they announce. Waiters poll every 500 ms (`limits.waiter_poll_interval_ms`), and every 10 s while the replica
//! listens; one that waits for a batch of another size than that of the rules always polls every 500 ms, because
//! nothing announces such a batch. A replica that begins or ceases to listen wakes its waiters once. Behind a pooler it
//! does not listen, because notifications would arrive in the middle of other answers; the log has one warning then.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use forebay_domain::{
    ids::{PolicyName, ReplicaId},
    peers::{Awaited, Notification, WakeUp},
};
use forebay_store::peers::Peers;
use tokio::sync::Notify;

use crate::{Buffer, waiting::wakers::Wakers};

/// Pause between two messages. An idle replica publishes at once, and a busy one at most 200 times a second.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(5);

/// Wake-ups that may be pending for one message. Further ones are not sent: waiters find the change by polling.
const PENDING_MAX: usize = 1_024;

/// This replica among those that share its database.
pub(crate) struct Replicas {
    replica: ReplicaId,
    peers: Arc<dyn Peers>,
    pending: Mutex<HashSet<(Awaited, PolicyName)>>,
    pending_added: Notify,
}

/// Wakes waiters here and at the other replicas.
pub(crate) fn wake(buffer: &Buffer, awaited: Awaited, policy: &PolicyName) {
    // Scorers wait for work of a policy, and get that of its evaluations, too.
    let public = (awaited == Awaited::Work).then(|| policy.public());
    let policy = public.as_ref().unwrap_or(policy);
    buffer.wakers.wake(awaited, policy);
    if let Some(replicas) = &buffer.replicas {
        replicas.enqueue(awaited, policy);
    }
}

impl Buffer {
    /// Publishes events of this replica to the other replicas and receives their notifications, until the future is
    /// dropped.
    ///
    /// Returns at once if the database belongs to one process.
    pub async fn run_replicas(&self) {
        if let Some(replicas) = &self.replicas {
            tokio::join!(replicas.publish(), replicas.listen(&self.wakers));
        }
    }
}

impl Replicas {
    pub(crate) fn new(peers: Arc<dyn Peers>) -> Self {
        Self { replica: ReplicaId::mint(), peers, pending: Mutex::default(), pending_added: Notify::new() }
    }

    fn enqueue(&self, awaited: Awaited, policy: &PolicyName) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.len() < PENDING_MAX {
            pending.insert((awaited, policy.clone()));
        }
        drop(pending);
        self.pending_added.notify_one();
    }

    /// Publishes one message at a time. Events that happen meanwhile go into the next message.
    async fn publish(&self) {
        let mut fails = false;
        loop {
            let outcome = self.peers.publish(self.pending().await).await;
            match &outcome {
                Err(error) if !fails => {
                    tracing::warn!(error = %error, "notifications cannot be sent to the other replicas; their waiters poll");
                }
                Ok(()) if fails => tracing::info!("notifications reach the other replicas again"),
                _ => {}
            }
            fails = outcome.is_err();
            tokio::time::sleep(PUBLISH_INTERVAL).await;
        }
    }

    /// Waits until there is something to publish.
    async fn pending(&self) -> Vec<WakeUp> {
        loop {
            let pending = std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner));
            if !pending.is_empty() {
                let wake_up = |(awaited, policy)| WakeUp { replica: self.replica, awaited, policy };
                return pending.into_iter().map(wake_up).collect();
            }
            self.pending_added.notified().await;
        }
    }

    async fn listen(&self, wakers: &Wakers) {
        let notify = |notification| match notification {
            Notification::WakeUp(wake_up) if wake_up.replica == self.replica => {}
            Notification::WakeUp(wake_up) => wakers.wake(wake_up.awaited, &wake_up.policy),
            Notification::Arrive => wakers.notified(true),
            Notification::Lost => wakers.notified(false),
        };
        self.peers.listen(&notify).await;
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use futures::FutureExt as _;
    use tokio::time::Instant;

    use super::*;
    use crate::waiting::wakers::{Event, Woken};
    use forebay_store::error::StoreError;

    const HOUR: Duration = Duration::from_hours(1);

    /// Records what it publishes.
    struct Says(Mutex<Vec<Notification>>);

    #[async_trait]
    impl Peers for Says {
        async fn publish(&self, _: Vec<WakeUp>) -> Result<(), StoreError> {
            Ok(())
        }

        async fn listen(&self, heard: &(dyn Fn(Notification) + Send + Sync)) {
            let said = std::mem::take(&mut *self.0.lock().expect("nobody panics"));
            said.into_iter().for_each(heard);
        }
    }

    fn policy(name: &str) -> PolicyName {
        PolicyName::parse(name).expect("a valid name")
    }

    fn replicas() -> (Arc<Says>, Replicas) {
        let says = Arc::new(Says(Mutex::default()));
        (Arc::clone(&says), Replicas::new(says))
    }

    #[test]
    fn what_gathers_is_told_once() {
        let (_, replicas) = replicas();
        for _ in 0..3 {
            replicas.enqueue(Awaited::Batch, &policy("one"));
            replicas.enqueue(Awaited::Batch, &policy("two"));
            replicas.enqueue(Awaited::Version, &policy("one"));
        }
        assert_eq!(replicas.pending().now_or_never().map(|told| told.len()), Some(3));
        assert_eq!(replicas.pending().now_or_never(), None);
    }

    #[test]
    fn what_gathers_is_bounded() {
        let (_, replicas) = replicas();
        for index in 0..2 * PENDING_MAX {
            replicas.enqueue(Awaited::Batch, &policy(&format!("p{index}")));
        }
        assert_eq!(replicas.pending().now_or_never().map(|told| told.len()), Some(PENDING_MAX));
    }

    #[tokio::test]
    async fn others_wake_waiters_and_their_own_replica_does_not() {
        let (says, replicas) = replicas();
        let wakers = Wakers::new(HOUR);
        let one = policy("one");
        let waker = wakers.watch(&one);
        let wake_up =
            |replica, name| Notification::WakeUp(WakeUp { replica, awaited: Awaited::Batch, policy: policy(name) });
        for (heard, woken) in [
            (wake_up(replicas.replica, "one"), None),
            (wake_up(ReplicaId::mint(), "two"), None),
            (wake_up(ReplicaId::mint(), "one"), Some(Woken::Recheck)),
            (Notification::Arrive, Some(Woken::Recheck)),
            (Notification::Lost, Some(Woken::Recheck)),
        ] {
            says.0.lock().expect("nobody panics").push(heard.clone());
            replicas.listen(&wakers).await;
            let waiting = wakers.wait_for_batch(&waker, Event::Announced, Instant::now() + HOUR);
            assert_eq!(waiting.now_or_never(), woken, "{heard:?}");
        }
    }
}
