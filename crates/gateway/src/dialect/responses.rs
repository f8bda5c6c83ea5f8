//! OpenAI Responses.
//!
//! A conversation is a list of items here. The reasoning, the text and the tool calls of one turn are items of their
//! own, and become one message of the assistant. A request contains the whole conversation, or names recorded answers.

use serde_json::{Value, json, value::RawValue};

use super::{
    client_tool::ClientTool,
    client_tools,
    envelope::Envelope,
    error::DialectError,
    fields,
    references::{Part, References},
    sse::SseEvent,
    tools::{self, Images, Offer, Offered},
};
use crate::{
    completion::{Completion, Finish, Piece, ToolCall},
    json::{self, Fields, Item, Object},
    request::{Content, Message, Request, Role, Tool, ToolChoice, Warnings},
};

/// Fields that concern OpenAI's service and not the model.
const SERVICE: [&str; 13] = [
    "metadata",
    "store",
    "include",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "truncation",
    "client_metadata",
    "stream_options",
    "max_tool_calls",
    "context_management",
    "moderation",
];

/// Fields that refer to something that the service would have stored.
const STORED: [&str; 2] = ["conversation", "prompt"];

pub(super) fn parse(body: &[u8], references: &mut References) -> Result<Request, DialectError> {
    let mut object = Item::body(body)?.object()?;
    let (mut warnings, mut images) = (Warnings::default(), Images::default());
    let sampling = fields::take_sampling(&mut object)?;
    for name in STORED {
        if let Some(item) = object.take(name) {
            return Err(
                item.unsupported("is not stored; send the conversation in `input`, or name `previous_response_id`")
            );
        }
    }
    if let Some(item) = object.take("background")
        && item.boolean()?
    {
        return Err(item.unsupported("must be false, because answers are not stored"));
    }
    object.discard(&SERVICE);
    let model = object.require("model")?.name()?;
    let text = object.take_string("instructions")?.unwrap_or_default();
    let instructions = text.len();
    let mut messages = Vec::new();
    if instructions > 0 {
        messages.push(Message::text(Role::System, text));
    }
    if let Some(previous) = object.take("previous_response_id") {
        messages.append(&mut references.conversation(&previous)?);
    }
    let mut offer = Offer::default();
    read_tools(&mut object, &mut offer, &mut warnings)?;
    offer.replace_repeated();
    let mut reading = Reading { offer: &mut offer, images: &mut images, warnings: &mut warnings, references };
    read_input(&object.require("input")?, &mut messages, &mut reading)?;
    let Offered { tools, client_tools, choice: tool_choice } = choose(offer, &mut object)?;
    let stream = object.take_boolean("stream")?.unwrap_or(false);
    let max_tokens = object.take("max_output_tokens").map(|item| item.positive()).transpose()?;
    let stop = fields::stop(object.take("stop"))?;
    let mut extra = Fields::new();
    extra.extend(response_format(&mut object)?.map(|format| ("response_format".to_owned(), format)));
    extra.extend(effort(&mut object)?.map(|effort| ("reasoning_effort".to_owned(), effort)));
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
        bytes: body.len() + references.bytes(),
        instructions,
    })
}

pub(super) fn answer(completion: &Completion, envelope: &Envelope) -> Vec<u8> {
    finished(completion, envelope).to_string().into_bytes()
}

/// The last event of a stream whose call failed. `sent` events came before.
pub(super) fn failed(code: &str, message: &str, envelope: &Envelope, sent: usize) -> SseEvent {
    let mut response = response(envelope, "failed", json!([]));
    response["error"] = json!({"code": code, "message": message});
    numbered("response.failed", json!({"response": response}), sent)
}

/// An event with its number among all events of its answer.
fn numbered(name: &'static str, mut data: Value, number: usize) -> SseEvent {
    data["type"] = json!(name);
    data["sequence_number"] = json!(number);
    SseEvent::named(name, &data)
}

/// What the input adds to besides messages, and what it names.
struct Reading<'a> {
    offer: &'a mut Offer,
    images: &'a mut Images,
    warnings: &'a mut Warnings,
    references: &'a mut References,
}

