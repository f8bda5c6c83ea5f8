//! The decision about a rollout, as pure functions of rules and snapshots.
//!
//! Separate from the rest of [`ingest`](super), because the store calls them in its transaction, under the lock of the
//! group.

use std::sync::Arc;

use forebay_wire::{FilterAction, OnDrop, Requirement, Retries, Violation};

use crate::{
    admission::{Room, room::POSTS_PER_PLACE_MAX},
    columns, credit,
    evaluation::{EvaluationRequest, FAILED_FILTERS_MAX, FilterVerdict},
    finalize::Cause,
    ids::Version,
    ingest::new_rollout::{Form, NewRollout},
    reasons,
    refusal::Refusal,
    rules::Rules,
    scores::{self, Standing},
    staleness::{TrainedSpan, TrainedVersions, masks},
    states::{GroupState, Verdict},
    trajectory::{ResolvedVersions, VIOLATIONS_MAX},
    warnings::Warning,
};

/// Places and posts of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFill {
    /// The state of the group; where a rollout is decided, the state before it.
    pub state: GroupState,
    /// The number of places.
    pub size: u32,
    /// The number of kept rollouts.
    pub kept: u32,
    /// The number of masked rollouts.
    pub masked: u32,
    /// The number of dropped rollouts.
    pub dropped: u32,
    /// The number of kept rollouts that lack a score, so that their verdict is not final.
    pub scoring: u32,
}

impl GroupFill {
    /// The number of kept and masked rollouts.
    #[must_use]
    pub fn arrived(&self) -> u32 {
        self.kept + self.masked
    }

    /// Counts a rollout that an open group received.
    pub fn count(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Kept => self.kept += 1,
            Verdict::Masked => self.masked += 1,
            Verdict::Dropped => self.dropped += 1,
            Verdict::Late => {}
        }
    }

    /// Counts that a rollout which lacked scores got its final verdict.
    pub fn count_scored(&mut self, verdict: Verdict) {
        self.scoring -= 1;
        self.kept -= 1;
        self.count(verdict);
    }

    /// Whether this many more rollouts could make the decision due, depending on their verdicts.
    #[must_use]
    pub fn may_be_due(&self, more: u32) -> bool {
        self.state.is_open() && self.scoring == 0 && self.arrived() + self.dropped + more >= self.size
    }

    /// Why the group must be decided now; none if it need not be. No group is decided while one of its rollouts lacks a
    /// score.
    #[must_use]
    pub fn due(&self, on_drop: OnDrop) -> Option<Cause> {
        if self.scoring > 0 { None } else { self.filled(on_drop) }
    }

    /// The places that are left. A group that takes no more rollouts has none, also if some of its posts were dropped.
    #[must_use]
    pub fn places_left(&self, on_drop: OnDrop) -> u32 {
        if self.filled(on_drop).is_some() { 0 } else { self.size.saturating_sub(self.arrived()) }
    }

    /// Why the group takes no more rollouts; none if it does.
    #[must_use]
    pub fn filled(&self, on_drop: OnDrop) -> Option<Cause> {
        let posts = self.arrived() + self.dropped;
        if self.arrived() >= self.size {
            return Some(Cause::Complete);
        }
        match on_drop {
            OnDrop::Shrink if posts >= self.size => Some(Cause::PlacesUsed),
            OnDrop::Refill if posts >= self.size.saturating_mul(POSTS_PER_PLACE_MAX) => Some(Cause::Exhausted),
            _ => None,
        }
    }
}

/// The decision about one rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutDecision {
    pub verdict: Verdict,
    /// The filter or built-in code that gave the verdict.
    pub reason: Option<String>,
    /// Filters whose evaluation failed.
    pub failed_filters: Vec<String>,
    /// The filters among `failed_filters` that would have cost too much. They are not stored, so a retry only reports
    /// that they failed.
    pub over_budget: Vec<String>,
    /// Its versions; the current one stands in for an absent one.
    pub versions: ResolvedVersions,
    /// Whether it names an admission that has lapsed.
    pub admission_lapsed: bool,
    /// Whether its repeated calls are trained, by the rules of its group.
    pub retries: Retries,
    /// Trained tokens by version, if the policy masks stale tokens.
    pub trained_spans: Option<Vec<TrainedSpan>>,
    /// Its reward; that of the producer as long as it lacks scores.
    pub reward: Option<f64>,
    /// The required scores that it lacks. Its verdict is `kept` as long as there are some, and not final.
    pub scoring: Vec<String>,
}

impl RolloutDecision {
    /// Whether its trained tokens are of several versions.
    #[must_use]
    pub fn trains_several_versions(&self) -> bool {
        self.trained_versions().is_some_and(|versions| versions.oldest != versions.newest)
    }

