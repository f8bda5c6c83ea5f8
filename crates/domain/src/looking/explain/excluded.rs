//! What was looked at and is not the reason, and what the ledger cannot say. Both keep a reader from searching on.

use std::fmt::Write as _;

use forebay_wire::PolicyCondition as State;

use super::{
    facts::Facts,
    finding::{Finding, Numbers},
    sentence::{bytes, count, duration, duration_us, plural, real, seconds, within},
};

/// A post is recent for this many microseconds.
const RECENT_POST_US: i64 = 2 * 60 * 1_000_000;

fn finding(code: &'static str, text: String, numbers: Numbers) -> Finding {
    Finding { code, text, numbers }
}

/// What is not the reason of a state. Nothing is said of states that need no reason.
pub(super) fn ruled_out(facts: &Facts, state: State) -> Vec<Finding> {
    if matches!(state, State::Fed | State::Idle) {
        return Vec::new();
    }
    let checks: [fn(&Facts) -> Option<Finding>; 7] =
        [posts, backlog, staleness, leases, quarantine, checkpoints, store];
    checks.into_iter().filter_map(|check| check(facts)).collect()
}

fn posts(facts: &Facts) -> Option<Finding> {
    let age = facts.age_us(facts.last_post?);
    (age < RECENT_POST_US).then(|| {
        let text = format!("agents post, the last time {} ago", duration_us(age));
        finding("no-posts", text, Numbers::from([("since_s", seconds(age))]))
    })
}

fn backlog(facts: &Facts) -> Option<Finding> {
    let (gauges, limits) = (&facts.gauges, &facts.limits);
    (!facts.is_backlog_full()).then(|| {
        let text = format!(
            "the backlog has room: {} of {}, {} of {}",
            count(gauges.live_rollouts),
            plural(limits.max_rollouts, "rollout"),
            bytes(gauges.live_bytes),
            bytes(limits.max_bytes)
        );
        let numbers = Numbers::from([
            ("live_rollouts", gauges.live_rollouts as f64),
            ("max_rollouts", limits.max_rollouts as f64),
            ("live_bytes", gauges.live_bytes as f64),
            ("max_bytes", limits.max_bytes as f64),
        ]);
        finding("backlog-full", text, numbers)
    })
}

fn staleness(facts: &Facts) -> Option<Finding> {
    let hour = &facts.windows.hour;
    if hour.stale > 0 || hour.seconds == 0 {
        return None;
    }
    let Some(bound) = facts.limits.staleness_max else {
        return Some(finding("groups-go-stale", "staleness has no bound".to_owned(), Numbers::new()));
    };
    let mut text = format!("no group went stale {}", within(hour.seconds));
    let mut numbers = Numbers::from([("window_s", hour.seconds as f64)]);
    if let Some(step) = facts.steps.first() {
        let _ =
            write!(text, ": the last step trained groups {} of {} versions old", real(step.stale_mean), count(bound));
        numbers.insert("mean", step.stale_mean);
        numbers.insert("bound", bound as f64);
    }
    Some(finding("groups-go-stale", text, numbers))
}

fn leases(facts: &Facts) -> Option<Finding> {
    let day = &facts.windows.day;
    (day.expired == 0 && day.nacked == 0 && day.seconds > 0).then(|| {
        let text = format!("no lease expired or was given back {}", within(day.seconds));
        finding("leases-expire", text, Numbers::from([("window_s", day.seconds as f64)]))
    })
}

fn quarantine(facts: &Facts) -> Option<Finding> {
    let quarantined = facts.gauges.quarantined_batches + facts.gauges.quarantined_groups;
    (quarantined == 0).then(|| finding("quarantined", "nothing is quarantined".to_owned(), Numbers::new()))
}

fn checkpoints(facts: &Facts) -> Option<Finding> {
    (!facts.restored).then(|| finding("superseded-caller", "no restore shuts trainers out".to_owned(), Numbers::new()))
}

fn store(facts: &Facts) -> Option<Finding> {
    let is_healthy = facts.is_writable && facts.unconserved == 0;
    is_healthy
        .then(|| finding("store-unwritable", "the store writes and its tallies add up".to_owned(), Numbers::new()))
}

/// What the ledger cannot say about a state.
pub(super) fn unknown(facts: &Facts, state: State) -> Vec<Finding> {
    let mut found = Vec::new();
    if matches!(state, State::Starved | State::Dropping)
        && facts.gauges.reserved == 0
        && facts.gauges.open_sessions == 0
    {
        let text = "agents' unfinished work is not visible without admissions or sessions";
        found.push(finding("work-in-progress", text.to_owned(), Numbers::new()));
    }
    if matches!(state, State::Untaken | State::Stuck) {
        let text = "whether the trainer's process runs is not visible: it is known only by its calls";
        found.push(finding("trainer-process", text.to_owned(), Numbers::new()));
    }
    let day = &facts.windows.day;
    let is_short = day.seconds < 3_600 && !matches!(state, State::Fed | State::Idle);
    if is_short {
        let long = duration(day.seconds as f64);
        let text = format!("the history is {long} long; nothing before it is compared");
        found.push(finding("short-history", text, Numbers::from([("history_s", day.seconds as f64)])));
    }
    found
}
