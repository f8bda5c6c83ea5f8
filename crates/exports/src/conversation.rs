//! Messages in one shape, because the rows of a column must have the same fields: the content is always text, and calls
//! of tools are JSON text.
//!
//! A message that cannot be read is left out and reported. The other messages of its conversation stay.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use forebay_wire::replace_lone_surrogates;
use serde::Serialize;
use serde_json::{Value, value::RawValue};

/// The most messages that are described. All of them are counted.
const LISTED_MAX: usize = 100;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: String,
    #[serde(serialize_with = "as_json")]
    pub(crate) tool_calls: Option<String>,
    pub(crate) tool_call_id: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) reasoning_content: Option<String>,
}

/// Messages of a rollout.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    /// The index of each message that cannot be read, and why.
    pub(crate) unreadable: Vec<(usize, &'static str)>,
}

/// Messages that are missing in an export because they cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unreadable {
    /// How many there are.
    pub messages: u64,
    /// The first of them.
    pub listed: Vec<UnreadableMessage>,
}

/// A message that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableMessage {
    /// The row from which it is missing, counted from 0; none if the row is left out.
    pub row: Option<u64>,
    pub rollout_id: String,
    /// Its index in the messages of the rollout.
    pub index: usize,
    /// What is wrong.
    pub why: &'static str,
}

impl fmt::Display for UnreadableMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, rollout_id, index, why } = self;
        match row {
            Some(row) => write!(f, "row {row}")?,
            None => f.write_str("no row")?,
        }
        write!(f, " (rollout {rollout_id}) /messages/{index}: {why}")
    }
}

impl Unreadable {
    /// Counts the messages of a conversation that are missing in a row.
    pub(crate) fn add(&mut self, row: Option<u64>, rollout_id: &str, conversation: &Conversation) {
        self.messages += conversation.unreadable.len() as u64;
        let room = LISTED_MAX - self.listed.len();
        self.listed.extend(conversation.unreadable.iter().take(room).map(|&(index, why)| UnreadableMessage {
            row,
            rollout_id: rollout_id.to_owned(),
            index,
            why,
        }));
    }
}

impl Conversation {
    /// Reads an array of messages as agents post them. A half of a surrogate pair becomes U+FFFD.
    pub(crate) fn read(json: &str) -> Self {
        let json = replace_lone_surrogates(json);
        let mut read = Self::default();
        let Ok(posted) = serde_json::from_str::<Vec<&RawValue>>(&json) else {
            read.unreadable.push((0, "is not in an array"));
            return read;
        };
        for (index, message) in posted.into_iter().enumerate() {
            match Message::read(message) {
                Ok(message) => read.messages.push(message),
                Err(why) => read.unreadable.push((index, why)),
            }
        }
        read
    }

    /// Whether every message that was posted is missing.
    pub(crate) fn is_lost(&self) -> bool {
        self.messages.is_empty() && !self.unreadable.is_empty()
    }
}

impl Message {
    /// Reads a message. If it has a field twice, the last one counts, as for most parsers. Fields that a message of
    /// this shape does not have are ignored.
    fn read(posted: &RawValue) -> Result<Self, &'static str> {
        let fields: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(posted.get()).map_err(|_| "is not an object")?;
        let text = |name: &str| serde_json::from_str::<String>(fields.get(name)?.get()).ok();
        let role = fields.get("role").ok_or("has no role")?;
        let calls = fields.get("tool_calls").map(|calls| calls.get()).filter(|calls| !["null", "[]"].contains(calls));
        // Engines have either name, and some agents send both.
        let reasoning = ["reasoning_content", "reasoning"].into_iter().filter_map(text);
        Ok(Self {
            role: serde_json::from_str(role.get()).map_err(|_| "has a role that is not a text")?,
            content: fields.get("content").map(|content| self::content(content.get())).unwrap_or_default(),
            tool_calls: calls.map(str::to_owned),
            tool_call_id: text("tool_call_id"),
            name: text("name"),
            reasoning_content: reasoning.reduce(|first, other| if first.is_empty() { other } else { first }),
        })
    }
}

