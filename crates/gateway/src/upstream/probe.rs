//! Calls that find out whether an engine's answers can be recorded, before any agent depends on them.
//!
//! A router that removes token ids, or an engine that reports log-probabilities before the temperature, would otherwise
//! be noticed after hours of rollouts.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use super::{
    body::Wanted,
    call::{EngineCall, ExactPrompt, Sampling},
    client::Upstream,
    error::UpstreamError,
    exact,
    exchange::Way,
    kind::EngineKind,
    models::Contradiction,
};
use crate::{
    dialect::ClientTools,
    request::{Message, Request, Role, Tool, Warnings},
    system::LaterSystem,
};

/// Prompts whose next token most models are fairly sure of, but not certain.
const PROMPTS: [&str; 6] = [
    "Is water wet? Answer with one word.",
    "What is 1 + 1?",
    "Say hello.",
    "Name a colour.",
    "What is the capital of France?",
    "Count to three.",
];

/// So many prompts must say the same before it is believed.
const AGREEING: usize = 2;

/// The probe needs two tokens whose log-probabilities differ by this much. Smaller gaps drown in rounding.
const GAP_MIN: f64 = 0.3;

/// No model finds a token so unlikely that is among the best.
const RULED_OUT: f64 = -50.0;

/// How far the quotient of two gaps may be from 1/2 or 1. Engines compute logits in 16 bits.
const QUOTIENT_TOLERANCE: f64 = 0.1;

/// What a probe says about an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Calls can be recorded.
    Ready,
    /// The engine answers, but its answers cannot be recorded.
    Refused {
        /// What is wrong.
        problem: String,
        /// What to change.
        remedy: String,
    },
    /// The engine did not answer.
    Unreachable {
        /// Why.
        why: String,
    },
    /// The engine is paused or overloaded. It says nothing about its answers.
    Busy {
        /// Its words.
        why: String,
    },
}

/// What an engine's log-probabilities are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogprobScale {
    /// Log-softmax of logits divided by the temperature, as a trainer computes them.
    Scaled,
    /// Log-softmax of the logits themselves. They are right only at temperature 1, and cannot be converted.
    Raw,
    /// The probe found no answer.
    Unknown {
        /// Why.
        why: String,
    },
}

impl LogprobScale {
    /// Whether a policy with this sampling can be recorded from such an engine.
    #[must_use]
    pub fn verdict(&self, kind: EngineKind, sampling: &Sampling) -> Verdict {
        let is_one = (sampling.temperature - 1.0).abs() < f64::EPSILON;
        let truncated = sampling.top_p < 1.0 || sampling.top_k > 0;
        match self {
            Self::Scaled if kind == EngineKind::Vllm && truncated => refused(
                "vLLM's processed log-probabilities contain top_p and top_k, which a trainer's do not",
                "open the session with top_p = 1 and top_k = -1 in `sampling`",
            ),
            Self::Raw if !is_one => refused(
                "the engine reports log-probabilities before the temperature, and the session's temperature is not 1",
                match kind {
                    EngineKind::Vllm => {
                        "start vLLM with --logprobs-mode processed_logprobs, or open the session with temperature = 1 in `sampling`"
                    }
                    EngineKind::Sglang => {
                        "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or open the session with temperature = 1 in \
                         `sampling`"
                    }
                    EngineKind::Openai => "open the session with temperature = 1 in `sampling`",
                },
            ),
            Self::Unknown { why } if !is_one => refused(
                format!("the probe could not tell whether log-probabilities contain the temperature: {why}"),
                "open the session with temperature = 1 in `sampling`, or use an engine that answers top_logprobs = 5 (vLLM: \
                 without --max-logprobs, or with at least 5)",
            ),
            Self::Scaled | Self::Raw | Self::Unknown { .. } => Verdict::Ready,
        }
    }
}

impl LogprobScale {
    /// Why an engine with such scores cannot score sequences that were sampled at this temperature.
    pub fn check_scores(&self, temperature: f64) -> Result<(), String> {
        let is_one = (temperature - 1.0).abs() < f64::EPSILON;
        match self {
            Self::Raw if !is_one => {
                Err("its log-probabilities of given ids do not contain the temperature, so it can \
                                         score only what was sampled at temperature 1"
                    .to_owned())
            }
            Self::Unknown { why } if !is_one => Err(format!(
                "it scores only what was sampled at temperature 1, because a probe could not tell whether its \
                 log-probabilities of given ids contain the temperature: {why}"
            )),
            Self::Scaled | Self::Raw | Self::Unknown { .. } => Ok(()),
        }
    }
}

