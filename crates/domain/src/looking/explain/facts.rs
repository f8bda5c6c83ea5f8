//! The facts that an explanation is made of. All of them come from the ledger, except whether the store can write.

use std::collections::{BTreeMap, BTreeSet};

use crate::{admission::refused::RefusedRoom, clock::Timestamp, staleness::WaitedFor};

/// A policy that was full takes new groups again when this part of its backlog is free.
const FREE_TO_REOPEN: i64 = 10;

/// The kinds of events that explanations use, as the journal names them.
const BACKLOG_FULL: &str = "backlog-full";
const BACKLOG_FREED: &str = "backlog-freed";
pub(super) const RULES_CHANGED: &str = "rules-changed";
pub(super) const FILTER_FAILS: &str = "filter-fails";

/// What is known about a policy at one time.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The time of the facts.
    pub now: Timestamp,
    /// Name of the policy.
    pub policy: String,
    /// Whether the store can write.
    pub is_writable: bool,
    /// Rollouts received minus the sum over all states; 0 unless something was lost or counted twice.
    pub unconserved: i64,
    /// Whether a restore began the epoch and no trainer has resumed since.
    pub restored: bool,
    /// The last 15 minutes, hour and day.
    pub windows: Windows,
    /// What is in the buffer now.
    pub gauges: Gauges,
    /// The bounds in the rules.
    pub limits: Limits,
    /// When the last rollout arrived.
    pub last_post: Option<Timestamp>,
    /// When a consumer asked for a batch, held one or acked one last.
    pub last_ask: Option<Timestamp>,
    /// When the last batch was acked.
    pub last_ack: Option<Timestamp>,
    /// When the policy was created.
    pub created: Timestamp,
    /// When the group that has been ready longest was decided.
    pub oldest_ready: Option<Timestamp>,
    /// Consumers that wait for a batch.
    pub asking: Vec<Asking>,
    /// Batches under a lease.
    pub leases: Vec<Lease>,
    /// Batches that came back after failed deliveries, which are delivered again.
    pub returned: Vec<Lease>,
    /// The newest steps that are not undone, the newest first.
    pub steps: Vec<StepFacts>,
    /// How many rollouts each of the fullest open groups lacks, the fewest first. Groups that lack none wait for scores,
    /// and are not among them.
    pub lacking: Vec<u32>,
    /// What waits for scores, if something does.
    pub scoring: Option<ScoringFacts>,
    /// Groups that were opened last, of all states.
    pub groups: Vec<GroupFacts>,
    /// The weights.
    pub version: VersionFacts,
    /// What operators and time did lately, the newest first.
    pub events: Vec<Event>,
    /// Environments that have rules.
    pub environments: Vec<EnvironmentFacts>,
    /// Callers that are refused room now.
    pub refused: Vec<RefusedRoom>,
    /// The rollouts for whose sake no batch is granted.
    pub waited_for: Option<WaitedFor>,
}

/// Rollouts that wait for scores.
#[derive(Clone, Debug)]
pub struct ScoringFacts {
    /// Open groups that have all of their rollouts, of those that were looked at.
    pub groups: i64,
    /// When the rollout arrived that has waited longest.
    pub oldest: Timestamp,
    /// The scores that those which have waited longest lack, by name.
    pub names: BTreeSet<String>,
    /// The work for scorers that there is for these.
    pub work: Vec<WorkFacts>,
}

/// Counts of work end here: more is not counted.
pub const WORK_COUNTED_MAX: i64 = 1_000;

/// Work for scorers, with counts of up to one more than [`WORK_COUNTED_MAX`].
#[derive(Clone, Debug)]
pub struct WorkFacts {
    /// The name of the score.
    pub name: String,
    pub open: i64,
    pub leased: i64,
    pub exhausted: i64,
    /// Why an exhausted item failed last, if its scorer said so.
    pub failure: Option<String>,
    /// When a scorer last asked for it.
    pub asked: Option<Timestamp>,
}

/// The groups of an environment that has rules.
#[derive(Clone, Debug)]
pub struct EnvironmentFacts {
    /// Its label.
    pub environment: String,
    /// Ready groups.
    pub ready: i64,
    /// Groups that the next batch waits for.
    pub needed: i64,
}

/// What happened in windows that end now.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    /// 15 minutes.
    pub quarter: Window,
    pub hour: Window,
    pub day: Window,
}

/// What happened in a window. All counts are 0 or more.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// How long it is; shorter than its name if the history begins later. 0 without a history.
    pub seconds: i64,
    /// Rollouts received.
    pub received: i64,
    /// Their tokens.
    pub tokens: f64,
    /// Rollouts masked at their arrival.
    pub masked: i64,
    /// Rollouts that arrived after their group was decided.
    pub late: i64,
    /// Rollouts whose producer sent no version.
    pub assumed: i64,
    /// Rollouts that each rule dropped at their arrival.
    pub dropped: BTreeMap<String, i64>,
    /// Groups that each rule discarded.
    pub discarded: BTreeMap<String, i64>,
    /// Rollouts of these groups.
    pub discarded_rollouts: f64,
    /// Groups that became ready by their decision.
    pub ready: i64,
    /// Groups that a claim found over the staleness bound.
    pub stale: i64,
    /// Rollouts of these groups.
    pub stale_rollouts: f64,
    /// Leases that expired.
    pub expired: i64,
    /// Leases that were given back.
    pub nacked: i64,
    /// Batches acked.
    pub acked: i64,
    /// Seconds that consumers had waited for the leases that were granted.
    pub waited_s: f64,
}

