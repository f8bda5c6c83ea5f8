//! Anthropic Messages.
//!
//! Content is a list of blocks here. Text blocks of one message become one text with a line break between blocks, and
//! `cache_control` is not read, because agents move it from call to call. A user's message with results of tools
//! becomes one message for each result and one for the text.

use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::{Value, json, value::RawValue};

use super::{
    DialectError, Envelope, Model, SseEvent, client_tools, fields,
    tools::{self, Images, Offer, Offered, object_text},
};
use crate::{
    completion::{Completion, Finish, Piece, StopMatch, ToolCall, Usage},
    hash::{fnv1a, fnv1a_on},
    json::{self, Fields, Item, Object},
    request::{Content, Message, Request, Role, Tool, ToolChoice, Warnings},
};

/// Fields that concern Anthropic's service and not the model.
const SERVICE: [&str; 9] = [
    "metadata",
    "service_tier",
    "container",
    "context_management",
    "thinking",
    "betas",
    "cache_control",
    "speed",
    "inference_geo",
];

/// Bytes of a body per token, for an estimate. English text has about four.
const BYTES_PER_TOKEN: u64 = 4;

pub(super) fn parse(body: &[u8]) -> Result<Request, DialectError> {
    let mut object = Item::body(body)?.object()?;
    let (mut warnings, mut images) = (Warnings::default(), Images::default());
    let sampling = fields::take_sampling(&mut object)?;
    if object.take("mcp_servers").is_some_and(|item| item.verbatim() != "[]") {
        warnings.push("mcp_servers: MCP servers cannot be called from here and were left out".to_owned());
    }
    object.discard(&SERVICE);
    let model = object.require("model")?.name()?;
    let system =
        object.take("system").map(|item| text_of(&item, &mut images)).transpose()?.filter(|text| !text.is_empty());
    let list = object.require("messages")?;
    let mut messages: Vec<Message> = system.map(|text| Message::text(Role::System, text)).into_iter().collect();
    read_messages(&list, &mut messages, &mut images, &mut warnings)?;
    let mut extra = Fields::new();
    let Offered { tools, client_tools, choice: tool_choice } = tools(&mut object, &mut extra, &mut warnings)?;
    let stream = object.take_boolean("stream")?.unwrap_or(false);
    let max_tokens = object.take("max_tokens").map(|item| item.positive()).transpose()?;
    let stop = fields::stop(object.take("stop_sequences"))?;
    if let Some(format) = output_format(&mut object)? {
        extra.push(("response_format".to_owned(), format));
    }
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

pub(super) fn answer(completion: &Completion, envelope: &Envelope) -> Vec<u8> {
    let (reason, sequence) = stop_reason(completion);
    let answer = WireMessage {
        envelope,
        content: blocks(completion),
        stop_reason: Some(reason),
        stop_sequence: sequence,
        usage: usage(&completion.usage),
    };
    json::text(&answer).into_bytes()
}

/// The events of an answer that is written block by block.
#[derive(Debug, Default)]
pub(super) struct Stream {
    has_begun: bool,
    /// The number of blocks that are closed.
    closed: usize,
    open: Option<OpenBlock>,
}

#[derive(Debug)]
enum OpenBlock {
    Thinking {
        /// Of its text so far.
        hash: u64,
    },
    Text,
}

impl Stream {
    /// A sign of life: the beginning of the answer with a block for its text, and then an event that adds nothing to the
    /// open block. Clients do not count a ping as an event.
    pub(super) fn alive(&mut self, envelope: &Envelope) -> Vec<SseEvent> {
        match self.open {
            Some(OpenBlock::Thinking { .. }) => self.reasoning("", envelope),
            Some(OpenBlock::Text) | None => self.text("", envelope),
        }
    }

    pub(super) fn piece(&mut self, piece: &Piece, envelope: &Envelope) -> Vec<SseEvent> {
        match piece {
            Piece::Reasoning(text) => self.reasoning(text, envelope),
            Piece::Text(text) => self.text(text, envelope),
        }
    }

    fn reasoning(&mut self, text: &str, envelope: &Envelope) -> Vec<SseEvent> {
        let mut events = self.begin(envelope, &Usage::default());
        if !matches!(self.open, Some(OpenBlock::Thinking { .. })) {
            events.extend(self.close());
            events.push(opening(self.closed, &json!({"type": "thinking", "thinking": "", "signature": ""})));
        }
        let hash = match self.open {
            Some(OpenBlock::Thinking { hash }) => hash,
            Some(OpenBlock::Text) | None => fnv1a([]),
        };
        self.open = Some(OpenBlock::Thinking { hash: fnv1a_on(hash, text.bytes()) });
        events.push(delta(self.closed, &json!({"type": "thinking_delta", "thinking": text})));
        events
    }

    fn text(&mut self, text: &str, envelope: &Envelope) -> Vec<SseEvent> {
        let mut events = self.begin(envelope, &Usage::default());
        if !matches!(self.open, Some(OpenBlock::Text)) {
            events.extend(self.close());
            events.push(opening(self.closed, &json!({"type": "text", "text": ""})));
        }
        self.open = Some(OpenBlock::Text);
        events.push(delta(self.closed, &json!({"type": "text_delta", "text": text})));
        events
    }

    /// The first event, unless it was sent. One that is sent before the answer is known has no counts.
    pub(super) fn begin(&mut self, envelope: &Envelope, usage: &Usage) -> Vec<SseEvent> {
        let begins = !std::mem::replace(&mut self.has_begun, true);
        begins.then(|| start(envelope, usage)).into_iter().collect()
    }

    /// The events behind the thought and the text.
    pub(super) fn end(&mut self, completion: &Completion) -> Vec<SseEvent> {
        let mut events = self.close();
        for call in calls(completion) {
            let Block::ToolUse { id, name, input } = &call else { continue };
            events.push(opening(self.closed, &json!({"type": "tool_use", "id": id, "name": name, "input": {}})));
            let input = json!({"type": "input_json_delta", "partial_json": input.get()});
            events.push(delta(self.closed, &input));
            events.push(closing(self.closed));
            self.closed += 1;
        }
        let (reason, sequence) = stop_reason(completion);
        let end = json!({"stop_reason": reason, "stop_sequence": sequence});
        events.push(event("message_delta", json!({"delta": end, "usage": usage(&completion.usage)})));
        events.push(event("message_stop", json!({})));
        events
    }

    fn close(&mut self) -> Vec<SseEvent> {
        let mut events = Vec::new();
        match self.open.take() {
            None => return events,
            Some(OpenBlock::Thinking { hash }) => {
                events.push(delta(self.closed, &json!({"type": "signature_delta", "signature": signature(hash)})));
            }
            Some(OpenBlock::Text) => {}
        }
        events.push(closing(self.closed));
        self.closed += 1;
        events
    }
}

fn start(envelope: &Envelope, counts: &Usage) -> SseEvent {
    let usage = usage(&Usage { completion_tokens: 0, ..*counts });
    let start = WireMessage { envelope, content: Vec::new(), stop_reason: None, stop_sequence: None, usage };
    let start = serde_json::to_value(&start).expect("the message has no content, and the rest is JSON");
    event("message_start", json!({"message": start}))
}

fn opening(index: usize, block: &Value) -> SseEvent {
    event("content_block_start", json!({"index": index, "content_block": block}))
}

fn delta(index: usize, data: &Value) -> SseEvent {
    event("content_block_delta", json!({"index": index, "delta": data}))
}

fn closing(index: usize) -> SseEvent {
    event("content_block_stop", json!({"index": index}))
}

pub(super) fn models(models: &[Model<'_>]) -> Vec<u8> {
    let data: Vec<Value> = models.iter().map(model).collect();
    let id = |model: Option<&Model<'_>>| model.map(|model| model.name.to_owned());
    let list = json!({
        "data": data, "has_more": false, "first_id": id(models.first()), "last_id": id(models.last()),
    });
    list.to_string().into_bytes()
}

pub(super) fn model(model: &Model<'_>) -> Value {
    let name = model.name;
    // Anthropic's documents allow this time where the true one is not known.
    let mut entry = json!({"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"});
    if let Some(tokens) = model.context_tokens {
        entry["max_input_tokens"] = json!(tokens);
    }
    entry
}

/// The answer to `messages/count_tokens`: the count if it is known, else an estimate from the size of the body.
///
/// It is never zero, because agents compact their conversation by it.
#[must_use]
pub fn token_count(body: &[u8], known: Option<u64>) -> Vec<u8> {
    let count = known.unwrap_or(body.len() as u64 / BYTES_PER_TOKEN).max(1);
    json!({"input_tokens": count}).to_string().into_bytes()
}

fn read_messages(
    list: &Item<'_>,
    messages: &mut Vec<Message>,
    images: &mut Images,
    warnings: &mut Warnings,
) -> Result<(), DialectError> {
    let mut of_assistant = None;
    let count = list.each(|item| {
        let mut object = item.object()?;
        let role = object.require("role")?;
        let content = object.require("content")?;
        let name = role.string()?;
        match name.as_str() {
            "user" => read_user(&content, messages, images)?,
            "assistant" => messages.push(assistant(&content, warnings)?),
            // Claude Code sends such messages between the others.
            "system" => messages.push(Message::text(Role::System, text_of(&content, images)?)),
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
        let mut object = block.object()?;
        match object.require("type")?.string()?.as_str() {
            "text" => texts.push(object.require("text")?.string()?),
            "document" => texts.push(document(&block, images)?),
            // What a search for tools has found. The model is offered all tools of the request.
            "tool_reference" => {
                texts.push(format!("The tool {} is available.", object.require("tool_name")?.string()?));
            }
            kind if images.has(&block, kind) => texts.push(tools::IMAGE.to_owned()),
            kind => return Err(not_text(&block, kind)),
        }
        Ok(())
    })?;
    Ok(texts.join("\n"))
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
            "text" => texts.push(object.require("text")?.string()?),
            "document" => texts.push(document(&block, images)?),
            "tool_result" => {
                flush(&mut texts, messages);
                let id = object.require("tool_use_id")?.string()?;
                let text = object.take("content").map(|item| text_of(&item, images)).transpose()?;
                let text = text.unwrap_or_default();
                messages.push(Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) });
            }
            kind if images.has(&block, kind) => texts.push(tools::IMAGE.to_owned()),
            kind => return Err(not_text(&block, kind)),
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

fn tools(object: &mut Object<'_>, extra: &mut Fields, warnings: &mut Warnings) -> Result<Offered, DialectError> {
    let mut offer = Offer::default();
    if let Some(list) = object.take("tools") {
        list.each(|item| {
            let mut tool = item.object()?;
            let kind = tool.take_string("type")?;
            if let Some(kind) = kind.filter(|kind| kind != "custom") {
                if let Some(function) = client_tools::of_anthropic(&kind, &mut tool)? {
                    return offer.add(function, &item);
                }
                offer.leave_out(&kind, &item, warnings);
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
            offer.add(Tool::function(name, fields), &item)
        })?;
    }
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

/// The schema that the answer must have, in the shape of chat completions.
fn output_format(object: &mut Object<'_>) -> Result<Option<Box<RawValue>>, DialectError> {
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
    let newer = match object.take("output_config") {
        Some(config) => config.object()?.take("format"),
        None => None,
    };
    let Some(format) = object.take("output_format").or(newer) else { return Ok(None) };
    let schema = format.object()?.require("schema")?.to_raw();
    Ok(Some(json::raw(&Format { r#type: "json_schema", json_schema: Schema { name: "output", schema } })))
}

/// An answer, in the order of fields of Anthropic's documents.
struct WireMessage<'a> {
    envelope: &'a Envelope,
    content: Vec<Block<'a>>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Value,
}

impl Serialize for WireMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Message", 8)?;
        fields.serialize_field("id", &format!("msg_{}", self.envelope.id))?;
        fields.serialize_field("type", "message")?;
        fields.serialize_field("role", "assistant")?;
        fields.serialize_field("model", &self.envelope.model)?;
        fields.serialize_field("content", &self.content)?;
        fields.serialize_field("stop_reason", &self.stop_reason)?;
        fields.serialize_field("stop_sequence", &self.stop_sequence)?;
        fields.serialize_field("usage", &self.usage)?;
        fields.end()
    }
}

/// A block of an answer.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block<'a> {
    Thinking { thinking: &'a str, signature: String },
    Text { text: &'a str },
    ToolUse { id: &'a str, name: &'a str, input: Box<RawValue> },
}

fn blocks(completion: &Completion) -> Vec<Block<'_>> {
    let message = &completion.message;
    let thinking = message
        .reasoning
        .iter()
        .map(|thinking| Block::Thinking { thinking, signature: signature(fnv1a(thinking.bytes())) });
    let text = message.content.iter().map(|text| Block::Text { text });
    thinking.chain(text).chain(calls(completion)).collect()
}

fn calls(completion: &Completion) -> impl Iterator<Item = Block<'_>> {
    completion.message.tool_calls.iter().map(|call| Block::ToolUse {
        id: &call.id,
        name: &call.name,
        input: RawValue::from_string(object_text(&call.arguments).into_owned()).expect("the text is a JSON object"),
    })
}

/// The signature of a thought with this hash. Clients send it back and never read it. It must not be empty.
fn signature(hash: u64) -> String {
    format!("forebay-{hash:016x}")
}

fn event(name: &'static str, mut data: Value) -> SseEvent {
    data["type"] = json!(name);
    SseEvent::named(name, &data)
}

fn stop_reason(completion: &Completion) -> (&'static str, Option<&str>) {
    match (completion.outcome(), &completion.stop_matched) {
        (Finish::ToolCalls, _) => ("tool_use", None),
        (Finish::Length, _) => ("max_tokens", None),
        (Finish::Stop, Some(StopMatch::Text(text))) => ("stop_sequence", Some(text)),
        (Finish::Stop, _) => ("end_turn", None),
    }
}

/// Agents add the three input counts, so the cached ids are not in the first.
fn usage(usage: &Usage) -> Value {
    let cached = usage.cached_tokens.unwrap_or(0).min(usage.prompt_tokens);
    json!({
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    })
}
