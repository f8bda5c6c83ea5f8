//! Byte budgets. All bytes that clients make the service hold are taken from a budget and given back when they are
//! dropped.
//!
//! [`arriving`] takes bytes for bodies while they arrive, and [`collected`] holds them. The bodies of clients, the
//! pages of samples and the answers of engines each have a budget of their own, so that none uses up what another
//! needs.

pub mod arriving;
pub mod collected;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use prometheus::IntGauge;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Bytes per permit. A semaphore can count at least 2^29 permits.
const PERMIT_BYTES: usize = 1 << 10;

/// Responses up to this length take nothing from a budget. The number of connections bounds them, and acks, heartbeats
/// and probes are answered even if a budget is used up.
pub const FREE_ANSWER_BYTES: usize = 32 << 10;

/// An owner's bodies may hold this many times the bytes that are free, if the body that grows is large. A single owner
/// gets three quarters of a budget, two get three sevenths each, and the next one always finds free bytes.
const LARGE_OF_FREE: usize = 3;

/// The same if the body that grows is small, so that an owner's small bodies find room behind its large ones.
const SMALL_OF_FREE: usize = 7;

/// The most large bodies of one owner that arrive at the same time. If more of them grow together, most have to yield in the
/// end, and what they sent was for nothing.
const ARRIVING_MAX: usize = 64;

/// The budget has too few free bytes, or the owner of a body has its share of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Whose bodies share a part of a budget: a key, a session, or all callers without a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner(Arc<str>);

impl Owner {
    /// The key or session with this id.
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// All callers without a key.
    pub fn of_keyless() -> Self {
        Self("".into())
    }
}

/// A budget of bytes.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    permits: Arc<Semaphore>,
    permits_max: usize,
    in_flight: Option<IntGauge>,
    bodies: Mutex<Bodies>,
    released: Notify,
}

/// What bodies hold of a budget.
#[derive(Debug, Default)]
struct Bodies {
    by_owner: HashMap<Owner, usize>,
    /// Bytes of bodies that wait for more bytes.
    waiting: usize,
    /// The turns of large bodies to arrive, which are given in the order of the requests.
    turns: HashMap<Owner, Arc<Semaphore>>,
}

