//! Digests of canonical messages: two messages are equal where their digests are.

use std::{borrow::Cow, fmt::Write as _};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

use super::{
    cause::BreakCause,
    defaults::{Defaults, Shape},
    message::{CanonicalMessage, CanonicalRole},
    volatile::without_volatile,
};
use crate::{completion::ToolCall, request::Request, structure::Structure};

/// The most values of a JSON text that is compared by its values. One with more is compared as text, because the values of
/// `[0,0,...]` take up to forty times its bytes. A model that writes such arguments samples as many tokens.
const COMPARED_VALUES_MAX: usize = 1 << 16;

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

    pub(super) fn of_text(text: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(text.as_bytes());
        Self::of(&hasher)
    }

    /// The ids of no tool calls.
    pub(super) const NO_IDS: Self = Self([0; 16]);

    /// These ids, followed by those of a message.
    pub(super) fn with_ids(self, calls: &[ToolCall]) -> Self {
        if calls.is_empty() {
            return self;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for call in calls {
            add(&mut hasher, &call.id);
        }
        Self::of(&hasher)
    }

    /// The digest of what a request says, and of the ids in it.
    pub(super) fn of_request(keys: &[Key], ids: &[Self]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for key in keys {
            hasher.update(&key.meaning.0);
            if key.is_result {
                hasher.update(&key.text.0);
            }
        }
        hasher.update(&ids.last().copied().unwrap_or(Self::NO_IDS).0);
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
    /// Everything but the reasoning. Arguments count as JSON without defaults, an answer without the white space around
    /// it, and the result of a tool without what is new each time that it runs.
    pub(super) meaning: Hash,
    /// The text as it is.
    text: Hash,
    /// The arguments as they are.
    arguments: Hash,
    /// The reasoning without the white space around it.
    reasoning: Option<Hash>,
    is_system: bool,
    /// Whether it is the result of a tool.
    is_result: bool,
}

impl Key {
    pub(super) fn of(message: &CanonicalMessage, defaults: &Defaults) -> Self {
        // Engines remove the white space around an answer, and some agents do.
        let text = match message.role {
            CanonicalRole::Assistant => Cow::Borrowed(message.text.trim()),
            CanonicalRole::Tool => without_volatile(&message.text),
            CanonicalRole::System | CanonicalRole::User => Cow::Borrowed(message.text.as_str()),
        };
        let mut meaning = blake3::Hasher::new();
        meaning.update(&[match message.role {
            CanonicalRole::System => 0,
            CanonicalRole::User => 1,
            CanonicalRole::Assistant => 2,
            CanonicalRole::Tool => 3,
        }]);
        add(&mut meaning, message.name.as_deref().unwrap_or_default());
        add(&mut meaning, &text);
        let mut arguments = blake3::Hasher::new();
        for call in &message.calls {
            add(&mut meaning, &call.name);
            add(&mut meaning, &canonical_arguments(&call.name, &call.arguments, defaults));
            add(&mut arguments, &call.arguments);
        }
        for part in &message.parts {
            add(&mut meaning, &canonical(part.get(), None));
        }
        // Neither calls nor parts can stand for the other.
        meaning.update(&(message.calls.len() as u64).to_le_bytes());
        Self {
            meaning: Hash::of(&meaning),
            text: Hash::of_text(&message.text),
            arguments: Hash::of(&arguments),
            reasoning: message.reasoning.as_deref().map(|reasoning| Hash::of_text(reasoning.trim())),
            is_system: message.role == CanonicalRole::System,
            is_result: message.role == CanonicalRole::Tool,
        }
    }

    /// Whether a message that an agent sent stands for a stored one. An agent need not send reasoning back. In a later
    /// attempt its tools may have taken another time.
    pub(super) fn stands_for(&self, stored: &Self, is_again: bool) -> bool {
        self.meaning == stored.meaning
            && (is_again || self.has_same_result(stored))
            && (self.reasoning.is_none() || self.reasoning == stored.reasoning)
    }

    /// Whether the result of a tool is the same character by character.
    pub(super) fn has_same_result(&self, stored: &Self) -> bool {
        !self.is_result || self.text == stored.text
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
            // White space around an answer, or what a tool says anew each time.
            Some(BreakCause::Rewrite)
        }
    }
}

impl BreakCause {
    /// The cause for two conversations with these messages, of which the shorter one is compared.
    pub(super) fn between<'a>(nearest: impl Iterator<Item = &'a Key>, new: impl Iterator<Item = &'a Key>) -> Self {
        nearest.zip(new).find_map(|(nearest, new)| nearest.difference(new)).unwrap_or(Self::Tokens)
    }
}

