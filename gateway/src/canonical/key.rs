//! Digests of canonical messages: two messages are equal where their digests are.

use std::fmt::Write as _;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

use super::{BreakCause, CanonicalMessage, CanonicalRole, Defaults};
use crate::request::Request;

/// Fields of a request that change how a template renders it.
const TEMPLATE_ARGUMENTS: [&str; 4] = ["chat_template", "chat_template_kwargs", "documents", "reasoning_effort"];

/// The first half of a BLAKE3 digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hash([u8; 16]);

impl Hash {
    fn of(hasher: &blake3::Hasher) -> Self {
        let mut half = [0; 16];
        half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(half)
    }

    fn of_text(text: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(text.as_bytes());
        Self::of(&hasher)
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:032x}", u128::from_be_bytes(self.0)))
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_digest = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_digest.then(|| u128::from_str_radix(&text, 16).ok()).flatten();
        number.map(|number| Self(number.to_be_bytes())).ok_or_else(|| D::Error::custom("must be 32 hexadecimal digits"))
    }
}

/// The digests of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// Everything but the reasoning. Arguments count as JSON without defaults, and an answer without the white space
    /// around it.
    pub(super) meaning: Hash,
    /// The text as it is.
    text: Hash,
    /// The arguments as they are.
    arguments: Hash,
    /// The reasoning without the white space around it.
    reasoning: Option<Hash>,
    is_system: bool,
}

impl Key {
    pub(super) fn of(message: &CanonicalMessage, defaults: &Defaults) -> Self {
        // Engines remove the white space around an answer, and some agents do.
        let is_answer = message.role == CanonicalRole::Assistant;
        let text = if is_answer { message.text.trim() } else { &message.text };
        let mut meaning = blake3::Hasher::new();
        meaning.update(&[match message.role {
            CanonicalRole::System => 0,
            CanonicalRole::User => 1,
            CanonicalRole::Assistant => 2,
            CanonicalRole::Tool => 3,
        }]);
        add(&mut meaning, message.name.as_deref().unwrap_or_default());
        add(&mut meaning, text);
        let mut arguments = blake3::Hasher::new();
        for call in &message.calls {
            add(&mut meaning, &call.name);
            add(&mut meaning, &canonical_arguments(&call.name, &call.arguments, defaults));
            add(&mut arguments, &call.arguments);
        }
        for part in &message.parts {
            add(&mut meaning, &canonical_json(part));
        }
        // Neither calls nor parts can stand for the other.
        meaning.update(&(message.calls.len() as u64).to_le_bytes());
        Self {
            meaning: Hash::of(&meaning),
            text: Hash::of_text(&message.text),
            arguments: Hash::of(&arguments),
            reasoning: message.reasoning.as_deref().map(|reasoning| Hash::of_text(reasoning.trim())),
            is_system: message.role == CanonicalRole::System,
        }
    }

    /// Whether a message that an agent sent stands for this one. An agent need not send reasoning back.
    pub(super) fn stands_for(&self, stored: &Self) -> bool {
        self.meaning == stored.meaning && (self.reasoning.is_none() || self.reasoning == stored.reasoning)
    }

    /// What differs, if anything does.
    pub(super) fn difference(&self, new: &Self) -> Option<BreakCause> {
        if self == new {
            None
        } else if self.is_system || new.is_system {
            Some(BreakCause::System)
        } else if self.meaning != new.meaning {
            Some(BreakCause::Rewrite)
        } else if self.reasoning != new.reasoning {
            Some(BreakCause::Reasoning)
        } else if self.arguments != new.arguments {
            Some(BreakCause::Arguments)
        } else {
            // White space around an answer.
            Some(BreakCause::Rewrite)
        }
    }
}

/// The digest of what precedes the messages in a prompt: the tools and the arguments of the template.
pub(super) fn head(request: &Request) -> Hash {
    let mut hasher = blake3::Hasher::new();
    for tool in &request.tools {
        let mut definition: Value = serde_json::from_str(tool.definition.get()).unwrap_or_default();
        for place in ["", "/function"] {
            if let Some(Value::Object(fields)) = definition.pointer_mut(place) {
                fields.remove("cache_control");
            }
        }
        add(&mut hasher, &canonical_json(&definition));
    }
    hasher.update(&(request.tools.len() as u64).to_le_bytes());
    for name in TEMPLATE_ARGUMENTS {
        let found = request.other.iter().find(|(field, _)| field == name);
        let value: Value = found.and_then(|(_, value)| serde_json::from_str(value.get()).ok()).unwrap_or_default();
        let is_empty = match &value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(values) => values.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            Value::Bool(_) | Value::Number(_) => false,
        };
        add(&mut hasher, &if is_empty { String::new() } else { canonical_json(&value) });
    }
    Hash::of(&hasher)
}

/// Adds a text so that two texts never run together.
fn add(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Arguments as JSON. What is no JSON is compared as text.
fn canonical_arguments(tool: &str, arguments: &str, defaults: &Defaults) -> String {
    let trimmed = arguments.trim();
    match serde_json::from_str(trimmed) {
        // All of these call a tool without arguments.
        Ok(Value::Null) => "{}".to_owned(),
        Ok(mut value) => {
            defaults.remove_from(tool, &mut value);
            canonical_json(&value)
        }
        Err(_) if trimmed.is_empty() => "{}".to_owned(),
        Err(_) => format!("text:{trimmed}"),
    }
}

/// JSON with sorted keys and without spaces. Numbers are compared as JavaScript has them, in which some agents are
/// written: 1.0 and 1 are the same number.
pub(super) fn canonical_json(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, value);
    text
}

fn write(text: &mut String, value: &Value) {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Zero has one sign.
            Some(number) => write!(text, "{:?}", number + 0.0),
            None => write!(text, "{number}"),
        }
        .expect("a string accepts all text"),
        Value::Array(values) => {
            text.push('[');
            for value in values {
                write(text, value);
                text.push(',');
            }
            text.push(']');
        }
        Value::Object(fields) => {
            // The order of the map depends on a feature of the library, which other crates may switch on.
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            text.push('{');
            for (name, value) in fields {
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push(':');
                write(text, value);
                text.push(',');
            }
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::String(_) => text.push_str(&value.to_string()),
    }
}
