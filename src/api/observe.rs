//! What every request leaves behind: a span with its id, counters, and a problem document when it failed.

use std::time::Instant;

use axum::{
    body::{Body, HttpBody as _},
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderValue},
    middleware::Next,
    response::Response,
};
use http_body_util::BodyExt as _;
use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    Api,
    budget::{self, HeldByRequest},
    problem,
};

const REQUEST_ID: &str = "x-request-id";

/// Longest request id that a caller may choose.
const REQUEST_ID_BYTES_MAX: usize = 64;

pub(super) async fn observe(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let request_id = request_id(request.headers());
    let method = request.method().clone();
    // The template, not the path: paths hold ids, and would make labels unbounded.
    let route = request.extensions().get::<MatchedPath>().map_or("_unmatched", MatchedPath::as_str).to_owned();
    let metrics = &api.metrics;
    // Any token is a method; only these are labels.
    let verb = match method.as_str() {
        verb @ ("GET" | "POST" | "PUT" | "HEAD" | "DELETE" | "OPTIONS" | "PATCH") => verb,
        _ => "_other",
    };
    let labels = [verb, route.as_str()];
    let span = tracing::info_span!(
        "request",
        request.id = %request_id,
        http.method = verb,
        http.route = route,
        key.id = tracing::field::Empty
    );
    let received = metrics.request_bytes.with_label_values(&labels);
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

    metrics.request_seconds.with_label_values(&labels).observe(elapsed.as_secs_f64());
    let status = response.status();
    metrics.requests.with_label_values(&[verb, &route, status.as_str()]).inc();
    span.in_scope(|| {
        tracing::debug!(http.status = status.as_u16(), elapsed_ms = elapsed.as_millis() as u64, "answered");
    });
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response.map(|body| count_bytes(body, metrics.response_bytes.with_label_values(&labels)))
}

/// The caller's id where it is fit for a log, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let fit = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    let sent = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(fit);
    sent.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned)
}

/// Counts a body of known length at once, so that it keeps it, and any other as its frames pass.
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
