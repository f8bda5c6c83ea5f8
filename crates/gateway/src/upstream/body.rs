//! The request as an engine reads it.

use bytes::Bytes;
use serde::{
    Deserialize, Serialize, Serializer,
    ser::{Error as _, SerializeMap},
};
use serde_json::value::RawValue;

use super::{allow, call::EngineCall, kind::EngineKind, options::UpstreamOptions};
use crate::{
    completion::{Finish, ToolCall},
    json,
    request::{Content, Message, Request, Role},
};

/// What the engine is asked for besides the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// What is recorded: ids, and the log-probabilities of the sampled tokens.
    Recording,
    /// The log-probabilities of the best tokens as well, for a probe.
    Best,
    /// Nothing. The answer is not recorded, so the agent's own sampling applies.
    Nothing,
}

/// A prompt of ids, and how its answer ends.
pub(super) struct Ids<'a> {
    pub(super) prompt: &'a [i32],
    pub(super) stops: &'a [i32],
    /// Always there for vLLM, whose endpoint of ids may take 16 for none. SGLang is told if there is none.
    pub(super) max_tokens: Option<u32>,
}

pub(super) fn write(call: &EngineCall<'_>, options: &UpstreamOptions, rid: &str, wanted: Wanted) -> Bytes {
    json::text(&EngineBody { call, options, rid, wanted, ids: None }).into()
}

/// A request of SGLang's chat endpoint that is not rendered.
pub(super) fn write_ids(call: &EngineCall<'_>, options: &UpstreamOptions, rid: &str, ids: &Ids<'_>) -> Bytes {
    json::text(&EngineBody { call, options, rid, wanted: Wanted::Recording, ids: Some(ids) }).into()
}

/// A request of SGLang's endpoint of ids.
pub(super) fn sglang_generate(call: &EngineCall<'_>, ids: &Ids<'_>, rid: &str) -> Bytes {
    let mut sampling = sampling(call, ids);
    sampling["max_new_tokens"] = serde_json::json!(ids.max_tokens);
    let body = serde_json::json!({
        "rid": rid,
        "model": call.model,
        "input_ids": ids.prompt,
        "sampling_params": sampling,
        "return_logprob": true,
        "stream": false,
    });
    body.to_string().into()
}

/// A request of vLLM's endpoint of ids, whose answer may come as events.
pub(super) fn vllm_generate(call: &EngineCall<'_>, ids: &Ids<'_>, rid: &str, as_events: bool) -> Bytes {
    let mut sampling = sampling(call, ids);
    sampling["max_tokens"] = serde_json::json!(ids.max_tokens);
    sampling["logprobs"] = serde_json::json!(1);
    let mut body = serde_json::json!({
        "request_id": rid,
        "model": call.model,
        "token_ids": ids.prompt,
        "sampling_params": sampling,
        "stream": as_events,
        "return_token_ids": true,
    });
    if as_events {
        body["stream_options"] = serde_json::json!({"include_usage": true});
    }
    body.to_string().into()
}

/// What both endpoints of ids are told. Every value is written, because engines take the values that are missing from
/// the model's folder.
fn sampling(call: &EngineCall<'_>, ids: &Ids<'_>) -> serde_json::Value {
    let mut sampling = serde_json::json!({
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "top_k": call.sampling.top_k,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "stop_token_ids": ids.stops,
        "skip_special_tokens": false,
    });
    if !call.request.stop.is_empty() {
        sampling["stop"] = serde_json::json!(call.request.stop);
    }
    sampling
}

/// A request of vLLM's endpoint that parses ids. Parsers read the tools, the choice among them and the variables of the
/// template. What they do not need is left out: the endpoint refuses what its chat endpoint would, such as five stop
/// texts, and a conversation may be long.
pub(super) fn derender(
    call: &EngineCall<'_>,
    options: &UpstreamOptions,
    prompt: &[i32],
    tokens: &[i32],
    finish: Finish,
    rid: &str,
) -> Bytes {
    let chat = ParsedFor { call, options };
    let reason = if finish == Finish::Length { "length" } else { "stop" };
    let choice = DerenderChoice { index: 0, token_ids: tokens, finish_reason: Some(reason) };
    let body = Derender {
        model: call.model,
        generate_response: DerenderResponse { request_id: rid, choices: [choice] },
        prompt_tokens: prompt.len(),
        prompt_token_ids: tail(prompt),
        chat_request: Some(chat),
    };
    json::text(&body).into()
}

