//! What explains each state. A cause is named only if the facts prove it.
//!
//! The causes of starving are weighted by the time that the next batch would take without them. With `R` groups that
//! became ready in a window of `W` seconds and `X` that one rule discarded, the groups that lack take
//! `lacking * W / R`, and without the rule `lacking * W / (R + X)`.

use std::fmt::Write as _;

use forebay_wire::PolicyCondition as State;

use super::{
    condition::{
        failing, flatness, is_near_bound, lost_group_share, lost_rollout_share, overdue, overdue_after, recent_steps,
        stale_mean, untaken_since,
    },
    facts::{EqualRewards, FILTER_FAILS, Facts, RULES_CHANGED, WORK_COUNTED_MAX, Window, WorkFacts, median},
    finding::{Cause, Numbers},
    sentence::{
        bytes, consumer, count, duration, duration_us, is, percent, plural, real, seconds, share, short_id, under_way,
        was, within,
    },
};
use crate::{
    admission::{refused::RoomFor, room::QUOTA},
    reasons,
    staleness::UnderWay,
};

/// The weight of a cause that explains a state alone.
const WHOLE: f64 = 1.0;

/// The weight of a cause that adds to others by an amount that the ledger does not show.
const ADDS: f64 = 0.3;

/// The weight of agents that are refused room: what they wait for is not known, and may be slow.
const NO_ROOM: f64 = 0.6;

/// The weight of a remark.
const REMARK: f64 = 0.05;

/// The least part of what arrives or is decided that is worth a sentence.
const SHARE_MIN: f64 = 0.05;

/// Without a post for this long, and for this many times the usual distance of posts, agents have stopped.
const NO_POSTS_FLOOR_US: i64 = 2 * 60 * 1_000_000;
const NO_POSTS_FACTOR: f64 = 10.0;

/// Rollouts of stale groups are this many times longer.
const LENGTH_BIAS: f64 = 1.5;

/// The part of the rollouts whose version is assumed that makes staleness a guess.
const ASSUMED_SHARE: f64 = 0.1;

/// Groups of each kind that are needed to compare lengths or times.
const SAMPLE_MIN: usize = 3;

/// Batches that are trained and not saved, from which it is worth a remark.
const UNSAVED_MIN: i64 = 2;

/// Seconds of a day.
const DAY_S: i64 = 86_400;

type Found = Vec<Cause>;

/// The causes of a state, in the order of the documentation.
pub(super) fn of(facts: &Facts, state: State) -> Found {
    let mut found = Found::new();
    match state {
        State::Broken => broken(facts, &mut found),
        State::Stuck => stuck(facts, &mut found),
        State::Starved => starved(facts, &mut found),
        State::Untaken => untaken(facts, &mut found),
        State::HeldBack => held_back(facts, &mut found),
        State::Stale => stale(facts, &mut found),
        State::Flat => flat(facts, &mut found),
        State::Dropping => dropping(facts, &mut found),
        State::Fed | State::Idle => {}
    }
    found
}

fn cause(code: &'static str, weight: f64, text: String, numbers: Numbers) -> Cause {
    let weight = if weight.is_finite() { weight.clamp(0.0, WHOLE) } else { 0.0 };
    Cause { code, filter: None, weight, text, numbers, see: None }
}

/// A call that lists groups or rollouts, the newest first.
fn listed(facts: &Facts, list: &str, query: &str) -> String {
    format!("./{list}?policy={}&{query}&order=newest", facts.policy)
}

/// A reason as the value of a query.
fn encoded(reason: &str) -> String {
    percent_encoding::utf8_percent_encode(reason, percent_encoding::NON_ALPHANUMERIC).to_string()
}

fn broken(facts: &Facts, found: &mut Found) {
    if !facts.is_writable {
        let text = "The last write of the store failed; it is tried again with every sweep, and the log has the error";
        found.push(cause("store-unwritable", WHOLE, text.to_owned(), Numbers::new()));
    }
    if facts.unconserved != 0 {
        let lost = facts.unconserved.saturating_abs();
        let text = format!(
            "{} {} received and {} in no state, or the other way round; `forebay doctor` examines the ledger",
            plural(lost, "rollout"),
            was(lost),
            is(lost)
        );
        found.push(cause("tallies-differ", WHOLE, text, Numbers::from([("rollouts", lost as f64)])));
    }
}

