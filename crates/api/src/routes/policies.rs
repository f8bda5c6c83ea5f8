//! `/policies`: rules and versions of policies, and the lineage of their weights.

use std::{sync::Arc, time::Duration};

use axum::{
    Json as Answer,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use forebay_domain::{
    ids::PolicyName,
    lineage::Publish,
    policies::RulesWritten,
    refusal::Refusal,
    rules::{Rules, changes},
    scores::REWARD,
    states::{BatchState, GroupState},
    tally::Tally,
};
use forebay_service::policies::PolicyOverview;
use forebay_wire::{
    CheckpointRequest, CheckpointResponse, HeldBatch, Object, OpenGroup, PolicyList, PolicyRules, PolicyStatus,
    ReceiptGroup, ResetRequest, ResetResponse, ResumeRequest, ResumeResponse, VersionRequest, Waiting, WaitingConsumer,
    WaitingEnvironment,
};
use serde::Deserialize;
use serde_json::Value;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::{Json, JsonAsSent, MergePatch, OptionalJson, parse_value},
        guard::{Caller, caller_id},
        params::{self, PolicyPath, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, InvalidRules, NoSuchPolicy, Superseded},
    routes::batches::wait_ms,
};

/// The most bytes of a version's URI.
const URI_BYTES_MAX: usize = 2_048;

/// Which policies to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PolicyQuery {
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List the policies that the caller may access, ordered by name
#[utoipa::path(
    get,
    path = "/policies",
    operation_id = "list_policies",
    tag = "policies",
    params(PolicyQuery),
    responses((status = 200, description = "A page of policies", body = PolicyList))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<PolicyQuery>,
) -> Result<Answer<PolicyList>, Failure> {
    let limit = params::page_limit(query.limit)?;
    let after = params::optional("after", query.after.as_deref(), PolicyName::parse)?;
    let after = after.map(|name| name.as_str().to_owned()).unwrap_or_default();
    let overviews = api.buffer.policies(after, limit, |policy| grant.sees(policy)).await?;
    let policies: Vec<PolicyStatus> = overviews.into_iter().map(on_wire).collect();
    let last = policies.last().map(|policy| policy.policy.clone());
    let next = last.filter(|_| policies.len() == limit as usize);
    Ok(Answer(PolicyList { policies, next }))
}

/// Options for reading a policy.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WaitQuery {
    /// Wait until the version is above this one, or until a resume has lowered it.
    #[param(minimum = 0)]
    wait_version_above: Option<i64>,
    /// The longest wait in milliseconds, at most 60,000.
    #[param(maximum = 60000)]
    wait_ms: Option<u64>,
}

