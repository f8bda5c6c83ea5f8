//! Answers that reach the agent while the engine samples them.
//!
//! What was sent cannot be taken back, so nothing may be sampled twice: if the engine aborts a call, or its connection
//! breaks, the call goes on behind the ids that have arrived. That takes an endpoint of ids that streams, which is vLLM's;
//! a probe finds out whether it does. SGLang's chat endpoint tells no ids with events. A stop text may begin with what was
//! sampled last, so an answer with stop texts comes as a whole.
//!
//! vLLM parses an answer in parts, and begins each time with the first id. So the parts grow with the answer, which keeps
//! the work of an answer linear. The message that is recorded is still the one that vLLM makes of all ids.
//!
//! Of the tool calls only the first is sent in pieces. It is complete for the agent when the answer is recorded, and
//! `LlamaIndex` puts calls together wrongly if a piece of one follows the beginning of another.

use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

use super::{
    body,
    columns::{self, Choices, TOOL_CALLS_MAX},
    error::UpstreamError,
    exchange::{DERENDER, Exchange},
    progress::{Pieces, Spoken, Streaming},
    transport::Room,
};
use crate::{
    completion::{AssistantMessage, Finish, Piece, ToolCall},
    json,
};

/// So many ids are parsed at once, and fewer at the beginning.
const STEP: usize = 8;

/// vLLM parses the next ids when the answer has grown by this part of it.
const GROWTH: usize = 4;

impl Pieces {
    /// Parses and sends what is new, if that is enough. `sampled` are all ids so far.
    pub(super) async fn advance(&mut self, exchange: &Exchange<'_>, sampled: &[i32], streaming: &Streaming) {
        let step = self.parsed.clamp(1, STEP);
        let step = if exchange.parses_ids() { step.max(self.parsed / GROWTH) } else { step };
        let is_due = sampled.len() >= self.parsed + step;
        if !is_due || self.failed {
            return;
        }
        if let Err(error) = self.parse(exchange, sampled, false).await {
            // There may be no room now. Everything is parsed at the end anyway.
            self.failed = !matches!(error, UpstreamError::Busy { .. });
            tracing::debug!(error = %error, "the beginning of an answer was not parsed");
            return;
        }
        let Spoken { reasoning, content, calls } = &self.message;
        let call = calls.first().filter(|call| !call.name.is_empty() && streaming.has_pieces(&call.name));
        // White space at the end belongs to the text only if something follows it.
        let has_text = !content.trim_end().is_empty();
        let reasoning = if has_text || call.is_some() { reasoning } else { reasoning.trim_end() };
        let content = if call.is_some() { content } else { content.trim_end() };
        let unsent = |text: &str, sent: usize| text.get(sent..).filter(|new| !new.is_empty()).map(str::to_owned);
        if let Some(new) = unsent(reasoning, self.reasoning).filter(|_| self.text == 0 && self.arguments.is_none()) {
            (streaming.send)(Piece::Reasoning(new));
            self.reasoning = reasoning.len();
        }
        if let Some(new) = unsent(content, self.text).filter(|_| self.arguments.is_none()) {
            (streaming.send)(Piece::Text(new));
            self.text = content.len();
        }
        let Some(ToolCall { id, name, arguments }) = call else { return };
        let sent = *self.arguments.get_or_insert_with(|| {
            (streaming.send)(Piece::Call { id: id.clone(), name: name.clone() });
            0
        });
        if let Some(new) = unsent(arguments, sent).filter(|_| is_open_object(arguments)) {
            (streaming.send)(Piece::Arguments(new));
            self.arguments = Some(arguments.len());
        }
    }

    /// The message of all ids, of which the sent pieces are the beginning. `whole` is what the engine made of them at once.
    pub(super) async fn settled(
        &mut self,
        exchange: &Exchange<'_>,
        whole: AssistantMessage,
        (spoken, finish): (&[i32], Finish),
    ) -> Result<AssistantMessage, UpstreamError> {
        let begun = self.sent();
        if let Some(message) = begun.continued(whole) {
            return Ok(message);
        }
        // The engine reads the parts in another way than the whole.
        self.parse(exchange, spoken, true).await?;
        let Spoken { reasoning, content, calls } = &self.message;
        let some = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let mut tool_calls = calls.clone();
        // The bound of tokens may have cut the last call. The agent must not get a half one, unless it has its beginning.
        let can_go = tool_calls.len() > usize::from(begun.call.is_some());
        if finish == Finish::Length && can_go {
            tool_calls.pop_if(|call| !json::is_object(&call.arguments));
        }
        let message = AssistantMessage { reasoning: some(reasoning), content: some(content), tool_calls };
        begun.continued(message).ok_or_else(|| UpstreamError::Failed {
            status: 500,
            message: "what the engine made of an answer contradicts what it made of its beginning".to_owned(),
        })
    }