fn stuck(facts: &Facts, found: &mut Found) {
    if let Some(lease) = failing(facts) {
        let max = facts.limits.max_deliveries;
        let text = format!(
            "Batch {} failed {} of {}: the last lease, of {}, began {} ago",
            short_id(&lease.batch_id),
            count(lease.failed),
            plural(max, "delivery"),
            consumer(&lease.consumer),
            duration_us(facts.age_us(lease.since))
        );
        let numbers = Numbers::from([
            ("failed", lease.failed as f64),
            ("max_deliveries", max as f64),
            ("since_s", seconds(facts.age_us(lease.since))),
        ]);
        let see = format!("./batches/{}", lease.batch_id);
        found.push(Cause { see: Some(see), ..cause("deliveries-fail", WHOLE, text, numbers) });
    }
    if let Some(lease) = overdue(facts) {
        let (held, bound) = (facts.age_us(lease.since), overdue_after(facts));
        let usual = facts.median_held_us();
        let median_text = usual.map(|median| format!(", the median step is {}", duration_us(median)));
        let text = format!(
            "{} has held batch {} for {} and keeps its lease: more than {} is unusual{}",
            consumer(&lease.consumer),
            short_id(&lease.batch_id),
            duration_us(held),
            duration_us(bound),
            median_text.unwrap_or_default()
        );
        let mut numbers = Numbers::from([("held_s", seconds(held)), ("bound_s", seconds(bound))]);
        numbers.extend(usual.map(|median| ("median_s", seconds(median))));
        let see = format!("./batches/{}", lease.batch_id);
        found.push(Cause { see: Some(see), ..cause("lease-overdue", 0.95, text, numbers) });
    }
    quarantined(facts, found);
    expired(facts, found);
    not_checkpointed(facts, found);
    superseded(facts, found);
}

fn quarantined(facts: &Facts, found: &mut Found) {
    let (batches, groups) = (facts.gauges.quarantined_batches, facts.gauges.quarantined_groups);
    if batches > 0 {
        let text = format!(
            "{} {} quarantined after the last delivery failed; an operator readmits {} or resets the policy",
            plural(batches, "batch"),
            is(batches),
            if batches == 1 { "it" } else { "them" }
        );
        let see = format!("./batches?policy={}&state=quarantined", facts.policy);
        let numbers = Numbers::from([("batches", batches as f64)]);
        found.push(Cause { see: Some(see), ..cause("quarantined", 0.9, text, numbers) });
    }
    if groups > 0 {
        let text = format!(
            "{} {} quarantined, because a trainer named {} or a payload is damaged",
            plural(groups, "group"),
            is(groups),
            if groups == 1 { "it" } else { "them" }
        );
        let see = listed(facts, "groups", "state=quarantined");
        let numbers = Numbers::from([("groups", groups as f64)]);
        found.push(Cause { see: Some(see), ..cause("quarantined", 0.85, text, numbers) });
    }
}

fn expired(facts: &Facts, found: &mut Found) {
    let hour = &facts.windows.hour;
    if hour.expired > 0 {
        let text = format!(
            "{} expired {}: the trainer stopped, or takes longer than `lease.ttl_s` without extending its lease",
            plural(hour.expired, "lease"),
            within(hour.seconds)
        );
        let numbers = Numbers::from([("expired", hour.expired as f64), ("window_s", hour.seconds as f64)]);
        let see = format!("./batches?policy={}&state=returned", facts.policy);
        found.push(Cause { see: Some(see), ..cause("leases-expire", 0.8, text, numbers) });
    }
}

/// What a resume would bring back.
fn not_checkpointed(facts: &Facts, found: &mut Found) {
    let unsaved = facts.gauges.trained_batches;
    if facts.limits.settles_by_checkpoint && unsaved >= UNSAVED_MIN {
        let after = match facts.version.checkpoint_step {
            Some(step) => format!("since step {}", count(step)),
            None => "in this run".to_owned(),
        };
        let text = format!("No checkpoint {after}: a trainer that restarts trains {} again", plural(unsaved, "batch"));
        let mut numbers = Numbers::from([("batches", unsaved as f64)]);
        numbers.extend(facts.version.checkpoint_step.map(|step| ("checkpoint_step", step as f64)));
        let see = format!("./batches?policy={}&state=trained", facts.policy);
        found.push(Cause { see: Some(see), ..cause("not-checkpointed", REMARK, text, numbers) });
    }
}

fn superseded(facts: &Facts, found: &mut Found) {
    if facts.restored {
        let text = "A restore began a new epoch and no trainer has resumed since: trainers of earlier epochs are \
                    refused as superseded";
        found.push(cause("superseded-caller", 0.9, text.to_owned(), Numbers::new()));
    }
}

fn starved(facts: &Facts, found: &mut Found) {
    backlog_full(facts, WHOLE, found);
    slow_rollout(facts, found);
    no_posts(facts, found);
    scores_missing(facts, found);
    environments_lack(facts, found);
    no_room(facts, NO_ROOM, found);
    losses(facts, found, Ranking::TimeSaved);
    stale_groups(facts, found);
    groups_fill_slowly(facts, found);
    waiting_for_few(facts, found);
    returned_goes_first(facts, found);
    superseded(facts, found);
    changes(facts, found);
}

