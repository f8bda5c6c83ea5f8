//! Canonical messages, which records store and of which digests are made.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    completion::{AssistantMessage, ToolCall},
    dialect::error::DialectError,
    json::{Item, object_of},
    request::{Content, Message, Role},
};

/// Who wrote a message, as far as prompts tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanonicalRole {
    /// The operator, in both of OpenAI's words.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool.
    Tool,
}

/// A message without what agents change freely: ids, marks for caches, signatures, and how a text is divided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalMessage {
    /// Who wrote it.
    pub role: CanonicalRole,
    /// The name of the author, which some templates print. It is not read in messages of the assistant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The texts of all parts, one behind the other.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Parts that are no text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<CanonicalPart>,
    /// The reasoning. `None` if there is none, or if the agent did not send it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The tool calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<CanonicalCall>,
}

/// A part that is no text, as JSON without what agents change freely. It is kept as text, because values take up to
/// fifty times as much memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CanonicalPart(Box<RawValue>);

impl CanonicalPart {
    /// The text.
    #[must_use]
    pub fn get(&self) -> &str {
        self.0.get()
    }

    pub(super) fn raw(&self) -> &RawValue {
        &self.0
    }
}

impl PartialEq for CanonicalPart {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for CanonicalPart {}

/// A tool call without its id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments as they were written. They are compared as JSON.
    pub arguments: String,
}

impl CanonicalMessage {
    /// The canonical form of a message of a request.
    pub(super) fn of(message: &Message) -> Self {
        let (text, parts) = content(&message.content);
        let calls = message.tool_calls.iter();
        Self {
            role: match message.role {
                Role::System | Role::Developer => CanonicalRole::System,
                Role::User => CanonicalRole::User,
                Role::Assistant => CanonicalRole::Assistant,
                Role::Tool => CanonicalRole::Tool,
            },
            name: name(message),
            text,
            parts,
            reasoning: present(message.reasoning.as_deref()),
            calls: calls
                .map(|call| CanonicalCall { name: call.name.clone(), arguments: call.arguments.clone() })
                .collect(),
        }
    }

    /// The message, with its ids.
    pub(super) fn restored(&self, links: &mut impl Iterator<Item = String>) -> Option<Message> {
        if !self.parts.is_empty() || self.name.is_some() {
            return None;
        }
        let role = match self.role {
            CanonicalRole::System => Role::System,
            CanonicalRole::User => Role::User,
            CanonicalRole::Assistant => Role::Assistant,
            CanonicalRole::Tool => Role::Tool,
        };
        let call = |call: &CanonicalCall| {
            let (name, arguments) = (call.name.clone(), call.arguments.clone());
            Some(ToolCall { id: links.next()?, name, arguments })
        };
        let tool_calls: Vec<ToolCall> = self.calls.iter().map(call).collect::<Option<_>>()?;
        let is_absent = self.text.is_empty() && !tool_calls.is_empty();
        Some(Message {
            content: if is_absent { Content::Absent } else { Content::Text(self.text.clone()) },
            reasoning: self.reasoning.clone(),
            tool_calls,
            tool_call_id: if role == Role::Tool { Some(links.next()?) } else { None },
            ..Message::empty(role)
        })
    }

    /// The canonical form of an answer.
    pub(super) fn of_answer(answer: &AssistantMessage) -> Self {
        Self {
            role: CanonicalRole::Assistant,
            name: None,
            text: answer.content.clone().unwrap_or_default(),
            parts: Vec::new(),
            reasoning: present(answer.reasoning.as_deref()),
            calls: answer
                .tool_calls
                .iter()
                .map(|call| CanonicalCall { name: call.name.clone(), arguments: call.arguments.clone() })
                .collect(),
        }
    }
}

/// The ids of a message: those of its tool calls, and that which a result names.
pub(super) fn links(message: &Message) -> Vec<String> {
    let calls = message.tool_calls.iter().map(|call| &call.id);
    let result = message.tool_call_id.iter().filter(|_| message.role == Role::Tool);
    calls.chain(result).cloned().collect()
}

/// A text, unless there is nothing but white space in it.
fn present(text: Option<&str>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty()).map(str::to_owned)
}

fn name(message: &Message) -> Option<String> {
    let (_, name) = message.other.iter().find(|(field, _)| field == "name")?;
    let name: String = serde_json::from_str(name.get()).ok()?;
    (message.role != Role::Assistant && !name.is_empty()).then_some(name)
}

fn content(content: &Content) -> (String, Vec<CanonicalPart>) {
    let parts = match content {
        Content::Absent => return (String::new(), Vec::new()),
        Content::Text(text) => return (text.clone(), Vec::new()),
        Content::Parts(parts) => parts,
    };
    let (mut texts, mut others) = (String::new(), Vec::new());
    let read = Item::field("content", parts).each(|part| add_part(&part, &mut texts, &mut others));
    debug_assert!(read.is_ok(), "the dialects have checked the parts: {read:?}");
    (texts, others)
}

fn add_part(part: &Item<'_>, texts: &mut String, others: &mut Vec<CanonicalPart>) -> Result<(), DialectError> {
    let mut fields = part.object()?.into_entries();
    let text = |name: &str| {
        let (_, value) = fields.iter().find(|(field, _)| field == name)?;
        serde_json::from_str::<String>(value.get()).ok()
    };
    if text("type").as_deref() == Some("text")
        && let Some(text) = text("text")
    {
        texts.push_str(&text);
        return Ok(());
    }
    fields.retain(|(name, value)| {
        value.get() != "null" && !matches!(name.as_str(), "cache_control" | "id" | "signature")
    });
    fields.sort_by(|(left, _), (right, _)| left.cmp(right));
    let fields = fields.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
    others.push(CanonicalPart(object_of(&fields)));
    Ok(())
}
