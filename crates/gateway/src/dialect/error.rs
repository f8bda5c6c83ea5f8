//! Why a call cannot be answered, whatever the dialect.
//!
//! Separate from `errors`, which writes it in the shape of a dialect: whatever reads a body or calls an engine
//! reports it.
//!
//! The clients of all dialects repeat 408, 409, 429 and every 5xx, and obey `x-should-retry`. So an error that a repeat
//! cannot cure is a 400 or another 4xx that they do not repeat, and every error says whether to repeat.

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
    /// The agent was given up: another attempt of its session has begun.
    #[error("this agent was given up: {why}")]
    Superseded {
        /// Which attempt has begun.
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
            // Clients repeat it unless they are told not to, which they are.
            Self::Superseded { .. } => 409,
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
            Self::Superseded { .. } => "superseded",
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

    /// The field that is wrong, if it is one.
    pub(super) fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } | Self::Unsupported { field, .. } => Some(field),
            _ => None,
        }
    }
}
