//! Answers of the chat endpoint, whole and in chunks.

use std::{sync::Arc, time::Instant};

use serde_json::{Map, Value, json};

use super::{
    super::{
        Dialect,
        output::Output,
        request::{Ending, Token},
        text::{Part, Parts, Text},
    },
    generate::View,
};

/// What an answer shows besides the message.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field that a client asks for")]
pub(super) struct Shown {
    pub(super) logprobs: bool,
    pub(super) alternatives: bool,
    pub(super) token_ids: bool,
    pub(super) prompt_token_ids: bool,
    pub(super) meta_info: bool,
}

/// What an answer is made of, besides the output.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) dialect: Dialect,
    pub(super) model: String,
    pub(super) text: Option<Arc<Text>>,
    pub(super) prompt: Vec<i64>,
    pub(super) started: Instant,
    pub(super) shown: Shown,
}

impl Completion {
    /// The whole answer.
    pub(super) fn whole(&self, rid: &str, mut parts: Parts, output: &Output) -> Value {
        let mut found = parts.push(output.text().unwrap_or_default());
        found.extend(parts.finish());
        let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for part in found {
            match part {
                Part::Content(text) => content.push_str(&text),
                Part::Reasoning(text) => reasoning.push_str(&text),
                Part::Call { name, arguments } => calls.push(call(&name, &arguments)),
            }
        }
        let finish_reason = finish_reason(output, !calls.is_empty());
        let null_if_empty = |text: String| if text.is_empty() { Value::Null } else { text.into() };
        let content = if calls.is_empty() { content.into() } else { null_if_empty(content) };
        let mut message = json!({"role": "assistant", "content": content});
        message[self.reasoning_field()] = null_if_empty(reasoning);
        message["tool_calls"] = if calls.is_empty() { Value::Null } else { calls.into() };

        let mut choice = json!({"index": 0, "message": message, "finish_reason": finish_reason});
        choice["logprobs"] = self.logprobs(&output.tokens);
        choice[self.stop_field()] = stop(output);
        if self.shown.token_ids {
            choice["token_ids"] = output.ids().into();
        }
        if self.shown.meta_info {
            choice["meta_info"] = self.meta_info(rid, output);
        }
        let mut answer = json!({
            "id": rid, "object": "chat.completion", "created": created(), "model": self.model,
            "usage": self.usage(output),
        });
        if self.shown.prompt_token_ids {
            let place = if self.dialect == Dialect::Vllm { &mut answer } else { &mut choice };
            place["prompt_token_ids"] = self.prompt.clone().into();
        }
        answer["choices"] = json!([choice]);
        answer["metadata"] = metadata(output);
        answer
    }

    /// The answer in chunks.
    pub(super) fn chunks(self, rid: String, parts: Parts, with_usage: bool) -> Chunks {
        Chunks { completion: self, rid, parts, with_usage, is_first: true, bytes: 0, tokens: 0, calls: 0 }
    }

    fn reasoning_field(&self) -> &'static str {
        match self.dialect {
            Dialect::Sglang => "reasoning_content",
            Dialect::Vllm => "reasoning",
        }
    }

    fn stop_field(&self) -> &'static str {
        match self.dialect {
            Dialect::Sglang => "matched_stop",
            Dialect::Vllm => "stop_reason",
        }
    }

    fn usage(&self, output: &Output) -> Value {
        let (prompt, completion) = (self.prompt.len(), output.tokens.len());
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }

    fn logprobs(&self, tokens: &[Token]) -> Value {
        if !self.shown.logprobs {
            return Value::Null;
        }
        let entry = |id: i64, logprob: f32| {
            let text = self.text.as_ref().map_or_else(|| format!("token_id:{id}"), |text| text.decode(&[id], false));
            json!({"token": text, "bytes": text.as_bytes(), "logprob": logprob})
        };
        let content = tokens.iter().map(|token| {
            let mut shown = entry(token.id, token.logprob);
            shown["top_logprobs"] = token.alternatives.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            shown
        });
        json!({"content": content.collect::<Vec<_>>()})
    }

    fn meta_info(&self, rid: &str, output: &Output) -> Value {
        let view = View {
            rid: rid.to_owned(),
            prompt_tokens: self.prompt.len(),
            scored: None,
            with_logprobs: self.shown.logprobs,
            with_alternatives: self.shown.alternatives,
            started: self.started,
        };
        view.meta_info(output)
    }
}

