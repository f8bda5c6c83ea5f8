//! Prints a line per second while the load runs, to standard error, because standard output is for the result.

use std::{
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use crate::{report::count, tally::Tally};

/// Prints the progress of a run.
pub(crate) struct Progress {
    /// On a terminal the line is overwritten each time; a file gets all lines.
    is_terminal: bool,
    told: Instant,
}

impl Progress {
    pub(crate) const EVERY: Duration = Duration::from_secs(1);

    pub(crate) fn new() -> Self {
        Self { is_terminal: std::io::stderr().is_terminal(), told: Instant::now() }
    }

    pub(crate) fn tell(&mut self, tally: &Tally) {
        let recent = tally.recent();
        let seconds = self.told.elapsed().as_secs_f64();
        self.told = Instant::now();
        let window = tally.window;
        let phase = if Instant::now() < window.from { "  warming up" } else { "" };
        let latency = recent
            .latency
            .map_or_else(String::new, |latency| format!("  p50 {:.1} ms  p99 {:.1} ms", latency.p50, latency.p99));
        let batches = if recent.delivered > 0 { format!("  {} batches", recent.delivered) } else { String::new() };
        let line = format!(
            "{:4.0} s  {:>6} bodies/s  {:>7} tokens/s{latency}{batches}  {} refused{phase}",
            window.start.elapsed().as_secs_f64(),
            count(recent.posted.bodies as f64 / seconds),
            count(recent.posted.tokens as f64 / seconds),
            recent.failed,
        );
        if self.is_terminal {
            // The escape code erases the rest of a longer previous line.
            eprint!("\r{line}\x1b[K");
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }

    /// Keeps the last line on the screen.
    pub(crate) fn end(&self) {
        if self.is_terminal {
            eprintln!();
        }
    }
}
