//! `/batches`: a trainer leases the next batch, renews the lease, and acks or nacks the batch.

use std::time::Duration;

use axum::{
    Json as Answer,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchId, ConsumerName, GroupId, LeaseToken, RequestId},
    lease::{Batch, BatchFilter},
    rules::LEASE_TTL_S_MAX,
    shard::{Division, SHARDS_MAX},
    states,
};
use forebay_service::lease::{Holder, LeaseRequest, WAIT_MS_MAX};
use forebay_wire::{
    AckRequest, BatchDescriptor, BatchPage, BatchRequest, BatchState, ExtendRequest, ListOrder, NackRequest,
    ShardBalance, ShardCount, VersionRange,
};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::Json,
        guard::{Caller, caller_id},
        params::{self, BatchPath, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, LeaseLost, NoSuchBatch, NoSuchPolicy, Superseded},
};

/// The most bytes of a nack's reason.
const REASON_BYTES_MAX: usize = 1_024;

/// The most groups that a nack may name.
const NACK_GROUPS_MAX: usize = 65_536;

/// Lease the next batch
///
/// This is a long poll: the response is sent as soon as a batch is ready, or with status 204 if none becomes ready
/// within `wait_ms`.
#[utoipa::path(
    post,
    path = "/batches",
    operation_id = "lease_batch",
    tag = "trainers",
    request_body = BatchRequest,
    responses(
        (status = 201, description = "A batch and its lease", body = BatchDescriptor),
        (status = 200, description = "The batch that this `request_id` already holds, with a renewed lease", body = BatchDescriptor),
        (status = 204, description = "No batch became ready in time"),
        NoSuchPolicy,
        Superseded,
        (status = 503, description = "`too-many-waiters`: no batch is ready, and too many requests are waiting"),
    )
)]
pub(crate) async fn lease(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<BatchRequest>,
) -> Result<Response, Failure> {
    let wait_ms = wait_ms("/wait_ms", request.wait_ms)?;
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    let request = LeaseRequest {
        consumer: params::optional("/consumer", request.consumer.as_deref(), ConsumerName::parse)?,
        request_id: params::optional("/request_id", request.request_id.as_deref(), RequestId::parse)?,
        epoch: params::epoch(request.epoch),
        partial: request.partial.unwrap_or(false),
        wait: Duration::from_millis(wait_ms),
        caller: caller_id(&grant),
        ..LeaseRequest::of(policy)
    };
    let leased = api.buffer.lease(request, || api.guard.keyring.still_grants(&grant)).await?;
    let Some(leased) = leased else {
        return Ok(StatusCode::NO_CONTENT.into_response());
    };
    let status = if leased.held { StatusCode::OK } else { StatusCode::CREATED };
    let lease = leased.batch.lease.clone();
    let mut descriptor = describe(leased.batch, api.buffer.now());
    descriptor.lease = lease.map(|lease| lease.as_str().to_owned());
    Ok((status, Answer(descriptor)).into_response())
}

/// Checks the wait that a long poll asks for.
pub(crate) fn wait_ms(pointer: &str, wait_ms: Option<u64>) -> Result<u64, Failure> {
    match wait_ms.unwrap_or(0) {
        wait_ms @ 0..=WAIT_MS_MAX => Ok(wait_ms),
        _ => Err(Failure::invalid(pointer, format!("must be at most {WAIT_MS_MAX}"))),
    }
}

/// Which batches to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct BatchQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// Only batches in this state.
    state: Option<BatchState>,
    /// Which entries come first. `oldest` when absent; an `after` has the order of its list.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List batches in the order in which they were cut, or the newest first
