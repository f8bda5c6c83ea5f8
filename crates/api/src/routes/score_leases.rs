//! `/scores/leases`: work for scorers, as a long poll with leases.

use std::time::Duration;

use axum::{
    Json as Answer,
    body::Body,
    extract::State,
    http::{HeaderValue, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_bounds::budget::paid;
use forebay_domain::{
    access::Grant,
    clock::Timestamp,
    ids::{LeaseToken, PolicyName, RequestId, check_name},
    rules::LEASE_TTL_S_MAX,
    score_work::{ExtendedWork, ITEMS_MAX, LeasedWork, WorkItem, WorkRollout},
};
use forebay_service::scores::work::{ContentsRead, WorkRequest};
use forebay_wire::{
    ScoreExtendRequest, ScoreExtended, ScoreInclude, ScoreItem, ScoreItemRollout, ScoreLeaseRequest, ScoreLeases,
    ScoreOmitted, ScoreRetried, ScoreRetryRequest,
};

use crate::{
    Api,
    http::{
        body::Json,
        budgets::IsPaid,
        guard::{Caller, caller_id},
        pages::FIRST_PAGE_WAIT,
        params,
        problem::Failure,
    },
    openapi::NoSuchPolicy,
    routes::{batches::wait_ms, scores::scorer_of},
};

/// The most names of a request. Rules require no more scores.
const NAMES_MAX: usize = 16;

/// Rollouts of an answer without contents that is written on an async worker. An item may be a group of thousands.
const ANSWERED_INLINE_MAX: usize = 256;

/// Lease work for scorers
///
/// Work is a score that a rollout lacks and that its rules let scorers lease (`scores.work`). This is a long poll: the
/// response is sent as soon as there is work, the oldest first, or without items if there is none within `wait_ms`. The
/// lease goes with the score to `POST /scores`. If it expires before, the work is given to the next scorer that asks, and
/// what comes late is refused.
#[utoipa::path(
    post,
    path = "/scores/leases",
    operation_id = "lease_scores",
    tag = "scorers",
    request_body = ScoreLeaseRequest,
    responses(
        (status = 200, description = "The work, or no items if there was none in time", body = ScoreLeases),
        (status = 404, description = "No such policy, or its rules make no work of a score with this name"),
        (status = 503, description = "`too-many-waiters`: there is no work, and too many requests are waiting"),
    )
)]
pub(crate) async fn lease(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<ScoreLeaseRequest>,
) -> Result<Response, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    let unnamed = request.policy.is_none();
    let wanted = request.include.clone();
    let request = work_request(&grant, policy.clone(), request)?;
    let leased = api.buffer.lease_work(request, || api.guard.keyring.still_grants(&grant)).await.map_err(|error| {
        let failure = Failure::from(error);
        if unnamed { failure.unnamed_policy() } else { failure }
    })?;
    let rollouts: usize = leased.items.iter().map(|item| item.rollouts.len()).sum();
    if rollouts == 0 || (wanted.is_empty() && rollouts <= ANSWERED_INLINE_MAX) {
        return Ok(Answer(on_wire(&policy, leased, false, ContentsRead::new(), api.buffer.now())).into_response());
    }
    with_contents(&api, policy, leased, wanted).await
}

fn work_request(grant: &Grant, policy: PolicyName, request: ScoreLeaseRequest) -> Result<WorkRequest, Failure> {
    if !(1..=NAMES_MAX).contains(&request.names.len()) {
        return Err(Failure::invalid("/names", format!("must be 1 to {NAMES_MAX} names, are {}", request.names.len())));
    }
    for (index, name) in request.names.iter().enumerate() {
        check_name(name).map_err(|detail| Failure::invalid(format!("/names/{index}"), detail))?;
    }
    let max = request.max.unwrap_or(1);
    if !(1..=ITEMS_MAX).contains(&max) {
        return Err(Failure::invalid("/max", format!("must be 1 to {ITEMS_MAX}, is {max}")));
    }
    if let Some(Err(detail)) = request.scorer.as_deref().map(check_name) {
        return Err(Failure::invalid("/scorer", detail));
    }
    let mut names = request.names;
    names.sort_unstable();
    names.dedup();
    Ok(WorkRequest {
        policy,
        names,
        max,
        scorer: request.scorer.unwrap_or_else(|| scorer_of(grant)),
        request_id: params::optional("/request_id", request.request_id.as_deref(), RequestId::parse)?,
        ttl_s: ttl_s(request.ttl_s)?,
        reads: !request.include.is_empty(),
        wait: Duration::from_millis(wait_ms("/wait_ms", request.wait_ms)?),
        caller: caller_id(grant),
    })
}

fn ttl_s(ttl_s: Option<u64>) -> Result<Option<u64>, Failure> {
    match ttl_s {
        Some(ttl_s) if !(1..=LEASE_TTL_S_MAX).contains(&ttl_s) => {
            Err(Failure::invalid("/ttl_s", format!("must be 1 to {LEASE_TTL_S_MAX}, is {ttl_s}")))
        }
        _ => Ok(ttl_s),
    }
}

