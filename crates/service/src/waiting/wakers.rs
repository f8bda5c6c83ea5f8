//! Waking: requests that wait for a batch, a version or work for scorers are woken when it may be available.
//!
//! A waiter registers before it checks, so an event between the check and the wait is not lost. Events at other
//! replicas arrive through [`replicas`](crate::waiting::replicas). Because these notifications can be lost, one waiter of
//! each policy also polls for all: by default every 500 ms, and seldom while notifications arrive.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Deref,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use forebay_domain::{ids::PolicyName, peers::Awaited};
use tokio::{sync::Notify, time::Instant};

/// Random factor of the poll interval, so that policies and replicas do not all poll at once.
const POLL_JITTER: std::ops::Range<f64> = 0.7..1.3;

/// The least poll interval while this replica receives notifications. It is the longest delay after a notification that
/// was lost although the connection looked sound.
const NOTIFIED_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The waiters of all policies.
#[derive(Debug)]
pub(crate) struct Wakers {
    poll_interval: Duration,
    /// Whether notifications of other replicas arrive.
    is_notified: AtomicBool,
    /// Policies that have a [`Watch`]. Dropping the last watch of a policy removes its entry. Watches are cloned only
    /// under this lock, so the count of references shows which watch is the last.
    by_policy: Mutex<HashMap<PolicyName, Arc<Waker>>>,
    /// Ends all waits when the service stops.
    closing: Notify,
    closed: AtomicBool,
}

/// The waiters of one policy.
#[derive(Debug, Default)]
pub(crate) struct Waker {
    batches: Line,
    versions: Line,
    /// Scorers, by the names of the scores that they can give.
    work: Mutex<BTreeMap<Vec<String>, Arc<WorkLine>>>,
    /// One claim at a time: a second one would only wait for the lock on the policy's row.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

/// The scorers that wait for the same work.
#[derive(Debug)]
struct WorkLine {
    line: Line,
    /// A claim takes one permit while it runs, or all of them.
    turns: tokio::sync::Semaphore,
}

/// Claims of a line that run at the same time, where one writer runs them one after the other and commits them together.
const CLAIMS_AT_ONCE: usize = 32;

impl Default for WorkLine {
    fn default() -> Self {
        Self { line: Line::default(), turns: tokio::sync::Semaphore::new(CLAIMS_AT_ONCE) }
    }
}

/// The waiters of one policy for the same thing.
#[derive(Debug, Default)]
struct Line {
    notify: Notify,
    /// When one of them last polled.
    polled_at: Mutex<Option<Instant>>,
}

impl Waker {
    /// Work may be there: wakes one scorer of each line, because any of them may be able to do it.
    fn wake_scorers(&self) {
        for line in self.work.lock().unwrap_or_else(PoisonError::into_inner).values() {
            line.line.notify.notify_one();
        }
    }
}

impl Line {
    /// Whether a waiter polls now, and not another one did a short while ago. 2,000 waiters that each polled took a
    /// sixth of a core of an idle database, although what one of them finds wakes the others.
    fn is_turn_to_poll(&self, now: Instant, interval: Duration) -> bool {
        let mut polled_at = self.polled_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_turn = polled_at.is_none_or(|at| now.duration_since(at) >= interval.mul_f64(POLL_JITTER.start));
        if is_turn {
            *polled_at = Some(now);
        }
        is_turn
    }
}

/// A reference to the waiters of a policy, held while a request checks or waits.
#[derive(Debug)]
pub(crate) struct Watch<'w> {
    wakers: &'w Wakers,
    policy: &'w PolicyName,
    waker: Arc<Waker>,
}

impl Watch<'_> {
    /// Wakes the next waiter for a batch when it is dropped, unless it was [kept](PassOn::keep).
    pub(crate) fn pass_on(&self) -> PassOn<'_> {
        PassOn { line: &self.waker.batches, kept: false }
    }
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
        // One reference is this watch's, and one is the map's.
        if Arc::strong_count(&self.waker) == 2 {
            by_policy.remove(self.policy);
        }
    }
}

