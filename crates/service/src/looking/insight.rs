//! The facts that explanations are made of, and the explanations of all policies.
//!
//! Separate from [`explain`](forebay_domain::looking::explain), which is pure. Pages ask every few seconds, and many of them may be open, so
//! a process explains a policy at most once a second, and all of them in at most a tenth of its time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use forebay_domain::{
    clock::Timestamp,
    ids::PolicyName,
    looking::{
        explain::{
            Explanation, explain,
            facts::{EnvironmentFacts, Facts, Gauges, Limits, StepFacts, VersionFacts, Window, Windows},
        },
        history::{Snapshot, Totals},
        insight::{LedgerFacts, ReadFacts},
        steps::StepRow,
    },
    policies::Policy,
    rules::Rules,
    staleness::WaitedFor,
    states::{BatchState, GroupState, RolloutState, SessionState},
    tally::{LeaseEvent, Tallies, Tally},
};
use forebay_store::{
    error::StoreError,
    ops::{
        claim::waiting::ReadWaitedFor,
        policy::{ListPolicies, ReadTallies},
    },
};
use forebay_wire::{FilterScope, PolicyCondition, Settle};
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

/// Answers stay the same for at least this long.
const FRESH_US: i64 = 1_000_000;

/// The overview of many policies takes at most one part of so many of the time.
const SPARED: i64 = 10;

/// No answer is older than this.
const STAYS_MAX_US: i64 = 30_000_000;

/// Policies that a process remembers the explanations of.
const POLICIES_REMEMBERED: usize = 1_024;

/// Policies that are read at once.
const POLICIES_AT_ONCE: u32 = 100;

/// The windows in minutes.
const QUARTER: i64 = 15;
const HOUR: i64 = 60;
const DAY: i64 = 24 * 60;

/// The steps between the two rewards that are compared.
const STEPS_COMPARED: usize = 20;

/// Microseconds of a minute.
const MINUTE_US: i64 = 60_000_000;

/// A policy with its explanation.
#[derive(Debug)]
pub struct Insight {
    pub policy: PolicyName,
    /// What is known.
    pub facts: Facts,
    /// What follows from it.
    pub explanation: Explanation,
}

impl Insight {
    /// Mean reward of the newest step, and how much it is higher than 20 steps before.
    #[must_use]
    pub fn reward(&self) -> (Option<f64>, Option<f64>) {
        let newest = self.facts.steps.first().and_then(|step| step.reward);
        let before = self.facts.steps.get(STEPS_COMPARED).and_then(|step| step.reward);
        (newest, newest.zip(before).map(|(newest, before)| newest - before))
    }
}

/// All policies.
#[derive(Debug)]
pub struct Glance {
    /// The time of the facts.
    pub at: Timestamp,
    /// The worst first, and among equals by name.
    pub policies: Vec<Insight>,
}

/// What a process has explained lately. One caller works it out, and others that ask meanwhile wait for it.
#[derive(Debug, Default)]
pub struct Insights {
    all: tokio::sync::Mutex<Option<Worked<Glance>>>,
    one: Mutex<HashMap<PolicyName, Cell>>,
}

type Cell = Arc<tokio::sync::Mutex<Option<Worked<Insight>>>>;

/// An answer, and until when it stays.
#[derive(Debug)]
struct Worked<T> {
    at: Timestamp,
    stays_us: i64,
    answer: Arc<T>,
}

impl<T> Worked<T> {
    /// An answer of the facts at `at` that was there at `done`. If it takes long, it stays longer.
    fn new(at: Timestamp, done: Timestamp, answer: Arc<T>) -> Self {
        let spared = done.micros_since(at).saturating_mul(SPARED);
        Self { at, stays_us: spared.clamp(FRESH_US, STAYS_MAX_US), answer }
    }

    /// The answer, if it is new enough.
    fn fresh(&self, now: Timestamp) -> Option<Arc<T>> {
        (0..self.stays_us).contains(&now.micros_since(self.at)).then(|| Arc::clone(&self.answer))
    }
}

