//! Reading requests of Anthropic Messages.
//!
//! Content is a list of blocks here. Text blocks of one message become one text with a line break between blocks, and
//! `cache_control` is not read, because agents move it from call to call. A user's message with results of tools
//! becomes one message for each result and one for the text. Messages of the system may also add tools, and state the
//! effort of reasoning from there on.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::{
    completion::ToolCall,
    dialect::{
        client_tools,
        error::DialectError,
        fields,
        tools::{self, Images, Offer, Offered},
    },
    json::{self, Fields, Item, Object},
    request::{Content, Message, Request, Role, Tool, ToolChoice, Warnings},
};

/// Fields that concern Anthropic's service and not the model.
const SERVICE: [&str; 8] =
    ["metadata", "service_tier", "container", "context_management", "betas", "cache_control", "speed", "inference_geo"];

pub(in crate::dialect) fn parse(body: &[u8]) -> Result<Request, DialectError> {
    let mut object = Item::body(body)?.object()?;
    let (mut warnings, mut images) = (Warnings::default(), Images::default());
    let sampling = fields::take_sampling(&mut object)?;
    if object.take("mcp_servers").is_some_and(|item| item.verbatim() != "[]") {
        warnings.push("mcp_servers: MCP servers cannot be called from here and were left out".to_owned());
    }
    object.discard(&SERVICE);
    let thinks = !object.take("thinking").is_some_and(|thinking| is_disabled(&thinking));
    let model = object.require("model")?.name()?;
    let system =
        object.take("system").map(|item| text_of(&item, &mut images)).transpose()?.filter(|text| !text.is_empty());
    let mut messages: Vec<Message> = system.map(|text| Message::text(Role::System, text)).into_iter().collect();
    let mut offer = Offer::default();
    if let Some(list) = object.take("tools") {
        list.each(|item| read_tool(&item, &mut offer, &mut warnings))?;
    }
    offer.replace_repeated();
    let Config { mut effort, format } = config(object.take("output_config"))?;
    let mut reading = Reading { offer: &mut offer, images: &mut images, effort: &mut effort, warnings: &mut warnings };
    read_messages(&object.require("messages")?, &mut messages, &mut reading)?;
    let mut extra = Fields::new();
    let Offered { tools, client_tools, choice: tool_choice } = choose(offer, &mut object, &mut extra)?;
    let stream = object.take_boolean("stream")?.unwrap_or(false);
    let max_tokens = object.take("max_tokens").map(|item| item.positive()).transpose()?;
    let stop = fields::stop(object.take("stop_sequences"))?;
    if let Some(format) = object.take("output_format").or(format) {
        extra.push(("response_format".to_owned(), response_format(&format)?));
    }
    // Some engines would take an effort for a wish to reason.
    extra.extend(effort.filter(|_| thinks).map(|effort| ("reasoning_effort".to_owned(), effort)));
    let mut other = object.rest();
    other.retain(|(name, _)| extra.iter().all(|(own, _)| own != name));
    other.append(&mut extra);
    Ok(Request {
        model,
        messages,
        tools,
        tool_choice,
        stream,
        stream_usage: false,
        max_tokens,
        stop,
        sampling,
        other,
        client_tools,
        warnings,
        image: images.first,
        instructions: 0,
        bytes: body.len(),
    })
}

/// What messages add to besides the conversation.
struct Reading<'a> {
    offer: &'a mut Offer,
    images: &'a mut Images,
    /// The one that was stated last.
    effort: &'a mut Option<Box<RawValue>>,
    warnings: &'a mut Warnings,
}

fn read_messages(list: &Item<'_>, messages: &mut Vec<Message>, reading: &mut Reading<'_>) -> Result<(), DialectError> {
    let mut of_assistant = None;
    let count = list.each(|item| {
        let mut object = item.object()?;
        let role = object.require("role")?;
        let content = object.require("content")?;
        let name = role.string()?;
        match name.as_str() {
            "user" => read_user(&content, messages, reading.images)?,
            "assistant" => messages.push(assistant(&content, reading.warnings)?),
            // Claude Code sends such messages between the others.
            "system" => {
                if let Some(stated) = config(object.take("output_config"))?.effort {
                    *reading.effort = Some(stated);
                }
                let text = system_text(&content, reading)?;
                messages.extend((!text.is_empty()).then(|| Message::text(Role::System, text)));
            }
            other => return Err(role.invalid(format!("is {other:?}, which is no role of a message"))),
        }
        of_assistant = Some(item).filter(|_| name == "assistant");
        Ok(())
    })?;
    if count == 0 {
        return Err(list.invalid("must not be empty"));
    }
    match of_assistant {
        Some(newest) => {
            Err(newest.invalid("is of the assistant, and continuing a message of the assistant is not possible"))
        }
        None => Ok(()),
    }
}

