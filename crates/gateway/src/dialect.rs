//! What agents speak: one file per dialect, each with the same functions.
//!
//! A dialect parses a body into a [`Request`], and writes a [`Completion`] as a body or as [`Events`]. All functions are
//! pure: ids and time come in an [`Envelope`].

mod chat;
pub(crate) mod client_tool;
mod client_tools;
mod envelope;
pub(crate) mod error;
mod errors;
mod events;
mod fields;
mod messages;
mod references;
mod responses;
mod sse;
mod tools;

pub use client_tool::{ClientTool, ClientTools, called};
pub use envelope::{Envelope, Model};
pub use error::DialectError;
pub(crate) use error::RETRY_AFTER_S;
pub use errors::ErrorReply;
pub use events::Events;
pub use messages::token_count;
pub use references::{References, message_of, not_found, response_id};
pub use sse::SseEvent;

pub(crate) use fields::is_taken;

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
        let mut references = References::default();
        match self.parse_with(body, &mut references)? {
            Some(request) => Ok(request),
            None => Err(references.missing()),
        }
    }

    /// The same for a request that may name answers instead of sending them. `None` if some of them are not there yet:
    /// `references` then says which.
    pub fn parse_with(self, body: &[u8], references: &mut References) -> Result<Option<Request>, DialectError> {
        structure::check(body)?;
        let request = match self {
            Self::Chat => chat::parse(body),
            Self::Messages => messages::parse(body),
            Self::Responses => responses::parse(body, references),
        }?;
        if references.is_incomplete() {
            return Ok(None);
        }
        structure::check_arguments(&request)?;
        Ok(Some(request))
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

    /// Writes an error as an answer with a status and headers.
    #[must_use]
    pub fn error(self, error: &DialectError) -> ErrorReply {
        errors::reply(self, error)
    }

    /// Writes the list of models.
    #[must_use]
    pub fn models(self, models: &[Model<'_>], created_s: u64) -> Vec<u8> {
        match self {
            Self::Chat | Self::Responses => chat::models(models, created_s),
            Self::Messages => messages::models(models),
        }
    }

    /// Writes one model.
    #[must_use]
    pub fn model(self, model: &Model<'_>, created_s: u64) -> Vec<u8> {
        let entry = match self {
            Self::Chat | Self::Responses => chat::model(model, created_s),
            Self::Messages => messages::model(model),
        };
        entry.to_string().into_bytes()
    }
}