/// There are enough groups, and a rollout is waited for that would be too old for the batch after this one.
fn slow_rollout(facts: &Facts, found: &mut Found) {
    let Some(waited) = facts.waits_for() else { return };
    let (age, left) = (facts.age_us(waited.began), waited.until.micros_since(facts.now).max(0));
    let began = match &waited.first {
        UnderWay::Session { .. } => "was opened",
        UnderWay::Admission(_) => "was granted",
        UnderWay::Scoring { .. } => "arrived",
    };
    let others = match waited.rollouts.saturating_sub(1) {
        0 => String::new(),
        others => format!(" and {} more", count(others as i64)),
    };
    let text = format!(
        "The batch waits for {}, which {began} {} ago{others}: the version that follows from this batch would make it too \
         old; the wait ends in {} at the latest (`staleness.wait_s`)",
        under_way(&waited.first),
        duration_us(age),
        duration_us(left)
    );
    let numbers =
        Numbers::from([("rollouts", waited.rollouts as f64), ("since_s", seconds(age)), ("left_s", seconds(left))]);
    let see = match &waited.first {
        UnderWay::Session { session_id, .. } => format!("./sessions/{session_id}"),
        UnderWay::Admission(_) => format!("./policies/{}", facts.policy),
        UnderWay::Scoring { .. } => listed(facts, "trajectories", "state=scoring"),
    };
    found.push(Cause { see: Some(see), ..cause("slow-rollout", WHOLE, text, numbers) });
}

fn no_posts(facts: &Facts, found: &mut Found) {
    let Some(last) = facts.last_post else {
        let text = "Nothing was ever posted to this policy".to_owned();
        found.push(cause("no-posts", WHOLE, text, Numbers::new()));
        return;
    };
    let hour = &facts.windows.hour;
    // The usual distance of two posts, of the time before the posts stopped.
    let silent = facts.age_us(last);
    let active_s = hour.seconds as f64 - seconds(silent);
    let usual_s = if hour.received > 0 && active_s > 0.0 { active_s / hour.received as f64 } else { 0.0 };
    if silent < NO_POSTS_FLOOR_US || seconds(silent) < NO_POSTS_FACTOR * usual_s {
        return;
    }
    let text = format!(
        "No post for {}; {} arrived {}",
        duration_us(silent),
        plural(hour.received, "rollout"),
        within(hour.seconds)
    );
    let numbers = Numbers::from([
        ("since_s", seconds(silent)),
        ("received", hour.received as f64),
        ("window_s", hour.seconds as f64),
    ]);
    let see = format!("./trajectories?policy={}&order=newest", facts.policy);
    found.push(Cause { see: Some(see), ..cause("no-posts", WHOLE, text, numbers) });
}

/// Rollouts, and groups that have all of theirs, wait for scores.
fn scores_missing(facts: &Facts, found: &mut Found) {
    let Some(scoring) = &facts.scoring else { return };
    let names: Vec<&str> = scoring.names.iter().map(String::as_str).collect();
    let names = format!("the {} {}", if names.len() == 1 { "score" } else { "scores" }, names.join(", "));
    let (age, rollouts) = (facts.age_us(scoring.oldest), facts.gauges.scoring_rollouts);
    let (text, weight) = if scoring.groups > 0 {
        let have = if scoring.groups == 1 {
            "has all of its rollouts and waits"
        } else {
            "have all of their rollouts and wait"
        };
        let text = format!(
            "{} {have} for {names}, the oldest rollout for {}",
            plural(scoring.groups, "group"),
            duration_us(age)
        );
        (text, WHOLE)
    } else {
        let wait = if rollouts == 1 { "waits" } else { "wait" };
        let text = format!("{} {wait} for {names}, the oldest for {}", plural(rollouts, "rollout"), duration_us(age));
        (text, ADDS)
    };
    let text =
        scoring.work.iter().filter_map(|work| work_for(facts, work)).fold(text, |text, work| text + "; " + &work);
    let numbers =
        Numbers::from([("groups", scoring.groups as f64), ("rollouts", rollouts as f64), ("since_s", seconds(age))]);
    let see = listed(facts, "trajectories", "state=scoring");
    found.push(Cause { see: Some(see), ..cause("scores-missing", weight, text, numbers) });
}

/// A scorer that has not asked for this long does not ask any more: one that waits asks every few seconds.
const SCORER_SILENT_US: i64 = 60_000_000;

