//! Which state a policy is in, and the sentence about it.
//!
//! Thresholds are the policy's own medians with a floor, so that a policy whose steps take an hour is not called stuck
//! after ten minutes.

use forebay_wire::PolicyCondition as State;

use super::{
    facts::{EnvironmentFacts, Facts, Lease, StepFacts, Window},
    finding::Cause,
    sentence::{
        bytes, consumer, count, duration, duration_us, is, percent, plural, real, share, short_id, under_way, within,
    },
};
use crate::{
    admission::{refused::RefusedRoom, room::QUOTA},
    clock::Timestamp,
};

const SECOND: i64 = 1_000_000;

const MINUTE: i64 = 60 * SECOND;

const HOUR: i64 = 60 * MINUTE;

/// A lease is overdue after this many times the median.
const OVERDUE_FACTOR: i64 = 6;

/// The least age of an overdue lease.
const OVERDUE_FLOOR: i64 = 10 * MINUTE;

/// Failed deliveries of one batch that show more than an accident.
const FAILED_MIN: i64 = 2;

/// Leases that expire in an hour before that is more than an accident.
const EXPIRED_MIN: i64 = 2;

/// The least wait of a starved trainer.
const STARVED_FLOOR: i64 = MINUTE;

/// The least time for which agents are refused room before it is worth a word: a trainer may be between two batches.
const REFUSED_FLOOR: i64 = MINUTE;

/// The least time that a batch waits before it counts as not taken.
const UNTAKEN_FLOOR: i64 = 10 * MINUTE;

/// Nobody takes a batch for this many steps.
const UNTAKEN_STEPS: i64 = 3;

/// The part of the decided groups that is stale or masked.
const STALE_SHARE: f64 = 0.1;

/// The part of the staleness bound that the mean may reach.
const STALE_MEAN: f64 = 0.75;

/// The part of the trained groups that has nothing to learn from.
const FLAT_SHARE: f64 = 0.5;

/// The newest steps that show whether training learns something.
const FLAT_STEPS: usize = 20;

/// Steps, groups or rollouts below which a share says nothing.
const STEPS_MIN: usize = 3;
const GROUPS_MIN: i64 = 8;
const ROLLOUTS_MIN: i64 = 16;

/// The part of rollouts or groups that is lost.
const LOST_SHARE: f64 = 0.5;

/// The least part that is lost when it has doubled.
const LOST_DOUBLED_MIN: f64 = 0.2;

/// The part of the time that a trainer which is fed waits.
const WAITED_SHARE: f64 = 0.1;

/// Whether a state applies.
type Condition = fn(&Facts) -> bool;

/// The state, the worst that applies.
pub(super) fn of(facts: &Facts) -> State {
    let conditions: [(State, Condition); 8] = [
        (State::Broken, is_broken),
        (State::Stuck, is_stuck),
        (State::Starved, is_starved),
        (State::Untaken, is_untaken),
        (State::HeldBack, is_held_back),
        (State::Stale, is_stale),
        (State::Flat, is_flat),
        (State::Dropping, is_dropping),
    ];
    let found = conditions.into_iter().find(|(_, applies)| applies(facts));
    found.map_or(if has_trainer(facts) { State::Fed } else { State::Idle }, |(state, _)| state)
}

fn is_broken(facts: &Facts) -> bool {
    !facts.is_writable || facts.unconserved != 0
}

fn is_stuck(facts: &Facts) -> bool {
    let quarantined = facts.gauges.quarantined_batches > 0 || facts.gauges.quarantined_groups > 0;
    quarantined || failing(facts).is_some() || overdue(facts).is_some() || facts.windows.hour.expired >= EXPIRED_MIN
}

/// The batch whose deliveries have failed most often, if that was more than once.
pub(super) fn failing(facts: &Facts) -> Option<&Lease> {
    let live = facts.leases.iter().chain(&facts.returned);
    live.filter(|lease| lease.failed >= FAILED_MIN).max_by_key(|lease| lease.failed)
}

