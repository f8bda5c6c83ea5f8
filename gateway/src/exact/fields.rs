//! What the fields of a request say about its prompt, besides messages and tools.
//!
//! An engine that renders obeys these fields. Here the gateway renders, so it does what they say or refuses the call: an
//! agent that is not told takes the answer for one to another prompt.

use serde_json::value::RawValue;

use super::{ExactError, renderer::value};
use crate::{
    json::{Fields, Item},
    request::Request,
    template::Value,
    upstream::EngineKind,
};

/// Fields whose other values are refused, each with the value that changes nothing, and why.
const NEUTRAL: [(&str, &str, &str); 4] = [
    (
        "add_generation_prompt",
        "true",
        "must be true or absent in the mode exact, because each prompt ends with the beginning of an answer",
    ),
    (
        "add_special_tokens",
        "false",
        "must be false or absent in the mode exact, because the chat template writes all special tokens",
    ),
    (
        "continue_final_message",
        "false",
        "must be false or absent in the mode exact, because each answer is a message of its own; send what it should \
         continue as a message of the user",
    ),
    (
        "truncate_prompt_tokens",
        "null",
        "must be absent in the mode exact, because prompts are never cut; send a shorter conversation",
    ),
];

/// Arguments of `chat_template_kwargs` that the gateway sets itself.
const OWN: [&str; 3] = ["conversation", "messages", "tools"];

/// Refuses what would be ignored.
pub(super) fn check(request: &Request) -> Result<(), ExactError> {
    let unsupported = |field: &str, why: String| ExactError::Unsupported { field: field.to_owned(), why };
    let refused = |name: &str, sent: &RawValue| {
        let (_, neutral, why) = NEUTRAL.iter().find(|(field, ..)| *field == name)?;
        (![*neutral, "null"].contains(&sent.get())).then_some(*why)
    };
    for (name, sent) in &request.other {
        if let Some(why) = refused(name, sent) {
            return Err(unsupported(name, why.to_owned()));
        }
    }
    for (name, sent) in arguments(request) {
        let own =
            "must be absent in the mode exact, because the prompt is that of `messages` and `tools` of the request";
        let is_own = OWN.contains(&name.as_str());
        if let Some(why) = refused(&name, &sent).or(is_own.then_some(own)) {
            return Err(unsupported("chat_template_kwargs", format!("{name:?} {why}")));
        }
    }
    Ok(())
}

/// The variables of the template besides messages and tools.
pub(super) fn variables(request: &Request, kind: EngineKind) -> Vec<(String, Value)> {
    let is_variable = |name: &str| matches!(name, "documents" | "reasoning_effort");
    let named = request.other.iter().filter(|(name, sent)| is_variable(name) && sent.get() != "null").cloned();
    let named = named.map(|(name, sent)| (name, value(sent.get())));
    let arguments = arguments(request).into_iter().map(|(name, sent)| (name, value(sent.get())));
    if kind == EngineKind::Sglang {
        // Of two values with one name the later counts.
        return of_reasoning(request).into_iter().chain(named).chain(arguments).collect();
    }
    // vLLM switches reasoning with its effort. Some templates have only the switch.
    let effort = request.other.iter().find(|(name, sent)| name == "reasoning_effort" && sent.get() != "null");
    let thinks = effort.map(|(_, sent)| ("enable_thinking".to_owned(), Value::from(sent.get() != "\"none\"")));
    thinks.into_iter().chain(arguments).chain(named).collect()
}

/// What SGLang makes of its field `reasoning`.
fn of_reasoning(request: &Request) -> Vec<(String, Value)> {
    let Some((name, sent)) = request.other.iter().find(|(name, _)| name == "reasoning") else { return Vec::new() };
    let Ok(mut object) = Item::field(name, sent).object() else { return Vec::new() };
    let effort =
        object.take("effort").filter(|effort| matches!(effort.verbatim(), "\"low\"" | "\"medium\"" | "\"high\""));
    let effort = effort.map(|effort| ("reasoning_effort".to_owned(), value(effort.verbatim())));
    let thinks = object.take("enabled").filter(|enabled| enabled.verbatim() == "true");
    effort.into_iter().chain(thinks.map(|_| ("thinking".to_owned(), Value::from(true)))).collect()
}

/// The entries of `chat_template_kwargs`.
fn arguments(request: &Request) -> Fields {
    let sent = request.other.iter().find(|(name, _)| name == "chat_template_kwargs");
    // What is no object was refused when the body was read.
    sent.and_then(|(name, sent)| Some(Item::field(name, sent).object().ok()?.rest())).unwrap_or_default()
}
