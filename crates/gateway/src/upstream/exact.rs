//! Calls with ids: in, the ids of a prompt that the gateway rendered; out, the ids that were sampled behind them.
//!
//! SGLang's chat endpoint takes ids in place of rendering the messages, and still parses the answer. That of older
//! versions does not, but they have an endpoint of ids, `/generate`, and parse texts. vLLM has an endpoint of ids, and
//! one that parses ids. The probe finds out which endpoint of SGLang is used ([`Upstream::probe_exact`]).
//!
//! Parsers apply to a whole answer. So if an engine aborts a call, the call is continued behind what was sampled
//! before, and what belongs together is parsed at the end.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use serde::Deserialize;

use forebay_bounds::work;

use super::{
    answer::{EngineAnswer, Generated},
    body::{self, Ids},
    call::{Answered, EngineCall, ExactPrompt},
    check,
    client::Upstream,
    error::UpstreamError,
    exchange::{DERENDER, Exchange, Way},
    kind::EngineKind,
    observe::CHAT,
    progress::{Ended, Pieces, Progress, Streaming},
    sampled::Sampled,
    transport::{Events, Post, Room},
};
use crate::{
    completion::{AssistantMessage, Completion, Finish, StopMatch, ToolCall, Usage},
    json,
};

const VLLM_GENERATE: &str = "/inference/v1/generate";
const SGLANG_GENERATE: &str = "/generate";
const SEPARATE_REASONING: &str = "/separate_reasoning";
const PARSE_FUNCTION_CALL: &str = "/parse_function_call";

/// How many bytes are kept of a token while events arrive: its id twice and its log-probability.
const TOKEN_BYTES: usize = 32;

impl Upstream {
    /// Which endpoint takes the ids of prompts. `None` if the engine has none.
    fn way(&self) -> Option<Way> {
        let ways = Way::of(self.options.kind);
        ways.get(usize::from(self.generates.load(Ordering::Relaxed))).or(ways.first()).copied()
    }
}

pub(super) async fn complete(
    upstream: &Upstream,
    call: &EngineCall<'_>,
    prompt: &ExactPrompt<'_>,
    workers: &[usize],
) -> Result<Answered, UpstreamError> {
    let Some(way) = upstream.way() else {
        let why = format!("upstream {:?}: the mode exact needs SGLang or vLLM", upstream.options.name);
        return Err(UpstreamError::Options { why });
    };
    complete_by(upstream, way, call, prompt, workers).await
}

/// The same by one way.
pub(super) async fn complete_by(
    upstream: &Upstream,
    way: Way,
    call: &EngineCall<'_>,
    prompt: &ExactPrompt<'_>,
    workers: &[usize],
) -> Result<Answered, UpstreamError> {
    let mut progress = call.streaming.map(Streaming::take).unwrap_or_default();
    let rid = format!("{}-parse", call.rid);
    let exchange = Exchange { upstream, way, call, prompt, workers, rid: &rid };
    let mut tries = Tries::default();
    match exchange.answer(&mut progress, &mut tries).await {
        Ok((completion, parsing)) => {
            Ok(Answered { completion, aborts: tries.aborts, reconnects: tries.reconnects, parsing })
        }
        Err(error) => {
            if let Some(streaming) = call.streaming {
                streaming.put(progress);
            }
            Err(error)
        }
    }
}

/// What a call took besides one request.
#[derive(Default)]
struct Tries {
    aborts: u32,
    reconnects: u32,
}

/// Whether no worker of vLLM has a parser, so that its answers are the text of what was sampled. One that has a parser must
/// be told the request to parse for. A worker that does not answer may have one.
pub(super) async fn speaks_plainly(upstream: &Upstream, call: &EngineCall<'_>, prompt: &ExactPrompt<'_>) -> bool {
    for worker in 0..upstream.options.urls.len() {
        let write = |rid: &str| body::derender_plain(call.model, prompt.ids, rid);
        let bytes = 7 * prompt.ids.len();
        let (workers, rid) = (&[worker][..], call.rid);
        let post = Post { path: DERENDER, workers, session: call.session, rid, bytes, body: &write, room: Room::Waits };
        if upstream.transport.post(&post, &mut 0).await.is_err() {
            return false;
        }
    }
    true
}