    /// Trained versions as they will be delivered. A masked rollout trains no token.
    #[must_use]
    pub fn trained_versions(&self) -> Option<TrainedVersions> {
        self.versions.trained.filter(|_| self.verdict == Verdict::Kept)
    }
}

/// Checks requirements that depend on the rules and the size of the group: required columns, groups of one, and the number
/// of turns.
pub fn check(rules: &Rules, new: &NewRollout, room: Room, group_size: u32) -> Result<(), Refusal> {
    let mut violations = Vec::new();
    let mut refuse = |pointer: &str, detail: String| {
        violations.push(Violation { pointer: pointer.into(), detail });
    };
    let Form { facts, assembly, .. } = new.form(rules.sessions.retries);
    let (list, every, one) = match assembly {
        None => ("/segments", "every segment", "at least one segment"),
        Some(_) => ("/turns", "every turn", "at least one turn that is not dropped"),
    };
    for requirement in rules.required() {
        // An admission gives the rollout its version.
        let brought = requirement == Requirement::PolicyVersion && room.version().is_some();
        if !brought && !facts.has(requirement) {
            let name = serde_json::to_value(requirement).unwrap_or_default();
            let name = name.as_str().unwrap_or_default();
            let detail = |place: &str| format!("policy `{}` requires `{name}` in {place}", new.policy);
            match requirement {
                Requirement::Tokens => refuse(list, detail(one)),
                Requirement::PolicyVersion => {
                    refuse("/policy_version", detail(&format!("the trajectory, or as `versions` in {every}")));
                }
                Requirement::Advantages => refuse(list, detail("every segment, and turns have none")),
                Requirement::Logprobs | Requirement::TeacherLogprobs | Requirement::Values => {
                    refuse(list, detail(every));
                }
            }
        }
    }
    let turns_max = credit::turns_max(group_size);
    if rules.compare_turns() && facts.turns.len() > turns_max {
        let detail = format!(
            "has more than the {turns_max} turns that policy `{}` compares of a rollout in a group of {group_size}: a turn is a \
             call, an entry of `turns`, or a run of tokens with mask 1 where there are neither",
            new.policy
        );
        refuse(list, detail);
    }
    if new.group_id.is_none() && rules.group.size > 1 {
        refuse("/group_id", format!("is needed: groups of policy `{}` have {} rollouts", new.policy, rules.group.size));
    }
    if assembly.is_none() {
        violations.extend(columns::check(&rules.columns, &facts.shapes).take(VIOLATIONS_MAX));
    } else if let Some((name, _)) = rules.columns.iter().find(|(_, rule)| rule.required) {
        let detail =
            format!("policy `{}` requires the column `{name}`, which turns do not have: post segments", new.policy);
        violations.push(Violation { pointer: list.to_owned(), detail });
    }
    if violations.is_empty() { Ok(()) } else { Err(Refusal::Invalid(violations)) }
}

/// The inputs on which the filters of a new rollout must still be evaluated; none if they were evaluated.
#[must_use]
pub fn pending_evaluation(
    rules: &Arc<Rules>,
    new: &NewRollout,
    room: Room,
    current: Version,
) -> Option<EvaluationRequest> {
    let versions = new.form(rules.sessions.retries).facts.versions.resolve(room.version(), current);
    let not_evaluated = new.evaluation.by(rules, versions, current).is_none();
    not_evaluated.then(|| EvaluationRequest {
        index: 0,
        rules: Arc::clone(rules),
        is_current: false,
        versions,
        current,
    })
}

