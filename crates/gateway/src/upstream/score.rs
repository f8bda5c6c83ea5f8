//! The log-probabilities of given ids, for a teacher.
//!
//! The engine samples nothing that is used: it reads a sequence and reports how likely it finds each id behind the ids
//! before it. SGLang and vLLM report these values before the temperature, unless they were changed. Values cannot be
//! converted from one temperature to another, so [`Upstream::probe_scores`] finds out which ones an engine reports.

use std::collections::HashMap;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use forebay_bounds::work;

use super::{
    check,
    client::Upstream,
    columns::{Choices, Ids, MetaLogprobs},
    error::UpstreamError,
    fault::Fault,
    kind::EngineKind,
    probe::{LogprobScale, scale_of_gaps},
    route,
    transport::{Post, Room},
};
use crate::json::Item;

/// SGLang's endpoint of ids.
const GENERATE: &str = "/generate";

/// vLLM's endpoint that takes ids as the prompt.
const COMPLETIONS: &str = "/v1/completions";

/// The context of a probe, and ids that may follow it. Every vocabulary has such small ids.
const PROBE_CONTEXT: [i32; 5] = [7, 11, 13, 17, 19];
const PROBE_NEXT: [i32; 5] = [2, 3, 5, 23, 29];

/// A sequence to score.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// All ids of the sequence.
    pub ids: &'a [i32],
    /// How many of them only precede those that are scored, at least one.
    pub prompt_len: usize,
    /// Logits are divided by it, if the engine's values contain the temperature at all.
    pub temperature: f64,
    /// The model's name at the engine.
    pub model: &'a str,
    /// The session. Its sequences go to the same worker, which has what they share in its cache.
    pub session: &'a str,
    /// A unique id of the request, by which `SGLang` can abort it.
    pub rid: &'a str,
}

impl Upstream {
    /// Has the engine score the ids behind the prompt, and checks the answer: one log-probability for each of exactly
    /// these ids. Dropping the future cancels the request.
    pub async fn score(&self, scoring: &Scoring<'_>) -> Result<Vec<f32>, UpstreamError> {
        self.score_at(scoring, &self.workers_of(scoring)).await
    }

    pub(super) fn workers_of(&self, scoring: &Scoring<'_>) -> Vec<usize> {
        route::order(scoring.session, &self.options.urls)
    }

    /// Finds out whether an engine's scores contain the temperature: if they do, the gap between two ids behind the same
    /// context is half as wide at temperature 2. The answer is that of the first worker whose scores do not.
    pub async fn probe_scores(&self, model: &str) -> Result<LogprobScale, UpstreamError> {
        for worker in 0..self.options.urls.len() {
            let scale = self.scale_of_scores(model, worker).await?;
            if scale != LogprobScale::Scaled {
                return Ok(scale);
            }
        }
        Ok(LogprobScale::Scaled)
    }

    async fn scale_of_scores(&self, model: &str, worker: usize) -> Result<LogprobScale, UpstreamError> {
        let score = async |next: i32, temperature: f64| {
            let mut ids = PROBE_CONTEXT.to_vec();
            ids.push(next);
            let scoring = Scoring {
                ids: &ids,
                prompt_len: PROBE_CONTEXT.len(),
                temperature,
                model,
                session: "forebay-probe",
                rid: "score-forebay-probe",
            };
            let scores = self.score_at(&scoring, &[worker]).await?;
            Ok::<_, UpstreamError>(scores.first().map_or(0.0, |&score| f64::from(score)))
        };
        let (mut best, mut worst) = ((f64::NEG_INFINITY, 0), (f64::INFINITY, 0));
        for next in PROBE_NEXT {
            let value = score(next, 1.0).await?;
            best = if value > best.0 { (value, next) } else { best };
            worst = if value < worst.0 { (value, next) } else { worst };
        }
        let at_two = score(best.1, 2.0).await? - score(worst.1, 2.0).await?;
        Ok(scale_of_gaps(best.0 - worst.0, at_two).unwrap_or_else(|why| LogprobScale::Unknown { why }))
    }

    async fn score_at(&self, scoring: &Scoring<'_>, workers: &[usize]) -> Result<Vec<f32>, UpstreamError> {
        let read = |body: &[u8]| match self.options.kind {
            EngineKind::Sglang => of_sglang(body, scoring),
            EngineKind::Vllm | EngineKind::Openai => of_vllm(body, scoring),
        };
        self.scored(scoring, 0, workers, read).await
    }

    /// Has one of these workers score the ids, and reads its answer. vLLM also names so many of the best tokens in each
    /// place.
    pub(super) async fn scored<T: Send>(
        &self,
        scoring: &Scoring<'_>,
        best: usize,
        workers: &[usize],
        read: impl FnOnce(&[u8]) -> Result<T, Fault> + Send,
    ) -> Result<T, UpstreamError> {
        self.check_scoring(scoring)?;
        let path = match self.options.kind {
            EngineKind::Sglang => GENERATE,
            EngineKind::Vllm | EngineKind::Openai => COMPLETIONS,
        };
        let body = |rid: &str| write(scoring, self.options.kind, best, rid);
        let post = Post {
            path,
            workers,
            session: scoring.session,
            rid: scoring.rid,
            bytes: 7 * scoring.ids.len(),
            body: &body,
            room: Room::Waits,
        };
        let bytes = self.transport.post(&post, &mut 0).await?;
        let scores = work::run(bytes.len(), || read(&bytes)).await;
        scores.map_err(|fault| UpstreamError::Untrusted { fault, remedy: remedy(self.options.kind) })
    }

