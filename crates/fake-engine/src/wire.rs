//! The chat endpoint: from a request to what was sampled, and from there to an answer.

use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use crate::{
    Answer, EngineKind, IdFault, LogprobFault, Switches, VersionReport,
    model::{self, Context},
    prompt,
    template::{self, Parsed, WireMessage},
    tokenizer::{self, IM_END, VOCABULARY},
};

/// The request, as far as the engine uses it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "these are the fields of the engines' API")]
pub(super) struct ChatRequest {
    pub(super) messages: Vec<WireMessage>,
    tools: Option<Vec<Box<RawValue>>>,
    stop: Vec<String>,
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    stream: bool,
    logprobs: bool,
    top_logprobs: usize,
    return_token_ids: bool,
    return_prompt_token_ids: bool,
    return_meta_info: bool,
    no_stop_trim: bool,
    /// The prompt in place of the messages.
    pub(super) input_ids: Option<Vec<i32>>,
    pub(super) rid: Option<String>,
    /// Whether vLLM's endpoint of ids answers with events.
    #[serde(skip)]
    pub(super) as_events: bool,
}

/// A request of vLLM's endpoint of ids.
#[derive(Debug, Deserialize)]
struct GenerateRequest {
    request_id: Option<String>,
    token_ids: Vec<i32>,
    sampling_params: SamplingParams,
    #[serde(default)]
    stream: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SamplingParams {
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    stop: Vec<String>,
    logprobs: Option<usize>,
}

/// A request of SGLang's endpoint of ids.
#[derive(Debug, Deserialize)]
struct SglangRequest {
    rid: Option<String>,
    input_ids: Vec<i32>,
    sampling_params: SglangParams,
    #[serde(default)]
    return_logprob: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SglangParams {
    max_new_tokens: Option<usize>,
    temperature: Option<f64>,
    stop: Vec<String>,
}

/// An answer before it is written.
#[derive(Debug)]
pub(super) struct Sampled {
    prompt: Vec<i32>,
    pub(super) ids: Vec<i32>,
    finish: &'static str,
    matched: Value,
}

impl ChatRequest {
    /// A request of vLLM's endpoint of ids, as the chat request that asks for the same.
    pub(super) fn of_vllm_ids(body: &[u8]) -> Result<Self, serde_json::Error> {
        let request: GenerateRequest = serde_json::from_slice(body)?;
        Ok(Self {
            stop: request.sampling_params.stop,
            max_tokens: request.sampling_params.max_tokens,
            temperature: request.sampling_params.temperature,
            logprobs: request.sampling_params.logprobs.is_some(),
            input_ids: Some(request.token_ids),
            rid: request.request_id,
            as_events: request.stream,
            ..Self::default()
        })
    }

    /// The same of SGLang's endpoint of ids.
    pub(super) fn of_sglang_ids(body: &[u8]) -> Result<Self, serde_json::Error> {
        let request: SglangRequest = serde_json::from_slice(body)?;
        Ok(Self {
            stop: request.sampling_params.stop,
            max_tokens: request.sampling_params.max_new_tokens,
            temperature: request.sampling_params.temperature,
            logprobs: request.return_logprob,
            return_meta_info: true,
            input_ids: Some(request.input_ids),
            rid: request.rid,
            ..Self::default()
        })
    }

    /// What an engine answers with status 400, if anything.
    pub(super) fn refusal(&self, kind: EngineKind, switches: &Switches) -> Option<String> {
        if self.messages.is_empty() && self.input_ids.is_none() {
            return Some("messages must not be empty".to_owned());
        }
        let returns = self.return_token_ids || self.return_prompt_token_ids || self.return_meta_info;
        if self.stream && (kind == EngineKind::Sglang && returns) {
            return Some("return_token_ids is not supported with stream=true".to_owned());
        }
        if self.stream {
            return Some("the fake engine does not stream".to_owned());
        }
        let parses = |message: &WireMessage| message.calls().all(|(_, arguments)| template::is_object(arguments));
        if kind == EngineKind::Sglang && !self.messages.iter().all(parses) {
            return Some("Expecting value: line 1 column 1 (char 0)".to_owned());
        }
        let is_later = |message: &WireMessage| message.role == "system";
        if switches.one_system && self.input_ids.is_none() && self.messages.iter().skip(1).any(is_later) {
            return Some("System message must be at the beginning.".to_owned());
        }
        let prompt = self.prompt();
        if self.input_ids.is_some()
            && !self.messages.is_empty()
            && let Err(why) = self.check_ids(&prompt)
        {
            return Some(format!("input_ids are not the prompt of the messages: {why}"));
        }
        let asked = prompt.len() + self.max_tokens.unwrap_or(1);
        (asked > switches.context_tokens)
            .then(|| format!("This model's maximum context length is {} tokens, not {asked}.", switches.context_tokens))
    }

