//! The one chat request that every dialect is parsed into.
//!
//! It has the shape of chat completions, because that is what engines render. Content parts, tools and unknown fields
//! keep their text.

use std::{collections::BTreeSet, ops::Deref};

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::RawValue;

use crate::{
    completion::ToolCall,
    dialect::{client_tool::ClientTools, error::DialectError},
    json::{self, Fields, Item},
};

/// A request of an agent.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model that the agent named. Which policy it stands for is the session's matter.
    pub model: String,
    /// The conversation, at least one message. System messages stay where the agent put them.
    pub messages: Vec<Message>,
    /// The tools that can be offered to the model.
    pub tools: Vec<Tool>,
    /// Whether the model may, must or must not call tools. `None` if there are no tools.
    pub tool_choice: Option<ToolChoice>,
    /// Whether the agent wants events.
    pub stream: bool,
    /// Whether the events of chat completions should contain the usage.
    pub stream_usage: bool,
    /// The agent's bound of sampled tokens.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// What the agent asked for that concerns sampling: temperature, penalties, `logprobs` and the like. The engine
    /// is sent it only for a call that is not recorded. Of a call that is recorded, only what the session's sampling
    /// replaces is left.
    pub sampling: Fields,
    /// Fields that the gateway does not interpret. They are passed to the engine.
    pub other: Fields,
    /// Those of the tools that the client knows as something else than functions.
    pub client_tools: ClientTools,
    /// What was left out of the request.
    pub warnings: Warnings,
    /// The path of the first image, if there is one. Texts stand for images.
    pub image: Option<String>,
    /// The bytes at the beginning of the first message that are what Responses calls instructions, which belong to one
    /// request and not to the conversation.
    pub instructions: usize,
    /// The bytes of the body and of what it names. How long work on the request takes follows from them.
    pub bytes: usize,
}

impl Request {
    /// The request if it has no images.
    pub fn without_images(self) -> Result<Self, DialectError> {
        match self.image {
            None => Ok(self),
            Some(path) => Err(DialectError::unsupported(
                path,
                "is an image, and sessions record text only; with `images = \"text\"` in the [[upstream]] of the \
                 configuration, a text stands for each image",
            )),
        }
    }

    /// The bound of sampled tokens where there is room for `room` more. If neither is known, the engine samples until
    /// its context is full.
    #[must_use]
    pub fn max_tokens_within(&self, room: Option<u32>) -> Option<u32> {
        self.max_tokens.into_iter().chain(room).min()
    }

    /// Whether a field that the gateway does not interpret is this switch.
    pub(crate) fn switches(&self, name: &str, on: bool) -> bool {
        let switch = if on { "true" } else { "false" };
        self.other.iter().any(|(found, value)| found == name && value.get() == switch)
    }

    /// Whether a grammar masks logits. The log-probabilities of such an answer are those under the mask, which a
    /// trainer does not have, so these calls should be counted.
    #[must_use]
    pub fn constrained(&self) -> bool {
        let forced = matches!(self.tool_choice, Some(ToolChoice::Required | ToolChoice::Function(_)));
        forced || self.other.iter().any(|(name, value)| masks_logits(name, value.get()))
    }
}

fn masks_logits(name: &str, value: &str) -> bool {
    match name {
        "response_format" => {
            #[derive(serde::Deserialize)]
            struct Format {
                r#type: String,
            }
            !serde_json::from_str::<Format>(value).is_ok_and(|format| format.r#type == "text")
        }
        "structured_outputs" | "guided_json" | "guided_regex" | "guided_choice" | "guided_grammar" | "json_schema"
        | "regex" | "ebnf" | "grammar" | "structural_tag" => value != "null",
        _ => false,
    }
}

/// The most warnings of a request. A body may have a hundred thousand blocks that are left out, and a warning is longer
/// than such a block.
const WARNINGS_MAX: usize = 64;

/// The most bytes of a type that are kept.
const KIND_BYTES_MAX: usize = 64;

/// What was left out of a request, in words, each with the field.
#[derive(Clone, Debug, Default)]
pub struct Warnings {
    texts: Vec<String>,
    left_out: BTreeSet<LeftOut>,
}

/// A kind of parts that was left out, because nothing here can run or read it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeftOut {
    /// A tool, an item, or a block.
    pub what: &'static str,
    /// Its type, as the agent names it.
    pub kind: String,
}

