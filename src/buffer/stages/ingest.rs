//! Stage 2, ingest: stores bundles of rollouts and decides every group that they complete.
//!
//! The store calls the functions of `decide` in its transaction, so the post that completes a group is
//! answered after the group is decided. The stage before is [`trajectory`](super::trajectory), the next
//! [`finalize`](super::finalize).

mod decide;

use std::{
    num::NonZero,
    sync::{Arc, LazyLock},
};

use forebay_wire::{self as wire, Retries, Violation};
use tokio::sync::Semaphore;

pub(in crate::buffer) use self::decide::{FAILED_FILTERS_MAX, filter_facts, verdict};
pub use self::decide::{
    GroupFill, POSTS_PER_PLACE_MAX, RolloutDecision, check, decide, environment_warning, pending_evaluation, warnings,
};
use crate::buffer::{
    Buffer,
    canonical::ContentDigest,
    evaluation::{self, EvaluationRequest, LatestEvaluation, REEVALUATIONS_MAX},
    ids::{AdmissionId, ExecutionId, GroupId, PolicyName, RolloutId},
    payload::{Codec, Payload},
    port::{Bundle, BundleOutcome, Ingest, Ingested, StoreError},
    refusal::{BufferError, Refusal},
    replicas::{self, Awaited},
    states::{GroupState, Verdict},
    trajectory::{Facts, Memory, NoMemory, Trajectory, VIOLATIONS_MAX},
    warnings::Warning,
};

/// The most filter steps that run on the thread of the request. The bytes of metadata that they read count as well:
/// together they take about a millisecond.
const EVALUATED_INLINE_STEPS_MAX: u64 = 10_000;
const EVALUATED_INLINE_BYTES_MAX: usize = 16 << 10;

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
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    /// The admission that it uses up, if its producer named one.
    pub admission_id: Option<AdmissionId>,
    /// Canonical content.
    pub content: ContentDigest,
    /// Whether it is refused if its group is decided. Otherwise it is then stored with the verdict `late`.
    pub only_open: bool,
    /// The latest result of its filters.
    pub evaluation: LatestEvaluation,
    form: Form,
    /// Its form by another rule about retries than the default, where it differs.
    others: Vec<(Retries, Form)>,
}

/// What is stored of a rollout. It depends on the rules whether repeated calls are part of it.
#[derive(Clone, Debug)]
pub struct Form {
    /// The facts that rules and the ledger use.
    pub facts: Facts,
    /// The bulk.
    pub payload: Payload,
    /// What became of its turns, if it was posted as turns.
    pub assembly: Option<wire::Assembly>,
}

/// What only the calls of a session say about its rollout.
#[derive(Clone, Debug, Default)]
pub(in crate::buffer) struct Marks {
    /// Whether the engine did not say the version of every trained token.
    pub(in crate::buffer) version_assumed: bool,
    /// Whether all answers are empty, and the agent received one. Such a rollout has a reward, like a post of which all
    /// turns are empty.
    pub(in crate::buffer) sampled_nothing: bool,
    /// If answers that the agent received are in no segment.
    pub(in crate::buffer) delivered_dropped: Option<Warning>,
    /// What happened to calls, also to those that are not recorded.
    pub(in crate::buffer) of_session: Vec<Warning>,
}

impl NewRollout {
    /// Packs a trajectory. This takes milliseconds for long ones, so async workers must not call it.
    #[must_use]
    pub fn pack(trajectory: Trajectory, codec: Codec) -> Self {
        let payload = Payload::pack(&trajectory, codec);
        Self {
            policy: trajectory.policy,
            rollout_id: trajectory.rollout_id,
            group_id: trajectory.group_id,
            group_size: trajectory.group_size,
            execution_id: trajectory.execution_id.unwrap_or_else(ExecutionId::mint),
            admission_id: trajectory.admission_id,
            content: trajectory.content,
            only_open: false,
            evaluation: LatestEvaluation::default(),
            form: Form { facts: trajectory.facts, payload, assembly: trajectory.assembly },
            others: trajectory.others.into_iter().map(|(rule, other)| (rule, Self::pack(other, codec).form)).collect(),
        }
    }

    /// Adds what only the calls of a session say.
    pub(in crate::buffer) fn mark(&mut self, marks: Marks) {
        let facts = &mut self.form.facts;
        facts.versions.spans_assumed |= marks.version_assumed;
        facts.sampled_nothing |= marks.sampled_nothing;
        facts.warnings.extend(marks.delivered_dropped.into_iter().chain(marks.of_session));
    }

    /// What is stored of it under rules with this setting.
    #[must_use]
    pub fn form(&self, retries: Retries) -> &Form {
        self.others.iter().find(|(of, _)| *of == retries).map_or(&self.form, |(_, form)| form)
    }

    /// Whether the rules decide about its form.
    #[must_use]
    pub fn depends_on_rules(&self) -> bool {
        !self.others.is_empty()
    }

