//! Why an engine did not answer a call.

use super::{fault::Fault, kind::EngineKind};
use crate::dialect::{DialectError, RETRY_AFTER_S};

/// Why an engine did not answer a call. No message contains a credential or a URL.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UpstreamError {
    /// The options cannot be used.
    #[error("{why}")]
    Options {
        /// What is wrong with them.
        why: String,
    },
    /// No connection could be opened, or it broke.
    #[error("{why}")]
    Unreachable {
        /// How it failed.
        why: String,
    },
    /// The engine was silent for longer than the idle timeout.
    #[error("the engine sent nothing for {seconds} s")]
    Silent {
        /// The idle timeout.
        seconds: u64,
    },
    /// The engine refused the request as wrong.
    #[error("the engine refused the request with status {status}: {message}")]
    Refused {
        /// Its status.
        status: u16,
        /// Its words, shortened.
        message: String,
    },
    /// The prompt does not fit into the engine's context.
    #[error("the engine says that the prompt is too long: {message}")]
    ContextLength {
        /// Its words, shortened.
        message: String,
    },
    /// The engine is overloaded or paused.
    #[error("the engine is busy: {message}")]
    Busy {
        /// Its words, shortened.
        message: String,
        /// When to repeat.
        retry_after_s: u32,
    },
    /// The engine failed.
    #[error("the engine failed with status {status}: {message}")]
    Failed {
        /// Its status.
        status: u16,
        /// Its words, shortened.
        message: String,
    },
    /// The answer was larger than the bound.
    #[error("the answer is larger than {bytes_max} bytes")]
    TooLarge {
        /// The bound.
        bytes_max: usize,
    },
    /// The engine aborted the call and all its repeats.
    #[error("the engine aborted the call {times} times")]
    Aborted {
        /// How often.
        times: u32,
    },
    /// The answer cannot be recorded.
    #[error("{fault}; {remedy}")]
    Untrusted {
        /// What is wrong.
        fault: Fault,
        /// What to do about it.
        remedy: &'static str,
    },
}

/// The most numbers of an engine's words that an agent sees.
const NUMBERS_MAX: usize = 4;

impl UpstreamError {
    pub(super) fn untrusted(fault: Fault, kind: EngineKind) -> Self {
        let remedy = fault.remedy(kind);
        Self::Untrusted { fault, remedy }
    }

    /// A word for metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Options { .. } => "options",
            Self::Unreachable { .. } => "unreachable",
            Self::Silent { .. } => "silent",
            Self::Refused { .. } => "refused",
            Self::ContextLength { .. } => "context-length",
            Self::Busy { .. } => "busy",
            Self::Failed { .. } => "failed",
            Self::TooLarge { .. } => "too-large",
            Self::Aborted { .. } => "aborted",
            Self::Untrusted { .. } => "untrusted",
        }
    }

    /// Whether the engine says that it ended the call for its own reasons.
    pub(super) fn is_abort(&self) -> bool {
        match self {
            Self::Busy { message, .. } | Self::Refused { message, .. } | Self::Failed { message, .. } => {
                let lower = message.to_lowercase();
                lower.contains("aborted") || lower.starts_with("abort")
            }
            _ => false,
        }
    }
}

impl From<&UpstreamError> for DialectError {
    /// What the agent is told. The engine's own words are left out, because they may contain addresses and passwords of
    /// what is behind it. Whoever reports the error logs them.
    fn from(error: &UpstreamError) -> Self {
        match error {
            UpstreamError::Untrusted { .. } => Self::Untrusted { why: error.to_string() },
            UpstreamError::ContextLength { message } => Self::ContextLength { detail: numbers(message) },
            UpstreamError::Refused { status: status @ (400 | 413 | 422), .. } => {
                let why = format!("was refused by the engine with status {status}; the log of the service says why");
                Self::Invalid { field: "body".to_owned(), why }
            }
            UpstreamError::Busy { retry_after_s, .. } => {
                Self::Busy { why: "the engine is busy".to_owned(), retry_after_s: *retry_after_s }
            }
            UpstreamError::Aborted { .. } => Self::Busy { why: error.to_string(), retry_after_s: RETRY_AFTER_S },
            UpstreamError::Options { .. } => Self::Internal,
            // An engine that is restarted comes back, and so does one behind a proxy that answers for it.
            UpstreamError::Unreachable { .. } | UpstreamError::Failed { status: 502 | 504, .. } => {
                Self::Busy { why: "the engine cannot be reached".to_owned(), retry_after_s: RETRY_AFTER_S }
            }
            // With these statuses, a proxy says that the engine was too slow or that requests are in each other's way.
            UpstreamError::Refused { status: status @ (408 | 409 | 425), .. }
            | UpstreamError::Failed { status, .. } => {
                Self::Upstream { why: format!("the engine failed with status {status}") }
            }
            UpstreamError::Silent { .. } | UpstreamError::TooLarge { .. } => Self::Upstream { why: error.to_string() },
            UpstreamError::Refused { status: 401, .. } => {
                Self::Refused { why: "the engine refused the key of its upstream".to_owned() }
            }
            UpstreamError::Refused { status, .. } => {
                Self::Refused { why: format!("the engine refused the request with status {status}") }
            }
        }
    }
}

/// The numbers in an engine's words about a prompt that is too long: some agents read how long it may be.
fn numbers(message: &str) -> String {
    let numbers = message.split(|character: char| !character.is_ascii_digit()).filter(|number| !number.is_empty());
    let numbers: Vec<&str> = numbers.take(NUMBERS_MAX).collect();
    if numbers.is_empty() {
        "the engine refused the prompt".to_owned()
    } else {
        format!("{} tokens", numbers.join(", "))
    }
}
