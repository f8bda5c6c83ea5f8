//! The calls of this process that have been permitted and have not ended. A finish waits for them.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use forebay_domain::ids::SessionId;
use tokio::sync::watch;

#[derive(Debug, Default)]
pub(crate) struct InFlight(Mutex<HashMap<SessionId, Arc<Calls>>>);

#[derive(Debug)]
struct Calls {
    count: watch::Sender<u32>,
    /// Calls that wait for a place.
    waiting: AtomicU32,
    /// Calls that have begun, from which each has its number.
    begun: AtomicU64,
    /// All calls up to this number are cancelled. Calls that begin later are not: a session whose end was refused goes on.
    cancelled: watch::Sender<u64>,
}

/// A call in flight. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Guard {
    session: SessionId,
    number: u64,
    calls: Arc<Calls>,
    all: Arc<InFlight>,
}

impl InFlight {
    /// Counts a call, unless the session has `max` calls in flight.
    pub(super) fn begin(self: &Arc<Self>, session: SessionId, max: u32) -> Option<Guard> {
        let mut sessions = self.sessions();
        let calls = sessions.entry(session).or_insert_with(|| {
            let (count, cancelled) = (watch::Sender::new(0), watch::Sender::new(0));
            Arc::new(Calls { count, waiting: AtomicU32::new(0), begun: AtomicU64::new(0), cancelled })
        });
        if *calls.count.borrow() >= max {
            return None;
        }
        calls.count.send_modify(|count| *count += 1);
        let number = calls.begun.fetch_add(1, Ordering::SeqCst) + 1;
        Some(Guard { session, number, calls: Arc::clone(calls), all: Arc::clone(self) })
    }

    /// Counts a call as soon as the session has fewer than `max` calls in flight, within a time. At most `max` calls of a
    /// session wait, because each of them has a connection, and other sessions need connections too.
    pub(super) async fn wait(self: &Arc<Self>, session: SessionId, max: u32, time: Duration) -> Option<Guard> {
        let Some(calls) = self.sessions().get(&session).cloned() else { return self.begin(session, max) };
        let _waits = Waits::begin(&calls.waiting, max)?;
        let place = async {
            loop {
                if let Some(guard) = self.begin(session, max) {
                    return guard;
                }
                let count = self.sessions().get(&session).map(|calls| calls.count.subscribe());
                if let Some(mut count) = count {
                    // An error means that no call is in flight any more.
                    let _ = count.wait_for(|count| *count < max).await;
                }
            }
        };
        tokio::time::timeout(time, place).await.ok()
    }

    /// Whether a session has calls in flight.
    pub(super) fn has_calls(&self, session: SessionId) -> bool {
        self.sessions().contains_key(&session)
    }

    /// Waits until a session has no calls in flight. Cancels those that are left when the time is over.
    pub(super) async fn settle(&self, session: SessionId, wait: Duration) {
        let Some(calls) = self.sessions().get(&session).cloned() else { return };
        let mut count = calls.count.subscribe();
        let ended = count.wait_for(|count| *count == 0);
        if tokio::time::timeout(wait, ended).await.is_err() {
            calls.cancelled.send_replace(calls.begun.load(Ordering::SeqCst));
        }
    }

    fn sessions(&self) -> std::sync::MutexGuard<'_, HashMap<SessionId, Arc<Calls>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a call that waits, until it is dropped.
struct Waits<'c>(&'c AtomicU32);

impl<'c> Waits<'c> {
    fn begin(waiting: &'c AtomicU32, max: u32) -> Option<Self> {
        let counted =
            waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waits| (waits < max).then_some(waits + 1));
        counted.is_ok().then(|| Self(waiting))
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Guard {
    /// Returns when a finish no longer waits for the call, whose answer will not be recorded.
    pub(super) async fn cancelled(&self) {
        let mut cancelled = self.calls.cancelled.subscribe();
        if cancelled.wait_for(|up_to| *up_to >= self.number).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut sessions = self.all.sessions();
        let mut is_last = false;
        self.calls.count.send_modify(|count| {
            *count -= 1;
            is_last = *count == 0;
        });
        if is_last {
            sessions.remove(&self.session);
        }
    }
}
