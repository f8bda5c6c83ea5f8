//! Series: what happened to a policy over time, in buckets of equal width, for people who look at it.
//!
//! Everything is a difference of two totals of the history, which has the totals of the tallies at the end of minutes. So
//! what the buckets of a window have adds up to what the tallies have counted in it. The minute that runs now comes from the
//! tallies now. A bucket that nothing is known of has no values: the service was not running, or the history begins later.

use crate::{
    clock::Timestamp,
    ids::{PolicyName, PolicyPk},
    refusal::Refusal,
    states::{BatchState, GroupState},
    tally::{LeaseEvent, Tallies, Tally},
};
use std::collections::BTreeMap;

use Reading::{Counter, Gauge};

/// Which part of the history to read. All numbers are minutes since the Unix epoch.
#[derive(Clone, Copy, Debug)]
pub struct ReadHistory {
    pub policy: PolicyPk,
    /// The first minute.
    pub from: i64,
    /// The minute behind the last one.
    pub to: i64,
    /// The width of a bucket, at least 1.
    pub step: i64,
}

/// The part of the history of a policy that a series is made of.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// In the order of their minutes. The first one may be older than the part, and has what was counted before.
    pub snapshots: Vec<Snapshot>,
    pub now: Totals,
}

/// The totals of a policy at the end of some minutes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The first minute in which something of it can have happened that is not in the snapshot before.
    pub since: i64,
    /// The minute behind the last one. The snapshot of minute 0 has what was counted before the history begins.
    pub minute: i64,
    pub totals: Totals,
}

/// The tallies of a policy, and its version.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pub tallies: Tallies,
    /// The current version.
    pub version: i64,
}

impl Totals {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tallies.counts.is_empty() && self.version == 0
    }
}

/// The most points of a series.
pub const POINTS_MAX: i64 = 2_000;

/// The most metrics that a caller may name.
pub const METRICS_MAX: usize = 16;

/// How many rules `dropped.*` and `discarded.*` show one by one.
const RULES_SHOWN: usize = 8;

/// Minutes for which every row of the history is kept: a day, and an hour for windows that began before it.
pub const KEEP_MINUTES: i64 = 25 * 60;

/// Minutes for which the last row of ten minutes is kept: two weeks, and a day.
pub const KEEP_TENS: i64 = 15 * 24 * 60;

/// Minutes for which the last row of an hour is kept: half a year, and a day.
pub const KEEP_HOURS: i64 = 181 * 24 * 60;

/// Windows that begin this long before the end of a time of keeping get wider buckets, so that the row before them is
/// there, too.
const MARGIN: i64 = 30;

/// What a caller wants to see.
#[derive(Clone, Debug)]
pub struct SeriesRequest {
    pub policy: PolicyName,
    /// Begin of the window; an hour before its end when absent.
    pub from: Option<Timestamp>,
    /// End of the window; now when absent.
    pub to: Option<Timestamp>,
    /// Width of a bucket in minutes. Windows that begin long ago get wider buckets.
    pub step: i64,
    pub metrics: Vec<Metric>,
}

/// What happened in the buckets of a window.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// The first minute.
    pub from: i64,
    /// The minute behind the last one.
    pub to: i64,
    /// Width of a bucket in minutes.
    pub step: i64,
    /// A column for each metric, with a value for each bucket.
    pub columns: BTreeMap<String, Vec<Option<f64>>>,
}

/// What a series shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Metric {
    /// A number with a name of its own.
    One(&'static str),
    /// Rollouts that a rule dropped, with those of the groups that it discarded.
    DroppedBy(String),
    /// Groups that a rule discarded.
    DiscardedBy(String),
    /// The rules that dropped most, one by one, and the others.
    DroppedByRule,
    /// The rules that discarded most, one by one, and the others.
    DiscardedByRule,
}

/// How a number follows from totals.
#[derive(Clone, Copy)]
enum Reading {
    /// What happened in a bucket is the difference of its ends.
    Counter(fn(&Totals) -> f64),
    /// The number at the end of a bucket.
    Gauge(fn(&Totals) -> f64),
}