/// The lease that has lasted longest, if it has lasted too long.
pub(super) fn overdue(facts: &Facts) -> Option<&Lease> {
    let oldest = facts.leases.iter().min_by_key(|lease| lease.since)?;
    (facts.age_us(oldest.since) > overdue_after(facts)).then_some(oldest)
}

/// How long a lease may last.
pub(super) fn overdue_after(facts: &Facts) -> i64 {
    facts.median_held_us().unwrap_or(0).saturating_mul(OVERDUE_FACTOR).max(OVERDUE_FLOOR)
}

fn is_starved(facts: &Facts) -> bool {
    // Groups that are ready do not help if the batch lacks an environment, so this is starving from the beginning.
    let is_in_training = !facts.leases.is_empty() || facts.gauges.returned_batches > 0;
    if facts.lacks_only_a_minimum() && !is_in_training && !is_idle(facts) {
        return true;
    }
    let after = facts.median_step_us().unwrap_or(0).max(STARVED_FLOOR);
    facts.longest_waiting().is_some_and(|asking| facts.age_us(asking.since) >= after)
}

fn is_untaken(facts: &Facts) -> bool {
    untaken_since(facts).is_some_and(|age| age >= untaken_after(facts))
}

/// For how long a batch has been ready that nobody asks for, in microseconds. A live lease means that its holder is
/// busy and not that it is gone.
pub(super) fn untaken_since(facts: &Facts) -> Option<i64> {
    let is_ready = facts.lacking_groups() == 0 && facts.gauges.needed_groups > 0 && facts.waits_for().is_none();
    if !(is_ready || facts.gauges.returned_batches > 0) || !facts.leases.is_empty() || !facts.asking.is_empty() {
        return None;
    }
    let ready_since = facts.oldest_ready.unwrap_or(facts.created);
    Some(facts.age_us(facts.last_ask.map_or(ready_since, |asked| asked.max(ready_since))))
}

fn untaken_after(facts: &Facts) -> i64 {
    facts.median_step_us().unwrap_or(0).saturating_mul(UNTAKEN_STEPS).max(UNTAKEN_FLOOR)
}

fn is_held_back(facts: &Facts) -> bool {
    facts.is_backlog_full() || longest_refused(facts).is_some()
}

/// The refusal of room that has lasted longest, if no trainer is there who could end it. While one trains, agents that
/// wait for room are as it should be.
fn longest_refused(facts: &Facts) -> Option<&RefusedRoom> {
    let is_training = !facts.leases.is_empty() || !facts.asking.is_empty();
    let endless = |refused: &&RefusedRoom| !is_training || refused.rule == QUOTA;
    let oldest = facts.refused.iter().filter(endless).min_by_key(|refused| refused.since())?;
    (facts.age_us(oldest.since()) >= REFUSED_FLOOR).then_some(oldest)
}

fn is_stale(facts: &Facts) -> bool {
    goes_stale(&facts.windows.hour) || is_near_bound(facts)
}

/// Whether many groups of a window went stale.
fn goes_stale(window: &Window) -> bool {
    window.decided() >= GROUPS_MIN && share(window.stale, window.decided()) >= STALE_SHARE
}

/// Whether what was trained in the last hour was nearly too old.
pub(super) fn is_near_bound(facts: &Facts) -> bool {
    let Some(bound) = facts.limits.staleness_max.filter(|bound| *bound > 0) else { return false };
    let recent = recent_steps(facts);
    recent.len() >= STEPS_MIN && stale_mean(&recent) >= STALE_MEAN * bound as f64
}

/// Steps of the last hour, at most 20.
pub(super) fn recent_steps(facts: &Facts) -> Vec<StepFacts> {
    let since = facts.now.as_micros().saturating_sub(HOUR);
    facts.steps.iter().filter(|step| step.acked_us >= since).take(FLAT_STEPS).copied().collect()
}

/// The mean staleness of steps; 0 without any.
pub(super) fn stale_mean(steps: &[StepFacts]) -> f64 {
    if steps.is_empty() { 0.0 } else { steps.iter().map(|step| step.stale_mean).sum::<f64>() / steps.len() as f64 }
}