/// Get a policy: its rules, its version, what its buffer holds and what its trainer waits for
#[utoipa::path(
    get,
    path = "/policies/{policy}",
    operation_id = "get_policy",
    tag = "policies",
    params(("policy" = String, Path, description = "Name of the policy"), WaitQuery),
    responses(
        (status = 200, description = "The policy", body = PolicyStatus),
        (status = 204, description = "No such version in time"),
        NoSuchPolicy,
        InvalidQuery,
        (status = 503, description = "`too-many-waiters`: too many requests wait"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    Query(query): Query<WaitQuery>,
) -> Result<Response, Failure> {
    let wait = Duration::from_millis(wait_ms("wait_ms", query.wait_ms)?);
    let overview = match query.wait_version_above {
        None => Some(api.buffer.policy(&policy).await?),
        Some(version) => {
            let version = params::version("wait_version_above", version)?;
            let still = || api.guard.keyring.still_grants(&grant);
            api.buffer.policy_above(&policy, version, wait, caller_id(&grant).as_ref(), still).await?
        }
    };
    Ok(match overview {
        Some(overview) => Answer(on_wire(overview)).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

/// Create a policy or replace its rules
///
/// The rules are validated as a whole and replace all rules of the policy. A setting that is left out goes back to its
/// default; if that changes it, `warnings` in the response says so. `PATCH` changes only the settings that it names.
/// Changes of `require`, `filter`, `group` and `advantage` apply to groups opened from now on. Changes of `batch`,
/// `lease`, `staleness`, `backlog` and the other settings apply to all groups from the next request on.
#[utoipa::path(
    put,
    path = "/policies/{policy}",
    operation_id = "put_policy",
    tag = "policies",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = PolicyRules,
    responses(
        (status = 201, description = "The policy is new", body = PolicyStatus),
        (status = 200, description = "The rules are replaced", body = PolicyStatus),
        (status = 409, description = "`too-many-policies`, or `over-quota`"),
        InvalidRules,
    )
)]
pub(crate) async fn put(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    JsonAsSent(rules, sent): JsonAsSent<PolicyRules>,
) -> Result<Response, Failure> {
    // Compiling filters may take too long for an async worker thread.
    let rules = tokio::task::spawn_blocking(move || Rules::parse(rules));
    let rules = Arc::new(rules.await.map_err(|_| crate::http::body::stopped())?.map_err(Refusal::Invalid)?);
    let written = {
        let (policy, rules) = (policy.clone(), Arc::clone(&rules));
        api.acting_for(&grant).run_uncancelled(|buffer| async move { buffer.put_policy(policy, rules).await }).await?
    };
    let (status, mut warnings) = match written {
        RulesWritten::Existed(before) => (StatusCode::OK, changes::resets(&before, &rules, &sent)),
        RulesWritten::Created | RulesWritten::Outdated => (StatusCode::CREATED, Vec::new()),
    };
    warnings.extend(doubts(&api, &rules));
    let written = on_wire(api.buffer.policy(&policy).await?);
    Ok((status, Answer(PolicyStatus { warnings, ..written })).into_response())
}

/// Change some of a policy's rules
///
/// The body is a JSON merge patch (RFC 7396): settings that it names are changed, `null` resets a setting to its
/// default, and the others stay. An array, such as that of the filters, is replaced as a whole. The resulting rules are
/// validated as a whole and apply from the same time as those of `PUT`.
#[utoipa::path(
    patch,
    path = "/policies/{policy}",
    operation_id = "patch_policy",
    tag = "policies",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body(content(
        (PolicyRules = "application/merge-patch+json"),
        (PolicyRules = "application/json"),
    )),
    responses(
        (status = 200, description = "The rules are changed", body = PolicyStatus),
        (status = 409, description = "`over-quota`"),
        NoSuchPolicy,
        InvalidRules,
    )
)]
pub(crate) async fn patch(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    MergePatch(patch): MergePatch,
) -> Result<Answer<PolicyStatus>, Failure> {
    {
        let policy = policy.clone();
        let api = api.acting_for(&grant);
        api.run_uncancelled(|buffer| async move { buffer.patch_policy(policy, patch, parse_rules).await }).await?;
    }
    let overview = api.buffer.policy(&policy).await?;
    let warnings = doubts(&api, &overview.policy.rules);
    Ok(Answer(PolicyStatus { warnings, ..on_wire(overview) }))
}

/// Warnings about rules that will probably not do what was meant.
fn doubts(api: &Api, rules: &PolicyRules) -> Vec<String> {
    without_teacher(api, rules).into_iter().chain(without_reward(rules)).collect()
}

/// A warning about rules that wait for scores of which none becomes the reward.
fn without_reward(rules: &PolicyRules) -> Option<String> {
    let scores = &rules.scores;
    let waits = !scores.required.is_empty() && scores.reward.is_none();
    (waits && !scores.required.iter().any(|name| name == REWARD)).then(|| {
        "`scores.required` has no `reward`, and there is no expression `scores.reward`: a rollout that is posted without a \
         reward is dropped when it has all of its scores"
            .to_owned()
    })
}

