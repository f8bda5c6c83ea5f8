//! The messages of a recorded conversation for readers: people, judges, and exports for supervised training.
//!
//! Separate from [`Record::messages`], which makes the messages of a prompt again and must refuse what it cannot make
//! exactly. A reader is better served with the texts of a message than with nothing, so here the parts of a message are
//! in another order where it had texts and images.

use serde::Serialize;
use serde_json::value::RawValue;

use super::{
    message::{CanonicalCall, CanonicalMessage, CanonicalRole},
    record::Record,
};
use crate::{completion::AssistantMessage, json};

/// The messages of the last of these calls and its answer, as a JSON array in the shape of chat completions. Each call
/// but the first one follows the one before it.
#[must_use]
pub fn chat_messages(calls: Vec<(Record, AssistantMessage)>) -> Box<RawValue> {
    let mut messages: Vec<Linked> = Vec::new();
    for (record, answer) in calls {
        messages.truncate(record.shared as usize);
        let mut links = record.links.into_iter();
        messages.extend(record.messages.into_iter().map(|message| {
            let count = message.calls.len() + usize::from(message.role == CanonicalRole::Tool);
            Linked { links: links.by_ref().take(count).collect(), message }
        }));
        let links = answer.tool_calls.iter().map(|call| call.id.clone()).collect();
        messages.push(Linked { message: CanonicalMessage::of_answer(&answer), links });
    }
    json::raw(&messages.iter().map(Linked::chat).collect::<Vec<_>>())
}

/// A message with the ids of its tool calls and the one that a result names, if they are known.
struct Linked {
    message: CanonicalMessage,
    links: Vec<String>,
}

/// A message of chat completions.
#[derive(Serialize)]
struct Chat<'a> {
    role: CanonicalRole,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    content: ChatContent<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChatContent<'a> {
    Text(&'a str),
    Parts(Vec<ChatPart<'a>>),
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChatPart<'a> {
    Text { r#type: &'static str, text: &'a str },
    Other(&'a RawValue),
}

#[derive(Serialize)]
struct ChatCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    r#type: &'static str,
    function: ChatFunction<'a>,
}

#[derive(Serialize)]
struct ChatFunction<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl Linked {
    fn chat(&self) -> Chat<'_> {
        let CanonicalMessage { role, name, text, parts, reasoning, calls } = &self.message;
        let mut links = self.links.iter().map(String::as_str);
        let mut tool_calls = Vec::with_capacity(calls.len());
        for CanonicalCall { name, arguments } in calls {
            let function = ChatFunction { name, arguments };
            tool_calls.push(ChatCall { id: links.next(), r#type: "function", function });
        }
        let content = if parts.is_empty() {
            ChatContent::Text(text)
        } else {
            let text = (!text.is_empty()).then_some(ChatPart::Text { r#type: "text", text });
            ChatContent::Parts(text.into_iter().chain(parts.iter().map(|part| ChatPart::Other(part.raw()))).collect())
        };
        Chat {
            role: *role,
            name: name.as_deref(),
            reasoning_content: reasoning.as_deref(),
            content,
            tool_calls,
            tool_call_id: if *role == CanonicalRole::Tool { links.next() } else { None },
        }
    }
}