/// How the work for a score stands, if there is some.
fn work_for(facts: &Facts, work: &WorkFacts) -> Option<String> {
    let name = &work.name;
    let items = |count: i64| match count {
        ..=WORK_COUNTED_MAX => plural(count, "item"),
        _ => format!("more than {}", plural(WORK_COUNTED_MAX, "item")),
    };
    if work.exhausted > 0 {
        let failure =
            work.failure.as_ref().map_or_else(String::new, |failure| format!(", the last time with: {failure}"));
        let have = if work.exhausted == 1 { "has" } else { "have" };
        return Some(format!(
            "{} of the work for {name} {have} no attempts left{failure} (`POST /scores/retry` gives them back)",
            items(work.exhausted)
        ));
    }
    if work.open > 0 && work.leased == 0 {
        return match work.asked {
            None => Some(format!("nobody has ever asked for work for {name}")),
            Some(asked) if facts.age_us(asked) >= SCORER_SILENT_US => {
                Some(format!("nobody has asked for work for {name} for {}", duration_us(facts.age_us(asked))))
            }
            Some(_) => None,
        };
    }
    let is = if work.leased == 1 { "is" } else { "are" };
    (work.leased > 0).then(|| format!("{} of the work for {name} {is} with scorers", items(work.leased)))
}

/// A batch waits for the environments that have a share in it.
fn environments_lack(facts: &Facts, found: &mut Found) {
    for each in facts.lacking_environments() {
        let text = format!(
            "The batch waits for environment {}: {} of the {} that it needs {} ready",
            each.environment,
            count(each.ready),
            plural(each.needed, "group"),
            is(each.ready)
        );
        let numbers = Numbers::from([("ready", each.ready as f64), ("needed", each.needed as f64)]);
        let see = listed(facts, "groups", &format!("state=open&environment={}", encoded(&each.environment)));
        // It is the whole reason if there are enough groups in all.
        let weight = if facts.gauges.ready_groups >= facts.gauges.needed_groups { WHOLE } else { ADDS };
        found.push(Cause { see: Some(see), ..cause("environment-lacks", weight, text, numbers) });
    }
}

/// Agents ask for room and get none.
fn no_room(facts: &Facts, weight: f64, found: &mut Found) {
    for refused in &facts.refused {
        let age = facts.age_us(refused.since());
        let calls = match refused.by {
            RoomFor::Admission => "Admissions",
            RoomFor::Session => "New sessions",
        };
        let of = refused.environment.as_ref().map(|label| format!(" of environment {label}")).unwrap_or_default();
        let because = match refused.rule.as_str() {
            "staleness" => "as many rollouts have been started as stay fresh",
            "backlog" => "the backlog is full",
            "whole-group" => "a new group begins only if all of its places fit",
            "minimum-share" => "the room that is left is kept for an environment whose minimum the next batch lacks",
            "group-places" => {
                "room is reserved for each place of their group as often as rollouts may be posted for it"
            }
            QUOTA => "as many sessions are open as a quota of this service allows the team",
            rule => rule,
        };
        let text = format!("{calls}{of} have been refused for {}: {because}", duration_us(age));
        let see = match refused.by {
            RoomFor::Admission => format!("./policies/{}", facts.policy),
            RoomFor::Session => format!("./sessions?policy={}", facts.policy),
        };
        let numbers = Numbers::from([("since_s", seconds(age)), ("reserved", facts.gauges.reserved as f64)]);
        found.push(Cause { see: Some(see), ..cause("no-room", weight, text, numbers) });
    }
}

/// What causes of loss are ranked by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ranking {
    /// The time that the next batch would take without the loss.
    TimeSaved,
    /// The part that is lost.
    Share,
}

/// What filters and timeouts lose.
fn losses(facts: &Facts, found: &mut Found, ranking: Ranking) {
    let window = facts.deciding_window();
    for (rule, discarded) in &window.discarded {
        let part = share(*discarded, window.decided());
        if part >= SHARE_MIN {
            found.push(discards(facts, window, rule, *discarded, ranking));
        }
    }
    let window = if facts.windows.quarter.received > 0 { &facts.windows.quarter } else { &facts.windows.hour };
    for (rule, dropped) in &window.dropped {
        if share(*dropped, window.received) >= SHARE_MIN {
            found.push(drops(facts, window, rule, *dropped));
        }
    }
    late(facts, window, found);
}

/// Seconds until the groups that lack are ready at a rate; none at no rate.
fn eta(lacking: i64, window: &Window, ready: i64) -> Option<f64> {
    (ready > 0 && window.seconds > 0).then(|| lacking as f64 * window.seconds as f64 / ready as f64)
}

