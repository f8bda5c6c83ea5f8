//! What the tests share.

use std::{sync::Arc, time::Duration};

use forebay_fake_engine::{EngineKind, FakeEngine};
use forebay_gateway::{
    Completion, Dialect, DialectError, Request, Upstream, UpstreamError,
    completion::{AssistantMessage, Finish, Piece, StopMatch, ToolCall, Usage, VersionSpan},
    dialect::{Envelope, Events, SseEvent},
    upstream::{Answered, EngineCall, Sampling, UpstreamOptions},
};
use serde_json::Value;

/// Parses a body of a recorded call that must be accepted.
pub(crate) fn parsed(dialect: Dialect, body: &Value) -> Request {
    parsed_text(dialect, &body.to_string())
}

/// Parses a body, given as text, of a recorded call that must be accepted.
pub(crate) fn parsed_text(dialect: Dialect, body: &str) -> Request {
    let parsed = dialect.parse(body.as_bytes()).and_then(Request::recorded);
    parsed.unwrap_or_else(|error| panic!("the body is accepted, but: {error}\n{body}"))
}

/// Parses a body of a recorded call that must be refused.
pub(crate) fn refused(dialect: Dialect, body: &Value) -> DialectError {
    match dialect.parse(body.to_string().as_bytes()).and_then(Request::recorded).and_then(Request::without_images) {
        Ok(_) => panic!("the body is refused: {body}"),
        Err(error) => error,
    }
}

/// The field and the status of a refusal.
pub(crate) fn field_of(error: &DialectError) -> (&str, u16) {
    match error {
        DialectError::Invalid { field, .. } | DialectError::Unsupported { field, .. } => (field, error.status()),
        other => panic!("the error names no field: {other}"),
    }
}

/// An envelope with fixed values.
pub(crate) fn envelope() -> Envelope {
    Envelope {
        id: "7f3c".to_owned(),
        created_s: 1_700_000_000,
        model: "default".to_owned(),
        stream_usage: false,
        tools: Arc::default(),
    }
}

/// A completion of three ids with this message.
pub(crate) fn completion(message: AssistantMessage) -> Completion {
    let finish = if message.tool_calls.is_empty() { Finish::Stop } else { Finish::ToolCalls };
    Completion {
        prompt_tokens: vec![1, 2, 3, 4],
        tokens: vec![11, 12, 9],
        logprobs: vec![-0.1, -0.2, -0.3],
        spans: vec![VersionSpan { version: 5, start: 0, len: 3 }],
        version_assumed: false,
        finish,
        stop_matched: Some(StopMatch::Token(9)),
        message,
        usage: Usage { prompt_tokens: 4, completion_tokens: 3, cached_tokens: Some(2), reasoning_tokens: Some(1) },
        system_fingerprint: Some("engine-1".to_owned()),
    }
}

/// A message with reasoning, a text with characters of several bytes, and two tool calls.
pub(crate) fn full_message() -> AssistantMessage {
    AssistantMessage {
        content: Some("I look for the größte number – 数字.".to_owned()),
        reasoning: Some("The user wants\nnumbers 🙂.".to_owned()),
        tool_calls: vec![
            tool_call("call_1", "bash", r#"{"command": "ls -la", "b": 1, "a": 2}"#),
            tool_call("call_2", "read", "{}"),
        ],
    }
}

/// A tool call.
pub(crate) fn tool_call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.to_owned(), name: name.to_owned(), arguments: arguments.to_owned() }
}

/// The events of an answer.
pub(crate) fn events(dialect: Dialect, completion: &Completion) -> Vec<SseEvent> {
    late_events(dialect, completion, 0, 0)
}

