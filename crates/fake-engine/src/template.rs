//! A chat template in the manner of Qwen3, and the parser of what the model writes.
//!
//! Reasoning of turns before the last question of the user is not rendered, as in Qwen3. So a conversation with
//! reasoning is not always extended by its next prompt.

use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::{Answer, EngineKind, tokenizer};

/// The template as Jinja. It writes JSON as Python does, so tools and arguments may have other spaces than those that
/// [`render`] copies.
pub(super) const JINJA: &str = include_str!("template.jinja");

/// What precedes an answer.
pub(super) const OPENING: &str = "<|im_start|>assistant\n";

/// What follows a message.
pub(super) const CLOSING: &str = "<|im_end|>\n";

/// A message as the engine reads it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireMessage {
    pub(super) role: String,
    content: Value,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
}

#[derive(Debug, Deserialize)]
struct WireCall {
    function: WireFunction,
}

#[derive(Debug, Deserialize)]
struct WireFunction {
    name: String,
    arguments: String,
}

impl WireMessage {
    /// Makes a text of parts, and objects of the arguments of tool calls, as the engine of this kind does before it renders.
    pub(super) fn prepare(&mut self, kind: EngineKind) {
        if let Value::Array(parts) = &self.content {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            let text = match kind {
                EngineKind::Sglang => texts.collect::<Vec<_>>().join(" "),
                EngineKind::Vllm | EngineKind::Openai => {
                    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
                }
            };
            self.content = text.into();
        }
        for call in self.tool_calls.iter_mut().flatten() {
            if !is_object(&call.function.arguments) && kind != EngineKind::Sglang {
                "{}".clone_into(&mut call.function.arguments);
            }
        }
    }

    pub(super) fn text(&self) -> String {
        self.content.as_str().unwrap_or_default().to_owned()
    }

    /// The names and arguments of its tool calls.
    pub(super) fn calls(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tool_calls.iter().flatten().map(|call| (call.function.name.as_str(), call.function.arguments.as_str()))
    }
}

/// Whether a text is that of a JSON object.
pub(super) fn is_object(text: &str) -> bool {
    serde_json::from_str(text).is_ok_and(|value: Value| value.is_object())
}

/// The prompt of a conversation, up to where the assistant begins.
pub(super) fn render(messages: &[WireMessage], tools: &[Box<RawValue>]) -> String {
    let mut prompt = String::new();
    let mut messages = messages;
    let system = messages.split_first().filter(|(first, _)| first.role == "system");
    if let Some((_, rest)) = system {
        messages = rest;
    }
    let mut head = system.map(|(first, _)| first.text()).unwrap_or_default();
    if !tools.is_empty() {
        head += "\n\n# Tools\n";
        for tool in tools {
            write!(head, "\n{tool}").expect("a string accepts all text");
        }
    }
    if !head.is_empty() {
        turn(&mut prompt, "system", &head);
    }
    let last_question = messages.iter().rposition(|message| message.role == "user").unwrap_or(0);
    for (place, message) in messages.iter().enumerate() {
        match message.role.as_str() {
            "assistant" => turn(&mut prompt, "assistant", &rendered_turn(message, place > last_question)),
            _ => prompt += &rendered_message(message),
        }
    }
    prompt + OPENING
}

/// A message that the model did not write.
pub(super) fn rendered_message(message: &WireMessage) -> String {
    let mut text = String::new();
    match message.role.as_str() {
        "tool" => turn(&mut text, "user", &format!("<tool_response>\n{}\n</tool_response>", message.text())),
        role => turn(&mut text, role, &message.text()),
    }
    text
}

/// How many answers a rendered conversation has behind the first message of the user with this key.
pub(super) fn turns_behind(prompt: &str, key: &str) -> Option<usize> {
    let said = |place: &usize| prompt[*place..].split("<|im_end|>").next().is_some_and(|said| said.contains(key));
    let place = prompt.match_indices("<|im_start|>user\n").map(|(place, _)| place).find(said)?;
    Some(prompt[place..].matches(OPENING).count().saturating_sub(1))
}

/// What a prompt has behind the opening of the answer.
pub(super) fn begun(prompt: &[i32]) -> &[i32] {
    let opening = tokenizer::encode(OPENING);
    let place = prompt.windows(opening.len()).rposition(|ids| ids == opening);
    place.map_or(&[], |place| &prompt[place + opening.len()..])
}

/// What the model writes for an answer, without the end token.
pub(super) fn written(answer: &Answer) -> String {
    let calls = answer.calls.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str()));
    assistant(answer.reasoning.as_deref(), &answer.content, calls)
}