/// The body that takes bytes.
#[derive(Debug)]
struct Taker {
    /// None if no other body is taken into account.
    owner: Option<Owner>,
    is_large: bool,
    /// The bytes that the body has taken.
    held: usize,
}

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Self::with_gauge(bytes, None)
    }

    /// A budget whose bytes in use are a metric.
    pub fn counted(bytes: usize, in_flight: IntGauge) -> Self {
        Self::with_gauge(bytes, Some(in_flight))
    }

    fn with_gauge(bytes: usize, in_flight: Option<IntGauge>) -> Self {
        let permits_max = bytes.div_ceil(PERMIT_BYTES).min(Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        let permits = Arc::new(Semaphore::new(permits_max));
        Self(Arc::new(Inner { permits, permits_max, in_flight, bodies: Mutex::default(), released: Notify::new() }))
    }

    /// The whole budget.
    pub fn bytes(&self) -> usize {
        self.0.permits_max * PERMIT_BYTES
    }

    /// Takes bytes, or fails immediately. Waiting would only queue more requests in memory.
    pub fn take(&self, bytes: usize) -> Result<Share, Full> {
        self.take_for(None, bytes)
    }

    fn take_for(&self, owner: Option<Owner>, bytes: usize) -> Result<Share, Full> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.0.permits).try_acquire_many_owned(permits).map_err(|_| Full)?;
        Ok(Share::new(self, Some(permit), permits as usize * PERMIT_BYTES, owner))
    }

    /// Waits until the bytes are available and takes them. A request for more than the whole budget gets all of it.
    ///
    /// Requests are served in order. No task waits here while it holds bytes that only it can give back, so there is no
    /// deadlock.
    pub async fn wait_for(&self, bytes: usize) -> Share {
        let permits = bytes.div_ceil(PERMIT_BYTES).min(self.0.permits_max);
        let permit = Arc::clone(&self.0.permits).acquire_many_owned(permits as u32).await;
        let permit = permit.expect("the semaphore is never closed");
        Share::new(self, Some(permit), permits * PERMIT_BYTES, None)
    }

    /// Like [`wait_for`](Self::wait_for), but fails after `limit`.
    pub async fn wait_at_most(&self, limit: Duration, bytes: usize) -> Result<Share, Full> {
        tokio::time::timeout(limit, self.wait_for(bytes)).await.map_err(|_| Full)
    }

    /// A share that counts in the gauge but takes nothing from the budget. Something else must bound such bytes.
    fn free(&self, bytes: usize) -> Share {
        Share::new(self, None, bytes, None)
    }

    /// Takes bytes for a body, and waits for them for at most `patience`.
    ///
    /// Bodies wait here although they hold bytes. They do not wait for each other: if all bytes that are in use are those
    /// of bodies that wait, the body that finds this out fails and gives its bytes back.
    async fn grow(&self, taker: &Taker, bytes: usize, patience: Duration) -> Result<Share, Full> {
        self.wait_until(taker, patience, |bodies| self.take_within(bodies, taker, bytes)).await
    }

    /// Takes more bytes for an owner's call that holds bytes of its body, as [`grow`](Self::grow) does.
    pub async fn take_more(&self, owner: Owner, held: usize, bytes: usize, patience: Duration) -> Result<Share, Full> {
        self.grow(&Taker { owner: Some(owner), is_large: false, held }, bytes, patience).await
    }

    /// Waits until a body could take bytes, for at most `patience`, and takes none. A large body counts as one that arrives
    /// until the result is dropped.
    async fn wait_for_room(&self, taker: &Taker, bytes: usize, patience: Duration) -> Result<Arrival, Full> {
        let admitted = async {
            let mut arrival = Arrival { budget: self.clone(), turn: None };
            if let Some(owner) = taker.owner.clone().filter(|_| taker.is_large) {
                let turns = Arc::clone(
                    self.bodies().turns.entry(owner.clone()).or_insert_with(|| Arc::new(Semaphore::new(ARRIVING_MAX))),
                );
                let (_, permit) = arrival.turn.insert((owner, None));
                *permit = Some(turns.acquire_owned().await.map_err(|_| Full)?);
            }
            let has_room = |bodies: &mut Bodies| if self.has_room(bodies, taker, bytes) { Ok(()) } else { Err(Full) };
            self.wait_until(taker, patience, has_room).await.map(|()| arrival)
        };
        tokio::time::timeout(patience, admitted).await.unwrap_or(Err(Full))
    }

    async fn wait_until<T>(
        &self,
        taker: &Taker,
        patience: Duration,
        attempt: impl Fn(&mut Bodies) -> Result<T, Full>,
    ) -> Result<T, Full> {
        let attempts = async {
            loop {
                let mut released = std::pin::pin!(self.0.released.notified());
                // Bytes that are given back after the attempt wake this task.
                released.as_mut().enable();
                let waiting = {
                    let mut bodies = self.bodies();
                    if let Ok(taken) = attempt(&mut bodies) {
                        return Ok(taken);
                    }
                    if taker.held > 0 && self.in_use() <= bodies.waiting + taker.held {
                        return Err(Full);
                    }
                    bodies.waiting += taker.held;
                    Waiting { budget: self, bytes: taker.held }
                };
                released.await;
                drop(waiting);
            }
        };
        tokio::time::timeout(patience, attempts).await.unwrap_or(Err(Full))
    }

    fn take_within(&self, bodies: &mut Bodies, taker: &Taker, bytes: usize) -> Result<Share, Full> {
        if !self.has_room(bodies, taker, bytes) {
            return Err(Full);
        }
        let share = self.take_for(taker.owner.clone(), bytes)?;
        if let Some(owner) = &taker.owner {
            *bodies.by_owner.entry(owner.clone()).or_default() += share.bytes;
        }
        Ok(share)
    }

    fn has_room(&self, bodies: &Bodies, taker: &Taker, bytes: usize) -> bool {
        let bytes = bytes.next_multiple_of(PERMIT_BYTES);
        let Some(free) = self.free_bytes().checked_sub(bytes) else { return false };
        let Some(owner) = &taker.owner else { return true };
        // A body that is alone may have the whole budget, so that the largest one is taken at some time.
        if self.in_use() <= taker.held {
            return true;
        }
        let of_owner = bodies.by_owner.get(owner).copied().unwrap_or_default() + bytes;
        of_owner <= free * if taker.is_large { LARGE_OF_FREE } else { SMALL_OF_FREE }
    }

    fn count(&self, bytes: i64) {
        if let Some(gauge) = &self.0.in_flight {
            gauge.add(bytes);
        }
    }

    fn free_bytes(&self) -> usize {
        self.0.permits.available_permits() * PERMIT_BYTES
    }

    fn in_use(&self) -> usize {
        self.bytes() - self.free_bytes()
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        self.0.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A body that arrives.
#[derive(Debug)]
struct Arrival {
    budget: Budget,
    /// The owner of a large body, and its turn once it has it.
    turn: Option<(Owner, Option<OwnedSemaphorePermit>)>,
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let Some((owner, turn)) = self.turn.take() else { return };
        drop(turn);
        let mut bodies = self.budget.bodies();
        // Turns that are taken or waited for hold the semaphore, too.
        if bodies.turns.get(&owner).is_some_and(|turns| Arc::strong_count(turns) == 1) {
            bodies.turns.remove(&owner);
        }
    }
}