/// The events of an answer before which there were so many signs of life, and of which so many pieces were sent, with a sign
/// of life behind each.
pub(crate) fn late_events(dialect: Dialect, completion: &Completion, signs: usize, pieces: usize) -> Vec<SseEvent> {
    let mut events = Events::new(dialect);
    let mut seen: Vec<_> = (0..signs).flat_map(|_| events.alive(&envelope())).collect();
    for piece in self::pieces(&completion.message).iter().take(pieces) {
        seen.extend(events.piece(piece, &envelope()));
        seen.extend((signs > 0).then(|| events.alive(&envelope())).into_iter().flatten());
    }
    // An answer that has begun keeps its id.
    let id = if seen.is_empty() { envelope().id } else { "repeated".to_owned() };
    seen.extend(events.answer(completion, &Envelope { id, ..envelope() }));
    seen
}

/// All pieces of a message that may be sent before its end, letter by letter.
pub(crate) fn pieces(message: &AssistantMessage) -> Vec<Piece> {
    let letters = |text: &str, piece: fn(String) -> Piece| -> Vec<Piece> {
        text.chars().map(|letter| piece(letter.to_string())).collect()
    };
    let mut pieces = letters(message.reasoning.as_deref().unwrap_or_default(), Piece::Reasoning);
    pieces.extend(letters(message.content.as_deref().unwrap_or_default(), Piece::Text));
    if let Some(ToolCall { id, name, arguments }) = message.tool_calls.first() {
        pieces.push(Piece::Call { id: id.clone(), name: name.clone() });
        pieces.extend(letters(arguments.trim_end_matches('}'), Piece::Arguments));
    }
    pieces
}

/// Signs of life and pieces before the answer: to the middle of the thought, of the text, and of the first call.
pub(crate) const LATE: [(usize, usize); 9] =
    [(0, 0), (1, 0), (3, 0), (0, 1), (1, 2), (0, 40), (1, 62), (0, 70), (1, usize::MAX)];

/// The answer as JSON.
pub(crate) fn answer(dialect: Dialect, completion: &Completion) -> Value {
    serde_json::from_slice(&dialect.answer(completion, &envelope())).expect("an answer is JSON")
}

/// All dialects.
pub(crate) const DIALECTS: [Dialect; 3] = [Dialect::Chat, Dialect::Messages, Dialect::Responses];

/// All kinds of engines.
pub(crate) const KINDS: [EngineKind; 3] = [EngineKind::Sglang, EngineKind::Vllm, EngineKind::Openai];

/// Options for these engines, which do not wait before a repeat.
pub(crate) fn options(kind: EngineKind, engines: &[&FakeEngine]) -> UpstreamOptions {
    let urls = engines.iter().map(|engine| engine.url());
    let options = UpstreamOptions::new("test", kind, urls).expect("the engines' URLs are usable");
    UpstreamOptions { repeat_delay: Duration::ZERO, ..options }
}

/// An engine, and a client of it.
pub(crate) async fn start(kind: EngineKind) -> (FakeEngine, Upstream) {
    let engine = FakeEngine::start(kind).await;
    let upstream = Upstream::new(options(kind, &[&engine])).expect("the options are usable");
    (engine, upstream)
}

/// A request of one question.
pub(crate) fn question(text: &str) -> Request {
    parsed(Dialect::Chat, &serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]}))
}

/// A call with room for 1000 tokens, in a session named `session`.
pub(crate) fn call(request: &Request) -> EngineCall<'_> {
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    let version = &|| 7;
    EngineCall {
        request,
        model: "fake",
        sampling,
        max_tokens: request.max_tokens_within(Some(1000)),
        exact: None,
        streaming: None,
        session: "session",
        rid: "rid",
        version,
    }
}

/// Asks a question.
pub(crate) async fn ask(upstream: &Upstream, text: &str) -> Result<Answered, UpstreamError> {
    upstream.complete(&call(&question(text))).await
}

/// A client for the engine's other paths.
pub(crate) fn plain_client() -> reqwest::Client {
    forebay_client::install_tls_provider();
    reqwest::Client::new()
}
