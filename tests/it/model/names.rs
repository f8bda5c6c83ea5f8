//! Maps the model's numbers to names on the wire, and its values to the wire's objects.

use std::sync::Arc;

use forebay_domain::{
    ids::{ExecutionId, GroupId},
    rules,
};
use forebay_wire::{
    BacklogRules, BatchRules, EnvironmentRules, FilterAction, FilterRule, FilterScope, GroupRules, LeaseRules,
    LossWeighting, OnDrop, PolicyRules, RetentionRules, ScoreRules, ScoreWork, ScoreWorkPer, Segment, SessionRules,
    Settle, StalenessAction, StalenessRules, Trajectory,
};

use super::{
    operation::{EXECUTIONS, GROUPS, ROLLOUTS, URIS},
    reference::LOSS_CONSTANT,
    view::{
        self, ATTEMPTS_MAX, Body, DISCARDS_EQUAL, DROPS_ABORTED, DROPS_POOR, GroupName, LABELS, Label, MASKS_TRUNCATED,
        PER_GROUP, Post, Rules, SCORES, label,
    },
};

/// Names of groups, then of rollouts.
pub(crate) struct Names(Vec<String>);

impl Names {
    pub(crate) fn new() -> Self {
        Self((0..GROUPS + ROLLOUTS).map(|number| format!("name-{number}")).collect())
    }

    pub(crate) fn rollout(&self, number: usize) -> &str {
        &self.0[GROUPS + number]
    }

    pub(crate) fn named_group(&self, number: usize) -> &str {
        &self.0[number]
    }

    fn number(&self, name: &str) -> usize {
        self.0.iter().position(|known| known == name).expect("only these names are used")
    }

    pub(crate) fn rollout_number(&self, name: &str) -> usize {
        self.number(name) - GROUPS
    }

    pub(crate) fn group(&self, name: GroupName) -> GroupId {
        match name {
            GroupName::Named(number) => group_id(&self.0[number]),
            GroupName::Alone(rollout) => group_id(self.rollout(rollout)),
        }
    }

    pub(crate) fn group_name(&self, name: &str) -> GroupName {
        let number = self.number(name);
        if number < GROUPS { GroupName::Named(number) } else { GroupName::Alone(number - GROUPS) }
    }

    pub(crate) fn trajectory(&self, post: &Post) -> Trajectory {
        let Body { status, reward, version, segments, execution } = &post.body;
        Trajectory {
            policy: Some(format!("policy-{}", post.policy)),
            rollout_id: Some(self.rollout(post.rollout).to_owned()),
            group_id: post.group.map(|group| self.0[group].clone()),
            group_size: post.group_size,
            environment: environment_of(post.group()),
            execution_id: execution.map(|number| execution_id(number).to_string()),
            policy_version: *version,
            status: *status,
            reward: reward.map(|halves| f64::from(halves) / 2.0),
            segments: segments.iter().map(segment).collect(),
            ..Trajectory::default()
        }
    }
}

/// The id of an execution.
pub(crate) fn execution_id(number: usize) -> ExecutionId {
    ExecutionId::parse(&format!("execution-{number}")).expect("the id is valid")
}

/// The number of an execution; none if the service made its id.
pub(crate) fn execution_number(id: &ExecutionId) -> Option<usize> {
    (0..EXECUTIONS).find(|number| execution_id(*number) == *id)
}

/// The label of the environment of a group, if it has one.
pub(crate) fn environment_of(group: GroupName) -> Option<String> {
    Some(LABELS[label(group)].to_owned()).filter(|label| !label.is_empty())
}

fn environment(label: Label, (weight, percent): (i64, i64)) -> (String, EnvironmentRules) {
    (LABELS[label].to_owned(), EnvironmentRules { weight: weight as f64, min_share: percent as f64 / 100.0 })
}

/// How scorers lease each of [`SCORES`].
fn work() -> impl Iterator<Item = (String, ScoreWork)> {
    SCORES.iter().enumerate().map(|(name, score)| {
        let per = if name == PER_GROUP { ScoreWorkPer::Group } else { ScoreWorkPer::Rollout };
        ((*score).to_owned(), ScoreWork { per, max_attempts: ATTEMPTS_MAX })
    })
}