    fn check_ids(&self, prompt: &[i32]) -> Result<(), String> {
        if let Some(id) = prompt.iter().find(|id| !(0..VOCABULARY).contains(*id)) {
            return Err(format!("the id {id} is outside the vocabulary"));
        }
        let tools = self.tools.as_deref().unwrap_or_default();
        prompt::check(&tokenizer::decode(prompt), &self.messages, tools, &self.stop)
    }

    /// The answer of a script whose `key` occurs in a message of the user.
    pub(super) fn scripted<'a>(&self, key: &str, answers: &'a [Answer]) -> Option<&'a Answer> {
        if self.messages.is_empty() {
            let prompt = tokenizer::decode(&self.prompt());
            return answers.get(template::turns_behind(&prompt, key)?);
        }
        let asks = |message: &WireMessage| message.role == "user" && message.text().contains(key);
        let asked = self.messages.iter().position(asks)?;
        answers.get(self.messages[asked..].iter().filter(|message| message.role == "assistant").count())
    }

    pub(super) fn sample(&self, answer: Option<&Answer>, switches: &Switches) -> Sampled {
        let prompt = self.prompt();
        let mut ids = match answer {
            Some(answer) => {
                let text = template::written(answer);
                let mut ids = if answer.in_bytes { tokenizer::encode_bytes(&text) } else { tokenizer::encode(&text) };
                ids.push(IM_END);
                // A prompt of ids may contain what was sampled before the call was aborted.
                let begun = template::begun(&prompt);
                if ids.starts_with(begun) { ids[begun.len()..].to_vec() } else { ids }
            }
            None => model::sample(&prompt, switches.seed, self.temperature()),
        };
        let (mut finish, mut matched) = ("stop", json!(IM_END));
        if let Some((count, stop)) = self.stopped(&ids) {
            ids.truncate(count);
            matched = json!(stop);
        }
        // Without a bound, engines sample until their context is full.
        let bound = self.max_tokens.unwrap_or_else(|| switches.context_tokens.saturating_sub(prompt.len()));
        if ids.len() > bound {
            ids.truncate(bound);
            (finish, matched) = ("length", Value::Null);
        }
        Sampled { prompt, ids, finish, matched }
    }