fn is_flat(facts: &Facts) -> bool {
    let (flat, groups, steps) = flatness(facts);
    facts.limits.group_size > 1 && steps >= STEPS_MIN && groups > 0 && share(flat, groups) >= FLAT_SHARE
}

/// Flat groups, groups and steps among the newest steps of the last day.
pub(super) fn flatness(facts: &Facts) -> (i64, i64, usize) {
    let since = facts.now.as_micros().saturating_sub(24 * HOUR);
    let newest: Vec<_> = facts.steps.iter().filter(|step| step.acked_us >= since).take(FLAT_STEPS).collect();
    let sum = |of: fn(&StepFacts) -> i64| newest.iter().map(|step| of(step)).sum();
    (sum(|step| step.flat_groups), sum(|step| step.groups), newest.len())
}

fn is_dropping(facts: &Facts) -> bool {
    let (quarter, day) = (&facts.windows.quarter, &facts.windows.day);
    let is_lost = |now: f64, before: f64, is_known: bool| {
        now >= LOST_SHARE || (is_known && now >= LOST_DOUBLED_MIN && now >= 2.0 * before)
    };
    // The last day says something only if it is longer than what it is compared with.
    let is_known = day.seconds >= 2 * quarter.seconds;
    let rollouts =
        quarter.received >= ROLLOUTS_MIN && is_lost(lost_rollout_share(quarter), lost_rollout_share(day), is_known);
    let groups = quarter.decided() >= GROUPS_MIN && is_lost(lost_group_share(quarter), lost_group_share(day), is_known);
    rollouts || groups
}

/// The part of the rollouts that was dropped or late.
pub(super) fn lost_rollout_share(window: &Window) -> f64 {
    share(window.dropped() + window.late, window.received)
}

/// The part of the decided groups that was discarded.
pub(super) fn lost_group_share(window: &Window) -> f64 {
    share(window.discarded.values().sum(), window.decided())
}

fn is_idle(facts: &Facts) -> bool {
    !has_trainer(facts) && is_quiet(facts, facts.last_post)
}

/// Whether a trainer has asked within the hour, or holds a batch. Without one, nothing can be fed.
fn has_trainer(facts: &Facts) -> bool {
    !facts.leases.is_empty() || !facts.asking.is_empty() || !is_quiet(facts, facts.last_ask)
}

fn is_quiet(facts: &Facts, at: Option<Timestamp>) -> bool {
    at.is_none_or(|at| facts.age_us(at) >= HOUR)
}

/// The state in one sentence.
pub(super) fn headline(facts: &Facts, state: State, causes: &[Cause]) -> String {
    match state {
        State::Broken => broken(facts),
        State::Stuck => stuck(facts),
        State::Starved => starved(facts, causes),
        State::Untaken => untaken(facts),
        State::HeldBack => held_back(facts),
        State::Stale => stale(facts),
        State::Flat => flat(facts),
        State::Dropping => dropping(facts, causes),
        State::Fed => fed(facts),
        State::Idle => idle(facts),
    }
}

fn broken(facts: &Facts) -> String {
    if !facts.is_writable {
        return "The store cannot write: every post and every ack is refused until it can".to_owned();
    }
    let lost = facts.unconserved.saturating_abs();
    format!("The tallies do not add up: {} {} unaccounted for", plural(lost, "rollout"), is(lost))
}