/// A text, or the text blocks of a list.
fn text_of(item: &Item<'_>, images: &mut Images) -> Result<String, DialectError> {
    if item.is_string() {
        return item.string();
    }
    let mut texts = Vec::new();
    item.each(|block| {
        texts.push(block_text(&block, images)?);
        Ok(())
    })?;
    Ok(texts.join("\n"))
}

fn block_text(block: &Item<'_>, images: &mut Images) -> Result<String, DialectError> {
    let mut object = block.object()?;
    match object.require("type")?.string()?.as_str() {
        "text" => object.require("text")?.string(),
        "document" => document(block, images),
        // What a search for tools has found. The model is offered all tools of the request.
        "tool_reference" => Ok(available(&object.require("tool_name")?.string()?)),
        kind if images.has(block, kind) => Ok(tools::IMAGE.to_owned()),
        kind => Err(not_text(block, kind)),
    }
}

fn available(tool: &str) -> String {
    format!("The tool {tool} is available.")
}

/// The text of a message of the system, which may also add and remove tools.
fn system_text(content: &Item<'_>, reading: &mut Reading<'_>) -> Result<String, DialectError> {
    if content.is_string() {
        return content.string();
    }
    let mut texts = Vec::new();
    content.each(|block| {
        let mut object = block.object()?;
        texts.push(match object.require("type")?.string()?.as_str() {
            "tool_addition" => available(&changed_tool(&mut object, reading)?),
            // It is still offered, because tools are the beginning of the prompt, which would be another one.
            "tool_removal" => format!("The tool {} is not available.", changed_tool(&mut object, reading)?),
            _ => block_text(&block, reading.images)?,
        });
        Ok(())
    })?;
    Ok(texts.join("\n"))
}

/// The name of a tool that is added or removed. The model is offered the tool if its definition is there.
fn changed_tool(change: &mut Object<'_>, reading: &mut Reading<'_>) -> Result<String, DialectError> {
    let mut tool = change.require("tool")?.object()?;
    let Some(definition) = tool.take("definition") else { return tool.require("name")?.string() };
    read_tool(&definition, reading.offer, reading.warnings)?;
    definition.object()?.require("name")?.string()
}

/// The text of a document, behind what is said about it.
fn document(block: &Item<'_>, images: &mut Images) -> Result<String, DialectError> {
    let mut object = block.object()?;
    let mut source = object.require("source")?.object()?;
    let text = match source.require("type")?.string()?.as_str() {
        "text" => source.require("data")?.string()?,
        "content" => text_of(&source.require("content")?, images)?,
        kind => return Err(not_text(block, &format!("document, from a source of type {kind}"))),
    };
    let about = [object.take_string("title")?, object.take_string("context")?];
    let parts: Vec<String> = about.into_iter().flatten().chain([text]).collect();
    Ok(parts.join("\n"))
}

fn not_text(block: &Item<'_>, kind: &str) -> DialectError {
    block.unsupported(format!("is of type {kind:?}; sessions record text only"))
}

fn read_user(content: &Item<'_>, messages: &mut Vec<Message>, images: &mut Images) -> Result<(), DialectError> {
    if content.is_string() {
        messages.push(Message::text(Role::User, content.string()?));
        return Ok(());
    }
    let mut texts = Vec::new();
    let flush = |texts: &mut Vec<String>, messages: &mut Vec<Message>| {
        if !texts.is_empty() {
            messages.push(Message::text(Role::User, std::mem::take(texts).join("\n")));
        }
    };
    let count = content.each(|block| {
        let mut object = block.object()?;
        match object.require("type")?.string()?.as_str() {
            "tool_result" => {
                flush(&mut texts, messages);
                let id = object.require("tool_use_id")?.string()?;
                let text = object.take("content").map(|item| text_of(&item, images)).transpose()?;
                let text = text.unwrap_or_default();
                messages.push(Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) });
            }
            _ => texts.push(block_text(&block, images)?),
        }
        Ok(())
    })?;
    if count == 0 {
        return Err(content.invalid("must not be empty"));
    }
    flush(&mut texts, messages);
    Ok(())
}

