//! Errors as RFC 9457 problems. This is the only place that maps errors of the buffer to HTTP.
//!
//! A handler returns a [`Failure`]. [`render`] adds the request's id, writes it as a problem document, counts it and
//! logs it.

use std::any::Any;

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use forebay_domain::refusal::Refusal;
use forebay_service::error::BufferError;
use forebay_store::error::StoreError;
use forebay_wire::{PROBLEM_JSON, Problem, Violation};
use serde_json::{Value, json};

use crate::Api;

/// Seconds to wait before a retry, if nothing better is known.
const RETRY_AFTER_S: u64 = 1;

/// The problem of a session whose engine is not ready. It is logged as a refusal: the probe logs that the engine is not
/// ready, once.
pub const UPSTREAM_NOT_READY: &str = "upstream-not-ready";

/// The most bytes of one text of a problem. The bound exists because texts quote input of any length.
const TEXT_BYTES_MAX: usize = 1 << 10;

/// The most bytes of all violations of a problem. At least one violation is always included.
const ERRORS_BYTES_MAX: usize = 12 << 10;

/// The most bytes of all violations in a line of a bulk response, which may have thousands of lines.
const LINE_ERRORS_BYTES_MAX: usize = 2 << 10;

/// A failed request: the problem for the client, and the cause for the log only.
#[derive(Clone, Debug)]
#[must_use]
pub struct Failure {
    problem: Box<Problem>,
    source: Option<Box<str>>,
}

impl Failure {
    pub fn new(status: StatusCode, kind: &str, title: &str) -> Self {
        let problem =
            Problem { kind: kind.to_owned(), title: title.to_owned(), status: status.as_u16(), ..Problem::default() };
        Self { problem: Box::new(problem), source: None }
    }

    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.problem.detail = Some(shortened(detail.into()));
        self
    }

    pub fn retry(mut self) -> Self {
        self.problem.retry_after_s = Some(RETRY_AFTER_S);
        self
    }

    pub fn violations(mut self, violations: Vec<Violation>) -> Self {
        let violations = bounded(violations, ERRORS_BYTES_MAX);
        if let [first, others @ ..] = violations.as_slice() {
            let at = if first.pointer.is_empty() { String::new() } else { format!("{}: ", first.pointer) };
            let more = if others.is_empty() { String::new() } else { format!("; {} more in `errors`", others.len()) };
            self.problem.detail = Some(shortened(format!("{at}{}{more}", first.detail)));
        }
        self.problem.errors = violations;
        self
    }

    /// The request is invalid.
    pub fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::from(Refusal::invalid(pointer, detail))
    }

    pub fn not_acceptable(detail: &str) -> Self {
        Self::new(StatusCode::NOT_ACCEPTABLE, "not-acceptable", "None of the accepted media types is available")
            .detail(detail)
    }

    /// The store cannot write at the moment. The body is not read, because it could not be stored.
    pub fn unwritable() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "store-unavailable", "The store cannot write")
            .detail("the body was not read; retry after a pause")
            .retry()
    }

    pub fn into_problem(self) -> Problem {
        *self.problem
    }

    /// Adds to a 404 that the request named no policy, so that only the default policy was searched.
    pub fn unnamed_policy(mut self) -> Self {
        if self.problem.status == StatusCode::NOT_FOUND.as_u16()
            && let Some(detail) = &mut self.problem.detail
        {
            detail.push_str("; the request names no other `policy`");
        }
        self
    }

    /// The problem for a line of a bulk response.
    pub fn into_line(self) -> Problem {
        let mut problem = self.into_problem();
        problem.errors = bounded(problem.errors, LINE_ERRORS_BYTES_MAX);
        problem
    }

    /// Removes the leading index from every pointer, for a body that is a single object and not a bundle.
    pub fn of_single_object(mut self) -> Self {
        let strip = |pointer: &mut String| {
            if let Some(rest) = pointer.strip_prefix("/0") {
                *pointer = rest.to_owned();
            }
        };
        self.problem.errors.iter_mut().for_each(|violation| strip(&mut violation.pointer));
        let errors = std::mem::take(&mut self.problem.errors);
        if errors.is_empty() {
            return self;
        }
        let detail = self.problem.detail.clone();
        let mut failure = self.violations(errors);
        if matches!(&*failure.problem.kind, "rollout-conflict" | "score-conflict") {
            // They say more than their violation does.
            failure.problem.detail = detail;
        }
        failure
    }
}

