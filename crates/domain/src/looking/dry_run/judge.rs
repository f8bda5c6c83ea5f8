//! Decides one group again: as it was decided, by the filters that the policy has now, and by a draft.

use std::{collections::BTreeMap, sync::Arc};

use forebay_wire::{FilterRule, FilterScope, Status};
use serde_json::value::RawValue;

use super::{IN_PAYLOAD, Payloads};
use crate::{
    clock::Timestamp,
    finalize::{self, Cause, GroupDecision, GroupSnapshot, Member},
    formats::payload::Described,
    ids::Version,
    ingest::{self, decide::GroupFill},
    looking::dry_run::{PastGroup, PastRollout},
    reasons,
    rules::{
        Rules,
        filter::{Evaluation, facts::RolloutFacts},
    },
    scores,
    states::{GroupState, Verdict},
};

/// What becomes of a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It becomes ready.
    Ready,
    /// It is discarded for this reason.
    Discarded(String),
    /// It would still wait for rollouts.
    Open,
    /// It cannot be judged, for this reason.
    Unjudged(&'static str),
}

/// The verdict on a rollout, and the reason.
pub type Judged = (Verdict, Option<String>);

/// A group by some filters.
#[derive(Clone, Debug)]
pub struct JudgedGroup {
    pub outcome: Outcome,
    /// The verdicts, in the order of the rollouts; empty if the group cannot be judged.
    pub verdicts: Vec<Judged>,
    /// Kept and masked rollouts, by their places in the group.
    pub members: Vec<usize>,
    pub failures: Vec<Failure>,
    /// Rollouts whose filters could not be evaluated because their payload is missing, with the reason.
    pub unjudged: Vec<&'static str>,
}

/// A filter that could not be evaluated.
#[derive(Clone, Debug)]
pub struct Failure {
    pub filter: String,
    pub scope: FilterScope,
    pub message: String,
    /// The place of the rollout in the group, if it is a filter of rollouts.
    pub rollout: Option<usize>,
}

/// A group as it was decided and as it would be.
pub struct Comparison {
    pub as_decided: JudgedGroup,
    pub rules_now: JudgedGroup,
    pub draft: JudgedGroup,
}

/// Rules whose filters are tried.
struct Side {
    rules: Arc<Rules>,
    /// Whether its filters of rollouts read what only the payload has.
    needs_payload: bool,
    /// Whether its filters of groups do.
    reads_components: bool,
}

/// What decides groups again.
pub struct Judge {
    draft: Side,
    now: Side,
    /// Versions and when each was published, in the order of the versions.
    published: Vec<(Version, Timestamp)>,
}

/// What a filter can know of a rollout.
struct Known<'a> {
    status: Status,
    environment: Option<&'a str>,
    reward_components: &'a BTreeMap<String, f64>,
    scores: BTreeMap<String, f64>,
    temperature: f64,
    metadata: Option<&'a RawValue>,
    response_tokens: u64,
    max_segment_tokens: u64,
}

/// Stands for what no filter asks for.
static NO_COMPONENTS: BTreeMap<String, f64> = BTreeMap::new();

impl Judge {
    pub fn new(draft: Arc<Rules>, now: Arc<Rules>, published: Vec<(Version, Timestamp)>) -> Self {
        Self { draft: Side::new(draft), now: Side::new(now), published }
    }

    pub fn depends_on_versions(&self) -> bool {
        self.draft.rules.filters().depend_on_versions()
    }

    /// Whether a filter reads scores, of rollouts or as components of groups.
    pub fn reads_scores(&self) -> bool {
        self.names("scores") || [&self.draft, &self.now].iter().any(|side| side.reads_components)
    }

    /// Whether a filter of rollouts names this variable.
    pub fn names(&self, variable: &str) -> bool {
        [&self.draft, &self.now].iter().any(|side| side.rules.filters().rollout_filters_name(&[variable]))
    }

