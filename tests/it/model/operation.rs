//! The operations of a history, as proptest generates them.
//!
//! An [`Operation`] is relative to the current state ("the newest leased batch, by an earlier lease, at the
//! checkpoint's step") and becomes a [`Call`] only when it runs. So a few ids are enough for frequent collisions, and a
//! sequence from which shrinking removed operations is still meaningful.

mod sessions;
mod strategies;

use forebay_wire::{BatchState, GroupState, Status, VersionSpan};

pub(crate) use self::{sessions::SessionOperation, strategies::sequences};
use super::{
    reference::{Grant, Reference},
    view::{Body, Call, GroupName, Holder, LeaseNumber, PolicyNumber, Post, Rules, Score, ScoreLease, Segment},
};

/// Policies of a run. Batches of the first are settled by checkpoints, those of the last by acks.
pub(crate) const POLICIES: usize = 2;
/// Group ids of a policy.
pub(crate) const GROUPS: usize = 8;
/// Ids of executions.
pub(crate) const EXECUTIONS: usize = 2;
/// Rollout ids of a policy.
pub(crate) const ROLLOUTS: usize = 40;
/// Consumers; the first has no name.
const CONSUMERS: usize = 2;
/// URIs of weights.
pub(crate) const URIS: usize = 2;
/// Request ids.
const REQUESTS: usize = 2;

/// A history: the rules at its start, and its operations.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) rules: Vec<Rules>,
    pub(crate) operations: Vec<Operation>,
}

#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Post(Vec<Item>),
    /// New rollouts for the first open group, or for a new one.
    Fill {
        policy: PolicyNumber,
        items: Vec<BodyPlan>,
    },
    /// A known rollout, either unchanged or with another reward.
    Repost {
        policy: PolicyNumber,
        nth: usize,
        changed: bool,
    },
    Score {
        policy: PolicyNumber,
        rollout: usize,
        name: usize,
        value: u8,
        replace: bool,
    },
    /// Scores of a rollout that waits for some.
    ScoreWaiting {
        policy: PolicyNumber,
        nth: usize,
        names: Vec<usize>,
        value: u8,
        replace: bool,
    },
    LeaseWork {
        policy: PolicyNumber,
        names: Vec<usize>,
        max: usize,
        request: Option<usize>,
    },
    /// What a scorer sends that had one of the last leases of work, or one that was never granted.
    ScoreWork {
        nth: usize,
        value: Option<u8>,
        unknown: bool,
    },
    ExtendWork {
        policy: PolicyNumber,
        leases: Vec<usize>,
    },
    RetryWork {
        policy: PolicyNumber,
        name: usize,
    },
    Close {
        policy: PolicyNumber,
        group: GroupPick,
    },
    Discard {
        policy: PolicyNumber,
        group: GroupPick,
    },
    Claim {
        policy: PolicyNumber,
        consumer: usize,
        request: Option<usize>,
        partial: bool,
        epoch: EpochPick,
    },
    Extend {
        holder: HolderPick,
        ttl_s: i64,
    },
    Ack {
        holder: HolderPick,
        step: StepPick,
    },
    Nack {
        holder: HolderPick,
        groups: NackPick,
    },
    Readmit {
        batch: BatchPick,
    },
    Publish {
        policy: PolicyNumber,
        version: VersionPick,
        step: Option<StepPick>,
        uri: Option<usize>,
        epoch: EpochPick,
    },
    Checkpoint {
        policy: PolicyNumber,
        step: StepPick,
        force: bool,
        epoch: EpochPick,
    },
    Resume {
        policy: PolicyNumber,
        step: Option<StepPick>,
        force: bool,
        epoch: EpochPick,
    },
    Reset {
        policy: PolicyNumber,
        epoch: EpochPick,
    },
    PutPolicy {
        policy: PolicyNumber,
        rules: Rules,
    },
    Advance {
        seconds: i64,
    },
    Step {
        hours: i64,
    },
    Sweep,
    Restart,
    Session(SessionOperation),
}

/// A trajectory to post.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    policy: PolicyNumber,
    rollout: usize,
    group: Option<usize>,
    group_size: Option<u32>,
    body: BodyPlan,
}