/// The bytes of a body that waits for more.
struct Waiting<'b> {
    budget: &'b Budget,
    bytes: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.budget.bodies().waiting -= self.bytes;
    }
}

/// A share of a budget. It is given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    permit: Option<OwnedSemaphorePermit>,
    bytes: usize,
    budget: Budget,
    owner: Option<Owner>,
}

impl Share {
    fn new(budget: &Budget, permit: Option<OwnedSemaphorePermit>, bytes: usize, owner: Option<Owner>) -> Self {
        budget.count(bytes as i64);
        Self { permit, bytes, budget: budget.clone(), owner }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes what this share lacks of so many bytes, or fails immediately. To wait would hold up others, because this
    /// share has bytes already. It is only for shares without an owner, because it does not
    /// check how much an owner may hold.
    pub fn cover(&mut self, bytes: usize) -> Result<(), Full> {
        let missing = bytes.saturating_sub(self.bytes);
        if missing == 0 {
            return Ok(());
        }
        let mut more = self.budget.take(missing)?;
        let taken = std::mem::take(&mut more.bytes);
        match (&mut self.permit, more.permit.take()) {
            (Some(permit), Some(more)) => permit.merge(more),
            (permit, more) => *permit = more,
        }
        self.bytes += taken;
        Ok(())
    }

    /// Keeps a share for `bytes` and gives back the rest.
    pub fn shrink(&mut self, bytes: usize) {
        let Some(permit) = &mut self.permit else { return };
        let surplus = permit.num_permits().saturating_sub(bytes.div_ceil(PERMIT_BYTES));
        if surplus > 0 {
            let returned = permit.split(surplus);
            self.bytes -= surplus * PERMIT_BYTES;
            self.give_back(returned, surplus * PERMIT_BYTES);
        }
    }

    fn give_back(&self, permit: Option<OwnedSemaphorePermit>, bytes: usize) {
        self.budget.count(-(bytes as i64));
        drop(permit);
        if let Some(owner) = &self.owner {
            let mut bodies = self.budget.bodies();
            if let Some(held) = bodies.by_owner.get_mut(owner) {
                *held -= bytes;
                if *held == 0 {
                    bodies.by_owner.remove(owner);
                }
            }
        }
        self.budget.0.released.notify_waiters();
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let permit = self.permit.take();
        self.give_back(permit, self.bytes);
    }
}

/// Several shares that cover the same data.
#[derive(Debug, Default)]
pub struct Shares(Vec<Share>);

impl Shares {
    pub fn push(&mut self, share: Share) {
        self.0.push(share);
    }

    pub fn bytes(&self) -> usize {
        self.0.iter().map(Share::bytes).sum()
    }

