//! The result of a run: a table for people, and JSON for programs.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use serde::Serialize;

use crate::{
    load::{Load, Run},
    protocol::{Format, ProtocolName},
    tally::{Counts, Delivered, LatencySummary, Posted, Window},
    template::BodySummary,
    wake::Wake,
    workload::{PerBody, WorkloadArgs},
};

/// Shortest time that rates are computed with, so that no rate is infinite.
const SECONDS_MIN: Duration = Duration::from_millis(1);

/// The result of a run, with its settings.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) generator: &'static str,
    pub(crate) protocol: ProtocolName,
    pub(crate) format: Format,
    /// URL of the service; null if bodies were only drained.
    pub(crate) url: Option<String>,
    pub(crate) workload: WorkloadArgs,
    pub(crate) bodies: BodySummary,
    /// The unit that `tokens` counts, here and below: `tokens` or `words`.
    pub(crate) unit: &'static str,
    pub(crate) connections: usize,
    pub(crate) trainers: usize,
    /// Bodies per second that were due; null in the closed loop.
    pub(crate) rate: Option<f64>,
    pub(crate) warmup_s: f64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// The measurements.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    /// Measurements under load.
    Load(Box<LoadOutcome>),
    /// Measurements of rounds with one group each.
    Wake { wake: Wake },
}

/// Measurements under load.
#[derive(Debug, Serialize)]
pub(crate) struct LoadOutcome {
    /// Seconds in which posts were measured.
    seconds: f64,
    /// Totals from the first body to the last, including the warm-up: the service must have stored all of them.
    posted: Posted,
    measured: Posted,
    per_s: Rates,
    /// Time from when a body was first sent (closed loop) or due (open loop) until it was accepted; null if there are
    /// none.
    latency_ms: Option<LatencySummary>,
    /// Refusals by status. Each post was repeated.
    refused: BTreeMap<u16, u64>,
    /// Number of connections that ended before an answer. Each post was repeated.
    broken: u64,
    /// Number of bodies that waited for a repeat at the end.
    abandoned: u64,
    /// Number of bodies that were due but not sent.
    behind: u64,
    delivered: Option<DeliveredOutcome>,
}

/// Measurements of trainers.
#[derive(Debug, Serialize)]
struct DeliveredOutcome {
    /// Totals including the warm-up.
    total: Delivered,
    measured: Delivered,
    batches_per_s: f64,
    per_s: Rates,
    /// Time until a batch was claimed, including the wait for it; null if the protocol claims by reading.
    lease_ms: Option<LatencySummary>,
    samples_ms: Option<LatencySummary>,
    /// Time of an ack; null if the protocol has no acks.
    ack_ms: Option<LatencySummary>,
}

/// Sums over the measured seconds.
#[derive(Debug, Serialize)]
struct Rates {
    #[serde(skip_serializing_if = "Option::is_none")]
    bodies: Option<f64>,
    rollouts: f64,
    tokens: f64,
    megabytes: f64,
}

impl LoadOutcome {
    pub(crate) fn of(run: &Run) -> Self {
        let behind = run.behind();
        run.tally.write(|counts| Self::of_counts(counts, run.load, run.tally.window, behind))
    }

    fn of_counts(counts: &Counts, load: Load, window: Window, behind: u64) -> Self {
        let seconds_to = |last| {
            let end = counts.interrupted.or(window.until).unwrap_or(last);
            end.saturating_duration_since(window.from).max(SECONDS_MIN).as_secs_f64()
        };
        let seconds = seconds_to(counts.last_posted);
        let Posted { bodies, rollouts, tokens, bytes } = counts.measured;
        let delivered = (load.trainers > 0).then(|| {
            let measured = counts.delivered_measured;
            // With --bodies, trainers read the last batches after all bodies were posted.
            let seconds = seconds_to(counts.last_taken);
            DeliveredOutcome {
                total: counts.delivered,
                measured,
                batches_per_s: measured.batches as f64 / seconds,
                per_s: rates(None, [measured.rollouts, measured.tokens, measured.bytes], seconds),
                lease_ms: counts.lease.summary(),
                samples_ms: counts.samples.summary(),
                ack_ms: counts.ack.summary(),
            }
        });
        Self {
            seconds,
            posted: counts.posted,
            measured: counts.measured,
            per_s: rates(Some(bodies), [rollouts, tokens, bytes], seconds),
            latency_ms: counts.latency.summary(),
            refused: counts.refused.clone(),
            broken: counts.broken,
            abandoned: counts.abandoned,
            behind,
            delivered,
        }
    }
}

fn rates(bodies: Option<u64>, [rollouts, tokens, bytes]: [u64; 3], seconds: f64) -> Rates {
    Rates {
        bodies: bodies.map(|bodies| bodies as f64 / seconds),
        rollouts: rollouts as f64 / seconds,
        tokens: tokens as f64 / seconds,
        megabytes: bytes as f64 / 1e6 / seconds,
    }
}

