//! The canonical form of a request, which a history compares with its calls.

use super::{
    defaults::Defaults,
    key::{self, Hash, Key},
    message::{self, CanonicalMessage},
};
use crate::request::{Message, Request};

/// A request, as it is compared with others.
#[derive(Clone, Debug)]
pub struct Canonical {
    /// One for each message of the request.
    pub(super) messages: Vec<CanonicalMessage>,
    pub(super) keys: Vec<Key>,
    /// The ids of the tool calls in the messages up to each of them.
    pub(super) ids: Vec<Hash>,
    /// What precedes the messages in a prompt.
    pub(super) head: Hash,
    /// Who sent it, if the agent says so.
    pub(super) agent: Option<Hash>,
    /// Whether its client says that it sent it before.
    pub(super) is_repeat: bool,
    /// Whether it belongs to a later attempt, whose tools run again.
    pub(super) is_again: bool,
    /// Those of the tools.
    pub(super) defaults: Defaults,
    /// For each message the ids that link it with others.
    pub(super) links: Vec<Vec<String>>,
}

impl Canonical {
    /// The canonical form of a request.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        let messages: Vec<_> = request.messages.iter().map(CanonicalMessage::of).collect();
        let defaults = Defaults::of(&request.tools);
        let keys = messages.iter().map(|message| Key::of(message, &defaults)).collect();
        let of_message = |ids: &mut Hash, message: &Message| {
            *ids = ids.with_ids(&message.tool_calls);
            Some(*ids)
        };
        let ids = request.messages.iter().scan(Hash::NO_IDS, of_message).collect();
        Self {
            messages,
            keys,
            ids,
            head: key::head(request),
            defaults,
            agent: None,
            is_repeat: false,
            is_again: false,
            links: request.messages.iter().map(message::links).collect(),
        }
    }

    /// The request with who sent it, and whether its client says that it sent it before. Where answers are equal, this helps to
    /// tell which of them it continues.
    #[must_use]
    pub fn sent_by(self, agent: Option<&str>, is_repeat: bool) -> Self {
        Self { agent: agent.map(Hash::of_text), is_repeat, ..self }
    }

    /// The request of an attempt, from 1. In a later one than the first, the results of tools are also equal where they took
    /// another time.
    #[must_use]
    pub fn in_attempt(self, attempt: u32) -> Self {
        Self { is_again: attempt > 1, ..self }
    }

    /// The messages, one for each message of the request.
    #[must_use]
    pub fn messages(&self) -> &[CanonicalMessage] {
        &self.messages
    }
}
