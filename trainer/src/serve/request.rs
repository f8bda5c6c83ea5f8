//! A request as the model's thread sees it, and what comes back for it, token by token.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;

use super::runner::{Command, Commands};
use crate::generate::Sampling;

/// A sequence to continue or to score. Everything has been checked against the model.
#[derive(Debug)]
pub(super) struct Request {
    /// Name that the client gave to the request, or a random one.
    pub(super) rid: String,
    /// The prompt; at least one token.
    pub(super) prompt: Vec<i64>,
    /// How tokens are drawn. A `new_tokens_max` of 0 draws nothing.
    pub(super) sampling: Sampling,
    /// Seed of the draws.
    pub(super) seed: u64,
    /// First token of the prompt that is scored; `None` if the prompt is not scored.
    pub(super) score_from: Option<usize>,
    /// Number of the most probable tokens that are reported at each drawn token.
    pub(super) alternatives: usize,
}

/// Something that happened to a request.
#[derive(Debug)]
pub(super) enum Event {
    /// The prompt was read.
    Read {
        /// The label of the weights that read the end of the prompt.
        version: Arc<str>,
        /// Log-probabilities of the prompt's tokens after the first one that is scored.
        scores: Vec<f32>,
    },
    /// A token was drawn, and the request goes on.
    Token(Token),
    /// The request ended; nothing comes after this.
    End {
        ending: Ending,
        /// The token that ended it.
        last: Option<Token>,
    },
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) id: i64,
    /// At the temperature, over the whole vocabulary.
    pub(super) logprob: f32,
    /// The most probable tokens in its place, if the request asked for them.
    pub(super) alternatives: Vec<(i64, f32)>,
    /// Label of the weights that drew it.
    pub(super) version: Arc<str>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It drew this stop token.
    Stop(i64),
    /// Its text contains this stop text.
    StopText(String),
    /// It drew as many tokens as it may.
    Length,
    /// It was aborted.
    Abort(&'static str),
}

/// The answer to a request as it arrives. Dropping the ticket cancels the request, so that a client that disconnects
/// leaves no work behind.
#[derive(Debug)]
pub(super) struct Ticket {
    id: u64,
    events: UnboundedReceiver<Event>,
    commands: Commands,
    has_ended: bool,
}

impl Ticket {
    pub(super) fn new(id: u64, events: UnboundedReceiver<Event>, commands: Commands) -> Self {
        Self { id, events, commands, has_ended: false }
    }

    /// The next event. `None` if the model's thread has ended before the request.
    pub(super) async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        self.has_ended |= matches!(event, None | Some(Event::End { .. }));
        event
    }

    /// The next event, if it has happened already.
    pub(super) fn next_at_once(&mut self) -> Option<Event> {
        let event = self.events.try_recv().ok();
        self.has_ended |= matches!(event, Some(Event::End { .. }));
        event
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.has_ended {
            self.commands.send(Command::Cancel(self.id));
        }
    }
}