fn stuck(facts: &Facts) -> String {
    let gauges = &facts.gauges;
    if let Some(lease) = failing(facts) {
        return format!(
            "Batch {} was delivered {} without an ack, last to {}",
            short_id(&lease.batch_id),
            plural(lease.failed, "time"),
            consumer(&lease.consumer)
        );
    }
    if let Some(lease) = overdue(facts) {
        let usual = facts.median_held_us().map(|median| format!(" (median {})", duration_us(median)));
        return format!(
            "Batch {} is held by {} for {}{}",
            short_id(&lease.batch_id),
            consumer(&lease.consumer),
            duration_us(facts.age_us(lease.since)),
            usual.unwrap_or_default()
        );
    }
    if gauges.quarantined_batches > 0 {
        let batches = gauges.quarantined_batches;
        return format!("{} {} quarantined and {} for you", plural(batches, "batch"), is(batches), waits(batches));
    }
    if gauges.quarantined_groups > 0 {
        let groups = gauges.quarantined_groups;
        return format!("{} {} quarantined and {} for you", plural(groups, "group"), is(groups), waits(groups));
    }
    let hour = &facts.windows.hour;
    format!("{} expired {}", plural(hour.expired, "lease"), within(hour.seconds))
}

fn waits(number: i64) -> &'static str {
    if number == 1 { "waits" } else { "wait" }
}

fn starved(facts: &Facts, causes: &[Cause]) -> String {
    let waited = facts.longest_waiting().map_or(0, |asking| facts.age_us(asking.since));
    let ready = facts.gauges.ready_groups;
    let why = match causes.first() {
        Some(cause) if cause.weight >= 0.5 => match cause.code {
            "no-posts" => facts.last_post.map_or_else(
                || ". Nothing was ever posted".to_owned(),
                |at| format!(". No post for {}", duration_us(facts.age_us(at))),
            ),
            "filter-discards" => cause.filter.as_ref().map_or_else(String::new, |filter| {
                let lost = cause.numbers.get("share").copied().unwrap_or(0.0);
                format!(". {filter} discards {} of groups", percent(lost))
            }),
            "backlog-full" => ". The backlog is full and agents are refused".to_owned(),
            "scores-missing" | "slow-rollout" => format!(". {}", cause.text),
            _ => String::new(),
        },
        _ => String::new(),
    };
    if facts.lacks_only_a_minimum() {
        let begin = if waited > 0 { format!("The trainer waits for {}: ", duration_us(waited)) } else { String::new() };
        return format!("{begin}{}", lacking_minimum(facts));
    }
    format!(
        "The trainer waits for {}: {} ready{why}",
        duration_us(waited),
        of_groups(ready, facts.gauges.needed_groups)
    )
}

/// What the next batch lacks although enough groups are ready.
fn lacking_minimum(facts: &Facts) -> String {
    let lack = |each: &EnvironmentFacts| {
        let of = plural(each.needed, "group");
        format!("{} of {of} of environment {} {} ready", count(each.ready), each.environment, is(each.ready))
    };
    facts.lacking_environments().map(lack).collect::<Vec<_>>().join(", ")
}

fn untaken(facts: &Facts) -> String {
    let age = duration_us(untaken_since(facts).unwrap_or(0));
    let gauges = &facts.gauges;
    let ready = if gauges.ready_groups >= gauges.needed_groups {
        format!("{} {} ready", plural(gauges.ready_groups, "group"), is(gauges.ready_groups))
    } else {
        format!("{} came back", plural(gauges.returned_batches, "batch"))
    };
    if facts.last_ask.is_none() {
        return format!("No trainer has ever asked: {ready} for {age}");
    }
    format!("No trainer has asked for {age}: {ready}")
}

fn held_back(facts: &Facts) -> String {
    let (gauges, limits) = (&facts.gauges, &facts.limits);
    if let Some(refused) = longest_refused(facts).filter(|_| !facts.is_backlog_full()) {
        let age = duration_us(facts.age_us(refused.since()));
        return match refused.rule.as_str() {
            QUOTA => format!("Agents have waited for {age}: as many sessions are open as a quota allows"),
            _ => format!("Agents have waited for room for {age}, and no trainer asks for a batch"),
        };
    }
    let by_bytes = gauges.live_bytes >= limits.max_bytes;
    if by_bytes {
        let (held, bound) = (bytes(gauges.live_bytes), bytes(limits.max_bytes));
        return format!("Agents are refused: {held} of {bound} wait to be trained");
    }
    format!(
        "Agents are refused: {} of {} wait to be trained",
        count(gauges.live_rollouts),
        plural(limits.max_rollouts, "rollout")
    )
}

