//! Service time: the clock that all replicas share. It never goes back and runs at the rate of real time, whatever the
//! clock of the database does.
//!
//! It is the database's clock and an offset, which is stored beside the latest time that the service has reached. Each
//! replica carries it forward by the time that passes on its own machine, and looks once a second: where the database's
//! clock has gone another way, that clock has stepped, and the offset takes the step back. A replica that starts carries
//! nothing forward yet. Where the stored time makes it doubt, it asks the running ones first. A process that owns its
//! database goes by the clock of its machine, from the latest stored time on.

use std::time::Duration;

use tokio::time::Instant;

use super::Buffer;
use crate::{
    clock::Timestamp,
    store::{ClockReading, StoreError},
};

/// Pause between two looks at the database's clock: a step is found this soon, and a question answered.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Pause between two writes of the time that was reached, where anything else was written.
const MARK_EVERY: Duration = Duration::from_secs(10);

/// By how much clocks may differ without a step: replicas follow the database's clock within it.
const TOLERANCE_US: i64 = 1_000_000;

/// How far the database's clock may be ahead of the last mark before a starting replica doubts it: three marks.
const GAP_US: i64 = 30_000_000;

/// How long a starting replica waits for the answer of a running one: three of its looks.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// Pause between two looks of a replica that has asked.
const ANSWER_LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the database's clock has done since the last look.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// It went on as the clock of this machine did.
    Agrees,
    /// It stepped.
    Stepped,
    /// It is ahead, and others have come as far: this process did not run.
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

impl Buffer {
    /// Adopts service time at the start.
    pub(super) async fn start_clock(&self) -> Result<(), StoreError> {
        if !self.clock.is_anchored() {
            return Ok(());
        }
        let reading = self.store.read_clock().await?;
        let Some(time) = reading.time() else {
            if let Some(latest) = reading.latest.filter(|latest| *latest > self.clock.now()) {
                tracing::warn!(time = %latest, "the machine's clock is behind the time that was reached: going on from there");
                self.clock.anchor(latest);
            }
            return self.store.mark_clock(self.clock.now(), None).await;
        };
        let mut reading = if is_doubtful(&reading, time) { self.ask_replicas().await? } else { reading };
        loop {
            let Some(time) = reading.time() else { return Ok(()) };
            match reading.latest {
                Some(latest) if latest.micros_since(time) > TOLERANCE_US => {
                    if self.correct(&reading, time, latest).await? {
                        self.clock.anchor(latest);
                        return Ok(());
                    }
                    reading = self.store.read_clock().await?;
                }
                latest => {
                    let time = latest.map_or(time, |latest| latest.max(time));
                    self.clock.anchor(time);
                    return self.store.mark_clock(self.clock.now(), None).await;
                }
            }
        }
    }

    /// The clock after a running replica has had the time to look at it; as it is when none runs.
    async fn ask_replicas(&self) -> Result<ClockReading, StoreError> {
        let question = self.store.ask_clock().await?;
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let reading = self.store.read_clock().await?;
            if reading.answered >= question || Instant::now() >= deadline {
                return Ok(reading);
            }
            tokio::time::sleep(ANSWER_LOOK_EVERY).await;
        }
    }

    /// Keeps service time right until it is dropped.
    pub async fn run_clock(&self) {
        if !self.clock.is_anchored() {
            return;
        }
        let mut fails = false;
        let mut marked = Instant::now();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let mut outcome = self.look_at_clock().await;
            if outcome.is_ok() && marked.elapsed() >= MARK_EVERY {
                outcome = self.store.mark_clock(self.clock.now(), None).await;
                marked = Instant::now();
            }
            if let Err(error) = &outcome
                && !fails
            {
                tracing::warn!(error = %error, "the database's clock cannot be read: going on without it");
            }
            fails = outcome.is_err();
        }
    }

    /// Marks the time that was reached, for the next start.
    pub async fn stop_clock(&self) -> Result<(), StoreError> {
        if self.clock.is_anchored() { self.store.mark_clock(self.clock.now(), None).await } else { Ok(()) }
    }

    /// Looks at the database's clock, and answers replicas that have asked for it.
    pub async fn look_at_clock(&self) -> Result<(), StoreError> {
        let before = self.clock.now();
        let reading = self.store.read_clock().await?;
        let after = self.clock.now();
        let Some(time) = reading.time() else { return Ok(()) };
        match compare(&reading, time, before, after) {
            Found::Agrees => self.clock.anchor(time),
            Found::Missed => {
                tracing::warn!(
                    missed_us = time.micros_since(after),
                    "this process did not run: adopting the time of the others"
                );
                self.clock.anchor(time);
            }
            // Where another replica was faster, the next look agrees.
            Found::Stepped if !self.correct(&reading, time, after).await? => return Ok(()),
            Found::Stepped => {}
        }
        if reading.asked > reading.answered {
            self.store.mark_clock(self.clock.now(), Some(reading.asked)).await?;
        }
        Ok(())
    }

    /// Takes a step of the database's clock back; false when another replica was faster.
    async fn correct(&self, reading: &ClockReading, time: Timestamp, is: Timestamp) -> Result<bool, StoreError> {
        let step_us = time.micros_since(is);
        let corrected = self.store.correct_clock(reading.offset_us, reading.offset_us - step_us, is).await?;
        if corrected {
            tracing::warn!(
                step_us,
                offset_us = reading.offset_us - step_us,
                "the database's clock has stepped: service time goes on"
            );
        }
        Ok(corrected)
    }
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
        // A look that took two seconds, ten hours after the start of time.
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
