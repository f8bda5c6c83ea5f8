//! Replicas: what happens at one of them wakes the waiters of the others.
//!
//! Separate from `wake`, which knows this process alone. A wake-up that is lost on the way costs time and
//! nothing else: waiters go on looking.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use super::{
    Buffer,
    ids::{PolicyName, ReplicaId},
    wake::Wakers,
};
use crate::store::Peers;

/// Pause between two messages: an idle replica tells at once, and a busy one at most 200 times a second.
const TELL_EVERY: Duration = Duration::from_millis(5);

/// Wake-ups that gather for one message; the looks of the waiters make up for more.
const GATHERED_MAX: usize = 1_024;

/// What a waiter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaited {
    /// A batch.
    Batch,
    /// Another version.
    Version,
}

/// Something happened at a replica that others may wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeUp {
    /// Where it happened.
    pub replica: ReplicaId,
    /// What may be there now.
    pub awaited: Awaited,
    /// Of which policy.
    pub policy: PolicyName,
}

/// What one replica hears of all of them, itself included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Somebody told.
    WakeUp(WakeUp),
    /// Whatever was told until now may have gone unheard.
    Gap,
}

/// This replica among those that share its database.
pub(super) struct Replicas {
    /// This one.
    replica: ReplicaId,
    peers: Arc<dyn Peers>,
    gathered: Mutex<HashSet<(Awaited, PolicyName)>>,
    gathering: Notify,
}

impl Buffer {
    /// Wakes waiters here and at the other replicas.
    pub(super) fn wake(&self, awaited: Awaited, policy: &PolicyName) {
        self.wakers.wake(awaited, policy);
        if let Some(replicas) = &self.replicas {
            replicas.gather(awaited, policy);
        }
    }

    /// Tells other replicas what happens here and hears what happens there, until it is dropped.
    ///
    /// Ends at once where a database belongs to one process.
    pub async fn run_replicas(&self) {
        if let Some(replicas) = &self.replicas {
            tokio::join!(replicas.tell(), replicas.listen(&self.wakers));
        }
    }
}

impl Replicas {
    pub(super) fn new(peers: Arc<dyn Peers>) -> Self {
        Self { replica: ReplicaId::mint(), peers, gathered: Mutex::default(), gathering: Notify::new() }
    }

    fn gather(&self, awaited: Awaited, policy: &PolicyName) {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        if gathered.len() < GATHERED_MAX {
            gathered.insert((awaited, policy.clone()));
        }
        drop(gathered);
        self.gathering.notify_one();
    }

    /// One message at a time; what happens meanwhile goes with the next.
    async fn tell(&self) {
        let mut fails = false;
        loop {
            let outcome = self.peers.tell(self.gathered().await).await;
            match &outcome {
                Err(error) if !fails => {
                    tracing::warn!(error = %error, "other replicas cannot be told: their waiters find by looking");
                }
                Ok(()) if fails => tracing::info!("other replicas are told again"),
                _ => {}
            }
            fails = outcome.is_err();
            tokio::time::sleep(TELL_EVERY).await;
        }
    }

    /// Waits until there is something to tell.
    async fn gathered(&self) -> Vec<WakeUp> {
        loop {
            let gathered = std::mem::take(&mut *self.gathered.lock().unwrap_or_else(PoisonError::into_inner));
            if !gathered.is_empty() {
                let wake_up = |(awaited, policy)| WakeUp { replica: self.replica, awaited, policy };
                return gathered.into_iter().map(wake_up).collect();
            }
            self.gathering.notified().await;
        }
    }

    async fn listen(&self, wakers: &Wakers) {
        let heard = |heard| match heard {
            Heard::WakeUp(wake_up) if wake_up.replica == self.replica => {}
            Heard::WakeUp(wake_up) => wakers.wake(wake_up.awaited, &wake_up.policy),
            Heard::Gap => wakers.everybody(),
        };
        self.peers.listen(&heard).await;
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use futures::FutureExt as _;
    use tokio::time::Instant;

    use super::*;
    use crate::{buffer::wake::Woken, store::StoreError};

    const HOUR: Duration = Duration::from_hours(1);

    /// Says what it is given.
    struct Says(Mutex<Vec<Heard>>);

    #[async_trait]
    impl Peers for Says {
        async fn tell(&self, _: Vec<WakeUp>) -> Result<(), StoreError> {
            Ok(())
        }

        async fn listen(&self, heard: &(dyn Fn(Heard) + Send + Sync)) {
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
            replicas.gather(Awaited::Batch, &policy("one"));
            replicas.gather(Awaited::Batch, &policy("two"));
            replicas.gather(Awaited::Version, &policy("one"));
        }
        assert_eq!(replicas.gathered().now_or_never().map(|told| told.len()), Some(3));
        assert_eq!(replicas.gathered().now_or_never(), None);
    }

    #[test]
    fn what_gathers_is_bounded() {
        let (_, replicas) = replicas();
        for index in 0..2 * GATHERED_MAX {
            replicas.gather(Awaited::Batch, &policy(&format!("p{index}")));
        }
        assert_eq!(replicas.gathered().now_or_never().map(|told| told.len()), Some(GATHERED_MAX));
    }

    #[tokio::test]
    async fn others_wake_waiters_and_their_own_replica_does_not() {
        let (says, replicas) = replicas();
        let wakers = Wakers::new(HOUR);
        let one = policy("one");
        let waker = wakers.watch(&one);
        let wake_up = |replica, name| Heard::WakeUp(WakeUp { replica, awaited: Awaited::Batch, policy: policy(name) });
        for (heard, woken) in [
            (wake_up(replicas.replica, "one"), None),
            (wake_up(ReplicaId::mint(), "two"), None),
            (wake_up(ReplicaId::mint(), "one"), Some(Woken::Look)),
            (Heard::Gap, Some(Woken::Look)),
        ] {
            says.0.lock().expect("nobody panics").push(heard.clone());
            replicas.listen(&wakers).await;
            let waiting = wakers.wait_for_batch(&waker, Instant::now() + HOUR);
            assert_eq!(waiting.now_or_never(), woken, "{heard:?}");
        }
    }
}