fn discards(facts: &Facts, window: &Window, rule: &str, discarded: i64, ranking: Ranking) -> Cause {
    let decided = window.decided();
    let part = share(discarded, decided);
    let is_filter = facts.limits.group_filters.iter().any(|filter| filter == rule);
    let mut numbers = Numbers::from([
        ("discarded", discarded as f64),
        ("decided", decided as f64),
        ("window_s", window.seconds as f64),
        ("share", part),
    ]);
    let times_out = rule == reasons::INCOMPLETE || rule == reasons::EXHAUSTED;
    let of_decided = format!(
        "{} of decided groups ({} of {} {})",
        percent(part),
        count(discarded),
        count(decided),
        within(window.seconds)
    );
    let mut text = if times_out {
        format!("{of_decided} had too few rollouts at their end ({rule})")
    } else if rule == reasons::BY_HAND {
        format!("Callers discarded {of_decided}")
    } else {
        format!("{rule} discards {of_decided}")
    };
    let day = &facts.windows.day;
    if day.seconds > window.seconds && day.decided() > decided {
        let before = share(day.discarded.get(rule).copied().unwrap_or(0), day.decided());
        numbers.insert("share_24h", before);
        // A history of less than a day does not pretend to be one.
        let long = if day.seconds >= DAY_S { "24 h".to_owned() } else { duration(day.seconds as f64) };
        let _ = write!(text, "; in the last {long} it was {}", percent(before));
    }
    if let Some(EqualRewards { of, best, worst, range }) = facts.equal_rewards(rule) {
        numbers.extend([("equal_best", best as f64), ("equal_worst", worst as f64), ("equal_of", of as f64)]);
        let _ = write!(
            text,
            ". Of its newest {}, {} have only the best reward, {} (solved), and {} only the worst, {} (never solved)",
            plural(of, "group"),
            count(best),
            range.1,
            count(worst),
            range.0
        );
    }
    let lacking = facts.lacking_groups();
    let weight = match ranking {
        Ranking::Share => part,
        Ranking::TimeSaved => {
            let (now, without) = (eta(lacking, window, window.ready), eta(lacking, window, window.ready + discarded));
            if let Some(without) = without.filter(|_| lacking > 0) {
                numbers.insert("eta_without_s", without);
                let takes = match now {
                    Some(now) => {
                        numbers.insert("eta_s", now);
                        format!("At this rate the batch takes {}", duration(now))
                    }
                    None => "At this rate the batch is never full".to_owned(),
                };
                let _ = write!(text, ". {takes}, without it {}", duration(without));
            }
            // With R groups ready and X discarded, 1 - eta_without / eta is X / (R + X). What several rules share is
            // told apart by their parts of what was decided.
            share(discarded, window.ready + discarded).min(WHOLE) * (0.5 + 0.5 * part)
        }
    };
    let code = if times_out { "groups-time-out" } else { "filter-discards" };
    let see = listed(facts, "groups", &format!("state=discarded&reason={}", encoded(rule)));
    Cause { filter: is_filter.then(|| rule.to_owned()), see: Some(see), ..cause(code, weight, text, numbers) }
}

fn drops(facts: &Facts, window: &Window, rule: &str, dropped: i64) -> Cause {
    let part = share(dropped, window.received);
    let numbers = Numbers::from([
        ("dropped", dropped as f64),
        ("received", window.received as f64),
        ("window_s", window.seconds as f64),
        ("share", part),
    ]);
    let of_received = format!(
        "{} of rollouts ({} of {} {})",
        percent(part),
        count(dropped),
        count(window.received),
        within(window.seconds)
    );
    let see = listed(facts, "trajectories", &format!("verdict=dropped&reason={}", encoded(rule)));
    if rule == reasons::NO_REWARD {
        let text = format!("{of_received} were posted without a reward and dropped");
        return Cause { see: Some(see), ..cause("no-reward", part, text, numbers) };
    }
    if rule == reasons::UNSCORED {
        let text = format!("{of_received} lacked a score at their time and were dropped");
        return Cause { see: Some(see), ..cause("unscored", part, text, numbers) };
    }
    let is_filter = facts.limits.rollout_filters.iter().any(|filter| filter == rule);
    let text = format!("{rule} drops {of_received}");
    Cause { filter: is_filter.then(|| rule.to_owned()), see: Some(see), ..cause("filter-drops", part, text, numbers) }
}

