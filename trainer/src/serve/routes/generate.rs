//! `POST /generate`: tokens in, tokens out.

use std::time::Instant;

use axum::{body::Body, extract::State, response::Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    super::{
        model::ServedModel,
        output::Output,
        request::{Ending, Request, Token},
    },
    Refusal, Site, body, stream,
};
use crate::generate::Sampling;

/// Number of new tokens if a request names none, as in `SGLang`.
const NEW_TOKENS: usize = 128;

/// Most alternatives of a token that are reported.
pub(super) const ALTERNATIVES_MAX: usize = 20;

/// Most stop texts of a request.
const STOPS_MAX: usize = 64;

/// The fields of the body. Other fields are ignored, as `SGLang` has many that are about its own scheduling. Fields that
/// change which tokens are drawn are in `sampling_params`, where unknown ones are refused.
#[derive(Debug, Deserialize)]
pub(super) struct GenerateBody {
    model: Option<String>,
    input_ids: Option<Vec<i64>>,
    text: Option<String>,
    #[serde(default)]
    sampling_params: SamplingParams,
    #[serde(default)]
    return_logprob: bool,
    logprob_start_len: Option<i64>,
    #[serde(default)]
    top_logprobs_num: usize,
    rid: Option<String>,
    #[serde(default)]
    stream: bool,
}

/// How tokens are drawn.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SamplingParams {
    max_new_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    stop: Option<OneOrMore>,
    stop_token_ids: Option<Vec<i64>>,
    sampling_seed: Option<u64>,
    ignore_eos: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A text, or a list of texts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    /// The texts, which must not be empty.
    pub(super) fn texts(given: Option<Self>) -> Result<Vec<String>, Refusal> {
        let texts = match given {
            None => Vec::new(),
            Some(Self::One(text)) => vec![text],
            Some(Self::More(texts)) => texts,
        };
        if texts.iter().any(String::is_empty) || texts.len() > STOPS_MAX {
            let message = format!("it must be at most {STOPS_MAX} texts, and none of them empty");
            return Err(Refusal::Invalid { param: "stop", message });
        }
        Ok(texts)
    }
}

/// Settings of `SGLang` that are accepted with the value that changes nothing.
const NEUTRAL: [(&str, &[f64]); 6] = [
    ("n", &[1.0]),
    ("min_p", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("frequency_penalty", &[0.0]),
    ("presence_penalty", &[0.0]),
    ("repetition_penalty", &[1.0]),
];

/// Settings that are about text, of which this route has none.
const WITHOUT_EFFECT: [&str; 3] = ["skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"];

impl SamplingParams {
    /// Whether sequences end at the model's end tokens.
    fn sampling(&self, model: &ServedModel) -> Result<Sampling, Refusal> {
        self.refuse_others()?;
        let mut stop_tokens = self.stop_token_ids.clone().unwrap_or_default();
        if self.ignore_eos != Some(true) {
            stop_tokens.extend(model.end_tokens());
        }
        sampling(self.temperature, self.top_p, self.top_k, stop_tokens, self.max_new_tokens.unwrap_or(NEW_TOKENS))
    }

    fn refuse_others(&self) -> Result<(), Refusal> {
        for (key, value) in &self.others {
            let neutral = NEUTRAL.iter().find(|(name, _)| name == key).map(|(_, values)| *values);
            let is_neutral = value.as_f64().is_some_and(|value| {
                neutral.is_some_and(|values| values.iter().any(|neutral| (value - neutral).abs() < f64::EPSILON))
            });
            if !(is_neutral || value.is_null() || WITHOUT_EFFECT.contains(&key.as_str())) {
                let message = format!("`{key}` is not supported with the value {value}");
                return Err(Refusal::Invalid { param: "sampling_params", message });
            }
        }
        Ok(())
    }
}

/// Settings of draws from the numbers of a request. A temperature of 0 takes the most probable token, as in `SGLang`.
pub(super) fn sampling(
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    stop_tokens: Vec<i64>,
    new_tokens_max: usize,
) -> Result<Sampling, Refusal> {
    let invalid = |param, message: String| Err(Refusal::Invalid { param, message });
    let temperature = temperature.unwrap_or(1.0);
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return invalid("temperature", format!("it is {temperature}; it must be 0 or more"));
    }
    let is_greedy = temperature < 1e-6;
    let top_k = match top_k {
        _ if is_greedy => Some(1),
        None | Some(-1) => None,
        Some(top_k) if top_k >= 1 => Some(top_k as usize),
        Some(top_k) => return invalid("top_k", format!("it is {top_k}; it must be -1 or at least 1")),
    };
    let top_p = top_p.unwrap_or(1.0);
    if !(top_p > 0.0 && top_p <= 1.0) {
        return invalid("top_p", format!("it is {top_p}; it must be above 0 and at most 1"));
    }
    Ok(Sampling {
        temperature: if is_greedy { 1.0 } else { temperature },
        top_k,
        // Without the option the whole vocabulary need not be sorted.
        top_p: Some(top_p).filter(|top_p| *top_p < 1.0),
        stop_tokens,
        new_tokens_max,
    })
}

