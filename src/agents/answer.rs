//! Answers to agents: a body, events with signs of life before them, or an error in the dialect's own shape.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, HttpBody},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use forebay_gateway::{Dialect, DialectError, work};
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tracing::Instrument as _;

use super::{
    body,
    call::{Answer, Call, answer_bytes},
};
use crate::buffer::ids::CallPk;

type Answering = Pin<Box<dyn Future<Output = Result<Written, DialectError>> + Send>>;

/// An answer as its client gets it.
struct Written {
    bytes: Bytes,
    recorded: Option<CallPk>,
}

/// Answers a call. No event is sent before the call is recorded, so the events are one text.
async fn write(call: Arc<Call>) -> Result<Written, DialectError> {
    let Answer { completion, envelope, recorded } = Arc::clone(&call).answer().await?;
    let write = || {
        if call.request.stream {
            call.dialect.events(&completion, &envelope).map(|event| event.encode()).collect::<String>().into()
        } else {
            Bytes::from(call.dialect.answer(&completion, &envelope))
        }
    };
    let bytes = work::run(answer_bytes(&completion), write).await;
    Ok(Written { bytes: body::pay(&call, bytes).await?, recorded })
}

/// Answers a call. The status of events waits for the first sign of life, because clients understand the status of an
/// error better than an error among events.
pub(super) async fn respond(call: Call) -> Response {
    let call = Arc::new(call);
    let mut answering: Answering = Box::pin(write(Arc::clone(&call)).in_current_span());
    if !call.request.stream {
        return match answering.await {
            Ok(written) => json(Body::new(AnswerBody::complete(&call, written))),
            Err(error) => failed(&call, &error),
        };
    }
    let keep_alive = call.agents.options().keep_alive;
    let body = match tokio::time::timeout(keep_alive, &mut answering).await {
        Ok(Ok(written)) => AnswerBody::complete(&call, written),
        Ok(Err(error)) => return failed(&call, &error),
        Err(_) => AnswerBody::waiting(&call, answering, keep_alive),
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-store"));
    // Proxies must pass each event on at once.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// A body of JSON.
pub(super) fn json(body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// An error in the shape of a dialect.
pub(super) fn error(dialect: Dialect, error: &DialectError) -> Response {
    let reply = dialect.error(error);
    tracing::debug!(error = %error, http.status = reply.status, "a call was refused");
    let mut response = json(reply.body);
    *response.status_mut() = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in reply.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    response
}

fn failed(call: &Call, found: &DialectError) -> Response {
    call.count(found.code());
    error(call.dialect, found)
}

/// The body of an answer. When its end is taken, the call counts as delivered: nothing better is known, because a socket
/// accepts bytes that nobody reads.
struct AnswerBody {
    state: State,
    /// Held until the answer is delivered, so that a finish waits for it.
    call: Arc<Call>,
    recorded: Option<CallPk>,
}

enum State {
    Waiting { answering: Answering, keep_alive: Duration, next: Pin<Box<Sleep>> },
    Sending(Bytes),
}

impl AnswerBody {
    fn complete(call: &Arc<Call>, written: Written) -> Self {
        Self { state: State::Sending(written.bytes), call: Arc::clone(call), recorded: written.recorded }
    }

    fn waiting(call: &Arc<Call>, answering: Answering, keep_alive: Duration) -> Self {
        // The first sign of life is sent at once, with the status.
        let next = Box::pin(tokio::time::sleep_until(Instant::now()));
        Self { state: State::Waiting { answering, keep_alive, next }, call: Arc::clone(call), recorded: None }
    }
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        loop {
            match &mut this.state {
                State::Waiting { answering, keep_alive, next } => {
                    if let Poll::Ready(outcome) = answering.as_mut().poll(context) {
                        this.state = match outcome {
                            Ok(written) => {
                                this.recorded = written.recorded;
                                State::Sending(written.bytes)
                            }
                            Err(error) => {
                                this.call.count(error.code());
                                let event = this.call.dialect.error_event(&error, &this.call.own_envelope());
                                State::Sending(event.encode().into())
                            }
                        };
                        continue;
                    }
                    std::task::ready!(next.as_mut().poll(context));
                    next.as_mut().reset(Instant::now() + *keep_alive);
                    let sign = Bytes::from(this.call.dialect.keep_alive());
                    return Poll::Ready(Some(Ok(Frame::data(sign))));
                }
                State::Sending(bytes) if bytes.is_empty() => return Poll::Ready(None),
                State::Sending(bytes) => {
                    if let Some(call) = this.recorded.take() {
                        this.call.agents.buffer().mark_delivered(call);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.state, State::Sending(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Waiting { .. } => SizeHint::default(),
            State::Sending(bytes) => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}
