//! Whether the ids of a prompt are those of the messages that came with them.
//!
//! A client of ids may put anything before an answer, and the model would still answer. So the engine reads the ids as
//! text and looks for each message. What the model wrote may have another spelling than the message that an agent made
//! of it; everything else must be there character by character.

use serde_json::{Value, value::RawValue};

use crate::template::{self, WireMessage};

/// An error says where a text is not the prompt of these messages and tools. `stop` are the texts that end an answer.
pub(super) fn check(
    prompt: &str,
    messages: &[WireMessage],
    tools: &[Box<RawValue>],
    stop: &[String],
) -> Result<(), String> {
    let system = messages.split_first().filter(|(first, _)| first.role == "system");
    let (text, messages) = system.map_or((String::new(), messages), |(first, rest)| (first.text(), rest));
    let mut rest = prompt;
    if !(text.is_empty() && tools.is_empty()) {
        rest = behind(rest, &format!("<|im_start|>system\n{text}"))?;
        if !tools.is_empty() {
            rest = behind(rest, "\n\n# Tools\n")?;
        }
        for tool in tools {
            rest = behind(rest, "\n")?;
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            // Engines write the fields that an agent has left out.
            if !values.next().is_some_and(|value| value.is_ok_and(|value| contains(&value, &json(tool.get())))) {
                return Err(format!("a tool is {:?}", shown(rest)));
            }
            rest = &rest[values.byte_offset()..];
        }
        rest = behind(rest, template::CLOSING)?;
    }
    for (place, message) in messages.iter().enumerate() {
        if message.role != "assistant" {
            rest = behind(rest, &template::rendered_message(message))?;
            continue;
        }
        rest = behind(rest, template::OPENING)?;
        // The model may write the token that closes a message, but not the message that follows.
        let next = messages.get(place + 1).filter(|next| next.role != "assistant").map(template::rendered_message);
        let end = format!("{}{}", template::CLOSING, next.as_deref().unwrap_or(template::OPENING));
        let length = rest.find(&end).ok_or_else(|| format!("nothing is followed by {:?}", shown(&end)))?;
        check_answer(&rest[..length], message, stop)?;
        rest = &rest[length + template::CLOSING.len()..];
    }
    // Behind the opening of the answer there may be what was sampled before.
    behind(rest, template::OPENING).map(drop)
}

/// An answer is the same if it has the same words, and its tool calls the same arguments. An agent may add arguments,
/// and it does not see what follows a text that ends an answer.
fn check_answer(written: &str, message: &WireMessage, stop: &[String]) -> Result<(), String> {
    let stopped = stop.iter().filter_map(|stop| written.find(stop.as_str())).min().map(|end| &written[..end]);
    if is_answer(written, message) || stopped.is_some_and(|written| is_answer(written, message)) {
        Ok(())
    } else {
        Err(format!("an answer is {:?}", shown(written)))
    }
}

fn is_answer(written: &str, message: &WireMessage) -> bool {
    let parsed = template::parse(written);
    let words = |text: &str| text.split_whitespace().collect::<String>();
    let calls: Vec<(&str, &str)> = message.calls().collect();
    let is_call = |((name, written), sent): (&(String, String), &(&str, &str))| {
        name == sent.0 && contains(&arguments(sent.1), &arguments(written))
    };
    let same_calls = parsed.calls.len() == calls.len() && parsed.calls.iter().zip(&calls).all(is_call);
    words(&parsed.content) == words(&message.text()) && same_calls
}

fn behind<'a>(text: &'a str, beginning: &str) -> Result<&'a str, String> {
    text.strip_prefix(beginning).ok_or_else(|| format!("{:?} is in the place of {:?}", shown(text), shown(beginning)))
}

fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_default()
}

/// What is no object is rendered as an empty one.
fn arguments(text: &str) -> Value {
    json(if template::is_object(text) { text } else { "{}" })
}

/// Whether a value has everything that another one has.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, value)| whole.get(name).is_some_and(|found| contains(found, value)))
        }
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (Value::Number(whole), Value::Number(part)) => whole.as_f64() == part.as_f64(),
        _ => whole == part,
    }
}