/// Keeps as many of the first violations as fit.
fn bounded(violations: Vec<Violation>, bytes_max: usize) -> Vec<Violation> {
    let mut bytes = 0;
    let mut kept = Vec::new();
    for Violation { pointer, detail } in violations {
        let violation = Violation { pointer: shortened(pointer), detail: shortened(detail) };
        bytes += violation.pointer.len() + violation.detail.len();
        if bytes > bytes_max && !kept.is_empty() {
            break;
        }
        kept.push(violation);
    }
    kept
}

/// Cuts off the end of a text that is too long.
fn shortened(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text.push('…');
        text.shrink_to_fit();
    }
    text
}

impl From<BufferError> for Failure {
    fn from(error: BufferError) -> Self {
        match error {
            BufferError::Refused(refusal) => refusal.into(),
            BufferError::Store(StoreError::Corrupt(found)) => {
                let mut failure = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The store is corrupt");
                failure.source = Some(found.into());
                failure
            }
            BufferError::Store(error) => {
                let mut failure =
                    Self::new(StatusCode::SERVICE_UNAVAILABLE, "store-unavailable", "The store cannot answer")
                        .detail("whether the request took effect is not known; repeating an idempotent request is safe")
                        .retry();
                failure.source = Some(error.to_string().into());
                failure
            }
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        use StatusCode as S;
        let detail = refusal.to_string();
        let (status, kind, title) = match &refusal {
            Refusal::Invalid(_) => (S::UNPROCESSABLE_ENTITY, "invalid", "The request is invalid"),
            Refusal::NoMemory => (S::SERVICE_UNAVAILABLE, "overloaded", "Too many bytes are in flight"),
            Refusal::UnknownPolicy(_) => (S::NOT_FOUND, "unknown-policy", "No such policy"),
            Refusal::Unknown(_)
            | Refusal::UnknownId(_)
            | Refusal::UnknownInPolicy { .. }
            | Refusal::UnknownWork { .. }
            | Refusal::UnknownModel(_) => (S::NOT_FOUND, "not-found", "Not found"),
            Refusal::RolloutConflict { .. } => {
                (S::CONFLICT, "rollout-conflict", "A different rollout has this identity")
            }
            Refusal::GroupSizeConflict { .. } => (S::CONFLICT, "group-size-conflict", "The group has another size"),
            Refusal::BacklogFull(_) => (S::TOO_MANY_REQUESTS, "backlog-full", "The policy's backlog is full"),
            Refusal::NotEvaluated(_) => (S::SERVICE_UNAVAILABLE, "rules-changing", "The policy's rules keep changing"),
            Refusal::ScoreConflict { .. } => (S::CONFLICT, "score-conflict", "The scorer has given another value"),
            Refusal::ScoresChanged => (S::SERVICE_UNAVAILABLE, "rules-changing", "The scores keep changing"),
            Refusal::BundleOverBacklog(_) => {
                (S::PAYLOAD_TOO_LARGE, "bundle-over-backlog", "The bundle is larger than the policy's backlog")
            }
            Refusal::LeaseLost(_) => (S::CONFLICT, "lease-lost", "The lease is lost"),
            Refusal::AlreadyAcked(_) => (S::CONFLICT, "already-acked", "The batch was acked by another step"),
            Refusal::StepSettled { .. } => (S::CONFLICT, "step-settled", "The step is settled"),
            Refusal::StepUnknown { .. } => (S::CONFLICT, "step-unknown", "The step is above the last acked one"),
            Refusal::Superseded { .. } => (S::CONFLICT, "superseded", "The epoch is superseded"),
            Refusal::AttemptSuperseded { .. } => {
                (S::CONFLICT, "attempt-over", "Another attempt of the session has begun")
            }
            Refusal::NoAttemptsLeft(_) => (S::CONFLICT, "no-attempts-left", "The session has had all its attempts"),
            Refusal::LineageGap(_) => (S::CONFLICT, "lineage-gap", "The lineage would have a gap"),
            Refusal::VersionConflict(_) => (S::CONFLICT, "version-conflict", "The version is not new"),
            Refusal::GroupDecided(_) => (S::CONFLICT, "group-decided", "The group's state does not allow this"),
            Refusal::BatchState(_) => (S::CONFLICT, "batch-state", "The batch's state does not allow this"),
            Refusal::Purged | Refusal::ContentPurged { .. } => (S::GONE, "purged", "The payloads are purged"),
            Refusal::Damaged | Refusal::DamagedContent { .. } => {
                (S::INTERNAL_SERVER_ERROR, "damaged", "A stored payload is damaged")
            }
            Refusal::SessionEnded(_) => (S::CONFLICT, "session-ended", "The session has ended"),
            Refusal::SessionReset(_) => (S::CONFLICT, "session-reset", "A policy of the session was reset"),
            Refusal::SessionChanged => (S::SERVICE_UNAVAILABLE, "session-changing", "The session keeps changing"),
            Refusal::SessionConflict(_) => (S::CONFLICT, "session-conflict", "A different session has this rollout"),
            Refusal::EndConflict(_) => (S::CONFLICT, "end-conflict", "The session ended with other content"),
            Refusal::NoTurns => (S::UNPROCESSABLE_ENTITY, "no-turns", "The session has no calls"),
            Refusal::TeacherFailed { .. } => {
                (S::SERVICE_UNAVAILABLE, "teacher-failed", "The teacher did not score the segments")
            }
            Refusal::NoRoom(..) => (S::TOO_MANY_REQUESTS, "no-room", "There is no room for another rollout"),
            Refusal::SessionFull(_) => (S::BAD_REQUEST, "session-full", "The session is full"),
            Refusal::SessionBusy(_) => (S::SERVICE_UNAVAILABLE, "session-busy", "The session has many calls in flight"),
            Refusal::TooManyKeys(_) | Refusal::TooManySessionKeys(_) => (S::CONFLICT, "too-many-keys", "Too many keys"),
            Refusal::TooManyPolicies(_) => (S::CONFLICT, "too-many-policies", "Too many policies"),
            Refusal::PoliciesOverQuota { .. } | Refusal::BacklogOverQuota { .. } => {
                (S::CONFLICT, "over-quota", "A quota of the service does not allow this")
            }
            Refusal::FirstKey => (S::CONFLICT, "first-key", "The first key must be an operator's"),
            Refusal::PermissionEnded | Refusal::UnknownSessionKey => {
                (S::UNAUTHORIZED, "unauthorized", "A valid key is needed")
            }
            Refusal::TooManyUploads => (S::SERVICE_UNAVAILABLE, "too-many-uploads", "Too many uploads"),
            Refusal::TooManyWaiters { .. } | Refusal::TooManyWaitersOfKey { .. } => {
                (S::SERVICE_UNAVAILABLE, "too-many-waiters", "Too many requests are waiting")
            }
        };
        let failure = Self::new(status, kind, title).detail(detail.clone());
        match refusal {
            Refusal::Invalid(violations) => failure.violations(violations),
            Refusal::UnknownPolicy(name) => failure.detail(format!(
                "policy `{name}` does not exist: PUT /policies/{name} creates it, and so does its first rollout if \
                 the service has `auto_create` enabled"
            )),
            Refusal::RolloutConflict { index, verdict, .. } => {
                let violation = Violation { pointer: format!("/{index}"), detail: detail.clone() };
                let mut failure = failure.violations(vec![violation]);
                failure.problem.verdict = Some(verdict.into());
                failure.detail(detail)
            }
            Refusal::ScoreConflict { index, value, .. } => failure
                .violations(vec![Violation {
                    pointer: format!("/{index}/value"),
                    detail: format!("the scorer has given {value}"),
                }])
                .detail(detail),
            Refusal::GroupSizeConflict { index, size, .. } => failure.violations(vec![Violation {
                pointer: format!("/{index}/group_size"),
                detail: format!("the group has size {size}, fixed by its first rollout"),
            }]),
            Refusal::NoMemory
            | Refusal::NotEvaluated(_)
            | Refusal::ScoresChanged
            | Refusal::BacklogFull(_)
            | Refusal::NoRoom(..)
            | Refusal::SessionChanged
            | Refusal::TeacherFailed { .. }
            | Refusal::TooManyUploads
            | Refusal::TooManyWaiters { .. }
            | Refusal::TooManyWaitersOfKey { .. } => failure.retry(),
            _ => failure,
        }
    }
}

impl IntoResponse for Failure {
    /// Passes the failure to [`render`], which knows the request's id.
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Extension(self)).into_response()
    }
}

