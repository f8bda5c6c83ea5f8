//! `/sessions`: producers open and end sessions, and look at what was recorded. The calls of agents have a listener of
//! their own.

use std::collections::{BTreeMap, BTreeSet};

use axum::{
    Json as Answer,
    extract::State,
    http::{HeaderMap, StatusCode, header, uri::Authority},
};
use forebay_domain::{
    ids::RolloutId,
    refusal::Refusal,
    session::{Delivery, SaveState, Session, SessionFilter},
};
use forebay_service::{
    engines::NoUpstream,
    session::{
        ending::{Abort, Ended, Finish},
        open::{OpenSession, Opened},
        turns::Turn,
    },
};
use forebay_wire::{
    AbortRequest, FinishRequest, ListOrder, Purpose, SavedState, SessionBreak, SessionEnded, SessionFinish,
    SessionInfo, SessionModel, SessionOpened, SessionPage, SessionPolicy, SessionRequest, SessionResume, SessionState,
    SessionTurn, SessionTurns,
};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    agent_urls::AgentUrls,
    http::{
        body::{AnyBytes, Json, JsonList, OptionalJson},
        guard::Caller,
        params::{self, Query, SessionPath},
        problem::{Failure, UPSTREAM_NOT_READY},
    },
    openapi::{AnyContent, InvalidQuery, NoSuchPolicy, NoSuchSession, SessionConflict},
};

/// The most sessions that one request finishes: more than the roles of an execution.
const FINISHES_MAX: usize = 256;

/// Open a session
///
/// Checks everything for which its rollouts could be refused at the end, and reserves room for them as an admission
/// does, always for a group that has begun. Repeated with the same `rollout_id` and content, the answer has the same
/// session and another key.
#[utoipa::path(
    post,
    path = "/sessions",
    operation_id = "open_session",
    tag = "agents",
    request_body = SessionRequest,
    responses(
        (status = 201, description = "The session is open", body = SessionOpened),
        (status = 200, description = "The session was opened before; the key is new", body = SessionOpened),
        NoSuchPolicy,
        (status = 409, description = "`rollout-conflict`: the rollout is already stored; `session-conflict`: another request opened a session of the rollout; `session-ended`; `group-size-conflict`; `too-many-keys`"),
        (status = 429, description = "`no-room`: as many rollouts have been started as will be fresh"),
        (status = 503, description = "`no-upstream`: the service has no listener for agents; `upstream-not-ready`: the calls could not be recorded now, and the detail says what to change; `teacher-failed`: the teacher of a policy does not answer"),
    )
)]
pub(crate) async fn open(
    State(api): State<Api>,
    Caller(grant): Caller,
    headers: HeaderMap,
    Json(request): Json<SessionRequest>,
) -> Result<(StatusCode, Answer<SessionOpened>), Failure> {
    let names_models = !request.models.is_empty();
    let open = OpenSession::parse(&api.buffer, request)?;
    open.policies().try_for_each(|policy| grant.check(policy))?;
    let Some((upstreams, urls)) = &api.sessions else { return Err(without_listener()) };
    upstreams
        .check(open.spec())
        .await
        .map_err(|(model, error)| without_upstream(Some(model).filter(|_| names_models).as_deref(), &error))?;
    let opened = api.run_uncancelled(|buffer| async move { buffer.open_session(open).await }).await;
    let opened = opened.map_err(Failure::of_single_object)?;
    let status = if opened.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Answer(opened_on_wire(opened, urls, &headers))))
}

/// Resume a session
///
/// For an agent that died: it is started again with the key of the answer, and its calls are answered with what was
/// recorded as long as they are those of earlier attempts. The keys before permit nothing more, and calls that are under
/// way with them end with `superseded`. The session keeps its room, its bounds and the time at which it expires.
#[utoipa::path(
    post,
    path = "/sessions/{id}/resume",
    operation_id = "resume_session",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    request_body = SessionResume,
    responses(
        (status = 200, description = "Another attempt has begun", body = SessionOpened),
        NoSuchSession,
        (status = 409, description = "`session-ended`; `session-reset`; `no-attempts-left`; `attempt-over`: another attempt than the named one has begun"),
        (status = 503, description = "`no-upstream`: the service has no listener for agents"),
    )
)]
pub(crate) async fn resume(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
    headers: HeaderMap,
    OptionalJson(SessionResume { attempt }): OptionalJson<SessionResume>,
) -> Result<Answer<SessionOpened>, Failure> {
    let Some((_, urls)) = &api.sessions else { return Err(without_listener()) };
    let id = session.session_id;
    let opened = api.run_uncancelled(move |buffer| async move { buffer.resume_session(id, attempt).await }).await?;
    Ok(Answer(opened_on_wire(opened, urls, &headers)))
}

