//! What agents speak: one file per dialect, each with the same functions.
//!
//! A dialect parses a body into a [`Request`], and writes a [`Completion`] as a body or as events. The events are made
//! from the complete answer, because an answer is stored before the agent sees its end. All functions are pure: ids
//! and time come in an [`Envelope`].

mod chat;
mod errors;
mod fields;
mod messages;
mod responses;
mod sse;
mod tools;

pub(crate) use errors::RETRY_AFTER_S;
pub use errors::{DialectError, ErrorReply};
pub use messages::token_count;
pub use sse::{SseEvent, keep_alive_comment};

pub(crate) use fields::{is_taken, recorded};

use http::HeaderMap;

use crate::{completion::Completion, request::Request, structure};

/// The API that an agent uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI chat completions.
    Chat,
    /// Anthropic Messages.
    Messages,
    /// OpenAI Responses.
    Responses,
}

/// What an answer contains besides the completion.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// A unique id of letters, digits, `-` and `_`. Each dialect puts its own prefix before it.
    pub id: String,
    /// Seconds since 1970.
    pub created_s: u64,
    /// The model as the agent named it.
    pub model: String,
    /// Whether the events of chat completions contain the usage: [`Request::stream_usage`].
    pub stream_usage: bool,
}

impl Dialect {
    /// A word for logs and for the stored calls.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// The dialect in which a client expects the list of models, which has the same path in all dialects.
    #[must_use]
    pub fn of_headers(headers: &HeaderMap) -> Self {
        if headers.contains_key("anthropic-version") { Self::Messages } else { Self::Chat }
    }

    /// Parses the body of a call. An error names the field. If the call is recorded, [`Request::recorded`] follows.
    pub fn parse(self, body: &[u8]) -> Result<Request, DialectError> {
        structure::check(body)?;
        let request = match self {
            Self::Chat => chat::parse(body),
            Self::Messages => messages::parse(body),
            Self::Responses => responses::parse(body),
        }?;
        structure::check_arguments(&request)?;
        Ok(request)
    }

    /// Writes the body of an answer.
    #[must_use]
    pub fn answer(self, completion: &Completion, envelope: &Envelope) -> Vec<u8> {
        match self {
            Self::Chat => chat::answer(completion, envelope),
            Self::Messages => messages::answer(completion, envelope),
            Self::Responses => responses::answer(completion, envelope),
        }
    }

    /// Writes an answer as events.
    ///
    /// The first event that the agent may act on, because it contains a tool call or says that the answer is complete,
    /// and all events behind it, are marked with `SseEvent::after_commit`. The caller sends them after the completion
    /// is stored. The dialect's last event
    /// (`[DONE]`, `message_stop`, `response.completed`) is there exactly once, at the end.
    pub fn events(self, completion: &Completion, envelope: &Envelope) -> impl Iterator<Item = SseEvent> + use<> {
        let events = match self {
            Self::Chat => chat::events(completion, envelope),
            Self::Messages => messages::events(completion, envelope),
            Self::Responses => responses::events(completion, envelope),
        };
        events.into_iter()
    }

    /// What is sent while the engine works, so that neither the agent nor a proxy gives up.
    #[must_use]
    pub fn keep_alive(self) -> String {
        match self {
            Self::Chat | Self::Responses => keep_alive_comment(),
            Self::Messages => messages::ping(),
        }
    }

    /// Writes an error as an answer with a status and headers.
    #[must_use]
    pub fn error(self, error: &DialectError) -> ErrorReply {
        errors::reply(self, error)
    }

    /// Writes an error as the last event of a stream that has already begun. No terminal event follows it, so the agent
    /// cannot take what came before for a whole answer.
    #[must_use]
    pub fn error_event(self, error: &DialectError, envelope: &Envelope) -> SseEvent {
        errors::event(self, error, envelope)
    }

    /// Writes the list of models.
    #[must_use]
    pub fn models(self, names: &[&str], created_s: u64) -> Vec<u8> {
        match self {
            Self::Chat | Self::Responses => chat::models(names, created_s),
            Self::Messages => messages::models(names),
        }
    }
}