    /// The bytes of its payload, in its largest form.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        let bytes = |form: &Form| form.payload.body.len();
        self.others.iter().map(|(_, form)| bytes(form)).fold(bytes(&self.form), usize::max)
    }

    /// The group it belongs to. A rollout without a group is a group of its own.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.group_id.clone().unwrap_or_else(|| GroupId::from(&self.rollout_id))
    }
}

/// Validates and packs the trajectories of a bundle, or a part of them. Those without an execution belong to `execution`.
pub(in crate::buffer) fn prepare(
    buffer: &Buffer,
    bundle: Vec<wire::Trajectory>,
    execution: &ExecutionId,
    memory: &mut Memory<'_>,
) -> Result<Vec<NewRollout>, Refusal> {
    let codec = buffer.store.payload_codec();
    let mut violations = Vec::new();
    let mut prepared = Vec::with_capacity(bundle.len());
    for (index, sent) in bundle.into_iter().enumerate() {
        match Trajectory::parse_within(sent, &buffer.options.limits, memory).map_err(|NoMemory| Refusal::NoMemory)? {
            Ok(mut trajectory) => {
                trajectory.execution_id.get_or_insert_with(|| execution.clone());
                prepared.push(NewRollout::pack(trajectory, codec));
            }
            Err(found) => violations.extend(found.into_iter().map(|violation| Violation {
                pointer: format!("/{index}{}", violation.pointer),
                detail: violation.detail,
            })),
        }
    }
    violations.truncate(VIOLATIONS_MAX);
    if violations.is_empty() { Ok(prepared) } else { Err(Refusal::Invalid(violations)) }
}

pub(in crate::buffer) async fn ingest(buffer: &Buffer, bundle: Vec<NewRollout>) -> Result<Vec<Ingested>, BufferError> {
    let outcome = ingest_all(buffer, vec![bundle.into()]).await?.pop();
    outcome.ok_or(StoreError::Closed)?.map_err(BufferError::from)
}

pub(in crate::buffer) async fn ingest_all(
    buffer: &Buffer,
    bundles: Vec<Bundle>,
) -> Result<Vec<BundleOutcome>, BufferError> {
    let bundles = Arc::new(bundles);
    evaluate_filters(&bundles, likely_requests(buffer, &bundles)).await?;
    let mut outcomes = ingest_existing(buffer, Arc::clone(&bundles)).await?;
    let mut reevaluations = 0;
    // Each round evaluates filters on the inputs that a transaction found, creates a policy that a bundle names, or
    // refuses the bundles that name a policy which cannot be created.
    loop {
        let requests = requests(&outcomes);
        if !requests.is_empty() && reevaluations < REEVALUATIONS_MAX {
            reevaluations += 1;
            for (bundle, request) in &requests {
                buffer.last_seen_rules.remember(&bundles[*bundle][request.index].policy, request);
            }
            evaluate_filters(&bundles, requests).await?;
            let not_evaluated = |outcome: &BundleOutcome| matches!(outcome, Err(Refusal::NotEvaluated(_)));
            ingest_again(buffer, &bundles, &mut outcomes, not_evaluated).await?;
            continue;
        }
        let Some(name) = unknown_policy(&outcomes).filter(|_| buffer.options.auto_create) else {
            return Ok(outcomes);
        };
        let of_policy =
            |outcome: &&mut BundleOutcome| matches!(outcome, Err(Refusal::UnknownPolicy(unknown)) if *unknown == name);
        match buffer.create(&name).await {
            Ok(()) => {
                let unknown = |outcome: &BundleOutcome| matches!(outcome, Err(Refusal::UnknownPolicy(_)));
                ingest_again(buffer, &bundles, &mut outcomes, unknown).await?;
            }
            Err(BufferError::Refused(refusal)) => {
                outcomes.iter_mut().filter(of_policy).for_each(|outcome| *outcome = Err(refusal.clone()));
            }
            Err(error) => return Err(error),
        }
    }
}

/// The inputs on which the filters of bundles will probably be evaluated, each with the index of its bundle.
fn likely_requests(buffer: &Buffer, bundles: &[Bundle]) -> Vec<(usize, EvaluationRequest)> {
    let mut requests = Vec::new();
    for (bundle, rollouts) in bundles.iter().enumerate() {
        let expected =
            rollouts.iter().enumerate().filter_map(|(index, new)| buffer.last_seen_rules.request(new, index));
        requests.extend(expected.map(|request| (bundle, request)));
    }
    requests
}

