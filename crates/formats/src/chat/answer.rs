//! An answer of a chat endpoint, with the fields of vLLM and SGLang. Nothing is filled in: what is only half there is
//! refused.

use forebay_wire::Turn;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, value::RawValue};

use crate::json::Problems;

/// What vLLM writes if it has no log-probability of a token.
const NO_LOGPROB: f32 = -9999.0;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    pub(super) model: Option<String>,
    /// vLLM puts them here, SGLang into the choice.
    prompt_token_ids: Option<Vec<i32>>,
    choices: Vec<Choice>,
    /// Whether the ids stand in the record itself.
    #[serde(skip)]
    is_flat: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice {
    message: Option<Box<RawValue>>,
    finish_reason: Option<String>,
    /// SGLang's name.
    matched_stop: Option<Value>,
    /// vLLM's name.
    stop_reason: Option<Value>,
    prompt_token_ids: Option<Vec<i32>>,
    token_ids: Option<Vec<i32>>,
    /// Newer versions of SGLang have this name.
    response_token_ids: Option<Vec<i32>>,
    logprobs: Option<Logprobs>,
    meta_info: Option<MetaInfo>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Logprobs {
    content: Option<Vec<TokenLogprob>>,
}

#[derive(Deserialize)]
struct TokenLogprob {
    logprob: f32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MetaInfo {
    /// Log-probability, id and text of each sampled token. It is complete where `logprobs` is too short.
    output_token_logprobs: Option<Vec<(f32, i32, IgnoredAny)>>,
}

/// Ids that stand in a record without an answer.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Ids {
    #[serde(rename = "prompt_token_ids")]
    prompt: Option<Vec<i32>>,
    #[serde(rename = "token_ids")]
    sampled: Option<Vec<i32>>,
    #[serde(rename = "completion_token_ids")]
    completion: Option<Vec<i32>>,
    logprobs: Option<Vec<f32>>,
}

impl Answer {
    /// An answer without text.
    pub(super) fn of_ids(ids: Ids, problems: &mut Problems) -> Self {
        if let (Some(sampled), Some(completion)) = (&ids.sampled, &ids.completion) {
            problems.require(sampled == completion, "/completion_token_ids", "are other ids than those in `token_ids`");
        }
        let content = |values: Vec<f32>| values.into_iter().map(|logprob| TokenLogprob { logprob }).collect();
        let choice = Choice {
            token_ids: ids.sampled.or(ids.completion),
            logprobs: ids.logprobs.map(|values| Logprobs { content: Some(content(values)) }),
            ..Choice::default()
        };
        Self { prompt_token_ids: ids.prompt, choices: vec![choice], is_flat: true, ..Self::default() }
    }

    pub(super) fn message(&self) -> Option<&RawValue> {
        self.choices.first()?.message.as_deref()
    }

    /// The ids of the only choice, as a turn. It has none if the engine did not return them.
    pub(super) fn sampled(&self, at: &str, problems: &mut Problems) -> Option<Turn> {
        let [choice] = &self.choices[..] else {
            let detail =
                format!("must have one choice, but has {}: a rollout has one answer to each call", self.choices.len());
            problems.push(format!("{at}/choices"), detail);
            return None;
        };
        if choice.finish_reason.as_deref().is_some_and(|reason| matches!(reason, "abort" | "error")) {
            problems.push(
                format!("{at}/choices/0/finish_reason"),
                "the engine ended the call, so the answer is not complete",
            );
        }
        let place = if self.is_flat { at.to_owned() } else { format!("{at}/choices/0") };
        let (tokens, logprobs) = choice.tokens(&place, problems)?;
        let prompt_tokens = choice.prompt_token_ids.as_ref().or(self.prompt_token_ids.as_ref());
        Some(Turn {
            prompt_tokens: prompt_tokens.cloned().unwrap_or_default(),
            stopped_on_token: choice.stopped_on_token(&tokens),
            finish_reason: choice.finish_reason.clone().filter(|reason| !reason.is_empty()),
            tokens,
            logprobs,
            ..Turn::default()
        })
    }
}

impl Choice {
    /// The sampled ids and their log-probabilities.
    fn tokens(&self, at: &str, problems: &mut Problems) -> Option<(Vec<i32>, Option<Vec<f32>>)> {
        let named = self.token_ids.as_ref().or(self.response_token_ids.as_ref());
        if let Some(told) = self.meta_info.as_ref().and_then(|meta| meta.output_token_logprobs.as_ref()) {
            let ids: Vec<i32> = told.iter().map(|&(_, id, _)| id).collect();
            // Some paths of SGLang leave out the token that ended the answer.
            let differs =
                named.is_some_and(|named| *named != ids && ids.split_last().is_none_or(|(_, rest)| named != rest));
            if differs {
                problems
                    .push(format!("{at}/token_ids"), "are other ids than those in `meta_info.output_token_logprobs`");
            }
            let values: Vec<f32> = told.iter().map(|&(logprob, ..)| logprob).collect();
            check(&format!("{at}/meta_info/output_token_logprobs"), &values, ids.len(), problems);
            return Some((ids, Some(values)));
        }
        let ids = named?.clone();
        let values = self.logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref());
        let values: Option<Vec<f32>> = values.map(|content| content.iter().map(|entry| entry.logprob).collect());
        if let Some(values) = &values {
            check(&format!("{at}/logprobs"), values, ids.len(), problems);
        }
        Some((ids, values))
    }

    fn stopped_on_token(&self, tokens: &[i32]) -> bool {
        let finish = self.finish_reason.as_deref().unwrap_or_default();
        match self.matched_stop.as_ref().or(self.stop_reason.as_ref()) {
            _ if finish == "length" || tokens.is_empty() => false,
            Some(Value::String(_)) => false,
            Some(Value::Number(id)) => id.as_i64() == tokens.last().map(|&id| i64::from(id)),
            // An engine does not name the model's own end token.
            _ => matches!(finish, "stop" | "tool_calls" | "function_call"),
        }
    }
}

fn check(at: &str, values: &[f32], tokens: usize, problems: &mut Problems) {
    if values.len() != tokens {
        problems.push(at, format!("has {} entries for {tokens} tokens", values.len()));
    }
    if let Some(index) = values.iter().position(|&value| !value.is_finite() || value <= NO_LOGPROB) {
        problems.push(at, format!("entry {index} is no log-probability"));
    }
}