/// What to do about a probe that an engine refuses.
fn refusal_remedy(error: &UpstreamError) -> &'static str {
    match error {
        UpstreamError::Refused { message, .. } if message.contains("--enable-scale-out") => {
            "start vLLM with --enable-scale-out, which the mode exact needs, or set mode = \"observe\""
        }
        UpstreamError::Refused { message, .. } if message.contains("logprobs") => {
            "start vLLM without --max-logprobs, or with at least 5"
        }
        UpstreamError::Refused { status: 401 | 403, .. } => "check the key of the upstream (`key_file`)",
        UpstreamError::Refused { status: 300..=399, .. } => {
            "the engine redirects calls: name the address behind the redirect in `urls`"
        }
        _ => "check the model's name, the key and the kind of the upstream in the configuration",
    }
}

fn refused(problem: impl Into<String>, remedy: impl Into<String>) -> Verdict {
    Verdict::Refused { problem: problem.into(), remedy: remedy.into() }
}

impl Upstream {
    /// Samples one token at each worker and checks the answers. One worker whose answers cannot be recorded refuses the
    /// upstream, because it may get calls. Otherwise one worker that is ready suffices, because calls pass over those
    /// that cannot be reached.
    pub async fn probe(&self, model: &str) -> Verdict {
        self.probe_with(model, &probe_request(), None).await
    }

    /// Samples one token behind these ids at each worker and checks the answers, for the mode `exact`. `request` is
    /// the conversation that the ids were rendered from, such as [`probe_request`].
    ///
    /// Answers of vLLM are parsed by a request of their own, unless the probe finds that it has no parser, and are sent
    /// while they are sampled if the probe finds that they come as events.
    ///
    /// The chat endpoint of older versions of SGLang takes no ids. If `/generate` does, and the engine parses its
    /// answers, later calls are sent there.
    pub async fn probe_exact(&self, model: &str, request: &Request, prompt: ExactPrompt<'_>) -> Verdict {
        let mut verdict = refused("the engine takes no ids", "set mode = \"observe\"");
        for (place, &way) in Way::of(self.options.kind).iter().enumerate() {
            // The engine must also have the parser of tool calls that is named.
            let mut request = request.clone();
            if way == Way::Generate {
                request.tools = vec![Tool::function("probe".to_owned(), Vec::new())];
            }
            let found = self.probe_with(model, &request, Some((way, prompt))).await;
            let parses = way != Way::Generate || self.options.parsers.as_ref().is_some_and(|it| it.tool_call.is_some());
            match found {
                Verdict::Ready if parses => {
                    let generates = place > 0;
                    if self.generates.swap(generates, Ordering::Relaxed) != generates {
                        tracing::info!(
                            upstream.name = self.options.name,
                            generates,
                            "ids are sent to another endpoint"
                        );
                    }
                    if way == Way::Vllm {
                        let rid = probe_id();
                        let call = EngineCall { rid: &rid, ..call(&request, model, 1.0) };
                        let plainly = exact::speaks_plainly(self, &call, &prompt).await;
                        self.speaks_plainly.store(plainly, Ordering::Relaxed);
                        let events = exact::sends_events(self, &call, &prompt).await;
                        self.sends_events.store(events, Ordering::Relaxed);
                    }
                    return Verdict::Ready;
                }
                Verdict::Ready => {
                    let Verdict::Refused { problem, .. } = verdict else { return verdict };
                    return refused(
                        format!("{problem}; /generate takes ids, but does not parse tool calls"),
                        "use SGLang 0.5.13 or newer, or name SGLang's --tool-call-parser and --reasoning-parser in \
                         tool_call_parser and reasoning_parser",
                    );
                }
                // What the best way lacks is what to change.
                Verdict::Refused { .. } if place == 0 => verdict = found,
                Verdict::Refused { .. } => {}
                Verdict::Busy { .. } | Verdict::Unreachable { .. } => return found,
            }
        }
        verdict
    }