/// The same for a part of an answer. `state` is what the engine answered to the part before, and `is_last` whether the
/// answer ends with this part.
pub(super) fn derender_part(
    call: &EngineCall<'_>,
    options: &UpstreamOptions,
    prompt: &[i32],
    (tokens, is_last): (&[i32], bool),
    state: Option<&RawValue>,
    rid: &str,
) -> Bytes {
    let choice = DerenderChoice { index: 0, token_ids: tokens, finish_reason: is_last.then_some("stop") };
    let body = DerenderStream {
        model: call.model,
        stream: true,
        generate_chunk: DerenderResponse { request_id: rid, choices: [choice] },
        stream_state: state,
        prompt_tokens: prompt.len(),
        prompt_token_ids: tail(prompt),
        chat_request: ParsedFor { call, options },
    };
    json::text(&body).into()
}

/// The end of a prompt.
pub(super) fn tail(prompt: &[i32]) -> &[i32] {
    &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..]
}

/// The same without the request, which is refused where a parser would need it. The answer is the prompt itself.
pub(super) fn derender_plain(model: &str, prompt: &[i32], rid: &str) -> Bytes {
    let choice = DerenderChoice { index: 0, token_ids: prompt, finish_reason: Some("stop") };
    let generate_response = DerenderResponse { request_id: rid, choices: [choice] };
    let body = Derender { model, generate_response, prompt_tokens: 0, prompt_token_ids: &[], chat_request: None };
    json::text(&body).into()
}

/// How many ids of the prompt are read with an answer, to know whether a space is missing before its first word.
const PROMPT_TAIL: usize = 16;

#[derive(Serialize)]
struct Derender<'a> {
    model: &'a str,
    generate_response: DerenderResponse<'a>,
    prompt_tokens: usize,
    prompt_token_ids: &'a [i32],
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_request: Option<ParsedFor<'a>>,
}

#[derive(Serialize)]
struct DerenderStream<'a> {
    model: &'a str,
    stream: bool,
    generate_chunk: DerenderResponse<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_state: Option<&'a RawValue>,
    prompt_tokens: usize,
    prompt_token_ids: &'a [i32],
    chat_request: ParsedFor<'a>,
}

#[derive(Serialize)]
struct DerenderResponse<'a> {
    request_id: &'a str,
    choices: [DerenderChoice<'a>; 1],
}

#[derive(Serialize)]
struct DerenderChoice<'a> {
    index: u32,
    token_ids: &'a [i32],
    finish_reason: Option<&'static str>,
}

/// The request whose answer vLLM parses.
struct ParsedFor<'a> {
    call: &'a EngineCall<'a>,
    options: &'a UpstreamOptions,
}

impl Serialize for ParsedFor<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("model", self.call.model)?;
        map.serialize_entry("messages", &[(); 0])?;
        write_tools(&mut map, self.call.request)?;
        write_other(&mut map, self.call.request, self.options)?;
        map.end()
    }
}

/// What a request says about tools.
fn write_tools<M: SerializeMap>(map: &mut M, request: &Request) -> Result<(), M::Error> {
    // Some engines refuse an empty list.
    if !request.tools.is_empty() {
        let tools: Vec<_> = request.tools.iter().map(|tool| &tool.definition).collect();
        map.serialize_entry("tools", &tools)?;
    }
    if let Some(choice) = &request.tool_choice {
        map.serialize_entry("tool_choice", choice)?;
    }
    Ok(())
}

/// The fields of a request that an engine gets as they are.
fn write_other<M: SerializeMap>(map: &mut M, request: &Request, options: &UpstreamOptions) -> Result<(), M::Error> {
    for (name, value) in request.other.iter().filter(|(name, _)| allow::in_request(options, name)) {
        map.serialize_entry(name, value)?;
    }
    Ok(())
}

struct EngineBody<'a> {
    call: &'a EngineCall<'a>,
    options: &'a UpstreamOptions,
    rid: &'a str,
    wanted: Wanted,
    /// In place of the prompt that the engine would render.
    ids: Option<&'a Ids<'a>>,
}

impl Serialize for EngineBody<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let request = self.call.request;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("model", self.call.model)?;
        let options = self.options;
        let messages: Vec<_> = request.messages.iter().map(|message| EngineMessage { message, options }).collect();
        map.serialize_entry("messages", &messages)?;
        write_tools(&mut map, request)?;
        let bound = self.ids.map_or(self.call.max_tokens, |ids| ids.max_tokens);
        if let Some(bound) = bound {
            map.serialize_entry("max_tokens", &bound)?;
        }
        if let Some(ids) = self.ids {
            map.serialize_entry("input_ids", ids.prompt)?;
            map.serialize_entry("stop_token_ids", ids.stops)?;
        }
        if !request.stop.is_empty() {
            map.serialize_entry("stop", &request.stop)?;
        }
        map.serialize_entry("stream", &false)?;
        if self.wanted == Wanted::Nothing {
            json::write_fields(&mut map, &request.sampling)?;
        } else {
            self.sampling(&mut map)?;
            self.recording(&mut map)?;
        }
        write_other(&mut map, request, self.options)?;
        map.end()
    }
}