/// The digest of what precedes the messages in a prompt: the tools and the arguments of the template.
pub(super) fn head(request: &Request) -> Hash {
    let mut hasher = blake3::Hasher::new();
    for tool in &request.tools {
        let text = tool.definition.get();
        let Some(mut definition) = values(text) else {
            add(&mut hasher, text);
            continue;
        };
        for place in ["", "/function"] {
            if let Some(Value::Object(fields)) = definition.pointer_mut(place) {
                fields.remove("cache_control");
            }
        }
        add(&mut hasher, &canonical_json(&definition, None));
    }
    hasher.update(&(request.tools.len() as u64).to_le_bytes());
    for name in TEMPLATE_ARGUMENTS {
        let found = request.other.iter().find(|(field, _)| field == name);
        let text = found.map_or("null", |(_, value)| value.get());
        let is_empty = matches!(text, "null" | "\"\"")
            || text.strip_prefix(['[', '{']).is_some_and(|inside| matches!(inside.trim(), "]" | "}"));
        add(&mut hasher, &if is_empty { Cow::Borrowed("") } else { canonical(text, None) });
    }
    Hash::of(&hasher)
}

/// Adds a text so that two texts never run together.
fn add(hasher: &mut blake3::Hasher, text: &str) {
    #[cfg(test)]
    tests::did(text.len());
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Arguments as JSON. What is no JSON is compared as text.
fn canonical_arguments<'a>(tool: &str, arguments: &'a str, defaults: &Defaults) -> Cow<'a, str> {
    match arguments.trim() {
        // All of these call a tool without arguments.
        "" | "null" => Cow::Borrowed("{}"),
        trimmed => canonical(trimmed, defaults.of_tool(tool)),
    }
}

/// The canonical JSON of a text. What has no values that can be compared stays as it is, with a mark that no JSON begins
/// with.
fn canonical<'a>(text: &'a str, shape: Option<&Shape>) -> Cow<'a, str> {
    match values(text) {
        Some(value) => canonical_json(&value, shape).into(),
        None => format!("text:{text}").into(),
    }
}

/// The values of a text. `None` if it is no JSON, or if they would take much more memory than the text.
pub(super) fn values(json: &str) -> Option<Value> {
    let is_small = Structure::of(json.as_bytes()).values <= COMPARED_VALUES_MAX;
    is_small.then(|| serde_json::from_str(json).ok()).flatten()
}

/// JSON with sorted keys and without spaces. Numbers are compared as JavaScript has them, in which some agents are
/// written: 1.0 and 1 are the same number. Fields that have the default value of `shape` are left out.
///
/// Each value is written once: a text that was written again for each level of `shape` took seconds.
pub(super) fn canonical_json(value: &Value, shape: Option<&Shape>) -> String {
    let mut text = String::new();
    write(&mut text, value, shape);
    #[cfg(test)]
    tests::did(text.len());
    text
}

fn write(text: &mut String, value: &Value, shape: Option<&Shape>) {
    match value {
        Value::Number(number) => match number.as_f64() {
            // Zero has one sign.
            Some(number) => write!(text, "{:?}", number + 0.0),
            None => write!(text, "{number}"),
        }
        .expect("a string accepts all text"),
        Value::Array(values) => {
            let shape = shape.and_then(Shape::items);
            text.push('[');
            for value in values {
                write(text, value, shape);
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
                let shape = shape.and_then(|shape| shape.property(name));
                let before = text.len();
                write!(text, "{}:", Value::from(name.as_str())).expect("a string accepts all text");
                let start = text.len();
                write(text, value, shape);
                match shape {
                    Some(shape) if shape.is_default(&text[start..]) => text.truncate(before),
                    _ => text.push(','),
                }
            }
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {
            write!(text, "{value}").expect("a string accepts all text");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde_json::json;

    use crate::{Dialect, canonical::Canonical};

    thread_local! {
        /// The bytes that were written or hashed.
        static WORK: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn did(bytes: usize) {
        WORK.set(WORK.get() + bytes);
    }

    /// The bytes that are written and hashed for a tool with this many defaults in each other, and a call of it with an
    /// argument as deep that has so many bytes.
    fn work(depth: usize, bytes: usize) -> usize {
        let nested = |innermost, around: &dyn Fn(_) -> _| (0..depth).fold(innermost, |inner, _| around(inner));
        let schema = nested(json!({}), &|inner| json!({"properties": {"a": inner}, "default": {"a": 0}}));
        let arguments = nested(json!("x".repeat(bytes)), &|inner| json!({"a": inner}));
        let call = json!({"id": "c", "function": {"name": "f", "arguments": arguments.to_string()}});
        let body = json!({
            "model": "m",
            "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        });
        let request = Dialect::Chat.parse(body.to_string().as_bytes()).expect("the body is right");
        let before = WORK.get();
        let _ = Canonical::of(&request);
        WORK.get() - before
    }

    #[test]
    fn a_comparison_costs_as_many_bytes_as_there_are() {
        const BYTES: usize = 1 << 16;
        const DEPTH: usize = 20;
        // Names, brackets and defaults of a level.
        const LEVEL_BYTES: usize = 256;
        let (shallow, deep, long) = (work(DEPTH, BYTES), work(2 * DEPTH, BYTES), work(DEPTH, 2 * BYTES));
        assert!(shallow >= BYTES, "the argument is compared: {shallow}");
        assert!(deep <= shallow + DEPTH * LEVEL_BYTES, "{DEPTH} levels more cost {} bytes", deep - shallow);
        assert!(long <= 2 * shallow, "twice as many bytes cost {long} instead of {shallow}");
    }
}
