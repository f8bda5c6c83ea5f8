//! Answers and conversations that a request of Responses names by their ids instead of sending them.
//!
//! A request is parsed twice if it does: the first time says what it names, and the second time has it.

use std::collections::BTreeMap;

use super::error::DialectError;
use crate::{
    completion::{AssistantMessage, ToolCall},
    json::Item,
    request::{Content, Message, Role},
};

/// Characters of an id that an error names.
const ID_CHARS_SHOWN: usize = 100;

/// What a request names, and what was found of it.
#[derive(Clone, Debug, Default)]
pub struct References {
    /// The first item that is named of each answer.
    wanted: BTreeMap<String, String>,
    wanted_conversation: Option<String>,
    answers: BTreeMap<String, AssistantMessage>,
    conversation: Option<Vec<Message>>,
    bytes: usize,
}

impl References {
    /// The ids of answers of which items are named that are not there yet, each with such an item. They are those of
    /// [`Envelope::id`](super::Envelope::id).
    pub fn wanted(&self) -> impl Iterator<Item = (&str, &str)> {
        self.wanted.iter().map(|(id, item)| (id.as_str(), item.as_str()))
    }

    /// The id of the answer whose whole conversation is named, if it is not there yet.
    #[must_use]
    pub fn wanted_conversation(&self) -> Option<&str> {
        self.wanted_conversation.as_deref()
    }

    /// Whether the request names something that is not there yet.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        !self.wanted.is_empty() || self.wanted_conversation.is_some()
    }

    /// Adds an answer, which was read from so many bytes.
    pub fn found(&mut self, id: &str, answer: AssistantMessage, bytes: usize) {
        self.wanted.remove(id);
        self.answers.insert(id.to_owned(), answer);
        self.bytes += bytes;
    }

    /// Adds the conversation, which was read from so many bytes.
    pub fn found_conversation(&mut self, messages: Vec<Message>, bytes: usize) {
        self.wanted_conversation = None;
        self.conversation = Some(messages);
        self.bytes += bytes;
    }

    /// The bytes that all of it was read from.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The error for what is not there.
    pub(super) fn missing(&self) -> DialectError {
        match (&self.wanted_conversation, self.wanted.values().next()) {
            (Some(id), _) => not_found(&format!("resp_{id}")),
            (None, Some(item)) => not_found(item),
            (None, None) => DialectError::Internal,
        }
    }

    /// The conversation that ends with a response.
    pub(super) fn conversation(&mut self, response: &Item<'_>) -> Result<Vec<Message>, DialectError> {
        let name = response.string()?;
        let Some(id) = response_id(&name) else { return Err(not_found(&name)) };
        if self.conversation.is_none() {
            self.wanted_conversation = Some(id.to_owned());
        }
        Ok(self.conversation.take().unwrap_or_default())
    }

    /// What an item of an answer is.
    pub(super) fn item(&mut self, item: &str) -> Result<Part<'_>, DialectError> {
        let of = ItemId::parse(item).ok_or_else(|| not_found(item))?;
        let Some(answer) = self.answers.get(of.answer) else {
            self.wanted.entry(of.answer.to_owned()).or_insert_with(|| item.to_owned());
            return Ok(Part::Unknown);
        };
        let found = match of.kind {
            "rs" => answer.reasoning.as_deref().map(Part::Reasoning),
            "msg" => Some(Part::Text(answer.content.as_deref().unwrap_or_default())),
            _ => of.index.and_then(|index| answer.tool_calls.get(index)).map(Part::Call),
        };
        found.ok_or_else(|| not_found(item))
    }
}

/// A part of an answer.
pub(super) enum Part<'a> {
    /// Its answer is not there yet.
    Unknown,
    Reasoning(&'a str),
    Text(&'a str),
    Call(&'a ToolCall),
}

/// The id of an item, as answers have it: a prefix, the id of the answer, and the place of a call.
struct ItemId<'a> {
    kind: &'a str,
    answer: &'a str,
    index: Option<usize>,
}

impl<'a> ItemId<'a> {
    fn parse(item: &'a str) -> Option<Self> {
        let (kind, rest) = item.split_once('_')?;
        let (answer, index) = match rest.split_once('_') {
            Some((answer, index)) => (answer, Some(index.parse().ok()?)),
            None => (rest, None),
        };
        matches!((kind, index), ("rs" | "msg", None) | ("fc", Some(_))).then_some(Self { kind, answer, index })
    }
}

/// The id of the answer that a response has.
#[must_use]
pub fn response_id(response: &str) -> Option<&str> {
    response.strip_prefix("resp_")
}

/// What an agent is told that names something that its session does not have.
#[must_use]
pub fn not_found(id: &str) -> DialectError {
    let id: String = id.chars().take(ID_CHARS_SHOWN).collect();
    DialectError::NotFound { what: format!("{id:?} in the recorded answers of this session") }
}

/// An answer as a message of a conversation.
#[must_use]
pub fn message_of(answer: AssistantMessage) -> Message {
    let AssistantMessage { content, reasoning, tool_calls } = answer;
    let content = match content {
        Some(text) => Content::Text(text),
        None if tool_calls.is_empty() => Content::Text(String::new()),
        None => Content::Absent,
    };
    Message { content, reasoning, tool_calls, ..Message::empty(Role::Assistant) }
}
