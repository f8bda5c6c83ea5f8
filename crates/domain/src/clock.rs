//! Time as an argument: the buffer's decisions use a clock that it is given.
//!
//! It is separate so that tests move the clock instead of sleeping, and so that replicas agree: on Postgres the process
//! clock is anchored to service time (`buffer::service_time`) and carried forward monotonically.

use std::{
    fmt,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A point in time in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Reads RFC 3339 text; none if it is not a time.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        text.parse::<jiff::Timestamp>().ok().map(|time| Self(time.as_microsecond()))
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub fn as_micros(self) -> i64 {
        self.0
    }

    /// Whole seconds since the Unix epoch; 0 for earlier times.
    #[must_use]
    pub fn unix_s(self) -> u64 {
        u64::try_from(self.0.div_euclid(1_000_000)).unwrap_or(0)
    }

    /// This time plus `seconds`, saturating.
    #[must_use]
    pub fn plus_seconds(self, seconds: u64) -> Self {
        let micros = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        Self(self.0.saturating_add(micros))
    }

    /// Microseconds from `earlier` to this time. The number is negative if `earlier` is the later time.
    #[must_use]
    pub fn micros_since(self, earlier: Self) -> i64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Timestamp {
    /// RFC 3339 in UTC with microseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_microsecond(self.0) {
            Ok(time) => write!(f, "{time:.6}"),
            // Only a corrupt row or a saturated deadline is outside the calendar.
            Err(_) => write!(f, "{}us", self.0),
        }
    }
}

/// A source of the current time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The current time. It never goes backwards.
    fn now(&self) -> Timestamp;

    /// Whether the clock adopts the times that [`anchor`](Self::anchor) is given.
    fn is_anchored(&self) -> bool {
        false
    }

    /// Adopts a time that was read elsewhere, for example from the database, as the current time.
    fn anchor(&self, _time: Timestamp) {}
}

/// The process clock: a wall-clock reading carried forward by the monotonic clock.
///
/// If the wall clock jumps, leases neither end early nor come back.
#[derive(Debug)]
pub struct AnchoredClock {
    started: Elapsing,
    /// Wall-clock microseconds at `started`, as last anchored.
    base: AtomicI64,
    /// The latest time returned. It keeps the clock from going backwards after a new anchor.
    latest: AtomicI64,
}

impl AnchoredClock {
    /// A clock anchored to the system's wall clock.
    #[must_use]
    pub fn new() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { started: Elapsing::start(), base: AtomicI64::new(micros(wall)), latest: AtomicI64::new(i64::MIN) }
    }
}

impl Default for AnchoredClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for AnchoredClock {
    fn now(&self) -> Timestamp {
        let now = self.base.load(Ordering::Acquire).saturating_add(micros(self.started.elapsed()));
        let before = self.latest.fetch_max(now, Ordering::AcqRel);
        Timestamp(now.max(before))
    }

    fn is_anchored(&self) -> bool {
        true
    }

    fn anchor(&self, time: Timestamp) {
        self.base.store(time.0.saturating_sub(micros(self.started.elapsed())), Ordering::Release);
    }
}

/// Measures elapsed time independently of the wall clock.
#[derive(Debug)]
struct Elapsing {
    #[cfg(target_os = "linux")]
    boot: rustix::time::Timespec,
    #[cfg(not(target_os = "linux"))]
    started: std::time::Instant,
}

/// This uses the boot-time clock, because the monotonic clock of Linux stops while the machine is suspended.
#[cfg(target_os = "linux")]
impl Elapsing {
    fn start() -> Self {
        Self { boot: rustix::time::clock_gettime(rustix::time::ClockId::Boottime) }
    }

    fn elapsed(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = Duration::from_secs(u64::try_from(now.tv_sec - self.boot.tv_sec).unwrap_or(0));
        let nanos = now.tv_nsec - self.boot.tv_nsec;
        let part = Duration::from_nanos(nanos.unsigned_abs());
        if nanos < 0 { seconds.saturating_sub(part) } else { seconds + part }
    }
}

#[cfg(not(target_os = "linux"))]
impl Elapsing {
    fn start() -> Self {
        Self { started: std::time::Instant::now() }
    }

    fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_anchor_never_goes_back_in_time() {
        let clock = AnchoredClock::new();
        let before = clock.now();
        clock.anchor(Timestamp::from_micros(before.as_micros() - 3_600_000_000));
        assert!(clock.now() >= before);
        clock.anchor(before.plus_seconds(3600));
        assert!(clock.now() >= before.plus_seconds(3600));
    }

    #[test]
    fn timestamps_are_read_as_they_are_printed() {
        let time = Timestamp::from_micros(1_753_000_000_123_456);
        assert_eq!(Timestamp::parse(&time.to_string()), Some(time));
        assert_eq!(Timestamp::parse("2025-07-20T08:26:40.123Z"), Some(Timestamp::from_micros(1_753_000_000_123_000)));
        for not_a_time in ["", "now", "2025-07-20", "1753000000"] {
            assert_eq!(Timestamp::parse(not_a_time), None, "{not_a_time}");
        }
    }

    #[test]
    fn timestamps_print_as_rfc_3339() {
        assert_eq!(Timestamp::from_micros(1_500_000).to_string(), "1970-01-01T00:00:01.500000Z");
    }
}