fn late(facts: &Facts, window: &Window, found: &mut Found) {
    let part = share(window.late, window.received);
    if part < SHARE_MIN {
        return;
    }
    let text = format!(
        "{} of rollouts ({} of {} {}) arrived after their group was decided",
        percent(part),
        count(window.late),
        count(window.received),
        within(window.seconds)
    );
    let numbers = Numbers::from([
        ("late", window.late as f64),
        ("received", window.received as f64),
        ("window_s", window.seconds as f64),
        ("share", part),
    ]);
    let see = listed(facts, "trajectories", "verdict=late");
    found.push(Cause { see: Some(see), ..cause("late-arrivals", part, text, numbers) });
}

fn stale_groups(facts: &Facts, found: &mut Found) {
    let hour = &facts.windows.hour;
    let part = share(hour.stale, hour.decided().max(hour.stale));
    if hour.stale == 0 || part < SHARE_MIN {
        return;
    }
    let bound = facts.limits.staleness_max.unwrap_or(0);
    let text = format!(
        "{} went stale {} before a batch took {}: {} of {} (bound {})",
        plural(hour.stale, "group"),
        within(hour.seconds),
        if hour.stale == 1 { "it" } else { "them" },
        percent(part),
        plural(hour.decided(), "decided group"),
        count(bound)
    );
    let numbers = Numbers::from([
        ("stale", hour.stale as f64),
        ("decided", hour.decided() as f64),
        ("window_s", hour.seconds as f64),
        ("share", part),
        ("bound", bound as f64),
    ]);
    let see = listed(facts, "groups", "state=stale");
    found.push(Cause { see: Some(see), ..cause("groups-go-stale", part, text, numbers) });
}

/// Groups take longer from their first rollout to their last than a trainer takes for a batch.
fn groups_fill_slowly(facts: &Facts, found: &mut Found) {
    let filled: Vec<i64> = facts.groups.iter().filter_map(|group| group.filled_us).collect();
    let Some(step) = facts.median_held_us().filter(|held| *held > 0 && filled.len() >= SAMPLE_MIN) else { return };
    let number = filled.len();
    let Some(fill) = median(filled).filter(|fill| *fill > step) else { return };
    let text = format!(
        "Groups fill slowly: the median of {} from the first rollout to the last is {}, and a batch trains for {}",
        count(number as i64),
        duration_us(fill),
        duration_us(step)
    );
    let numbers = Numbers::from([("groups", number as f64), ("fill_s", seconds(fill)), ("step_s", seconds(step))]);
    let weight = ADDS * (1.0 - step as f64 / fill as f64);
    let see = listed(facts, "groups", "state=open");
    found.push(Cause { see: Some(see), ..cause("groups-fill-slowly", weight, text, numbers) });
}

/// The fullest open groups lack few rollouts.
fn waiting_for_few(facts: &Facts, found: &mut Found) {
    let lacking = facts.lacking_groups();
    let fullest: Vec<i64> = facts.lacking.iter().take(lacking as usize).map(|lack| i64::from(*lack)).collect();
    let rollouts: i64 = fullest.iter().sum();
    if lacking == 0 || (fullest.len() as i64) < lacking || rollouts == 0 {
        return;
    }
    let text = if lacking == 1 {
        format!("The fullest open group lacks {}; then the batch is full", plural(rollouts, "rollout"))
    } else {
        format!(
            "The {} fullest open groups lack {} in all; then the batch is full",
            count(lacking),
            plural(rollouts, "rollout")
        )
    };
    let mut numbers = Numbers::from([("rollouts", rollouts as f64)]);
    if lacking > 1 {
        numbers.insert("groups", lacking as f64);
    }
    let see = listed(facts, "groups", "state=open");
    found.push(Cause { see: Some(see), ..cause("waiting-for-few", REMARK, text, numbers) });
}

fn returned_goes_first(facts: &Facts, found: &mut Found) {
    let returned = facts.gauges.returned_batches;
    if returned > 0 {
        let text = format!(
            "{} that came back {} out before any new batch",
            plural(returned, "batch"),
            if returned == 1 { "goes" } else { "go" }
        );
        let see = format!("./batches?policy={}&state=returned", facts.policy);
        let numbers = Numbers::from([("batches", returned as f64)]);
        found.push(Cause { see: Some(see), ..cause("returned-goes-first", REMARK, text, numbers) });
    }
}

