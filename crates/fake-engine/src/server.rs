//! The HTTP side of the fake engine.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::{
    body::{Body, Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::mpsc::{self, UnboundedReceiver},
    task::JoinSet,
};

use crate::{
    EngineKind, IdFault, Received, State, Switches,
    score::ScoreRequest,
    tokenizer,
    wire::{self, ChatRequest, Sampled},
};

/// The connection is to be closed instead of an answer.
#[derive(Debug, thiserror::Error)]
#[error("the connection is cut")]
struct Cut;

impl From<Infallible> for Cut {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// A body, and whether the connection is cut behind it.
struct Pieces {
    body: Option<Bytes>,
    /// The events behind it.
    events: Option<UnboundedReceiver<Bytes>>,
    cut: Option<Cut>,
    is_flushed: bool,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Some(body) = self.body.take() {
            return Poll::Ready(Some(Ok(Frame::data(body))));
        }
        if let Some(events) = &mut self.events {
            match std::task::ready!(events.poll_recv(context)) {
                Some(event) => return Poll::Ready(Some(Ok(Frame::data(event)))),
                None => self.events = None,
            }
        }
        if self.cut.is_some() && !self.is_flushed {
            // hyper writes what it has when a body is not ready. Otherwise the client would not even see the head.
            self.is_flushed = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.cut.take().map(Err))
    }
}

