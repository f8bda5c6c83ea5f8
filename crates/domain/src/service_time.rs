//! Service time: the clock that replicas share.

use crate::clock::Timestamp;

/// A request to replace the offset of service time.
#[derive(Clone, Copy, Debug)]
pub struct CorrectClock {
    /// The offset that is replaced.
    pub from_us: i64,
    /// The offset that replaces it.
    pub to_us: i64,
    /// The time that the service has reached.
    pub now: Timestamp,
}

/// A reading of the clock that replicas share.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockReading {
    /// The database's clock; none if the database belongs to one process.
    pub database: Option<Timestamp>,
    /// The offset that is added to it.
    pub offset_us: i64,
    /// A time that the service has reached; none before the first mark.
    pub latest: Option<Timestamp>,
    /// Number of the last question of a starting replica.
    pub asked: i64,
    /// Number of the last question that a running replica has answered.
    pub answered: i64,
}

impl ClockReading {
    /// Service time by the database's clock.
    #[must_use]
    pub fn time(&self) -> Option<Timestamp> {
        let database = self.database?;
        Some(Timestamp::from_micros(database.as_micros().saturating_add(self.offset_us)))
    }
}
