//! Messages and tools as an engine of one kind shows them to a template.
//!
//! The gateway renders what the engine would have rendered, so that a policy has the same prompts in both modes, and so
//! that a policy that was trained here is served with the prompts that it knows. Engines differ in what they put between the
//! parts of a text, in the fields of a message that a template sees, and in how they complete the definition of a tool.

use minijinja::value::ValueKind;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use super::error::ExactError;
use crate::{
    completion::ToolCall,
    request::{Content, Message, Request, Role, Tool, ToolChoice},
    template::Value,
    upstream::EngineKind,
};

/// The first words of a line in Claude Code's system message. It differs in each request, and vLLM leaves it out.
const BILLING: &str = "x-anthropic-billing-header";

/// How an engine shows messages to a template.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) kind: EngineKind,
    /// Whether the template gets lists of parts.
    pub(super) keeps_parts: bool,
}

/// A part of a message. Dialects accept only text.
#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
    refusal: Option<String>,
    thinking: Option<String>,
}

impl Manner {
    fn is_sglang(self) -> bool {
        self.kind == EngineKind::Sglang
    }

    pub(super) fn message(self, message: &Message) -> Result<Value, ExactError> {
        let mut shown = vec![("role", Value::from(message.role.engine_name())), ("content", self.content(message)?)];
        if let (Role::Assistant, Some(reasoning)) = (message.role, &message.reasoning) {
            shown.push(("reasoning_content", Value::from(reasoning.as_str())));
            if !self.is_sglang() {
                shown.push(("reasoning", Value::from(reasoning.as_str())));
            }
        }
        if !message.tool_calls.is_empty() {
            shown.push(("tool_calls", message.tool_calls.iter().map(|call| self.tool_call(call)).collect()));
        }
        if let Some(id) = &message.tool_call_id {
            shown.push(("tool_call_id", Value::from(id.as_str())));
        }
        let name = message.other.iter().find(|(name, _)| name == "name").map(|(_, sent)| value(sent.get()));
        // SGLang's messages of users have no name.
        if let Some(name) = name.filter(|name| name.as_str().is_some())
            && !(self.is_sglang() && message.role == Role::User)
        {
            shown.push(("name", name));
        }
        Ok(Value::from_pairs(shown))
    }

    fn content(self, message: &Message) -> Result<Value, ExactError> {
        let texts = match &message.content {
            Content::Absent => Vec::new(),
            // SGLang does not make parts of a text.
            Content::Text(text) if self.is_sglang() => return Ok(Value::from(text.as_str())),
            Content::Text(text) => vec![text.clone()],
            Content::Parts(parts) => self.texts(parts)?,
        };
        let texts: Vec<String> = match message.role {
            Role::System | Role::Developer if !self.is_sglang() => {
                texts.into_iter().filter_map(without_billing).collect()
            }
            _ => texts,
        };
        // Results of tools are texts for all templates.
        let is_list = self.keeps_parts && message.role != Role::Tool;
        Ok(match (is_list, &message.content) {
            (true, Content::Absent) if self.is_sglang() => Value::from(""),
            (true, _) => texts.iter().map(|text| value(&json!({"type": "text", "text": text}).to_string())).collect(),
            (false, _) if self.is_sglang() => Value::from(texts.join(" ")),
            // vLLM leaves out parts without text, unless it has made a list of them before.
            (false, _) => {
                let kept = texts.iter().filter(|text| self.keeps_parts || !text.is_empty());
                Value::from(kept.map(String::as_str).collect::<Vec<_>>().join("\n"))
            }
        })
    }

    fn texts(self, parts: &RawValue) -> Result<Vec<String>, ExactError> {
        let parts: Vec<Part> = serde_json::from_str(parts.get()).unwrap_or_default();
        let text = |part: Part| {
            let text = match part.r#type.as_str() {
                "text" | "input_text" => part.text,
                "output_text" if !self.is_sglang() => part.text,
                "refusal" if !self.is_sglang() => part.refusal,
                "thinking" if !self.is_sglang() => part.thinking,
                _ => None,
            };
            let why = || format!("a part of type {:?} is not supported by the engine, only text", part.r#type);
            text.ok_or_else(|| ExactError::Unsupported { field: "messages".to_owned(), why: why() })
        };
        parts.into_iter().map(text).collect()
    }

    /// Templates expect arguments to be an object. What is none is shown as an empty one, as vLLM does; SGLang would refuse
    /// the call, and then every later call of the conversation. A template may write the whole, so the order counts.
    fn tool_call(self, call: &ToolCall) -> Value {
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
        let arguments = if arguments.kind() == ValueKind::Map { arguments } else { value("{}") };
        let (name, arguments) = (("name", Value::from(call.name.as_str())), ("arguments", arguments));
        let function = if self.is_sglang() { [name, arguments] } else { [arguments, name] };
        let (id, function) = (("id", Value::from(call.id.as_str())), ("function", Value::from_pairs(function)));
        let kind = ("type", Value::from("function"));
        Value::from_pairs(if self.is_sglang() { [id, kind, function] } else { [id, function, kind] })
    }

    /// The tools that the template sees; `None` if there are none.
    pub(super) fn tools(self, request: &Request) -> Option<Value> {
        let is_shown = |tool: &&Tool| match &request.tool_choice {
            Some(ToolChoice::None) if self.is_sglang() => false,
            Some(ToolChoice::Function(name)) if self.is_sglang() => tool.name == *name,
            _ => true,
        };
        let tools: Vec<Value> = request.tools.iter().filter(is_shown).map(|tool| self.tool(tool)).collect();
        (!tools.is_empty()).then(|| Value::from(tools))
    }

    /// Engines read a tool into their own structure, and write all fields of that.
    fn tool(self, tool: &Tool) -> Value {
        let sent = value(tool.definition.get()).get_attr("function").unwrap_or_default();
        let field = |name: &'static str| {
            let found = sent.get_attr(name).unwrap_or_default();
            (name, if found.is_undefined() { Value::from(()) } else { found })
        };
        let function = if self.is_sglang() {
            vec![field("description"), field("name"), field("parameters"), ("strict", Value::from(false))]
        } else {
            vec![field("name"), field("description"), field("parameters")]
        };
        Value::from_pairs([("type", Value::from("function")), ("function", Value::from_pairs(function))])
    }
}

/// JSON with the order of its keys.
pub(super) fn value(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

/// A text of the system without its line for Claude Code's account; `None` if there is nothing else.
fn without_billing(text: String) -> Option<String> {
    if !text.starts_with(BILLING) {
        return Some(text);
    }
    text.split_once('\n').map(|(_, rest)| rest.to_owned()).filter(|rest| !rest.is_empty())
}