    /// Keeps a share for `bytes` and gives back the rest.
    pub fn shrink(&mut self, bytes: usize) {
        let mut left = bytes;
        for share in &mut self.0 {
            share.shrink(left);
            left = left.saturating_sub(share.bytes);
        }
        self.0.retain(|share| share.bytes > 0);
    }
}

/// Bytes with their shares of a budget, which are given back when the last reference to the bytes is dropped.
struct PaidBytes<S> {
    bytes: Bytes,
    _shares: S,
}

impl<S> AsRef<[u8]> for PaidBytes<S> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Attaches shares to bytes until they are dropped. hyper drops them when they are written or the connection ends.
pub fn paid<S: Send + 'static>(bytes: Bytes, shares: S) -> Bytes {
    Bytes::from_owner(PaidBytes { bytes, _shares: shares })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn budget(bytes: usize) -> (Budget, IntGauge) {
        let gauge = IntGauge::new("bytes", "bytes").expect("the name is valid");
        (Budget::counted(bytes, gauge.clone()), gauge)
    }

    /// A body that has taken nothing yet.
    fn body(owner: &str, is_large: bool) -> Taker {
        Taker { owner: Some(Owner::new(owner)), is_large, held: 0 }
    }

    impl Taker {
        /// Takes bytes without waiting.
        fn grow(&mut self, budget: &Budget, bytes: usize) -> Option<Share> {
            let share = budget.take_within(&mut budget.bodies(), self, bytes).ok()?;
            self.held += share.bytes();
            Some(share)
        }
    }

    #[test]
    fn what_is_taken_is_counted_until_it_is_given_back() {
        let (budget, gauge) = budget(8 << 10);
        let mut share = budget.take(5_000).expect("there is room");
        assert_eq!((share.bytes(), gauge.get()), (5 << 10, 5 << 10));
        assert!(budget.take(4 << 10).is_err(), "only 3 KiB are left");
        share.shrink(1);
        assert_eq!((share.bytes(), gauge.get()), (1 << 10, 1 << 10));
        let bytes = paid(Bytes::from_static(b"sent in two parts"), share);
        let rest = bytes.slice(5..);
        drop(bytes);
        assert_eq!(gauge.get(), 1 << 10, "a part of the bytes is still held");
        drop(rest);
        assert_eq!(gauge.get(), 0);
        budget.take(8 << 10).expect("everything came back");
    }

    #[test]
    fn a_share_grows_while_there_is_room() {
        let (budget, gauge) = budget(8 << 10);
        let other = budget.take(1 << 10).expect("there is room");
        let mut share = budget.take(5 << 10).expect("there is room");
        assert_eq!(share.cover(8 << 10), Err(Full));
        assert_eq!((share.cover(1 << 10), share.bytes()), (Ok(()), 5 << 10), "it has more than that");
        assert_eq!((share.cover((6 << 10) + 1), share.bytes(), gauge.get()), (Ok(()), 7 << 10, 8 << 10));
        drop((share, other));
        budget.take(8 << 10).expect("everything came back");
    }

    #[test]
    fn several_shares_shrink_together() {
        let (budget, gauge) = budget(64 << 10);
        let mut shares = Shares::default();
        for _ in 0..4 {
            shares.push(budget.take(4 << 10).expect("there is room"));
        }
        shares.shrink(6 << 10);
        assert_eq!((shares.bytes(), gauge.get()), (6 << 10, 6 << 10));
    }

    #[test]
    fn who_wants_more_than_there_is_gets_all_of_it_and_others_wait_in_order() {
        let (budget, _) = budget(8 << 10);
        let all = budget.wait_for(usize::MAX >> 1).now_or_never().expect("nobody holds anything");
        assert_eq!(all.bytes(), 8 << 10);
        let mut first = Box::pin(budget.wait_for(8 << 10));
        let mut second = Box::pin(budget.wait_for(1));
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        drop(all);
        assert!((&mut second).now_or_never().is_none(), "a small request does not pass a large one");
        drop((&mut first).now_or_never().expect("it is the first in line"));
        assert!((&mut second).now_or_never().is_some());
    }