///
/// With `state`, a page ends after a bounded number of the policy's batches, whether they match or not. A page can
/// therefore be short or empty and still have a `next`.
#[utoipa::path(
    get,
    path = "/batches",
    operation_id = "list_batches",
    tag = "trainers",
    params(BatchQuery),
    responses(
        (status = 200, description = "A page of batches, without leases", body = BatchPage),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<BatchQuery>,
) -> Result<Answer<BatchPage>, Failure> {
    let limit = params::page_limit(query.limit)?;
    let filter = BatchFilter {
        policy: params::policy(&grant, "policy", query.policy.as_deref())?,
        state: query.state.map(Into::into),
        from: params::cursor(query.order, query.after.as_deref())?,
        limit,
    };
    let page = api.buffer.batches(filter).await?;
    let (next, examined, now) = (params::next(page.next), page.examined, api.buffer.now());
    let batches = page.entries.into_iter().map(|batch| describe(batch, now)).collect();
    Ok(Answer(BatchPage { batches, next, examined }))
}

/// Options for reading one batch.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShardsQuery {
    /// If present, the response counts the contents of each of this many shards.
    shards: Option<u32>,
    /// What the shards have about equal amounts of, as for the samples.
    balance: Option<ShardBalance>,
}

/// Get one batch and its state
#[utoipa::path(
    get,
    path = "/batches/{id}",
    operation_id = "get_batch",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch"), ShardsQuery),
    responses(
        (status = 200, description = "The batch, without its lease", body = BatchDescriptor),
        NoSuchBatch,
        (status = 410, description = "Shards cannot be counted: the payloads are purged"),
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Query(query): Query<ShardsQuery>,
) -> Result<Answer<BatchDescriptor>, Failure> {
    let batch = api.buffer.batch(batch_id).await?;
    let shards = match query.shards {
        None if query.balance.is_some() => return Err(Failure::invalid("balance", "is only allowed with `shards`")),
        None => None,
        Some(count) => {
            let division = Division::new(count, query.balance.unwrap_or_default());
            let invalid = || Failure::invalid("shards", format!("must be 1 to {SHARDS_MAX}"));
            Some(api.buffer.shards(&batch, division.ok_or_else(invalid)?).await?)
        }
    };
    let mut descriptor = describe(batch, api.buffer.now());
    descriptor.shards = shards.map(|shards| {
        let count = |total: forebay_service::samples::ShardTotals| ShardCount {
            rollouts: total.rollouts,
            samples: total.samples,
            tokens: total.tokens,
        };
        shards.into_iter().map(count).collect()
    });
    Ok(Answer(descriptor))
}

/// Renew the lease (heartbeat): it expires `ttl_s` seconds from now
#[utoipa::path(
    post,
    path = "/batches/{id}/extend",
    operation_id = "extend_lease",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch")),
    request_body = ExtendRequest,
    responses(
        (status = 200, description = "Extended", body = BatchDescriptor),
        NoSuchBatch,
        LeaseLost,
    )
)]
pub(crate) async fn extend(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Json(request): Json<ExtendRequest>,
) -> Result<Answer<BatchDescriptor>, Failure> {
    if !(1..=LEASE_TTL_S_MAX).contains(&request.ttl_s) {
        return Err(Failure::invalid("/ttl_s", format!("must be 1 to {LEASE_TTL_S_MAX}")));
    }
    let batch = api.buffer.extend(holder(batch_id, &request.lease, request.epoch), request.ttl_s).await?;
    Ok(Answer(describe(batch, api.buffer.now())))
}

/// Ack the batch: an optimizer step has used it
///
/// Repeating the call with the same lease and step is safe and returns the same response.
#[utoipa::path(
    post,
    path = "/batches/{id}/ack",
    operation_id = "ack_batch",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch")),
    request_body = AckRequest,
    responses(
        (status = 200, description = "Acked: apply the optimizer step", body = BatchDescriptor),
        NoSuchBatch,
        (status = 409, description = "`lease-lost`, `superseded`, `already-acked` or `step-settled`: discard the gradients and do not apply the step"),
    )
)]
pub(crate) async fn ack(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Json(request): Json<AckRequest>,
) -> Result<Answer<BatchDescriptor>, Failure> {
    let step = params::step("/step", request.step)?;
    let batch = api.buffer.ack(holder(batch_id, &request.lease, request.epoch), step).await?;
    Ok(Answer(describe(batch, api.buffer.now())))
}

