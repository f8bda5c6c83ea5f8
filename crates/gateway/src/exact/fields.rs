//! What the fields of a request say about its prompt, besides messages and tools.
//!
//! An engine that renders obeys these fields. Here the gateway renders, so it does what they say or refuses the call: an
//! agent that is not told takes the answer for one to another prompt.

use serde_json::value::RawValue;

use super::{error::ExactError, messages::value};
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

/// The effort with which engines switch reasoning off. Some templates have only a switch.
const NO_EFFORT: &str = "\"none\"";

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

/// The variables of the template besides messages and tools. Of two values with one name the later counts.
pub(super) fn variables(request: &Request, kind: EngineKind) -> Vec<(String, Value)> {
    let sent = |name: &str| request.other.iter().find(|(found, sent)| found == name && sent.get() != "null");
    let effort = sent("reasoning_effort").map(|(_, effort)| effort.get());
    let documents = sent("documents").map(|(_, documents)| ("documents".to_owned(), value(documents.get())));
    let arguments = arguments(request).into_iter().map(|(name, sent)| (name, value(sent.get())));
    let named = |effort: Option<&str>| effort.map(|effort| ("reasoning_effort".to_owned(), value(effort)));
    let switch = |name: &str, is_on: bool| (name.to_owned(), Value::from(is_on));
    if kind != EngineKind::Sglang {
        let thinks = effort.map(|effort| switch("enable_thinking", effort != NO_EFFORT));
        return thinks.into_iter().chain(arguments).chain(documents).chain(named(effort)).collect();
    }
    // The field `reasoning` of SGLang has both.
    let mut reasoning = sent("reasoning").and_then(|(name, sent)| Item::field(name, sent).object().ok());
    let mut take = |name: &str| Some(reasoning.as_mut()?.take(name)?.verbatim());
    let known = [NO_EFFORT, "\"low\"", "\"medium\"", "\"high\""];
    let effort = take("effort").filter(|effort| known.contains(effort)).or(effort);
    let is_on = if take("enabled") == Some("true") { Some(true) } else { (effort == Some(NO_EFFORT)).then_some(false) };
    let switches = is_on.into_iter().flat_map(|is_on| ["thinking", "enable_thinking"].map(|name| switch(name, is_on)));
    switches.chain(documents).chain(named(effort)).chain(arguments).collect()
}

/// The entries of `chat_template_kwargs`.
fn arguments(request: &Request) -> Fields {
    let sent = request.other.iter().find(|(name, _)| name == "chat_template_kwargs");
    // What is no object was refused when the body was read.
    sent.and_then(|(name, sent)| Some(Item::field(name, sent).object().ok()?.rest())).unwrap_or_default()
}
