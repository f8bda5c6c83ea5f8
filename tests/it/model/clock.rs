//! The clock of a replica in the model: the history's time, and the replica's idea of it.
//!
//! This is separate because the database has its own clock, which the history moves by hours. Such steps must have no
//! visible effect.

use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use forebay_domain::clock::{Clock, Timestamp};

/// How far the database's real clock may run ahead while a history stands still. Steps of the history are hours long.
const REAL_TIME_US: i64 = 600_000_000;

/// The clock of one replica.
#[derive(Debug)]
pub(crate) struct ModelClock {
    /// Time in the history.
    true_us: AtomicI64,
    /// The replica's error.
    error_us: AtomicI64,
}

impl ModelClock {
    /// A clock without error, at the time of the machine.
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the machine's clock is set");
        Self { true_us: AtomicI64::new(now.as_secs() as i64 * 1_000_000), error_us: AtomicI64::new(0) }
    }

    /// The clock of a replica that starts, before it has asked the database.
    pub(crate) fn restarted(&self, error_us: i64) -> Self {
        Self { true_us: AtomicI64::new(self.true_us.load(Ordering::SeqCst)), error_us: AtomicI64::new(error_us) }
    }

    pub(crate) fn advance_s(&self, seconds: i64) {
        self.true_us.fetch_add(seconds * 1_000_000, Ordering::SeqCst);
    }
}

impl Clock for ModelClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.true_us.load(Ordering::SeqCst) + self.error_us.load(Ordering::SeqCst))
    }

    fn is_anchored(&self) -> bool {
        true
    }

    fn anchor(&self, time: Timestamp) {
        let error_us = time.as_micros() - self.true_us.load(Ordering::SeqCst);
        let error_us = if error_us.abs() <= REAL_TIME_US { 0 } else { error_us };
        self.error_us.store(error_us, Ordering::SeqCst);
    }
}