/// What begins and ends a thought, and a tool call.
const THINK: &str = "<think>\n";
const THOUGHT: &str = "\n</think>\n\n";
const CALL: &str = "<tool_call>\n";
const CALLED: &str = "\n</tool_call>";

/// What a model's text contains.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    pub(super) reasoning: Option<String>,
    pub(super) content: String,
    pub(super) calls: Vec<(String, String)>,
}

/// What an engine makes of a text: one without a parser leaves special tokens out and reads nothing else.
pub(super) fn parse_if(parses: bool, text: &str) -> Parsed {
    if parses {
        return parse(text);
    }
    Parsed { content: text.replace("<|im_end|>", "").replace("<|im_start|>", ""), ..Parsed::default() }
}

/// Reads the beginning of what the model writes: what it says whatever follows.
pub(super) fn parse_beginning(text: &str) -> Parsed {
    let mut parsed = Parsed::default();
    let mut rest = text;
    if text.len() < THINK.len() && THINK.starts_with(text) {
        return parsed;
    }
    if let Some(thinking) = text.strip_prefix(THINK) {
        let Some((reasoning, behind)) = thinking.split_once(THOUGHT) else {
            parsed.reasoning = Some(without_begun(thinking, THOUGHT).to_owned());
            return parsed;
        };
        parsed.reasoning = Some(reasoning.to_owned());
        rest = behind;
    }
    let mut parts = rest.split(CALL);
    let said = parts.next().unwrap_or_default();
    let said = if said == rest { without_begun(said, CALL) } else { said };
    said.trim_end_matches('\n').clone_into(&mut parsed.content);
    parsed.calls = parts.map_while(begun_call).collect();
    parsed
}

/// The name and the beginning of the arguments of a call, if its name is known.
fn begun_call(text: &str) -> Option<(String, String)> {
    let body = text.split_once(CALLED).map_or_else(|| without_begun(text, CALLED), |(body, _)| body);
    let (name, behind) = body.strip_prefix("{\"name\": \"")?.split_once('"')?;
    let arguments = behind.strip_prefix(", \"arguments\": ").unwrap_or_default();
    // The last brace belongs to what is around the arguments.
    let arguments = if is_object(body) { &arguments[..arguments.len() - 1] } else { arguments };
    Some((name.to_owned(), arguments.to_owned()))
}

/// A text without the beginning of a mark at its end.
fn without_begun<'a>(text: &'a str, mark: &str) -> &'a str {
    let begun = (0..mark.len()).rev().find(|&length| mark.is_char_boundary(length) && text.ends_with(&mark[..length]));
    &text[..text.len() - begun.unwrap_or(0)]
}

/// Reads what the model wrote. An unfinished tool call stays text.
pub(super) fn parse(text: &str) -> Parsed {
    let (reasoning, mut rest) = separated(text);
    let mut parsed = Parsed { reasoning: reasoning.map(str::to_owned), ..Parsed::default() };
    while let Some((before, behind)) = rest.split_once(CALL) {
        let Some((body, after)) = behind.split_once(CALLED) else { break };
        let Ok(call) = serde_json::from_str::<WrittenCall<'_>>(body) else { break };
        parsed.content += before.trim_end_matches('\n');
        parsed.calls.push((call.name, call.arguments.get().to_owned()));
        rest = after;
    }
    parsed.content += rest;
    parsed
}

/// The reasoning of a text, and the rest.
pub(super) fn separated(text: &str) -> (Option<&str>, &str) {
    let Some(thinking) = text.strip_prefix(THINK) else { return (None, text) };
    let (reasoning, behind) = thinking.split_once(THOUGHT).unwrap_or((thinking, ""));
    (Some(reasoning), behind)
}

#[derive(Deserialize)]
struct WrittenCall<'a> {
    name: String,
    #[serde(borrow)]
    arguments: &'a RawValue,
}

fn rendered_turn(message: &WireMessage, with_reasoning: bool) -> String {
    let reasoning = message.reasoning_content.as_deref().or(message.reasoning.as_deref());
    assistant(reasoning.filter(|_| with_reasoning), &message.text(), message.calls())
}

fn assistant<'a>(reasoning: Option<&str>, content: &str, calls: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = reasoning.map(|reasoning| format!("{THINK}{reasoning}{THOUGHT}")).unwrap_or_default();
    text += content;
    for (place, (name, arguments)) in calls.enumerate() {
        if place > 0 || !content.is_empty() {
            text.push('\n');
        }
        write!(text, "{CALL}{{\"name\": \"{name}\", \"arguments\": {arguments}}}{CALLED}")
            .expect("a string accepts all text");
    }
    text
}

fn turn(prompt: &mut String, role: &str, text: &str) {
    write!(prompt, "<|im_start|>{role}\n{text}{CLOSING}").expect("a string accepts all text");
}
