//! Requests and answers in a form in which they can be compared.
//!
//! An agent sends the whole conversation with every call, and rarely in the words of the answers that it received: it
//! drops reasoning, writes the arguments of tool calls with other spaces or with their defaults, divides a text into
//! parts. [`Canonical`] is a
//! request without such differences. [`History`] is the calls of one session, and finds the call that a request
//! continues. [`History::cause`] says why a request does not continue a call that it should have continued. Nothing
//! here decides what is trained: segments follow from token ids alone.
//!
//! # How the service uses it
//!
//! There is one [`History`] for each policy of a session, in memory. [`Paths`] is a history with the ids of its calls,
//! which the mode `exact` needs.
//!
//! 1. A call arrives: `let canonical = Canonical::of(&request)`. In the mode `exact`, [`History::find`] names the call
//!    that it continues. In the mode `observe` this step is left out.
//! 2. The engine has answered: `history.record(&canonical)` is what the call adds to the history. Its JSON
//!    ([`Record::to_json`]) belongs into the row of the call (`NewCall::request`). It contains only the messages that
//!    no earlier call has, so the rows of a session grow linearly. Take it from the same history to which the earlier
//!    calls were added, at any time before the call is stored.
//! 3. The row is committed and has its number: `history.add(seq, &record, &completion.message)`.
//! 4. After a restart, or to catch up with another replica: for each row in the order of the numbers, read the record
//!    from the row ([`Record::from_json`]) and the message from the stored [`Completion`](crate::Completion), and add
//!    them. A call that is already there is skipped.
//! 5. The assembler reports a break between a call and its nearest earlier call. [`History::cause_between`] names the
//!    cause, from the rows of the session.

mod defaults;
mod history;
mod key;
mod paths;
mod record;

pub use history::{CALLS_MAX, Extended, History, HistoryError, MESSAGES_MAX};
pub use paths::{Continued, IDS_MAX, Paths};
pub use record::{CanonicalCall, CanonicalMessage, CanonicalRole, Record};

use self::{
    defaults::Defaults,
    key::{Hash, Key},
};
use crate::request::{Message, Request};

/// A request, as it is compared with others.
#[derive(Clone, Debug)]
pub struct Canonical {
    /// One for each message of the request.
    messages: Vec<CanonicalMessage>,
    keys: Vec<Key>,
    /// The ids of the tool calls in the messages up to each of them.
    ids: Vec<Hash>,
    /// What precedes the messages in a prompt.
    head: Hash,
    /// Who sent it, if the agent says so.
    agent: Option<Hash>,
    /// Whether its client says that it sent it before.
    is_repeat: bool,
    /// Those of the tools.
    defaults: Defaults,
    /// For each message the ids that link it with others, if they are kept.
    links: Vec<Vec<String>>,
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
            links: Vec::new(),
        }
    }

    /// The request with the ids of its tool calls, so that its messages can be made again of what is stored.
    #[must_use]
    pub fn with_links(self, request: &Request) -> Self {
        Self { links: request.messages.iter().map(record::links).collect(), ..self }
    }

    /// The request with who sent it, and whether its client says that it sent it before. Where answers are equal, this helps to
    /// tell which of them it continues.
    #[must_use]
    pub fn sent_by(self, agent: Option<&str>, is_repeat: bool) -> Self {
        Self { agent: agent.map(Hash::of_text), is_repeat, ..self }
    }

    /// The messages, one for each message of the request.
    #[must_use]
    pub fn messages(&self) -> &[CanonicalMessage] {
        &self.messages
    }
}

/// Why a request does not continue a call: what differs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BreakCause {
    /// The reasoning of an answer was dropped or changed.
    Reasoning,
    /// The arguments of a tool call are the same JSON in another spelling, or with the defaults of the tool's schema.
    Arguments,
    /// All messages are the same. The template or the tokenizer writes them in other ids than the model sampled.
    Tokens,
    /// The tools, the arguments of the template, or a system message.
    System,
    /// The content of a message.
    Rewrite,
    /// Several answers are equal to what the agent sent, and nothing says which of them it continues.
    Siblings,
}

impl BreakCause {
    /// All causes.
    pub const ALL: [Self; 6] =
        [Self::Reasoning, Self::Arguments, Self::Tokens, Self::System, Self::Rewrite, Self::Siblings];

    /// The name, as a label of metrics and in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning",
            Self::Arguments => "arguments",
            Self::Tokens => "tokens",
            Self::System => "system",
            Self::Rewrite => "rewrite",
            Self::Siblings => "siblings",
        }
    }

    /// The cause for two conversations with these messages, of which the shorter one is compared.
    fn between<'a>(nearest: impl Iterator<Item = &'a Key>, new: impl Iterator<Item = &'a Key>) -> Self {
        nearest.zip(new).find_map(|(nearest, new)| nearest.difference(new)).unwrap_or(Self::Tokens)
    }
}
