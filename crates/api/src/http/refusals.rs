//! Logging of refused requests: a few per second of each problem type are logged with their id, and the others are
//! counted.
//!
//! It is separate from the problems because it keeps state, so that a client that is refused a thousand times cannot
//! fill the log.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use forebay_wire::Problem;

/// The most refusals of one type that are logged in one window.
const LOGGED_MAX: u32 = 5;

/// The length of a window.
const WINDOW: Duration = Duration::from_secs(1);

/// The most characters of a detail that are logged. The bound exists because a detail may quote input.
const DETAIL_CHARS_MAX: usize = 200;

/// Counts refusals by type. The service defines the types, so there are few.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    windows: Mutex<HashMap<String, Window>>,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    logged: u32,
    left_out: u64,
}

/// What to do about a refusal.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Log,
    LeaveOut,
    /// Leave out the first one of a window, and log the number of left out ones later.
    BeginToLeaveOut,
}

impl Refusals {
    /// Logs a refused request, or counts it if too many were logged.
    pub(crate) fn report(self: &Arc<Self>, problem: &Problem) {
        match self.turn(&problem.kind, Instant::now()) {
            Turn::Log => {
                let detail: Option<String> =
                    problem.detail.as_ref().map(|detail| detail.chars().take(DETAIL_CHARS_MAX).collect());
                tracing::info!(
                    problem.kind = problem.kind,
                    problem.status = problem.status,
                    problem.detail = detail,
                    problem.instance = problem.instance,
                    "request refused"
                );
            }
            Turn::LeaveOut => {}
            Turn::BeginToLeaveOut => {
                let (refusals, kind) = (Arc::clone(self), problem.kind.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(WINDOW).await;
                    let left_out = refusals.take_left_out(&kind);
                    tracing::info!(problem.kind = kind, left_out, "more requests were refused and not logged");
                });
            }
        }
    }

    fn turn(&self, kind: &str, now: Instant) -> Turn {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let window = match windows.get_mut(kind) {
            Some(window) => window,
            None => windows.entry(kind.to_owned()).or_insert(Window { began: now, logged: 0, left_out: 0 }),
        };
        if now.duration_since(window.began) >= WINDOW {
            (window.began, window.logged) = (now, 0);
        }
        if window.logged < LOGGED_MAX {
            window.logged += 1;
            return Turn::Log;
        }
        window.left_out += 1;
        if window.left_out == 1 { Turn::BeginToLeaveOut } else { Turn::LeaveOut }
    }

    fn take_left_out(&self, kind: &str) -> u64 {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.get_mut(kind).map_or(0, |window| std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_of_each_type_are_logged_in_a_window_and_the_others_are_counted() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let turns = |kind: &str, now, count: usize| (0..count).map(|_| refusals.turn(kind, now)).collect::<Vec<_>>();
        assert!(turns("invalid", start, 5).iter().all(|turn| *turn == Turn::Log));
        assert_eq!(turns("invalid", start, 3), [Turn::BeginToLeaveOut, Turn::LeaveOut, Turn::LeaveOut]);
        assert_eq!(turns("malformed", start, 1), [Turn::Log], "another type has its own share");
        assert_eq!(turns("invalid", start + WINDOW, 1), [Turn::Log]);
        assert_eq!((refusals.take_left_out("invalid"), refusals.take_left_out("invalid")), (3, 0));
    }
}