/// Which call and attempt a saved state belongs to.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SaveQuery {
    /// Number of the last call before it; that of the last recorded call when absent.
    call: Option<u32>,
    /// The attempt that saves it. If another one has begun, the request is refused.
    attempt: Option<u32>,
}

/// Save a state
///
/// The body is any bytes, at most 1 MiB, that the agent or its sandbox goes on from if it is started again. It replaces
/// what was saved before.
#[utoipa::path(
    put,
    path = "/sessions/{id}/state",
    operation_id = "save_session_state",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session"), SaveQuery),
    request_body(content = AnyContent, content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "The state is stored", body = SavedState),
        NoSuchSession,
        (status = 409, description = "`session-ended`; `attempt-over`: another attempt than the named one has begun"),
        InvalidQuery,
    )
)]
pub(crate) async fn save_state(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
    Query(SaveQuery { call, attempt }): Query<SaveQuery>,
    AnyBytes(content): AnyBytes,
) -> Result<Answer<SavedState>, Failure> {
    let save = SaveState { session_id: session.session_id, attempt, call, content, now: api.buffer.now() };
    Ok(Answer(api.run_uncancelled(|buffer| async move { buffer.save_state(save).await }).await?))
}

/// Read the saved state
///
/// The bytes that were saved last. The headers `forebay-call` and `forebay-attempt` say what they belong to.
#[utoipa::path(
    get,
    path = "/sessions/{id}/state",
    operation_id = "get_session_state",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    responses(
        (status = 200, description = "The state", body = AnyContent, content_type = "application/octet-stream", headers(
            ("forebay-call" = u32, description = "Number of the last call before it; 0 before the first one"),
            ("forebay-attempt" = u32, description = "The attempt that saved it"),
        )),
        (status = 404, description = "`not-found`: there is no such session, or nothing was saved"),
    )
)]
pub(crate) async fn state(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
) -> Result<([(&'static str, String); 3], Vec<u8>), Failure> {
    let saved = api.buffer.saved_state(session.session_id).await?;
    let saved = saved.ok_or(Refusal::Unknown("a saved state of the session"))?;
    let headers = [
        ("content-type", "application/octet-stream".to_owned()),
        ("forebay-call", saved.seq.to_string()),
        ("forebay-attempt", saved.attempt.to_string()),
    ];
    Ok((headers, saved.content))
}

/// Which sessions to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SessionQuery {
    /// Only sessions that record rollouts of this policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// `eval`: sessions that evaluate the policy; `train` when absent.
    #[serde(default)]
    #[param(value_type = Option<Purpose>)]
    purpose: Purpose,
    /// Only the session that recorded this rollout of the current run.
    #[param(min_length = 1, max_length = 256)]
    rollout_id: Option<String>,
    /// Only sessions in this state.
    state: Option<SessionState>,
    /// Which entries come first. `oldest` when absent; an `after` has the order of its list.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List sessions in the order in which they were opened, or the newest first
///
/// Sessions that also record rollouts of policies that the caller may not access are left out. With `state`, a page ends
/// after a bounded number of the policy's sessions, whether they match or not. A page can therefore be short or empty
/// and still have a `next`.
#[utoipa::path(
    get,
    path = "/sessions",
    operation_id = "list_sessions",
    tag = "agents",
    params(SessionQuery),
    responses(
        (status = 200, description = "A page of sessions", body = SessionPage),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<SessionQuery>,
) -> Result<Answer<SessionPage>, Failure> {
    let filter = SessionFilter {
        policy: match query.purpose {
            Purpose::Train => params::policy(&grant, "policy", query.policy.as_deref())?,
            Purpose::Eval => params::policy(&grant, "policy", query.policy.as_deref())?.evaluations(),
        },
        rollout_id: params::optional("rollout_id", query.rollout_id.as_deref(), RolloutId::parse)?,
        state: query.state.map(Into::into),
        from: params::cursor(query.order, query.after.as_deref())?,
        limit: params::page_limit(query.limit)?,
    };
    let page = api.buffer.sessions(filter).await?;
    let (next, examined) = (params::next(page.next), page.examined);
    let sessions = page.entries.into_iter().filter(|session| params::sees_session(&grant, session));
    Ok(Answer(SessionPage { sessions: sessions.map(on_wire).collect(), next, examined }))
}

/// Look up a session
#[utoipa::path(
    get,
    path = "/sessions/{id}",
    operation_id = "get_session",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    responses((status = 200, description = "The session", body = SessionInfo), NoSuchSession)
)]
pub(crate) async fn get(State(_): State<Api>, SessionPath(session): SessionPath) -> Answer<SessionInfo> {
    Answer(on_wire(*session))
}