impl Buffer {
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn why(&self, name: &PolicyName) -> Result<Arc<Insight>, BufferError> {
        let policy = policies::existing_policy(self, name).await?;
        let cell = {
            let mut cells = self.insights.one.lock().unwrap_or_else(PoisonError::into_inner);
            if cells.len() >= POLICIES_REMEMBERED {
                cells.clear();
            }
            Arc::clone(cells.entry(name.clone()).or_default())
        };
        let mut worked = cell.lock().await;
        let now = self.clock.now();
        if let Some(answer) = worked.as_ref().and_then(|worked| worked.fresh(now)) {
            return Ok(answer);
        }
        let tallies = self.store.read(ReadTallies(Some(policy.policy_pk))).await?.remove(name).unwrap_or_default();
        let answer = Arc::new(insight(self, policy, tallies, now).await?);
        *worked = Some(Worked::new(now, self.clock.now(), Arc::clone(&answer)));
        Ok(answer)
    }

    /// All policies, the worst first.
    #[instrument(level = "debug", skip_all)]
    pub async fn overview(&self) -> Result<Arc<Glance>, BufferError> {
        let mut worked = self.insights.all.lock().await;
        let now = self.clock.now();
        if let Some(answer) = worked.as_ref().and_then(|worked| worked.fresh(now)) {
            return Ok(answer);
        }
        let mut tallies = self.store.read(ReadTallies(None)).await?;
        let mut found = Vec::new();
        let mut after = String::new();
        loop {
            let page = self.store.read(ListPolicies { after, limit: POLICIES_AT_ONCE, evaluations: false }).await?;
            let is_last = page.len() < POLICIES_AT_ONCE as usize;
            after = page.last().map(|policy| policy.name.as_str().to_owned()).unwrap_or_default();
            for policy in page {
                let of_policy = tallies.remove(&policy.name).unwrap_or_default();
                found.push(insight(self, policy, of_policy, now).await?);
            }
            if is_last {
                break;
            }
        }
        // The sort is stable, and policies are read by name.
        found.sort_by_key(|insight| rank(insight.explanation.state));
        let answer = Arc::new(Glance { at: now, policies: found });
        *worked = Some(Worked::new(now, self.clock.now(), Arc::clone(&answer)));
        Ok(answer)
    }
}

/// The place of a state, the worst first.
fn rank(state: PolicyCondition) -> usize {
    PolicyCondition::ALL.iter().position(|each| *each == state).unwrap_or(PolicyCondition::ALL.len())
}

async fn insight(buffer: &Buffer, policy: Policy, tallies: Tallies, now: Timestamp) -> Result<Insight, StoreError> {
    let minute = now.as_micros().div_euclid(MINUTE_US);
    let read = ReadFacts {
        policy: policy.policy_pk,
        run: policy.run,
        now,
        windows: [minute - QUARTER, minute - HOUR, minute - DAY],
    };
    let ledger = buffer.store.read(read).await?;
    let environments = policies::environments(buffer, &policy).await?;
    let environment = |found: policies::EnvironmentOverview| EnvironmentFacts {
        environment: found.environment,
        ready: found.ready,
        needed: found.needed,
    };
    let environments = environments.into_iter().map(environment).collect();
    let waited_for = match policy.pause {
        Some(_) => buffer.store.read(ReadWaitedFor { policy: policy.clone(), now }).await?,
        None => None,
    };
    let facts = facts(&policy, &tallies, ledger, environments, waited_for, (buffer.is_writable(), now));
    let explanation = explain(&facts);
    Ok(Insight { policy: policy.name, facts, explanation })
}

