//! What the tests share.

use forebay_gateway::{
    Completion, Dialect, DialectError, Request,
    completion::{AssistantMessage, Finish, StopMatch, ToolCall, Usage, VersionSpan},
    dialect::{Envelope, SseEvent},
};
use serde_json::Value;

/// Parses a body that must be accepted.
pub(crate) fn parsed(dialect: Dialect, body: &Value) -> Request {
    parsed_text(dialect, &body.to_string())
}

/// Parses a body, given as text, that must be accepted.
pub(crate) fn parsed_text(dialect: Dialect, body: &str) -> Request {
    dialect.parse(body.as_bytes()).unwrap_or_else(|error| panic!("the body is accepted, but: {error}\n{body}"))
}

/// Parses a body that must be refused.
pub(crate) fn refused(dialect: Dialect, body: &Value) -> DialectError {
    match dialect.parse(body.to_string().as_bytes()) {
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
    Envelope { id: "7f3c".to_owned(), created_s: 1_700_000_000, model: "default".to_owned(), stream_usage: false }
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
        usage: Usage { prompt_tokens: 4, completion_tokens: 3, cached_tokens: Some(2) },
    }
}

/// A message with reasoning, a text with characters of several bytes, and two tool calls.
pub(crate) fn full_message() -> AssistantMessage {
    AssistantMessage {
        content: Some("I look for the größte number – 数字.".to_owned()),
        reasoning: Some("The user wants\nnumbers 🙂.".to_owned()),
        tool_calls: vec![
            call("call_1", "bash", r#"{"command": "ls -la", "b": 1, "a": 2}"#),
            call("call_2", "read", "{}"),
        ],
    }
}

/// A tool call.
pub(crate) fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.to_owned(), name: name.to_owned(), arguments: arguments.to_owned() }
}

/// The events of an answer.
pub(crate) fn events(dialect: Dialect, completion: &Completion) -> Vec<SseEvent> {
    dialect.events(completion, &envelope()).collect()
}

/// The answer as JSON.
pub(crate) fn answer(dialect: Dialect, completion: &Completion) -> Value {
    serde_json::from_slice(&dialect.answer(completion, &envelope())).expect("an answer is JSON")
}