pub(super) async fn run(listener: TcpListener, state: Arc<State>) {
    // Dropping the set closes the connections.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        // Events of an answer are written one by one, as real engines do.
        let _ = stream.set_nodelay(true);
        state.log.send_modify(|log| log.connections += 1);
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let service = service_fn(|request| serve(&state, request));
            // A connection that breaks is what some tests want.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn serve(state: &Arc<State>, request: Request<Incoming>) -> Result<Response<Pieces>, Cut> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
    let path = head.uri.path().to_owned();
    let headers = head
        .headers
        .iter()
        .map(|(name, value)| (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    let text = String::from_utf8_lossy(&body).into_owned();
    let received = Received { path: path.clone(), headers: headers.collect(), text };
    let value = received.json();
    state.log.send_modify(|log| log.received.push(received));
    match (head.method, path.as_str()) {
        (Method::POST, "/v1/chat/completions") => call(state, Endpoint::Chat, &body).await,
        (Method::POST, "/inference/v1/generate") if state.kind == EngineKind::Vllm => {
            call(state, Endpoint::Ids, &body).await
        }
        (Method::POST, "/generate") if state.kind == EngineKind::Sglang => {
            let scores = value["sampling_params"]["max_new_tokens"] == json!(0);
            call(state, if scores { Endpoint::Score } else { Endpoint::Generate }, &body).await
        }
        (Method::POST, "/v1/completions") if state.kind == EngineKind::Vllm => {
            call(state, Endpoint::Score, &body).await
        }
        (Method::POST, "/v1/chat/completions/derender") if state.kind == EngineKind::Vllm => {
            let is_part = value["stream"] == true;
            let fails = take(
                state,
                |switches| {
                    if is_part { &mut switches.part_failures } else { &mut switches.parse_failures }
                },
            );
            if fails {
                return Ok(reply(500, &json!({"error": {"message": "the parser broke"}})));
            }
            let switches = state.switches.borrow().clone();
            Ok(wire::derender(&value, &switches)
                .map_or_else(|why| refusal(state.kind, why), |answer| reply(200, &answer)))
        }
        (Method::POST, "/v1/chat/completions/render") if state.kind == EngineKind::Vllm => {
            let rendered = state.switches.borrow().rendered.clone();
            Ok(match rendered {
                Some(text) => reply(200, &json!({"token_ids": tokenizer::encode(&text)})),
                None => reply(404, &json!({"error": {"message": "no such path"}})),
            })
        }
        (Method::POST, "/separate_reasoning") if state.kind == EngineKind::Sglang => {
            Ok(reply(200, &wire::separate_reasoning(&value)))
        }
        (Method::POST, "/parse_function_call") if state.kind == EngineKind::Sglang => {
            Ok(reply(200, &wire::parse_calls(&value)))
        }
        (Method::GET, "/v1/models") => Ok(reply(200, &models(state))),
        (Method::GET, "/health") => Ok(reply(200, &json!({}))),
        (Method::POST, path) => Ok(control(state, path, &value)),
        _ => Ok(reply(404, &json!({"error": {"message": "no such path"}}))),
    }
}

/// The list of models, in which an adapter names its model and has no context of its own.
fn models(state: &State) -> Value {
    let switches = state.switches.borrow();
    let owner = match state.kind {
        EngineKind::Sglang => "sglang",
        EngineKind::Vllm => "vllm",
        EngineKind::Openai => "someone",
    };
    let base = json!({
        "id": "fake", "object": "model", "owned_by": owner, "root": "/models/fake", "parent": null,
        "max_model_len": switches.context_tokens,
    });
    let adapters = switches
        .adapters
        .iter()
        .map(|name| json!({"id": name, "object": "model", "owned_by": owner, "parent": "fake", "max_model_len": null}));
    let data: Vec<Value> = std::iter::once(base).chain(adapters).collect();
    json!({"object": "list", "data": data})
}

/// What a trainer or an operator sends.
fn control(state: &State, path: &str, body: &Value) -> Response<Pieces> {
    match path {
        "/abort_request" => {
            let rid = body["rid"].as_str().unwrap_or_default().to_owned();
            state.log.send_modify(|log| {
                log.aborted.insert(rid);
            });
            if body["abort_all"] == json!(true) {
                abort_all(state);
            }
        }
        "/pause_generation" | "/pause" => {
            state.switches.send_modify(|switches| switches.stall = true);
            if body["mode"].as_str().unwrap_or("abort") == "abort" {
                abort_all(state);
            }
        }
        "/continue_generation" | "/resume" => state.switches.send_modify(|switches| switches.stall = false),
        "/update_weight_version" => {
            let version = body["new_version"].as_str().unwrap_or_default().to_owned();
            state.switches.send_modify(|switches| switches.weight_version = version);
            // The default of SGLang, which ends all calls in flight.
            if body["abort_all_requests"] != json!(false) {
                abort_all(state);
            }
        }
        _ => return reply(404, &json!({"error": {"message": "no such path"}})),
    }
    reply(200, &json!({"success": true}))
}

/// Aborts all calls that wait now.
fn abort_all(state: &State) {
    state.log.send_modify(|log| log.aborts_of_all += 1);
}

/// What a call is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Chat,
    /// vLLM's endpoint of ids.
    Ids,
    /// SGLang's endpoint of ids.
    Generate,
    /// The endpoint that scores given ids.
    Score,
}

async fn call(state: &Arc<State>, endpoint: Endpoint, body: &[u8]) -> Result<Response<Pieces>, Cut> {
    let guard = Abandoned { state, answered: false };
    let answer = answer(state, endpoint, body).await;
    guard.answered();
    answer
}

async fn answer(state: &Arc<State>, endpoint: Endpoint, body: &[u8]) -> Result<Response<Pieces>, Cut> {
    if take(state, |switches| &mut switches.cuts_before_head) {
        return Err(Cut);
    }
    if let Some((status, text)) = failure(state) {
        return Ok(response(status, text.into_bytes(), None));
    }
    if endpoint == Endpoint::Score {
        return score(state, body).await;
    }
    let parsed = match endpoint {
        Endpoint::Score | Endpoint::Chat => serde_json::from_slice(body),
        Endpoint::Ids => ChatRequest::of_vllm_ids(body),
        Endpoint::Generate => ChatRequest::of_sglang_ids(body),
    };
    let mut request: ChatRequest = match parsed {
        Ok(request) => request,
        Err(error) => return Ok(refusal(state.kind, &error.to_string())),
    };
    request.messages.iter_mut().for_each(|message| message.prepare(state.kind));
    let switches = state.switches.borrow().clone();
    // Only SGLang's chat endpoint takes ids.
    let renders = matches!(switches.id_fault, IdFault::Rendered | IdFault::NoneInChat);
    if endpoint == Endpoint::Chat && (state.kind != EngineKind::Sglang || renders) {
        request.input_ids = None;
    }
    if let Some(why) = request.refusal(state.kind, &switches) {
        return Ok(refusal(state.kind, &why));
    }
    let mut sampled = sample(state, &request, &switches);
    let aborted = stall(state, request.rid.as_deref().unwrap_or_default(), |switches| switches.stall).await;
    if aborted || take(state, |switches| &mut switches.aborts) {
        sampled = sampled.aborted();
    }
    if !sampled.is_aborted() {
        state.log.send_modify(|log| log.sampled_tokens += sampled.ids.len());
    }
    // Weights may have changed while the call waited, but not those of ids that were sampled before.
    let switches = if sampled.is_aborted() { switches } else { state.switches.borrow().clone() };
    let answer = match endpoint {
        Endpoint::Score | Endpoint::Chat => request.answer(state.kind, sampled, &switches),
        Endpoint::Ids => request.answer_vllm_ids(sampled, &switches),
        Endpoint::Generate => request.answer_sglang_ids(sampled, &switches),
    };
    if request.as_events && switches.sends_events {
        return Ok(stream(state, &request, &answer));
    }
    let mut text = answer.to_string().into_bytes();
    text.resize(text.len() + switches.padding, b' ');
    let cut = take(state, |switches| &mut switches.cuts_in_body).then_some(Cut);
    Ok(response(200, text, cut))
}

/// The answer of vLLM's endpoint of ids as events.
fn stream(state: &Arc<State>, request: &ChatRequest, answer: &Value) -> Response<Pieces> {
    let mut events = ChatRequest::events_of_vllm_ids(answer);
    let cut = take(state, |switches| &mut switches.cuts_in_body).then_some(Cut);
    let is_cut = cut.is_some();
    if is_cut {
        events.truncate(events.len() / 2);
    }
    let (sender, receiver) = mpsc::unbounded_channel();
    let (state, rid) = (Arc::clone(state), request.rid.clone().unwrap_or_default());
    tokio::spawn(async move {
        let encode = |data: &str| Bytes::from(format!("data: {data}\n\n"));
        for (place, event) in events.iter().enumerate() {
            let holds = |switches: &Switches| switches.hold_behind.is_some_and(|count| count <= place);
            let aborted = tokio::select! {
                () = sender.closed() => return state.log.send_modify(|log| log.abandoned += 1),
                aborted = stall(&state, &rid, holds) => aborted,
            };
            if aborted {
                let end = json!({"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]});
                let _ = sender.send(encode(&end.to_string()));
                break;
            }
            let _ = sender.send(encode(&event.to_string()));
        }
        if !is_cut {
            let _ = sender.send(encode("[DONE]"));
        }
    });
    let mut response = response(200, Vec::new(), cut);
    response.body_mut().events = Some(receiver);
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/event-stream"));
    response
}

async fn score(state: &State, body: &[u8]) -> Result<Response<Pieces>, Cut> {
    let request: ScoreRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return Ok(refusal(state.kind, &error.to_string())),
    };
    let switches = state.switches.borrow().clone();
    if let Some(why) = request.refusal(state.kind, &switches) {
        return Ok(refusal(state.kind, &why));
    }
    if stall(state, request.rid(), |switches| switches.stall || switches.stall_scores).await {
        return Ok(reply(400, &json!({"object": "error", "message": "Aborted", "code": 400})));
    }
    let text = request.answer(state.kind, &switches).to_string().into_bytes();
    let cut = take(state, |switches| &mut switches.cuts_in_body).then_some(Cut);
    Ok(response(200, text, cut))
}

fn sample(state: &State, request: &ChatRequest, switches: &Switches) -> Sampled {
    let scripts = state.scripts();
    request.sample(scripts.iter().rev().find_map(|(key, answers)| request.scripted(key, answers)), switches)
}

/// Waits as long as calls are kept waiting. True if the call was aborted meanwhile.
async fn stall(state: &State, rid: &str, holds: impl Fn(&Switches) -> bool) -> bool {
    if !holds(&state.switches.borrow()) {
        return false;
    }
    let mut log = state.log.subscribe();
    let before = log.borrow().aborts_of_all;
    let _stalled = Stalled::new(state);
    let mut switches = state.switches.subscribe();
    tokio::select! {
        _ = switches.wait_for(|switches| !holds(switches)) => false,
        _ = log.wait_for(|log| log.aborts_of_all > before || log.aborted.iter().any(|id| rid.starts_with(id))) => true,
    }
}

/// Uses up one of a number of faults.
fn take(state: &State, count: impl Fn(&mut Switches) -> &mut u32) -> bool {
    state.switches.send_if_modified(|switches| {
        let count = count(switches);
        let some = *count > 0;
        *count -= u32::from(some);
        some
    })
}

fn failure(state: &State) -> Option<(u16, String)> {
    let mut found = None;
    state.switches.send_if_modified(|switches| {
        if let Some((count @ 1.., status, text)) = &mut switches.failures {
            *count -= 1;
            found = Some((*status, text.clone()));
        }
        found.is_some()
    });
    found
}

/// The engines' own shapes of errors.
fn refusal(kind: EngineKind, why: &str) -> Response<Pieces> {
    match kind {
        EngineKind::Sglang => reply(400, &json!({"object": "error", "message": why, "code": 400})),
        EngineKind::Vllm | EngineKind::Openai => reply(400, &json!({"error": {"message": why, "code": 400}})),
    }
}

fn reply(status: u16, body: &Value) -> Response<Pieces> {
    response(status, body.to_string().into_bytes(), None)
}

fn response(status: u16, body: Vec<u8>, cut: Option<Cut>) -> Response<Pieces> {
    let mut body = Bytes::from(body);
    if cut.is_some() {
        body.truncate(body.len() / 2);
    }
    let mut response = Response::new(Pieces { body: Some(body), events: None, cut, is_flushed: false });
    *response.status_mut() = StatusCode::from_u16(status).expect("the status is one of HTTP");
    response
}

/// Counts a call whose connection the client closes.
struct Abandoned<'a> {
    state: &'a State,
    answered: bool,
}

impl Abandoned<'_> {
    fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.state.log.send_modify(|log| log.abandoned += 1);
        }
    }
}

/// Counts a call as long as it waits.
struct Stalled<'a>(&'a State);

impl<'a> Stalled<'a> {
    fn new(state: &'a State) -> Self {
        state.log.send_modify(|log| log.stalled += 1);
        Self(state)
    }
}

impl Drop for Stalled<'_> {
    fn drop(&mut self) {
        self.0.log.send_modify(|log| log.stalled -= 1);
    }
}