/// How a listener writes its errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorBody {
    /// As problem documents.
    #[default]
    Problem,
    /// As `FastAPI` does, which clients of other protocols expect: `detail` is a text, or the list of what is invalid.
    Detail,
}

impl ErrorBody {
    /// The body of an error, and its media type.
    fn write(self, problem: &Problem) -> (Vec<u8>, &'static str) {
        match self {
            Self::Problem => (serde_json::to_vec(problem).expect("a problem is plain text and numbers"), PROBLEM_JSON),
            Self::Detail => {
                let entry = |violation: &Violation| {
                    let path = violation.pointer.split('/').skip(1).map(|step| match step.parse::<u64>() {
                        Ok(index) => json!(index),
                        Err(_) => json!(step.replace("~1", "/").replace("~0", "~")),
                    });
                    let place: Vec<Value> = [json!("body")].into_iter().chain(path).collect();
                    let is_missing = violation.detail.starts_with("is required");
                    let kind = if is_missing { "missing" } else { "value_error" };
                    json!({"type": kind, "loc": place, "msg": violation.detail})
                };
                let invalid = problem.status == StatusCode::UNPROCESSABLE_ENTITY.as_u16();
                let detail = if invalid && !problem.errors.is_empty() {
                    Value::Array(problem.errors.iter().map(entry).collect())
                } else {
                    let detail = problem.detail.as_deref().map(|detail| format!(": {detail}"));
                    json!(format!("{}{}", problem.title, detail.unwrap_or_default()))
                };
                (json!({"detail": detail}).to_string().into_bytes(), "application/json")
            }
        }
    }
}