/// The metrics that have a name of their own.
const METRICS: &[(&str, Reading)] = &[
    ("received", Counter(|totals| count(totals, &Tally::Received))),
    ("tokens_received", Counter(|totals| totals.tallies.amount(&Tally::Received))),
    ("kept", Counter(kept)),
    ("masked", Counter(|totals| count(totals, &Tally::Masked))),
    ("dropped", Counter(dropped)),
    ("late", Counter(|totals| count(totals, &Tally::LateTotal))),
    ("ready_groups", Gauge(|totals| count(totals, &Tally::Groups(GroupState::Ready)))),
    ("open_groups", Gauge(|totals| count(totals, &Tally::Groups(GroupState::Open)))),
    ("leased_batches", Gauge(|totals| count(totals, &Tally::Batches(BatchState::Leased)))),
    ("returned_batches", Gauge(|totals| count(totals, &Tally::Batches(BatchState::Returned)))),
    ("acked_batches", Counter(|totals| count(totals, &Tally::Acked))),
    ("acked_rollouts", Counter(|totals| count(totals, &Tally::AckedRollouts))),
    ("acked_tokens", Counter(|totals| totals.tallies.amount(&Tally::Acked))),
    ("decided_ready", Counter(|totals| count(totals, &Tally::DecidedReady))),
    ("stale_groups", Counter(|totals| count(totals, &Tally::Stale))),
    ("waited_s", Counter(|totals| totals.tallies.amount(&Tally::Waited))),
    ("lease_expired", Counter(|totals| count(totals, &Tally::Leases(LeaseEvent::Expired)))),
    ("lease_nacked", Counter(|totals| count(totals, &Tally::Leases(LeaseEvent::Nacked)))),
    ("live_bytes", Gauge(|totals| count(totals, &Tally::LiveBytes))),
    ("reserved", Gauge(|totals| count(totals, &Tally::Reserved))),
    ("version", Gauge(|totals| totals.version as f64)),
];

fn count(totals: &Totals, tally: &Tally) -> f64 {
    totals.tallies.count(tally) as f64
}

/// Rollouts that rules dropped at their arrival. A rule that discards groups counts these under the same name.
fn dropped(totals: &Totals) -> f64 {
    let of_rule = |(tally, count): (&Tally, &i64)| match tally {
        Tally::Dropped(_) => *count,
        Tally::Discarded(_) => -count,
        _ => 0,
    };
    totals.tallies.counts.iter().map(of_rule).sum::<i64>() as f64
}

/// Rollouts that were kept at their arrival.
fn kept(totals: &Totals) -> f64 {
    let others = count(totals, &Tally::Masked) + count(totals, &Tally::LateTotal) + dropped(totals);
    count(totals, &Tally::Received) - others
}

impl Metric {
    /// The metric with this name; none if there is none.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if let Some((known, _)) = METRICS.iter().find(|(known, _)| *known == name) {
            return Some(Self::One(known));
        }
        match name.split_once('.')? {
            ("dropped", "*") => Some(Self::DroppedByRule),
            ("discarded", "*") => Some(Self::DiscardedByRule),
            ("dropped", rule) if !rule.is_empty() => Some(Self::DroppedBy(rule.to_owned())),
            ("discarded", rule) if !rule.is_empty() => Some(Self::DiscardedBy(rule.to_owned())),
            _ => None,
        }
    }

    /// The names of all metrics that have one of their own.
    pub fn names() -> impl Iterator<Item = &'static str> {
        METRICS.iter().map(|(name, _)| *name)
    }
}

pub fn minute(time: Timestamp) -> i64 {
    time.as_micros().div_euclid(60_000_000)
}

/// The minutes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub from: i64,
    pub to: i64,
    pub step: i64,
}