fn stale(facts: &Facts) -> String {
    let hour = &facts.windows.hour;
    let bound = facts.limits.staleness_max.unwrap_or(0);
    if goes_stale(hour) {
        return format!(
            "{} of groups went stale {}: {} of {} (bound {})",
            percent(share(hour.stale, hour.decided())),
            within(hour.seconds),
            count(hour.stale),
            count(hour.decided()),
            count(bound)
        );
    }
    let recent = recent_steps(facts);
    format!("What is trained is {} versions old on average: the bound is {}", real(stale_mean(&recent)), count(bound))
}

fn flat(facts: &Facts) -> String {
    let (flat, groups, steps) = flatness(facts);
    format!(
        "{} of trained groups have equal rewards: {} of {} in the last {}, which train nothing",
        percent(share(flat, groups)),
        count(flat),
        count(groups),
        plural(steps as i64, "step")
    )
}

fn dropping(facts: &Facts, causes: &[Cause]) -> String {
    if let Some(cause) = causes.first() {
        return cause.text.clone();
    }
    let quarter = &facts.windows.quarter;
    let lost = lost_rollout_share(quarter).max(lost_group_share(quarter));
    format!("{} of what arrives is lost {}", percent(lost), within(quarter.seconds))
}

/// How much of the next batch there is.
fn next_batch(facts: &Facts) -> String {
    let gauges = &facts.gauges;
    if gauges.returned_batches == 0 && facts.lacks_only_a_minimum() {
        lacking_minimum(facts)
    } else if let Some(waited) = facts.waits_for() {
        format!("the next batch waits for {}", under_way(&waited.first))
    } else if gauges.returned_batches > 0 || gauges.ready_groups >= gauges.needed_groups {
        "the next batch is ready".to_owned()
    } else {
        format!("{} ready", of_groups(gauges.ready_groups, gauges.needed_groups))
    }
}

/// So many of so many groups, with the verb.
fn of_groups(ready: i64, needed: i64) -> String {
    format!("{} of {} groups {}", count(ready), count(needed), is(ready))
}

fn fed(facts: &Facts) -> String {
    let next = next_batch(facts);
    if let Some(lease) = facts.leases.iter().min_by_key(|lease| lease.since) {
        let usual = facts.median_held_us().map(|median| format!(" (median {})", duration_us(median)));
        let held = duration_us(facts.age_us(lease.since));
        return format!("A batch is in training for {held}{}; {next}", usual.unwrap_or_default());
    }
    if let Some(asking) = facts.longest_waiting() {
        return format!("The trainer waits for {}; {next}", duration_us(facts.age_us(asking.since)));
    }
    let hour = &facts.windows.hour;
    let waited = hour.waited_s / (hour.seconds.max(1) as f64);
    if waited >= WAITED_SHARE && hour.acked > 0 {
        let waited = duration(hour.waited_s);
        return format!("The trainer waited {waited} {}; {next}", within(hour.seconds));
    }
    match facts.last_ack {
        Some(at) => format!("The last batch was acked {} ago; {next}", duration_us(facts.age_us(at))),
        None => format!("No batch has been trained yet; {next}"),
    }
}

fn idle(facts: &Facts) -> String {
    let posted = match facts.last_post {
        None if facts.gauges.open_sessions > 0 => {
            let sessions = facts.gauges.open_sessions;
            return format!("Nothing has been posted yet: {} {} open", plural(sessions, "session"), is(sessions));
        }
        None => return "Nothing has been posted yet".to_owned(),
        Some(at) => at,
    };
    match facts.last_ask {
        Some(asked) if is_idle(facts) => {
            format!("No post and no trainer for {}", duration_us(facts.age_us(posted.max(asked))))
        }
        Some(asked) => format!("No trainer for {}; {}", duration_us(facts.age_us(asked)), next_batch(facts)),
        None => format!("No trainer has asked yet; {}", next_batch(facts)),
    }
}