impl Window {
    /// Groups decided.
    #[must_use]
    pub fn decided(&self) -> i64 {
        self.ready + self.discarded.values().sum::<i64>()
    }

    /// Rollouts dropped at their arrival.
    #[must_use]
    pub fn dropped(&self) -> i64 {
        self.dropped.values().sum()
    }

    /// Rollouts that will not be trained: dropped, late, or in groups that were discarded or went stale.
    #[must_use]
    pub fn lost_rollouts(&self) -> i64 {
        self.dropped() + self.late + (self.discarded_rollouts + self.stale_rollouts) as i64
    }

    /// A count per minute; none without a history.
    #[must_use]
    pub fn per_minute(&self, count: f64) -> Option<f64> {
        (self.seconds > 0).then(|| count * 60.0 / self.seconds as f64)
    }
}

/// What is in the buffer now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    pub ready_groups: i64,
    /// Groups that a batch needs.
    pub needed_groups: i64,
    pub open_groups: i64,
    /// Batches that came back and are delivered before new ones.
    pub returned_batches: i64,
    /// Batches whose deliveries are used up.
    pub quarantined_batches: i64,
    /// Groups that cannot be trained.
    pub quarantined_groups: i64,
    /// Batches acked by a step that no checkpoint covers.
    pub trained_batches: i64,
    /// Rollouts that wait to be trained.
    pub live_rollouts: i64,
    /// Payload bytes of these.
    pub live_bytes: i64,
    /// Rollouts that room is reserved for.
    pub reserved: i64,
    pub open_sessions: i64,
    /// Rollouts that wait for scores.
    pub scoring_rollouts: i64,
}

/// The bounds in the rules.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Rollouts of the backlog.
    pub max_rollouts: i64,
    /// Bytes of the backlog.
    pub max_bytes: i64,
    /// The staleness bound.
    pub staleness_max: Option<i64>,
    /// Rollouts of a group.
    pub group_size: i64,
    /// Seconds until an open group is decided.
    pub group_timeout_s: i64,
    /// Failed deliveries after which a batch is quarantined.
    pub max_deliveries: i64,
    /// Names of the filters of groups.
    pub group_filters: Vec<String>,
    /// Names of the filters of rollouts.
    pub rollout_filters: Vec<String>,
    /// Whether a batch may be full of tokens before it has all of its groups.
    pub bounds_tokens: bool,
    /// Whether only checkpoints settle batches.
    pub settles_by_checkpoint: bool,
}

/// A consumer that waits for a batch.
#[derive(Clone, Debug)]
pub struct Asking {
    /// Its name; empty if it has none.
    pub consumer: String,
    /// Since when it asks.
    pub since: Timestamp,
}

/// A batch that is held or that came back.
#[derive(Clone, Debug)]
pub struct Lease {
    pub batch_id: String,
    /// The consumer of the last lease; empty if it has no name.
    pub consumer: String,
    /// When the last lease began.
    pub since: Timestamp,
    /// Deliveries that expired or were given back.
    pub failed: i64,
}

/// What a step trained.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepFacts {
    pub step: i64,
    /// When its last batch was acked.
    pub acked_us: i64,
    pub groups: i64,
    /// Groups of several rewards that are all equal.
    pub flat_groups: i64,
    /// Mean reward of what was trained.
    pub reward: Option<f64>,
    /// Mean staleness of its groups.
    pub stale_mean: f64,
    /// Greatest staleness of its groups.
    pub stale_max: i64,
    /// How long its batches had been waited for.
    pub waited_us: i64,
    /// How long its batches were held.
    pub held_us: i64,
}

/// A group that was opened lately.
#[derive(Clone, Debug, Default)]
pub struct GroupFacts {
    /// Whether a claim found it over the staleness bound.
    pub is_stale: bool,
    /// Whether it is part of a batch.
    pub is_batched: bool,
    /// From its first rollout to its decision; none while it is open.
    pub filled_us: Option<i64>,
    /// Tokens of a rollout, on average; none while it is open.
    pub tokens_mean: Option<f64>,
    /// The rule that discarded it.
    pub discarded_by: Option<String>,
    /// The least and the greatest reward.
    pub rewards: Option<(f64, f64)>,
}

/// Discarded groups whose rewards are all equal, by what the reward is beside those of other groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct EqualRewards {
    /// Groups of the newest ones that the rule discarded.
    pub(super) of: i64,
    /// Those in which all rewards are the best.
    pub(super) best: i64,
    /// Those in which all rewards are the worst.
    pub(super) worst: i64,
    /// The worst and the best reward of the newest groups.
    pub(super) range: (f64, f64),
}