/// A warning about rules that name a teacher which this process does not have. Another replica may have it.
fn without_teacher(api: &Api, rules: &PolicyRules) -> Option<String> {
    let teacher = rules.sessions.teacher.as_deref().filter(|teacher| !api.buffer.has_teacher(teacher))?;
    Some(format!(
        "`sessions.teacher` is `{teacher}`, but the configuration has no [[upstream]] with this name: no session of the \
         policy can be opened"
    ))
}

pub fn parse_rules(value: Value) -> Result<Rules, Refusal> {
    let Object(rules) = parse_value(value).map_err(|violation| Refusal::Invalid(vec![violation]))?;
    Rules::parse(rules).map_err(Refusal::Invalid)
}

/// Publish a weight version
#[utoipa::path(
    put,
    path = "/policies/{policy}/version",
    operation_id = "publish_version",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = VersionRequest,
    responses(
        (status = 200, description = "The version is published and current", body = PolicyStatus),
        NoSuchPolicy,
        (status = 409, description = "`version-conflict` or `superseded`"),
    )
)]
pub(crate) async fn publish(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<VersionRequest>,
) -> Result<Answer<PolicyStatus>, Failure> {
    let publish = Publish {
        policy: policy.clone(),
        version: params::version("/version", request.version)?,
        step: request.step.map(|step| params::step("/step", step)).transpose()?,
        uri: request.uri.map(|uri| params::text("/uri", uri, URI_BYTES_MAX)).transpose()?,
        epoch: params::epoch(request.epoch),
        force: request.force.unwrap_or(false),
        now: api.buffer.now(),
    };
    api.run_uncancelled(|buffer| async move { buffer.publish(publish).await }).await?;
    Ok(Answer(on_wire(api.buffer.policy(&policy).await?)))
}

/// Record a checkpoint: the trainer has saved a step durably
///
/// Batches acked at or before this step are settled: no resume brings them back. A step above the last acked one is
/// refused unless `force` is true. A policy that has never acked a batch accepts any step.
#[utoipa::path(
    post,
    path = "/policies/{policy}/checkpoints",
    operation_id = "checkpoint",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = CheckpointRequest,
    responses(
        (status = 200, description = "Settled", body = CheckpointResponse),
        NoSuchPolicy,
        (status = 409, description = "`step-unknown` or `superseded`"),
    )
)]
pub(crate) async fn checkpoint(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<CheckpointRequest>,
) -> Result<Answer<CheckpointResponse>, Failure> {
    let step = params::step("/step", request.step)?;
    let (force, epoch) = (request.force.unwrap_or(false), params::epoch(request.epoch));
    let checkpointed = api.buffer.checkpoint(policy, step, force, epoch).await?;
    let settled_batches = checkpointed.batches;
    Ok(Answer(CheckpointResponse { checkpoint_step: checkpointed.last.0, settled_batches }))
}

/// Start or restart a trainer from its checkpoint
///
/// All leases are revoked, batches acked after the step come back, the version goes back, and a new epoch begins.
/// Leases ended by a resume count towards `lease.max_resumes`; acked batches do not. The response is `lineage-gap` if
/// the step is below the last settled one or if batches that should come back are purged, and `step-unknown` if the
/// step is above the last acked one, unless `force` is true. A policy that has never acked a batch can start at any
/// step. Batches that cannot come back after a forced resume are discarded with reason `lineage-gap`, and later resumes
/// do not require them.
#[utoipa::path(
    post,
    path = "/policies/{policy}/resume",
    operation_id = "resume",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = ResumeRequest,
    responses(
        (status = 200, description = "Resumed", body = ResumeResponse),
        NoSuchPolicy,
        (status = 409, description = "`lineage-gap`, `step-unknown` or `superseded`"),
    )
)]
pub(crate) async fn resume(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<ResumeRequest>,
) -> Result<Answer<ResumeResponse>, Failure> {
    let step = request.step.map(|step| params::step("/step", step)).transpose()?;
    let force = request.force.unwrap_or(false);
    let epoch = params::epoch(request.epoch);
    let api = api.acting_for(&grant);
    let resumed = api.run_uncancelled(|buffer| async move { buffer.resume(policy, step, force, epoch).await }).await?;
    Ok(Answer(ResumeResponse {
        epoch: resumed.epoch.0,
        version: resumed.version.0,
        returned_batches: resumed.returned,
        quarantined_batches: resumed.quarantined,
        undeliverable_batches: resumed.undeliverable,
    }))
}