fn read_input(input: &Item<'_>, messages: &mut Vec<Message>, reading: &mut Reading<'_>) -> Result<(), DialectError> {
    let Reading { offer, images, warnings, references } = reading;
    if input.is_string() {
        messages.push(Message::text(Role::User, input.string()?));
        return Ok(());
    }
    if !input.is_array() {
        return Err(input.invalid("must be a string or an array of items"));
    }
    let mut turn = Turn::default();
    let count = input.each(|item| {
        let mut object = item.object()?;
        let kind = object.take_string("type")?;
        // Its type is optional.
        let has = |name: &str| object.find(name).is_some();
        let is_reference = kind.is_none() && has("id") && !has("role") && !has("content");
        match kind.as_deref().or(is_reference.then_some("item_reference")) {
            None | Some("message") => match role(&mut object)? {
                Role::Assistant => turn.text(text_of(&object.require("content")?, images)?, messages),
                role => {
                    turn.finish(messages);
                    messages.push(Message::text(role, text_of(&object.require("content")?, images)?));
                }
            },
            Some("reasoning") => turn.reasoning(&reasoning(&mut object)?, messages),
            Some("additional_tools") => read_tools(&mut object, offer, warnings)?,
            Some("tool_search_output") => {
                read_tools(&mut object, offer, warnings)?;
                // The provider's own search has no call that the model made.
                if let Some(id) = object.take_string("call_id")? {
                    turn.finish(messages);
                    let text = client_tools::found(&mut item.object()?)?;
                    messages.push(Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) });
                }
            }
            // What another agent says. Codex encrypts it for models of OpenAI.
            Some("agent_message") => {
                let texts = texts_of(&object.require("content")?, warnings)?;
                if !texts.is_empty() {
                    turn.finish(messages);
                    messages.push(Message::text(Role::User, texts));
                }
            }
            Some("item_reference") => match references.item(&object.require("id")?.string()?)? {
                Part::Unknown => {}
                Part::Reasoning(text) => turn.reasoning(text, messages),
                Part::Text(text) => turn.text(text.to_owned(), messages),
                Part::Call(call) => turn.call(call.clone()),
            },
            Some(kind) => {
                if let Some(call) = client_tools::sent_back(kind, &mut object)? {
                    turn.call(call);
                } else if let Some((id, text)) = client_tools::output(kind, &mut object, |item| text_of(item, images))?
                {
                    turn.finish(messages);
                    messages.push(Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) });
                } else {
                    warnings.left_out(&item, "item", kind);
                }
            }
        }
        Ok(())
    })?;
    turn.finish(messages);
    if count == 0 {
        return Err(input.invalid("must not be empty"));
    }
    if messages.is_empty() && !references.is_incomplete() {
        return Err(input.invalid("contains no message"));
    }
    Ok(())
}

/// The items of one turn of the assistant, until something else follows.
#[derive(Default)]
struct Turn(Option<Message>);

impl Turn {
    fn message(&mut self) -> &mut Message {
        self.0.get_or_insert_with(|| Message::empty(Role::Assistant))
    }

    /// Reasoning begins a turn, so it ends one that already has a text or calls.
    fn reasoning(&mut self, text: &str, messages: &mut Vec<Message>) {
        if self.0.as_ref().is_some_and(|message| is_said(message) || !message.tool_calls.is_empty()) {
            self.finish(messages);
        }
        if text.is_empty() {
            return;
        }
        match &mut self.message().reasoning {
            Some(before) => {
                before.push('\n');
                before.push_str(text);
            }
            none => *none = Some(text.to_owned()),
        }
    }

    /// A turn has one text.
    fn text(&mut self, text: String, messages: &mut Vec<Message>) {
        if self.0.as_ref().is_some_and(|message| is_said(message) || !message.tool_calls.is_empty()) {
            self.finish(messages);
        }
        self.message().content = Content::Text(text);
    }

    fn call(&mut self, call: ToolCall) {
        self.message().tool_calls.push(call);
    }

    fn finish(&mut self, messages: &mut Vec<Message>) {
        messages.extend(self.0.take());
    }
}

fn is_said(message: &Message) -> bool {
    !matches!(message.content, Content::Absent)
}

fn role(object: &mut Object<'_>) -> Result<Role, DialectError> {
    let item = object.require("role")?;
    match item.string()?.as_str() {
        "system" => Ok(Role::System),
        "developer" => Ok(Role::Developer),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        other => Err(item.invalid(format!("is {other:?}, which is no role of a message"))),
    }
}

