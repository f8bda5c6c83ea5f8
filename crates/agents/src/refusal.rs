//! Refusals of the buffer in the words of the dialects. This is the only place that maps them.

use forebay_domain::refusal::Refusal;
use forebay_gateway::DialectError;
use forebay_service::error::BufferError;

/// When an agent repeats a call that the store, or its session, could not take.
const RETRY_AFTER_S: u32 = 1;

/// What an agent is told.
pub(crate) fn of(error: BufferError) -> DialectError {
    match error {
        BufferError::Refused(refusal) => of_refusal(&refusal),
        BufferError::Store(error) => {
            tracing::error!(error = %error, "a call of an agent failed because the store cannot answer");
            DialectError::Busy { why: "the store cannot answer".to_owned(), retry_after_s: RETRY_AFTER_S }
        }
    }
}

fn of_refusal(refusal: &Refusal) -> DialectError {
    let why = refusal.to_string();
    match refusal {
        Refusal::UnknownSessionKey => DialectError::Unauthorized,
        Refusal::SessionEnded(_) | Refusal::SessionReset(_) => DialectError::Closed { why },
        Refusal::AttemptSuperseded { .. } => DialectError::Superseded { why },
        // Agents know how to go on, or to end, when their context is full.
        Refusal::SessionFull(_) => DialectError::ContextLength { detail: why },
        Refusal::SessionBusy(_) => DialectError::Busy { why, retry_after_s: RETRY_AFTER_S },
        Refusal::UnknownModel(name) => DialectError::NotFound { what: format!("the model `{name}`") },
        Refusal::Invalid(violations) => {
            let parts: Vec<String> = violations.iter().map(|v| format!("{} {}", v.pointer, v.detail)).collect();
            DialectError::Untrusted { why: parts.join("; ") }
        }
        _ => {
            tracing::error!(error = %refusal, "a call of an agent was refused for a reason that calls do not have");
            DialectError::Internal
        }
    }
}