/// List the recorded calls of a session
///
/// Each has what becomes of it, and where its prompt differs from an earlier call that it should have continued.
#[utoipa::path(
    get,
    path = "/sessions/{id}/turns",
    operation_id = "list_session_turns",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    responses((status = 200, description = "The calls", body = SessionTurns), NoSuchSession)
)]
pub(crate) async fn turns(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
) -> Result<Answer<SessionTurns>, Failure> {
    let turns = api.buffer.session_turns(session.session_id).await?;
    Ok(Answer(SessionTurns { turns: turns.into_iter().map(turn_on_wire).collect() }))
}

/// Finish a session
///
/// No new call is accepted. Calls in flight are waited for and then cancelled. The recorded calls are assembled, and one
/// trajectory per policy is ingested in the transaction that ends the session. A policy without calls gets an `aborted`
/// trajectory. The same request again gets the same answer. If the request is refused, the session goes on.
#[utoipa::path(
    post,
    path = "/sessions/{id}/finish",
    operation_id = "finish_session",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    request_body = FinishRequest,
    responses(
        (status = 200, description = "The session has ended", body = SessionEnded),
        NoSuchSession,
        SessionConflict,
        (status = 422, description = "Invalid; or `no-turns`: the session has no call whose answer the agent received, and the status is not `aborted` or `failed`"),
        (status = 503, description = "`teacher-failed`: the teacher of a policy did not score the segments, and nothing changed; `session-changing`; or overloaded"),
    )
)]
pub(crate) async fn finish(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
    Json(request): Json<FinishRequest>,
) -> Result<Answer<SessionEnded>, Failure> {
    let finish = Finish::parse(&api.buffer, SessionFinish::of(session.session_id.to_string(), request))?;
    let ended = api.run_uncancelled(|buffer| async move { buffer.finish_sessions(vec![finish]).await }).await;
    let ended = ended.map_err(Failure::of_single_object)?.pop().ok_or(Refusal::Unknown("the session"))?;
    Ok(Answer(ended_on_wire(ended)))
}

/// Finish several sessions together
///
/// All of them end in one commit, and their trajectories are one bundle: if one is refused, all go on.
#[utoipa::path(
    post,
    path = "/sessions/finish",
    operation_id = "finish_sessions",
    tag = "agents",
    request_body = Vec<SessionFinish>,
    responses(
        (status = 200, description = "The sessions have ended, in the order of the request", body = Vec<SessionEnded>),
        NoSuchSession,
        SessionConflict,
        (status = 422, description = "Invalid; or `no-turns`: a session has no call whose answer the agent received, and its status is not `aborted` or `failed`"),
        (status = 503, description = "`teacher-failed`: the teacher of a policy did not score the segments, and nothing changed; `session-changing`; or overloaded"),
    )
)]
pub(crate) async fn finish_all(
    State(api): State<Api>,
    Caller(grant): Caller,
    JsonList(requests): JsonList<SessionFinish>,
) -> Result<Answer<Vec<SessionEnded>>, Failure> {
    if requests.is_empty() || requests.len() > FINISHES_MAX {
        return Err(Failure::invalid("", format!("must have 1 to {FINISHES_MAX} sessions")));
    }
    let mut seen = BTreeSet::new();
    let mut finishes = Vec::with_capacity(requests.len());
    for (index, request) in requests.into_iter().enumerate() {
        let finish = Finish::parse(&api.buffer, request).map_err(|refusal| at_index(refusal, index))?;
        if !seen.insert(finish.session_id()) {
            return Err(Failure::invalid(format!("/{index}/session_id"), "must occur only once"));
        }
        let session = api.buffer.session(finish.session_id()).await?;
        if !params::sees_session(&grant, &session) {
            return Err(Refusal::Unknown("the session").into());
        }
        finishes.push(finish);
    }
    let ended = api.run_uncancelled(|buffer| async move { buffer.finish_sessions(finishes).await }).await?;
    Ok(Answer(ended.into_iter().map(ended_on_wire).collect()))
}

/// Abort a session
///
/// Its trajectories have the status `aborted` and no reward, so they take no place in their groups.
#[utoipa::path(
    post,
    path = "/sessions/{id}/abort",
    operation_id = "abort_session",
    tag = "agents",
    params(("id" = String, Path, description = "Id of the session")),
    request_body = AbortRequest,
    responses(
        (status = 200, description = "The session has ended", body = SessionEnded),
        NoSuchSession,
        SessionConflict,
    )
)]
pub(crate) async fn abort(
    State(api): State<Api>,
    SessionPath(session): SessionPath,
    Json(request): Json<AbortRequest>,
) -> Result<Answer<SessionEnded>, Failure> {
    let abort = Abort::parse(session.session_id, request)?;
    let ended = api.run_uncancelled(|buffer| async move { buffer.abort_session(abort).await }).await;
    Ok(Answer(ended_on_wire(ended.map_err(Failure::of_single_object)?)))
}