    fn check_scoring(&self, scoring: &Scoring<'_>) -> Result<(), UpstreamError> {
        let unusable =
            |why: String| Err(UpstreamError::Options { why: format!("upstream {:?}: {why}", self.options.name) });
        if self.options.kind == EngineKind::Openai {
            return unusable("an engine of kind openai reports no log-probabilities of given ids".to_owned());
        }
        if !(1..=scoring.ids.len()).contains(&scoring.prompt_len) {
            return unusable("at least one id must precede the ids that are scored".to_owned());
        }
        let size = self.options.vocabulary.map_or(i32::MAX, |size| i32::try_from(size).unwrap_or(i32::MAX));
        match scoring.ids.iter().find(|id| !(0..size).contains(*id)) {
            Some(id) => unusable(format!("the id {id} is outside its vocabulary, so it has another tokenizer")),
            None => Ok(()),
        }
    }
}

/// What to do about an answer that is no score.
fn remedy(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Sglang => {
            "a teacher needs SGLang's /generate with input_token_logprobs, which routers may remove; name the workers \
             themselves in `urls`"
        }
        EngineKind::Vllm | EngineKind::Openai => {
            "a teacher needs vLLM's /v1/completions with prompt_logprobs, which routers may remove; name the workers \
             themselves in `urls`"
        }
    }
}

/// Every setting is written, because engines take the values that are missing from the model's folder.
fn write(scoring: &Scoring<'_>, kind: EngineKind, best: usize, rid: &str) -> Bytes {
    let body = match kind {
        EngineKind::Sglang => json!({
            "model": scoring.model,
            "rid": rid,
            "input_ids": scoring.ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": scoring.temperature, "top_p": 1.0, "top_k": -1},
            "return_logprob": true,
            // The first entry has no value, because the id before it is not read for this.
            "logprob_start_len": scoring.prompt_len - 1,
            "stream": false,
        }),
        // vLLM samples at least one token.
        EngineKind::Vllm | EngineKind::Openai => json!({
            "model": scoring.model,
            "request_id": rid,
            "prompt": scoring.ids,
            "max_tokens": 1,
            "temperature": scoring.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "prompt_logprobs": best,
            "stream": false,
        }),
    };
    body.to_string().into()
}

#[derive(Debug, Deserialize)]
struct Generated {
    meta_info: GeneratedMeta,
}

#[derive(Debug, Deserialize)]
struct GeneratedMeta {
    input_token_logprobs: MetaLogprobs,
}

fn of_sglang(body: &[u8], scoring: &Scoring<'_>) -> Result<Vec<f32>, Fault> {
    let answer: Generated = read(body)?;
    let MetaLogprobs { values, ids } = answer.meta_info.input_token_logprobs;
    check_ids(&ids, &scoring.ids[scoring.prompt_len - 1..], scoring)?;
    check::logprobs(&values[1..])
}

#[derive(Debug, Deserialize)]
struct Completed<'a> {
    #[serde(borrow)]
    choices: Choices<CompletedChoice<'a>>,
}

#[derive(Debug, Deserialize)]
struct CompletedChoice<'a> {
    /// For each id of the prompt the log-probabilities by id, among them that of the id itself. Each entry is read alone,
    /// because the maps of all of them would take ten times the bytes of the answer.
    #[serde(borrow)]
    prompt_logprobs: &'a RawValue,
}

#[derive(Debug, Deserialize)]
struct PromptLogprob {
    logprob: Option<f64>,
}

fn of_vllm(body: &[u8], scoring: &Scoring<'_>) -> Result<Vec<f32>, Fault> {
    let mut values = Vec::with_capacity(scoring.ids.len());
    each_of_vllm(body, scoring, |value, _| values.push(value))?;
    check::logprobs(&values)
}

/// Reads the log-probability of each scored id, of which NaN is one that is missing, and all those that are named in its
/// place.
pub(super) fn each_of_vllm(body: &[u8], scoring: &Scoring<'_>, mut take: impl FnMut(f64, &[f64])) -> Result<(), Fault> {
    let answer: Completed<'_> = read(body)?;
    let Choices { first: Some(choice), count: 1 } = answer.choices else {
        return Err(Fault::Choices { count: answer.choices.count });
    };
    let (mut index, mut missing) = (0, None);
    let entries = Item::field("prompt_logprobs", choice.prompt_logprobs);
    let count = entries.each(|entry| {
        if let Some(id) = scoring.ids.get(index).filter(|_| index >= scoring.prompt_len) {
            let entry: Option<HashMap<i64, PromptLogprob>> =
                serde_json::from_str(entry.verbatim()).map_err(|error| entry.invalid(error.to_string()))?;
            let entry = entry.unwrap_or_default();
            let named: Vec<f64> = entry.values().filter_map(|named| named.logprob).collect();
            match entry.get(&i64::from(*id)) {
                Some(found) => take(found.logprob.unwrap_or(f64::NAN), &named),
                None => missing = missing.or(Some(index)),
            }
        }
        index += 1;
        Ok(())
    });
    let count = count.map_err(|error| Fault::Unscored { why: error.to_string() })?;
    match missing {
        _ if count != scoring.ids.len() => Err(Fault::Lengths { logprobs: count, ids: scoring.ids.len() }),
        Some(index) => Err(Fault::Prompt { index }),
        None => Ok(()),
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Fault> {
    serde_json::from_slice(body).map_err(|error| Fault::Unscored { why: error.to_string() })
}

fn check_ids(Ids { ids: reported, .. }: &Ids, sent: &[i32], scoring: &Scoring<'_>) -> Result<(), Fault> {
    if reported.len() != sent.len() {
        return Err(Fault::Lengths { logprobs: reported.len(), ids: sent.len() });
    }
    match reported.iter().zip(sent).position(|(reported, sent)| reported != sent) {
        Some(index) => Err(Fault::Prompt { index: scoring.prompt_len - 1 + index }),
        None => Ok(()),
    }
}
