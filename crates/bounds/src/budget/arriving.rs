//! Bodies while they arrive: they take bytes from a budget as these come, so that a client that announces much and sends
//! little holds little. They have to come at a least rate.

use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use crate::budget::{
    Arrival, Budget, Full, Owner, Shares, Taker,
    collected::{Collected, NoMemory},
};

/// A body up to this length is small.
const SMALL_BYTES_MAX: usize = 256 << 10;

/// In every span of this time, [`LEAST_BYTES`] of a body must arrive, or its end. A body that stalls for longer would keep
/// the bytes that it has from others.
const LEAST_TIME: Duration = Duration::from_secs(10);

/// See [`LEAST_TIME`].
const LEAST_BYTES: usize = 64 << 10;

/// Limits of one body.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes.
    pub bytes_max: usize,
    /// The time for all of it to arrive.
    pub timeout: Duration,
    /// How long it waits for its turn, before any of it is in memory.
    pub turn: Duration,
    /// How long it waits for bytes of the budget each time, when some of it is in memory.
    pub patience: Duration,
}

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// It has more bytes than it may have.
    TooLarge,
    /// The budget has no room for it.
    Full,
    /// The system has no memory for it.
    NoMemory,
    /// It broke off.
    Incomplete,
    /// It did not arrive whole in the time that a body has.
    Late(Duration),
    /// It arrived at less than the least rate.
    Slow,
}

impl From<Full> for Unread {
    fn from(Full: Full) -> Self {
        Self::Full
    }
}

