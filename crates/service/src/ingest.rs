//! Stage 2, ingest: stores bundles of rollouts and decides every group that they complete.
//!
//! The store decides in its transaction with functions of the domain, so the post that completes a group is
//! answered after the group is decided. The stage before is [`trajectory`](forebay_domain::trajectory), the next
//! [`finalize`](forebay_domain::finalize).

use std::sync::Arc;

use forebay_bounds::work;
use forebay_domain::{
    evaluation::{self, EvaluationRequest, REEVALUATIONS_MAX},
    ids::{ExecutionId, PolicyName},
    ingest::{Bundle, BundleOutcome, Ingest, Ingested, new_rollout::NewRollout},
    memory::{Memory, NoMemory},
    peers::Awaited,
    refusal::Refusal,
    states::{GroupState, Verdict},
    trajectory::{Trajectory, VIOLATIONS_MAX},
};
use forebay_store::error::StoreError;
use forebay_wire::{self as wire, Violation};
use tracing::instrument;

use crate::{Buffer, error::BufferError, waiting::replicas};

/// The most filter steps that run on the thread of the request. The bytes of metadata that they read count as well:
/// together they take about a millisecond.
const EVALUATED_INLINE_STEPS_MAX: u64 = 10_000;

const EVALUATED_INLINE_BYTES_MAX: usize = 16 << 10;

/// Validates and packs the trajectories of a bundle, or a part of them. Those without an execution belong to `execution`.
pub(crate) fn prepare(
    buffer: &Buffer,
    bundle: Vec<wire::Trajectory>,
    execution: &ExecutionId,
    memory: &mut Memory<'_>,
) -> Result<Vec<NewRollout>, Refusal> {
    let mut violations = Vec::new();
    let mut prepared = Vec::with_capacity(bundle.len());
    for (index, sent) in bundle.into_iter().enumerate() {
        match Trajectory::parse_within(sent, &buffer.options.limits, memory).map_err(|NoMemory| Refusal::NoMemory)? {
            Ok(mut trajectory) => {
                trajectory.execution_id.get_or_insert_with(|| execution.clone());
                prepared.push(NewRollout::pack(trajectory));
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

impl Buffer {
    /// Validates and packs trajectories that were posted together. The pointers of violations start with the index in
    /// the bundle.
    ///
    /// This takes milliseconds for long trajectories, so async workers must not call it.
    pub fn prepare(&self, bundle: Vec<wire::Trajectory>) -> Result<Vec<NewRollout>, Refusal> {
        self.prepare_within(bundle, &mut |_| true)
    }

    /// Like [`prepare`](Self::prepare), but asks for memory before segments are assembled that are larger than the turns
    /// that were posted.
    pub fn prepare_within(
        &self,
        bundle: Vec<wire::Trajectory>,
        memory: &mut Memory<'_>,
    ) -> Result<Vec<NewRollout>, Refusal> {
        prepare(self, bundle, &ExecutionId::mint(), memory)
    }

    /// Stores bundles that do not depend on each other, in order, with as few commits as possible.
    #[instrument(level = "debug", skip_all)]
    pub async fn ingest_all(&self, bundles: Vec<Vec<NewRollout>>) -> Result<Vec<BundleOutcome>, BufferError> {
        ingest_bundles(self, bundles.into_iter().map(Into::into).collect()).await
    }

    /// Stores a bundle, all or nothing. When it returns, every group that the bundle completes is decided.
    #[instrument(level = "debug", skip_all)]
    pub async fn ingest(&self, bundle: Vec<NewRollout>) -> Result<Vec<Ingested>, BufferError> {
        let outcome = ingest_bundles(self, vec![bundle.into()]).await?.pop();
        outcome.ok_or(StoreError::Closed)?.map_err(BufferError::from)
    }
}

pub(crate) async fn ingest_bundles(buffer: &Buffer, bundles: Vec<Bundle>) -> Result<Vec<BundleOutcome>, BufferError> {
    let mut refused = buffer.store_inline(&bundles).await?;
    if refused.is_empty() {
        return ingest_named(buffer, bundles).await;
    }
    let count = bundles.len();
    let stored = bundles.into_iter().enumerate().filter(|(index, _)| !refused.contains_key(index));
    let stored = stored.map(|(_, bundle)| bundle).collect();
    let mut outcomes = ingest_named(buffer, stored).await?.into_iter();
    let outcome = |index| refused.remove(&index).map_or_else(|| outcomes.next(), |refusal| Some(Err(refusal)));
    Ok((0..count).filter_map(outcome).collect())
}

/// Stores bundles whose media are stored.
async fn ingest_named(buffer: &Buffer, bundles: Vec<Bundle>) -> Result<Vec<BundleOutcome>, BufferError> {
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
        let Some(name) = unknown_policy(&outcomes, buffer.options.auto_create) else {
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

/// Evaluates filters. Evaluations that may take long run on threads for long work.
async fn evaluate_filters(
    bundles: &Arc<Vec<Bundle>>,
    requests: Vec<(usize, EvaluationRequest)>,
) -> Result<(), BufferError> {
    let bytes_of = |(bundle, request): &(usize, EvaluationRequest)| {
        let form = bundles[*bundle][request.index].form(request.rules.sessions.retries);
        let metadata = &form.facts.metadata;
        metadata.as_ref().map_or(0, |metadata| metadata.get().len())
    };
    let steps_of = |(_, request): &(usize, EvaluationRequest)| request.rules.typical_rollout_steps();
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
    Ok(work::on_thread(evaluate).await.map_err(|_| StoreError::Closed)?)
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
    // Work is made by rollouts that lack scores, and opened by the one that takes the last place of their group.
    if ingested.fill.scoring > 0 {
        replicas::wake(buffer, Awaited::Work, &ingested.policy);
    }
    if ingested.policy.is_evaluations() {
        // That its group is discarded is no loss.
        buffer.evaluated(&ingested.policy);
        return;
    }
    if let Some(state) = ingested.decided {
        let failed = &ingested.failed_group_filters;
        report_decided(buffer, &ingested.policy, state, ingested.discarded.as_deref(), failed);
    }
}

/// Counts a decided group, and wakes a trainer if it is ready.
pub(crate) fn report_decided(
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

/// A policy that does not exist, that a bundle was refused for and that can be created: any, or evaluations of one.
fn unknown_policy(outcomes: &[BundleOutcome], any: bool) -> Option<PolicyName> {
    outcomes.iter().find_map(|outcome| match outcome {
        Err(Refusal::UnknownPolicy(name)) if any || name.is_evaluations() => Some(name.clone()),
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