impl Window {
    /// Whole buckets that contain what was asked for, up to the minute that runs now.
    pub fn of(request: &SeriesRequest, now: Timestamp) -> Result<Self, Refusal> {
        let running = minute(now);
        // The minute behind the last one that the window touches.
        let behind = |end: Timestamp| minute(end) + i64::from(end.as_micros().rem_euclid(60_000_000) > 0);
        let end_minute = request.to.map_or(running + 1, |end| behind(end).min(running + 1));
        let begin = request.from.map_or(end_minute - 60, minute).max(0);
        if begin >= end_minute {
            return Err(Refusal::invalid("from", "must be before `to`, and in the past"));
        }
        let fine = if begin >= running - (KEEP_MINUTES - MARGIN) {
            1
        } else if begin >= running - (KEEP_TENS - MARGIN) {
            10
        } else {
            60
        };
        let step = ceil(request.step, fine);
        let (from, to) = (begin.div_euclid(step) * step, ceil(end_minute, step));
        if (to - from) / step > POINTS_MAX {
            let detail = format!("the window has more than {POINTS_MAX} buckets; take wider ones or a shorter window");
            return Err(Refusal::invalid("step_s", detail));
        }
        Ok(Self { from, to, step })
    }

    /// The begins and ends of the buckets.
    fn buckets(self) -> impl Iterator<Item = (i64, i64)> {
        (self.from..self.to)
            .step_by(usize::try_from(self.step).unwrap_or(1))
            .map(move |begin| (begin, begin + self.step))
    }
}

/// The smallest multiple of `step` that is not smaller.
fn ceil(minute: i64, step: i64) -> i64 {
    (minute + step - 1).div_euclid(step) * step
}

/// The totals at the begin and the end of each bucket; none of a bucket of which nothing is known.
struct Levels<'h> {
    nothing: Totals,
    history: &'h History,
    running: i64,
}