fn facts(
    policy: &Policy,
    tallies: &Tallies,
    ledger: LedgerFacts,
    environments: Vec<EnvironmentFacts>,
    waited_for: Option<WaitedFor>,
    (is_writable, now): (bool, Timestamp),
) -> Facts {
    let [quarter, hour, day] = [(QUARTER, 0), (HOUR, 1), (DAY, 2)].map(|(minutes, index)| {
        let (before, seconds) = baseline(&ledger, ledger.before[index].as_ref(), minutes, now);
        window(before, tallies, seconds)
    });
    let steps = steps(&ledger.steps);
    let last_step = ledger.steps.first().map(|step| step.acked_at);
    let leases = [LeaseEvent::Granted, LeaseEvent::Redelivered].map(Tally::Leases);
    let of_tallies = leases.iter().chain([&Tally::Acked, &Tally::Waited]).filter_map(|tally| tallies.latest(tally));
    let asking_since = ledger.asking.iter().map(|asking| asking.since);
    let last_ask = of_tallies.chain(ledger.last_asked).chain(last_step).chain(asking_since).max();
    Facts {
        now,
        policy: policy.name.to_string(),
        is_writable,
        unconserved: tallies.unconserved(),
        restored: policy.restored,
        windows: Windows { quarter, hour, day },
        gauges: gauges(policy, tallies),
        limits: limits(&policy.rules),
        last_post: tallies.last_received_at(),
        last_ask,
        last_ack: tallies.latest(&Tally::Acked).max(last_step),
        created: ledger.created,
        oldest_ready: ledger.oldest_ready,
        asking: ledger.asking,
        leases: ledger.leases,
        returned: ledger.returned,
        steps,
        lacking: ledger.lacking,
        scoring: ledger.scoring,
        groups: ledger.groups,
        version: VersionFacts {
            current: policy.version.0,
            step: policy.version_step.map(|step| step.0),
            acked_step: policy.acked_step.map(|step| step.0),
            checkpoint_step: policy.checkpoint_step.map(|step| step.0),
        },
        events: ledger.events,
        environments,
        refused: policy.refused.iter().filter(|refused| refused.is_current(now)).cloned().collect(),
        waited_for,
    }
}

/// The totals at the beginning of a window, and its seconds. A window is shorter if the history begins later.
fn baseline<'a>(
    ledger: &'a LedgerFacts,
    before: Option<&'a Snapshot>,
    minutes: i64,
    now: Timestamp,
) -> (Option<&'a Totals>, i64) {
    let begin_us = (now.as_micros().div_euclid(MINUTE_US) - minutes) * MINUTE_US;
    let seconds_since = |micros: i64| (now.as_micros() - micros).max(0) / 1_000_000;
    match before {
        Some(before) if before.minute > 0 => (Some(&before.totals), seconds_since(begin_us)),
        // What the first row has was counted before the history begins.
        Some(before) if !before.totals.tallies.counts.is_empty() => match &ledger.oldest {
            Some(oldest) => (Some(&oldest.totals), seconds_since(oldest.minute * MINUTE_US)),
            None => (Some(&before.totals), 0),
        },
        _ => (None, seconds_since(begin_us.max(ledger.created.as_micros())).max(1)),
    }
}