/// A text, or the text parts of a list.
fn text_of(item: &Item<'_>, images: &mut Images) -> Result<String, DialectError> {
    if item.is_string() {
        return item.string();
    }
    if !item.is_array() {
        return Err(item.invalid("must be a string or an array of parts"));
    }
    let mut texts = Vec::new();
    item.each(|part| {
        let mut object = part.object()?;
        match object.require("type")?.string()?.as_str() {
            "input_text" | "output_text" | "text" => texts.push(object.require("text")?.string()?),
            "refusal" => texts.push(object.require("refusal")?.string()?),
            kind if images.has(&part, kind) => texts.push(tools::IMAGE.to_owned()),
            kind => return Err(part.unsupported(format!("is of type {kind:?}; sessions record text only"))),
        }
        Ok(())
    })?;
    Ok(texts.join("\n"))
}

/// The reasoning of an item. Some agents send back only the summary, which is why an answer has the text in both.
fn reasoning(object: &mut Object<'_>) -> Result<String, DialectError> {
    for name in ["content", "summary"] {
        let mut texts = Vec::new();
        if let Some(parts) = object.take(name) {
            parts.each(|part| {
                texts.push(part.object()?.require("text")?.string()?);
                Ok(())
            })?;
        }
        if !texts.is_empty() {
            return Ok(texts.join("\n"));
        }
    }
    Ok(String::new())
}

/// The texts of the parts of another agent's message. Parts that are no text are left out.
fn texts_of(item: &Item<'_>, warnings: &mut Warnings) -> Result<String, DialectError> {
    if item.is_string() {
        return item.string();
    }
    let mut texts = Vec::new();
    item.each(|part| {
        let mut object = part.object()?;
        let kind = object.require("type")?.string()?;
        match object.take_string("text")? {
            Some(text) => texts.push(text),
            None => warnings.left_out(&part, "part", &kind),
        }
        Ok(())
    })?;
    Ok(texts.join("\n"))
}

/// Reads the tools of an item, if it has any.
fn read_tools(object: &mut Object<'_>, offer: &mut Offer, warnings: &mut Warnings) -> Result<(), DialectError> {
    if let Some(list) = object.take("tools") {
        list.each(|item| read_tool(&item, None, offer, warnings))?;
    }
    Ok(())
}

fn read_tool(
    item: &Item<'_>,
    namespace: Option<&str>,
    offer: &mut Offer,
    warnings: &mut Warnings,
) -> Result<(), DialectError> {
    let mut tool = item.object()?;
    match tool.require("type")?.string()?.as_str() {
        "function" => {
            let name = tool.require("name")?.string()?;
            let fields = tool.take_fields(["description", "parameters", "strict"].into_iter());
            let function = Tool::function(client_tools::function_name(namespace, &name), fields);
            match namespace {
                Some(namespace) => {
                    let of_client = ClientTool::Function { name, namespace: namespace.to_owned() };
                    offer.add_of_client((function, of_client), item)
                }
                None => offer.add(function, item),
            }
        }
        "custom" => offer.add_of_client(client_tools::free_form(&mut tool, namespace)?, item),
        // A namespace has no namespaces.
        "namespace" if namespace.is_none() => {
            let name = tool.require("name")?.string()?;
            if let Some(list) = tool.take("tools") {
                list.each(|item| read_tool(&item, Some(&name), offer, warnings))?;
            }
            Ok(())
        }
        kind => {
            if let Some(found) = client_tools::unnamed(kind, &mut tool)? {
                return offer.add_of_client(found, item);
            }
            offer.leave_out(kind, item, warnings);
            Ok(())
        }
    }
}

fn choose(mut offer: Offer, object: &mut Object<'_>) -> Result<Offered, DialectError> {
    let Some(item) = object.take("tool_choice") else { return offer.choose(None) };
    let wanted = if item.is_string() {
        match item.string()?.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => return Err(item.invalid("must be \"auto\", \"none\", \"required\" or a tool")),
        }
    } else {
        let mut choice = item.object()?;
        if choice.find("type").is_some_and(|kind| kind.verbatim() == "\"allowed_tools\"") {
            // Entries may name hosted tools, which are not offered.
            offer.allow(&mut choice, |tool| Ok(chosen(tool).ok()))?
        } else {
            ToolChoice::Function(chosen(&mut choice)?)
        }
    };
    offer.choose(Some((wanted, item)))
}

