//! The check of an answer, before anything is stored of it.
//!
//! A recorded call must name the ids that it was sampled behind, and a log-probability of each sampled id. Nothing is
//! ever filled in: an answer that lacks something is refused, with what to change.

use super::{
    EngineKind, UpstreamOptions,
    answer::{Choice, EngineAnswer},
    columns::{Ids, Matched},
    versions,
};
use crate::completion::{Completion, Finish, StopMatch, Usage, VersionSpan};

/// How far above zero a log-probability may be. Engines add in 32 bits or less, so certainty may come out as 1e-6.
const ABOVE_ZERO_MAX: f64 = 1e-3;

/// What vLLM writes if it has no log-probability of a token.
const NO_LOGPROB: f64 = -9999.0;

/// What vLLM writes if it ended an answer because the model repeated itself.
const REPETITION: &str = "repetition";

/// Why an answer cannot be recorded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// It is no chat completion.
    #[error("the engine's answer is no chat completion: {why}")]
    Shape {
        /// What the parser says.
        why: String,
    },
    /// It does not contain exactly one choice.
    #[error("the engine's answer has {count} choices instead of one")]
    Choices {
        /// How many.
        count: usize,
    },
    /// The ids of the prompt are missing or empty.
    #[error("the engine's answer has no prompt_token_ids")]
    PromptIds,
    /// The engine sampled behind other ids than it was sent.
    #[error("the engine's prompt differs from the one that was sent, from id {index} on")]
    Prompt {
        /// The first difference.
        index: usize,
    },
    /// The sampled ids are missing.
    #[error("the engine's answer has no token_ids")]
    TokenIds,
    /// Two places name different sampled ids.
    #[error("token_ids and the log-probabilities name different ids from place {index} on")]
    Conflict {
        /// The first difference.
        index: usize,
    },
    /// An id is negative, too large, or outside the vocabulary.
    #[error("the engine's answer contains the id {id}, which is outside the vocabulary")]
    Vocabulary {
        /// The id.
        id: i64,
    },
    /// The log-probabilities are missing.
    #[error("the engine's answer has no log-probabilities")]
    Logprobs,
    /// There are more or fewer log-probabilities than sampled ids.
    #[error("the engine's answer has {logprobs} log-probabilities for {ids} ids")]
    Lengths {
        /// Log-probabilities.
        logprobs: usize,
        /// Sampled ids.
        ids: usize,
    },
    /// A log-probability is null or no finite number.
    #[error("log-probability {index} is no finite number")]
    NotFinite {
        /// Its place.
        index: usize,
    },
    /// A log-probability is the number that stands for "none".
    #[error("log-probability {index} is -9999.0, which stands for none")]
    Sentinel {
        /// Its place.
        index: usize,
    },
    /// A log-probability is above zero.
    #[error("log-probability {index} is {value}, which is above zero")]
    Positive {
        /// Its place.
        index: usize,
        /// Its value.
        value: f64,
    },
    /// It has no log-probabilities of the ids that the engine was asked to score.
    #[error("the engine's answer has no log-probabilities of the ids that it was sent: {why}")]
    Unscored {
        /// What the parser says.
        why: String,
    },
    /// The finish reason is missing or unknown.
    #[error("the engine's finish_reason is {reason:?}, which is not known")]
    FinishReason {
        /// What it says.
        reason: String,
    },
}