fn assistant(content: &Item<'_>, warnings: &mut Warnings) -> Result<Message, DialectError> {
    let mut message = Message::empty(Role::Assistant);
    if content.is_string() {
        message.content = Content::Text(content.string()?);
        return Ok(message);
    }
    let (mut texts, mut thoughts) = (Vec::new(), Vec::new());
    content.each(|block| {
        let mut object = block.object()?;
        match object.require("type")?.string()?.as_str() {
            "text" => texts.push(object.require("text")?.string()?),
            "thinking" => thoughts.push(object.require("thinking")?.string()?),
            "tool_use" => message.tool_calls.push(tool_use(&mut object)?),
            // Blocks that only Anthropic's own models and tools make, such as `redacted_thinking` and `server_tool_use`.
            kind => warnings.left_out(&block, "block", kind),
        }
        Ok(())
    })?;
    // A block that was opened while its answer was waited for may have stayed empty.
    let had_text = !texts.is_empty();
    texts.retain(|text| !text.is_empty());
    if !texts.is_empty() || (had_text && message.tool_calls.is_empty()) {
        message.content = Content::Text(texts.join("\n"));
    }
    message.reasoning = Some(thoughts.join("\n")).filter(|text| !text.is_empty());
    Ok(message)
}

fn tool_use(object: &mut Object<'_>) -> Result<ToolCall, DialectError> {
    let id = object.require("id")?.string()?;
    let name = object.require("name")?.string()?;
    Ok(ToolCall { id, name, arguments: tools::arguments(object.take("input")) })
}

fn read_tool(item: &Item<'_>, offer: &mut Offer, warnings: &mut Warnings) -> Result<(), DialectError> {
    let mut tool = item.object()?;
    if let Some(kind) = tool.take_string("type")?.filter(|kind| kind != "custom") {
        if let Some(function) = client_tools::of_anthropic(&kind, &mut tool)? {
            return offer.add(function, item);
        }
        offer.leave_out(&kind, item, warnings);
        return Ok(());
    }
    let name = tool.require("name")?.string()?;
    let schema = tool.require("input_schema")?;
    let mut fields = Fields::new();
    let mut keep = |name: &str, item: Option<Item<'_>>| {
        fields.extend(item.map(|item| (name.to_owned(), item.to_raw())));
    };
    keep("description", tool.take("description"));
    keep("parameters", Some(schema));
    keep("strict", tool.take("strict"));
    offer.add(Tool::function(name, fields), item)
}

fn choose(offer: Offer, object: &mut Object<'_>, extra: &mut Fields) -> Result<Offered, DialectError> {
    let Some(item) = object.take("tool_choice") else { return offer.choose(None) };
    let mut choice = item.object()?;
    let kind = choice.require("type")?;
    let wanted = match kind.string()?.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => ToolChoice::Function(choice.require("name")?.string()?),
        _ => return Err(kind.invalid("must be \"auto\", \"any\", \"none\" or \"tool\"")),
    };
    if choice.take_boolean("disable_parallel_tool_use")? == Some(true) {
        extra.push(("parallel_tool_calls".to_owned(), json::raw(&false)));
    }
    offer.choose(Some((wanted, item)))
}

/// What `output_config` says of an answer.
#[derive(Default)]
struct Config<'a> {
    /// How much the model should reason, if it is a word that engines know.
    effort: Option<Box<RawValue>>,
    format: Option<Item<'a>>,
}

fn config(item: Option<Item<'_>>) -> Result<Config<'_>, DialectError> {
    let Some(item) = item else { return Ok(Config::default()) };
    let mut object = item.object()?;
    let effort = object.take("effort").and_then(|effort| fields::effort(&effort.to_raw()));
    Ok(Config { effort, format: object.take("format") })
}

/// Whether the agent wants an answer without reasoning.
fn is_disabled(thinking: &Item<'_>) -> bool {
    let kind = thinking.object().ok().and_then(|mut object| object.take("type"));
    kind.is_some_and(|kind| kind.verbatim() == "\"disabled\"")
}

/// The schema that the answer must have, in the shape of chat completions.
fn response_format(format: &Item<'_>) -> Result<Box<RawValue>, DialectError> {
    #[derive(Serialize)]
    struct Format<'a> {
        r#type: &'a str,
        json_schema: Schema<'a>,
    }
    #[derive(Serialize)]
    struct Schema<'a> {
        name: &'a str,
        schema: Box<RawValue>,
    }
    let schema = format.object()?.require("schema")?.to_raw();
    Ok(json::raw(&Format { r#type: "json_schema", json_schema: Schema { name: "output", schema } }))
}