/// A session that could be opened, but whose calls no engine would answer.
/// `model` is the name in the request, if it names models.
fn without_upstream(model: Option<&str>, error: &NoUpstream) -> Failure {
    match error {
        NoUpstream::Unrouted { .. } => {
            let name = model.map(|model| model.replace('~', "~0").replace('/', "~1"));
            let pointer = name.map_or_else(|| "/policy".to_owned(), |name| format!("/models/{name}"));
            Failure::invalid(pointer, error.to_string())
        }
        NoUpstream::NotReady { .. } => {
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, UPSTREAM_NOT_READY, "The inference engine is not ready")
                .detail(error.to_string())
                .retry()
        }
    }
}

fn without_listener() -> Failure {
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "no-upstream", "No inference engine is configured")
        .detail("sessions need `listen` in the table [sessions] of the configuration, and an [[upstream]]")
}

/// How the producer names this machine.
fn host(headers: &HeaderMap) -> Option<Authority> {
    headers.get(header::HOST)?.to_str().ok()?.parse().ok()
}

/// Makes the pointers of a request's violations start with its index.
fn at_index(refusal: Refusal, index: usize) -> Refusal {
    let Refusal::Invalid(mut violations) = refusal else { return refusal };
    for violation in &mut violations {
        violation.pointer.insert_str(0, &format!("/{index}"));
    }
    Refusal::Invalid(violations)
}

fn opened_on_wire(opened: Opened, urls: &AgentUrls, headers: &HeaderMap) -> SessionOpened {
    SessionOpened {
        session_id: opened.session_id.to_string(),
        key: opened.key.reveal().to_owned(),
        rollout_id: opened.rollout_id,
        duplicate: opened.duplicate,
        attempt: opened.attempt,
        max_attempts: opened.max_attempts,
        base_urls: urls.of(opened.session_id, host(headers).as_ref()),
        expires_at: opened.expires_at.to_string(),
    }
}

fn ended_on_wire(ended: Ended) -> SessionEnded {
    SessionEnded {
        session_id: ended.session_id.to_string(),
        state: ended.state.into(),
        reason: ended.reason,
        duplicate: ended.duplicate,
        receipts: ended.outcome.receipts,
        assembly: ended.outcome.assembly,
    }
}

fn on_wire(session: Session) -> SessionInfo {
    let models = session.spec.models.iter();
    let models: BTreeMap<String, SessionModel> =
        models.map(|(name, policy)| (name.clone(), SessionModel { policy: policy.clone() })).collect();
    let policies = session.policies.iter().map(|policy| SessionPolicy {
        policy: policy.policy.to_string(),
        run: policy.run.0,
        policy_version: policy.version.0,
        calls: policy.calls,
        sampled_tokens: policy.sampled,
        special_tokens: policy.special_tokens,
        warnings: policy.warnings.clone(),
    });
    let execution_id = session.execution_id().map(str::to_owned);
    let stale_after_versions = session.stale_after();
    let (receipts, assembly) = session.outcome.map(|outcome| (outcome.receipts, outcome.assembly)).unzip();
    SessionInfo {
        session_id: session.session_id.to_string(),
        state: session.state.into(),
        reason: session.reason,
        rollout_id: session.spec.rollout_id.clone(),
        group_id: session.spec.group().to_owned(),
        environment: session.spec.environment.clone(),
        execution_id,
        policies: policies.collect(),
        models,
        calls: session.calls,
        bytes: session.bytes,
        full: session.is_full,
        attempt: session.attempt,
        max_attempts: session.max_attempts,
        stale_after_versions,
        opened_at: session.opened_at.to_string(),
        last_call_at: params::time(session.last_call_at),
        due_at: params::time(session.due_at),
        expires_at: session.expires_at.to_string(),
        ended_at: params::time(session.ended_at),
        receipts,
        assembly,
    }
}

fn turn_on_wire(turn: Turn) -> SessionTurn {
    let call = turn.call;
    SessionTurn {
        seq: call.seq,
        id: call.columns.id,
        policy: call.policy.to_string(),
        model: call.head.model,
        dialect: call.head.dialect,
        agent: call.head.agent,
        prompt_tokens: call.prompt as u64,
        sampled_tokens: call.columns.ids.len() as u64,
        version_assumed: call.columns.version_assumed,
        finish_reason: call.head.finish_reason,
        delivered: call.delivery == Delivery::Delivered,
        retry_count: call.head.retry_count,
        attempt: call.attempt,
        used_in: call.used_in,
        started_at: call.head.started_at.to_string(),
        ended_at: call.ended_at.to_string(),
        outcome: turn.outcome.as_str().to_owned(),
        divergence: turn.divergence.map(|found| SessionBreak {
            nearest: found.nearest,
            position: found.position as u64,
            cause: found.cause.to_owned(),
            expected: found.expected,
            found: found.found,
            expected_text: found.expected_text,
            found_text: found.found_text,
        }),
    }
}
