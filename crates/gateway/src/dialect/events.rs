//! One answer as events.

use super::{Dialect, chat, envelope::Envelope, error::DialectError, errors, messages, responses, sse::SseEvent};
use crate::completion::{Completion, Piece};

/// The events of one answer, in their order.
///
/// The last ones wait until the answer is stored. Before that the agent is sent the pieces of the answer that the engine
/// has made, as far as no repeat of the call can make others, and otherwise events that say nothing: most clients end a
/// call if no event came for some minutes, and do not count comments and pings.
#[derive(Debug)]
pub struct Events {
    stream: Stream,
    /// The envelope of an answer that has begun.
    begun: Option<Envelope>,
    /// How much of the thought and of the text was sent, in bytes.
    reasoning: usize,
    text: usize,
    /// The same of the arguments of the first call, if it has begun.
    arguments: Option<usize>,
}

#[derive(Debug)]
enum Stream {
    Chat,
    Messages(messages::Stream),
    Responses(responses::Stream),
}

impl Events {
    /// No events yet.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        let stream = match dialect {
            Dialect::Chat => Stream::Chat,
            Dialect::Messages => Stream::Messages(messages::Stream::default()),
            Dialect::Responses => Stream::Responses(responses::Stream::default()),
        };
        Self { stream, begun: None, reasoning: 0, text: 0, arguments: None }
    }

    /// A sign of life: the beginning of the answer, and from then on an event that adds nothing to it.
    pub fn alive(&mut self, envelope: &Envelope) -> Vec<SseEvent> {
        let (has_begun, envelope) = self.begin(envelope);
        match &mut self.stream {
            Stream::Chat if has_begun => vec![chat::piece(&Piece::Text(String::new()), &envelope)],
            Stream::Chat => vec![chat::begin(&envelope)],
            Stream::Messages(stream) => stream.alive(&envelope),
            Stream::Responses(stream) => stream.alive(&envelope),
        }
    }

    /// A piece of the answer. Nothing that completes a tool call is among the events, because the client may run it then.
    pub fn piece(&mut self, piece: &Piece, envelope: &Envelope) -> Vec<SseEvent> {
        match piece {
            Piece::Reasoning(text) => self.reasoning += text.len(),
            Piece::Text(text) => self.text += text.len(),
            Piece::Call { .. } => self.arguments = Some(0),
            Piece::Arguments(text) => *self.arguments.get_or_insert_default() += text.len(),
        }
        let (has_begun, envelope) = self.begin(envelope);
        match &mut self.stream {
            Stream::Chat => {
                let beginning = (!has_begun).then(|| chat::begin(&envelope));
                beginning.into_iter().chain([chat::piece(piece, &envelope)]).collect()
            }
            Stream::Messages(stream) => stream.piece(piece, &envelope),
            Stream::Responses(stream) => stream.piece(piece, &envelope),
        }
    }

    /// The rest of the answer. The dialect's last event (`[DONE]`, `message_stop`, `response.completed`) is there exactly
    /// once, at the end. An answer that has begun keeps the envelope that it began with.
    #[must_use]
    pub fn answer(&mut self, completion: &Completion, envelope: &Envelope) -> Vec<SseEvent> {
        let message = &completion.message;
        let mut events = Vec::new();
        if let Stream::Messages(stream) = &mut self.stream {
            // Its first event has the usage.
            let envelope = self.begun.get_or_insert_with(|| envelope.clone());
            events.extend(stream.begin(envelope, &completion.usage));
        }
        let unsent = |text: &Option<String>, sent: usize| {
            text.as_ref().and_then(|text| text.get(sent..)).filter(|rest| !rest.is_empty()).map(str::to_owned)
        };
        if let Some(rest) = unsent(&message.reasoning, self.reasoning) {
            events.extend(self.piece(&Piece::Reasoning(rest), envelope));
        }
        if let Some(rest) = unsent(&message.content, self.text) {
            events.extend(self.piece(&Piece::Text(rest), envelope));
        }
        let (has_begun, envelope) = self.begin(envelope);
        match &mut self.stream {
            Stream::Chat => {
                events.extend((!has_begun).then(|| chat::begin(&envelope)));
                events.extend(chat::end(completion, &envelope, self.arguments));
            }
            Stream::Messages(stream) => events.extend(stream.end(completion)),
            Stream::Responses(stream) => events.extend(stream.end(completion, &envelope, self.arguments)),
        }
        events
    }

    /// An error as the last event. The dialect's own last event does not follow, so the agent cannot take what came before
    /// for a whole answer.
    #[must_use]
    pub fn error(&self, error: &DialectError, envelope: &Envelope) -> SseEvent {
        let (dialect, sent) = match &self.stream {
            Stream::Chat => (Dialect::Chat, 0),
            Stream::Messages(_) => (Dialect::Messages, 0),
            Stream::Responses(stream) => (Dialect::Responses, stream.sent()),
        };
        errors::event(dialect, error, self.begun.as_ref().unwrap_or(envelope), sent)
    }

    /// Whether the answer had begun before, and its envelope.
    fn begin(&mut self, envelope: &Envelope) -> (bool, Envelope) {
        let has_begun = self.begun.is_some();
        (has_begun, self.begun.get_or_insert_with(|| envelope.clone()).clone())
    }
}
