//! Waking: who waits for a batch or a version is woken by what it waits for, without polling on either side.
//!
//! A waiter is registered before it looks, so nothing that happens in between is lost. What happens at other replicas
//! comes through [`replicas`](super::replicas); a jittered look every half second or so makes up for what got lost there.

use std::{
    collections::HashMap,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use super::{ids::PolicyName, replicas::Awaited};

/// Share of the time between two looks by which they are spread, so that waiters do not look all at once.
const LOOK_JITTER: std::ops::Range<f64> = 0.7..1.3;

/// Waiters of every policy.
#[derive(Debug)]
pub(super) struct Wakers {
    look_every: Duration,
    /// Policies that somebody watches: the last [`Watch`] that ends takes the entry along. Their waiters are shared
    /// under this lock alone, so that it tells who is the last.
    by_policy: Mutex<HashMap<PolicyName, Arc<Waker>>>,
    /// Ends all waits, for shutdown.
    closing: Notify,
    closed: std::sync::atomic::AtomicBool,
}

/// Waiters of one policy.
#[derive(Debug, Default)]
pub(super) struct Waker {
    batches: Notify,
    versions: Notify,
    /// One claim at a time: the others would find the policy's row locked.
    pub(super) turn: tokio::sync::Mutex<()>,
}

/// The waiters of a policy, for as long as somebody looks at it or waits.
#[derive(Debug)]
pub(super) struct Watch<'w> {
    wakers: &'w Wakers,
    policy: &'w PolicyName,
    waker: Arc<Waker>,
}

impl Deref for Watch<'_> {
    type Target = Waker;

    fn deref(&self) -> &Waker {
        &self.waker
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut by_policy = self.wakers.by_policy.lock().unwrap_or_else(PoisonError::into_inner);
        // This one's and the map's.
        if Arc::strong_count(&self.waker) == 2 {
            by_policy.remove(self.policy);
        }
    }
}

/// A wake-up for a batch that somebody has taken and must not be lost with them.
#[derive(Debug)]
pub(super) struct PassOn<'w> {
    wakers: &'w Wakers,
    policy: &'w PolicyName,
    kept: bool,
}

impl PassOn<'_> {
    /// Who took the wake-up has looked.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for PassOn<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.wakers.batch(self.policy);
        }
    }
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// Something may have happened: look again.
    Look,
    /// The time is over, or the service stops: look a last time.
    TimeIsUp,
}

impl Wakers {
    /// Nobody waits yet; who will looks this often without being woken.
    pub(super) fn new(look_every: Duration) -> Self {
        Self { look_every, by_policy: Mutex::default(), closing: Notify::new(), closed: false.into() }
    }

    /// The waiters of a policy. What happens to it from here on wakes who waits with them.
    pub(super) fn watch<'w>(&'w self, policy: &'w PolicyName) -> Watch<'w> {
        let mut by_policy = self.by_policy.lock().unwrap_or_else(PoisonError::into_inner);
        let waker = Arc::clone(by_policy.entry(policy.clone()).or_default());
        Watch { wakers: self, policy, waker }
    }

    fn with_existing(&self, policy: &PolicyName, wake: impl FnOnce(&Waker)) {
        if let Some(waker) = self.by_policy.lock().unwrap_or_else(PoisonError::into_inner).get(policy) {
            wake(waker);
        }
    }

    /// Wakes who waits for this.
    pub(super) fn wake(&self, awaited: Awaited, policy: &PolicyName) {
        match awaited {
            Awaited::Batch => self.batch(policy),
            Awaited::Version => self.version(policy),
        }
    }

    /// Anything may have happened: wakes all who wait for a version, and for batches the first in every line, who wakes
    /// the next.
    pub(super) fn everybody(&self) {
        for waker in self.by_policy.lock().unwrap_or_else(PoisonError::into_inner).values() {
            waker.batches.notify_one();
            waker.versions.notify_waiters();
        }
    }

    /// A batch may be ready: wakes one waiter.
    pub(super) fn batch(&self, policy: &PolicyName) {
        self.with_existing(policy, |waker| waker.batches.notify_one());
    }

    /// Wakes the next waiter when it is dropped, unless it was [kept](PassOn::keep).
    pub(super) fn pass_on<'w>(&'w self, policy: &'w PolicyName) -> PassOn<'w> {
        PassOn { wakers: self, policy, kept: false }
    }

    /// The version changed: wakes all who wait for it.
    fn version(&self, policy: &PolicyName) {
        self.with_existing(policy, |waker| waker.versions.notify_waiters());
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        self.closed.store(true, std::sync::atomic::Ordering::Release);
        self.closing.notify_waiters();
    }

    /// Waits for a batch.
    pub(super) async fn wait_for_batch(&self, waker: &Waker, deadline: Instant) -> Woken {
        self.wait(waker.batches.notified(), deadline).await
    }

    /// Calls `look` until it answers something or the deadline is over; woken by versions.
    pub(super) async fn until_version<T, E, F>(
        &self,
        waker: &Waker,
        deadline: Instant,
        mut look: impl FnMut() -> F,
    ) -> Result<Option<T>, E>
    where
        F: Future<Output = Result<Option<T>, E>>,
    {
        loop {
            let notified = waker.versions.notified();
            tokio::pin!(notified);
            // Registered before looking: `notify_waiters` wakes only who waits already.
            notified.as_mut().enable();
            if let Some(found) = look().await? {
                return Ok(Some(found));
            }
            if self.wait(notified, deadline).await == Woken::TimeIsUp {
                return look().await;
            }
        }
    }

    async fn wait(&self, notified: impl Future<Output = ()>, deadline: Instant) -> Woken {
        let closing = self.closing.notified();
        tokio::pin!(closing);
        closing.as_mut().enable();
        if self.closed.load(std::sync::atomic::Ordering::Acquire) || Instant::now() >= deadline {
            return Woken::TimeIsUp;
        }
        let look_at = Instant::now() + self.look_every.mul_f64(rand::random_range(LOOK_JITTER));
        tokio::select! {
            () = notified => Woken::Look,
            () = closing => Woken::TimeIsUp,
            () = tokio::time::sleep_until(deadline.min(look_at)) => {
                if Instant::now() >= deadline { Woken::TimeIsUp } else { Woken::Look }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_nobody_watches_take_no_memory() {
        let wakers = Wakers::new(Duration::from_secs(1));
        let policies: Vec<_> = (0..300).map(|index| PolicyName::parse(&format!("p{index}")).expect("a name")).collect();
        let entries = || wakers.by_policy.lock().expect("nobody panicked").len();
        for policy in &policies {
            let first = wakers.watch(policy);
            let second = wakers.watch(policy);
            assert!(Arc::ptr_eq(&first.waker, &second.waker), "all wait in one line");
            drop(first);
            wakers.batch(policy);
            wakers.version(policy);
            assert_eq!(entries(), 1, "somebody watches it");
            drop(second);
            assert_eq!(entries(), 0);
        }
    }
}