/// The work, with the contents of its rollouts if they are wanted. If there is no room for them, it is given back.
async fn with_contents(
    api: &Api,
    policy: PolicyName,
    leased: LeasedWork,
    wanted: Vec<ScoreInclude>,
) -> Result<Response, Failure> {
    let has_contents = !wanted.is_empty();
    let reader = api.buffer.work_reader(policy.clone(), &leased.items, wanted);
    let bytes = usize::try_from(reader.bytes()).unwrap_or(usize::MAX);
    let tokens: Vec<LeaseToken> = leased.items.iter().map(|item| item.lease.clone()).collect();
    // A repeated request must not end what its first answer began.
    let tokens = if leased.held { Vec::new() } else { tokens };
    let budget = api.budgets.samples.clone();
    // The task goes on if the client disconnects, so that the work is given back, and the bytes are counted as long as they
    // are in memory.
    let read = api.run_uncancelled(|buffer| async move {
        let now = buffer.now();
        let of_policy = policy.clone();
        let answer = async {
            let mut share = budget.wait_at_most(FIRST_PAGE_WAIT, bytes).await?;
            let text = reader.read(move |contents| {
                let answer = on_wire(&of_policy, leased, has_contents, contents, now);
                serde_json::to_vec(&answer).expect("an answer is plain data and checked JSON")
            });
            let text = text.await?;
            share.shrink(text.len());
            Ok::<_, Failure>(paid(Bytes::from(text), share))
        };
        match answer.await {
            Ok(paid) => Ok(paid),
            Err(failure) => {
                buffer.release_work(&policy, tokens).await?;
                Err(failure)
            }
        }
    });
    let mut response = Body::from(read.await?).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.extensions_mut().insert(IsPaid);
    Ok(response)
}

fn on_wire(
    policy: &PolicyName,
    leased: LeasedWork,
    has_contents: bool,
    mut contents: ContentsRead,
    now: Timestamp,
) -> ScoreLeases {
    let mut rollout = |rollout: WorkRollout| {
        let found = contents.remove(&rollout.row.rollout_pk);
        let omitted = match &found {
            Some(None) => Some(ScoreOmitted::Damaged),
            _ if rollout.is_cut => Some(ScoreOmitted::Size),
            None if has_contents => Some(ScoreOmitted::Size),
            None | Some(Some(_)) => None,
        };
        let contents = found.flatten().unwrap_or_default();
        ScoreItemRollout {
            rollout_id: rollout.row.rollout_id,
            scoring: rollout.scoring,
            policy_version: rollout.row.policy_version.0,
            status: rollout.status,
            reward: rollout.reward,
            reward_components: rollout.reward_components,
            messages: contents.messages,
            metadata: contents.metadata,
            text: contents.text,
            segments: contents.segments,
            omitted,
        }
    };
    let item = |item: WorkItem| ScoreItem {
        lease: item.lease.as_str().to_owned(),
        expires_at: item.expires_at.to_string(),
        expires_in_ms: left_ms(item.expires_at, now),
        attempt: item.attempt,
        max_attempts: item.attempts_max,
        policy: policy.to_string(),
        name: item.name,
        per: item.per,
        group_id: item.group_id,
        rollouts: item.rollouts.into_iter().map(&mut rollout).collect(),
    };
    ScoreLeases { items: leased.items.into_iter().map(item).collect() }
}

fn left_ms(expires_at: Timestamp, now: Timestamp) -> i64 {
    expires_at.micros_since(now).max(0) / 1_000
}

/// Extend leases of work
///
/// The heartbeat of a scorer, for all that it holds. Leases that are lost do not keep the others from being extended.
#[utoipa::path(
    post,
    path = "/scores/leases/extend",
    operation_id = "extend_score_leases",
    tag = "scorers",
    request_body = ScoreExtendRequest,
    responses(
        (status = 200, description = "Which leases are held, and until when", body = ScoreExtended),
        NoSuchPolicy,
    )
)]
pub(crate) async fn extend(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<ScoreExtendRequest>,
) -> Result<Answer<ScoreExtended>, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    if !(1..=ITEMS_MAX as usize).contains(&request.leases.len()) {
        let detail = format!("must be 1 to {ITEMS_MAX} leases, are {}", request.leases.len());
        return Err(Failure::invalid("/leases", detail));
    }
    for (index, lease) in request.leases.iter().enumerate() {
        check_name(lease).map_err(|detail| Failure::invalid(format!("/leases/{index}"), detail))?;
    }
    let leases = request.leases.iter().map(|lease| LeaseToken::presented(lease)).collect();
    let ttl_s = ttl_s(request.ttl_s)?;
    let extended = api.buffer.extend_work(policy, leases, ttl_s).await.map_err(|error| {
        let failure = Failure::from(error);
        if request.policy.is_none() { failure.unnamed_policy() } else { failure }
    })?;
    let ExtendedWork { expires_at, held: is_held } = extended;
    let (mut held, mut lost) = (Vec::new(), Vec::new());
    for (lease, is_held) in request.leases.into_iter().zip(is_held) {
        if is_held { held.push(lease) } else { lost.push(lease) }
    }
    let expires_in_ms = left_ms(expires_at, api.buffer.now());
    Ok(Answer(ScoreExtended { expires_at: expires_at.to_string(), expires_in_ms, held, lost }))
}

/// Try exhausted work again
///
/// Work whose attempts are used up has all of them again, and can be leased.
#[utoipa::path(
    post,
    path = "/scores/retry",
    operation_id = "retry_scores",
    tag = "scorers",
    request_body = ScoreRetryRequest,
    responses(
        (status = 200, description = "How many items there were", body = ScoreRetried),
        NoSuchPolicy,
    )
)]
pub(crate) async fn retry(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<ScoreRetryRequest>,
) -> Result<Answer<ScoreRetried>, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    check_name(&request.name).map_err(|detail| Failure::invalid("/name", detail))?;
    let retried = api.buffer.retry_work(policy, request.name).await.map_err(|error| {
        let failure = Failure::from(error);
        if request.policy.is_none() { failure.unnamed_policy() } else { failure }
    })?;
    Ok(Answer(ScoreRetried { retried }))
}
