//! The check of an answer, before anything is stored of it.
//!
//! A recorded call must name the ids that it was sampled behind, and a log-probability of each sampled id. Nothing is
//! ever filled in: an answer that lacks something is refused, with what to change.

use super::{
    answer::{Choice, EngineAnswer},
    columns::{Ids, Matched},
    fault::Fault,
    options::UpstreamOptions,
    sampled::Part,
    versions,
};
use crate::completion::{Completion, Finish, StopMatch, Usage};

/// How far above zero a log-probability may be. Engines add in 32 bits or less, so certainty may come out as 1e-6.
const ABOVE_ZERO_MAX: f64 = 1e-3;

/// What vLLM writes if it has no log-probability of a token.
const NO_LOGPROB: f64 = -9999.0;

/// What vLLM writes if it ended an answer because the model repeated itself.
const REPETITION: &str = "repetition";

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