impl Fault {
    /// What to do about it, in words for whoever runs the engine.
    #[must_use]
    pub fn remedy(&self, kind: EngineKind) -> &'static str {
        match (self, kind) {
            (Self::PromptIds | Self::TokenIds, EngineKind::Sglang) => {
                "SGLang answers the fields return_prompt_token_ids, return_token_ids and return_meta_info from 0.5.13 \
                 on; sglang-router removes them, so name the workers themselves in `urls`"
            }
            (Self::PromptIds | Self::TokenIds, EngineKind::Vllm | EngineKind::Openai) => {
                "vLLM answers the field return_token_ids from 0.10.2 on; a router or proxy in between may remove the \
                 ids, so name the workers themselves in `urls`"
            }
            (Self::Prompt { .. }, _) => {
                "this version of the engine, or a router in between, does not pass the ids of the prompt on; name the \
                 workers of a version that does, or set mode = \"observe\""
            }
            (Self::Logprobs | Self::Lengths { .. }, EngineKind::Sglang) => {
                "SGLang reports them in meta_info.output_token_logprobs, which routers remove; name the workers \
                 themselves in `urls`"
            }
            (Self::Logprobs | Self::Lengths { .. }, EngineKind::Vllm | EngineKind::Openai) => {
                "the engine must answer the field logprobs; a router or proxy in between may remove it, so name the \
                 workers themselves in `urls`"
            }
            (Self::NotFinite { .. } | Self::Sentinel { .. }, _) => {
                "the engine has no log-probability of a token that it sampled; start vLLM with \
                 --logprobs-mode processed_logprobs and without speculative decoding"
            }
            (Self::Positive { .. }, _) => {
                "the values are logits; start vLLM with --logprobs-mode processed_logprobs, not with a mode of logits"
            }
            (Self::Vocabulary { .. }, _) => "check that the configured size of the vocabulary is that of this model",
            (
                Self::Conflict { .. }
                | Self::Choices { .. }
                | Self::Shape { .. }
                | Self::Unscored { .. }
                | Self::FinishReason { .. },
                _,
            ) => "check that `kind` names this engine and that `urls` names its workers",
        }
    }
}

/// Makes a completion of an answer, or says why it cannot be one. `version` is the policy's published version when the
/// call began.
pub(super) fn completion(
    answer: &EngineAnswer,
    rid: &str,
    version: i64,
    options: &UpstreamOptions,
) -> Result<Completion, Fault> {
    let choice = answer.only_choice()?;
    let finish = finish(choice)?;
    let prompt_tokens = ids(answer.prompt_ids().ok_or(Fault::PromptIds)?, options)?;
    let Part { tokens, logprobs, spans, version_assumed } = part(answer, version, options)?;
    let usage = Usage {
        prompt_tokens: prompt_tokens.len() as u64,
        completion_tokens: tokens.len() as u64,
        cached_tokens: answer.cached_tokens(),
        reasoning_tokens: answer.reasoning_tokens(),
    };
    let message = choice.message.as_ref().map(|message| message.read(rid)).unwrap_or_default();
    Ok(Completion {
        prompt_tokens,
        tokens,
        logprobs,
        spans,
        version_assumed,
        finish,
        stop_matched: stop_matched(choice, finish),
        message,
        usage,
        system_fingerprint: answer.system_fingerprint(),
    })
}

/// Makes a completion without ids of an answer that is not recorded.
pub(super) fn unrecorded(answer: &EngineAnswer, rid: &str) -> Result<Completion, Fault> {
    let choice = answer.only_choice()?;
    let finish = finish(choice)?;
    Ok(Completion {
        prompt_tokens: Vec::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        spans: Vec::new(),
        version_assumed: false,
        finish,
        stop_matched: stop_matched(choice, finish),
        message: choice.message.as_ref().map(|message| message.read(rid)).unwrap_or_default(),
        usage: Usage {
            prompt_tokens: answer.prompt_tokens().unwrap_or(0),
            completion_tokens: answer.completion_tokens().unwrap_or(0),
            cached_tokens: answer.cached_tokens(),
            reasoning_tokens: answer.reasoning_tokens(),
        },
        system_fingerprint: answer.system_fingerprint(),
    })
}

/// What an engine sampled in one go.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) tokens: Vec<i32>,
    pub(super) logprobs: Vec<f32>,
    pub(super) spans: Vec<VersionSpan>,
    pub(super) version_assumed: bool,
}

/// The sampled ids of an answer with what belongs to them.
pub(super) fn part(answer: &EngineAnswer, version: i64, options: &UpstreamOptions) -> Result<Part, Fault> {
    let Sampled { ids: sampled, count, values } = sampled(answer.only_choice()?)?;
    if sampled.ids.is_empty() && answer.completion_tokens().unwrap_or(0) > 0 {
        return Err(Fault::TokenIds);
    }
    let tokens = ids(sampled, options)?;
    if count != tokens.len() {
        return Err(Fault::Lengths { logprobs: count, ids: tokens.len() });
    }
    let logprobs = logprobs(values)?;
    let (spans, version_assumed) = versions::spans(&answer.versions(), tokens.len(), version, &options.version_labels);
    Ok(Part { tokens, logprobs, spans, version_assumed })
}