/// The chunks of an answer, made from an output that grows.
#[derive(Debug)]
pub(super) struct Chunks {
    completion: Completion,
    rid: String,
    parts: Parts,
    with_usage: bool,
    is_first: bool,
    /// Bytes of the text, tokens and calls that earlier chunks contain.
    bytes: usize,
    tokens: usize,
    calls: usize,
}

impl Chunks {
    /// The chunks for what is new in the output.
    pub(super) fn next(&mut self, output: &Output) -> Vec<Value> {
        let mut deltas = Vec::new();
        if self.is_first {
            deltas.push(json!({"role": "assistant", "content": ""}));
        }
        let text = output.text().unwrap_or_default();
        let mut parts = self.parts.push(&text[self.bytes..]);
        self.bytes = text.len();
        if output.ending.is_some() {
            parts.extend(self.parts.finish());
        }
        deltas.extend(parts.into_iter().map(|part| self.delta(part)));
        // Ids and log-probabilities are sent even if no text is complete.
        let new = &output.tokens[self.tokens..];
        let is_shown = self.completion.shown.logprobs || self.completion.shown.token_ids;
        if deltas.is_empty() && output.ending.is_none() && (new.is_empty() || !is_shown) {
            return Vec::new();
        }
        if deltas.is_empty() || output.ending.is_some() {
            deltas.push(json!({}));
        }
        let last = deltas.len() - 1;
        let mut chunks: Vec<Value> =
            deltas.into_iter().enumerate().map(|(at, delta)| self.chunk(&delta, output, at == 0, at == last)).collect();
        self.tokens = output.tokens.len();
        self.is_first = false;
        if output.ending.is_some() && self.with_usage {
            let mut usage = self.frame(json!([]));
            usage["usage"] = self.completion.usage(output);
            chunks.push(usage);
        }
        chunks
    }

    fn delta(&mut self, part: Part) -> Value {
        match part {
            Part::Content(text) => json!({"content": text}),
            Part::Reasoning(text) => {
                Map::from_iter([(self.completion.reasoning_field().to_owned(), Value::from(text))]).into()
            }
            // A call is sent whole, because some clients join pieces of different calls.
            Part::Call { name, arguments } => {
                let mut call = call(&name, &arguments);
                call["index"] = self.calls.into();
                self.calls += 1;
                json!({"tool_calls": [call]})
            }
        }
    }

    /// One chunk. Of those that are sent together, the first has the ids and log-probabilities, and the last the reason of
    /// the end.
    fn chunk(&self, delta: &Value, output: &Output, is_first: bool, is_last: bool) -> Value {
        let ending = output.ending.as_ref().filter(|_| is_last);
        let mut choice = json!({"index": 0, "delta": delta, "finish_reason": null, "logprobs": null});
        if ending.is_some() {
            choice["finish_reason"] = finish_reason(output, self.calls > 0).into();
            choice[self.completion.stop_field()] = stop(output);
        }
        if is_first {
            let new = &output.tokens[self.tokens..];
            choice["logprobs"] = self.completion.logprobs(new);
            if self.completion.shown.token_ids {
                choice["token_ids"] = new.iter().map(|token| token.id).collect();
            }
        }
        let mut chunk = self.frame(json!([choice]));
        if self.is_first && is_first && self.completion.shown.prompt_token_ids {
            chunk["prompt_token_ids"] = self.completion.prompt.clone().into();
        }
        if ending.is_some() {
            chunk["metadata"] = metadata(output);
        }
        chunk
    }

    fn frame(&self, choices: Value) -> Value {
        let mut frame = json!({
            "id": self.rid, "object": "chat.completion.chunk", "created": created(), "model": self.completion.model,
        });
        frame["choices"] = choices;
        frame
    }
}

fn call(name: &str, arguments: &str) -> Value {
    let id = format!("call_{:024x}", rand::random::<u128>() >> 32);
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn finish_reason(output: &Output, has_calls: bool) -> &'static str {
    match &output.ending {
        Some(Ending::Abort(_)) => "abort",
        Some(Ending::Length) => "length",
        _ if has_calls => "tool_calls",
        _ => "stop",
    }
}

/// The stop token or stop text that ended an answer.
fn stop(output: &Output) -> Value {
    match &output.ending {
        Some(Ending::Stop(id)) => (*id).into(),
        Some(Ending::StopText(text)) => text.as_str().into(),
        _ => Value::Null,
    }
}

fn metadata(output: &Output) -> Value {
    json!({"weight_version": *output.version, "weight_versions": output.versions()})
}

/// Unix time in seconds.
fn created() -> u64 {
    jiff::Timestamp::now().as_second() as u64
}