fn group_id(name: &str) -> GroupId {
    GroupId::parse(name).expect("the id is valid")
}

fn segment(segment: &view::Segment) -> Segment {
    let view::Segment { kind, tokens, mask, logprobs, versions } = segment.clone();
    Segment {
        kind,
        tokens,
        loss_mask: mask,
        logprobs: logprobs.map(|logprobs| logprobs.into_iter().map(logprob).collect()),
        versions,
        ..Segment::default()
    }
}

/// A multiple of -1/128.
pub(crate) fn logprob(multiple: i64) -> f32 {
    0.0 - multiple as f32 / 128.0
}

/// URI of a version's weights.
pub(crate) fn uri(number: usize) -> String {
    format!("file:///weights/{number}")
}

pub(crate) fn uri_number(uri: &str) -> usize {
    (0..URIS).find(|number| self::uri(*number) == uri).expect("only these places are used")
}

/// The rules in the buffer's type.
pub(crate) fn rules(rules: &Rules) -> Arc<rules::Rules> {
    let constant = rules.weighting == LossWeighting::Constant;
    let wire = PolicyRules {
        group: GroupRules {
            size: rules.size,
            min_size: Some(rules.min_size),
            timeout_s: rules.timeout_s as u64,
            on_drop: if rules.shrink { OnDrop::Shrink } else { OnDrop::Refill },
        },
        batch: BatchRules {
            groups: rules.batch_groups as u32,
            max_tokens: rules.max_tokens,
            order: rules.order,
            environments: rules.environments.iter().map(|(label, of)| environment(*label, *of)).collect(),
        },
        lease: LeaseRules {
            ttl_s: rules.ttl_s as u64,
            max_deliveries: rules.max_deliveries,
            max_resumes: rules.max_resumes,
        },
        loss_weighting: rules.weighting,
        loss_constant: constant.then_some(LOSS_CONSTANT),
        staleness: StalenessRules {
            max: rules.staleness.map(|max| max as u32),
            action: rules.wait_s.map_or(StalenessAction::Drop, |_| StalenessAction::Wait),
            wait_s: rules.wait_s.unwrap_or(3_600) as u64,
            ..StalenessRules::default()
        },
        backlog: BacklogRules {
            max_ready_rollouts: rules.backlog.map_or(65_536, |most| most as u64),
            ..BacklogRules::default()
        },
        sessions: SessionRules { retries: rules.retries, max_attempts: rules.max_attempts, teacher: None },
        settle: if rules.settled_by_ack { Settle::Ack } else { Settle::Checkpoint },
        retention: RetentionRules {
            trained_s: rules.trained_s as u64,
            settled_s: rules.settled_s as u64,
            dropped_s: rules.dropped_s as u64,
            evaluated_s: 604_800,
            tombstone_s: rules.tombstone_s as u64,
        },
        scores: ScoreRules {
            required: rules.scored_s.iter().flat_map(|_| SCORES).map(str::to_owned).collect(),
            timeout_s: rules.scored_s.unwrap_or(3_600) as u64,
            reward: None,
            work: rules.scored_s.iter().flat_map(|_| work()).collect(),
        },
        filter: if rules.filters { filters(rules.scored_s.is_some()) } else { Vec::new() },
        ..PolicyRules::default()
    };
    Arc::new(rules::Rules::parse(wire).expect("the model's rules are valid"))
}

fn filters(are_scored: bool) -> Vec<FilterRule> {
    let filter = |name: &str, scope, when: &str, action| FilterRule {
        name: name.to_owned(),
        scope,
        when: when.to_owned(),
        action,
    };
    let mut filters = vec![
        filter(DROPS_ABORTED, FilterScope::Rollout, "status == 'aborted'", FilterAction::Drop),
        filter(MASKS_TRUNCATED, FilterScope::Rollout, "status == 'truncated'", FilterAction::Mask),
        filter(DISCARDS_EQUAL, FilterScope::Group, "size > 0 && reward_std < 1e-6", FilterAction::Drop),
    ];
    let poor = filter(DROPS_POOR, FilterScope::Rollout, "scores.judge < 0.5", FilterAction::Drop);
    filters.extend(are_scored.then_some(poor));
    filters
}
