//! The routes of agents. Each handler says which dialect it speaks.

use std::{
    any::Any,
    collections::HashMap,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use forebay_api::http::framing::{self, Framing};
use forebay_bounds::budget::paid;
use forebay_domain::{
    ids::SessionId,
    refusal::Refusal,
    session::{SAVED_STATE_BYTES_MAX, SaveState, SessionKey},
};
use forebay_gateway::{
    Dialect, DialectError,
    dialect::{Model, token_count},
};
use forebay_service::{error::BufferError, session::record::CallPermit};
use forebay_telemetry::otlp;
use serde::Deserialize;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, CorsLayer},
    normalize_path::NormalizePath,
};
use tracing::Instrument as _;

use crate::{
    Agents, answer,
    body::{self, ReadBody},
    call::{Call, Times, number},
    counting, references, refusal,
};

/// How long before its client would give up a call is answered.
const ANSWER_BEFORE: Duration = Duration::from_secs(30);

/// The path parameter of a session's routes. On the routes without it, the key alone names the session.
type Id = Option<Path<String>>;

/// The routes of agents: those of a session, and the same without its id.
pub fn router(agents: Agents) -> Router {
    let calls = Router::new()
        .route("/chat/completions", post(chat))
        .route("/responses", post(responses))
        .route("/responses/{response}", get(retrieve))
        .route("/messages", post(messages))
        .route("/messages/count_tokens", post(count_tokens))
        .route("/models", get(models))
        .route("/models/{*model}", get(model));
    let routes = Router::new()
        .route("/", get(probe))
        .route("/sessions/{id}", get(probe))
        .route("/sessions/{id}/state", get(saved_state).put(save_state))
        .nest("/sessions/{id}/v1", calls.clone())
        .nest("/v1", calls)
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_path);
    let cors = cors(&agents.options().origins);
    // Some clients end paths with a slash.
    let mut outer = Router::new().fallback_service(NormalizePath::trim_trailing_slash(routes.with_state(agents)));
    if let Some(cors) = cors {
        outer = outer.layer(cors);
    }
    outer.layer(middleware::from_fn(check_framing)).layer(CatchPanicLayer::custom(panicked))
}

/// What lets pages of these origins call. `None` if there are none: browsers then refuse to show answers to pages.
fn cors(origins: &[HeaderValue]) -> Option<CorsLayer> {
    let layer = CorsLayer::new()
        .allow_origin(origins.to_vec())
        .allow_methods([Method::GET, Method::HEAD, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, HeaderName::from_static("x-should-retry"), answer::STALE_AFTER]);
    (!origins.is_empty()).then_some(layer)
}

async fn chat(State(agents): State<Agents>, id: Id, request: Request) -> Response {
    call(agents, Dialect::Chat, id, request).await
}

async fn responses(State(agents): State<Agents>, id: Id, request: Request) -> Response {
    call(agents, Dialect::Responses, id, request).await
}

/// A response that was recorded.
async fn retrieve(
    State(agents): State<Agents>,
    Path(names): Path<HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let id = names.get("id").cloned().map(Path);
    let response = names.get("response").map(String::as_str).unwrap_or_default();
    let read = async { references::response(&agents, &permit(&agents, id, &headers).await?, response).await };
    match read.await {
        Ok(body) => answer::json(body),
        Err(error) => answer::error(Dialect::Responses, &error),
    }
}

/// What the agent or its sandbox goes on from if it is started again. Only the running attempt can store it.
async fn save_state(
    State(agents): State<Agents>,
    id: Id,
    query: Result<Query<AfterCall>, QueryRejection>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let save = async {
        let permit = match permit(&agents, id, &parts.headers).await {
            Ok(permit) => permit,
            Err(error) => {
                body::discard(body).await;
                return Err(error);
            }
        };
        let Query(AfterCall { call }) = query.map_err(|_| not_a_call("must be the number of a call".to_owned()))?;
        let (content, _shares) = body::read_bytes(&agents, permit.session_id(), body, SAVED_STATE_BYTES_MAX).await?;
        let save = SaveState {
            session_id: permit.session_id(),
            attempt: Some(permit.attempt()),
            call,
            content,
            now: agents.buffer().now(),
        };
        agents.buffer().save_state(save).await.map_err(|error| match error {
            BufferError::Refused(Refusal::Invalid(violations)) => {
                not_a_call(violations.into_iter().map(|violation| violation.detail).collect())
            }
            other => refusal::of(other),
        })
    };
    match save.await {
        Ok(saved) => answer::json(serde_json::to_vec(&saved).expect("numbers and texts always serialize")),
        Err(error) => answer::error(Dialect::of_headers(&parts.headers), &error),
    }
}