/// The function for a tool that is named in a choice.
fn chosen(choice: &mut Object<'_>) -> Result<String, DialectError> {
    let kind = choice.require("type")?;
    match kind.string()?.as_str() {
        "function" | "custom" => {
            let namespace = choice.take_string("namespace")?;
            Ok(client_tools::function_name(namespace.as_deref(), &choice.require("name")?.string()?))
        }
        name @ ("local_shell" | "shell" | "apply_patch" | "tool_search") => Ok(name.to_owned()),
        _ => Err(kind.invalid("must be \"function\" or \"custom\", because no other tool can run here")),
    }
}

/// The format of the answer's text, in the shape of chat completions.
fn response_format(object: &mut Object<'_>) -> Result<Option<Box<RawValue>>, DialectError> {
    let format = match object.take("text") {
        Some(text) => text.object()?.take("format"),
        None => None,
    };
    let Some(format) = format else { return Ok(None) };
    let mut fields = format.object()?;
    let kind = fields.require("type")?;
    match kind.string()?.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(format.to_raw())),
        "json_schema" => {
            let schema = json::object_of(&fields.rest());
            let format: Fields = vec![("type".to_owned(), kind.to_raw()), ("json_schema".to_owned(), schema)];
            Ok(Some(json::object_of(&format)))
        }
        _ => Err(kind.invalid("must be \"text\", \"json_object\" or \"json_schema\"")),
    }
}

/// How much the model should reason, if it is a word that engines know.
fn effort(object: &mut Object<'_>) -> Result<Option<Box<RawValue>>, DialectError> {
    let Some(reasoning) = object.take("reasoning") else { return Ok(None) };
    Ok(reasoning.object()?.take("effort").and_then(|effort| fields::effort(&effort.to_raw())))
}

/// An answer with everything but the output of a finished one.
fn response(envelope: &Envelope, status: &str, output: Value) -> Value {
    let mut response = json!({
        "id": format!("resp_{}", envelope.id),
        "object": "response",
        "created_at": envelope.created_s,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "max_output_tokens": null,
        "metadata": {},
        "model": envelope.model,
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null},
        "store": false,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": null,
    });
    response["output"] = output;
    response
}

fn finished(completion: &Completion, envelope: &Envelope) -> Value {
    let output: Value = items(completion, envelope).iter().map(OutputItem::whole).collect();
    let mut response = response(envelope, status(completion), output);
    if completion.finish == Finish::Length {
        response["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    let usage = &completion.usage;
    response["usage"] = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens.unwrap_or(0)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens.unwrap_or(0)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    });
    response
}

fn status(completion: &Completion) -> &'static str {
    if completion.finish == Finish::Length { "incomplete" } else { "completed" }
}

/// An item of an answer.
enum OutputItem<'a> {
    Reasoning {
        id: String,
        text: &'a str,
    },
    Message {
        id: String,
        text: &'a str,
        status: &'static str,
    },
    /// The call as the client knows it.
    Call {
        id: String,
        call: Value,
        status: &'static str,
    },
}

fn items<'a>(completion: &'a Completion, envelope: &Envelope) -> Vec<OutputItem<'a>> {
    let id = &envelope.id;
    let message = &completion.message;
    let reasoning = message.reasoning.iter().map(|text| OutputItem::Reasoning { id: format!("rs_{id}"), text });
    // Agents that find no item at all ask again and again.
    let silent = message.tool_calls.is_empty().then_some("");
    let text = message.content.as_deref().or(silent).into_iter().map(|text| OutputItem::Message {
        id: format!("msg_{id}"),
        text,
        status: if message.tool_calls.is_empty() { status(completion) } else { "completed" },
    });
    let calls = message.tool_calls.iter().enumerate();
    let calls = calls.map(|(index, call)| {
        // The bound of tokens may have cut the last one.
        let is_cut = index + 1 == message.tool_calls.len() && !json::is_object(&call.arguments);
        OutputItem::call(index, call, envelope, if is_cut { status(completion) } else { "completed" })
    });
    reasoning.chain(text).chain(calls).collect()
}

