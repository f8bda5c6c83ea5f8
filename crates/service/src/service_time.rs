//! Service time: the clock that all replicas share. It never goes back, and it runs at the rate of real time even when
//! the clock of the database is changed.
//!
//! Service time is the database's clock plus an offset. The database stores the offset and the latest time that the
//! service has reached. Each replica advances service time by the clock of its own machine and reads the database's
//! clock once a second. If the two differ, the database's clock was stepped, and the offset is changed so that service
//! time does not step. A replica that starts has no service time of its own to compare with. If the stored time makes
//! the database's clock doubtful, it asks the running replicas first. A process that owns its database uses the clock
//! of its machine, and continues from the latest stored time.

use forebay_store::ops::clock::AskClock;
use std::time::Duration;

use forebay_domain::{
    clock::Timestamp,
    service_time::{ClockReading, CorrectClock},
};
use forebay_store::{error::StoreError, ops::clock::ReadClock};
use tokio::time::Instant;

use crate::Buffer;

/// Pause between two reads of the database's clock. A step is detected, and a question answered, within this time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two writes of the time that was reached. It is written only if anything else was written since.
const MARK_INTERVAL: Duration = Duration::from_secs(10);

/// How far clocks may differ without a step. Replicas follow the database's clock within this tolerance.
const TOLERANCE_US: i64 = 1_000_000;

/// How far the database's clock may be ahead of the last mark before a starting replica doubts it: three mark
/// intervals.
const GAP_US: i64 = 30_000_000;

/// How long a starting replica waits for the answer of a running one: three check intervals.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Pause between two polls of a replica that has asked.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How the database's clock has moved since the last check.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// It advanced as the clock of this machine did.
    Agrees,
    Stepped,
    /// It is ahead, and other replicas have reached that time: this process was suspended.
    Missed,
}

/// Compares a reading with this replica's service time just before and just after it.
fn compare(reading: &ClockReading, time: Timestamp, before: Timestamp, after: Timestamp) -> Found {
    let ahead_us = time.micros_since(after);
    if ahead_us > TOLERANCE_US {
        let reached = reading.latest.is_some_and(|latest| latest.micros_since(after) > TOLERANCE_US);
        return if reached { Found::Missed } else { Found::Stepped };
    }
    if before.micros_since(time) > TOLERANCE_US { Found::Stepped } else { Found::Agrees }
}

/// Whether a starting replica has reason to doubt the database's clock.
fn is_doubtful(reading: &ClockReading, time: Timestamp) -> bool {
    reading.latest.is_some_and(|latest| {
        let ahead_us = time.micros_since(latest);
        !(-TOLERANCE_US..=GAP_US).contains(&ahead_us)
    })
}

/// Sets service time at the start.
pub(crate) async fn start_clock(buffer: &Buffer) -> Result<(), StoreError> {
    if !buffer.clock.is_anchored() {
        return Ok(());
    }
    let reading = buffer.store.read(ReadClock).await?;
    let Some(time) = reading.time() else {
        if let Some(latest) = reading.latest.filter(|latest| *latest > buffer.clock.now()) {
            tracing::warn!(time = %latest, "the machine's clock is behind the latest stored time; service time continues from the stored time");
            buffer.clock.anchor(latest);
        }
        return buffer.store.mark_clock(buffer.clock.now(), None).await;
    };
    let mut reading = if is_doubtful(&reading, time) { ask_replicas(buffer).await? } else { reading };
    loop {
        let Some(time) = reading.time() else { return Ok(()) };
        match reading.latest {
            Some(latest) if latest.micros_since(time) > TOLERANCE_US => {
                if correct(buffer, &reading, time, latest).await? {
                    buffer.clock.anchor(latest);
                    return Ok(());
                }
                reading = buffer.store.read(ReadClock).await?;
            }
            latest => {
                let time = latest.map_or(time, |latest| latest.max(time));
                buffer.clock.anchor(time);
                return buffer.store.mark_clock(buffer.clock.now(), None).await;
            }
        }
    }
}

/// Reads the clock after a running replica has had the time to check it. If none is running, the reading is returned as
/// it is.
async fn ask_replicas(buffer: &Buffer) -> Result<ClockReading, StoreError> {
    let question = buffer.store.write(AskClock).await?;
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let reading = buffer.store.read(ReadClock).await?;
        if reading.answered >= question || Instant::now() >= deadline {
            return Ok(reading);
        }
        tokio::time::sleep(ANSWER_POLL_INTERVAL).await;
    }
}