fn not_a_call(why: String) -> DialectError {
    DialectError::Invalid { field: "call".to_owned(), why }
}

/// The call that a state is stored after; the last recorded one if absent.
#[derive(Deserialize)]
struct AfterCall {
    call: Option<u32>,
}

async fn saved_state(State(agents): State<Agents>, id: Id, headers: HeaderMap) -> Response {
    let read = async {
        let permit = permit(&agents, id, &headers).await?;
        let session_id = permit.session_id();
        // It takes its bytes from the budget before it is read, and keeps them until it is written.
        let patience = agents.options().read_timeout;
        let taking = agents.0.bytes.take_more(body::owner(session_id), 0, SAVED_STATE_BYTES_MAX, patience);
        let share = taking.await.map_err(|_| body::overloaded())?;
        let saved = agents.buffer().saved_state(session_id).await.map_err(refusal::of)?;
        let what = || DialectError::NotFound { what: "a saved state of the session".to_owned() };
        Ok::<_, DialectError>((saved.ok_or_else(what)?, share))
    };
    match read.await {
        Ok((saved, share)) => answer::octets(paid(saved.content.into(), share), saved.seq, saved.attempt),
        Err(error) => answer::error(Dialect::of_headers(&headers), &error),
    }
}

async fn messages(State(agents): State<Agents>, id: Id, request: Request) -> Response {
    call(agents, Dialect::Messages, id, request).await
}

async fn call(agents: Agents, dialect: Dialect, id: Id, request: Request) -> Response {
    let span = tracing::error_span!(
        "call",
        agent.dialect = dialect.name(),
        session.id = tracing::field::Empty,
        call.id = tracing::field::Empty
    );
    otlp::continue_trace(&span, request.headers());
    let outcome = admit(agents.clone(), dialect, id, request).instrument(span.clone()).await;
    match outcome {
        Ok(call) => answer::respond(call).instrument(span).await,
        Err(error) => span.in_scope(|| {
            agents.metrics().call_ended(dialect.name(), error.code());
            answer::error(dialect, &error)
        }),
    }
}

/// Finds the session, and reads and parses the call.
async fn admit(agents: Agents, dialect: Dialect, id: Id, request: Request) -> Result<Call, DialectError> {
    let (parts, body) = request.into_parts();
    let answer_by = answer_by(&agents, &parts.headers);
    let (permit, body) = read(&agents, id, &parts.headers, body).await?;
    let times = Times { arrived: Instant::now(), answer_by };
    Call::parse(agents, dialect, permit, &parts.headers, body, times).await
}

/// When a call without events must be answered: before its client gives up.
fn answer_by(agents: &Agents, headers: &HeaderMap) -> Instant {
    // The clients in Python and in TypeScript have different names for it.
    let names = ["x-stainless-read-timeout", "x-stainless-timeout"];
    let timeout = names.into_iter().find_map(|name| number(headers, name));
    let patience = timeout.map_or(agents.options().hold, |seconds| {
        let timeout = Duration::from_secs(seconds.into());
        if timeout > 2 * ANSWER_BEFORE { timeout.saturating_sub(ANSWER_BEFORE) } else { timeout / 2 }
    });
    Instant::now() + patience
}

/// The permission for a call, and its body. A refused call is read to its end, because its client would not see the
/// answer otherwise.
async fn read(
    agents: &Agents,
    id: Id,
    headers: &HeaderMap,
    body: Body,
) -> Result<(CallPermit, ReadBody), DialectError> {
    let permit = match permit(agents, id, headers).await {
        Ok(permit) => permit,
        Err(error) => {
            body::discard(body).await;
            return Err(error);
        }
    };
    let session = permit.session_id();
    let mut body = body::read(agents, session, body).await?;
    body::pay_structure(agents, session, &mut body).await?;
    Ok((permit, body))
}

async fn permit(agents: &Agents, id: Id, headers: &HeaderMap) -> Result<CallPermit, DialectError> {
    let key = key(headers).ok_or(DialectError::Unauthorized)?;
    let id = id.map(|Path(id)| id.parse::<SessionId>()).transpose().map_err(|_| DialectError::Unauthorized)?;
    if headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
        let why = "is not supported; send the body without compression".to_owned();
        return Err(DialectError::Unsupported { field: "Content-Encoding".to_owned(), why });
    }
    let permit = match agents.buffer().session_for_call(id, key, Duration::ZERO).await {
        Err(BufferError::Refused(Refusal::SessionBusy(_))) => {
            let wait = answer_by(agents, headers).saturating_duration_since(Instant::now());
            wait_for_place(agents, id, key, wait).await
        }
        permit => permit,
    };
    let permit = permit.map_err(refusal::of)?;
    tracing::Span::current().record("session.id", tracing::field::display(permit.session_id()));
    Ok(permit)
}