/// Writes a failure in the form of its listener, counts it and logs it.
pub fn render(mut response: Response, request_id: &str, api: &Api) -> Response {
    let Some(failure) = response.extensions_mut().remove::<Failure>() else { return response };
    let Failure { mut problem, source } = failure;
    api.metrics.refused(&problem.kind);
    problem.instance = Some(request_id.to_owned());
    if problem.status >= 500 && problem.kind != UPSTREAM_NOT_READY {
        tracing::error!(problem.kind = problem.kind, error = source.as_deref(), "request failed");
    } else {
        api.refusals.report(&problem);
    }
    let (body, media) = api.errors.write(&problem);
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    if problem.status == StatusCode::UNAUTHORIZED.as_u16() {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"forebay\""));
    }
    if let Some(seconds) = problem.retry_after_s {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    *response.body_mut() = Body::from(body);
    response
}

pub async fn not_found() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "no-such-route", "No such route").detail("see /docs for the routes")
}

pub async fn method_not_allowed() -> Failure {
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "The route does not allow this method")
}

/// Handles a panic, which is a bug: the request fails, and the service continues.
#[expect(clippy::needless_pass_by_value, reason = "the signature is tower-http's")]
pub fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    let mut failure = Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The service has a bug");
    failure.source = Some(format!("panic: {}", message.unwrap_or("without a message")).into());
    failure.into_response()
}