    async fn probe_with(&self, model: &str, request: &Request, exact: Option<(Way, ExactPrompt<'_>)>) -> Verdict {
        let mut verdict = Verdict::Unreachable { why: "there is no worker".to_owned() };
        for worker in 0..self.options().urls.len() {
            let found = match self.contradiction(model, worker).await {
                Some(Contradiction { problem, remedy }) => Verdict::Refused { problem, remedy },
                None => self.probe_worker(worker, model, request, exact.as_ref()).await,
            };
            let found = found.of_worker(worker, self.options().urls.len());
            verdict = match (found, verdict) {
                (found @ Verdict::Refused { .. }, _) => return found,
                (_, Verdict::Ready) => Verdict::Ready,
                (Verdict::Unreachable { .. }, before @ Verdict::Busy { .. }) => before,
                (found, _) => found,
            };
        }
        verdict
    }

    async fn probe_worker(
        &self,
        worker: usize,
        model: &str,
        request: &Request,
        exact: Option<&(Way, ExactPrompt<'_>)>,
    ) -> Verdict {
        let rid = probe_id();
        let call = EngineCall { rid: &rid, ..call(request, model, 1.0) };
        let answered = match exact {
            None => self.complete_at(&call, &[worker]).await,
            Some((way, prompt)) => exact::complete_by(self, *way, &call, prompt, &[worker]).await,
        };
        match answered {
            Ok(answered) if answered.completion.tokens.len() == 1 => Verdict::Ready,
            Ok(answered) => refused(
                format!("the engine sampled {} tokens instead of one", answered.completion.tokens.len()),
                "check that nothing between Forebay and the engine changes max_tokens",
            ),
            Err(UpstreamError::Untrusted { fault, remedy }) => refused(fault.to_string(), remedy),
            Err(error @ UpstreamError::Refused { .. }) => {
                let remedy = refusal_remedy(&error);
                refused(error.to_string(), remedy)
            }
            Err(error @ (UpstreamError::Busy { .. } | UpstreamError::Aborted { .. })) => {
                Verdict::Busy { why: error.to_string() }
            }
            Err(error) => Verdict::Unreachable { why: error.to_string() },
        }
    }

    /// Finds out whether log-probabilities contain the temperature: if they do, the gap between two tokens is half
    /// as wide at temperature 2. All workers should be started alike; if they are not, the answer is that of the
    /// first worker whose log-probabilities are not scaled.
    pub async fn probe_temperature(&self, model: &str) -> Result<LogprobScale, UpstreamError> {
        for worker in 0..self.options().urls.len() {
            let scale = match self.scale_of(model, worker).await {
                Err(error @ UpstreamError::Refused { .. }) => LogprobScale::Unknown { why: error.to_string() },
                scale => scale?,
            };
            if scale != LogprobScale::Scaled {
                return Ok(scale);
            }
        }
        Ok(LogprobScale::Scaled)
    }

    /// How the engine takes a conversation with several system messages. An engine that refuses it in both forms is left
    /// to tell the agent what is wrong. The engine's template may also leave messages out, which this does not find out.
    pub async fn probe_later_system(&self, model: &str) -> Result<LaterSystem, UpstreamError> {
        let workers: Vec<usize> = (0..self.options().urls.len()).collect();
        for later in [LaterSystem::Keep, LaterSystem::User] {
            let request = later.applied(system_conversation());
            let call = call(&request, model, 1.0);
            match self.answer(&call, &probe_id(), Wanted::Recording, &workers, &mut 0).await {
                Ok(_) => return Ok(later),
                Err(UpstreamError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(LaterSystem::default())
    }

    /// One prompt is not believed: what an engine reports may depend on what it happened to sample.
    async fn scale_of(&self, model: &str, worker: usize) -> Result<LogprobScale, UpstreamError> {
        let mut why = String::new();
        let mut found: Vec<LogprobScale> = Vec::new();
        for prompt in PROMPTS {
            let request = request(prompt);
            let at_one = self.best(&call(&request, model, 1.0), worker).await?;
            let at_two = self.best(&call(&request, model, 2.0), worker).await?;
            if at_one.is_empty() || at_two.is_empty() {
                return Ok(LogprobScale::Unknown { why: "the answer has no top_logprobs".to_owned() });
            }
            let scale = match gaps(&at_one, &at_two) {
                Some((at_one, at_two)) => scale_of_gaps(at_one, at_two),
                None => Err("the top_logprobs of two answers have less than two tokens in common".to_owned()),
            };
            match scale {
                Ok(scale) if found.first().is_some_and(|first| *first != scale) => {
                    return Ok(LogprobScale::Unknown { why: "two prompts say different things".to_owned() });
                }
                Ok(scale) => found.push(scale),
                Err(unclear) => why = unclear,
            }
            if found.len() == AGREEING {
                return Ok(found.swap_remove(0));
            }
        }
        Ok(LogprobScale::Unknown { why })
    }

    /// The best tokens in the first place of an answer.
    async fn best(&self, call: &EngineCall<'_>, worker: usize) -> Result<Vec<(String, f64)>, UpstreamError> {
        let rid = probe_id();
        let answer = self.answer(call, &rid, Wanted::Best, &[worker], &mut 0).await?;
        let logprobs = answer.only_choice().ok().and_then(|choice| choice.logprobs.as_ref()?.content.as_ref());
        Ok(logprobs.map(|logprobs| logprobs.best.clone()).unwrap_or_default())
    }
}

impl Verdict {
    /// Names the worker if there are several.
    fn of_worker(self, worker: usize, workers: usize) -> Self {
        let named = |text: String| if workers > 1 { format!("url {} of {workers}: {text}", worker + 1) } else { text };
        match self {
            Self::Ready => Self::Ready,
            Self::Refused { problem, remedy } => Self::Refused { problem: named(problem), remedy },
            Self::Unreachable { why } => Self::Unreachable { why: named(why) },
            Self::Busy { why } => Self::Busy { why: named(why) },
        }
    }
}

/// What the gaps between two tokens behind the same context, at temperature 1 and at temperature 2, say. An error says
/// why they say nothing.
pub(super) fn scale_of_gaps(at_one: f64, at_two: f64) -> Result<LogprobScale, String> {
    let quotient = at_two / at_one;
    if at_one < GAP_MIN {
        Err(format!("the two tokens are almost equally likely (gap {at_one:.3})"))
    } else if (quotient - 0.5).abs() < QUOTIENT_TOLERANCE {
        Ok(LogprobScale::Scaled)
    } else if (quotient - 1.0).abs() < QUOTIENT_TOLERANCE {
        Ok(LogprobScale::Raw)
    } else {
        Err(format!("the gap between two tokens changed by the factor {quotient:.3}"))
    }
}

/// How far two tokens are apart that both answers name. Of their best tokens vLLM gives one place to the token that it
/// sampled, which differs from call to call, so only the same tokens can be compared. The two are as far apart as there
/// are, because small differences drown in rounding.
fn gaps(at_one: &[(String, f64)], at_two: &[(String, f64)]) -> Option<(f64, f64)> {
    // Two tokens may have the same text, and one that the engine rules out has a value that no temperature changes.
    let value = |best: &[(String, f64)], text: &str| {
        let mut found =
            best.iter().filter(|(token, value)| token == text && *value > RULED_OUT).map(|(_, value)| *value);
        found.next().filter(|_| found.next().is_none())
    };
    let both: Vec<(f64, f64)> =
        at_one.iter().filter_map(|(text, _)| Some((value(at_one, text)?, value(at_two, text)?))).collect();
    let best = both.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
    let worst = both.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    (both.len() > 1).then_some((best.0 - worst.0, best.1 - worst.1))
}

/// The conversation of a probe.
#[must_use]
pub fn probe_request() -> Request {
    request(PROMPTS[0])
}

/// The texts of the system messages in [`system_conversation`].
pub(crate) const SYSTEM_TEXTS: [&str; 3] = ["Rule one.", "Rule two.", "Rule three."];

/// A conversation that tells whether a template takes more than one system message.
pub(crate) fn system_conversation() -> Request {
    let [first, second, third] = SYSTEM_TEXTS.map(|text| Message::text(Role::System, text));
    let answer = Message::text(Role::Assistant, "Yes.");
    let question = || Message::text(Role::User, "Is water wet?");
    Request { messages: vec![first, second, question(), answer, third, question()], ..probe_request() }
}

fn request(prompt: &str) -> Request {
    Request {
        model: String::new(),
        messages: vec![Message::text(Role::User, prompt)],
        tools: Vec::new(),
        tool_choice: None,
        stream: false,
        stream_usage: false,
        max_tokens: Some(1),
        stop: Vec::new(),
        sampling: Vec::new(),
        other: Vec::new(),
        client_tools: ClientTools::default(),
        warnings: Warnings::default(),
        image: None,
        instructions: 0,
        bytes: 0,
    }
}

/// An id that no other probe has, also of other replicas: engines abort calls by their ids.
pub(super) fn probe_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("probe-{}-{}", now.as_nanos(), COUNT.fetch_add(1, Ordering::Relaxed))
}

pub(super) fn call<'a>(request: &'a Request, model: &'a str, temperature: f64) -> EngineCall<'a> {
    EngineCall {
        request,
        model,
        sampling: Sampling { temperature, ..Sampling::default() },
        max_tokens: Some(1),
        exact: None,
        streaming: None,
        session: "forebay-probe",
        rid: "forebay-probe",
        version: &|| 0,
    }
}