/// What operators changed, if what is lost has doubled since, and filters that began to fail.
fn changes(facts: &Facts, found: &mut Found) {
    let window = facts.deciding_window();
    let (now, before) = (lost_group_share(window), lost_group_share(&facts.windows.day));
    let (dropped, dropped_before) = (lost_rollout_share(window), lost_rollout_share(&facts.windows.day));
    let has_turned =
        (now >= SHARE_MIN && now > 1.2 * before) || (dropped >= SHARE_MIN && dropped > 1.2 * dropped_before);
    let changed = facts.events.iter().find(|event| event.kind == RULES_CHANGED);
    if let Some(event) = changed.filter(|event| has_turned || facts.age_us(event.at) <= window.seconds * 1_000_000) {
        let age = facts.age_us(event.at);
        let by = event.key_id.as_ref().map(|key| format!(" by key {key}")).unwrap_or_default();
        let text = format!("The rules were changed {} ago{by}", duration_us(age));
        let see = format!("./policies/{}", facts.policy);
        let numbers = Numbers::from([("since_s", seconds(age))]);
        found.push(Cause { see: Some(see), ..cause("rules-changed", 0.1, text, numbers) });
    }
    let failing = facts.events.iter().find(|event| event.kind == FILTER_FAILS);
    if let Some(event) = failing.filter(|event| facts.age_us(event.at) <= DAY_S * 1_000_000) {
        let age = facts.age_us(event.at);
        let filter = event.filter.clone().unwrap_or_default();
        let text = format!("The filter {filter} began to fail {} ago: it counts as not matching", duration_us(age));
        let numbers = Numbers::from([("since_s", seconds(age))]);
        found.push(Cause { filter: event.filter.clone(), ..cause("filter-fails", 0.2, text, numbers) });
    }
}

fn untaken(facts: &Facts, found: &mut Found) {
    let age = untaken_since(facts).unwrap_or(0);
    let asked = match facts.last_ask {
        Some(at) => format!("No trainer holds a lease or has asked for {}", duration_us(facts.age_us(at))),
        None => "No trainer has ever asked for a batch".to_owned(),
    };
    let gauges = &facts.gauges;
    let mut numbers = Numbers::from([
        ("ready_groups", gauges.ready_groups as f64),
        ("needed_groups", gauges.needed_groups as f64),
        ("since_s", seconds(age)),
    ]);
    numbers.extend(facts.last_ask.map(|at| ("asked_s", seconds(facts.age_us(at)))));
    let text = format!(
        "{asked}: {} {} ready since {}, and a batch needs {}",
        plural(gauges.ready_groups, "group"),
        is(gauges.ready_groups),
        duration_us(age),
        count(gauges.needed_groups)
    );
    let see = listed(facts, "groups", "state=ready");
    found.push(Cause { see: Some(see), ..cause("nobody-asks", WHOLE, text, numbers) });
    superseded(facts, found);
    backlog_full(facts, ADDS, found);
    returned_goes_first(facts, found);
    not_checkpointed(facts, found);
}

fn backlog_full(facts: &Facts, weight: f64, found: &mut Found) {
    if !facts.is_backlog_full() {
        return;
    }
    let (gauges, limits) = (&facts.gauges, &facts.limits);
    let mut text = format!(
        "The backlog is full: {} of {} and {} of {} wait to be trained, and posts that open a group are answered with 429",
        count(gauges.live_rollouts),
        plural(limits.max_rollouts, "rollout"),
        bytes(gauges.live_bytes),
        bytes(limits.max_bytes)
    );
    let lacking: Vec<&str> = facts.lacking_environments().map(|each| each.environment.as_str()).collect();
    if !lacking.is_empty() {
        let labels = lacking.join(", ");
        write!(text, ", except groups of environment {labels}, which the batch waits for").expect("a text takes all");
    }
    let numbers = Numbers::from([
        ("live_rollouts", gauges.live_rollouts as f64),
        ("max_rollouts", limits.max_rollouts as f64),
        ("live_bytes", gauges.live_bytes as f64),
        ("max_bytes", limits.max_bytes as f64),
    ]);
    let see = listed(facts, "groups", "state=ready");
    found.push(Cause { see: Some(see), ..cause("backlog-full", weight, text, numbers) });
}

fn held_back(facts: &Facts, found: &mut Found) {
    backlog_full(facts, WHOLE, found);
    no_room(facts, if facts.is_backlog_full() { ADDS } else { NO_ROOM }, found);
    let trained = facts.windows.hour.acked;
    let hour = &facts.windows.hour;
    if hour.seconds > 0 {
        let text = format!(
            "Trainers acked {} {}, and {} arrived: training is slower than the agents",
            plural(trained, "batch"),
            within(hour.seconds),
            plural(hour.received, "rollout")
        );
        let numbers = Numbers::from([
            ("acked", trained as f64),
            ("received", hour.received as f64),
            ("window_s", hour.seconds as f64),
        ]);
        found.push(cause("training-slower", ADDS, text, numbers));
    }
    returned_goes_first(facts, found);
}

fn stale(facts: &Facts, found: &mut Found) {
    stale_groups(facts, found);
    near_bound(facts, found);
    version_lags(facts, found);
    length_bias(facts, found);
    versions_assumed(facts, found);
    changes(facts, found);
}

