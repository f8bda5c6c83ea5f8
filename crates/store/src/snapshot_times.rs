//! When this process takes a snapshot of the tallies for the history.
//!
//! Separate from the operation that takes it, because an idle service writes nothing: whether anything may have changed is
//! only known here.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use forebay_domain::clock::Timestamp;

use super::{ops::history::Taken, tally::minute};

/// What this process has written since its last snapshot.
#[derive(Debug)]
pub(super) struct SnapshotTimes {
    /// Whether it has written anything.
    wrote: AtomicBool,
    state: Mutex<State>,
}

/// A snapshot that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The minute since when something may have been written; none if the process has just started.
    pub(super) since: Option<i64>,
}

#[derive(Debug, Default)]
struct State {
    /// The last time at which it was known that nothing was written. None after the start.
    quiet: Option<Timestamp>,
    /// The minute of the last attempt.
    tried: Option<i64>,
}

impl Default for SnapshotTimes {
    /// A process that ended before may have written.
    fn default() -> Self {
        Self { wrote: AtomicBool::new(true), state: Mutex::default() }
    }
}

impl SnapshotTimes {
    /// Notes that something is written now.
    pub(super) fn note_write(&self) {
        self.wrote.store(true, Ordering::Release);
    }

    /// The snapshot that is due, if one is.
    pub(super) fn due(&self, now: Timestamp) -> Option<Due> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.wrote.load(Ordering::Acquire) {
            state.quiet = Some(now);
            return None;
        }
        let since = state.quiet.map(minute);
        let current = minute(now);
        // A snapshot has whole minutes. Only the first one after a start is taken at once.
        if since.is_some_and(|since| since >= current) || state.tried == Some(current) {
            return None;
        }
        state.tried = Some(current);
        self.wrote.store(false, Ordering::Release);
        Some(Due { since })
    }

    /// Notes what a snapshot that was due has done; none if it failed.
    pub(super) fn done(&self, now: Timestamp, taken: Option<&Taken>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match taken {
            Some(Taken::Unchanged) => {}
            // What was being written meanwhile may be missing from this snapshot. The next one finds it, or finds that
            // nothing has changed.
            Some(Taken::Changed | Taken::ByAnother) => self.note_write(),
            None => {
                state.tried = None;
                self.note_write();
                return;
            }
        }
        state.quiet = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_micros(second * 1_000_000)
    }

    #[test]
    fn snapshots_stop_when_nothing_has_changed_for_a_minute() {
        let times = SnapshotTimes::default();
        assert_eq!(times.due(at(6_000)), Some(Due { since: None }), "a process ended before this one");
        times.done(at(6_000), Some(&Taken::Changed));
        assert_eq!(times.due(at(6_059)), None);
        assert_eq!(times.due(at(6_060)), Some(Due { since: Some(100) }));
        times.done(at(6_060), Some(&Taken::Unchanged));
        for minute in 0..5 {
            assert_eq!(times.due(at(6_120 + 60 * minute)), None);
        }
        times.note_write();
        assert_eq!(times.due(at(6_379)), None);
        assert_eq!(
            times.due(at(6_420)),
            Some(Due { since: Some(106) }),
            "since the last time at which nothing was written"
        );
    }

    #[test]
    fn a_snapshot_that_fails_is_taken_again_with_the_same_begin() {
        let times = SnapshotTimes::default();
        times.due(at(6_000));
        times.done(at(6_000), Some(&Taken::Unchanged));
        times.note_write();
        assert_eq!(times.due(at(6_060)), Some(Due { since: Some(100) }));
        times.done(at(6_060), None);
        assert_eq!(times.due(at(6_061)), Some(Due { since: Some(100) }));
        times.done(at(6_061), Some(&Taken::ByAnother));
        assert_eq!(times.due(at(6_062)), None);
        assert_eq!(times.due(at(6_120)), Some(Due { since: Some(101) }));
    }
}