/// Whether each worker of vLLM sends answers as events that can be recorded. Older versions and what is in between may not.
pub(super) async fn sends_events(upstream: &Upstream, call: &EngineCall<'_>, prompt: &ExactPrompt<'_>) -> bool {
    let streaming = Streaming::new(Arc::default(), drop);
    for worker in 0..upstream.options.urls.len() {
        let workers = &[worker][..];
        let exchange = Exchange { upstream, way: Way::Vllm, call, prompt, workers, rid: call.rid };
        let (mut pieces, mut tries) = (Pieces::default(), Tries::default());
        let streamed = exchange.stream(prompt.ids, Some(1), &[], &mut pieces, &streaming, &mut tries).await;
        let Ok((answer, None)) = streamed else { return false };
        if !check::part(&answer, 0, &upstream.options).is_ok_and(|part| part.tokens.len() == 1) {
            return false;
        }
    }
    true
}

/// How many tokens may be sampled, which vLLM must be told.
fn bound(upstream: &Upstream, call: &EngineCall<'_>, prompt: &ExactPrompt<'_>) -> Result<Option<u32>, UpstreamError> {
    let context = upstream.options.context_tokens.map(|context| context.saturating_sub(prompt.ids.len() as u32));
    match call.max_tokens.into_iter().chain(context).min() {
        Some(0) => Err(UpstreamError::ContextLength {
            message: format!("the prompt has {} tokens, which is all of the context", prompt.ids.len()),
        }),
        None if upstream.options.kind == EngineKind::Vllm => {
            let why = "the mode exact needs the size of vLLM's context for calls without a bound of tokens";
            Err(UpstreamError::Options { why: format!("upstream {:?}: {why}", upstream.options.name) })
        }
        bound => Ok(bound),
    }
}

