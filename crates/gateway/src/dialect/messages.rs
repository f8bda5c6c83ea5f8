//! Anthropic Messages.
//!
//! Requests are read in [`request`].

mod request;

use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::{Value, json, value::RawValue};

use super::{
    envelope::{Envelope, Model},
    sse::SseEvent,
    tools::object_text,
};
use crate::{
    completion::{Completion, Finish, Piece, StopMatch, Usage},
    hash::{fnv1a, fnv1a_on},
    json,
};

pub(super) use self::request::parse;

/// Bytes of a body per token, for an estimate. English text has about four.
const BYTES_PER_TOKEN: u64 = 4;

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
    /// Of the first call.
    ToolUse,
}

impl Stream {
    /// A sign of life: the beginning of the answer with a block for its text, and then an event that adds nothing to the
    /// open block. Clients do not count a ping as an event.
    pub(super) fn alive(&mut self, envelope: &Envelope) -> Vec<SseEvent> {
        match self.open {
            Some(OpenBlock::Thinking { .. }) => self.reasoning("", envelope),
            Some(OpenBlock::Text) | None => self.text("", envelope),
            Some(OpenBlock::ToolUse) => vec![input(self.closed, "")],
        }
    }

    pub(super) fn piece(&mut self, piece: &Piece, envelope: &Envelope) -> Vec<SseEvent> {
        match piece {
            Piece::Reasoning(text) => self.reasoning(text, envelope),
            Piece::Text(text) => self.text(text, envelope),
            Piece::Call { id, name } => {
                let mut events = self.begin(envelope, &Usage::default());
                events.extend(self.close());
                events.push(opening_of_call(self.closed, id, name));
                self.open = Some(OpenBlock::ToolUse);
                events
            }
            // SDKs read what they have got of an input, and fail if that is no beginning of JSON. What a model writes may be
            // none, which is known at the end ([`object_text`]).
            Piece::Arguments(_) => Vec::new(),
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
            Some(OpenBlock::Text | OpenBlock::ToolUse) | None => fnv1a([]),
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
        let mut has_begun = matches!(self.open, Some(OpenBlock::ToolUse));
        let mut events = if has_begun { Vec::new() } else { self.close() };
        for call in &completion.message.tool_calls {
            if !std::mem::take(&mut has_begun) {
                events.push(opening_of_call(self.closed, &call.id, &call.name));
                self.open = Some(OpenBlock::ToolUse);
            }
            events.push(input(self.closed, &object_text(&call.arguments)));
            events.extend(self.close());
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
            Some(OpenBlock::Text | OpenBlock::ToolUse) => {}
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

fn opening_of_call(index: usize, id: &str, name: &str) -> SseEvent {
    opening(index, &json!({"type": "tool_use", "id": id, "name": name, "input": {}}))
}

fn input(index: usize, json: &str) -> SseEvent {
    delta(index, &json!({"type": "input_json_delta", "partial_json": json}))
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