impl Facts {
    /// Whether the groups that a rule discarded were all solved or all failed, as far as their rewards tell: none if no
    /// discarded group has equal rewards, or if all groups have the same.
    pub(super) fn equal_rewards(&self, rule: &str) -> Option<EqualRewards> {
        let rewards = self.groups.iter().filter_map(|group| group.rewards);
        let range = rewards.reduce(|(least, greatest), (low, high)| (least.min(low), greatest.max(high)))?;
        let of_rule = || self.groups.iter().filter(|group| group.discarded_by.as_deref() == Some(rule));
        let all_are = |reward: f64| of_rule().filter(|group| group.rewards == Some((reward, reward))).count() as i64;
        let found =
            EqualRewards { of: of_rule().count() as i64, best: all_are(range.1), worst: all_are(range.0), range };
        (range.0 < range.1 && found.best + found.worst > 0).then_some(found)
    }
}

/// The weights of a policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct VersionFacts {
    /// The current version.
    pub current: i64,
    /// The step at which it was published.
    pub step: Option<i64>,
    /// The last acked step.
    pub acked_step: Option<i64>,
    /// The last settled step.
    pub checkpoint_step: Option<i64>,
}

/// What an operator or time did.
#[derive(Clone, Debug)]
pub struct Event {
    /// When.
    pub at: Timestamp,
    /// Its kind, as the journal names it.
    pub kind: String,
    /// The key that did it.
    pub key_id: Option<String>,
    /// The filter that it is about.
    pub filter: Option<String>,
}

impl Facts {
    /// Microseconds since a time, at least 0.
    pub(super) fn age_us(&self, at: Timestamp) -> i64 {
        self.now.micros_since(at).max(0)
    }

    /// The median over the newest steps of how long their batches were held; none without steps.
    pub(super) fn median_held_us(&self) -> Option<i64> {
        median(self.steps.iter().map(|step| step.held_us).collect())
    }

    /// The median over the newest steps of how long they took with their waiting; none without steps.
    pub(super) fn median_step_us(&self) -> Option<i64> {
        median(self.steps.iter().map(|step| step.held_us.saturating_add(step.waited_us)).collect())
    }

    /// The consumer that has waited longest and holds nothing.
    pub(super) fn longest_waiting(&self) -> Option<&Asking> {
        let holds = |consumer: &str| self.leases.iter().any(|lease| lease.consumer == consumer);
        self.asking.iter().filter(|asking| !holds(&asking.consumer)).min_by_key(|asking| asking.since)
    }

    /// Whether a post that opens a group is refused: the backlog is at a bound, or was and is not yet far enough below.
    pub(super) fn is_backlog_full(&self) -> bool {
        let is_at_bound =
            self.gauges.live_rollouts >= self.limits.max_rollouts || self.gauges.live_bytes >= self.limits.max_bytes;
        // The journal has no end of it if the process that refused has ended, so the backlog itself must be nearly full.
        let near = |held: i64, bound: i64| held >= bound - bound / FREE_TO_REOPEN;
        let is_near = near(self.gauges.live_rollouts, self.limits.max_rollouts)
            || near(self.gauges.live_bytes, self.limits.max_bytes);
        let latest = self.events.iter().find(|event| [BACKLOG_FULL, BACKLOG_FREED].contains(&event.kind.as_str()));
        is_at_bound || (is_near && latest.is_some_and(|event| event.kind == BACKLOG_FULL))
    }

    /// Groups that the next batch lacks.
    pub(super) fn lacking_groups(&self) -> i64 {
        let of_environments = self.environments.iter().map(|each| (each.needed - each.ready).max(0)).sum();
        (self.gauges.needed_groups - self.gauges.ready_groups).max(of_environments)
    }

    /// The environments whose minimum the next batch lacks.
    pub(super) fn lacking_environments(&self) -> impl Iterator<Item = &EnvironmentFacts> {
        self.environments.iter().filter(|each| each.ready < each.needed)
    }

    /// Whether there are enough groups for a batch, but not of each environment.
    pub(super) fn lacks_only_a_minimum(&self) -> bool {
        self.gauges.ready_groups >= self.gauges.needed_groups && self.lacking_environments().next().is_some()
    }

    /// The rollouts that the next batch waits for, although enough groups are ready.
    pub(super) fn waits_for(&self) -> Option<&WaitedFor> {
        let is_cut_again = self.gauges.returned_batches > 0;
        // Batches that are full of tokens may have fewer groups.
        let has_groups = self.lacking_groups() == 0 || self.limits.bounds_tokens;
        self.waited_for.as_ref().filter(|_| has_groups && !is_cut_again)
    }

    /// The shortest window in which groups were decided.
    pub(super) fn deciding_window(&self) -> &Window {
        let Windows { quarter, hour, day } = &self.windows;
        [quarter, hour].into_iter().find(|window| window.decided() > 0).unwrap_or(day)
    }
}

/// The lower median.
pub(super) fn median(mut values: Vec<i64>) -> Option<i64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}