impl EngineBody<'_> {
    /// Every value is written, because engines take the values that are missing from the model's folder.
    fn sampling<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let sampling = self.call.sampling;
        map.serialize_entry("temperature", &sampling.temperature)?;
        map.serialize_entry("top_p", &sampling.top_p)?;
        map.serialize_entry("presence_penalty", &0)?;
        map.serialize_entry("frequency_penalty", &0)?;
        match self.options.kind {
            EngineKind::Sglang | EngineKind::Vllm => {
                map.serialize_entry("top_k", &sampling.top_k)?;
                map.serialize_entry("min_p", &0)?;
                map.serialize_entry("repetition_penalty", &1)
            }
            // OpenAI's own API does not know these fields, so they are sent only where they are needed.
            EngineKind::Openai if sampling.top_k > 0 => map.serialize_entry("top_k", &sampling.top_k),
            EngineKind::Openai => Ok(()),
        }
    }

    fn recording<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("logprobs", &true)?;
        match (self.wanted, self.options.kind) {
            (Wanted::Best, _) => map.serialize_entry("top_logprobs", &5)?,
            (_, EngineKind::Vllm) => map.serialize_entry("top_logprobs", &0)?,
            (_, EngineKind::Sglang | EngineKind::Openai) => {}
        }
        map.serialize_entry("return_token_ids", &true)?;
        if self.options.kind == EngineKind::Sglang {
            map.serialize_entry("return_prompt_token_ids", &true)?;
            map.serialize_entry("return_meta_info", &true)?;
            map.serialize_entry("rid", self.rid)?;
        }
        Ok(())
    }
}

/// A message, with the names that an engine knows.
struct EngineMessage<'a> {
    message: &'a Message,
    options: &'a UpstreamOptions,
}

impl Serialize for EngineMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { message, options } = *self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", message.role.engine_name())?;
        map.serialize_entry("content", &EngineContent(&message.content))?;
        if let (Role::Assistant, Some(reasoning)) = (message.role, &message.reasoning) {
            map.serialize_entry("reasoning_content", reasoning)?;
            if options.kind != EngineKind::Sglang {
                // The newer name, which vLLM reads. Older versions and templates read the other.
                map.serialize_entry("reasoning", reasoning)?;
            }
        }
        if !message.tool_calls.is_empty() {
            let calls: Vec<_> = message.tool_calls.iter().map(EngineToolCall::from).collect();
            map.serialize_entry("tool_calls", &calls)?;
        }
        if let Some(id) = &message.tool_call_id {
            map.serialize_entry("tool_call_id", id)?;
        }
        for (name, value) in message.other.iter().filter(|(name, _)| allow::in_message(options, name)) {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// What a message says, as text. Of a part only what makes it text is written: vLLM takes a part of type `text` for an
/// image and fetches its URL if it also has `image_url` and `uuid`.
struct EngineContent<'a>(&'a Content);

impl Serialize for EngineContent<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Content::Parts(parts) = self.0 else { return self.0.serialize(serializer) };
        let parts: Vec<TextPart<'_>> = serde_json::from_str(parts.get()).map_err(S::Error::custom)?;
        parts.serialize(serializer)
    }
}

/// The fields of the parts that dialects accept.
#[derive(Deserialize, Serialize)]
struct TextPart<'a> {
    #[serde(borrow)]
    r#type: &'a RawValue,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    text: Option<&'a RawValue>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    refusal: Option<&'a RawValue>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct EngineToolCall<'a> {
    id: &'a str,
    r#type: &'a str,
    function: EngineFunction<'a>,
}

#[derive(Serialize)]
struct EngineFunction<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> From<&'a ToolCall> for EngineToolCall<'a> {
    fn from(call: &'a ToolCall) -> Self {
        // Engines parse the arguments of all calls. One that expects an object would refuse each later call of the
        // conversation. The mode exact renders an empty one, too.
        let arguments = if json::is_object(&call.arguments) { &call.arguments } else { "{}" };
        Self { id: &call.id, r#type: "function", function: EngineFunction { name: &call.name, arguments } }
    }
}
