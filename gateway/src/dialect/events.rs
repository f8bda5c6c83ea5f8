//! One answer as events.

use super::{Dialect, DialectError, Envelope, SseEvent, chat, errors, messages, responses};
use crate::completion::Completion;

/// The events of one answer, in their order.
///
/// An answer is stored before the agent sees anything of it, because an engine that fails is asked again. Until then the
/// agent is sent events that say nothing: most clients end a call if no event came for some minutes, and do not count
/// comments and pings.
#[derive(Debug)]
pub struct Events {
    dialect: Dialect,
    /// The envelope of an answer that has begun.
    begun: Option<Envelope>,
    sent: usize,
}

impl Events {
    /// No events yet.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, begun: None, sent: 0 }
    }

    /// A sign of life: the beginning of the answer, and from then on an event that adds nothing to it.
    pub fn alive(&mut self, envelope: &Envelope) -> Vec<SseEvent> {
        let events = match (&self.begun, self.dialect) {
            (None, _) => self.beginning(envelope),
            (Some(begun), Dialect::Chat) => vec![chat::nothing(begun)],
            (Some(_), Dialect::Messages) => vec![messages::nothing()],
            (Some(begun), Dialect::Responses) => vec![responses::nothing(begun, self.sent)],
        };
        self.begun.get_or_insert_with(|| envelope.clone());
        self.sent += events.len();
        events
    }

    /// The rest of the answer. The dialect's last event (`[DONE]`, `message_stop`, `response.completed`) is there exactly
    /// once, at the end. An answer that has begun keeps the envelope that it began with.
    #[must_use]
    pub fn answer(&self, completion: &Completion, envelope: &Envelope) -> Vec<SseEvent> {
        let has_begun = self.begun.is_some();
        let beginning = match self.dialect {
            // Its first event has the usage, so it is written with the answer.
            Dialect::Messages => Vec::new(),
            Dialect::Chat | Dialect::Responses if has_begun => Vec::new(),
            Dialect::Chat | Dialect::Responses => self.beginning(envelope),
        };
        let envelope = self.begun.as_ref().unwrap_or(envelope);
        let sent = self.sent + beginning.len();
        let rest = match self.dialect {
            Dialect::Chat => chat::rest(completion, envelope),
            Dialect::Messages => messages::rest(completion, envelope, has_begun),
            Dialect::Responses => responses::rest(completion, envelope, sent),
        };
        beginning.into_iter().chain(rest).collect()
    }

    /// An error as the last event. The dialect's own last event does not follow, so the agent cannot take what came before
    /// for a whole answer.
    #[must_use]
    pub fn error(&self, error: &DialectError, envelope: &Envelope) -> SseEvent {
        errors::event(self.dialect, error, self.begun.as_ref().unwrap_or(envelope), self.sent)
    }

    fn beginning(&self, envelope: &Envelope) -> Vec<SseEvent> {
        match self.dialect {
            Dialect::Chat => vec![chat::begin(envelope)],
            Dialect::Messages => messages::begin(envelope),
            Dialect::Responses => vec![responses::begin(envelope), responses::nothing(envelope, 1)],
        }
    }
}