fn near_bound(facts: &Facts, found: &mut Found) {
    let Some(bound) = facts.limits.staleness_max.filter(|_| is_near_bound(facts)) else { return };
    let recent = recent_steps(facts);
    let mean = stale_mean(&recent);
    let text = format!(
        "Groups of the last {} were {} versions old on average, and the bound is {}",
        plural(recent.len() as i64, "step"),
        real(mean),
        count(bound)
    );
    let numbers = Numbers::from([("steps", recent.len() as f64), ("mean", mean), ("bound", bound as f64)]);
    let see = format!("./policies/{}/steps?order=newest", facts.policy);
    found.push(Cause { see: Some(see), ..cause("near-the-bound", 0.6, text, numbers) });
}

/// The trainer has made steps whose weights agents do not get.
fn version_lags(facts: &Facts, found: &mut Found) {
    let Some(bound) = facts.limits.staleness_max else { return };
    let version = &facts.version;
    let lag = version.acked_step.unwrap_or(0) - version.step.unwrap_or(0);
    if lag <= 0 || 2 * lag < bound.max(1) {
        return;
    }
    let text = format!(
        "Version {} was published at step {}, and step {} is acked: agents play with weights that are {} old",
        count(version.current),
        count(version.step.unwrap_or(0)),
        count(version.acked_step.unwrap_or(0)),
        plural(lag, "step")
    );
    let numbers = Numbers::from([
        ("version", version.current as f64),
        ("version_step", version.step.unwrap_or(0) as f64),
        ("acked_step", version.acked_step.unwrap_or(0) as f64),
        ("lag", lag as f64),
    ]);
    found.push(cause("version-lags", 0.5, text, numbers));
}

/// Long rollouts go stale, so that the rest is shorter than what agents do.
fn length_bias(facts: &Facts, found: &mut Found) {
    let mean = |wanted: fn(&super::facts::GroupFacts) -> bool| {
        let tokens: Vec<f64> =
            facts.groups.iter().filter(|group| wanted(group)).filter_map(|group| group.tokens_mean).collect();
        (tokens.len() >= SAMPLE_MIN).then(|| tokens.iter().sum::<f64>() / tokens.len() as f64)
    };
    let (Some(stale), Some(trained)) = (mean(|group| group.is_stale), mean(|group| group.is_batched)) else { return };
    if trained <= 0.0 || stale / trained < LENGTH_BIAS {
        return;
    }
    let text = format!(
        "Long rollouts go stale: they have {} tokens on average, and those that are trained {}",
        count(stale.round() as i64),
        count(trained.round() as i64)
    );
    let numbers = Numbers::from([("stale_tokens", stale.round()), ("trained_tokens", trained.round())]);
    let see = listed(facts, "groups", "state=stale");
    found.push(Cause { see: Some(see), ..cause("length-bias", 0.4, text, numbers) });
}

fn versions_assumed(facts: &Facts, found: &mut Found) {
    let hour = &facts.windows.hour;
    let part = share(hour.assumed, hour.received);
    if part < ASSUMED_SHARE {
        return;
    }
    let text = format!(
        "{} of rollouts ({} of {} {}) came without a version: their staleness is counted from their arrival",
        percent(part),
        count(hour.assumed),
        count(hour.received),
        within(hour.seconds)
    );
    let numbers = Numbers::from([
        ("assumed", hour.assumed as f64),
        ("received", hour.received as f64),
        ("window_s", hour.seconds as f64),
        ("share", part),
    ]);
    found.push(cause("versions-assumed", 0.2, text, numbers));
}

fn flat(facts: &Facts, found: &mut Found) {
    let (flat, groups, steps) = flatness(facts);
    let part = share(flat, groups);
    let text = format!(
        "{} of {} in the last {} ({}) have rewards that are all equal, and so no advantage",
        count(flat),
        plural(groups, "trained group"),
        plural(steps as i64, "step"),
        percent(part)
    );
    let numbers =
        Numbers::from([("flat", flat as f64), ("groups", groups as f64), ("steps", steps as f64), ("share", part)]);
    let see = format!("./policies/{}/steps?order=newest", facts.policy);
    found.push(Cause { see: Some(see), ..cause("flat-groups", WHOLE, text, numbers) });
    if facts.limits.group_filters.is_empty() {
        let text = "No filter of the policy examines groups: one such as `reward_std < 1e-6` would discard these";
        found.push(cause("no-group-filter", ADDS, text.to_owned(), Numbers::new()));
    }
    changes(facts, found);
}

fn dropping(facts: &Facts, found: &mut Found) {
    losses(facts, found, Ranking::Share);
    changes(facts, found);
}