/// A body whose versions are relative to the current one.
#[derive(Clone, Debug)]
pub(crate) struct BodyPlan {
    status: Status,
    reward: Option<u8>,
    /// Prompt length and response mask of each segment; every response has two tokens.
    segments: Vec<(usize, [u8; 2])>,
    versions: VersionsPlan,
    execution: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum VersionsPlan {
    Absent,
    Behind(i64),
    Spans(i64, i64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPick {
    state: Option<GroupState>,
    nth: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum BatchPick {
    In(BatchState, usize),
    /// Any batch that was ever cut, including forgotten ones.
    Any(usize),
    Unknown,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HolderPick {
    batch: BatchPick,
    lease: LeasePick,
    epoch: EpochPick,
}

#[derive(Clone, Copy, Debug)]
enum LeasePick {
    Last,
    Earlier,
    Forged,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum EpochPick {
    Absent,
    Current,
    Before,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum StepPick {
    Next,
    Skipping,
    LastAcked,
    BeforeLastAcked,
    Checkpoint,
    BelowCheckpoint,
    /// The step at which the batch was acked.
    OfBatch,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum NackPick {
    Whole,
    First,
    All,
    Foreign,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum VersionPick {
    Above(i64),
    /// The current version as it was published.
    Repeat,
    /// The current version with another step or URI, or a lower version.
    Same,
    Below,
}

impl Operation {
    /// Returns the call that this operation means in the current state.
    pub(crate) fn resolve(&self, now: &Reference) -> Call {
        match self.clone() {
            Self::Post(items) => Call::Post(items.into_iter().map(|item| item.resolve(now)).collect()),
            Self::Fill { policy, items } => Call::Post(fill(now, policy, items)),
            Self::Repost { policy, nth, changed } => repost(now, policy, nth, changed),
            Self::Score { policy, rollout, name, value, replace } => {
                Call::Score(vec![Score { policy, rollout, name, value: Some(value), replace, lease: ScoreLease::None }])
            }
            Self::LeaseWork { policy, names, max, request } => Call::LeaseWork { policy, names, max, request },
            Self::ScoreWork { nth, value, unknown } => {
                let lease = now.grants_of_work.len().checked_sub(nth + 1);
                let grant = lease.map(|lease| &now.grants_of_work[lease]);
                let lease = lease.filter(|_| !unknown).map_or(ScoreLease::NeverGranted, ScoreLease::Granted);
                let score = |grant: &Grant| {
                    let Grant { policy, name, .. } = *grant;
                    let of =
                        move |rollout: &usize| Score { policy, rollout: *rollout, name, value, replace: false, lease };
                    grant.rollouts.iter().map(of).collect()
                };
                Call::Score(grant.map(score).unwrap_or_default())
            }
            Self::ExtendWork { policy, leases } => {
                let last = now.grants_of_work.len();
                let leases = leases.into_iter().filter_map(|nth| last.checked_sub(nth + 1)).collect();
                Call::ExtendWork { policy, leases }
            }
            Self::RetryWork { policy, name } => Call::RetryWork { policy, name },
            Self::ScoreWaiting { policy, nth, names, value, replace } => {
                let waiting =
                    now.rollouts.values().filter(|known| known.policy == policy && known.unscored_at.is_some());
                let waiting: Vec<_> = waiting.collect();
                let score = |rollout| {
                    names.iter().map(move |name| Score {
                        policy,
                        rollout,
                        name: *name,
                        value: Some(value),
                        replace,
                        lease: ScoreLease::None,
                    })
                };
                let found = waiting.get(nth % waiting.len().max(1)).map(|known| known.name);
                Call::Score(found.into_iter().flat_map(score).collect())
            }
            Self::Close { policy, group } => Call::Close { policy, group: group.resolve(now, policy) },
            Self::Discard { policy, group } => Call::Discard { policy, group: group.resolve(now, policy) },
            Self::Claim { policy, consumer, request, partial, epoch } => {
                Call::Claim { policy, consumer, request, partial, epoch: epoch.resolve(now, policy) }
            }
            Self::Extend { holder, ttl_s } => Call::Extend { holder: holder.resolve(now).0, ttl_s },
            Self::Ack { holder, step } => {
                let (holder, policy) = holder.resolve(now);
                Call::Ack { holder, step: step.resolve(now, policy, holder.batch) }
            }
            Self::Nack { holder, groups } => {
                let holder = holder.resolve(now).0;
                Call::Nack { holder, groups: groups.resolve(now, holder.batch) }
            }
            Self::Readmit { batch } => Call::Readmit { batch: batch.resolve(now) },
            Self::Publish { policy, version, step, uri, epoch } => {
                let step = step.map(|step| step.resolve(now, policy, None));
                version.resolve(now, policy, step, uri, epoch.resolve(now, policy))
            }
            Self::Checkpoint { policy, step, force, epoch } => Call::Checkpoint {
                policy,
                step: step.resolve(now, policy, None),
                force,
                epoch: epoch.resolve(now, policy),
            },
            Self::Resume { policy, step, force, epoch } => Call::Resume {
                policy,
                step: step.map(|step| step.resolve(now, policy, None)),
                force,
                epoch: epoch.resolve(now, policy),
            },
            Self::Reset { policy, epoch } => Call::Reset { policy, epoch: epoch.resolve(now, policy) },
            Self::PutPolicy { policy, rules } => {
                // The `settle` rule of a policy does not change, because its effect on batches that are acked already
                // is not specified.
                let settled_by_ack = now.policies[policy].rules.settled_by_ack;
                Call::PutPolicy { policy, rules: Rules { settled_by_ack, ..rules } }
            }
            Self::Advance { seconds } => Call::Advance { seconds },
            Self::Step { hours } => Call::Step { hours },
            Self::Sweep => Call::Sweep,
            Self::Restart => Call::Restart,
            Self::Session(operation) => operation.resolve(now),
        }
    }
}

impl Item {
    fn resolve(self, now: &Reference) -> Post {
        let body = self.body.resolve(now, self.policy);
        Post { policy: self.policy, rollout: self.rollout, group: self.group, group_size: self.group_size, body }
    }
}

impl BodyPlan {
    fn resolve(self, now: &Reference, policy: PolicyNumber) -> Body {
        let behind = |versions: i64| (now.policies[policy].version - versions).max(0);
        let (version, spans) = match self.versions {
            VersionsPlan::Absent => (None, None),
            VersionsPlan::Behind(versions) => (Some(behind(versions)), None),
            VersionsPlan::Spans(first, second) => {
                (None, Some(vec![VersionSpan(behind(first), 0, 1), VersionSpan(behind(second), 1, 1)]))
            }
        };
        let segment = |(prompt, mask): (usize, [u8; 2])| Segment {
            kind: None,
            tokens: vec![1; prompt + 2],
            mask: mask.to_vec(),
            logprobs: None,
            versions: spans.clone(),
        };
        let segments = self.segments.into_iter().map(segment).collect();
        Body { status: self.status, reward: self.reward, version, segments, execution: self.execution }
    }
}

fn fill(now: &Reference, policy: PolicyNumber, items: Vec<BodyPlan>) -> Vec<Post> {
    let named = |group: &GroupName| if let GroupName::Named(name) = group { Some(*name) } else { None };
    // Not one that is full and waits for scores.
    let has_places = |group: &&GroupName| {
        let number = now.group_named(policy, **group);
        number.is_some_and(|number| now.arrived(number) < now.groups[&number].size)
    };
    let open = groups_in(now, policy, Some(GroupState::Open)).iter().filter(has_places).find_map(named);
    let unused = || (0..GROUPS).find(|name| now.group_named(policy, GroupName::Named(*name)).is_none());
    let group = open.or_else(unused).unwrap_or(0);
    let mut fresh = (0..ROLLOUTS).filter(|name| now.rollout_named(policy, *name).is_none());
    let post = |(index, body): (usize, BodyPlan)| Post {
        policy,
        rollout: fresh.next().unwrap_or(index),
        group: Some(group),
        group_size: None,
        body: body.resolve(now, policy),
    };
    items.into_iter().enumerate().map(post).collect()
}

fn repost(now: &Reference, policy: PolicyNumber, nth: usize, changed: bool) -> Call {
    let run = now.policies[policy].run;
    let known: Vec<_> = now.rollouts.values().filter(|known| known.policy == policy && known.run == run).collect();
    if known.is_empty() {
        return Call::Post(Vec::new());
    }
    let known = known[nth % known.len()];
    let mut body = known.body.clone();
    if changed {
        body.reward = if body.reward == Some(0) { Some(1) } else { Some(0) };
    }
    let group = if let GroupName::Named(name) = now.groups[&known.group].name { Some(name) } else { None };
    Call::Post(vec![Post { policy, rollout: known.name, group, group_size: None, body }])
}

fn groups_in(now: &Reference, policy: PolicyNumber, state: Option<GroupState>) -> Vec<GroupName> {
    let run = now.policies[policy].run;
    let found = now
        .groups
        .values()
        .filter(|group| group.policy == policy && group.run == run && state.is_none_or(|state| state == group.state));
    found.map(|group| group.name).collect()
}

impl GroupPick {
    fn resolve(self, now: &Reference, policy: PolicyNumber) -> GroupName {
        let found = if self.state.is_some() { groups_in(now, policy, self.state) } else { Vec::new() };
        if found.is_empty() { GroupName::Named(self.nth) } else { found[self.nth % found.len()] }
    }
}

impl BatchPick {
    fn resolve(self, now: &Reference) -> Option<usize> {
        match self {
            Self::In(state, nth) => {
                let found: Vec<usize> =
                    now.batches.iter().rev().filter(|(_, batch)| batch.state == state).map(|(n, _)| *n).collect();
                if found.is_empty() { Self::Any(nth).resolve(now) } else { Some(found[nth % found.len()]) }
            }
            Self::Any(nth) => (now.cuts > 0).then(|| nth % now.cuts),
            Self::Unknown => None,
        }
    }
}

impl HolderPick {
    /// The batch's holder, and its policy.
    fn resolve(self, now: &Reference) -> (Holder, PolicyNumber) {
        let batch = self.batch.resolve(now);
        let found = batch.and_then(|number| now.batches.get(&number));
        let policy = found.map_or(0, |batch| batch.policy);
        let leases: &[LeaseNumber] = found.map_or(&[], |batch| &batch.leases);
        let lease = match self.lease {
            LeasePick::Last => leases.last().copied(),
            // If the batch was leased only once, the lease of another batch is used.
            LeasePick::Earlier => leases.iter().rev().nth(1).copied().or(now.grants.checked_sub(2)),
            LeasePick::Forged => None,
        };
        (Holder { batch, lease, epoch: self.epoch.resolve(now, policy) }, policy)
    }
}

impl EpochPick {
    fn resolve(self, now: &Reference, policy: PolicyNumber) -> Option<i64> {
        let current = now.policies[policy].epoch;
        match self {
            Self::Absent => None,
            Self::Current => Some(current),
            Self::Before => Some(current - 1),
        }
    }
}

impl StepPick {
    fn resolve(self, now: &Reference, policy: PolicyNumber, batch: Option<usize>) -> i64 {
        let policy = &now.policies[policy];
        let next = policy.acked_step.max(policy.checkpoint_step).map_or(1, |last| last + 1);
        let step = match self {
            Self::Next => next,
            Self::Skipping => next + 2,
            Self::LastAcked => policy.acked_step.unwrap_or(0),
            Self::BeforeLastAcked => policy.acked_step.unwrap_or(0) - 1,
            Self::Checkpoint => policy.checkpoint_step.unwrap_or(0),
            Self::BelowCheckpoint => policy.checkpoint_step.unwrap_or(0) - 1,
            Self::OfBatch => batch.and_then(|number| now.batches.get(&number)?.step).unwrap_or(next),
        };
        step.max(0)
    }
}

impl NackPick {
    fn resolve(self, now: &Reference, batch: Option<usize>) -> Vec<GroupName> {
        let held = batch.map(|number| now.groups.values().filter(move |group| group.batch == Some(number)));
        let names: Vec<GroupName> = held.into_iter().flatten().map(|group| group.name).collect();
        match self {
            Self::Whole => Vec::new(),
            Self::First => names.into_iter().take(1).collect(),
            Self::All => names,
            Self::Foreign => names.into_iter().take(1).chain([GroupName::Alone(ROLLOUTS - 1)]).collect(),
        }
    }
}

impl VersionPick {
    fn resolve(
        self,
        now: &Reference,
        policy: PolicyNumber,
        step: Option<i64>,
        uri: Option<usize>,
        epoch: Option<i64>,
    ) -> Call {
        let current = &now.policies[policy];
        match self {
            Self::Above(more) => Call::Publish { policy, version: current.version + more, step, uri, epoch },
            Self::Repeat => {
                let (version, step, uri) = (current.version, current.version_step, current.version_uri);
                Call::Publish { policy, version, step, uri, epoch }
            }
            Self::Same => Call::Publish { policy, version: current.version, step, uri, epoch },
            Self::Below => Call::Publish { policy, version: (current.version - 1).max(0), step, uri, epoch },
        }
    }
}