/// Waits until the session has fewer calls in flight, unless the service stops.
async fn wait_for_place(
    agents: &Agents,
    id: Option<SessionId>,
    key: &str,
    wait: Duration,
) -> Result<CallPermit, BufferError> {
    let mut draining = agents.draining();
    tokio::select! {
        permit = agents.buffer().session_for_call(id, key, wait) => permit,
        // Its client repeats the call.
        () = async { drop(draining.wait_for(|draining| *draining).await) } => {
            agents.buffer().session_for_call(id, key, Duration::ZERO).await
        }
    }
}

/// The key of a session, where any of the clients puts it.
fn key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    // A client that has both sends its usual credential as the other.
    let keys = [bearer, text("x-api-key"), text("api-key")];
    keys.into_iter().flatten().find(|key| SessionKey::is_like(key))
}

async fn models(State(agents): State<Agents>, id: Id, headers: HeaderMap) -> Response {
    let dialect = Dialect::of_headers(&headers);
    match permit(&agents, id, &headers).await {
        Ok(permit) => {
            let names = permit.models().into_iter();
            let models: Vec<Model<'_>> =
                names.map(|name| Model { name, context_tokens: context_tokens(&agents, &permit, name) }).collect();
            answer::json(dialect.models(&models, agents.buffer().now().unix_s()))
        }
        Err(error) => answer::error(dialect, &error),
    }
}

/// One model, which may be any name that the session knows.
async fn model(
    State(agents): State<Agents>,
    Path(names): Path<HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let dialect = Dialect::of_headers(&headers);
    let id = names.get("id").cloned().map(Path);
    let name = names.get("model").map(String::as_str).unwrap_or_default();
    let found = async {
        let permit = permit(&agents, id, &headers).await?;
        permit.policy(name).map_err(|refusal| refusal::of(refusal.into()))?;
        Ok::<_, DialectError>(context_tokens(&agents, &permit, name))
    };
    match found.await {
        Ok(context_tokens) => {
            answer::json(dialect.model(&Model { name, context_tokens }, agents.buffer().now().unix_s()))
        }
        Err(error) => answer::error(dialect, &error),
    }
}

/// The size of the context of a model's engine, if the configuration says it.
fn context_tokens(agents: &Agents, permit: &CallPermit, model: &str) -> Option<u32> {
    let upstreams = agents.upstreams();
    let route = match permit.policy(model).ok()? {
        Some(policy) => upstreams.of_policy(&policy.policy),
        None => upstreams.of_model(model),
    };
    route.ok()?.upstream.options().context_tokens
}

/// The count is exact where the service renders the prompts, and an estimate where only the engine has the tokenizer.
async fn count_tokens(State(agents): State<Agents>, id: Id, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    match read(&agents, id, &parts.headers, body).await {
        Ok((permit, body)) => {
            let known = counting::prompt_tokens(&agents, &permit, &parts.headers, &body).await;
            answer::json(token_count(&body.bytes, known))
        }
        Err(error) => answer::error(Dialect::Messages, &error),
    }
}

/// Some agents ask whether the address answers before they call. It reveals nothing about sessions.
async fn probe() -> Response {
    answer::json(b"{\"status\":\"ok\"}".to_vec())
}

async fn no_such_path(request: Request) -> Response {
    let what = format!("the path {}", request.uri().path());
    let dialect = Dialect::of_headers(request.headers());
    body::discard(request.into_body()).await;
    answer::error(dialect, &DialectError::NotFound { what })
}

/// Refuses a request whose end is ambiguous and closes its connection, because the next bytes may not be a request.
async fn check_framing(request: Request, next: Next) -> Response {
    let why = match framing::of(&request) {
        Framing::Clear => return next.run(request).await,
        Framing::TwoLengths => "send either Content-Length or Transfer-Encoding, not both",
        Framing::UnknownCoding => "Transfer-Encoding must be chunked, once",
    };
    let error = DialectError::Invalid { field: "headers".to_owned(), why: why.to_owned() };
    let mut response = answer::error(Dialect::of_headers(request.headers()), &error);
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Answers a call whose handler panicked, which is a bug. The service continues.
#[expect(clippy::needless_pass_by_value, reason = "the signature is tower-http's")]
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    tracing::error!(error = message.unwrap_or("without a message"), "a call of an agent failed with a panic");
    answer::error(Dialect::Chat, &DialectError::Internal)
}