impl<'h> Levels<'h> {
    /// The totals when a minute began.
    fn at(&'h self, minute: i64) -> &'h Totals {
        if minute > self.running {
            return &self.history.now;
        }
        let known = self.history.snapshots.partition_point(|snapshot| is_before(snapshot, minute));
        let last = known.checked_sub(1).map(|last| &self.history.snapshots[last]);
        // Without an older row, nothing was counted before the first one.
        last.map_or(&self.nothing, |last| &last.totals)
    }

    /// Whether anything is known of a bucket.
    fn is_known(&self, (begin, end): (i64, i64)) -> bool {
        let snapshots = &self.history.snapshots;
        let known = snapshots.partition_point(|snapshot| is_before(snapshot, end));
        let Some(last) = known.checked_sub(1).map(|last| &snapshots[last]) else { return true };
        // Between the first minute of a gap and its end, nothing is known.
        let is_in_gap = last.since < begin && end <= last.minute;
        // The row of minute 0 has what was counted before the history begins, with the next row.
        let next = snapshots.get(known).map_or(self.running, |next| next.since);
        let is_before_all = last.minute == 0 && !last.totals.is_empty() && end <= next;
        !is_in_gap && !is_before_all
    }
}

/// Whether what a snapshot has counted happened before a minute.
fn is_before(snapshot: &Snapshot, minute: i64) -> bool {
    snapshot.minute == 0 || snapshot.since < minute
}

/// The columns of all metrics.
pub fn columns(
    history: &History,
    window: Window,
    running: i64,
    metrics: &[Metric],
) -> BTreeMap<String, Vec<Option<f64>>> {
    let levels = Levels { nothing: Totals::default(), history, running };
    let ends: Vec<Option<(&Totals, &Totals)>> = window
        .buckets()
        .map(|(begin, end)| levels.is_known((begin, end)).then(|| (levels.at(begin), levels.at(end))))
        .collect();
    let column = |value: &dyn Fn(&Totals, &Totals) -> f64| -> Vec<Option<f64>> {
        ends.iter().map(|bucket| bucket.map(|(begin, end)| value(begin, end))).collect()
    };
    let mut columns = BTreeMap::new();
    for metric in metrics {
        match metric {
            Metric::One(name) => {
                let (_, reading) = METRICS.iter().find(|(known, _)| known == name).expect("the name is one of them");
                let values = match reading {
                    Counter(total) => column(&|begin, end| total(end) - total(begin)),
                    Gauge(total) => column(&|_, end| total(end)),
                };
                columns.insert((*name).to_owned(), values);
            }
            Metric::DroppedBy(rule) => {
                columns.insert(
                    format!("dropped.{rule}"),
                    column(&|begin, end| dropped_by(end, rule) - dropped_by(begin, rule)),
                );
            }
            Metric::DiscardedBy(rule) => {
                columns.insert(
                    format!("discarded.{rule}"),
                    column(&|begin, end| discarded_by(end, rule) - discarded_by(begin, rule)),
                );
            }
            Metric::DroppedByRule => by_rule(&mut columns, "dropped", &ends, dropped_rule, dropped_by),
            Metric::DiscardedByRule => by_rule(&mut columns, "discarded", &ends, discarded_rule, discarded_by),
        }
    }
    columns
}

fn dropped_rule(tally: &Tally) -> Option<&str> {
    if let Tally::Dropped(rule) = tally { Some(rule) } else { None }
}

fn discarded_rule(tally: &Tally) -> Option<&str> {
    if let Tally::Discarded(rule) = tally { Some(rule) } else { None }
}

/// Rollouts that a rule dropped, alone or with their groups.
fn dropped_by(totals: &Totals, rule: &str) -> f64 {
    totals.tallies.amount(&Tally::Dropped(rule.to_owned()))
}

/// Groups that a rule discarded.
fn discarded_by(totals: &Totals, rule: &str) -> f64 {
    count(totals, &Tally::Discarded(rule.to_owned()))
}

/// Columns of the rules with the largest numbers in the window, and one of all others.
fn by_rule(
    columns: &mut BTreeMap<String, Vec<Option<f64>>>,
    family: &str,
    ends: &[Option<(&Totals, &Totals)>],
    rule_of: fn(&Tally) -> Option<&str>,
    total: fn(&Totals, &str) -> f64,
) {
    let Some((_, last)) = ends.iter().rev().find_map(|bucket| *bucket) else { return };
    let column = |rule: &str| -> Vec<Option<f64>> {
        ends.iter().map(|bucket| bucket.map(|(begin, end)| total(end, rule) - total(begin, rule))).collect()
    };
    let sum = |values: &[Option<f64>]| values.iter().flatten().sum::<f64>();
    let rules = last.tallies.counts.keys().filter_map(rule_of);
    let mut of_rules: Vec<(String, Vec<Option<f64>>)> =
        rules.map(|rule| (rule.to_owned(), column(rule))).filter(|(_, values)| sum(values) > 0.0).collect();
    of_rules.sort_by(|(_, one), (_, other)| sum(other).total_cmp(&sum(one)));
    let others = of_rules.split_off(RULES_SHOWN.min(of_rules.len()));
    for (rule, values) in of_rules {
        columns.insert(format!("{family}.{rule}"), values);
    }
    if !others.is_empty() {
        let bucket = |index: usize| others.iter().map(|(_, values)| values[index]).sum::<Option<f64>>();
        columns.insert(format!("{family}.other"), (0..ends.len()).map(bucket).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Tallies;

    fn totals(received: i64, ready: i64) -> Totals {
        let counts = [(Tally::Received, received), (Tally::Groups(GroupState::Ready), ready)];
        Totals { tallies: Tallies { counts: counts.into_iter().collect(), ..Tallies::default() }, version: 0 }
    }

    fn snapshot(since: i64, minute: i64, received: i64) -> Snapshot {
        Snapshot { since, minute, totals: totals(received, received) }
    }

    fn values(snapshots: Vec<Snapshot>, window: (i64, i64, i64), metric: &str) -> Vec<Option<f64>> {
        let history = History { snapshots, now: totals(100, 100) };
        let (from, to, step) = window;
        let metrics = [Metric::parse(metric).expect("it is one")];
        columns(&history, Window { from, to, step }, 200, &metrics).remove(metric).expect("it is shown")
    }

    fn nothing() -> Snapshot {
        Snapshot { since: 0, minute: 0, totals: Totals::default() }
    }

    #[test]
    fn a_bucket_has_what_happened_in_its_minutes_and_what_there_was_at_its_end() {
        let rows = || vec![nothing(), snapshot(100, 101, 10), snapshot(102, 103, 15)];
        assert_eq!(values(rows(), (99, 105, 1), "received"), [0.0, 10.0, 0.0, 5.0, 0.0, 0.0].map(Some));
        assert_eq!(values(rows(), (99, 105, 1), "ready_groups"), [0.0, 10.0, 10.0, 15.0, 15.0, 15.0].map(Some));
        assert_eq!(values(rows(), (90, 110, 10), "received"), [0.0, 15.0].map(Some));
        // The minute that runs now has what is not in a row.
        assert_eq!(values(rows(), (199, 201, 1), "received"), [0.0, 85.0].map(Some));
    }

    #[test]
    fn nothing_is_known_of_a_gap_and_what_was_counted_before_it_is_where_it_begins() {
        let rows = || vec![nothing(), snapshot(100, 101, 10), snapshot(101, 104, 15), snapshot(104, 105, 16)];
        assert_eq!(
            values(rows(), (100, 106, 1), "received"),
            [Some(10.0), Some(5.0), None, None, Some(1.0), Some(0.0)]
        );
        assert_eq!(values(rows(), (102, 104, 1), "received"), [None, None]);
        assert_eq!(values(rows(), (100, 110, 5), "received"), [16.0, 0.0].map(Some));
    }

    #[test]
    fn what_was_counted_before_the_history_did_not_happen_in_it() {
        let upgraded = || vec![snapshot(0, 0, 70), snapshot(100, 100, 70), snapshot(101, 102, 75)];
        assert_eq!(values(upgraded(), (98, 103, 1), "received"), [None, None, Some(0.0), Some(5.0), Some(0.0)]);
        assert_eq!(values(vec![snapshot(0, 0, 70)], (199, 201, 1), "received"), [None, Some(30.0)]);
    }

    #[test]
    fn a_window_has_whole_buckets_and_wider_ones_where_rows_are_thinned_out() {
        let now = Timestamp::from_micros(1_000_000 * 60_000_000 + 1);
        let window = |from: i64, to: i64, step: i64| {
            let time = |minute: i64| Some(Timestamp::from_micros(minute * 60_000_000 + 30_000_000));
            let request = SeriesRequest {
                policy: PolicyName::default(),
                from: time(from),
                to: time(to),
                step,
                metrics: Vec::new(),
            };
            Window::of(&request, now).map(|window| (window.from, window.to, window.step)).ok()
        };
        assert_eq!(window(999_990, 1_000_000, 1), Some((999_990, 1_000_001, 1)));
        assert_eq!(window(999_990, 2_000_000, 1), Some((999_990, 1_000_001, 1)), "nothing is later than now");
        assert_eq!(window(999_995, 1_000_000, 10), Some((999_990, 1_000_010, 10)));
        assert_eq!(window(1_000_000 - 1_440, 1_000_000, 1), Some((998_560, 1_000_001, 1)));
        assert_eq!(window(1_000_000 - 1_500, 1_000_000, 1), Some((998_500, 1_000_010, 10)));
        assert_eq!(window(1_000_000 - 14 * 1_440, 1_000_000, 20), Some((979_840, 1_000_020, 20)));
        assert_eq!(window(1_000_000 - 30 * 1_440, 1_000_000, 20), Some((956_760, 1_000_020, 60)));
        assert_eq!(window(1_000_001, 1_000_002, 1), None, "it has not begun");
        assert_eq!(window(1_000_000 - 14 * 1_440, 1_000_000, 1), None, "too many points");
    }

    #[test]
    fn the_rules_that_lost_most_are_shown_and_the_others_together() {
        let mut now = Totals::default();
        for rule in 1..=10 {
            let tally = Tally::Dropped(format!("r{rule}"));
            now.tallies.counts.insert(tally.clone(), 1);
            now.tallies.amounts.insert(tally, f64::from(rule));
        }
        let history = History { snapshots: vec![nothing()], now };
        let window = Window { from: 199, to: 201, step: 1 };
        let columns = columns(&history, window, 200, &[Metric::DroppedByRule]);
        assert_eq!(columns.len(), 9);
        assert_eq!(columns["dropped.r10"], [Some(0.0), Some(10.0)]);
        assert_eq!(columns["dropped.other"], [Some(0.0), Some(3.0)]);
        assert!(!columns.contains_key("dropped.r2"));
    }
}
