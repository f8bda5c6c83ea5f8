//! `/policies`: rules, versions, and the lineage of the weights.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json as Answer,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use forebay_client::wire::{
    CheckpointRequest, CheckpointResponse, Object, OpenGroup, PolicyList, PolicyRules, PolicyStatus, Problem,
    ReceiptGroup, ResetRequest, ResetResponse, ResumeRequest, ResumeResponse, VersionRequest, Waiting,
};
use serde::Deserialize;
use serde_json::Value;
use utoipa::IntoParams;

use super::{
    Api,
    batches::wait_ms,
    body::{Json, JsonAsSent, MergePatch, OptionalJson, parse_value},
    guard::{Caller, caller_id},
    params::{self, PolicyPath, Query},
    problem::Failure,
};
use crate::{
    buffer::{ids::PolicyName, policies::PolicyOverview, refusal::Refusal, rule_changes, rules::Rules},
    clock::Timestamp,
    store::{Publish, RulesWritten, Tallies},
};

/// Bytes of a version's URI.
const URI_BYTES_MAX: usize = 2_048;

/// Which policies to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PolicyQuery {
    /// The `next` of the page before.
    after: Option<String>,
    /// Entries of the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// The policies that the caller sees, in the order of their names
#[utoipa::path(
    get,
    path = "/policies",
    operation_id = "list_policies",
    tag = "policies",
    params(PolicyQuery),
    responses((status = 200, description = "A page of policies", body = PolicyList))
)]
pub(super) async fn list(
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

/// How to look at a policy.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WaitQuery {
    /// Answer once the version is above this one, or a resume has lowered it.
    #[param(minimum = 0)]
    wait_version_above: Option<i64>,
    /// Milliseconds to wait for that, at most 60,000.
    #[param(maximum = 60000)]
    wait_ms: Option<u64>,
}