/// Evaluates filters. Evaluations that may take long run on threads for blocking work, at most as many at once as there
/// are cores.
async fn evaluate_filters(
    bundles: &Arc<Vec<Bundle>>,
    requests: Vec<(usize, EvaluationRequest)>,
) -> Result<(), BufferError> {
    static CORES: LazyLock<Semaphore> =
        LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
    let bytes_of = |(bundle, request): &(usize, EvaluationRequest)| {
        let form = bundles[*bundle][request.index].form(request.rules.sessions.retries);
        let metadata = &form.facts.metadata;
        metadata.as_ref().map_or(0, |metadata| metadata.get().len())
    };
    let steps_of = |(_, request): &(usize, EvaluationRequest)| request.rules.filters().typical_rollout_steps();
    let is_short = requests.iter().map(bytes_of).sum::<usize>() <= EVALUATED_INLINE_BYTES_MAX
        && requests.iter().map(steps_of).fold(0, u64::saturating_add) <= EVALUATED_INLINE_STEPS_MAX;
    let bundles = Arc::clone(bundles);
    let evaluate = move || {
        for (bundle, request) in requests {
            let index = request.index;
            evaluation::evaluate(&bundles[bundle][index], request);
        }
    };
    if is_short {
        evaluate();
        return Ok(());
    }
    let _core = CORES.acquire().await.map_err(|_| StoreError::Closed)?;
    Ok(tokio::task::spawn_blocking(evaluate).await.map_err(|_| StoreError::Closed)?)
}

/// Stores bundles of policies that exist.
async fn ingest_existing(buffer: &Buffer, bundles: Arc<Vec<Bundle>>) -> Result<Vec<BundleOutcome>, BufferError> {
    let ingest = Ingest { bundles: Arc::clone(&bundles), gates: Arc::clone(&buffer.gates), now: buffer.clock.now() };
    let outcomes = buffer.store.ingest(ingest).await?;
    report(buffer, &bundles, &outcomes);
    Ok(outcomes)
}

/// Runs the bundles with such an outcome again, and keeps the outcomes of the others.
async fn ingest_again(
    buffer: &Buffer,
    bundles: &[Bundle],
    outcomes: &mut [BundleOutcome],
    refused: impl Fn(&BundleOutcome) -> bool,
) -> Result<(), BufferError> {
    let again: Vec<usize> = (0..outcomes.len()).filter(|&index| refused(&outcomes[index])).collect();
    let retried = Arc::new(again.iter().map(|&index| bundles[index].clone()).collect());
    for (index, outcome) in again.into_iter().zip(ingest_existing(buffer, retried).await?) {
        outcomes[index] = outcome;
    }
    Ok(())
}

/// Counts the stored rollouts, and wakes waiters for the groups that became ready.
fn report(buffer: &Buffer, bundles: &[Bundle], outcomes: &[BundleOutcome]) {
    for (bundle, outcome) in bundles.iter().zip(outcomes) {
        let Ok(stored) = outcome else { continue };
        for (new, ingested) in bundle.iter().zip(stored) {
            report_one(buffer, new, ingested);
        }
    }
}

fn report_one(buffer: &Buffer, new: &NewRollout, ingested: &Ingested) {
    let policy = ingested.policy.as_str();
    if ingested.duplicate {
        buffer.metrics.duplicate(policy);
        return;
    }
    let decision = &ingested.decision;
    buffer.metrics.received(policy, decision.verdict.as_str(), new.form(decision.retries).facts.tokens);
    for warning in &ingested.warnings {
        buffer.metrics.warned(policy, warning.name);
    }
    for filter in &decision.failed_filters {
        buffer.metrics.filter_failed(policy, filter);
        buffer.noticed.filter_failed(&ingested.policy, filter, buffer.clock.now());
    }
    for filter in &decision.over_budget {
        buffer.metrics.filter_over_budget(policy, filter);
    }
    if let (Verdict::Dropped, Some(reason)) = (decision.verdict, &decision.reason) {
        buffer.metrics.dropped(policy, reason);
    }
    if let Some(state) = ingested.decided {
        let failed = &ingested.failed_group_filters;
        report_decided(buffer, &ingested.policy, state, ingested.discarded.as_deref(), failed);
    }
}

/// Counts a decided group, and wakes a trainer if it is ready.
pub(in crate::buffer) fn report_decided(
    buffer: &Buffer,
    policy: &PolicyName,
    state: GroupState,
    reason: Option<&str>,
    failed_filters: &[String],
) {
    for filter in failed_filters {
        buffer.metrics.filter_failed(policy.as_str(), filter);
        buffer.noticed.filter_failed(policy, filter, buffer.clock.now());
    }
    buffer.metrics.decided(policy.as_str(), state.as_str());
    if state == GroupState::Ready {
        replicas::wake(buffer, Awaited::Batch, policy);
    } else {
        buffer.metrics.dropped(policy.as_str(), reason.unwrap_or_default());
    }
}

/// A policy that does not exist and that a bundle was refused for.
fn unknown_policy(outcomes: &[BundleOutcome]) -> Option<PolicyName> {
    outcomes.iter().find_map(|outcome| match outcome {
        Err(Refusal::UnknownPolicy(name)) => Some(name.clone()),
        _ => None,
    })
}

/// The inputs on which filters must be evaluated before bundles can be stored, each with the index of its bundle.
fn requests(outcomes: &[BundleOutcome]) -> Vec<(usize, EvaluationRequest)> {
    let mut requests = Vec::new();
    for (bundle, outcome) in outcomes.iter().enumerate() {
        if let Err(Refusal::NotEvaluated(found)) = outcome {
            requests.extend(found.iter().map(|request| (bundle, request.clone())));
        }
    }
    requests
}