    #[test]
    fn one_owner_leaves_a_part_to_the_next_and_large_bodies_leave_a_part_to_small_ones() {
        let (budget, gauge) = budget(64 << 10);
        let mut shares = Vec::new();
        let mut fill = |owner: &str, is_large: bool| {
            let mut sum = 0;
            // Each of the bodies is one KiB, so that none of them is alone.
            while let Some(share) = body(owner, is_large).grow(&budget, 1 << 10) {
                sum += share.bytes() >> 10;
                shares.push(share);
            }
            sum
        };
        assert_eq!(fill("first", true), 48, "three quarters of the budget");
        assert_eq!(fill("first", false), 8, "seven eighths of the budget with the small ones");
        assert_eq!(fill("second", true), 6, "three quarters of the rest");
        assert_eq!(fill("first", true), 0);
        shares.clear();
        assert_eq!(gauge.get(), 0);
        assert!(budget.bodies().by_owner.is_empty(), "owners without bodies are forgotten");
    }

    #[test]
    fn a_body_that_is_alone_may_have_the_whole_budget() {
        let (budget, _) = budget(8 << 10);
        let mut alone = body("first", true);
        let _half = alone.grow(&budget, 4 << 10).expect("it is alone");
        let _rest = alone.grow(&budget, 4 << 10).expect("it is still alone");
        assert!(body("second", false).grow(&budget, 1).is_none());
    }

    #[tokio::test]
    async fn large_bodies_of_one_owner_that_arrive_at_the_same_time_are_bounded() {
        let (budget, _) = budget(8 << 10);
        let (large, small, other) = (body("first", true), body("first", false), body("second", true));
        let hour = Duration::from_hours(1);
        let mut arriving = Vec::new();
        for _ in 0..ARRIVING_MAX {
            arriving.push(budget.wait_for_room(&large, 1 << 10, hour).await.expect("there is room"));
        }
        let mut next = Box::pin(budget.wait_for_room(&large, 1 << 10, hour));
        assert!((&mut next).now_or_never().is_none());
        for admitted in [&small, &other] {
            budget.wait_for_room(admitted, 1 << 10, Duration::ZERO).await.expect("it does not count");
        }
        arriving.pop();
        arriving.push((&mut next).now_or_never().expect("one of them is read").expect("there is room"));
        // One that no longer waits leaves nothing either.
        let mut gone = Box::pin(budget.wait_for_room(&large, 1 << 10, hour));
        assert!((&mut gone).now_or_never().is_none());
        arriving.clear();
        drop(gone);
        assert!(budget.bodies().turns.is_empty(), "owners without bodies are forgotten");
    }

    #[tokio::test]
    async fn of_bodies_that_wait_for_each_other_one_yields() {
        let (budget, gauge) = budget(8 << 10);
        let (mut first, mut second) = (body("first", true), body("second", true));
        let of_first = first.grow(&budget, 3 << 10).expect("there is room");
        let _of_second = second.grow(&budget, 2 << 10).expect("there is room");
        let whole = budget.take(3 << 10).expect("there is room");
        let hour = Duration::from_hours(1);
        let mut first_waits = Box::pin(budget.grow(&first, 5 << 10, hour));
        let mut second_waits = Box::pin(budget.grow(&second, 4 << 10, hour));
        assert!((&mut first_waits).now_or_never().is_none() && (&mut second_waits).now_or_never().is_none());
        drop(whole);
        // Nobody but the two holds bytes now, and neither has room.
        assert_eq!((&mut first_waits).now_or_never().map(Result::err), Some(Some(Full)));
        assert!((&mut second_waits).now_or_never().is_none(), "the first one gives its bytes back");
        drop(of_first);
        let more = (&mut second_waits).now_or_never().expect("it goes on").expect("it has room");
        assert_eq!((more.bytes(), gauge.get(), budget.bodies().waiting), (4 << 10, 6 << 10, 0));
        assert!(budget.grow(&second, 8 << 10, Duration::ZERO).await.is_err(), "there is no time to wait");
    }
}