impl OutputItem<'_> {
    fn call(index: usize, call: &ToolCall, envelope: &Envelope, status: &'static str) -> Self {
        let id = format!("fc_{}_{index}", envelope.id);
        Self::Call { id, call: client_tools::item(envelope.tools.get(&call.name), call), status }
    }

    fn whole(&self) -> Value {
        match self {
            Self::Reasoning { id, text } => json!({
                "id": id,
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": text}],
                "content": [{"type": "reasoning_text", "text": text}],
                "encrypted_content": null,
            }),
            Self::Message { id, text, status } => json!({
                "id": id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [output_text(text)],
            }),
            Self::Call { id, call, status } => {
                let mut item = call.clone();
                (item["id"], item["status"]) = (json!(id), json!(status));
                item
            }
        }
    }

    /// The item as it begins in a stream: empty.
    fn opening(&self) -> Value {
        let mut item = self.whole();
        match self {
            Self::Reasoning { .. } => (item["summary"], item["content"]) = (json!([]), json!([])),
            Self::Message { .. } => (item["content"], item["status"]) = (json!([]), json!("in_progress")),
            Self::Call { .. } => {
                if let Some((_, text)) = client_tools::text_of(&item) {
                    item[text] = json!("");
                }
                item["status"] = json!("in_progress");
            }
        }
        item
    }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// The events of an answer that is written item by item.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// The number of events so far.
    sent: usize,
    /// The number of items that are closed.
    closed: usize,
    open: Option<OpenItem>,
}

#[derive(Debug)]
struct OpenItem {
    kind: Kind,
    id: String,
    /// The text so far, which the last events of the item repeat.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
}

impl OpenItem {
    fn item(&self, status: &'static str) -> OutputItem<'_> {
        let (id, text) = (self.id.clone(), self.text.as_str());
        match self.kind {
            Kind::Reasoning => OutputItem::Reasoning { id, text },
            Kind::Message => OutputItem::Message { id, text, status },
        }
    }
}

impl Stream {
    /// The number of events so far.
    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// A sign of life: the beginning, and then an event that adds nothing.
    pub(super) fn alive(&mut self, envelope: &Envelope) -> Vec<SseEvent> {
        let mut events = Vec::new();
        self.begin(envelope, &mut events);
        self.push("response.in_progress", json!({"response": in_progress(envelope)}), &mut events);
        events
    }

    pub(super) fn piece(&mut self, piece: &Piece, envelope: &Envelope) -> Vec<SseEvent> {
        match piece {
            Piece::Reasoning(text) => self.reasoning(text, envelope),
            Piece::Text(text) => self.text(text, envelope),
            Piece::Call { id, name } => {
                let mut events = Vec::new();
                self.begin(envelope, &mut events);
                self.close("completed", &mut events);
                let call = ToolCall { id: id.clone(), name: name.clone(), arguments: String::new() };
                let item = OutputItem::call(0, &call, envelope, "in_progress").opening();
                self.push(
                    "response.output_item.added",
                    json!({"output_index": self.closed, "item": item}),
                    &mut events,
                );
                events
            }
            Piece::Arguments(text) => {
                let delta =
                    json!({"item_id": format!("fc_{}_0", envelope.id), "output_index": self.closed, "delta": text});
                let mut events = Vec::new();
                self.push("response.function_call_arguments.delta", delta, &mut events);
                events
            }
        }
    }

    fn reasoning(&mut self, text: &str, envelope: &Envelope) -> Vec<SseEvent> {
        let mut events = Vec::new();
        self.open(Kind::Reasoning, envelope, &mut events);
        self.part("response.reasoning_summary_text.delta", "summary_index", json!({"delta": text}), &mut events);
        self.part("response.reasoning_text.delta", "content_index", json!({"delta": text}), &mut events);
        self.add(text);
        events
    }

    fn text(&mut self, text: &str, envelope: &Envelope) -> Vec<SseEvent> {
        let mut events = Vec::new();
        self.open(Kind::Message, envelope, &mut events);
        let delta = json!({"delta": text, "logprobs": []});
        self.part("response.output_text.delta", "content_index", delta, &mut events);
        self.add(text);
        events
    }

    /// The events behind the thought and the text. `sent` is how much of the arguments of the first call was sent, if that
    /// call has begun.
    pub(super) fn end(
        &mut self,
        completion: &Completion,
        envelope: &Envelope,
        mut sent: Option<usize>,
    ) -> Vec<SseEvent> {
        let mut events = Vec::new();
        self.begin(envelope, &mut events);
        if completion.message.content.is_none() && completion.message.tool_calls.is_empty() {
            events.extend(self.text("", envelope));
        }
        for item in items(completion, envelope) {
            match &item {
                OutputItem::Reasoning { .. } => {}
                OutputItem::Message { status, .. } => self.close(status, &mut events),
                OutputItem::Call { .. } => {
                    self.close("completed", &mut events);
                    self.call(&item, sent.take(), &mut events);
                }
            }
        }
        // Also where the bound of tokens cut the answer, which its status tells: Codex takes `response.incomplete` for a
        // broken stream and repeats the call.
        self.push("response.completed", json!({"response": finished(completion, envelope)}), &mut events);
        events
    }

