//! Counts while the load runs. Connections and trainers write them; progress and report read them.

use std::{
    collections::BTreeMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{protocol::Taken, template::Body};

/// Significant digits of a histogram: a latency is exact to a tenth of a percent.
const DIGITS: u8 = 3;

/// Largest latency that is recorded, in microseconds: an hour. Longer ones count as an hour.
const LATENCY_US_MAX: u64 = 3_600_000_000;

/// The measured time: from the end of the warm-up to the end of the run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) start: Instant,
    pub(crate) from: Instant,
    /// `None` if the run ends after a number of bodies.
    pub(crate) until: Option<Instant>,
}

impl Window {
    pub(crate) fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    fn holds(&self, time: Instant) -> bool {
        time >= self.from && self.until.is_none_or(|until| time < until)
    }
}

/// Latencies in microseconds.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LATENCY_US_MAX, DIGITS).expect("the bounds are in order"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record((latency.as_micros() as u64).max(1));
    }

    /// Returns `None` if nothing was recorded.
    pub(crate) fn summary(&self) -> Option<LatencySummary> {
        let ms = |us: u64| us as f64 / 1_000.0;
        let at = |quantile| ms(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then(|| LatencySummary {
            count: self.0.len(),
            mean: self.0.mean() / 1_000.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: ms(self.0.max()),
        })
    }
}

/// Latencies in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LatencySummary {
    pub(crate) count: u64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// Sums over bodies that were answered with success.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Posted {
    pub(crate) bodies: u64,
    pub(crate) rollouts: u64,
    /// Number of tokens, or of words of texts.
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

impl Posted {
    fn add(&mut self, body: &Body) {
        self.bodies += 1;
        self.rollouts += body.rollouts;
        self.tokens += body.tokens;
        self.bytes += body.bytes.len() as u64;
    }
}

/// Sums over rounds of trainers. Numbers that a protocol does not report are 0.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Delivered {
    pub(crate) batches: u64,
    pub(crate) groups: u64,
    pub(crate) rollouts: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

impl Delivered {
    fn add(&mut self, taken: &Taken) {
        self.batches += 1;
        self.groups += taken.groups;
        self.rollouts += taken.rollouts;
        self.tokens += taken.tokens;
        self.bytes += taken.bytes;
    }
}

/// Everything that was counted.
pub(crate) struct Counts {
    /// Sums from the first post to the last, including the warm-up.
    pub(crate) posted: Posted,
    /// Sums in the measured time.
    pub(crate) measured: Posted,
    pub(crate) latency: Latencies,
    /// Sums since progress was last printed.
    recent: Posted,
    recent_latency: Latencies,
    /// Refusals by status. Each post was repeated.
    pub(crate) refused: BTreeMap<u16, u64>,
    /// Number of posts whose connection ended before the answer. Each was repeated.
    pub(crate) broken: u64,
    /// Number of bodies that waited for a repeat when the run ended.
    pub(crate) abandoned: u64,
    pub(crate) delivered: Delivered,
    pub(crate) delivered_measured: Delivered,
    pub(crate) lease: Latencies,
    pub(crate) samples: Latencies,
    pub(crate) ack: Latencies,
    /// When the last body was answered.
    pub(crate) last_posted: Instant,
    /// When the last batch was read and acked.
    pub(crate) last_taken: Instant,
    /// When the user interrupted the run.
    pub(crate) interrupted: Option<Instant>,
}

/// Counts since progress was last printed.
pub(crate) struct Recent {
    pub(crate) posted: Posted,
    pub(crate) latency: Option<LatencySummary>,
    pub(crate) delivered: u64,
    /// Number of refusals and broken connections since the start.
    pub(crate) failed: u64,
}

/// The counts, shared.
pub(crate) struct Tally {
    pub(crate) window: Window,
    counts: Mutex<Counts>,
}

impl Tally {
    pub(crate) fn new(window: Window) -> Self {
        let counts = Counts {
            posted: Posted::default(),
            measured: Posted::default(),
            latency: Latencies::new(),
            recent: Posted::default(),
            recent_latency: Latencies::new(),
            refused: BTreeMap::new(),
            broken: 0,
            abandoned: 0,
            delivered: Delivered::default(),
            delivered_measured: Delivered::default(),
            lease: Latencies::new(),
            samples: Latencies::new(),
            ack: Latencies::new(),
            last_posted: window.start,
            last_taken: window.start,
            interrupted: None,
        };
        Self { window, counts: Mutex::new(counts) }
    }

    /// Counts a body that was answered. Its latency begins when it was due.
    pub(crate) fn posted(&self, body: &Body, due: Instant) {
        let now = Instant::now();
        self.write(|counts| {
            counts.last_posted = now;
            counts.posted.add(body);
            counts.recent.add(body);
            counts.recent_latency.record(now - due);
            if self.window.holds(now) {
                counts.measured.add(body);
                counts.latency.record(now - due);
            }
        });
    }

    pub(crate) fn refused(&self, status: u16) {
        self.write(|counts| *counts.refused.entry(status).or_default() += 1);
    }

    pub(crate) fn broken(&self) {
        self.write(|counts| counts.broken += 1);
    }

    pub(crate) fn interrupted(&self) {
        self.write(|counts| counts.interrupted = Some(Instant::now()));
    }

    pub(crate) fn abandoned(&self) {
        self.write(|counts| counts.abandoned += 1);
    }

    /// Counts a round of a trainer.
    pub(crate) fn taken(&self, taken: &Taken) {
        let now = Instant::now();
        self.write(|counts| {
            counts.last_taken = now;
            counts.delivered.add(taken);
            if self.window.holds(now) {
                counts.delivered_measured.add(taken);
                counts.samples.record(taken.samples);
                taken.lease.into_iter().for_each(|lease| counts.lease.record(lease));
                taken.ack.into_iter().for_each(|ack| counts.ack.record(ack));
            }
        });
    }

    /// Returns the counts since the last call.
    pub(crate) fn recent(&self) -> Recent {
        self.write(|counts| Recent {
            posted: std::mem::take(&mut counts.recent),
            latency: std::mem::replace(&mut counts.recent_latency, Latencies::new()).summary(),
            delivered: counts.delivered.batches,
            failed: counts.refused.values().sum::<u64>() + counts.broken,
        })
    }

    /// Reads or changes the counts.
    pub(crate) fn write<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        change(&mut self.counts.lock().expect("nothing panics while it counts"))
    }
}
