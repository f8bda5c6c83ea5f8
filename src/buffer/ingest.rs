//! Stage 2, ingest: what becomes of a rollout, decided under the lock of its group.
//!
//! Everything here is a pure function of rules and snapshots; the store calls it inside its transaction, so the post
//! that completes a group is answered after the group is decided. The stage before is
//! [`trajectory`](super::trajectory), the next [`finalize`](super::finalize).

use std::{
    num::NonZero,
    sync::{Arc, LazyLock},
};

use forebay_client::wire::{self, FilterAction, GroupState, OnDrop, Requirement, StalenessAction, Verdict, Violation};

use tokio::sync::Semaphore;

use super::{
    Buffer,
    admission::Room,
    canonical::ContentDigest,
    doubt::Warning,
    filter::RolloutFacts,
    finalize::Cause,
    ids::{AdmissionId, GroupId, PolicyName, RolloutId, Version},
    judging::{self, JUDGED_AGAIN_MAX, Judged, Question},
    payload::{Codec, Payload},
    refusal::{BufferError, Refusal},
    replicas::Awaited,
    rules::Rules,
    staleness::TrainedSpan,
    trajectory::{Facts, ResolvedVersions, Trajectory, VIOLATIONS_MAX},
};
use crate::store::{BundleOutcome, Ingest, Ingested, StoreError};

/// Reason of a rollout that came after its group was decided.
pub const REASON_GROUP_DECIDED: &str = "group-decided";

/// Reason of a rollout without a reward that no filter masked.
pub const REASON_NO_REWARD: &str = "no-reward";

/// What groups discarded by hand are counted by: the reasons that people give are free text.
pub const RULE_BY_HAND: &str = "by-hand";

/// Posts per place after which a refilling group is decided with what is there.
pub const POSTS_PER_PLACE_MAX: u32 = 4;

/// Steps of filters that are taken where the request is handled, and bytes of metadata that are read for them: together
/// they take about a millisecond.
const JUDGED_INLINE_STEPS_MAX: u64 = 10_000;
const JUDGED_INLINE_BYTES_MAX: usize = 16 << 10;

/// Failing filters named in the ledger, per rollout or group.
pub(super) const FAILED_FILTERS_MAX: usize = 16;

/// A valid trajectory, packed and ready to be stored.
#[derive(Clone, Debug)]
pub struct NewRollout {
    /// Policy that produced it.
    pub policy: PolicyName,
    /// Its identity.
    pub rollout_id: RolloutId,
    /// Its group, if its producer named one.
    pub group_id: Option<GroupId>,
    /// Size of the group, if its producer named one.
    pub group_size: Option<u32>,
    /// The admission that it uses up, if its producer named one.
    pub admission_id: Option<AdmissionId>,
    /// What rules and the ledger know of it.
    pub facts: Facts,
    /// Canonical content.
    pub content: ContentDigest,
    /// The bulk.
    pub payload: Payload,
    /// What filters say about it.
    pub judged: Judged,
}

impl NewRollout {
    /// Packs a trajectory. Takes milliseconds for long ones: not for an async worker.
    #[must_use]
    pub fn pack(trajectory: Trajectory, codec: Codec) -> Self {
        Self {
            payload: Payload::pack(&trajectory, codec),
            policy: trajectory.policy,
            rollout_id: trajectory.rollout_id,
            group_id: trajectory.group_id,
            group_size: trajectory.group_size,
            admission_id: trajectory.admission_id,
            facts: trajectory.facts,
            content: trajectory.content,
            judged: Judged::default(),
        }
    }

    /// The group it belongs to: its own when its producer named none.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.group_id.clone().unwrap_or_else(|| GroupId::from(&self.rollout_id))
    }
}

/// Places and posts of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFill {
    /// State before the rollout at hand.
    pub state: GroupState,
    /// Places.
    pub size: u32,
    /// Rollouts kept.
    pub kept: u32,
    /// Rollouts masked.
    pub masked: u32,
    /// Rollouts dropped.
    pub dropped: u32,
}