    /// What was sent.
    fn sent(&self) -> Sent {
        let sent = |text: &str, length: usize| text.get(..length).unwrap_or(text).to_owned();
        let Spoken { reasoning, content, calls } = &self.message;
        let call = self.arguments.zip(calls.first()).map(|(length, call)| {
            let arguments = sent(&call.arguments, length);
            ToolCall { arguments, ..call.clone() }
        });
        Sent { reasoning: sent(reasoning, self.reasoning), text: sent(content, self.text), call }
    }

    async fn parse(&mut self, exchange: &Exchange<'_>, ids: &[i32], is_last: bool) -> Result<(), UpstreamError> {
        let new = &ids[self.parsed.min(ids.len())..];
        if exchange.parses_ids() {
            let (call, options, prompt) = (exchange.call, &exchange.upstream.options, exchange.prompt.ids);
            let state = self.state.take();
            let write = |rid: &str| body::derender_part(call, options, prompt, (new, is_last), state.as_deref(), rid);
            // Whoever streams holds a part of the budget of answers.
            let post = exchange.request(DERENDER, &write, Room::MayLack);
            let parsed = exchange.read(&post, &mut 0).await;
            let Derendered { chunk, stream_state } = match parsed {
                Ok(parsed) => parsed,
                Err(error) => {
                    self.state = state;
                    return Err(error);
                }
            };
            self.state = stream_state;
            if let Some(choice) = chunk.choices.first {
                self.message.add(choice.delta, exchange.rid);
            }
        } else {
            let begun = body::tail(&ids[..self.parsed]);
            let text = exchange.text_behind(&[body::tail(exchange.prompt.ids), begun].concat(), new);
            // The bytes of its last character are not all there.
            if text.ends_with(char::REPLACEMENT_CHARACTER) {
                return Ok(());
            }
            self.message.content.push_str(&text);
        }
        self.parsed = ids.len();
        Ok(())
    }
}

/// What was sent of a message.
struct Sent {
    reasoning: String,
    text: String,
    /// The first call with the beginning of its arguments.
    call: Option<ToolCall>,
}

impl Sent {
    /// The message, if it begins with what was sent.
    fn continued(&self, mut message: AssistantMessage) -> Option<AssistantMessage> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let reasoning = text(&message.reasoning);
        if self.text.is_empty() && self.call.is_none() {
            return (reasoning.starts_with(&self.reasoning)).then_some(message);
        }
        // The thought had ended, with its white space, and if there is a call, the text as well.
        let is_same = reasoning.trim_end() == self.reasoning.trim_end();
        if !is_same || !text(&message.content).starts_with(self.text.trim_end()) {
            return None;
        }
        let some = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        message.reasoning = some(&self.reasoning);
        let Some(sent) = &self.call else { return Some(message) };
        let call = message.tool_calls.first_mut()?;
        if call.name != sent.name || !call.arguments.starts_with(&sent.arguments) {
            return None;
        }
        // vLLM makes up an id each time that it reads a call.
        call.id.clone_from(&sent.id);
        // What an engine reads behind a call has no place in an answer.
        message.content = some(&self.text);
        Some(message)
    }
}

impl Spoken {
    fn add(&mut self, delta: Delta, rid: &str) {
        let Delta { content, reasoning, reasoning_content, tool_calls } = delta;
        self.reasoning.extend(reasoning_content.or(reasoning));
        self.content.extend(content);
        for DeltaCall { index, id, function } in tool_calls.unwrap_or_default() {
            if index == self.calls.len() && index < TOOL_CALLS_MAX {
                let id = id.filter(|id| !id.is_empty()).unwrap_or_else(|| format!("call_{rid}_{index}"));
                self.calls.push(ToolCall { id, name: String::new(), arguments: String::new() });
            }
            let Some(known) = self.calls.get_mut(index) else { continue };
            known.name.extend(function.name);
            known.arguments.extend(function.arguments);
        }
    }
}

/// Whether arguments are the beginning of an object, and not a whole one. The engine may read something else in another way
/// at the end.
fn is_open_object(arguments: &str) -> bool {
    let is_open = || serde_json::from_str::<IgnoredAny>(arguments).is_err_and(|error| error.is_eof());
    arguments.starts_with('{') && is_open()
}

/// What vLLM makes of a part.
#[derive(Deserialize)]
struct Derendered {
    chunk: Chunk,
    stream_state: Option<Box<RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Choices<ChunkChoice>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    delta: Delta,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    #[serde(deserialize_with = "columns::tool_calls")]
    tool_calls: Option<Vec<DeltaCall>>,
}

#[derive(Deserialize)]
struct DeltaCall {
    #[serde(default)]
    index: usize,
    id: Option<String>,
    #[serde(default)]
    function: DeltaFunction,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DeltaFunction {
    name: Option<String>,
    arguments: Option<String>,
}