impl Exchange<'_> {
    /// Samples what is left of an answer, and has it parsed. An error leaves what is there of it.
    async fn answer(
        &self,
        progress: &mut Progress,
        tries: &mut Tries,
    ) -> Result<(Completion, Duration), UpstreamError> {
        if progress.ended.is_none() {
            progress.ended = Some(Ended(self.sample(progress, tries).await?));
        }
        let (parses, began) = (self.parses(&progress.sampled), Instant::now());
        let completion = self.completion(progress, &mut tries.reconnects).await?;
        Ok((completion, if parses { began.elapsed() } else { Duration::ZERO }))
    }

    /// Samples until the answer ends, and returns the engine's last part of it. There is none if the answer reached the bound
    /// of tokens in another way.
    async fn sample(&self, progress: &mut Progress, tries: &mut Tries) -> Result<Option<EngineAnswer>, UpstreamError> {
        let options = &self.upstream.options;
        let untrusted = |fault| UpstreamError::untrusted(fault, options.kind);
        let bound = bound(self.upstream, self.call, self.prompt)?;
        loop {
            let Progress { sampled, pieces, .. } = &mut *progress;
            let left = bound.map(|bound| bound.saturating_sub(sampled.tokens.len() as u32));
            if left == Some(0) {
                return Ok(None);
            }
            let version = self.call.version.read().await;
            let rid = format!("{}-{}", self.call.rid, tries.aborts);
            let exchange = Exchange { rid: &rid, ..*self };
            let ids = [self.prompt.ids, &sampled.tokens].concat();
            let generated = match self.call.streaming.filter(|_| self.streams()) {
                Some(streaming) => exchange.stream(&ids, left, &sampled.tokens, pieces, streaming, tries).await,
                None => exchange.generate(&ids, left, &mut tries.reconnects).await.map(|answer| (answer, None)),
            };
            let (answer, broken) = match generated {
                Ok(generated) => generated,
                // SGLang answers a call that was aborted while it was queued with an error.
                Err(error) if error.is_abort() => (EngineAnswer::default(), Some(error)),
                Err(error) => return Err(error),
            };
            let part = check::prompt(&answer, &ids, self.way.may_render())
                .and_then(|()| check::part(&answer, version, options));
            if broken.is_none() && !answer.is_aborted() {
                sampled.append(part.map_err(untrusted)?, answer.cached_tokens());
                return Ok(Some(answer));
            }
            match part {
                Ok(part) if self.continues() => sampled.append(part, answer.cached_tokens()),
                // What lacks ids or log-probabilities is sampled again, unless the agent has a piece of it.
                Err(fault) if pieces.parsed() > sampled.tokens.len() => return Err(untrusted(fault)),
                Ok(_) => {}
                Err(fault) => tracing::debug!(%fault, "a partial answer is discarded"),
            }
            if let Some(error) = broken.filter(|error| !error.is_abort()) {
                return Err(error);
            }
            tries.aborts += 1;
            tracing::debug!(upstream.name = options.name, tries.aborts, "the engine aborted a call");
            if tries.aborts > options.aborts_max {
                return Err(UpstreamError::Aborted { times: tries.aborts });
            }
            tokio::time::sleep(options.repeat_delay).await;
        }
    }

    /// Whether the answer can be sent while it is sampled.
    fn streams(&self) -> bool {
        let can = self.way == Way::Vllm && self.upstream.sends_events.load(Ordering::Relaxed);
        can && self.call.request.stop.is_empty()
    }

    /// Samples an answer that comes as events, and sends pieces of it. With what arrived comes the error that ended it
    /// before its end. `begun` are the ids that were sampled before.
    async fn stream(
        &self,
        ids: &[i32],
        max_tokens: Option<u32>,
        begun: &[i32],
        pieces: &mut Pieces,
        streaming: &Streaming,
        tries: &mut Tries,
    ) -> Result<(EngineAnswer, Option<UpstreamError>), UpstreamError> {
        let ids = Ids { prompt: ids, stops: self.prompt.stop_ids, max_tokens };
        let write = |rid: &str| body::vllm_generate(self.call, &ids, rid, true);
        let post = self.request(VLLM_GENERATE, &write, Room::Waits);
        let mut events = self.upstream.transport.post_events(&post, &mut tries.reconnects).await?;
        let mut answer = EngineAnswer::default();
        let mut sampled = begun.to_vec();
        loop {
            let data = match events.next(TOKEN_BYTES * sampled.len()).await {
                Ok(Some(data)) => data,
                // What comes behind the end, or breaks there, changes nothing: the call must not go on behind its last id.
                Ok(None) | Err(_) if answer.has_ended() => return Ok((answer, None)),
                Ok(None) => {
                    let why = "the engine's events ended before the answer did".to_owned();
                    return Ok((answer, Some(UpstreamError::Unreachable { why })));
                }
                Err(error) => return Ok((answer, Some(error))),
            };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                continue;
            }
            let part = work::run(data.len(), || EngineAnswer::read(data)).await;
            let part = part.map_err(|fault| UpstreamError::untrusted(fault, self.upstream.options.kind))?;
            sampled.extend_from_slice(part.sampled_ids());
            if !answer.append(part) {
                let failure = (!answer.has_ended()).then(|| Events::failure(data));
                return Ok((answer, failure));
            }
            // The last id may only end the answer.
            if !answer.has_ended() {
                pieces.advance(self, &sampled, streaming).await;
            }
        }
    }

    /// Whether an answer can be parsed that was sampled in parts.
    fn continues(&self) -> bool {
        self.way != Way::Chat || self.upstream.options.parsers.is_some()
    }

    async fn generate(
        &self,
        ids: &[i32],
        max_tokens: Option<u32>,
        reconnects: &mut u32,
    ) -> Result<EngineAnswer, UpstreamError> {
        let ids = Ids { prompt: ids, stops: self.prompt.stop_ids, max_tokens };
        match self.way {
            Way::Chat => {
                let options = &self.upstream.options;
                self.post(CHAT, &|rid| body::write_ids(self.call, options, rid, &ids), reconnects).await
            }
            Way::Generate => {
                let write = |rid: &str| body::sglang_generate(self.call, &ids, rid);
                let generated: Generated = self.post(SGLANG_GENERATE, &write, reconnects).await?;
                Ok(generated.into())
            }
            Way::Vllm => {
                let write = |rid: &str| body::vllm_generate(self.call, &ids, rid, false);
                self.post(VLLM_GENERATE, &write, reconnects).await
            }
        }
    }

    /// Whether an answer is parsed by a request of its own.
    fn parses(&self, sampled: &Sampled) -> bool {
        match self.way {
            Way::Chat => sampled.parts > 1,
            Way::Generate => true,
            Way::Vllm => self.parses_ids(),
        }
    }

    /// The whole answer.
    async fn completion(
        &self,
        Progress { sampled, pieces, ended }: &mut Progress,
        reconnects: &mut u32,
    ) -> Result<Completion, UpstreamError> {
        let last = ended.as_ref().and_then(|Ended(last)| last.as_ref());
        let kind = self.upstream.options.kind;
        let untrusted = |fault| UpstreamError::untrusted(fault, kind);
        let choice = last.map(EngineAnswer::only_choice).transpose().map_err(untrusted)?;
        let mut finish = choice.map_or(Ok(Finish::Length), check::finish).map_err(untrusted)?;
        let mut stop_matched = choice.and_then(|choice| check::stop_matched(choice, finish));
        let mut message = match (self.way, choice) {
            (Way::Vllm, _) => {
                let ended_at = self.final_id(&sampled.tokens, stop_matched.as_ref());
                // A sequence that the model ended is no text: vLLM's parsers would keep the token in the content.
                let spoken = &sampled.tokens[..sampled.tokens.len() - usize::from(ended_at.is_some())];
                if stop_matched == Some(StopMatch::EndOfSequence) {
                    stop_matched = ended_at.map(StopMatch::Token).or(stop_matched);
                }
                let message = if self.parses_ids() {
                    self.derender(spoken, finish, reconnects).await?
                } else {
                    let text = self.text(spoken);
                    // vLLM holds back a character whose bytes are not all there.
                    let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
                    AssistantMessage {
                        content: Some(text.to_owned()).filter(|text| !text.is_empty()),
                        ..AssistantMessage::default()
                    }
                };
                if pieces.is_sent() { pieces.settled(self, message, (spoken, finish)).await? } else { message }
            }
            (Way::Chat, Some(choice)) if !self.parses(sampled) => {
                choice.message.as_ref().map(|message| message.read(self.rid)).unwrap_or_default()
            }
            _ => self.parse(sampled, stop_matched.as_ref(), reconnects).await?,
        };
        if self.way == Way::Vllm {
            match &stop_matched {
                // It is the end of what was sampled, and the endpoint that parses ids does not know it.
                Some(StopMatch::Text(stop)) => cut_at_last(&mut message, stop, self.keeps_stop()),
                // Older versions do not say what ended the answer.
                Some(StopMatch::EndOfSequence) => {
                    if let Some(text) = cut_at_first(&mut message, &self.call.request.stop, self.keeps_stop()) {
                        stop_matched = Some(StopMatch::Text(text));
                    }
                }
                Some(StopMatch::Token(_)) | None => {}
            }
        }
        if finish == Finish::Stop && !message.tool_calls.is_empty() {
            finish = Finish::ToolCalls;
        }
        let usage = Usage {
            prompt_tokens: self.prompt.ids.len() as u64,
            completion_tokens: sampled.tokens.len() as u64,
            cached_tokens: sampled.cached_tokens,
            // What an engine says of one part does not count that a thought was continued.
            reasoning_tokens: last.filter(|_| sampled.parts <= 1).and_then(EngineAnswer::reasoning_tokens),
        };
        let system_fingerprint = last.and_then(EngineAnswer::system_fingerprint);
        let Sampled { tokens, logprobs, spans, version_assumed, .. } = std::mem::take(sampled);
        let prompt_tokens = self.prompt.ids.to_vec();
        Ok(Completion {
            prompt_tokens,
            tokens,
            logprobs,
            spans,
            version_assumed,
            finish,
            stop_matched,
            message,
            usage,
            system_fingerprint,
        })
    }

    /// Whether the agent wants the stop text that ended its answer.
    fn keeps_stop(&self) -> bool {
        match self.upstream.options.kind {
            EngineKind::Vllm => self.call.request.switches("include_stop_str_in_output", true),
            EngineKind::Sglang | EngineKind::Openai => self.call.request.switches("no_stop_trim", true),
        }
    }

    /// The last id, if it only ended the answer. vLLM names the stop tokens of a request, but not the model's own.
    fn final_id(&self, tokens: &[i32], stop: Option<&StopMatch>) -> Option<i32> {
        let last = *tokens.last()?;
        let is_end = match stop? {
            StopMatch::Token(id) => *id == last,
            StopMatch::Text(_) => false,
            // The model may have an end that the family does not name. It is a special token, which has no text.
            StopMatch::EndOfSequence => self.prompt.stop_ids.contains(&last) || (self.prompt.text)(&[last]).is_empty(),
        };
        is_end.then_some(last)
    }

    /// Has vLLM parse an answer. It refuses to parse nothing.
    async fn derender(
        &self,
        tokens: &[i32],
        finish: Finish,
        reconnects: &mut u32,
    ) -> Result<AssistantMessage, UpstreamError> {
        if tokens.is_empty() {
            return Ok(AssistantMessage::default());
        }
        let (options, ids) = (&self.upstream.options, self.prompt.ids);
        let write = |rid: &str| body::derender(self.call, options, ids, tokens, finish, rid);
        let answer: EngineAnswer = self.post(DERENDER, &write, reconnects).await?;
        let choice = answer.only_choice().map_err(|fault| UpstreamError::untrusted(fault, EngineKind::Vllm))?;
        Ok(choice.message.as_ref().map(|message| message.read(self.rid)).unwrap_or_default())
    }

    /// Has SGLang parse an answer that its chat endpoint did not parse, or not as a whole.
    async fn parse(
        &self,
        sampled: &Sampled,
        stop: Option<&StopMatch>,
        reconnects: &mut u32,
    ) -> Result<AssistantMessage, UpstreamError> {
        let parsers = self.upstream.options.parsers.clone().unwrap_or_default();
        let mut text = self.text(&sampled.tokens);
        if let Some(StopMatch::Text(stop)) = stop
            && !self.keeps_stop()
            && let Some(place) = text.find(stop.as_str())
        {
            text.truncate(place);
        }
        let mut message = AssistantMessage::default();
        let stays = self.call.request.switches("separate_reasoning", false);
        if let Some(parser) = parsers.reasoning.as_ref().filter(|_| !stays) {
            let body = serde_json::json!({"text": text, "reasoning_parser": parser}).to_string();
            let write = |_: &str| body.clone().into();
            let separated: Separated = self.post(SEPARATE_REASONING, &write, reconnects).await?;
            message.reasoning = separated.reasoning_text.filter(|text| !text.is_empty());
            text = separated.text.unwrap_or_default();
        }
        if let Some(parser) = parsers.tool_call.as_ref().filter(|_| !self.call.request.tools.is_empty()) {
            let tools: Vec<_> = self.call.request.tools.iter().map(|tool| &*tool.definition).collect();
            let body = json::text(&ParseCalls { text: &text, tool_call_parser: parser, tools: &tools });
            let write = |_: &str| body.clone().into();
            let parsed: ParsedCalls = self.post(PARSE_FUNCTION_CALL, &write, reconnects).await?;
            text = parsed.normal_text.unwrap_or_default();
            let calls = parsed.calls.into_iter().enumerate();
            let call = |(index, call): (usize, ParsedCall)| ToolCall {
                id: format!("call_{}_{index}", self.rid),
                name: call.name,
                arguments: call.parameters,
            };
            message.tool_calls = calls.map(call).collect();
        }
        message.content = Some(text).filter(|text| !text.is_empty());
        Ok(message)
    }
}

