//! What an agent is told when its call cannot be answered, in the shape of its dialect.
//!
//! The clients of all dialects repeat 408, 409, 429 and every 5xx, and obey `x-should-retry`. So an error that a repeat
//! cannot cure is a 400 or another 4xx that they do not repeat, and every error says whether to repeat.

use serde_json::{Value, json};

use super::{Dialect, Envelope, SseEvent, responses};

/// When a call is worth repeating, in seconds, if the engine named no time.
pub(crate) const RETRY_AFTER_S: u32 = 5;

/// Why a call cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialectError {
    /// A field of the body is wrong.
    #[error("{field}: {why}")]
    Invalid {
        /// The path of the field, such as `messages[2].content`.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// A field asks for something that sessions cannot do, such as images.
    #[error("{field}: {why}")]
    Unsupported {
        /// The path of the field.
        field: String,
        /// What cannot be done.
        why: String,
    },
    /// The conversation is longer than the context, or the session has reached one of its bounds. Agents end their work
    /// or compact the conversation.
    #[error("the prompt is too long: {detail}")]
    ContextLength {
        /// By how much: see [`DialectError::too_long`].
        detail: String,
    },
    /// The session has ended.
    #[error("the session is closed: {why}")]
    Closed {
        /// How it ended.
        why: String,
    },
    /// The key is missing or wrong.
    #[error("the key is missing or does not belong to this session")]
    Unauthorized,
    /// There is no such session, model or path.
    #[error("{what} does not exist")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// The body is larger than the bound.
    #[error("the body is larger than {bytes_max} bytes")]
    BodyTooLarge {
        /// The bound.
        bytes_max: u64,
    },
    /// The call may succeed later: the engine is paused, overloaded or gone.
    #[error("{why}")]
    Busy {
        /// What the call waits for.
        why: String,
        /// When to repeat.
        retry_after_s: u32,
    },
    /// The engine's answer cannot be recorded, because it failed the check.
    #[error("the engine's answer cannot be recorded: {why}")]
    Untrusted {
        /// What the check found, with the remedy.
        why: String,
    },
    /// The engine refuses every call: its key, its address or the model's name is wrong in the configuration.
    #[error("{why}")]
    Refused {
        /// How it refused.
        why: String,
    },
    /// The engine failed.
    #[error("the engine failed: {why}")]
    Upstream {
        /// How it failed.
        why: String,
    },
    /// The service failed.
    #[error("internal error")]
    Internal,
}

impl DialectError {
    pub(crate) fn invalid(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), why: why.into() }
    }

    pub(crate) fn unsupported(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { field: field.into(), why: why.into() }
    }

    /// The prompt has `tokens` tokens, and the context `tokens_max`. Some agents read both numbers from the message.
    #[must_use]
    pub fn too_long(tokens: u64, tokens_max: u64) -> Self {
        Self::ContextLength { detail: format!("{tokens} tokens > {tokens_max} maximum") }
    }

    /// Whether the call was refused because of a part of a message that sessions cannot record.
    #[must_use]
    pub fn is_unsupported_part(&self) -> bool {
        matches!(self, Self::Unsupported { field, .. } if ["messages[", "input[", "system["].iter().any(|list| field.starts_with(list)))
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::Invalid { .. } | Self::ContextLength { .. } | Self::Closed { .. } | Self::Refused { .. } => 400,
            Self::Unauthorized => 401,
            Self::NotFound { .. } => 404,
            Self::BodyTooLarge { .. } => 413,
            Self::Unsupported { .. } => 422,
            Self::Internal => 500,
            Self::Untrusted { .. } | Self::Upstream { .. } => 502,
            Self::Busy { .. } => 503,
        }
    }

    /// Whether a repeat of the same call may succeed.
    #[must_use]
    pub fn should_retry(&self) -> bool {
        self.status() >= 500
    }

    /// When to repeat the call, if a repeat may succeed.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Busy { retry_after_s, .. } => Some(*retry_after_s),
            other => other.should_retry().then_some(RETRY_AFTER_S),
        }
    }

    /// A stable word for programs: `code` in the dialects of OpenAI.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid-request",
            Self::Unsupported { .. } => "unsupported",
            // The word of OpenAI, which agents compare with.
            Self::ContextLength { .. } => "context_length_exceeded",
            Self::Closed { .. } => "session-closed",
            // The word of OpenAI.
            Self::Unauthorized => "invalid_api_key",
            Self::NotFound { .. } => "not-found",
            Self::BodyTooLarge { .. } => "body-too-large",
            Self::Busy { .. } => "busy",
            Self::Untrusted { .. } => "upstream-untrusted",
            Self::Refused { .. } => "upstream-refused",
            Self::Upstream { .. } => "upstream-failed",
            Self::Internal => "internal",
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } | Self::Unsupported { field, .. } => Some(field),
            _ => None,
        }
    }
}

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