impl GroupFill {
    /// Kept and masked rollouts.
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

    /// Whether so many more rollouts may make it due, whatever becomes of them.
    #[must_use]
    pub fn may_be_due(&self, more: u32) -> bool {
        self.state == GroupState::Open && self.arrived() + self.dropped + more >= self.size
    }

    /// Why the group is to be decided now, if it is.
    #[must_use]
    pub fn due(&self, on_drop: OnDrop) -> Option<Cause> {
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

/// What ingest decided about one rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutDecision {
    /// The verdict.
    pub verdict: Verdict,
    /// Filter or built-in code behind it.
    pub reason: Option<String>,
    /// Filters whose evaluation failed.
    pub failed_filters: Vec<String>,
    /// Those of them that would have cost too much. Not stored: a retry is told that they failed.
    pub over_budget: Vec<String>,
    /// Its version, with an absent one resolved.
    pub versions: ResolvedVersions,
    /// It names an admission that gives it nothing.
    pub admission_lapsed: bool,
    /// Trained tokens by version, where the policy masks those that are over the staleness bound.
    pub trained_spans: Option<Vec<TrainedSpan>>,
}

impl RolloutDecision {
    /// Trained versions as they will be delivered: a masked rollout trains nothing.
    #[must_use]
    pub fn trained_versions(&self) -> Option<(Version, Version)> {
        self.versions.trained.filter(|_| self.verdict == Verdict::Kept)
    }
}

impl Buffer {
    /// Validates and packs trajectories that were posted together; pointers start with the index in the bundle.
    ///
    /// Takes milliseconds for long ones: not for an async worker.
    pub fn prepare(&self, bundle: Vec<wire::Trajectory>) -> Result<Vec<NewRollout>, Refusal> {
        let codec = self.store.payload_codec();
        let mut violations = Vec::new();
        let mut prepared = Vec::with_capacity(bundle.len());
        for (index, sent) in bundle.into_iter().enumerate() {
            match Trajectory::parse(sent, &self.options.limits) {
                Ok(trajectory) => prepared.push(NewRollout::pack(trajectory, codec)),
                Err(found) => violations.extend(found.into_iter().map(|violation| Violation {
                    pointer: format!("/{index}{}", violation.pointer),
                    detail: violation.detail,
                })),
            }
        }
        violations.truncate(VIOLATIONS_MAX);
        if violations.is_empty() { Ok(prepared) } else { Err(Refusal::Invalid(violations)) }
    }

    /// Stores a bundle, all or nothing. When it answers, every group that the bundle completes is decided.
    pub async fn ingest(&self, bundle: Vec<NewRollout>) -> Result<Vec<Ingested>, BufferError> {
        let outcome = self.ingest_all(vec![bundle]).await?.pop();
        outcome.ok_or(StoreError::Closed)?.map_err(BufferError::from)
    }