impl Report {
    /// The result as a table.
    pub(crate) fn table(&self) -> String {
        let mut text = self.heading();
        match &self.outcome {
            Outcome::Load(outcome) => self.load(&mut text, outcome),
            Outcome::Wake { wake } => {
                row(&mut text, "after answer", &latencies(Some(wake.after_answer_ms)));
                row(&mut text, "after post", &latencies(Some(wake.after_post_ms)));
            }
        }
        text
    }

    /// The result as JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report has only what JSON has") + "\n"
    }

    fn heading(&self) -> String {
        let target = self.url.as_deref().unwrap_or("a handler that only drains");
        let lengths = &self.bodies.rollout_tokens;
        let size = match self.workload.per_body {
            PerBody::Group if self.protocol != ProtocolName::Slime => {
                format!("a group of {}", self.workload.group_size)
            }
            _ => format!("one rollout, groups of {}", self.workload.group_size),
        };
        format!(
            "{target}\nbody: {size}, {} kB on average; {} of a rollout: mean {}, p50 {}, p99 {}, max {}\n\n",
            self.bodies.bytes_mean / 1_000,
            self.unit,
            lengths.mean,
            lengths.p50,
            lengths.p99,
            lengths.max
        )
    }

    fn load(&self, text: &mut String, outcome: &LoadOutcome) {
        let mode = match self.rate {
            Some(rate) => format!("{rate} bodies/s due, at most {} at once", self.connections),
            None if self.connections == 0 => "no agents".to_owned(),
            None => format!("{} connections, each as fast as it is answered", self.connections),
        };
        row(text, "load", &format!("{mode}; {:.1} s measured", outcome.seconds));
        if self.connections > 0 {
            let rates = self.rates(&outcome.per_s);
            row(text, "posted", &format!("{} bodies/s  {rates}", count(outcome.per_s.bodies.unwrap_or_default())));
            row(text, "latency", &latencies(outcome.latency_ms));
            row(text, "not taken", &not_taken(outcome));
        }
        if let Some(delivered) = &outcome.delivered {
            let rates = self.rates(&delivered.per_s);
            row(text, "delivered", &format!("{} batches/s  {rates}", count(delivered.batches_per_s)));
            row(text, "lease", &latencies(delivered.lease_ms));
            row(text, "samples", &latencies(delivered.samples_ms));
            row(text, "ack", &latencies(delivered.ack_ms));
        }
    }

    /// Formats rates. Numbers that a protocol does not report are left out.
    fn rates(&self, rates: &Rates) -> String {
        let unit = self.unit;
        let known = [
            (rates.rollouts, "rollouts/s".to_owned()),
            (rates.tokens, format!("{unit}/s")),
            (rates.megabytes, "MB/s".to_owned()),
        ];
        let cells =
            known.into_iter().filter(|(rate, _)| *rate > 0.0).map(|(rate, unit)| format!("{} {unit}", count(rate)));
        cells.collect::<Vec<_>>().join("  ")
    }
}

fn row(text: &mut String, name: &str, cells: &str) {
    let _ = writeln!(text, "{name:<13} {cells}");
}

fn latencies(latency: Option<LatencySummary>) -> String {
    let Some(LatencySummary { count, p50, p90, p99, max, .. }) = latency else { return "-".to_owned() };
    format!("p50 {p50:.2} ms  p90 {p90:.2} ms  p99 {p99:.2} ms  max {max:.2} ms  ({count})")
}

fn not_taken(outcome: &LoadOutcome) -> String {
    let mut reasons: Vec<String> =
        outcome.refused.iter().map(|(status, times)| format!("{times} answered {status}, repeated")).collect();
    let others = [
        (outcome.broken, "connections broke, repeated"),
        (outcome.abandoned, "given up at the end"),
        (outcome.behind, "due and not sent: the service or this machine cannot keep up"),
    ];
    reasons.extend(others.iter().filter(|(times, _)| *times > 0).map(|(times, what)| format!("{times} {what}")));
    if reasons.is_empty() { "none".to_owned() } else { reasons.join("; ") }
}

/// Formats a number with three or four significant digits.
pub(crate) fn count(number: f64) -> String {
    match number {
        number if number < 100.0 => format!("{number:.1}"),
        number if number < 10_000.0 => format!("{number:.0}"),
        number if number < 1e6 => format!("{:.1}k", number / 1e3),
        number => format!("{:.2}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_leading_digits() {
        assert_eq!(
            [0.0, 42.42, 305.1, 9_999.0, 12_345.0, 4_930_000.0].map(count),
            ["0.0", "42.4", "305", "9999", "12.3k", "4.93M"]
        );
    }
}
