//! The endpoints that score given ids: SGLang's `/generate`, and vLLM's `/v1/completions` with a prompt of ids.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{EngineKind, IdFault, LogprobFault, Switches, model::Context, tokenizer::VOCABULARY};

/// The request of either engine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ScoreRequest {
    // SGLang's fields.
    input_ids: Vec<i32>,
    sampling_params: ScoreParams,
    return_logprob: bool,
    logprob_start_len: Option<usize>,
    rid: String,
    // vLLM's fields.
    prompt: Vec<i32>,
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    prompt_logprobs: Option<usize>,
    request_id: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ScoreParams {
    max_new_tokens: Option<usize>,
    temperature: Option<f64>,
}

/// A scored id.
struct Entry {
    id: i32,
    value: Option<f32>,
    /// The best ids in its place.
    best: Vec<(i32, Option<f32>)>,
}

impl ScoreRequest {
    /// What an engine answers with status 400, if anything.
    pub(super) fn refusal(&self, kind: EngineKind, switches: &Switches) -> Option<String> {
        let ids = self.ids(kind);
        if ids.is_empty() || ids.iter().any(|id| !(0..VOCABULARY).contains(id)) {
            return Some("the ids must be those of the vocabulary".to_owned());
        }
        let new = match kind {
            EngineKind::Sglang => self.sampling_params.max_new_tokens,
            EngineKind::Vllm | EngineKind::Openai => self.max_tokens,
        };
        let Some(new) = new else { return Some("the fake engine needs a bound of new tokens".to_owned()) };
        if kind != EngineKind::Sglang && new == 0 {
            return Some("max_tokens must be at least 1".to_owned());
        }
        let asked = ids.len() + new;
        (asked > switches.context_tokens)
            .then(|| format!("This model's maximum context length is {} tokens, not {asked}.", switches.context_tokens))
    }

    pub(super) fn rid(&self) -> &str {
        if self.rid.is_empty() { &self.request_id } else { &self.rid }
    }

    pub(super) fn answer(&self, kind: EngineKind, switches: &Switches) -> Value {
        let ids = self.ids(kind);
        match kind {
            EngineKind::Sglang => {
                let from = self.logprob_start_len.unwrap_or(ids.len()).min(ids.len());
                let mut entries = self.entries(kind, from, 0, switches);
                if switches.logprob_fault == LogprobFault::Short {
                    entries.pop();
                }
                let mut info = json!({"id": self.rid, "prompt_tokens": ids.len(), "completion_tokens": 0});
                if self.return_logprob && switches.logprob_fault != LogprobFault::Missing {
                    info["input_token_logprobs"] =
                        entries.iter().map(|entry| json!([entry.value, entry.id, null])).collect();
                }
                json!({"text": "", "output_ids": [], "meta_info": info})
            }
            EngineKind::Vllm | EngineKind::Openai => {
                let mut choice = json!({"index": 0, "text": "x", "finish_reason": "length"});
                if let Some(best) = self.prompt_logprobs
                    && switches.logprob_fault != LogprobFault::Missing
                {
                    let mut entries = self.entries(kind, 0, best, switches);
                    if switches.logprob_fault == LogprobFault::Short {
                        entries.pop();
                    }
                    let named = |(id, value): (i32, Option<f32>)| {
                        (id.to_string(), json!({"logprob": value, "rank": 1, "decoded_token": "x"}))
                    };
                    let entry = |(place, entry): (usize, &Entry)| match place {
                        0 => Value::Null,
                        // The id itself is named whether it is among the best or not.
                        _ => entry.best.iter().copied().chain([(entry.id, entry.value)]).map(named).collect(),
                    };
                    choice["prompt_logprobs"] = entries.iter().enumerate().map(entry).collect();
                }
                json!({"id": "cmpl-fake", "object": "text_completion", "choices": [choice]})
            }
        }
    }

    /// The ids from a place on, with their log-probabilities, right or wrong. The first has none, as in both engines.
    fn entries(&self, kind: EngineKind, from: usize, best: usize, switches: &Switches) -> Vec<Entry> {
        let ids = self.ids(kind);
        let is_raw = switches.raw_logprobs || switches.raw_scores;
        let temperature = (if is_raw { 1.0 } else { self.temperature(kind) }) / switches.sharpness;
        let mut context = Context::new(&ids[..from]);
        let mut entries = Vec::with_capacity(ids.len() - from);
        for &id in &ids[from..] {
            let value = (!entries.is_empty()).then(|| context.logprob(id, temperature));
            let best = if entries.is_empty() { Vec::new() } else { context.best(best) };
            let best = best.into_iter().map(|id| (id, Some(context.logprob(id, temperature)))).collect();
            entries.push(Entry { id, value, best });
            context = context.with(id);
        }
        if let Some(Entry { id, value, .. }) = entries.last_mut() {
            match switches.logprob_fault {
                LogprobFault::Sentinel => *value = Some(-9999.0),
                LogprobFault::Positive => *value = Some(0.5),
                LogprobFault::Null => *value = None,
                LogprobFault::None
                | LogprobFault::Short
                | LogprobFault::ShortContent
                | LogprobFault::Missing
                | LogprobFault::Shifted => {}
            }
            if switches.id_fault == IdFault::Foreign {
                *id = VOCABULARY + 7;
            }
        }
        entries
    }

    fn ids(&self, kind: EngineKind) -> &[i32] {
        if kind == EngineKind::Sglang { &self.input_ids } else { &self.prompt }
    }

    fn temperature(&self, kind: EngineKind) -> f64 {
        let sent = if kind == EngineKind::Sglang { self.sampling_params.temperature } else { self.temperature };
        sent.unwrap_or(1.0)
    }
}