/// A reference to the scorers that wait for the same work, held while a request checks or waits.
#[derive(Debug)]
pub(crate) struct WorkWatch<'w> {
    watch: Watch<'w>,
    names: &'w Vec<String>,
    line: Arc<WorkLine>,
}

impl Drop for WorkWatch<'_> {
    fn drop(&mut self) {
        let mut work = self.watch.work.lock().unwrap_or_else(PoisonError::into_inner);
        // One reference is this watch's, and one is the map's.
        if Arc::strong_count(&self.line) == 2 {
            work.remove(self.names);
        }
    }
}

impl WorkWatch<'_> {
    /// Waits until few other requests of the line claim work, or none if this one must be alone. A database that runs both
    /// transactions at once would show the second neither what the first leases nor what it only looks at. Requests have their
    /// turns in the order in which they came.
    pub(crate) async fn turn(&self, alone: bool) -> tokio::sync::SemaphorePermit<'_> {
        let places = if alone { CLAIMS_AT_ONCE } else { 1 };
        self.line.turns.acquire_many(places as u32).await.expect("nobody closes it")
    }

    /// Wakes the next waiter when it is dropped, unless it was [kept](PassOn::keep).
    pub(crate) fn pass_on(&self) -> PassOn<'_> {
        PassOn { line: &self.line.line, kept: false }
    }

    pub(crate) async fn wait(&self, deadline: Instant) -> Woken {
        let line = &self.line.line;
        self.watch.wakers.wait(line, line.notify.notified(), Event::Announced, deadline).await
    }
}

/// A wake-up of one waiter of a line. If the request that took it is dropped before it checks, the next waiter is woken
/// instead.
#[derive(Debug)]
pub(crate) struct PassOn<'w> {
    line: &'w Line,
    kept: bool,
}

impl PassOn<'_> {
    /// Keeps the wake-up, because the request that took it has checked.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for PassOn<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.line.notify.notify_one();
        }
    }
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// One that wakes it: a batch by the rules may be ready, or the version changed.
    Announced,
    /// One that nothing announces: a batch of another size may be ready, or a rollout that is waited for may have ended.
    Unannounced,
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// Something may have happened: check again.
    Recheck,
    /// Nothing announced anything, and it is this waiter's turn to check for all of its line.
    Poll,
    /// The time is over, or the service stops: check a last time.
    DeadlinePassed,
}

impl Wakers {
    /// Starts without waiters. When nothing wakes waiters, they poll at this interval, on average.
    pub(crate) fn new(poll_interval: Duration) -> Self {
        Self {
            poll_interval,
            is_notified: false.into(),
            by_policy: Mutex::default(),
            closing: Notify::new(),
            closed: false.into(),
        }
    }

    /// Notes whether notifications of other replicas arrive from now on. Either way, some may have been lost before.
    pub(crate) fn notified(&self, is_notified: bool) {
        self.is_notified.store(is_notified, Ordering::Release);
        self.wake_all();
    }

    /// The waiters of a policy. Events from now on wake this watch, too.
    pub(crate) fn watch<'w>(&'w self, policy: &'w PolicyName) -> Watch<'w> {
        let mut by_policy = self.by_policy.lock().unwrap_or_else(PoisonError::into_inner);
        let waker = Arc::clone(by_policy.entry(policy.clone()).or_default());
        Watch { wakers: self, policy, waker }
    }