    /// Stores bundles that do not depend on each other, in order, with as few commits as may be.
    pub async fn ingest_all(&self, bundles: Vec<Vec<NewRollout>>) -> Result<Vec<BundleOutcome>, BufferError> {
        let bundles = Arc::new(bundles);
        self.judge(&bundles, self.expected_questions(&bundles)).await?;
        let mut outcomes = self.ingest_known(Arc::clone(&bundles)).await?;
        let mut judged_again = 0;
        // Each turn judges rollouts by what a transaction found, creates a policy that a bundle names, or refuses the
        // bundles that name it.
        loop {
            let questions = questions(&outcomes);
            if !questions.is_empty() && judged_again < JUDGED_AGAIN_MAX {
                judged_again += 1;
                for (bundle, question) in &questions {
                    self.expected.learn(&bundles[*bundle][question.index].policy, question);
                }
                self.judge(&bundles, questions).await?;
                let unjudged = |outcome: &BundleOutcome| matches!(outcome, Err(Refusal::Unjudged(_)));
                self.ingest_again(&bundles, &mut outcomes, unjudged).await?;
                continue;
            }
            let Some(name) = unknown_policy(&outcomes).filter(|_| self.options.auto_create) else {
                return Ok(outcomes);
            };
            let of_policy = |outcome: &&mut BundleOutcome| matches!(outcome, Err(Refusal::UnknownPolicy(unknown)) if *unknown == name);
            match self.create(&name).await {
                Ok(()) => {
                    let unknown = |outcome: &BundleOutcome| matches!(outcome, Err(Refusal::UnknownPolicy(_)));
                    self.ingest_again(&bundles, &mut outcomes, unknown).await?;
                }
                Err(BufferError::Refused(refusal)) => {
                    outcomes.iter_mut().filter(of_policy).for_each(|outcome| *outcome = Err(refusal.clone()));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What the rollouts of bundles will probably be judged by, each with the place of its bundle.
    fn expected_questions(&self, bundles: &[Vec<NewRollout>]) -> Vec<(usize, Question)> {
        let mut questions = Vec::new();
        for (bundle, rollouts) in bundles.iter().enumerate() {
            let expected = rollouts.iter().enumerate().filter_map(|(index, new)| self.expected.question(new, index));
            questions.extend(expected.map(|question| (bundle, question)));
        }
        questions
    }

    /// Asks the filters, on a thread of its own where that may take long, and no more of it at once than there are cores.
    async fn judge(
        &self,
        bundles: &Arc<Vec<Vec<NewRollout>>>,
        questions: Vec<(usize, Question)>,
    ) -> Result<(), BufferError> {
        static CORES: LazyLock<Semaphore> =
            LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
        let bytes_of = |(bundle, question): &(usize, Question)| {
            let metadata = &bundles[*bundle][question.index].facts.metadata;
            metadata.as_ref().map_or(0, |metadata| metadata.get().len())
        };
        let steps_of = |(_, question): &(usize, Question)| question.rules.filters().usual_rollout_steps();
        let is_short = questions.iter().map(bytes_of).sum::<usize>() <= JUDGED_INLINE_BYTES_MAX
            && questions.iter().map(steps_of).fold(0, u64::saturating_add) <= JUDGED_INLINE_STEPS_MAX;
        let bundles = Arc::clone(bundles);
        let judge = move || {
            for (bundle, question) in questions {
                let index = question.index;
                judging::judge(&bundles[bundle][index], question);
            }
        };
        if is_short {
            judge();
            return Ok(());
        }
        let _core = CORES.acquire().await.map_err(|_| StoreError::Closed)?;
        Ok(tokio::task::spawn_blocking(judge).await.map_err(|_| StoreError::Closed)?)
    }

    /// Stores bundles of policies that exist.
    async fn ingest_known(&self, bundles: Arc<Vec<Vec<NewRollout>>>) -> Result<Vec<BundleOutcome>, BufferError> {
        let ingest = Ingest { bundles: Arc::clone(&bundles), decide: Arc::clone(&self.decide), now: self.clock.now() };
        let outcomes = self.store.ingest(ingest).await?;
        self.report(&bundles, &outcomes);
        Ok(outcomes)
    }

    /// Runs again the bundles with such an outcome, and leaves the others' outcomes as they are.
    async fn ingest_again(
        &self,
        bundles: &[Vec<NewRollout>],
        outcomes: &mut [BundleOutcome],
        refused: impl Fn(&BundleOutcome) -> bool,
    ) -> Result<(), BufferError> {
        let again: Vec<usize> = (0..outcomes.len()).filter(|&index| refused(&outcomes[index])).collect();
        let retried = Arc::new(again.iter().map(|&index| bundles[index].clone()).collect());
        for (index, outcome) in again.into_iter().zip(self.ingest_known(retried).await?) {
            outcomes[index] = outcome;
        }
        Ok(())
    }

    /// Counts what was stored, and wakes who waits for the groups that became ready.
    fn report(&self, bundles: &[Vec<NewRollout>], outcomes: &[BundleOutcome]) {
        for (bundle, outcome) in bundles.iter().zip(outcomes) {
            let Ok(stored) = outcome else { continue };
            for (new, ingested) in bundle.iter().zip(stored) {
                self.report_one(new, ingested);
            }
        }
    }

    fn report_one(&self, new: &NewRollout, ingested: &Ingested) {
        let policy = ingested.policy.as_str();
        if ingested.duplicate {
            self.metrics.duplicate(policy);
            return;
        }
        let decision = &ingested.decision;
        self.metrics.received(policy, decision.verdict.as_str(), new.facts.tokens);
        for warning in &ingested.warnings {
            self.metrics.warned(policy, warning.name);
        }
        for filter in &decision.failed_filters {
            self.metrics.filter_failed(policy, filter);
        }
        for filter in &decision.over_budget {
            self.metrics.filter_over_budget(policy, filter);
        }
        if let (Verdict::Dropped, Some(reason)) = (decision.verdict, &decision.reason) {
            self.metrics.dropped(policy, reason);
        }
        if let Some(state) = ingested.decided {
            let failed = &ingested.failed_group_filters;
            self.report_decided(&ingested.policy, state, ingested.discarded.as_deref(), failed);
        }
    }

    /// Counts a decided group, and wakes a trainer if it is ready.
    pub(super) fn report_decided(
        &self,
        policy: &PolicyName,
        state: GroupState,
        reason: Option<&str>,
        failed_filters: &[String],
    ) {
        for filter in failed_filters {
            self.metrics.filter_failed(policy.as_str(), filter);
        }
        if state == GroupState::Ready {
            self.metrics.decided(policy.as_str(), "ready");
            self.wake(Awaited::Batch, policy);
        } else {
            self.metrics.decided(policy.as_str(), "discarded");
            self.metrics.dropped(policy.as_str(), reason.unwrap_or_default());
        }
    }
}

/// A policy that a bundle was refused for.
fn unknown_policy(outcomes: &[BundleOutcome]) -> Option<PolicyName> {
    outcomes.iter().find_map(|outcome| match outcome {
        Err(Refusal::UnknownPolicy(name)) => Some(name.clone()),
        _ => None,
    })
}

/// What rollouts are to be judged by before their bundles can be stored, each with the place of its bundle.
fn questions(outcomes: &[BundleOutcome]) -> Vec<(usize, Question)> {
    let mut questions = Vec::new();
    for (bundle, outcome) in outcomes.iter().enumerate() {
        if let Err(Refusal::Unjudged(found)) = outcome {
            questions.extend(found.iter().map(|question| (bundle, question.clone())));
        }
    }
    questions
}

/// Checks what only the policy's rules can: required columns, and groups of one.
pub fn check(rules: &Rules, new: &NewRollout, room: Room) -> Result<(), Refusal> {
    let mut violations = Vec::new();
    let mut refuse = |pointer: &str, detail: String| {
        violations.push(Violation { pointer: pointer.into(), detail });
    };
    for &requirement in &rules.require {
        // An admission brings its version.
        let brought = requirement == Requirement::PolicyVersion && room.version().is_some();
        if !brought && !new.facts.has(requirement) {
            let name = serde_json::to_value(requirement).unwrap_or_default();
            let name = name.as_str().unwrap_or_default();
            let (pointer, place) = match name {
                "tokens" => ("/segments", "at least one segment"),
                "policy_version" => ("/policy_version", "the trajectory, or as `versions` in every segment"),
                _ => ("/segments", "every segment"),
            };
            refuse(pointer, format!("policy `{}` requires `{name}` in {place}", new.policy));
        }
    }
    if new.group_id.is_none() && rules.group.size > 1 {
        refuse("/group_id", format!("is needed: groups of policy `{}` have {} rollouts", new.policy, rules.group.size));
    }
    if violations.is_empty() { Ok(()) } else { Err(Refusal::Invalid(violations)) }
}

/// What a new rollout of a group is yet to be judged by, if a verdict by that is not there.
#[must_use]
pub fn question(rules: &Arc<Rules>, new: &NewRollout, room: Room, current: Version) -> Option<Question> {
    let versions = new.facts.versions.resolve(room.version(), current);
    let unjudged = new.judged.by(rules, versions, current).is_none();
    unjudged.then(|| Question { index: 0, rules: Arc::clone(rules), is_current: false, versions, current })
}

/// The verdict on a new rollout of a group, under the group's lock. It evaluates nothing: without what filters say about
/// the rollout there is none.
#[must_use]
pub fn decide(
    rules: &Rules,
    new: &NewRollout,
    room: Room,
    current: Version,
    group: GroupFill,
) -> Option<RolloutDecision> {
    let versions = new.facts.versions.resolve(room.version(), current);
    let admission_lapsed = room == Room::Lapsed;
    if group.state != GroupState::Open {
        return Some(RolloutDecision {
            verdict: Verdict::Late,
            reason: Some(REASON_GROUP_DECIDED.to_owned()),
            failed_filters: Vec::new(),
            over_budget: Vec::new(),
            versions,
            admission_lapsed,
            trained_spans: None,
        });
    }
    let judging::Verdict { matched, failed, over_budget } = new.judged.by(rules, versions, current)?;
    let (verdict, reason) = match matched {
        Some((name, FilterAction::Mask)) => (Verdict::Masked, Some(name)),
        Some((name, FilterAction::Drop)) => (Verdict::Dropped, Some(name)),
        None if new.facts.reward.is_none() => (Verdict::Dropped, Some(REASON_NO_REWARD.to_owned())),
        None => (Verdict::Kept, None),
    };
    let failed_filters = failed.into_iter().take(FAILED_FILTERS_MAX).collect();
    let masks = verdict == Verdict::Kept && rules.staleness.action == StalenessAction::Mask;
    let stated = new.facts.versions.stated(room.version(), current);
    let trained_spans = masks.then(|| new.facts.trained_spans(stated));
    Some(RolloutDecision { verdict, reason, failed_filters, over_budget, versions, admission_lapsed, trained_spans })
}

/// What a producer should know about a rollout that was accepted, while this version is current.
#[must_use]
pub fn warnings(new: &NewRollout, decision: &RolloutDecision, current: Version) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if decision.verdict == Verdict::Late {
        warnings.push(Warning::new(
            REASON_GROUP_DECIDED,
            "the group was decided before this rollout arrived, and it will not be trained on; a new pass over the data \
             needs new `group_id`s",
        ));
    }
    if decision.reason.as_deref() == Some(REASON_NO_REWARD) {
        warnings
            .push(Warning::new(REASON_NO_REWARD, "the rollout has no reward and no filter masks it, so it is dropped"));
    }
    if decision.admission_lapsed {
        let detail = "the admission that it names is expired or used up, or of another policy or run";
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
    warnings.extend(new.facts.doubts.iter().cloned());
    warnings.extend(new.facts.versions.doubt(current));
    warnings
}

pub(super) fn filter_facts(facts: &Facts, versions: ResolvedVersions, current: Version) -> RolloutFacts<'_> {
    RolloutFacts {
        status: facts.status.as_str(),
        reward: facts.reward,
        reward_components: &facts.reward_components,
        environment: facts.environment.as_deref(),
        policy_version: versions.version.0,
        version_current: current.0,
        staleness: current.0.saturating_sub(versions.version.0).max(0),
        segments: i64::from(facts.segments),
        tokens: facts.tokens as i64,
        response_tokens: facts.response_tokens as i64,
        trained_tokens: facts.trained_tokens as i64,
        max_segment_tokens: facts.max_segment_tokens as i64,
        temperature: f64::from(facts.temperature),
        metadata: facts.metadata.as_deref(),
    }
}