/// Reset the policy: start a new run
///
/// Groups that are open, ready, quarantined or in a batch that is not acked are discarded with reason `reset`. Steps
/// and versions start again; the epoch keeps counting.
#[utoipa::path(
    post,
    path = "/policies/{policy}/reset",
    operation_id = "reset_policy",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = Option<ResetRequest>,
    responses(
        (status = 200, description = "A new run has begun", body = ResetResponse),
        NoSuchPolicy,
        Superseded,
    )
)]
pub(crate) async fn reset(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    OptionalJson(request): OptionalJson<ResetRequest>,
) -> Result<Answer<ResetResponse>, Failure> {
    let epoch = params::epoch(request.epoch);
    let api = api.acting_for(&grant);
    let reset = api.run_uncancelled(|buffer| async move { buffer.reset(policy, epoch).await });
    let done = reset.await?;
    Ok(Answer(ResetResponse { run: done.run.0, epoch: done.epoch.0, discarded_groups: done.groups }))
}

fn on_wire(overview: PolicyOverview) -> PolicyStatus {
    let PolicyOverview { policy, tallies, waiting, environments } = overview;
    let environments = environments.into_iter().map(|of| WaitingEnvironment {
        environment: of.environment,
        ready_groups: of.ready,
        needed_groups: of.needed,
        open_groups: of.open,
    });
    let fullest = waiting.fullest.into_iter().map(|group| OpenGroup {
        group_id: group.group_id,
        fill: ReceiptGroup {
            state: group.fill.state.into(),
            reason: None,
            arrived: group.fill.arrived(),
            size: group.fill.size,
        },
    });
    let name_of = |consumer: String| Some(consumer).filter(|consumer| !consumer.is_empty());
    let asking = waiting.asking.into_iter().map(|waits| WaitingConsumer {
        consumer: name_of(waits.consumer),
        since: waits.since.to_string(),
        until: waits.until.to_string(),
    });
    let holding = waiting.holding.into_iter().map(|held| HeldBatch {
        batch_id: held.batch_id.to_string(),
        consumer: name_of(held.consumer),
        since: held.since.to_string(),
        expires_at: params::time(held.expires_at),
        attempt: held.attempt,
    });
    PolicyStatus {
        policy: policy.name.to_string(),
        run: policy.run.0,
        epoch: policy.epoch.0,
        version: policy.version.0,
        version_step: policy.version_step.map(|step| step.0),
        version_uri: policy.version_uri,
        checkpoint_step: policy.checkpoint_step.map(|step| step.0),
        restored: policy.restored,
        waiting: Waiting {
            ready_groups: tallies.count(&Tally::Groups(GroupState::Ready)),
            needed_groups: i64::from(policy.rules.batch.groups),
            returned_batches: tallies.count(&Tally::Batches(BatchState::Returned)),
            open_groups: tallies.count(&Tally::Groups(GroupState::Open)),
            fullest: fullest.collect(),
            asking: asking.collect(),
            holding: holding.collect(),
            environments: environments.collect(),
            reserved_rollouts: tallies.count(&Tally::Reserved),
            last_post_at: params::time(tallies.last_received_at()),
            dropped_last_hour: waiting.dropped,
            stale_last_hour: waiting.stale,
        },
        rules: PolicyRules::clone(&policy.rules),
        warnings: Vec::new(),
        rollouts: tallies.rollouts(),
        groups: tallies.groups(),
        batches: tallies.batches(),
    }
}