/// Whether the prompt that an engine reports is the one that it was sent. An endpoint that `may_render` messages must
/// report it. SGLang's endpoint of ids reports only how long it is, and that of older versions of vLLM nothing.
pub(super) fn prompt(answer: &EngineAnswer, sent: &[i32], may_render: bool) -> Result<(), Fault> {
    let Some(Ids { ids: reported, .. }) = answer.prompt_ids() else {
        let length = answer.prompt_tokens().map_or(sent.len(), |length| length as usize);
        return match (may_render, length == sent.len()) {
            (true, _) => Err(Fault::PromptIds),
            (false, true) => Ok(()),
            (false, false) => Err(Fault::Prompt { index: length.min(sent.len()) }),
        };
    };
    let common = reported.iter().zip(sent).take_while(|(reported, sent)| reported == sent).count();
    if common == reported.len() && common == sent.len() { Ok(()) } else { Err(Fault::Prompt { index: common }) }
}

/// The sampled ids and their log-probabilities, as the engine says.
struct Sampled<'a> {
    ids: &'a Ids,
    /// How many log-probabilities there are.
    count: usize,
    /// They end behind the first one that is missing.
    values: &'a [f64],
}

fn sampled(choice: &Choice) -> Result<Sampled<'_>, Fault> {
    let named = choice.sampled_ids();
    if let Some(pairs) = choice.meta_info.as_ref().and_then(|info| info.output_token_logprobs.as_ref()) {
        if let Some(index) = named.and_then(|named| difference(&named.ids, &pairs.ids.ids)) {
            return Err(Fault::Conflict { index });
        }
        return Ok(Sampled { ids: &pairs.ids, count: pairs.values.len(), values: &pairs.values });
    }
    let ids = named.ok_or(Fault::TokenIds)?;
    match choice.logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref()) {
        Some(content) => {
            let differs = |(token, id): (&Option<i32>, &i32)| token.is_some_and(|named| named != *id);
            match content.ids.iter().zip(&ids.ids).position(differs) {
                Some(index) => Err(Fault::Conflict { index }),
                None => Ok(Sampled { ids, count: content.count, values: &content.values }),
            }
        }
        None if ids.ids.is_empty() => Ok(Sampled { ids, count: 0, values: &[] }),
        None => Err(Fault::Logprobs),
    }
}

/// The first place where the named ids differ from those with log-probabilities. The named ids may lack the last one,
/// because some paths of SGLang leave out the token that ended the answer.
fn difference(named: &[i32], with_logprobs: &[i32]) -> Option<usize> {
    let common = named.iter().zip(with_logprobs).take_while(|(a, b)| a == b).count();
    let trimmed = common == named.len() && named.len() + 1 == with_logprobs.len();
    let equal = common == named.len() && named.len() == with_logprobs.len();
    (!trimmed && !equal).then_some(common)
}

fn ids(ids: &Ids, options: &UpstreamOptions) -> Result<Vec<i32>, Fault> {
    match ids.outside(options.vocabulary.unwrap_or(i32::MAX as u32)) {
        Some(id) => Err(Fault::Vocabulary { id }),
        None => Ok(ids.ids.clone()),
    }
}

/// Checks log-probabilities, of which NaN is one that is missing.
pub(super) fn logprobs(values: &[f64]) -> Result<Vec<f32>, Fault> {
    let check = |(index, &value): (usize, &f64)| match value {
        value if !(value as f32).is_finite() => Err(Fault::NotFinite { index }),
        value if value <= NO_LOGPROB => Err(Fault::Sentinel { index }),
        value if value > ABOVE_ZERO_MAX => Err(Fault::Positive { index, value }),
        value => Ok(value.min(0.0) as f32),
    };
    values.iter().enumerate().map(check).collect()
}

pub(super) fn finish(choice: &Choice) -> Result<Finish, Fault> {
    match choice.finish() {
        Some("stop" | REPETITION) => Ok(Finish::Stop),
        Some("length") => Ok(Finish::Length),
        Some("tool_calls") => Ok(Finish::ToolCalls),
        other => Err(Fault::FinishReason { reason: other.unwrap_or("null").to_owned() }),
    }
}

pub(super) fn stop_matched(choice: &Choice, finish: Finish) -> Option<StopMatch> {
    if finish == Finish::Length || choice.finish() == Some(REPETITION) {
        return None;
    }
    match choice.stop() {
        Some(Matched::Text(text)) => Some(StopMatch::Text(text.clone())),
        Some(Matched::Number(id)) => i32::try_from(*id).ok().map(StopMatch::Token),
        Some(Matched::Other) | None => Some(StopMatch::EndOfSequence),
    }
}