/// A policy: rules, version, what its buffer holds and what its trainer waits for
#[utoipa::path(
    get,
    path = "/policies/{policy}",
    operation_id = "get_policy",
    tag = "policies",
    params(("policy" = String, Path, description = "Name of the policy"), WaitQuery),
    responses(
        (status = 200, description = "The policy", body = PolicyStatus),
        (status = 204, description = "No such version in time"),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid query", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "`too-many-waiters`: too many requests wait", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn get(
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

/// Write a policy's rules
///
/// Validated whole. They replace all rules of the policy: a setting that is left out goes back to its default, which
/// `warnings` in the answer says where that changes it; `PATCH` changes only what it names. `require`, `filter`, `group` and
/// `advantage` hold for groups opened from now on, `batch`, `lease`, `staleness`, `backlog` and the others for all groups from
/// the next request on.
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
        (status = 409, description = "`too-many-policies`", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "The rules cannot work", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn put(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    JsonAsSent(rules, sent): JsonAsSent<PolicyRules>,
) -> Result<Response, Failure> {
    // Compiling filters may take longer than an async worker should be held up.
    let rules = tokio::task::spawn_blocking(move || Rules::parse(rules));
    let rules = Arc::new(rules.await.map_err(|_| super::body::stopped())?.map_err(Refusal::Invalid)?);
    let written = {
        let (policy, rules) = (policy.clone(), Arc::clone(&rules));
        api.to_the_end(|buffer| async move { buffer.put_policy(policy, rules).await }).await?
    };
    let (status, warnings) = match written {
        RulesWritten::Existed(before) => (StatusCode::OK, rule_changes::resets(&before, &rules, &sent)),
        RulesWritten::Created | RulesWritten::Outdated => (StatusCode::CREATED, Vec::new()),
    };
    let written = on_wire(api.buffer.policy(&policy).await?);
    Ok((status, Answer(PolicyStatus { warnings, ..written })).into_response())
}

/// Change some of a policy's rules
///
/// A JSON merge patch (RFC 7396): settings that it names change, `null` resets one to its default, and the others stay. An
/// array, as that of the filters, is replaced whole. The rules that come of it are validated whole and hold from when those
/// of `PUT` do.
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
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "The rules cannot work", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn patch(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    MergePatch(patch): MergePatch,
) -> Result<Answer<PolicyStatus>, Failure> {
    {
        let policy = policy.clone();
        api.to_the_end(|buffer| async move { buffer.patch_policy(policy, patch, parse_rules).await }).await?;
    }
    Ok(Answer(on_wire(api.buffer.policy(&policy).await?)))
}

fn parse_rules(value: Value) -> Result<Rules, Refusal> {
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
        (status = 200, description = "It is current", body = PolicyStatus),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "`version-conflict` or `superseded`", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn publish(
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
        now: api.buffer.now(),
    };
    api.to_the_end(|buffer| async move { buffer.publish(publish).await }).await?;
    Ok(Answer(on_wire(api.buffer.policy(&policy).await?)))
}

/// The trainer has saved a step durably
///
/// What was acked at or before it is settled: no resume brings it back. A step above the last acked one is refused unless
/// `force` is true; only a policy that has never acked takes any step.
#[utoipa::path(
    post,
    path = "/policies/{policy}/checkpoints",
    operation_id = "checkpoint",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = CheckpointRequest,
    responses(
        (status = 200, description = "Settled", body = CheckpointResponse),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "`step-unknown` or `superseded`", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn checkpoint(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<CheckpointRequest>,
) -> Result<Answer<CheckpointResponse>, Failure> {
    let step = params::step("/step", request.step)?;
    let (force, epoch) = (request.force.unwrap_or(false), params::epoch(request.epoch));
    let (last, settled_batches) = api.buffer.checkpoint(policy, step, force, epoch).await?;
    Ok(Answer(CheckpointResponse { checkpoint_step: last.0, settled_batches }))
}

/// A trainer (re)starts from its checkpoint
///
/// Open leases are revoked, batches acked after the step come back, the version goes back, a new epoch begins. Leases that
/// resumes end count towards `lease.max_resumes`, acked batches do not. Below the last settled step, or where batches that
/// should come back are purged, the answer is `lineage-gap`, above the last acked step `step-unknown`, unless `force` is
/// true; only a policy that has never acked starts at any step. What a forced resume gives up for good is discarded with
/// reason `lineage-gap`, and no later resume asks for it.
#[utoipa::path(
    post,
    path = "/policies/{policy}/resume",
    operation_id = "resume",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = ResumeRequest,
    responses(
        (status = 200, description = "Resumed", body = ResumeResponse),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "`lineage-gap`, `step-unknown` or `superseded`", body = Problem, content_type = "application/problem+json"),
        (status = 422, description = "Invalid", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn resume(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<ResumeRequest>,
) -> Result<Answer<ResumeResponse>, Failure> {
    let step = request.step.map(|step| params::step("/step", step)).transpose()?;
    let force = request.force.unwrap_or(false);
    let epoch = params::epoch(request.epoch);
    let resumed = api.to_the_end(|buffer| async move { buffer.resume(policy, step, force, epoch).await }).await?;
    Ok(Answer(ResumeResponse {
        epoch: resumed.epoch.0,
        version: resumed.version.0,
        returned_batches: resumed.returned,
        quarantined_batches: resumed.quarantined,
        undeliverable_batches: resumed.undeliverable,
    }))
}

/// Start the policy afresh
///
/// Live groups are discarded with reason `reset`; step and version start over; the epoch goes on counting.
#[utoipa::path(
    post,
    path = "/policies/{policy}/reset",
    operation_id = "reset_policy",
    tag = "trainers",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = Option<ResetRequest>,
    responses(
        (status = 200, description = "A new run", body = ResetResponse),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "`superseded`", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn reset(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    OptionalJson(request): OptionalJson<ResetRequest>,
) -> Result<Answer<ResetResponse>, Failure> {
    let epoch = params::epoch(request.epoch);
    let reset = api.to_the_end(|buffer| async move { buffer.reset(policy, epoch).await });
    let (run, epoch, discarded_groups) = reset.await?;
    Ok(Answer(ResetResponse { run: run.0, epoch: epoch.0, discarded_groups }))
}

fn on_wire(overview: PolicyOverview) -> PolicyStatus {
    let PolicyOverview { policy, tallies, waiting } = overview;
    let mut recent = waiting.recent;
    let stale_last_hour = recent.remove("stale").unwrap_or(0);
    let dropped_last_hour: BTreeMap<String, i64> = recent
        .into_iter()
        .filter_map(|(name, value)| Some((name.strip_prefix("dropped.")?.to_owned(), value)))
        .collect();
    let fullest = waiting.fullest.into_iter().map(|(group_id, fill)| OpenGroup {
        group_id,
        fill: ReceiptGroup { state: fill.state, arrived: fill.arrived(), size: fill.size },
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
            ready_groups: tallies.value("group.ready"),
            needed_groups: i64::from(policy.rules.batch.groups),
            returned_batches: tallies.value("batch.returned"),
            open_groups: tallies.value("group.open"),
            fullest: fullest.collect(),
            reserved_rollouts: tallies.value("reserved"),
            last_post_at: last_post(&tallies),
            dropped_last_hour,
            stale_last_hour,
        },
        rules: PolicyRules::clone(&policy.rules),
        warnings: Vec::new(),
        rollouts: tallies.family("rollout"),
        groups: tallies.family("group"),
        batches: tallies.family("batch"),
    }
}

fn last_post(tallies: &Tallies) -> Option<String> {
    tallies.last_received_at.map(|time: Timestamp| time.to_string())
}