impl From<NoMemory> for Unread {
    fn from(NoMemory: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl Unread {
    /// What a client is told that sent a body too slowly.
    pub fn too_slow(self) -> Option<String> {
        match self {
            Self::Late(time) => Some(format!("did not arrive within {} s", time.as_secs())),
            Self::Slow => {
                Some(format!("arrived too slowly: less than {LEAST_BYTES} bytes in {} s", LEAST_TIME.as_secs()))
            }
            Self::TooLarge | Self::Full | Self::NoMemory | Self::Incomplete => None,
        }
    }
}

/// A body that arrives.
pub struct Arriving {
    budget: Budget,
    limits: Limits,
    announced: Option<usize>,
    taker: Taker,
    /// Counts the body until it is read.
    arrival: Option<Arrival>,
    shares: Shares,
    /// The bytes that are paid for, with those that are free.
    paid: usize,
}

impl Arriving {
    /// A body whose bytes are taken from a budget. Without an owner it may take all that is free.
    pub fn new(budget: &Budget, owner: Option<Owner>, announced: Option<usize>, limits: Limits) -> Self {
        let taker = Taker { owner, is_large: announced.is_some_and(|bytes| bytes > SMALL_BYTES_MAX), held: 0 };
        Self { budget: budget.clone(), limits, announced, taker, arrival: None, shares: Shares::default(), paid: 0 }
    }

    /// Adds bytes that do not count against the budget.
    #[must_use]
    pub fn with_free(mut self, bytes: usize) -> Self {
        self.shares.push(self.budget.free(bytes));
        self.paid += bytes;
        self
    }

    /// Checks what is announced: the limit, and whether there would be room for it. Nothing is taken yet.
    pub async fn admit(&mut self) -> Result<(), Unread> {
        let announced = self.announced.unwrap_or_default();
        if announced > self.limits.bytes_max {
            return Err(Unread::TooLarge);
        }
        self.arrival = Some(self.budget.wait_for_room(&self.taker, announced, self.limits.turn).await?);
        Ok(())
    }

    /// Reads the body, and takes bytes from the budget as they arrive.
    pub async fn read(mut self, body: &mut (impl Body<Data = Bytes> + Unpin)) -> Result<(Bytes, Shares), Unread> {
        let mut pace = Pace::new(Instant::now(), self.limits.timeout);
        let length = self.announced.unwrap_or(self.limits.bytes_max);
        let mut collected = Collected::new(length);
        loop {
            let Some(data) = pace.frame(body).await? else { break };
            let needed = collected.length() + data.len();
            if needed > self.limits.bytes_max {
                return Err(Unread::TooLarge);
            }
            if self.paid < needed {
                // The budget pays for what the buffer may hold before more is taken, not only for its contents.
                let capacity = self.next_capacity(self.paid, needed);
                let began = Instant::now();
                self.cover(capacity).await?;
                pace.pause(began.elapsed());
            }
            collected.reserve(self.paid)?;
            collected.extend(&data);
        }
        self.shares.shrink(collected.length());
        Ok((collected.into_bytes(), self.shares))
    }

    /// The body in parts, so that one of any length is never held as a whole.
    pub fn in_parts(self) -> InParts {
        let pace = Pace::new(Instant::now(), self.limits.timeout);
        InParts { arriving: self, pace, left: Bytes::new(), handed_over: Instant::now() }
    }

    /// A capacity that has room for what has arrived. It doubles, up to the length that is announced.
    fn next_capacity(&self, capacity: usize, needed: usize) -> usize {
        let length = self.announced.unwrap_or(self.limits.bytes_max);
        needed.max((2 * capacity).min(length))
    }

    /// Takes bytes from the budget until they cover this many.
    async fn cover(&mut self, bytes: usize) -> Result<(), Unread> {
        let missing = bytes.saturating_sub(self.paid);
        if missing > 0 {
            self.taker.is_large |= bytes > SMALL_BYTES_MAX;
            let share = self.budget.grow(&self.taker, missing, self.limits.patience).await?;
            self.taker.held += share.bytes();
            self.paid += share.bytes();
            self.shares.push(share);
        }
        Ok(())
    }
}

/// A body that is read in parts.
pub struct InParts {
    arriving: Arriving,
    pace: Pace,
    /// What arrived with the last part and belongs to the next one.
    left: Bytes,
    /// When the last part was complete. What passes until the next one is asked for is not the client's time.
    handed_over: Instant,
}

impl InParts {
    /// Reads the next part, which has shares of its own. It is shorter only at the end of the body, where it may be empty.
    pub async fn next(
        &mut self,
        body: &mut (impl Body<Data = Bytes> + Unpin),
        bytes: usize,
    ) -> Result<(Bytes, Shares), Unread> {
        self.pace.pause(self.handed_over.elapsed());
        let mut collected = Collected::new(bytes);
        let (mut shares, mut paid) = (Shares::default(), 0);
        // Earlier parts are on their way to the store, and wait for no bytes.
        self.arriving.taker.held = 0;
        self.arriving.taker.is_large = bytes > SMALL_BYTES_MAX;
        while collected.length() < bytes {
            if self.left.is_empty() {
                let Some(data) = self.pace.frame(body).await? else { break };
                self.left = data;
            }
            let data = self.left.split_to(self.left.len().min(bytes - collected.length()));
            let needed = collected.length() + data.len();
            if paid < needed {
                let missing = needed.max((2 * paid).min(bytes)) - paid;
                let began = Instant::now();
                let share =
                    self.arriving.budget.grow(&self.arriving.taker, missing, self.arriving.limits.patience).await?;
                self.pace.pause(began.elapsed());
                paid += share.bytes();
                self.arriving.taker.held = paid;
                shares.push(share);
            }
            collected.reserve(paid)?;
            collected.extend(&data);
        }
        shares.shrink(collected.length());
        self.handed_over = Instant::now();
        Ok((collected.into_bytes(), shares))
    }

    /// Reads bytes and drops them. Returns whether there were as many.
    pub async fn skip(&mut self, body: &mut (impl Body<Data = Bytes> + Unpin), mut bytes: u64) -> Result<bool, Unread> {
        while bytes > 0 {
            if self.left.is_empty() {
                let Some(data) = self.pace.frame(body).await? else { return Ok(false) };
                self.left = data;
            }
            let skipped = self.left.split_to(self.left.len().min(usize::try_from(bytes).unwrap_or(usize::MAX)));
            bytes -= skipped.len() as u64;
        }
        Ok(true)
    }
}

/// How fast a body arrives.
struct Pace {
    timeout: Duration,
    ends: Instant,
    span_ends: Instant,
    /// Bytes that arrived in this span of time.
    bytes: usize,
}

impl Pace {
    fn new(now: Instant, timeout: Duration) -> Self {
        Self { timeout, ends: now + timeout, span_ends: now + LEAST_TIME, bytes: 0 }
    }

    fn arrived(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// Waits for the next bytes of a body; none at its end.
    async fn frame(&mut self, body: &mut (impl Body<Data = Bytes> + Unpin)) -> Result<Option<Bytes>, Unread> {
        loop {
            match tokio::time::timeout_at(self.next_check(), body.frame()).await {
                Ok(Some(frame)) => {
                    let data = frame.map_err(|_| Unread::Incomplete)?.into_data().unwrap_or_default();
                    self.arrived(data.len());
                    return Ok(Some(data));
                }
                Ok(None) => return Ok(None),
                Err(_) => self.check(Instant::now())?,
            }
        }
    }

    fn next_check(&self) -> Instant {
        self.ends.min(self.span_ends)
    }

    fn check(&mut self, now: Instant) -> Result<(), Unread> {
        if now >= self.ends {
            return Err(Unread::Late(self.timeout));
        }
        if now >= self.span_ends {
            if self.bytes < LEAST_BYTES {
                return Err(Unread::Slow);
            }
            (self.bytes, self.span_ends) = (0, now + LEAST_TIME);
        }
        Ok(())
    }

    /// Adds the time that the body waited for the budget, which is not the client's.
    fn pause(&mut self, time: Duration) {
        self.ends += time;
        self.span_ends += time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_body_must_arrive_at_a_least_rate_and_within_its_time() {
        let start = Instant::now();
        let mut pace = Pace::new(start, 25 * SECOND);
        pace.arrived(LEAST_BYTES);
        assert_eq!(pace.next_check(), start + 10 * SECOND);
        assert_eq!(pace.check(start + 10 * SECOND), Ok(()));
        pace.arrived(LEAST_BYTES - 1);
        assert_eq!(pace.check(start + 19 * SECOND), Ok(()), "the span is not over");
        assert_eq!(pace.check(start + 20 * SECOND), Err(Unread::Slow));
        pace.arrived(1);
        assert_eq!(pace.check(start + 20 * SECOND), Ok(()));
        pace.arrived(LEAST_BYTES);
        assert_eq!(pace.next_check(), start + 25 * SECOND);
        assert_eq!(pace.check(start + 25 * SECOND), Err(Unread::Late(25 * SECOND)));
        pace.pause(SECOND);
        assert_eq!(pace.check(start + 25 * SECOND), Ok(()), "the service made it wait");
    }

    #[test]
    fn a_body_takes_at_most_twice_what_has_arrived_and_never_more_than_it_announced() {
        let budget = Budget::new(1 << 20);
        let limits = Limits { bytes_max: 100_000, timeout: SECOND, turn: Duration::ZERO, patience: Duration::ZERO };
        let announced = Arriving::new(&budget, None, Some(30_000), limits);
        let capacity = |capacity, needed| announced.next_capacity(capacity, needed);
        assert_eq!((capacity(0, 1), capacity(8_000, 8_001), capacity(16_000, 17_000)), (1, 16_000, 30_000));
        let chunked = Arriving::new(&budget, None, None, limits);
        assert_eq!((chunked.next_capacity(40_000, 40_001), chunked.next_capacity(80_000, 80_001)), (80_000, 100_000));
    }

    #[tokio::test]
    async fn a_body_for_which_the_system_has_no_memory_is_refused() {
        let gauge = prometheus::IntGauge::new("bytes", "bytes").expect("the name is valid");
        let budget = Budget::counted(1 << 20, gauge.clone());
        let announced = isize::MAX as usize;
        let limits = Limits { bytes_max: announced, timeout: SECOND, turn: Duration::ZERO, patience: Duration::ZERO };
        let mut body = http_body_util::Full::new(Bytes::from(vec![b' '; 2 * SMALL_BYTES_MAX]));
        let read = Arriving::new(&budget, None, Some(announced), limits).read(&mut body).await;
        assert_eq!((read.err(), gauge.get()), (Some(Unread::NoMemory), 0));
    }
}