impl Buffer {
    /// Keeps service time correct until the future is dropped.
    pub async fn run_clock(&self) {
        if !self.clock.is_anchored() {
            return;
        }
        let mut fails = false;
        let mut marked = Instant::now();
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let mut outcome = self.check_clock().await;
            if outcome.is_ok() && marked.elapsed() >= MARK_INTERVAL {
                outcome = self.store.mark_clock(self.clock.now(), None).await;
                marked = Instant::now();
            }
            if let Err(error) = &outcome
                && !fails
            {
                tracing::warn!(error = %error, "the database's clock cannot be read; service time continues by the machine's clock");
            }
            fails = outcome.is_err();
        }
    }

    /// Stores the time that was reached, for the next start.
    pub async fn stop_clock(&self) -> Result<(), StoreError> {
        if self.clock.is_anchored() { self.store.mark_clock(self.clock.now(), None).await } else { Ok(()) }
    }

    /// Checks the database's clock, and answers replicas that have asked for a check.
    pub async fn check_clock(&self) -> Result<(), StoreError> {
        let before = self.clock.now();
        let reading = self.store.read(ReadClock).await?;
        let after = self.clock.now();
        let Some(time) = reading.time() else { return Ok(()) };
        match compare(&reading, time, before, after) {
            Found::Agrees => self.clock.anchor(time),
            Found::Missed => {
                tracing::warn!(
                    missed_us = time.micros_since(after),
                    "this process was suspended; adopting the time of the other replicas"
                );
                self.clock.anchor(time);
            }
            // If another replica was faster, the next check agrees.
            Found::Stepped if !correct(self, &reading, time, after).await? => return Ok(()),
            Found::Stepped => {}
        }
        if reading.asked > reading.answered {
            self.store.mark_clock(self.clock.now(), Some(reading.asked)).await?;
        }
        Ok(())
    }
}

/// Compensates for a step of the database's clock. False if another replica was faster.
async fn correct(buffer: &Buffer, reading: &ClockReading, time: Timestamp, is: Timestamp) -> Result<bool, StoreError> {
    let step_us = time.micros_since(is);
    let to_us = reading.offset_us - step_us;
    let corrected = buffer.store.write(CorrectClock { from_us: reading.offset_us, to_us, now: is }).await?;
    if corrected {
        tracing::warn!(
            step_us,
            offset_us = to_us,
            "the database's clock was stepped; service time continues without a step"
        );
    }
    Ok(corrected)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3600 * SECOND;

    fn reading(latest_us: i64) -> ClockReading {
        ClockReading { latest: Some(Timestamp::from_micros(latest_us)), ..ClockReading::default() }
    }

    fn found(time_us: i64, latest_us: i64) -> Found {
        let at = Timestamp::from_micros;
        // A check that took two seconds, ten hours after the start of time.
        compare(&reading(latest_us), at(time_us), at(10 * HOUR), at(10 * HOUR + 2 * SECOND))
    }

    #[test]
    fn a_clock_that_goes_on_agrees_however_long_the_look_took() {
        for time_us in [10 * HOUR - SECOND, 10 * HOUR, 10 * HOUR + 3 * SECOND] {
            assert_eq!(found(time_us, 10 * HOUR), Found::Agrees, "{time_us}");
        }
    }

    #[test]
    fn a_step_is_one_in_either_direction() {
        for time_us in [0, 8 * HOUR, 10 * HOUR - 2 * SECOND, 10 * HOUR + 4 * SECOND, 13 * HOUR] {
            assert_eq!(found(time_us, 10 * HOUR), Found::Stepped, "{time_us}");
        }
    }

    #[test]
    fn a_process_that_was_stopped_while_others_went_on_has_missed_the_time() {
        assert_eq!(found(12 * HOUR, 12 * HOUR - 10 * SECOND), Found::Missed);
    }

    #[test]
    fn a_start_doubts_a_clock_behind_the_mark_or_far_ahead_of_it() {
        let at = Timestamp::from_micros;
        for (time_us, doubtful) in [(0, true), (HOUR, false), (HOUR + 30 * SECOND, false), (2 * HOUR, true)] {
            assert_eq!(is_doubtful(&reading(HOUR), at(time_us)), doubtful, "{time_us}");
        }
        assert!(!is_doubtful(&ClockReading::default(), at(HOUR)), "nothing is known at the first start");
    }
}
