//! Messages in one shape, because the rows of a column must have the same fields: the content is always text, and calls
//! of tools are JSON text.

use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

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

/// A message as agents post it. Other fields are ignored.
#[derive(Deserialize)]
struct Posted {
    role: String,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    tool_calls: Option<Box<RawValue>>,
    #[serde(default)]
    tool_call_id: Value,
    #[serde(default)]
    name: Value,
    #[serde(default, alias = "reasoning")]
    reasoning_content: Value,
}

/// The messages of a conversation; none if they are not messages.
pub(crate) fn messages(json: &str) -> Option<Vec<Message>> {
    let posted: Vec<Posted> = serde_json::from_str(json).ok()?;
    Some(posted.into_iter().map(message).collect())
}

fn message(posted: Posted) -> Message {
    let text = |value: Value| if let Value::String(text) = value { Some(text) } else { None };
    Message {
        role: posted.role,
        content: content(posted.content),
        tool_calls: posted
            .tool_calls
            .map(|calls| calls.get().to_owned())
            .filter(|calls| calls != "null" && calls != "[]"),
        tool_call_id: text(posted.tool_call_id),
        name: text(posted.name),
        reasoning_content: text(posted.reasoning_content),
    }
}

/// The text of a content. Parts that are not text, such as images, stay JSON.
fn content(content: Value) -> String {
    match content {
        Value::String(text) => text,
        Value::Null => String::new(),
        Value::Array(parts) => {
            let texts: Option<Vec<&str>> = parts.iter().map(part_text).collect();
            texts.map_or_else(|| Value::Array(parts.clone()).to_string(), |texts| texts.concat())
        }
        other => other.to_string(),
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
fn as_json<S: serde::Serializer>(text: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    let json: Option<Value> = text.as_deref().and_then(|text| serde_json::from_str(text).ok());
    json.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_text() {
        let parts = r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1"}],"name":7},
            {"role":"tool","content":[{"type":"image_url","image_url":{"url":"x"}}],"tool_call_id":"1"}]"#;
        let found = messages(parts).expect("they are messages");
        assert_eq!(found[0].content, "ab");
        assert_eq!((found[1].content.as_str(), found[1].name.as_deref()), ("", None));
        assert_eq!(found[1].tool_calls.as_deref(), Some(r#"[{"id":"1"}]"#));
        assert_eq!(found[2].content, r#"[{"image_url":{"url":"x"},"type":"image_url"}]"#);
        assert_eq!(found[2].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn what_is_not_a_conversation_is_none() {
        for json in ["[1]", r#"[{"content":"a"}]"#, r#"[{"role":1}]"#] {
            assert_eq!(messages(json), None, "{json}");
        }
    }
}
