//! Items of OpenAI's Responses API as chat messages.

use serde_json::{Map, Value, json, value::RawValue};

use crate::json::{self, Problems};

/// The conversation of a rollout: the input of its parameters, and the items of its response. Items of other kinds than
/// messages, reasoning and function calls are left out.
pub(super) fn messages(
    parameters: Option<&RawValue>,
    response: Option<&RawValue>,
    problems: &mut Problems,
) -> Vec<Value> {
    let entry = |object: Option<&'_ RawValue>, name: &str| -> Option<Box<RawValue>> {
        json::fields(object?.get().as_bytes()).ok()?.remove(name).map(ToOwned::to_owned)
    };
    let mut conversation = Conversation::default();
    let mut output =
        entry(response, "output").map_or_else(Vec::new, |output| items("/response/output", &output, problems));
    // The last state of an agent in an environment begins with the input and has everything that came after it.
    if output.last().is_some_and(Value::is_array) {
        if let Some(Value::Array(last)) = output.pop() {
            conversation.extend(last);
        }
        return conversation.messages;
    }
    if let Some(input) = entry(parameters, "input") {
        let place = "/responses_create_params/input";
        match json::parse::<Value>(place, input.get()) {
            Ok(Value::String(text)) => conversation.messages.push(json!({"role": "user", "content": text})),
            Ok(Value::Null) => {}
            _ => conversation.extend(items(place, &input, problems)),
        }
    }
    conversation.extend(output);
    conversation.messages
}

/// The items of a list. One that cannot be read is a problem: without it, the conversation would say something else.
fn items(place: &str, list: &RawValue, problems: &mut Problems) -> Vec<Value> {
    let list: Vec<&RawValue> = match json::parse::<Option<_>>(place, list.get()) {
        Ok(list) => list.unwrap_or_default(),
        Err(violation) => {
            problems.add(violation);
            return Vec::new();
        }
    };
    let mut items = Vec::with_capacity(list.len());
    for (index, item) in list.into_iter().enumerate() {
        let at = format!("{place}/{index}");
        match json::parse::<Value>(&at, item.get()) {
            Ok(item) if item.is_object() || item.is_array() => items.push(item),
            Ok(_) => problems.push(at, "must be an object"),
            Err(violation) => problems.add(violation),
        }
    }
    items
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    /// Reasoning that belongs to the next message of the assistant.
    reasoning: String,
}

impl Conversation {
    fn extend(&mut self, items: Vec<Value>) {
        for item in items {
            self.add(item);
        }
    }

    fn add(&mut self, item: Value) {
        let Value::Object(mut item) = item else { return };
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message").to_owned();
        match kind.as_str() {
            "reasoning" => {
                for part in ["summary", "content"] {
                    self.reasoning.push_str(&text_of(item.get(part).unwrap_or(&Value::Null)));
                }
            }
            "function_call" => {
                let call = json!({
                    "id": item.remove("call_id"),
                    "type": "function",
                    "function": {"name": item.remove("name"), "arguments": item.remove("arguments")},
                });
                self.add_call(call);
            }
            "function_call_output" => {
                let content = item.remove("output");
                self.messages.push(json!({"role": "tool", "tool_call_id": item.remove("call_id"), "content": content}));
            }
            "message" => {
                let role = item.remove("role").unwrap_or_else(|| json!("user"));
                let content = content(item.remove("content").unwrap_or_default());
                let mut message = Map::from_iter([("role".to_owned(), role), ("content".to_owned(), content)]);
                if message["role"] == "assistant" {
                    self.attach_reasoning(&mut message);
                }
                self.messages.push(Value::Object(message));
            }
            _ => {}
        }
    }

    /// Adds a call to the message of the assistant that precedes it, or to a new one.
    fn add_call(&mut self, call: Value) {
        if self.reasoning.is_empty()
            && let Some(Value::Object(last)) = self.messages.last_mut()
            && last["role"] == "assistant"
        {
            match last.get_mut("tool_calls") {
                Some(Value::Array(calls)) => calls.push(call),
                _ => drop(last.insert("tool_calls".to_owned(), json!([call]))),
            }
            return;
        }
        let mut message =
            Map::from_iter([("role".to_owned(), json!("assistant")), ("content".to_owned(), Value::Null)]);
        self.attach_reasoning(&mut message);
        message.insert("tool_calls".to_owned(), json!([call]));
        self.messages.push(Value::Object(message));
    }

    fn attach_reasoning(&mut self, message: &mut Map<String, Value>) {
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), Value::String(std::mem::take(&mut self.reasoning)));
        }
    }
}

/// The content of a message: one text if it has only parts of text, otherwise as it was.
fn content(content: Value) -> Value {
    match &content {
        Value::Array(parts) if parts.iter().all(|part| part.get("text").is_some_and(Value::is_string)) => {
            Value::String(text_of(&content))
        }
        _ => content,
    }
}

fn text_of(parts: &Value) -> String {
    let texts = parts.as_array().into_iter().flatten().filter_map(|part| part.get("text")?.as_str());
    texts.collect()
}
