//! Answers to agents: a body, events with signs of life before them, or an error in the dialect's own shape.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use axum::{
    body::{Body, HttpBody},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use forebay_bounds::budget::{FREE_ANSWER_BYTES, paid};
use forebay_bounds::work;
use forebay_domain::ids::CallPk;
use forebay_gateway::{
    Dialect, DialectError,
    completion::Piece,
    dialect::{Events, SseEvent},
    upstream::Streaming,
};
use hyper::body::{Frame, SizeHint};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    time::MissedTickBehavior,
};
use tracing::Instrument as _;

use crate::{
    body::{overloaded, owner},
    call::{Answer, Call, answer_bytes},
    orphans::{Answering, Unanswered},
};

/// An answer as its client gets it.
struct Written {
    bytes: Bytes,
    recorded: Option<CallPk>,
}

/// Answers a call.
pub(crate) async fn respond(mut call: Call) -> Response {
    if !call.request.stream {
        let call = Arc::new(call);
        let answered = Unanswered::new(&call).await;
        return match written(&call, answered, None).await {
            Ok(written) => with_stale_after(&call, json(Body::new(AnswerBody::complete(&call, written)))),
            Err(error) => failed(&call, &error),
        };
    }
    let (sender, mut pieces) = mpsc::unbounded_channel();
    // Whoever has the receiver polls the call, so it is there.
    call.streaming = Some(Streaming::new(Arc::clone(&call.tools), move |piece| drop(sender.send(piece))));
    let call = Arc::new(call);
    // The events of a recorded answer have its id, so it is looked for before any event is sent.
    let mut answering: Answering = match call.begin().await {
        Ok(Some(replayed)) => Box::pin(std::future::ready(Ok(replayed))),
        Ok(None) => Box::pin(Arc::clone(&call).answer_anew().in_current_span()),
        Err(error) => return failed(&call, &error),
    };
    let mut events = Events::new(call.dialect);
    // The status waits for the first event, because clients understand the status of an error better than an error among
    // events.
    let body = tokio::select! {
        biased;
        answered = &mut answering => match written(&call, answered, Some((&mut events, &mut pieces))).await {
            Ok(written) => AnswerBody::complete(&call, written),
            Err(error) => return failed(&call, &error),
        },
        first = pieces.recv() => AnswerBody::streaming(&call, Stream { events, answering, pieces, first }),
        () = tokio::time::sleep(call.agents.options().keep_alive) => {
            AnswerBody::streaming(&call, Stream { events, answering, pieces, first: None })
        }
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-store"));
    // Proxies must pass each event on at once.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    with_stale_after(&call, response)
}

/// After how many versions the rollout of the call is too old to be trained.
pub(crate) const STALE_AFTER: HeaderName = HeaderName::from_static("forebay-stale-after-versions");

/// Adds what a runner may want to know of the rollout, as it was when the call began.
fn with_stale_after(call: &Call, mut response: Response) -> Response {
    let policy = call.permit.policy(&call.request.model).ok().flatten();
    if let Some(versions) = policy.and_then(|policy| policy.stale_after) {
        response.headers_mut().insert(STALE_AFTER, versions.into());
    }
    response
}

/// Writes an answer, or what is left of its events.
async fn written(
    call: &Call,
    answered: Result<Answer, DialectError>,
    events: Option<(&mut Events, &mut UnboundedReceiver<Piece>)>,
) -> Result<Written, DialectError> {
    let Answer { completion, envelope, recorded } = answered?;
    let write = || match events {
        Some((events, pieces)) => {
            let mut all = Vec::new();
            while let Ok(piece) = pieces.try_recv() {
                all.extend(events.piece(&piece, &envelope));
            }
            all.extend(events.answer(&completion, &envelope));
            encoded(&all)
        }
        None => Bytes::from(call.dialect.answer(&completion, &envelope)),
    };
    let bytes = work::run(answer_bytes(&completion), write).await;
    Ok(Written { bytes: pay(call, bytes).await?, recorded })
}

/// Takes bytes of the budget for an answer until it is written or the connection ends. A client that does not read would
/// make the service hold answers otherwise. If there is no room in time, the client repeats the call and gets the
/// recorded answer.
async fn pay(call: &Call, answer: Bytes) -> Result<Bytes, DialectError> {
    if answer.len() <= FREE_ANSWER_BYTES {
        return Ok(answer);
    }
    let patience = if call.request.stream {
        call.agents.options().read_timeout
    } else {
        call.times.answer_by.saturating_duration_since(Instant::now())
    };
    let taking =
        call.agents.0.bytes.take_more(owner(call.permit.session_id()), call.body_bytes(), answer.len(), patience);
    let share = taking.await.map_err(|_| overloaded())?;
    Ok(paid(answer, share))
}

fn encoded(events: &[SseEvent]) -> Bytes {
    events.iter().map(SseEvent::encode).collect::<String>().into()
}

/// An answer that is written while it is sampled.
struct Stream {
    events: Events,
    answering: Answering,
    pieces: UnboundedReceiver<Piece>,
    first: Option<Piece>,
}

impl Stream {
    /// Writes pieces of the answer and signs of life until the answer is known, and then the rest of it or an error.
    async fn write(self, call: Arc<Call>, parts: UnboundedSender<Written>) {
        let Self { mut events, mut answering, mut pieces, first } = self;
        let envelope = call.own_envelope();
        // Whoever has the receiver polls this function, so it is there.
        // No bytes would be the end of the body.
        let send = |events: &[SseEvent]| {
            if !events.is_empty() {
                let _ = parts.send(Written { bytes: encoded(events), recorded: None });
            }
        };
        // The first sign of life is sent at once, with the status.
        let mut signs = tokio::time::interval(call.agents.options().keep_alive);
        signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
        if let Some(first) = first {
            send(&events.piece(&first, &envelope));
            signs.reset();
        }
        let answered = loop {
            tokio::select! {
                biased;
                Some(piece) = pieces.recv() => send(&events.piece(&piece, &envelope)),
                answered = &mut answering => break answered,
                _ = signs.tick() => send(&events.alive(&envelope)),
            }
        };
        let last = written(&call, answered, Some((&mut events, &mut pieces))).await.unwrap_or_else(|error| {
            call.count(error.code());
            Written { bytes: events.error(&error, &envelope).encode().into(), recorded: None }
        });
        let _ = parts.send(last);
    }
}

pub(crate) fn json(body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A saved state, with what it belongs to.
pub(crate) fn octets(content: Bytes, call: u32, attempt: u32) -> Response {
    let mut response = Response::new(Body::from(content));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(HeaderName::from_static("forebay-call"), call.into());
    headers.insert(HeaderName::from_static("forebay-attempt"), attempt.into());
    response
}

/// An error in the shape of a dialect.
pub(crate) fn error(dialect: Dialect, error: &DialectError) -> Response {
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
    Whole(Bytes),
    /// What is written of an answer arrives in parts while the function is polled that writes them.
    Parts {
        writing: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
        parts: UnboundedReceiver<Written>,
    },
}

impl AnswerBody {
    fn complete(call: &Arc<Call>, written: Written) -> Self {
        Self { state: State::Whole(written.bytes), call: Arc::clone(call), recorded: written.recorded }
    }

    fn streaming(call: &Arc<Call>, stream: Stream) -> Self {
        let (sender, parts) = mpsc::unbounded_channel();
        let writing = Box::pin(stream.write(Arc::clone(call), sender).in_current_span());
        Self { state: State::Parts { writing: Some(writing), parts }, call: Arc::clone(call), recorded: None }
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
        let bytes = match &mut this.state {
            State::Whole(bytes) => std::mem::take(bytes),
            State::Parts { writing, parts } => {
                if writing.as_mut().is_some_and(|writing| writing.as_mut().poll(context).is_ready()) {
                    *writing = None;
                }
                let part = std::task::ready!(parts.poll_recv(context));
                let Some(Written { bytes, recorded }) = part else { return Poll::Ready(None) };
                this.recorded = recorded;
                bytes
            }
        };
        if let Some(call) = this.recorded.take() {
            this.call.agents.buffer().mark_delivered(call);
        }
        Poll::Ready((!bytes.is_empty()).then_some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.state, State::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            State::Parts { .. } => SizeHint::default(),
        }
    }
}