/// Removes what follows the first stop text, and the text itself unless it `keeps` it, and returns it. A stop text in a
/// thought would have ended it, so thoughts are searched only if there is no content.
fn cut_at_first(message: &mut AssistantMessage, stops: &[String], keeps: bool) -> Option<String> {
    let text = spoken_last(message)?;
    let found = stops.iter().filter_map(|stop| Some((text.as_ref()?.find(stop.as_str())?, stop)));
    let (place, stop) = found.min()?;
    truncate(text, place + if keeps { stop.len() } else { 0 });
    Some(stop.clone())
}

/// Removes what follows the last place of a stop text, and the text itself unless it `keeps` it.
fn cut_at_last(message: &mut AssistantMessage, stop: &str, keeps: bool) {
    if let Some(text) = spoken_last(message)
        && let Some(place) = text.as_ref().and_then(|text| text.rfind(stop))
    {
        truncate(text, place + if keeps { stop.len() } else { 0 });
    }
}

/// The text of a message that was sampled last.
fn spoken_last(message: &mut AssistantMessage) -> Option<&mut Option<String>> {
    [&mut message.content, &mut message.reasoning].into_iter().find(|text| text.is_some())
}

fn truncate(text: &mut Option<String>, place: usize) {
    if let Some(whole) = text {
        whole.truncate(place);
    }
    // A message has no empty texts.
    *text = text.take().filter(|text| !text.is_empty());
}

#[derive(serde::Serialize)]
struct ParseCalls<'a> {
    text: &'a str,
    tool_call_parser: &'a str,
    tools: &'a [&'a serde_json::value::RawValue],
}

#[derive(Deserialize)]
struct Separated {
    reasoning_text: Option<String>,
    text: Option<String>,
}

#[derive(Deserialize)]
struct ParsedCalls {
    normal_text: Option<String>,
    #[serde(default)]
    calls: Vec<ParsedCall>,
}

#[derive(Deserialize)]
struct ParsedCall {
    name: String,
    #[serde(default)]
    parameters: String,
}