    fn begin(&mut self, envelope: &Envelope, events: &mut Vec<SseEvent>) {
        if self.sent == 0 {
            self.push("response.created", json!({"response": in_progress(envelope)}), events);
            self.push("response.in_progress", json!({"response": in_progress(envelope)}), events);
        }
    }

    /// Opens an item, unless one of its kind is open.
    fn open(&mut self, kind: Kind, envelope: &Envelope, events: &mut Vec<SseEvent>) {
        self.begin(envelope, events);
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", events);
        let prefix = if kind == Kind::Reasoning { "rs" } else { "msg" };
        let open = OpenItem { kind, id: format!("{prefix}_{}", envelope.id), text: String::new() };
        let opening = open.item("in_progress").opening();
        self.open = Some(open);
        self.push("response.output_item.added", json!({"output_index": self.closed, "item": opening}), events);
        match kind {
            Kind::Reasoning => {
                self.part("response.reasoning_summary_part.added", "summary_index", summary(""), events);
            }
            Kind::Message => {
                let part = json!({"part": output_text("")});
                self.part("response.content_part.added", "content_index", part, events);
            }
        }
    }

    fn add(&mut self, text: &str) {
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
        }
    }

    fn close(&mut self, status: &'static str, events: &mut Vec<SseEvent>) {
        let Some(OpenItem { kind, text, .. }) = &self.open else { return };
        let (kind, text) = (*kind, text.clone());
        match kind {
            Kind::Reasoning => {
                let done = json!({"text": text});
                self.part("response.reasoning_summary_text.done", "summary_index", done.clone(), events);
                self.part("response.reasoning_summary_part.done", "summary_index", summary(&text), events);
                self.part("response.reasoning_text.done", "content_index", done, events);
            }
            Kind::Message => {
                let done = json!({"text": text, "logprobs": []});
                self.part("response.output_text.done", "content_index", done, events);
                let part = json!({"part": output_text(&text)});
                self.part("response.content_part.done", "content_index", part, events);
            }
        }
        let item = self.open.take().map(|open| open.item(status).whole());
        self.push("response.output_item.done", json!({"output_index": self.closed, "item": item}), events);
        self.closed += 1;
    }

    fn call(&mut self, item: &OutputItem<'_>, sent: Option<usize>, events: &mut Vec<SseEvent>) {
        let index = self.closed;
        if sent.is_none() {
            self.push("response.output_item.added", json!({"output_index": index, "item": item.opening()}), events);
        }
        // Calls whose content is an object have no events for its pieces.
        if let OutputItem::Call { id, call, .. } = item
            && let Some(((delta_event, done_event), text)) = client_tools::text_of(call)
        {
            let mut done = json!({"item_id": id, "output_index": index, "name": call["name"]});
            let rest = call[text].as_str().and_then(|text| text.get(sent.unwrap_or(0)..)).unwrap_or_default();
            let delta = json!({"item_id": id, "output_index": index, "delta": rest});
            done[text] = call[text].clone();
            if sent.is_none() || !rest.is_empty() {
                self.push(delta_event, delta, events);
            }
            self.push(done_event, done, events);
        }
        self.push("response.output_item.done", json!({"output_index": index, "item": item.whole()}), events);
        self.closed += 1;
    }

    /// An event of a part of the open item. Each item has one part.
    fn part(&mut self, name: &'static str, place: &str, mut fields: Value, events: &mut Vec<SseEvent>) {
        fields["item_id"] = json!(self.open.as_ref().map(|open| &open.id));
        fields["output_index"] = json!(self.closed);
        fields[place] = json!(0);
        self.push(name, fields, events);
    }

    fn push(&mut self, name: &'static str, data: Value, events: &mut Vec<SseEvent>) {
        events.push(numbered(name, data, self.sent));
        self.sent += 1;
    }
}

fn summary(text: &str) -> Value {
    json!({"part": {"type": "summary_text", "text": text}})
}

fn in_progress(envelope: &Envelope) -> Value {
    response(envelope, "in_progress", json!([]))
}