    pub(super) fn answer(&self, kind: EngineKind, mut sampled: Sampled, switches: &Switches) -> Value {
        let text = self.visible(&sampled);
        let values = self.logprobs(&sampled, switches);
        if switches.id_fault == IdFault::Foreign
            && let Some(first) = sampled.ids.first_mut()
        {
            *first = VOCABULARY + 7;
        }
        let parsed = template::parse_if(switches.parses, &text);
        let id = format!("{:x}", Context::new(&sampled.prompt).logprob(0, 1.0).to_bits());
        let message = message(kind, &parsed, &id);
        let has_called = sampled.finish == "stop" && !parsed.calls.is_empty();
        let finish = if has_called { "tool_calls" } else { sampled.finish };
        let finish = switches.finish_reason.as_deref().unwrap_or(finish);
        let mut choice = json!({"index": 0, "message": message, "finish_reason": finish});
        if self.logprobs && switches.logprob_fault != LogprobFault::Missing {
            choice["logprobs"] = json!({"content": self.content(&sampled, &values, switches)});
        }
        let mut answer = json!({
            "id": "chatcmpl-fake", "object": "chat.completion", "created": 0, "model": "fake",
            "usage": {
                "prompt_tokens": sampled.prompt.len(), "completion_tokens": sampled.ids.len(),
                "total_tokens": sampled.prompt.len() + sampled.ids.len(),
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        });
        match kind {
            EngineKind::Sglang => self.extend_sglang(&mut answer, &mut choice, &sampled, &values, switches),
            EngineKind::Vllm | EngineKind::Openai => self.extend_vllm(&mut answer, &mut choice, &sampled, switches),
        }
        answer["choices"] = json!([choice]);
        answer
    }

    fn extend_sglang(
        &self,
        answer: &mut Value,
        choice: &mut Value,
        sampled: &Sampled,
        values: &[Option<f32>],
        switches: &Switches,
    ) {
        choice["matched_stop"] = sampled.matched.clone();
        if matches!(switches.id_fault, IdFault::Router | IdFault::NoneInChat) {
            return;
        }
        if self.return_prompt_token_ids && switches.id_fault != IdFault::NoPrompt {
            choice["prompt_token_ids"] = json!(sampled.prompt);
        }
        if self.return_token_ids && switches.id_fault != IdFault::NoSampled {
            choice["token_ids"] = json!(sampled.ids);
        }
        if self.return_meta_info {
            choice["meta_info"] = json!(self.meta_info(sampled, values, switches));
        }
        answer["metadata"] = json!(Self::versions(sampled, switches));
    }

    /// What both of SGLang's endpoints say about an answer.
    fn meta_info(
        &self,
        sampled: &Sampled,
        values: &[Option<f32>],
        switches: &Switches,
    ) -> serde_json::Map<String, Value> {
        let mut info = Self::versions(sampled, switches);
        let finish = switches.finish_reason.as_deref().filter(|_| self.messages.is_empty()).unwrap_or(sampled.finish);
        info.insert("finish_reason".to_owned(), json!({"type": finish, "matched": sampled.matched}));
        if switches.id_fault != IdFault::NoSampled && switches.logprob_fault != LogprobFault::Missing {
            let mut pairs: Vec<Value> =
                sampled.ids.iter().zip(values).map(|(id, value)| json!([value, id, null])).collect();
            if switches.logprob_fault == LogprobFault::Short {
                pairs.pop();
            }
            info.insert("output_token_logprobs".to_owned(), json!(pairs));
        }
        info
    }

    fn versions(sampled: &Sampled, switches: &Switches) -> serde_json::Map<String, Value> {
        let mut versions = serde_json::Map::new();
        let last = switches.version_change.as_ref().filter(|(place, _)| *place < sampled.ids.len());
        let last_label = last.map_or(&switches.weight_version, |(_, label)| label);
        if switches.version_report != VersionReport::Nothing {
            versions.insert("weight_version".to_owned(), json!(last_label));
        }
        if switches.version_report == VersionReport::Spans {
            let change = last.map_or(sampled.ids.len(), |(place, _)| *place);
            let mut spans = vec![json!({"version": switches.weight_version, "start": 0, "end": change})];
            if change < sampled.ids.len() {
                spans.push(json!({"version": last_label, "start": change, "end": sampled.ids.len()}));
            }
            versions.insert("weight_versions".to_owned(), json!(spans));
        }
        versions
    }

    /// The answer of SGLang's endpoint of ids.
    pub(super) fn answer_sglang_ids(&self, mut sampled: Sampled, switches: &Switches) -> Value {
        let values = self.logprobs(&sampled, switches);
        if switches.id_fault == IdFault::Foreign
            && let Some(first) = sampled.ids.first_mut()
        {
            *first = VOCABULARY + 7;
        }
        let mut info = self.meta_info(&sampled, &values, switches);
        info.insert("id".to_owned(), json!(self.rid));
        let more = usize::from(switches.id_fault == IdFault::Rendered);
        info.insert("prompt_tokens".to_owned(), json!(sampled.prompt.len() + more));
        info.insert("completion_tokens".to_owned(), json!(sampled.ids.len()));
        info.insert("cached_tokens".to_owned(), json!(0));
        json!({"text": self.visible(&sampled), "output_ids": sampled.ids, "meta_info": info})
    }

    /// The answer of vLLM's endpoint of ids.
    pub(super) fn answer_vllm_ids(&self, mut sampled: Sampled, switches: &Switches) -> Value {
        let values = self.logprobs(&sampled, switches);
        if switches.id_fault == IdFault::Foreign
            && let Some(first) = sampled.ids.first_mut()
        {
            *first = VOCABULARY + 7;
        }
        let content = sampled.ids.iter().zip(&values);
        let mut content: Vec<Value> = content
            .map(|(id, value)| json!({"token_id": id, "logprob": value, "rank": 1, "top_logprobs": []}))
            .collect();
        if matches!(switches.logprob_fault, LogprobFault::Short | LogprobFault::ShortContent) {
            content.pop();
        }
        let finish = switches.finish_reason.as_deref().unwrap_or(sampled.finish);
        let stop = Some(&sampled.matched).filter(|matched| matched.is_string() && switches.names_stops);
        let mut choice = json!({"index": 0, "finish_reason": finish, "stop_reason": stop});
        if switches.id_fault != IdFault::NoSampled {
            choice["token_ids"] = json!(sampled.ids);
        }
        if self.logprobs && switches.logprob_fault != LogprobFault::Missing {
            choice["logprobs"] = json!({"content": content});
        }
        if switches.version_report == VersionReport::Spans {
            choice["weight_versions"] = Self::versions(&sampled, switches)["weight_versions"].clone();
        }
        let mut answer = json!({"request_id": self.rid, "choices": [choice]});
        if !matches!(switches.id_fault, IdFault::NoPrompt | IdFault::Router) {
            answer["prompt_token_ids"] = json!(sampled.prompt);
        }
        answer
    }

    /// The same as events: one for each id, and one for the counts. The last id comes with what ended the answer.
    pub(super) fn events_of_vllm_ids(answer: &Value) -> Vec<Value> {
        let choice = &answer["choices"][0];
        let ids = choice["token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut events: Vec<Value> = (0..ids.len().max(1))
            .map(|place| {
                let mut part =
                    json!({"index": 0, "finish_reason": null, "token_ids": ids.get(place..=place).unwrap_or_default()});
                if let Some(entry) = choice["logprobs"]["content"].get(place) {
                    part["logprobs"] = json!({"content": [entry]});
                }
                json!({"request_id": answer["request_id"], "choices": [part]})
            })
            .collect();
        events[0]["prompt_token_ids"] = answer["prompt_token_ids"].clone();
        if let Some(last) = events.last_mut() {
            for name in ["finish_reason", "stop_reason", "weight_versions"] {
                last["choices"][0][name] = choice[name].clone();
            }
        }
        let counts = json!({"prompt_tokens": answer["prompt_token_ids"].as_array().map_or(0, Vec::len),
            "completion_tokens": ids.len(), "prompt_tokens_details": {"cached_tokens": 0}});
        events.push(json!({"request_id": answer["request_id"], "choices": [], "usage": counts}));
        events
    }

    fn extend_vllm(&self, answer: &mut Value, choice: &mut Value, sampled: &Sampled, switches: &Switches) {
        // vLLM names only stop texts and the stop tokens of the request.
        choice["stop_reason"] = if sampled.matched.is_string() { sampled.matched.clone() } else { Value::Null };
        if !self.return_token_ids || switches.id_fault == IdFault::Router {
            return;
        }
        if switches.id_fault != IdFault::NoPrompt {
            answer["prompt_token_ids"] = json!(sampled.prompt);
        }
        if switches.id_fault != IdFault::NoSampled {
            choice["token_ids"] = json!(sampled.ids);
        }
    }

    /// The log-probabilities as the engine reports them, right or wrong.
    fn logprobs(&self, sampled: &Sampled, switches: &Switches) -> Vec<Option<f32>> {
        let temperature = if switches.raw_logprobs { 1.0 } else { self.temperature() };
        let mut context = Context::new(&sampled.prompt);
        let mut values = Vec::new();
        for &id in &sampled.ids {
            let shift = if switches.logprob_fault == LogprobFault::Shifted { 2.0 } else { 0.0 };
            values.push(Some(context.logprob(id, temperature) - shift));
            context = context.with(id);
        }
        if let Some(first) = values.first_mut() {
            match switches.logprob_fault {
                LogprobFault::Sentinel => *first = Some(-9999.0),
                LogprobFault::Positive => *first = Some(0.5),
                LogprobFault::Null => *first = None,
                LogprobFault::None
                | LogprobFault::Short
                | LogprobFault::ShortContent
                | LogprobFault::Missing
                | LogprobFault::Shifted => {}
            }
        }
        values
    }

    fn content(&self, sampled: &Sampled, values: &[Option<f32>], switches: &Switches) -> Vec<Value> {
        let temperature = if switches.raw_logprobs { 1.0 } else { self.temperature() };
        let mut context = Context::new(&sampled.prompt);
        let mut entries = Vec::new();
        for (&id, value) in sampled.ids.iter().zip(values) {
            let mut entry = json!({"token": tokenizer::decode(&[id]), "logprob": value, "top_logprobs": []});
            if self.top_logprobs > 0 {
                // As vLLM does: one place belongs to the sampled token, whether it is among the best or not.
                let others = context.best(self.top_logprobs).into_iter().filter(|best| *best != id);
                let named = std::iter::once(id).chain(others).take(self.top_logprobs);
                let value =
                    |id| json!({"token": tokenizer::decode(&[id]), "logprob": context.logprob(id, temperature)});
                entry["top_logprobs"] = named.map(value).collect();
            }
            entries.push(entry);
            context = context.with(id);
        }
        if matches!(switches.logprob_fault, LogprobFault::Short | LogprobFault::ShortContent) {
            entries.pop();
        }
        entries
    }

    fn prompt(&self) -> Vec<i32> {
        if let Some(ids) = &self.input_ids {
            return ids.clone();
        }
        tokenizer::encode(&template::render(&self.messages, self.tools.as_deref().unwrap_or_default()))
    }

    fn temperature(&self) -> f64 {
        self.temperature.unwrap_or(1.0)
    }

    /// How many ids lead to the first stop text, and which one it is.
    fn stopped(&self, ids: &[i32]) -> Option<(usize, &str)> {
        // Without stop texts a long answer takes no quadratic time.
        let checked = if self.stop.is_empty() { 0 } else { ids.len() };
        (1..=checked).find_map(|count| {
            let text = tokenizer::decode(&ids[..count]);
            self.stop.iter().find(|stop| text.contains(stop.as_str())).map(|stop| (count, stop.as_str()))
        })
    }

    /// The text that the agent sees: without the end token, and up to the stop text, unless the agent wants that, too.
    fn visible(&self, sampled: &Sampled) -> String {
        let ids = sampled.ids.strip_suffix(&[IM_END]).unwrap_or(&sampled.ids);
        let text = tokenizer::decode(ids);
        match sampled.matched.as_str().and_then(|stop| text.find(stop)) {
            Some(place) if !self.no_stop_trim => text[..place].to_owned(),
            _ => text,
        }
    }
}

/// A message as this engine writes it. The ids of its tool calls contain `id`.
fn message(kind: EngineKind, parsed: &Parsed, id: &str) -> Value {
    let mut message = json!({"role": "assistant", "content": parsed.content});
    let reasoning_field = if kind == EngineKind::Sglang { "reasoning_content" } else { "reasoning" };
    message[reasoning_field] = json!(parsed.reasoning);
    if !parsed.calls.is_empty() {
        let calls = parsed.calls.iter().enumerate().map(|(index, (name, arguments))| {
            let id = format!("call_{id}_{index}");
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        });
        message["tool_calls"] = calls.collect();
    }
    message
}

/// What vLLM makes of ids. With a parser it keeps special tokens in the text, also the one that ended the answer. An error
/// says why it refuses.
pub(super) fn derender(body: &Value, switches: &Switches) -> Result<Value, &'static str> {
    if switches.parses && body["chat_request"].is_null() {
        return Err("chat_request is required when a tool or reasoning parser is configured");
    }
    if body["stream"] == true {
        return Ok(derender_part(body, switches));
    }
    let generated = &body["generate_response"];
    let ids = ids_of(&generated["choices"][0]["token_ids"]);
    if ids.is_empty() {
        return Err("choice 0 has empty or null token_ids");
    }
    if body["chat_request"]["stop"].as_array().is_some_and(|stops| stops.len() > 4) {
        return Err("List should have at most 4 items after validation");
    }
    let id = generated["request_id"].as_str().unwrap_or_default();
    let mut parsed = template::parse_if(switches.parses, &tokenizer::decode(&ids));
    if switches.respells_calls {
        for (_, arguments) in &mut parsed.calls {
            let read: Option<Value> = serde_json::from_str(arguments).ok();
            *arguments = read.map_or_else(|| arguments.clone(), |read| read.to_string());
        }
    }
    let message = message(EngineKind::Vllm, &parsed, id);
    let finish = &generated["choices"][0]["finish_reason"];
    Ok(json!({"choices": [{"index": 0, "message": message, "finish_reason": finish}]}))
}

fn ids_of(list: &Value) -> Vec<i32> {
    list.as_array().into_iter().flatten().filter_map(|id| i32::try_from(id.as_i64()?).ok()).collect()
}

/// What vLLM makes of the next ids of an answer. Its state has all ids before.
fn derender_part(body: &Value, switches: &Switches) -> Value {
    let choice = &body["generate_chunk"]["choices"][0];
    let before = ids_of(&body["stream_state"]["output_token_ids"]);
    let ids = [&before[..], &ids_of(&choice["token_ids"])].concat();
    let read = |ids: &[i32], is_whole: bool| {
        let decoded = tokenizer::decode(ids);
        // A character whose bytes are not all there is held back.
        let text = if is_whole { &decoded } else { decoded.trim_end_matches(char::REPLACEMENT_CHARACTER) };
        if switches.parses_parts_apart {
            return template::parse_if(false, text);
        }
        let begun = template::parse_beginning(text);
        // What is no call in the end is text, unless it was taken for one.
        if is_whole && begun.calls.is_empty() { template::parse(text) } else { begun }
    };
    let (old, new) = (read(&before, false), read(&ids, !choice["finish_reason"].is_null()));
    let more = |old: &str, new: &str| new.strip_prefix(old).filter(|more| !more.is_empty()).map(str::to_owned);
    let reasoning = more(old.reasoning.as_deref().unwrap_or_default(), new.reasoning.as_deref().unwrap_or_default());
    let request = body["generate_chunk"]["request_id"].as_str().unwrap_or_default();
    let calls = new.calls.iter().enumerate().map(|(index, (name, arguments))| {
        if let Some((_, begun)) = old.calls.get(index) {
            return json!({"index": index, "function": {"arguments": more(begun, arguments)}});
        }
        let function = json!({"name": name, "arguments": arguments});
        json!({"index": index, "id": format!("call_{request}_part_{index}"), "function": function})
    });
    let delta = json!({"reasoning": reasoning, "content": more(&old.content, &new.content),
        "tool_calls": calls.collect::<Value>()});
    json!({"chunk": {"choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]},
        "stream_state": {"output_token_ids": ids}})
}

/// What SGLang's parser of reasoning makes of a text.
pub(super) fn separate_reasoning(body: &Value) -> Value {
    let text = body["text"].as_str().unwrap_or_default();
    let (reasoning, rest) = template::separated(text);
    json!({"reasoning_text": reasoning, "text": rest})
}

/// What SGLang's parser of tool calls makes of a text.
pub(super) fn parse_calls(body: &Value) -> Value {
    let parsed = template::parse(body["text"].as_str().unwrap_or_default());
    let calls =
        parsed.calls.iter().map(|(name, arguments)| json!({"tool_index": 0, "name": name, "parameters": arguments}));
    json!({"normal_text": parsed.content, "calls": calls.collect::<Value>()})
}

impl Sampled {
    /// The same answer, aborted after half of its ids.
    pub(super) fn aborted(mut self) -> Self {
        self.ids.truncate(self.ids.len() / 2);
        Self { finish: "abort", matched: Value::Null, ..self }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.finish == "abort"
    }
}