/// The text of a content. Parts that are not text, such as images, stay JSON.
fn content(json: &str) -> String {
    match serde_json::from_str(json) {
        Ok(Value::String(text)) => text,
        Ok(Value::Null) => String::new(),
        Ok(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = parts.iter().map(part_text).collect();
            texts.map_or_else(|| Value::Array(parts.clone()).to_string(), |texts| texts.concat())
        }
        Ok(other) => other.to_string(),
        // It is nested too deeply, or has a number that is too large.
        Err(_) => json.to_owned(),
    }
}

fn part_text(part: &Value) -> Option<&str> {
    match part {
        Value::String(text) => Some(text),
        Value::Object(fields) => fields.get("text").and_then(Value::as_str),
        _ => None,
    }
}

/// In JSON, calls of tools are a value and not a text.
#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(crate) fn as_json<S: serde::Serializer>(text: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    let json: Option<&RawValue> =
        text.as_deref().map(serde_json::from_str).transpose().map_err(serde::ser::Error::custom)?;
    json.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(json: &str) -> Vec<Message> {
        let read = Conversation::read(json);
        assert_eq!(read.unreadable, [], "{json}");
        read.messages
    }

    #[test]
    fn contents_are_text() {
        let found = messages(
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1"}],"name":7},
            {"role":"tool","content":[{"type":"image_url","image_url":{"url":"x"}}],"tool_call_id":"1"},
            {"role":"tool","content":[1e999]}]"#,
        );
        assert_eq!(found[0].content, "ab");
        assert_eq!((found[1].content.as_str(), found[1].name.as_deref()), ("", None));
        assert_eq!(found[1].tool_calls.as_deref(), Some(r#"[{"id":"1"}]"#));
        assert_eq!(found[2].content, r#"[{"image_url":{"url":"x"},"type":"image_url"}]"#);
        assert_eq!(found[2].tool_call_id.as_deref(), Some("1"));
        assert_eq!(found[3].content, "[1e999]", "a content that cannot be parsed stays JSON");
    }

    #[test]
    fn reasoning_has_one_of_two_names_or_both() {
        for (fields, expected) in [
            (r#""reasoning":"a""#, Some("a")),
            (r#""reasoning_content":"b""#, Some("b")),
            (r#""reasoning":"a","reasoning_content":"b""#, Some("b")),
            (r#""reasoning":"a","reasoning_content":null"#, Some("a")),
            (r#""reasoning":"a","reasoning_content":"""#, Some("a")),
            (r#""reasoning":null,"reasoning_content":"""#, Some("")),
            (r#""reasoning":{"effort":"low"}"#, None),
        ] {
            let found = messages(&format!(r#"[{{"role":"assistant","content":"c",{fields}}}]"#));
            assert_eq!(found[0].reasoning_content.as_deref(), expected, "{fields}");
        }
    }

    #[test]
    fn what_parsers_refuse_is_read_as_far_as_it_is_text() {
        let found = messages(
            r#"[{"role":"tool","content":"caf\udce9"},{"role":"user","role":"tool","\ud83d":1,"content":"\u00e9"}]"#,
        );
        assert_eq!((found[0].content.as_str(), found[1].content.as_str()), ("caf\u{fffd}", "é"));
        assert_eq!(found[1].role, "tool");
    }

    #[test]
    fn an_unreadable_message_is_named_and_the_others_stay() {
        let read = Conversation::read(r#"[1,{"role":"user","content":"q"},{"content":"a"},{"role":1},"text"]"#);
        assert_eq!(read.messages.len(), 1);
        let object = "is not an object";
        let expected = [(0, object), (2, "has no role"), (3, "has a role that is not a text"), (4, object)];
        assert_eq!(read.unreadable, expected);
        assert!(!read.is_lost() && Conversation::read("[1]").is_lost() && !Conversation::read("[]").is_lost());
        let mut counted = Unreadable::default();
        (0..50).for_each(|row| counted.add(Some(row), "r", &read));
        assert_eq!((counted.messages, counted.listed.len()), (200, LISTED_MAX));
        assert_eq!(counted.listed[5].to_string(), "row 1 (rollout r) /messages/2: has no role");
    }
}