    /// The scorers of a policy that wait for work of the same names. Events from now on wake this watch, too.
    pub(crate) fn watch_work<'w>(&'w self, policy: &'w PolicyName, names: &'w Vec<String>) -> WorkWatch<'w> {
        let watch = self.watch(policy);
        let mut work = watch.work.lock().unwrap_or_else(PoisonError::into_inner);
        // Two watches that are dropped at once may both leave their line behind.
        work.retain(|_, line| Arc::strong_count(line) > 1);
        let line = Arc::clone(work.entry(names.clone()).or_default());
        drop(work);
        WorkWatch { watch, names, line }
    }

    fn with_existing(&self, policy: &PolicyName, wake: impl FnOnce(&Waker)) {
        if let Some(waker) = self.by_policy.lock().unwrap_or_else(PoisonError::into_inner).get(policy) {
            wake(waker);
        }
    }

    /// Wakes the waiters for this.
    pub(crate) fn wake(&self, awaited: Awaited, policy: &PolicyName) {
        match awaited {
            Awaited::Batch => self.batch(policy),
            Awaited::Version => self.version(policy),
            Awaited::Work => self.with_existing(policy, Waker::wake_scorers),
        }
    }

    /// Wakes waiters when anything may have happened: all that wait for a version, and the first of each policy that
    /// waits for a batch, or for the same work. The first wakes the next.
    pub(crate) fn wake_all(&self) {
        for waker in self.by_policy.lock().unwrap_or_else(PoisonError::into_inner).values() {
            waker.batches.notify.notify_one();
            waker.versions.notify.notify_waiters();
            waker.wake_scorers();
        }
    }

    /// A batch may be ready: wakes one waiter.
    pub(crate) fn batch(&self, policy: &PolicyName) {
        self.with_existing(policy, |waker| waker.batches.notify.notify_one());
    }

    /// The version changed: wakes all waiters for it.
    fn version(&self, policy: &PolicyName) {
        self.with_existing(policy, |waker| waker.versions.notify.notify_waiters());
    }

    /// Ends all waits.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.closing.notify_waiters();
    }

    pub(crate) async fn wait_for_batch(&self, waker: &Waker, event: Event, deadline: Instant) -> Woken {
        self.wait(&waker.batches, waker.batches.notify.notified(), event, deadline).await
    }

    /// Calls `look` until it answers something or the deadline has passed. A change of the version triggers the next
    /// call.
    pub(crate) async fn until_version<T, E, F>(
        &self,
        waker: &Waker,
        deadline: Instant,
        mut look: impl FnMut() -> F,
    ) -> Result<Option<T>, E>
    where
        F: Future<Output = Result<Option<T>, E>>,
    {
        let mut woken = Woken::Recheck;
        loop {
            let notified = waker.versions.notify.notified();
            tokio::pin!(notified);
            // Registered before the check, because `notify_waiters` wakes only waiters that are already registered.
            notified.as_mut().enable();
            let found = look().await?;
            if found.is_some() && woken != Woken::Recheck {
                // Nothing has announced this change, so the others do not know of it.
                waker.versions.notify.notify_waiters();
            }
            if found.is_some() || woken == Woken::DeadlinePassed {
                return Ok(found);
            }
            woken = self.wait(&waker.versions, notified, Event::Announced, deadline).await;
        }
    }

    /// The mean time between two polls of a waiter.
    fn poll_interval(&self, event: Event) -> Duration {
        match event {
            Event::Announced if self.is_notified.load(Ordering::Acquire) => {
                self.poll_interval.max(NOTIFIED_POLL_INTERVAL)
            }
            Event::Announced | Event::Unannounced => self.poll_interval,
        }
    }

    async fn wait(&self, line: &Line, notified: impl Future<Output = ()>, event: Event, deadline: Instant) -> Woken {
        let closing = self.closing.notified();
        tokio::pin!(closing, notified);
        closing.as_mut().enable();
        if self.closed.load(Ordering::Acquire) {
            return Woken::DeadlinePassed;
        }
        while Instant::now() < deadline {
            let interval = self.poll_interval(event);
            let poll_at = Instant::now() + interval.mul_f64(rand::random_range(POLL_JITTER));
            tokio::select! {
                () = &mut notified => return Woken::Recheck,
                () = &mut closing => break,
                () = tokio::time::sleep_until(deadline.min(poll_at)) => {
                    let now = Instant::now();
                    let polls = event == Event::Unannounced || line.is_turn_to_poll(now, interval);
                    if polls && now < deadline {
                        return Woken::Poll;
                    }
                }
            }
        }
        Woken::DeadlinePassed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_poll_seldom_while_they_are_notified() {
        let (often, never) = (Duration::from_millis(500), Duration::from_hours(1));
        let intervals =
            |wakers: &Wakers| [Event::Announced, Event::Unannounced].map(|event| wakers.poll_interval(event));
        let wakers = Wakers::new(often);
        assert_eq!(intervals(&wakers), [often, often], "no notification has arrived yet");
        wakers.notified(true);
        assert_eq!(intervals(&wakers), [NOTIFIED_POLL_INTERVAL, often]);
        wakers.notified(false);
        assert_eq!(intervals(&wakers), [often, often]);
        let wakers = Wakers::new(never);
        wakers.notified(true);
        assert_eq!(intervals(&wakers), [never, never], "a longer interval of the configuration stays");
    }

    #[test]
    fn one_waiter_polls_for_all_of_a_policy() {
        let line = Line::default();
        let (started, interval) = (Instant::now(), Duration::from_secs(1));
        let polls = |ms| line.is_turn_to_poll(started + Duration::from_millis(ms), interval);
        let turns: Vec<_> = [0, 1, 500, 699, 700, 701, 1_399, 1_400, 9_000, 9_001].map(|ms| (ms, polls(ms))).into();
        let polled: Vec<_> = turns.iter().filter(|(_, is_turn)| *is_turn).map(|(ms, _)| *ms).collect();
        assert_eq!(polled, [0, 700, 1_400, 9_000]);
    }

    #[tokio::test]
    async fn a_version_that_one_waiter_finds_wakes_the_others() {
        let wakers = Wakers::new(Duration::from_hours(1));
        let name = PolicyName::parse("a").expect("a name");
        let waker = wakers.watch(&name);
        let looks = std::cell::Cell::new(0);
        // The first look of each waiter finds nothing, and nothing announces the change after it.
        let look = async || Ok::<_, ()>((looks.replace(looks.get() + 1) >= 3).then_some(()));
        let patient = || wakers.until_version(&waker, Instant::now() + Duration::from_hours(1), look);
        let found = tokio::join!(patient(), patient(), wakers.until_version(&waker, Instant::now(), look));
        assert_eq!((found, looks.get()), ((Ok(Some(())), Ok(Some(())), Ok(Some(()))), 6));
    }

    #[tokio::test]
    async fn one_scorer_of_each_line_is_woken_and_a_line_that_nobody_watches_takes_no_memory() {
        let wakers = Wakers::new(Duration::from_hours(1));
        let name = PolicyName::parse("a").expect("a name");
        let (judge, tests) = (vec!["judge".to_owned()], vec!["judge".to_owned(), "tests".to_owned()]);
        let lines = [&judge, &judge, &tests].map(|names| wakers.watch_work(&name, names));
        let woken = async || {
            let now = Instant::now();
            let waits = lines.each_ref().map(|line| line.wait(now + Duration::from_millis(1)));
            let [one, two, three] = waits;
            let woken = tokio::join!(one, two, three);
            [woken.0, woken.1, woken.2].map(|woken| woken == Woken::Recheck)
        };
        wakers.wake(Awaited::Work, &name);
        let found = woken().await;
        assert_eq!(found.iter().filter(|woken| **woken).count(), 2, "{found:?}");
        assert!(found[2], "the other line has one waiter");
        drop(lines[0].pass_on());
        assert_eq!(woken().await.iter().filter(|woken| **woken).count(), 1, "a request that went passed it on");
        let watch = wakers.watch(&name);
        drop(lines);
        assert!(watch.work.lock().expect("nobody panicked").is_empty());
    }

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
            assert_eq!(entries(), 1, "a watch is left");
            drop(second);
            assert_eq!(entries(), 0);
        }
    }
}
