//! Messages as clients send them, made what templates expect.

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

/// A message as templates expect it: its content is a text, and the arguments of tool calls are objects.
pub(super) fn message(sent: &Value) -> Result<Value, Error> {
    if sent.kind() != ValueKind::Map {
        return Err(Error::new(ErrorKind::InvalidOperation, "a message is not an object"));
    }
    map(sent, |key, value| match key {
        "content" => content(value),
        "tool_calls" if value.kind() == ValueKind::Seq => {
            let calls: Result<Vec<Value>, Error> = value.try_iter()?.map(|call| tool_call(&call)).collect();
            Ok(Value::from(calls?))
        }
        _ => Ok(value.clone()),
    })
}

fn content(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => Ok(Value::from("")),
        ValueKind::Seq => {
            let mut texts = Vec::new();
            for part in value.try_iter()? {
                let (kind, text) = (part.get_attr("type")?, part.get_attr("text")?);
                let Some(text) = text.as_str().filter(|_| kind.as_str() == Some("text")) else {
                    let reason = format!("content of type {kind} is not supported, only text");
                    return Err(Error::new(ErrorKind::InvalidOperation, reason));
                };
                texts.push(text.to_owned());
            }
            Ok(Value::from(texts.join(" ")))
        }
        _ => Ok(value.clone()),
    }
}

/// Clients send the arguments of a call as JSON in a text.
fn tool_call(call: &Value) -> Result<Value, Error> {
    map(call, |key, value| match key {
        "function" => map(value, |key, value| {
            let text = value.as_str().filter(|_| key == "arguments");
            let parsed: Option<Value> = text.and_then(|text| serde_json::from_str(text).ok());
            let is_object = |value: &Value| value.kind() == ValueKind::Map;
            Ok(parsed.filter(is_object).unwrap_or_else(|| value.clone()))
        }),
        _ => Ok(value.clone()),
    })
}

/// Changes the entries of an object. Anything else stays as it is.
fn map(value: &Value, change: impl Fn(&str, &Value) -> Result<Value, Error>) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map {
        return Ok(value.clone());
    }
    let mut entries = Vec::new();
    for key in value.try_iter()? {
        let name = key.to_string();
        let changed = change(&name, &value.get_item(&key)?)?;
        entries.push((name, changed));
    }
    Ok(Value::from_pairs(entries))
}