/// The verdict on a new rollout of a group, under the group's lock. This evaluates no filters: it returns none if the
/// result of the filters is missing.
#[must_use]
pub fn decide(
    rules: &Rules,
    new: &NewRollout,
    room: Room,
    current: Version,
    group: GroupFill,
) -> Option<RolloutDecision> {
    let retries = rules.sessions.retries;
    let facts = &new.form(retries).facts;
    let versions = facts.versions.resolve(room.version(), current);
    let admission_lapsed = room == Room::Lapsed;
    let late = if group.state.is_open() {
        group.filled(rules.group.on_drop).map(|_| reasons::GROUP_FULL)
    } else {
        Some(reasons::GROUP_DECIDED)
    };
    if let Some(reason) = late {
        return Some(RolloutDecision {
            verdict: Verdict::Late,
            reason: Some(reason.to_owned()),
            failed_filters: Vec::new(),
            over_budget: Vec::new(),
            versions,
            admission_lapsed,
            retries,
            trained_spans: None,
            reward: facts.reward,
            scoring: Vec::new(),
        });
    }
    let FilterVerdict { matched, failed, over_budget, reward } = new.evaluation.by(rules, versions, current)?;
    let standing = if rules.use_scores() {
        Standing::of(rules, facts, &scores::all(&facts.reward_components, facts.reward, []))
    } else {
        Standing::Complete
    };
    let is_computed = rules.reward().is_some() && standing == Standing::Complete;
    let reward = if is_computed { reward } else { facts.reward };
    let (verdict, reason, scoring) = match (matched, standing) {
        (None, Standing::Waits(missing)) => (Verdict::Kept, None, missing),
        (matched, _) => {
            let (verdict, reason) = verdict(matched, reward);
            (verdict, reason, Vec::new())
        }
    };
    let failed_filters = failed.into_iter().take(FAILED_FILTERS_MAX).collect();
    let masks = verdict == Verdict::Kept && masks(&rules.staleness);
    let stated = facts.versions.stated(room.version(), current);
    let trained_spans = masks.then(|| facts.trained_spans(stated));
    Some(RolloutDecision {
        verdict,
        reason,
        failed_filters,
        over_budget,
        versions,
        admission_lapsed,
        retries,
        trained_spans,
        reward,
        scoring,
    })
}

/// The verdict on a rollout that its group takes, and the reason: by the filter that matched, if one did.
pub fn verdict(matched: Option<(String, FilterAction)>, reward: Option<f64>) -> (Verdict, Option<String>) {
    match matched {
        Some((name, FilterAction::Mask)) => (Verdict::Masked, Some(name)),
        Some((name, FilterAction::Drop)) => (Verdict::Dropped, Some(name)),
        None if reward.is_none() => (Verdict::Dropped, Some(reasons::NO_REWARD.to_owned())),
        None => (Verdict::Kept, None),
    }
}

/// A warning if a rollout has another environment than its group, which has that of its first rollout.
#[must_use]
pub fn environment_warning(new: &NewRollout, of_group: Option<&str>) -> Option<Warning> {
    // The environment does not depend on how the rules treat repeated calls.
    let own = new.form(Retries::default()).facts.environment.as_deref();
    (own != of_group).then(|| {
        let said = |label: Option<&str>| label.map_or_else(|| "no environment".to_owned(), |label| format!("`{label}`"));
        let detail = format!(
            "the rollout has {}, and its group has {} by its first rollout: shares, filters and metrics of environments \
             count the whole group there",
            said(own),
            said(of_group)
        );
        Warning::new("mixed-environments", detail)
    })
}

/// Warnings for the producer of an accepted rollout, given the current version.
#[must_use]
pub fn warnings(new: &NewRollout, decision: &RolloutDecision, current: Version) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if decision.reason.as_deref() == Some(reasons::GROUP_FULL) {
        warnings.push(Warning::new(
            reasons::GROUP_FULL,
            "all places of the group are taken, by rollouts of which some wait for scores, and this rollout will not be \
             trained on; if one of them is dropped, its place is free for another",
        ));
    } else if decision.verdict == Verdict::Late {
        warnings.push(Warning::new(
            reasons::GROUP_DECIDED,
            "the group was decided before this rollout arrived, and it will not be trained on; a new pass over the data \
             needs new `group_id`s",
        ));
    }
    if decision.reason.as_deref() == Some(reasons::NO_REWARD) {
        warnings.push(Warning::new(
            reasons::NO_REWARD,
            "the rollout has no reward and no filter masks it, so it is dropped",
        ));
    }
    if new.evaluates.is_some() && decision.trains_several_versions() {
        let detail = "the trained tokens are of several versions, so the rollout counts for none of them";
        warnings.push(Warning::new("mixed-versions", detail));
    }
    if decision.admission_lapsed {
        let detail = "the admission that the rollout names is unknown, has expired, is used up, or belongs to another \
                      policy or run";
        warnings.push(Warning::new("admission-lapsed", detail));
    }
    for name in decision.failed_filters.iter().filter(|name| decision.over_budget.contains(name)) {
        let detail = format!(
            "filter `{name}` was not evaluated and did not match: with so much metadata it may take more steps than the \
             filters of a rollout may take together"
        );
        warnings.push(Warning::new("filter-over-budget", detail));
    }
    for name in decision.failed_filters.iter().filter(|name| !decision.over_budget.contains(name)) {
        let detail = format!("filter `{name}` could not be evaluated on this rollout and did not match");
        warnings.push(Warning::new("filter-failed", detail));
    }
    let facts = &new.form(decision.retries).facts;
    warnings.extend(facts.warnings.iter().cloned());
    warnings.extend(facts.versions.warning(current));
    warnings
}
