//! OpenAI chat completions.

use serde_json::{Value, json};

use super::{
    client_tool::ClientTool,
    client_tools,
    envelope::{Envelope, Model},
    error::DialectError,
    fields,
    sse::SseEvent,
    tools::{self, Images, Offer, Offered},
};
use crate::{
    completion::{Completion, Finish, Piece, StopMatch, ToolCall, Usage},
    json::{self, Item, Object},
    request::{Content, Message, Request, Role, Tool, ToolChoice, Warnings},
};

/// Types of content parts that are text, each with the fields that may have it.
const TEXT: [(&str, &[&str]); 6] = [
    ("text", &["text"]),
    ("input_text", &["text"]),
    ("output_text", &["text"]),
    ("refusal", &["refusal"]),
    ("thinking", &["thinking", "text"]),
    ("reasoning", &["thinking", "text"]),
];

pub(super) fn parse(body: &[u8]) -> Result<Request, DialectError> {
    let mut object = Item::body(body)?.object()?;
    let (mut warnings, mut images) = (Warnings::default(), Images::default());
    let sampling = fields::take_sampling(&mut object)?;
    for name in ["functions", "function_call"] {
        if let Some(item) = object.take(name) {
            return Err(item.invalid("is the deprecated form of `tools` and `tool_choice`"));
        }
    }
    if object.take("web_search_options").is_some() {
        warnings.push("web_search_options: web search cannot run here and was left out".to_owned());
    }
    let model = object.require("model")?.name()?;
    let messages = messages(&object.require("messages")?, &mut images)?;
    let Offered { tools, client_tools, choice: tool_choice } = tools(&mut object, &mut warnings)?;
    let stream = object.take_boolean("stream")?.unwrap_or(false);
    let stream_usage = stream_usage(&mut object)?;
    let newer = object.take("max_completion_tokens");
    let older = object.take("max_tokens");
    let max_tokens = newer.or(older).map(|item| item.positive()).transpose()?;
    let stop = fields::stop(object.take("stop"))?;
    let mut other = object.rest();
    if let Some((_, effort)) = other.iter_mut().find(|(name, _)| name == "reasoning_effort")
        && let Some(known) = fields::effort(effort)
    {
        *effort = known;
    }
    Ok(Request {
        model,
        messages,
        tools,
        tool_choice,
        stream,
        stream_usage,
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

pub(super) fn answer(completion: &Completion, envelope: &Envelope) -> Vec<u8> {
    let message = &completion.message;
    let mut body = json!({"role": "assistant", "content": message.content, "refusal": null});
    if message.content.is_none() && message.tool_calls.is_empty() {
        // Agents that read no reasoning expect a text.
        body["content"] = json!("");
    }
    if let Some(reasoning) = &message.reasoning {
        // Each name is the only one that some clients and engines know.
        body["reasoning_content"] = json!(reasoning);
        body["reasoning"] = json!(reasoning);
    }
    if !message.tool_calls.is_empty() {
        body["tool_calls"] = message.tool_calls.iter().map(|call| tool_call(call, envelope)).collect();
    }
    let mut answer = json!({
        "id": format!("chatcmpl-{}", envelope.id),
        "object": "chat.completion",
        "created": envelope.created_s,
        "model": envelope.model,
        "choices": [{
            "index": 0,
            "message": body,
            "logprobs": null,
            "finish_reason": finish_reason(completion.outcome()),
            "stop_reason": stop_reason(completion),
        }],
        "usage": usage(&completion.usage),
    });
    mark(&mut answer, completion);
    answer.to_string().into_bytes()
}

/// The event that begins an answer.
pub(super) fn begin(envelope: &Envelope) -> SseEvent {
    delta(envelope, &json!({"role": "assistant", "content": ""}))
}

pub(super) fn piece(piece: &Piece, envelope: &Envelope) -> SseEvent {
    match piece {
        Piece::Reasoning(text) => delta(envelope, &json!({"reasoning_content": text, "reasoning": text})),
        Piece::Text(text) => delta(envelope, &json!({"content": text})),
        Piece::Call { id, name } => {
            let call = ToolCall { id: id.clone(), name: name.clone(), arguments: String::new() };
            delta(envelope, &json!({"tool_calls": [numbered(0, tool_call(&call, envelope))]}))
        }
        Piece::Arguments(text) => {
            let more = json!({"function": {"arguments": text}});
            delta(envelope, &json!({"tool_calls": [numbered(0, more)]}))
        }
    }
}

fn numbered(index: usize, mut call: Value) -> Value {
    call["index"] = json!(index);
    call
}

/// The events behind the thought and the text. `sent` is how much of the arguments of the first call was sent, if that
/// call has begun.
pub(super) fn end(completion: &Completion, envelope: &Envelope, sent: Option<usize>) -> Vec<SseEvent> {
    let mut calls = completion.message.tool_calls.iter().enumerate();
    let mut events = Vec::new();
    if let Some(sent) = sent
        && let Some((_, begun)) = calls.next()
    {
        let rest = begun.arguments.get(sent..).filter(|rest| !rest.is_empty());
        events.extend(rest.map(|rest| piece(&Piece::Arguments(rest.to_owned()), envelope)));
    }
    if calls.len() > 0 {
        // Whole, because some clients put the pieces of several calls together wrongly.
        let calls = calls.map(|(index, call)| numbered(index, tool_call(call, envelope)));
        events.push(delta(envelope, &json!({"tool_calls": calls.collect::<Value>()})));
    }
    let reason = finish_reason(completion.outcome());
    let stop = stop_reason(completion);
    let mut last = chunk(envelope, json!([{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": stop}]));
    mark(&mut last, completion);
    events.push(SseEvent::unnamed(&last));
    if envelope.stream_usage {
        let mut counts = chunk(envelope, json!([]));
        counts["usage"] = usage(&completion.usage);
        events.push(SseEvent::unnamed(&counts));
    }
    events.push(SseEvent { event: None, data: "[DONE]".to_owned() });
    events
}

pub(super) fn models(models: &[Model<'_>], created_s: u64) -> Vec<u8> {
    let data: Value = models.iter().map(|entry| model(entry, created_s)).collect();
    json!({"object": "list", "data": data}).to_string().into_bytes()
}

pub(super) fn model(model: &Model<'_>, created_s: u64) -> Value {
    let mut entry = json!({"id": model.name, "object": "model", "created": created_s, "owned_by": "forebay"});
    if let Some(tokens) = model.context_tokens {
        // The field of vLLM, by which agents decide when to compact a conversation.
        entry["max_model_len"] = json!(tokens);
    }
    entry
}

fn messages(item: &Item<'_>, images: &mut Images) -> Result<Vec<Message>, DialectError> {
    let mut messages = Vec::new();
    item.each(|item| {
        messages.push(message(&item, images)?);
        Ok(())
    })?;
    if messages.is_empty() {
        return Err(item.invalid("must not be empty"));
    }
    Ok(messages)
}

fn message(item: &Item<'_>, images: &mut Images) -> Result<Message, DialectError> {
    let mut object = item.object()?;
    let role = object.require("role")?;
    let role = match role.string()?.as_str() {
        "system" => Role::System,
        "developer" => Role::Developer,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => return Err(role.invalid(format!("is {other:?}, which is no role of a message"))),
    };
    if let Some(item) = object.take("function_call") {
        return Err(item.invalid("is the deprecated form of `tool_calls`"));
    }
    let content = match role {
        Role::Assistant => {
            object.take("content").map(|item| content(&item, images)).transpose()?.unwrap_or(Content::Absent)
        }
        // A tool that returns nothing.
        Role::Tool => match object.require_or_null("content")? {
            Some(item) => content(&item, images)?,
            None => Content::Text(String::new()),
        },
        _ => match object.take("content") {
            Some(item) => content(&item, images)?,
            None => return Err(item.invalid("has no content")),
        },
    };
    let newer = object.take_string("reasoning")?;
    let older = object.take_string("reasoning_content")?;
    let reasoning = older.into_iter().chain(newer).find(|text| !text.is_empty());
    let calls = object.take("tool_calls");
    let mut tool_calls = Vec::new();
    if let Some(calls) = &calls {
        calls.each(|item| {
            tool_calls.push(read_tool_call(&item)?);
            Ok(())
        })?;
    }
    if let Some(calls) = calls
        && role != Role::Assistant
        && !tool_calls.is_empty()
    {
        return Err(calls.invalid("belongs only to messages of the assistant"));
    }
    let tool_call_id = match role {
        Role::Tool => Some(object.require("tool_call_id")?.string()?),
        _ => object.take_string("tool_call_id")?,
    };
    Ok(Message { role, content, reasoning, tool_calls, tool_call_id, other: object.rest() })
}

fn content(item: &Item<'_>, images: &mut Images) -> Result<Content, DialectError> {
    if item.is_string() {
        return Ok(Content::Text(item.string()?));
    }
    if !item.is_array() {
        return Err(item.invalid("must be a string or an array of parts"));
    }
    let mut has_images = false;
    item.each(|part| {
        has_images |= is_image(&part, images)?;
        Ok(())
    })?;
    if !has_images {
        return Ok(Content::Parts(item.to_raw()));
    }
    let mut parts = Vec::new();
    item.each(|part| {
        let text = || json::raw(&json!({"type": "text", "text": tools::IMAGE}));
        parts.push(if is_image(&part, images)? { text() } else { part.to_raw() });
        Ok(())
    })?;
    Ok(Content::Parts(json::raw(&parts)))
}

/// Whether a part is an image; everything else must be text. What else a text has is not sent to the engine.
fn is_image(part: &Item<'_>, images: &mut Images) -> Result<bool, DialectError> {
    let mut object = part.object()?;
    let kind = object.require("type")?.string()?;
    if images.has(part, &kind) {
        return Ok(true);
    }
    let Some((_, fields)) = TEXT.iter().find(|(known, _)| *known == kind) else {
        return Err(part.unsupported(format!("is of type {kind:?}; sessions record text only")));
    };
    let texts = object.take_fields(fields.iter().copied());
    match texts.iter().find(|(_, text)| !text.get().starts_with('"')) {
        Some((name, _)) => Err(DialectError::invalid(format!("{}.{name}", part.path()), "must be a string")),
        None if texts.is_empty() => Err(DialectError::invalid(format!("{}.{}", part.path(), fields[0]), "is missing")),
        None => Ok(false),
    }
}

fn read_tool_call(item: &Item<'_>) -> Result<ToolCall, DialectError> {
    let mut object = item.object()?;
    let kind = object.take("type").map(|kind| Ok::<_, DialectError>((kind.string()?, kind))).transpose()?;
    let id = object.require("id")?.string()?;
    match kind {
        Some((name, _)) if name == "custom" => {
            let mut custom = object.require("custom")?.object()?;
            let name = custom.require("name")?.string()?;
            let arguments = client_tools::free_form_arguments(&custom.take_string("input")?.unwrap_or_default());
            return Ok(ToolCall { id, name, arguments });
        }
        Some((name, kind)) if name != "function" => {
            return Err(kind.unsupported("must be \"function\" or \"custom\""));
        }
        _ => {}
    }
    let mut function = object.require("function")?.object()?;
    let name = function.require("name")?.string()?;
    Ok(ToolCall { id, name, arguments: tools::arguments(function.take("arguments")) })
}

fn tools(object: &mut Object<'_>, warnings: &mut Warnings) -> Result<Offered, DialectError> {
    let mut offer = Offer::default();
    if let Some(list) = object.take("tools") {
        list.each(|item| {
            let mut tool = item.object()?;
            let kind = tool.require("type")?.string()?;
            match kind.as_str() {
                "function" => {
                    let name = tool.require("function")?.object()?.require("name")?.string()?;
                    offer.add(Tool { name, definition: item.to_raw() }, &item)
                }
                "custom" => {
                    let mut custom = tool.require("custom")?.object()?;
                    offer.add_of_client(client_tools::free_form(&mut custom, None)?, &item)
                }
                _ => {
                    offer.leave_out(&kind, &item, warnings);
                    Ok(())
                }
            }
        })?;
    }
    let Some(item) = object.take("tool_choice") else { return offer.choose(None) };
    let choice = tool_choice(&item, &mut offer)?;
    offer.choose(Some((choice, item)))
}

fn tool_choice(item: &Item<'_>, offer: &mut Offer) -> Result<ToolChoice, DialectError> {
    if item.is_string() {
        return match item.string()?.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(item.invalid("must be \"auto\", \"none\", \"required\" or a tool")),
        };
    }
    let mut object = item.object()?;
    let kind = object.require("type")?;
    if kind.string()? == "allowed_tools" {
        let mut allowed = object.require("allowed_tools")?.object()?;
        return offer.allow(&mut allowed, |tool| chosen(tool).map(Some));
    }
    chosen(&mut item.object()?).map(ToolChoice::Function)
}

/// The function that is named.
fn chosen(object: &mut Object<'_>) -> Result<String, DialectError> {
    let kind = object.require("type")?;
    let field = kind.string()?;
    if !matches!(field.as_str(), "function" | "custom") {
        return Err(kind.invalid("must be \"function\" or \"custom\", because no other tool can run here"));
    }
    object.require(&field)?.object()?.require("name")?.string()
}

fn stream_usage(object: &mut Object<'_>) -> Result<bool, DialectError> {
    let Some(options) = object.take("stream_options") else { return Ok(false) };
    Ok(options.object()?.take_boolean("include_usage")?.unwrap_or(false))
}

fn tool_call(call: &ToolCall, envelope: &Envelope) -> Value {
    if let Some(ClientTool::Custom { name, .. }) = envelope.tools.get(&call.name) {
        let input = client_tools::free_form_input(&call.arguments);
        return json!({"id": call.id, "type": "custom", "custom": {"name": name, "input": input}});
    }
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}

fn delta(envelope: &Envelope, delta: &Value) -> SseEvent {
    SseEvent::unnamed(&chunk(envelope, json!([{"index": 0, "delta": delta, "finish_reason": null}])))
}

fn chunk(envelope: &Envelope, choices: Value) -> Value {
    let mut chunk = json!({
        "id": format!("chatcmpl-{}", envelope.id),
        "object": "chat.completion.chunk",
        "created": envelope.created_s,
        "model": envelope.model,
    });
    chunk["choices"] = choices;
    if envelope.stream_usage {
        chunk["usage"] = Value::Null;
    }
    chunk
}

fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    }
}

/// The stop text that ended an answer, in the field of vLLM.
fn stop_reason(completion: &Completion) -> Option<&str> {
    match &completion.stop_matched {
        Some(StopMatch::Text(text)) => Some(text),
        Some(StopMatch::Token(_) | StopMatch::EndOfSequence) | None => None,
    }
}

/// Adds what the engine calls its configuration. Engines put it into the last chunk of events.
fn mark(answer: &mut Value, completion: &Completion) {
    if let Some(fingerprint) = &completion.system_fingerprint {
        answer["system_fingerprint"] = json!(fingerprint);
    }
}

fn usage(usage: &Usage) -> Value {
    let mut counts = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens.unwrap_or(0)},
    });
    if let Some(tokens) = usage.reasoning_tokens {
        counts["completion_tokens_details"] = json!({"reasoning_tokens": tokens});
    }
    counts
}