/// Nack the batch: give it back
///
/// The groups that the request names are quarantined. The batch then ends in state `split`, and its other groups return
/// to their places.
#[utoipa::path(
    post,
    path = "/batches/{id}/nack",
    operation_id = "nack_batch",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch")),
    request_body = NackRequest,
    responses(
        (status = 200, description = "Given back", body = BatchDescriptor),
        NoSuchBatch,
        LeaseLost,
        (status = 422, description = "Invalid, or a group that is not in the batch"),
    )
)]
pub(crate) async fn nack(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Json(request): Json<NackRequest>,
) -> Result<Answer<BatchDescriptor>, Failure> {
    let reason = request.reason.map(|reason| params::text("/reason", reason, REASON_BYTES_MAX)).transpose()?;
    let named = request.groups.unwrap_or_default();
    if named.len() > NACK_GROUPS_MAX {
        return Err(Failure::invalid("/groups", format!("must have at most {NACK_GROUPS_MAX} entries")));
    }
    let mut groups = Vec::with_capacity(named.len());
    for (index, group_id) in named.iter().enumerate() {
        let parsed = GroupId::parse(group_id);
        groups.push(parsed.map_err(|error| Failure::invalid(format!("/groups/{index}"), error.to_string()))?);
    }
    let batch = {
        let holder = holder(batch_id, &request.lease, request.epoch);
        api.run_uncancelled(|buffer| async move { buffer.nack(holder, reason, groups).await }).await?
    };
    Ok(Answer(describe(batch, api.buffer.now())))
}

/// Readmit a quarantined batch, or the quarantined groups of a split batch
#[utoipa::path(
    post,
    path = "/batches/{id}/readmit",
    operation_id = "readmit_batch",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch")),
    responses(
        (status = 200, description = "The batch is back, and its deliveries are counted from 0 again", body = BatchDescriptor),
        NoSuchBatch,
        (status = 409, description = "`batch-state`: neither the batch nor any of its groups is quarantined"),
    )
)]
pub(crate) async fn readmit(
    State(api): State<Api>,
    Caller(grant): Caller,
    BatchPath(batch_id): BatchPath,
) -> Result<Answer<BatchDescriptor>, Failure> {
    let api = api.acting_for(&grant);
    let batch = api.run_uncancelled(|buffer| async move { buffer.readmit(batch_id).await }).await?;
    Ok(Answer(describe(batch, api.buffer.now())))
}

fn holder(batch_id: BatchId, lease: &str, epoch: Option<i64>) -> Holder {
    Holder { batch_id, lease: LeaseToken::presented(lease), epoch: params::epoch(epoch) }
}

/// A batch on the wire, without the token of its lease, which only the holder may know.
fn describe(batch: Batch, now: Timestamp) -> BatchDescriptor {
    let is_acked = matches!(batch.state, states::BatchState::Trained | states::BatchState::Checkpointed);
    let acked_at = batch.acked_at.filter(|_| is_acked);
    let held_until = if batch.state == states::BatchState::Leased { Some(now) } else { acked_at };
    BatchDescriptor {
        acked_at: params::time(acked_at),
        waited_ms: batch.waited_us / 1_000,
        held_ms: held_until.map(|end| batch.held_us(end) / 1_000),
        samples_url: format!("/batches/{}/samples", batch.batch_id),
        batch_id: batch.batch_id.to_string(),
        state: batch.state.into(),
        lease: None,
        consumer: Some(batch.consumer).filter(|consumer| !consumer.is_empty()),
        epoch: batch.epoch.0,
        policy: batch.policy.to_string(),
        expires_at: params::time(batch.expires_at),
        expires_in_ms: batch.expires_at.map(|end| end.micros_since(now).max(0) / 1_000),
        attempt: batch.attempt,
        step: batch.step.map(|step| step.0),
        reason: batch.reason,
        groups: batch.groups,
        rollouts: batch.rollouts,
        samples: batch.samples,
        tokens: batch.tokens,
        policy_version: VersionRange {
            current: batch.version_current.0,
            min: batch.trained_versions.map(|versions| versions.oldest.0),
            max: batch.trained_versions.map(|versions| versions.newest.0),
        },
        metrics: batch.metrics,
        shards: None,
        created_at: batch.created_at.to_string(),
    }
}