impl LeftOut {
    /// The type without the date at its end, as in `web_search_20250305`.
    #[must_use]
    pub fn undated(&self) -> &str {
        match self.kind.rsplit_once('_') {
            Some((name, date)) if date.len() == 8 && date.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => &self.kind,
        }
    }
}

impl Warnings {
    /// Adds a warning, unless there are too many.
    pub fn push(&mut self, text: String) {
        if self.texts.len() < WARNINGS_MAX {
            self.texts.push(text);
        }
    }

    /// Notes that a part was left out.
    pub(crate) fn left_out(&mut self, item: &Item<'_>, what: &'static str, kind: &str) {
        let mut kind = kind.replace(char::is_control, " ");
        kind.truncate(kind.floor_char_boundary(KIND_BYTES_MAX));
        self.push(format!("{}: a part of type {kind:?} ({what}) cannot be used here and was left out", item.path()));
        if self.left_out.len() < WARNINGS_MAX {
            self.left_out.insert(LeftOut { what, kind });
        }
    }

    /// The kinds of parts that were left out, each once.
    pub fn kinds(&self) -> impl Iterator<Item = &LeftOut> {
        self.left_out.iter()
    }
}

impl Deref for Warnings {
    type Target = [String];

    fn deref(&self) -> &[String] {
        &self.texts
    }
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator.
    System,
    /// The operator, in the newer word of OpenAI. Engines are sent `system`, because templates do not know this role.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool.
    Tool,
}

impl Role {
    /// The role as engines know it.
    #[must_use]
    pub fn engine_name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of the conversation.
#[derive(Clone, Debug)]
pub struct Message {
    /// Who wrote it.
    pub role: Role,
    /// What it says.
    pub content: Content,
    /// The reasoning that an assistant's message was sent back with.
    pub reasoning: Option<String>,
    /// The tool calls of an assistant's message.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool's message answers.
    pub tool_call_id: Option<String>,
    /// Fields that the gateway does not interpret.
    pub other: Fields,
}

impl Message {
    /// A message with text and nothing else.
    #[must_use]
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self { content: Content::Text(text.into()), ..Self::empty(role) }
    }

    pub(crate) fn empty(role: Role) -> Self {
        Self {
            role,
            content: Content::Absent,
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            other: Vec::new(),
        }
    }
}

/// What a message says.
#[derive(Clone, Debug)]
pub enum Content {
    /// Nothing, as in an assistant's message that only calls tools.
    Absent,
    /// A text.
    Text(String),
    /// An array of parts, with its text as it was sent.
    Parts(Box<RawValue>),
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Absent => serializer.serialize_unit(),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Parts(parts) => parts.serialize(serializer),
        }
    }
}

/// A function that the model may call.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its definition in the shape of chat completions.
    pub definition: Box<RawValue>,
}

impl Tool {
    /// A tool of its parts. `fields` are those of chat completions' `function` behind the name.
    pub(crate) fn function(name: String, fields: Fields) -> Self {
        let function = std::iter::once(("name".to_owned(), json::raw(&name))).chain(fields).collect();
        let definition =
            vec![("type".to_owned(), json::raw(&"function")), ("function".to_owned(), json::object_of(&function))];
        Self { name, definition: json::object_of(&definition) }
    }

    /// Leaves out `strict`, for which engines mask logits.
    pub(crate) fn leave_out_strict(&mut self) {
        let without = |text: &RawValue| {
            let mut fields = Item::field("tools", text).object().ok()?;
            let found = fields.discard(&["strict"]);
            Some((fields.rest(), found))
        };
        let Some((mut fields, mut found)) = without(&self.definition) else { return };
        let function = fields.iter_mut().find(|(name, _)| name == "function");
        if let Some((_, value)) = function
            && let Some((inner, true)) = without(value)
        {
            *value = json::object_of(&inner);
            found = true;
        }
        if found {
            self.definition = json::object_of(&fields);
        }
    }
}

/// Whether the model may call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// It may.
    Auto,
    /// It must not.
    None,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Function(String),
}

impl Serialize for ToolChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::None => serializer.serialize_str("none"),
            Self::Required => serializer.serialize_str("required"),
            Self::Function(name) => {
                let mut map = serializer.serialize_map(Some(2))?;
                map.serialize_entry("type", "function")?;
                map.serialize_entry("function", &std::collections::BTreeMap::from([("name", name)]))?;
                map.end()
            }
        }
    }
}
