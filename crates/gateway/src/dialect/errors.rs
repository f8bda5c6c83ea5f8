//! What an agent is told when its call cannot be answered, in the shape of its dialect.

use serde_json::{Value, json};

use super::{Dialect, envelope::Envelope, error::DialectError, responses, sse::SseEvent};

/// An error as an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorReply {
    /// The HTTP status.
    pub status: u16,
    /// Names and values: `content-type`, `x-should-retry`, and `retry-after` where a repeat may succeed.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Vec<u8>,
}

pub(super) fn reply(dialect: Dialect, error: &DialectError) -> ErrorReply {
    let mut headers =
        vec![("content-type", "application/json".to_owned()), ("x-should-retry", error.should_retry().to_string())];
    if let Some(seconds) = error.retry_after_s() {
        headers.push(("retry-after", seconds.to_string()));
    }
    ErrorReply { status: error.status(), headers, body: body(dialect, error).to_string().into_bytes() }
}

pub(super) fn event(dialect: Dialect, error: &DialectError, envelope: &Envelope, sent: usize) -> SseEvent {
    match dialect {
        Dialect::Chat => SseEvent::unnamed(&body(dialect, error)),
        Dialect::Messages => SseEvent::named("error", &body(dialect, error)),
        Dialect::Responses => responses::failed(error.code(), &openai_message(error), envelope, sent),
    }
}

fn body(dialect: Dialect, error: &DialectError) -> Value {
    match dialect {
        Dialect::Chat | Dialect::Responses => json!({"error": openai(error)}),
        Dialect::Messages => json!({"type": "error", "error": anthropic(error)}),
    }
}

fn openai(error: &DialectError) -> Value {
    let kind = if error.should_retry() { "server_error" } else { "invalid_request_error" };
    json!({"message": openai_message(error), "type": kind, "param": error.field(), "code": error.code()})
}

fn openai_message(error: &DialectError) -> String {
    match error {
        // Some agents compare with the beginning of this sentence instead of the code.
        DialectError::ContextLength { detail } => format!("This model's maximum context length is exceeded: {detail}"),
        other => other.to_string(),
    }
}

fn anthropic(error: &DialectError) -> Value {
    let kind = match error.status() {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        400..500 => "invalid_request_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    let message = match error {
        // Agents compare with the beginning of this sentence, and read the numbers behind it.
        DialectError::ContextLength { detail } => format!("prompt is too long: {detail}"),
        other => other.to_string(),
    };
    json!({"type": kind, "message": message})
}