pub(super) async fn generate(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let started = Instant::now();
    let body: GenerateBody = body::read(&site, body).await?;
    let model = site.model(body.model.as_deref())?;
    let request = request(&body, model)?;
    let view = View {
        rid: request.rid.clone(),
        prompt_tokens: request.prompt.len(),
        scored: request.score_from.map(|from| request.prompt[from..].to_vec()),
        with_logprobs: body.return_logprob,
        with_alternatives: request.alternatives > 0,
        started,
    };
    let (ticket, output) = model.submit(request, OneOrMore::texts(body.sampling_params.stop)?)?;
    if body.stream {
        return Ok(stream::respond(ticket, output, move |output| vec![view.render(output)]));
    }
    Ok(body::json(&view.render(&stream::collect(ticket, output).await?)))
}

fn request(body: &GenerateBody, model: &ServedModel) -> Result<Request, Refusal> {
    let invalid = |param, message: &str| Refusal::Invalid { param, message: message.to_owned() };
    let prompt = match (&body.input_ids, &body.text, model.text()) {
        (Some(_), Some(_), _) => return Err(invalid("text", "`input_ids` are given as well")),
        (Some(ids), None, _) => ids.clone(),
        (None, Some(prompt), Some(text)) => {
            text.encode(prompt, true).map_err(|message| Refusal::Invalid { param: "text", message })?
        }
        (None, Some(_), None) => return Err(invalid("text", "the checkpoint has no tokenizer; send `input_ids`")),
        (None, None, _) => return Err(invalid("input_ids", "it is missing")),
    };
    if body.top_logprobs_num > ALTERNATIVES_MAX {
        return Err(invalid("top_logprobs_num", "it must be at most 20"));
    }
    let score_from = match body.logprob_start_len.unwrap_or(-1) {
        _ if !body.return_logprob => None,
        -1 => Some(prompt.len().saturating_sub(1)),
        from => match usize::try_from(from) {
            Ok(from) if from < prompt.len() => Some(from),
            _ => return Err(invalid("logprob_start_len", "it must be -1 or the place of a token of the prompt")),
        },
    };
    Ok(Request {
        rid: rid(body.rid.clone())?,
        prompt,
        sampling: body.sampling_params.sampling(model)?,
        seed: body.sampling_params.sampling_seed.unwrap_or_else(rand::random),
        score_from,
        alternatives: if body.return_logprob { body.top_logprobs_num } else { 0 },
    })
}

/// The name of a request, by which it can be aborted.
pub(super) fn rid(given: Option<String>) -> Result<String, Refusal> {
    match given {
        None => Ok(format!("{:032x}", rand::random::<u128>())),
        Some(rid) if rid.is_empty() || rid.len() > 256 => {
            Err(Refusal::Invalid { param: "rid", message: "it must have 1 to 256 bytes".to_owned() })
        }
        Some(rid) => Ok(rid),
    }
}

/// What an answer shows besides the output.
#[derive(Debug)]
pub(super) struct View {
    pub(super) rid: String,
    pub(super) prompt_tokens: usize,
    /// The tokens of the prompt from the first that is scored.
    pub(super) scored: Option<Vec<i64>>,
    pub(super) with_logprobs: bool,
    pub(super) with_alternatives: bool,
    pub(super) started: Instant,
}

impl View {
    fn render(&self, output: &Output) -> Value {
        let mut answer = json!({"output_ids": output.ids(), "meta_info": self.meta_info(output)});
        if let Some(text) = output.text() {
            answer["text"] = text.into();
        }
        answer
    }

    /// `SGLang`'s object about an output.
    pub(super) fn meta_info(&self, output: &Output) -> Value {
        let mut meta = json!({
            "id": self.rid,
            "finish_reason": output.ending.as_ref().map(finish_reason_for(output)),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output.tokens.len(),
            "cached_tokens": 0,
            "weight_version": *output.version,
            "weight_versions": output.versions(),
            "e2e_latency": self.started.elapsed().as_secs_f64(),
        });
        if self.with_logprobs {
            meta["output_token_logprobs"] =
                output.tokens.iter().map(|token| json!([token.logprob, token.id, null])).collect();
        }
        if self.with_alternatives {
            meta["output_top_logprobs"] = output.tokens.iter().map(alternatives).collect();
        }
        if let Some(scored) = &self.scored {
            // The first token has no log-probability, because the token before it is not scored.
            let scores = std::iter::once(Value::Null).chain(output.scores.iter().map(|&score| score.into()));
            meta["input_token_logprobs"] = scores.zip(scored).map(|(score, id)| json!([score, id, null])).collect();
        }
        meta
    }
}

fn alternatives(token: &Token) -> Value {
    token.alternatives.iter().map(|(id, logprob)| json!([logprob, id, null])).collect()
}

/// `SGLang`'s object for an ending.
fn finish_reason_for(output: &Output) -> impl Fn(&Ending) -> Value {
    let length = output.tokens.len();
    move |ending| match ending {
        Ending::Stop(id) => json!({"type": "stop", "matched": id}),
        Ending::StopText(text) => json!({"type": "stop", "matched": text}),
        Ending::Length => json!({"type": "length", "length": length}),
        Ending::Abort(reason) => json!({"type": "abort", "message": reason}),
    }
}