    /// The rollouts of a group whose payloads are needed.
    pub fn payloads_of<'g>(&self, group: &'g PastGroup) -> impl Iterator<Item = &'g PastRollout> {
        let sides = [&self.draft, &self.now].map(|side| (side.needs_payload, side.reads_components, side.is_of(group)));
        group.rollouts.iter().filter(move |rollout| {
            sides.iter().any(|&(needs_payload, reads_components, is_same)| {
                let is_known = is_same && rollout.verdict != Verdict::Late;
                reads_components || (!is_known && needs_payload)
            })
        })
    }

    /// Decides a group by all filters; none if the time is over.
    pub fn group(&self, group: &PastGroup, payloads: &Payloads, is_late: &dyn Fn() -> bool) -> Option<Comparison> {
        Some(Comparison {
            as_decided: as_decided(group),
            rules_now: self.decide(&self.now, group, payloads, is_late)?,
            draft: self.decide(&self.draft, group, payloads, is_late)?,
        })
    }

    /// Lets the rollouts of a group arrive again, until the group is decided.
    fn decide(
        &self,
        side: &Side,
        group: &PastGroup,
        payloads: &Payloads,
        is_late: &dyn Fn() -> bool,
    ) -> Option<JudgedGroup> {
        let on_drop = group.rules.group.on_drop;
        let before = group.rollouts.iter().filter(|rollout| rollout.verdict != Verdict::Late);
        // A group that was not due when it was decided had timed out or was closed. Then nothing arrives later.
        let timed_out = {
            let mut fill = empty(group);
            before.clone().for_each(|rollout| fill.count(rollout.verdict));
            fill.due(on_drop).is_none()
        };
        let arrived = before.count();
        let mut judged = JudgedGroup::new(Outcome::Open);
        let (mut fill, mut decision) = (empty(group), None);
        for (place, rollout) in group.rollouts.iter().enumerate() {
            if is_late() {
                return None;
            }
            if !judged.unjudged.is_empty() && place >= arrived {
                break;
            }
            if decision.is_some() || (timed_out && place >= arrived) {
                judged.verdicts.push((Verdict::Late, None));
                continue;
            }
            let verdict = match self.verdict(side, group, place, payloads, &mut judged.failures) {
                Ok(verdict) => verdict,
                Err(reason) => {
                    judged.unjudged.push(reason);
                    continue;
                }
            };
            fill.count(verdict.0);
            if verdict.0.takes_place() {
                judged.members.push(place);
            }
            judged.verdicts.push(verdict);
            let is_known = judged.unjudged.is_empty();
            if let Some(cause) = fill.due(on_drop).filter(|_| is_known) {
                // The rollout that completed the group arrived when it was decided.
                let at = if place + 1 == arrived { group.decided_at } else { rollout.received_at };
                decision = Some((cause, at));
            }
        }
        if let Some(&reason) = judged.unjudged.first() {
            judged.give_up(reason);
            return Some(judged);
        }
        if let Some((cause, at)) = decision.or_else(|| timed_out.then_some((Cause::TimedOut, group.decided_at))) {
            finalize(side, group, payloads, cause, at, &mut judged);
        }
        Some(judged)
    }

    /// The verdict on a rollout while its group is open, or why it is not known.
    fn verdict(
        &self,
        side: &Side,
        group: &PastGroup,
        place: usize,
        payloads: &Payloads,
        failures: &mut Vec<Failure>,
    ) -> Result<Judged, &'static str> {
        let rollout = &group.rollouts[place];
        if side.needs_payload && rollout.verdict != Verdict::Late && side.is_of(group) {
            // The same filters gave this verdict, so the payload need not be read.
            failures.extend(rollout.failed_filters.iter().map(|filter| Failure {
                filter: filter.clone(),
                scope: FilterScope::Rollout,
                message: "it could not be evaluated when the rollout arrived".to_owned(),
                rollout: Some(place),
            }));
            return Ok((rollout.verdict, rollout.reason.clone()));
        }
        if rollout.reason.as_deref() == Some(reasons::UNSCORED) {
            // No filter decided about it.
            return Ok((rollout.verdict, rollout.reason.clone()));
        }
        let known = if side.needs_payload { payloads.of(group, rollout)? } else { Known::of_row(rollout) };
        let facts = self.facts(rollout, &known);
        let filters = side.rules.filters();
        let Evaluation { matched, failed, .. } = filters.evaluate_rollout(&facts);
        failures.extend(failed.into_iter().map(|filter| Failure {
            filter: filter.to_owned(),
            scope: FilterScope::Rollout,
            message: filters.why_rollout_failed(filter, &facts),
            rollout: Some(place),
        }));
        let matched = matched.map(|found| (found.name.to_owned(), found.action));
        Ok(ingest::decide::verdict(matched, rollout.reward))
    }

    fn facts<'a>(&self, rollout: &'a PastRollout, known: &'a Known<'_>) -> RolloutFacts<'a> {
        let current = self.version_at_arrival(rollout);
        RolloutFacts {
            status: known.status.as_str(),
            reward: rollout.reward,
            reward_components: known.reward_components,
            scores: &known.scores,
            environment: known.environment,
            policy_version: rollout.policy_version.0,
            version_current: current.0,
            staleness: current.0.saturating_sub(rollout.policy_version.0).max(0),
            segments: i64::from(rollout.segments),
            tokens: rollout.tokens as i64,
            response_tokens: known.response_tokens as i64,
            trained_tokens: rollout.trained_tokens as i64,
            max_segment_tokens: known.max_segment_tokens as i64,
            temperature: known.temperature,
            metadata: known.metadata,
        }
    }

    /// The newest version that was published before a rollout arrived.
    fn version_at_arrival(&self, rollout: &PastRollout) -> Version {
        if rollout.version_assumed {
            return rollout.policy_version;
        }
        let published = self.published.iter().rev().find(|(_, at)| *at <= rollout.received_at);
        published.map_or(Version(0), |(version, _)| *version)
    }
}

impl JudgedGroup {
    fn new(outcome: Outcome) -> Self {
        Self { outcome, verdicts: Vec::new(), members: Vec::new(), failures: Vec::new(), unjudged: Vec::new() }
    }

    /// Leaves a group that cannot be judged.
    fn give_up(&mut self, reason: &'static str) {
        self.outcome = Outcome::Unjudged(reason);
        self.verdicts.clear();
        self.members.clear();
    }
}

