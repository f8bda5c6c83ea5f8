//! Observability of requests: each request has a span with its id and is counted, and each failure becomes a problem
//! document.

use std::time::Instant;

use axum::{
    body::{Body, HttpBody as _},
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderValue},
    middleware::Next,
    response::Response,
};
use forebay_telemetry::otlp;
use http_body_util::BodyExt as _;
use tracing::Instrument as _;
use uuid::Uuid;

use crate::{
    Api,
    http::{
        budgets::{self as budget, HeldByRequest},
        problem,
    },
};

const REQUEST_ID: &str = "x-request-id";

/// The most bytes of a request id that a caller may choose.
const REQUEST_ID_BYTES_MAX: usize = 64;

pub(crate) async fn observe(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let request_id = request_id(request.headers());
    let method = request.method().clone();
    // The label is the route template, because paths contain ids and would make the number of labels unbounded.
    let route = request.extensions().get::<MatchedPath>().map_or("_unmatched", MatchedPath::as_str);
    let route = format!("{}{route}", api.route_prefix);
    let metrics = &api.metrics;
    // HTTP allows any token as a method, so only known methods become labels.
    let verb = match method.as_str() {
        verb @ ("GET" | "POST" | "PUT" | "HEAD" | "DELETE" | "OPTIONS" | "PATCH") => verb,
        _ => "_other",
    };
    let labels = [verb, route.as_str()];
    // The span has the highest level, so that log lines name their request at every log level.
    let span = tracing::error_span!(
        "request",
        request.id = %request_id,
        http.method = verb,
        http.route = route,
        http.status = tracing::field::Empty,
        key.id = tracing::field::Empty
    );
    otlp::continue_trace(&span, request.headers());
    let received = metrics.http.request_bytes.with_label_values(&labels);
    request = request.map(|body| count_bytes(body, received));

    let held = HeldByRequest::default();
    request.extensions_mut().insert(held.clone());

    let _count = metrics.serving();
    let started = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let elapsed = started.elapsed();
    response = span.in_scope(|| problem::render(response, &request_id, &api));
    response = budget::pay(&api.budgets.control, &method, response).await;
    response = span.in_scope(|| problem::render(response, &request_id, &api));
    drop(held);

    metrics.http.request_seconds.with_label_values(&labels).observe(elapsed.as_secs_f64());
    let status = response.status();
    metrics.http.requests.with_label_values(&[verb, &route, status.as_str()]).inc();
    span.in_scope(|| {
        tracing::debug!(http.status = status.as_u16(), elapsed_ms = elapsed.as_millis() as u64, "answered");
    });
    // Signed, because numbers without a sign are exported as text.
    span.record("http.status", i64::from(status.as_u16()));
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response.map(|body| count_bytes(body, metrics.http.response_bytes.with_label_values(&labels)))
}

/// The request id that the caller sent if it is safe to log, otherwise a new one.
fn request_id(headers: &HeaderMap) -> String {
    let fit = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    let sent = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(fit);
    sent.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned)
}

/// Counts the bytes of a body. A body of known length is counted immediately and stays unchanged; others are counted as
/// their frames pass.
fn count_bytes(body: Body, counter: prometheus::IntCounter) -> Body {
    if let Some(length) = body.size_hint().exact() {
        counter.inc_by(length);
        return body;
    }
    Body::new(body.map_frame(move |frame| {
        if let Some(data) = frame.data_ref() {
            counter.inc_by(data.len() as u64);
        }
        frame
    }))
}