/// What happened since some totals.
fn window(before: Option<&Totals>, now: &Tallies, seconds: i64) -> Window {
    let nothing = Totals::default();
    let before = &before.unwrap_or(&nothing).tallies;
    let count = |tally: &Tally| (now.count(tally) - before.count(tally)).max(0);
    let amount = |tally: &Tally| (now.amount(tally) - before.amount(tally)).max(0.0);
    let mut window = Window {
        seconds,
        received: count(&Tally::Received),
        tokens: amount(&Tally::Received),
        masked: count(&Tally::Masked),
        late: count(&Tally::LateTotal),
        assumed: count(&Tally::AssumedVersion),
        ready: count(&Tally::DecidedReady),
        stale: count(&Tally::Stale),
        stale_rollouts: amount(&Tally::Stale),
        expired: count(&Tally::Leases(LeaseEvent::Expired)),
        nacked: count(&Tally::Leases(LeaseEvent::Nacked)),
        acked: count(&Tally::Acked),
        waited_s: amount(&Tally::Waited),
        ..Window::default()
    };
    for tally in now.counts.keys() {
        match tally {
            // A rule that discards groups counts these under the same name as rollouts that it drops.
            Tally::Dropped(rule) => {
                let dropped = count(tally) - count(&Tally::Discarded(rule.clone()));
                if dropped > 0 && rule != forebay_domain::reasons::STALE {
                    window.dropped.insert(rule.clone(), dropped);
                }
            }
            Tally::Discarded(rule) => {
                let discarded = count(tally);
                if discarded > 0 {
                    window.discarded.insert(rule.clone(), discarded);
                    window.discarded_rollouts += amount(tally);
                }
            }
            _ => {}
        }
    }
    window
}

/// The newest steps that are not undone, the newest first.
fn steps(rows: &[StepRow]) -> Vec<StepFacts> {
    let mut steps: Vec<StepFacts> = Vec::with_capacity(rows.len());
    for row in rows {
        // A step that was repeated in a later epoch is undone in the earlier ones.
        if row.undone || steps.last().is_some_and(|newer| newer.step == row.step) {
            continue;
        }
        let reward = row.reward_sum / row.reward_count.max(1) as f64;
        steps.push(StepFacts {
            step: row.step,
            acked_us: row.acked_at.as_micros(),
            groups: row.groups,
            flat_groups: row.flat_groups,
            reward: (row.reward_count > 0 && reward.is_finite()).then_some(reward),
            stale_mean: row.stale_sum as f64 / row.groups.max(1) as f64,
            stale_max: row.stale_max,
            waited_us: row.waited_us,
            held_us: row.held_us,
        });
    }
    steps
}

fn gauges(policy: &Policy, tallies: &Tallies) -> Gauges {
    let live = forebay_domain::states::RolloutState::ALL.iter().filter(|state| state.is_live());
    Gauges {
        ready_groups: tallies.count(&Tally::Groups(GroupState::Ready)),
        needed_groups: i64::from(policy.rules.batch.groups),
        open_groups: tallies.count(&Tally::Groups(GroupState::Open)),
        returned_batches: tallies.count(&Tally::Batches(BatchState::Returned)),
        quarantined_batches: tallies.count(&Tally::Batches(BatchState::Quarantined)),
        quarantined_groups: tallies.count(&Tally::Groups(GroupState::Quarantined)),
        trained_batches: tallies.count(&Tally::Batches(BatchState::Trained)),
        live_rollouts: live.map(|state| tallies.count(&Tally::Rollouts(*state))).sum(),
        live_bytes: tallies.count(&Tally::LiveBytes),
        reserved: tallies.count(&Tally::Reserved),
        scoring_rollouts: tallies.count(&Tally::Rollouts(RolloutState::Scoring)),
        open_sessions: tallies.count(&Tally::Sessions(SessionState::Open)),
    }
}

fn limits(rules: &Rules) -> Limits {
    let bounded = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let of_scope = |scope: FilterScope| {
        rules.filter.iter().filter(|filter| filter.scope == scope).map(|filter| filter.name.clone()).collect()
    };
    Limits {
        max_rollouts: bounded(rules.backlog.max_ready_rollouts),
        max_bytes: bounded(rules.backlog.max_bytes),
        staleness_max: rules.staleness.max.map(i64::from),
        group_size: i64::from(rules.group.size),
        group_timeout_s: bounded(rules.group.timeout_s),
        max_deliveries: i64::from(rules.lease.max_deliveries),
        group_filters: of_scope(FilterScope::Group),
        rollout_filters: of_scope(FilterScope::Rollout),
        bounds_tokens: rules.batch.max_tokens.is_some(),
        settles_by_checkpoint: rules.settle == Settle::Checkpoint,
    }
}