impl Side {
    fn new(rules: Arc<Rules>) -> Self {
        let filters = rules.filters();
        Self {
            needs_payload: filters.rollout_filters_name(&IN_PAYLOAD),
            reads_components: !filters.components().is_empty(),
            rules,
        }
    }

    /// Whether the rollouts of a group were judged by the same filters.
    fn is_of(&self, group: &PastGroup) -> bool {
        fn of_rollouts(rules: &Rules) -> impl Iterator<Item = &FilterRule> {
            rules.filter.iter().filter(|filter| filter.scope == FilterScope::Rollout)
        }
        of_rollouts(&self.rules).eq(of_rollouts(&group.rules))
    }
}

impl Known<'_> {
    /// What the row of a rollout has; the rest is not asked for.
    fn of_row(rollout: &PastRollout) -> Self {
        Self {
            status: rollout.status,
            environment: None,
            reward_components: &NO_COMPONENTS,
            scores: BTreeMap::new(),
            temperature: 1.0,
            metadata: None,
            response_tokens: rollout.response_tokens,
            max_segment_tokens: rollout.max_segment_tokens,
        }
    }
}

impl<'a> From<&'a Described> for Known<'a> {
    fn from(described: &'a Described) -> Self {
        Self {
            status: described.status,
            environment: described.environment.as_deref(),
            reward_components: &described.reward_components,
            scores: BTreeMap::new(),
            temperature: f64::from(described.sampling.temperature),
            metadata: described.metadata.as_deref(),
            response_tokens: described.response_tokens,
            max_segment_tokens: described.max_segment_tokens,
        }
    }
}

impl Payloads {
    /// What the payload of a rollout says, or why it is not known.
    fn of(&self, group: &PastGroup, rollout: &PastRollout) -> Result<Known<'_>, &'static str> {
        match self.described.get(&rollout.rollout_pk) {
            Some(Ok(described)) => {
                let given = self.scores.get(&rollout.rollout_pk).into_iter().flatten();
                let scores = scores::of_row(&group.rules, &described.reward_components, rollout.reward, given);
                Ok(Known { scores, ..described.into() })
            }
            Some(Err(_)) => Err("payload-damaged"),
            None if self.too_large.contains(&rollout.rollout_pk) => Err("payload-too-large"),
            None => Err("payload-purged"),
        }
    }
}

/// A group before its first rollout.
fn empty(group: &PastGroup) -> GroupFill {
    GroupFill { state: GroupState::Open, size: group.size, kept: 0, masked: 0, dropped: 0, scoring: 0 }
}

fn as_decided(group: &PastGroup) -> JudgedGroup {
    let outcome = group.discarded.as_ref().map_or(Outcome::Ready, |reason| Outcome::Discarded(reason.clone()));
    let rollouts = || group.rollouts.iter();
    JudgedGroup {
        verdicts: rollouts().map(|rollout| (rollout.verdict, rollout.reason.clone())).collect(),
        members: rollouts().enumerate().filter(|(_, of)| of.verdict.takes_place()).map(|(place, _)| place).collect(),
        ..JudgedGroup::new(outcome)
    }
}

/// Decides a group with its members.
fn finalize(
    side: &Side,
    group: &PastGroup,
    payloads: &Payloads,
    cause: Cause,
    at: Timestamp,
    judged: &mut JudgedGroup,
) {
    let member = |&place: &usize| {
        let (rollout, (verdict, _)) = (&group.rollouts[place], &judged.verdicts[place]);
        let known = if side.reads_components { payloads.of(group, rollout)? } else { Known::of_row(rollout) };
        Ok(Member {
            rollout_pk: rollout.rollout_pk,
            verdict: *verdict,
            reward: rollout.reward,
            components: side.rules.components_of(&scores::components(known.reward_components, known.scores)),
            // No filter reads them.
            turns: Arc::default(),
            segments: rollout.segments,
            trained_segments: rollout.segments,
            tokens: rollout.tokens,
            trained_tokens: rollout.trained_tokens,
            trained_versions: None,
        })
    };
    let rollouts = match judged.members.iter().map(member).collect() {
        Ok(rollouts) => rollouts,
        Err(reason) => {
            judged.unjudged.push(reason);
            return judged.give_up(reason);
        }
    };
    let snapshot = GroupSnapshot {
        size: group.size,
        min_size: group.min_size,
        environment: group.environment.clone(),
        opened_at: group.opened_at,
        rollouts,
    };
    let filters = side.rules.filters();
    let outcome = finalize::decide_by(filters, &group.rules.advantage, &snapshot, cause, at);
    let voters = snapshot.voters();
    judged.failures.extend(outcome.failed_filters.into_iter().map(|filter| Failure {
        message: filters.why_group_failed(&filter, &finalize::filter_facts(&snapshot, &voters, at)),
        filter,
        scope: FilterScope::Group,
        rollout: None,
    }));
    judged.outcome = match outcome.decision {
        GroupDecision::Ready(_) => Outcome::Ready,
        GroupDecision::Discard(reason) => Outcome::Discarded(reason),
    };
}
