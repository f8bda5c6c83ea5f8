//! One call: the engine answers, and the call is recorded before the agent sees the end of the answer.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::HeaderMap;
use forebay_client::wire::VersionSpan;
use forebay_gateway::{
    Completion, Dialect, DialectError, Request, UpstreamError,
    completion::{Finish, StopMatch},
    dialect::Envelope,
    lineage::AgentLabel,
    upstream::{Answered, EngineCall, Sampling},
};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    Agents,
    body::ReadBody,
    refusal,
    upstreams::{NoUpstream, Route},
};
use crate::{
    buffer::{
        ids::CallPk,
        port::SessionPolicy,
        session::{CallPermit, NewCall, Replayed},
    },
    clock::Timestamp,
    metrics::CallInFlight,
};

/// Bodies above this size are parsed on a thread where that may take its time.
const LARGE_BODY_BYTES: usize = 256 << 10;

/// A session that has room for fewer tokens than this bounds what the engine may sample. Engines refuse a bound that
/// does not fit into their context together with the prompt, so it is not named without need.
const ROOM_NAMED_BELOW: u64 = 128 << 10;

/// How long before its client would give up a call is answered.
const ANSWER_BEFORE: Duration = Duration::from_secs(30);

/// A parsed call of a session.
pub(super) struct Call {
    pub(super) agents: Agents,
    pub(super) dialect: Dialect,
    pub(super) request: Request,
    permit: CallPermit,
    digest: [u8; 32],
    retry_count: u32,
    agent: Option<AgentLabel>,
    /// How long the client waits for an answer, if it says so.
    read_timeout: Option<Duration>,
    id: String,
    created_s: u64,
    began: Timestamp,
    arrived: Instant,
    _in_flight: CallInFlight,
    /// Held as long as the request.
    _share: Option<OwnedSemaphorePermit>,
}

/// What a call is answered with.
pub(super) struct Answer {
    pub(super) completion: Completion,
    pub(super) envelope: Envelope,
    /// The recorded call; none if it is not recorded.
    pub(super) recorded: Option<CallPk>,
}

/// The answer as it is stored. The ids have columns of their own.
#[derive(Serialize, Deserialize)]
struct StoredAnswer<'a> {
    id: Cow<'a, str>,
    created_s: u64,
    completion: Cow<'a, Completion>,
}

impl Call {
    pub(super) async fn parse(
        agents: Agents,
        dialect: Dialect,
        permit: CallPermit,
        headers: &HeaderMap,
        ReadBody { bytes, share }: ReadBody,
        arrived: Instant,
    ) -> Result<Self, DialectError> {
        let parse = move || (*blake3::hash(&bytes).as_bytes(), dialect.parse(&bytes));
        let (digest, request) = if share.as_ref().is_some_and(is_large) {
            tokio::task::spawn_blocking(parse).await.map_err(|_| DialectError::Internal)?
        } else {
            parse()
        };
        let request = request?;
        for warning in &request.warnings {
            tracing::debug!(warning, "a part of a call was left out");
        }
        let began = agents.0.buffer.now();
        let id = Uuid::now_v7().simple().to_string();
        tracing::Span::current().record("call.id", &id);
        Ok(Self {
            dialect,
            digest,
            request,
            permit,
            retry_count: number(headers, "x-stainless-retry-count").unwrap_or(0),
            agent: AgentLabel::of(headers),
            read_timeout: number(headers, "x-stainless-read-timeout")
                .map(|seconds| Duration::from_secs(seconds.into())),
            id,
            created_s: began.unix_s(),
            began,
            arrived,
            _in_flight: agents.0.metrics.call_begins(),
            agents,
            _share: share,
        })
    }

    /// Answers the call: with what was recorded, if its client repeats it, else with what an engine answers.
    pub(super) async fn answer(self: Arc<Self>) -> Result<Answer, DialectError> {
        if let Some(replayed) = self.replay().await? {
            return Ok(replayed);
        }
        let model = &self.request.model;
        let policy = self.permit.policy(model).map_err(|error| refusal::of(error.into()))?;
        let upstreams = &self.agents.0.upstreams;
        let route = policy.map_or_else(|| upstreams.of_model(model), |policy| upstreams.of_policy(&policy.policy));
        let route = route.map_err(|error| no_upstream(&error))?;
        let (answered, engine_time) = self.ask_until_cancelled(&route, policy).await?;
        let Some(policy) = policy else {
            self.count("forwarded");
            return Ok(Answer { completion: answered.completion, envelope: self.own_envelope(), recorded: None });
        };
        let answer = self.record(policy, answered).await?;
        let added = self.arrived.elapsed().saturating_sub(engine_time);
        self.agents.0.metrics.call_added(self.dialect.name(), added);
        Ok(answer)
    }

    /// The recorded answer, if the client says that it repeats the call.
    async fn replay(&self) -> Result<Option<Answer>, DialectError> {
        let found = self.agents.0.buffer.replay(&self.permit, self.digest, self.retry_count).await;
        let Some(Replayed { call, response, .. }) = found.map_err(refusal::of)? else { return Ok(None) };
        let stored: StoredAnswer<'_> = serde_json::from_str(&response).map_err(|error| {
            tracing::error!(error = %error, "a stored answer cannot be read");
            DialectError::Internal
        })?;
        self.count("replayed");
        let envelope = self.envelope(&stored.id, stored.created_s);
        Ok(Some(Answer { completion: stored.completion.into_owned(), envelope, recorded: Some(call.call_pk) }))
    }

    async fn ask_until_cancelled(
        &self,
        route: &Route,
        policy: Option<&SessionPolicy>,
    ) -> Result<(Answered, Duration), DialectError> {
        tokio::select! {
            biased;
            () = self.permit.cancelled() => Err(DialectError::Closed { why: "it was finished".to_owned() }),
            answered = self.ask_in_time(route, policy) => answered,
        }
    }

    /// Has the engine answer before the client gives up. A client of events is kept alive and never gives up.
    async fn ask_in_time(
        &self,
        route: &Route,
        policy: Option<&SessionPolicy>,
    ) -> Result<(Answered, Duration), DialectError> {
        let patience = self.read_timeout.filter(|_| !self.request.stream).map(|timeout| {
            if timeout > 2 * ANSWER_BEFORE { timeout.saturating_sub(ANSWER_BEFORE) } else { timeout / 2 }
        });
        let Some(patience) = patience else { return self.ask(route, policy).await };
        tokio::time::timeout(patience, self.ask(route, policy)).await.unwrap_or_else(|_| {
            Err(DialectError::Busy { why: "the engine has not answered yet".to_owned(), retry_after_s: 1 })
        })
    }

    /// Has the engine answer. While it is paused, busy or gone, the call waits. The time is what the engine took.
    async fn ask(&self, route: &Route, policy: Option<&SessionPolicy>) -> Result<(Answered, Duration), DialectError> {
        let metrics = &self.agents.0.metrics;
        let session = self.permit.session_id().to_string();
        let version = policy.map_or(0, |policy| policy.current_version.0);
        let mut request = Cow::Borrowed(&self.request);
        let mut engine_time = Duration::ZERO;
        let mut draining = self.agents.0.draining.subscribe();
        let started = Instant::now();
        for attempt in 0_u32.. {
            let rid = format!("{}-{attempt}", self.id);
            let call = EngineCall {
                exact: None,
                request: &request,
                model: &route.model,
                sampling: sampling(self.permit.sampling()),
                room: self.room(),
                session: &session,
                rid: &rid,
                version: &|| version,
            };
            let asked = Instant::now();
            let outcome = match policy {
                Some(_) => route.upstream.complete(&call).await,
                None => route.upstream.forward(&call).await.map(|completion| Answered {
                    completion,
                    aborts: 0,
                    reconnects: 0,
                }),
            };
            let error = match outcome {
                Ok(answered) => {
                    engine_time += asked.elapsed();
                    metrics.engine_answered(route.name(), asked.elapsed(), answered.aborts);
                    return Ok((answered, engine_time));
                }
                Err(error) => error,
            };
            metrics.engine_failed(route.name(), error.name());
            let wait = match &error {
                // Agents ask for more tokens than the context has room for. The engine knows how many there are.
                UpstreamError::ContextLength { .. } if request.max_tokens.is_some() => {
                    request.to_mut().max_tokens = None;
                    Duration::ZERO
                }
                UpstreamError::Busy { retry_after_s, .. } => {
                    Duration::from_secs(u64::from(*retry_after_s).clamp(1, 10))
                }
                UpstreamError::Unreachable { .. } | UpstreamError::Aborted { .. } => Duration::from_secs(1),
                _ => Duration::MAX,
            };
            let is_over = wait > Duration::ZERO && started.elapsed().saturating_add(wait) > self.agents.0.options.hold;
            if is_over || *draining.borrow() {
                tracing::warn!(upstream.name = route.name(), error = %error, "an engine did not answer a call");
                return Err(DialectError::from(&error));
            }
            engine_time += asked.elapsed() + wait;
            // A service that stops waits no longer: its clients repeat the call.
            let _ = tokio::time::timeout(wait, draining.wait_for(|draining| *draining)).await;
        }
        Err(DialectError::Internal)
    }

    /// How many tokens may be sampled, if the session is nearly full.
    fn room(&self) -> Option<u32> {
        let left = self.permit.tokens_left();
        (left < ROOM_NAMED_BELOW).then_some(left.max(1) as u32)
    }

    /// Stores the call. It goes on if the client disconnects: an answer is recorded wholly or not at all.
    async fn record(self: &Arc<Self>, policy: &SessionPolicy, answered: Answered) -> Result<Answer, DialectError> {
        let Answered { mut completion, .. } = answered;
        if self.request.constrained() {
            self.agents.0.metrics.call_constrained(policy.policy.as_str());
        }
        let finish = match completion.finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::ToolCalls => "tool_calls",
        };
        let mut new = NewCall {
            policy: policy.policy.clone(),
            agent: self.agent.as_ref().map(|agent| agent.as_str().to_owned()),
            dialect: self.dialect.name().to_owned(),
            model: self.request.model.clone(),
            finish_reason: finish.to_owned(),
            stop: match &completion.stop_matched {
                Some(StopMatch::Text(text)) => Some(text.clone()),
                _ => None,
            },
            stopped_on_token: completion.stopped_on_token(),
            body_digest: self.digest,
            retry_count: self.retry_count,
            started_at: Some(self.began),
            prompt: std::mem::take(&mut completion.prompt_tokens),
            ids: std::mem::take(&mut completion.tokens),
            logprobs: std::mem::take(&mut completion.logprobs),
            ..NewCall::default()
        };
        let spans = std::mem::take(&mut completion.spans).into_iter();
        new.versions = spans.map(|span| VersionSpan(span.version, span.start.into(), span.len.into())).collect();
        let stored = StoredAnswer {
            id: Cow::Borrowed(&self.id),
            created_s: self.created_s,
            completion: Cow::Borrowed(&completion),
        };
        new.response = serde_json::to_string(&stored).expect("an answer is text and numbers");
        let call = Arc::clone(self);
        let recording = async move { call.agents.0.buffer.record_call(&call.permit, new).await };
        let recorded = match tokio::spawn(recording.in_current_span()).await {
            Ok(recorded) => recorded.map_err(refusal::of)?,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(DialectError::Internal),
        };
        self.count("recorded");
        tracing::debug!(call.seq = recorded.seq, "a call was recorded");
        let envelope = self.own_envelope();
        Ok(Answer { completion, envelope, recorded: Some(recorded.call_pk) })
    }

    fn envelope(&self, id: &str, created_s: u64) -> Envelope {
        Envelope {
            id: id.to_owned(),
            created_s,
            model: self.request.model.clone(),
            stream_usage: self.request.stream_usage,
        }
    }

    /// The envelope of the call itself, which is not a repeat of another.
    pub(super) fn own_envelope(&self) -> Envelope {
        self.envelope(&self.id, self.created_s)
    }

    /// Counts how the call ended.
    pub(super) fn count(&self, outcome: &str) {
        self.agents.0.metrics.call_ended(self.dialect.name(), outcome);
    }
}

/// Whether a body is so large that parsing it would hold up other tasks.
fn is_large(share: &OwnedSemaphorePermit) -> bool {
    share.num_permits() << 10 > LARGE_BODY_BYTES
}

fn number(headers: &HeaderMap, name: &str) -> Option<u32> {
    let text = headers.get(name)?.to_str().ok()?.trim();
    // Some clients write seconds with a fraction.
    text.split('.').next()?.parse().ok()
}

fn no_upstream(error: &NoUpstream) -> DialectError {
    DialectError::NotFound { what: error.what() }
}

/// The sampling as engines are told. The shortest decimal of each number is sent, as the producer wrote it.
pub(super) fn sampling(sampling: forebay_client::wire::Sampling) -> Sampling {
    let widened = |value: f32| value.to_string().parse().unwrap_or_else(|_| f64::from(value));
    Sampling {
        temperature: widened(sampling.temperature),
        top_p: widened(sampling.top_p),
        top_k: sampling.top_k.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_sent_the_number_that_the_producer_wrote() {
        let wire = forebay_client::wire::Sampling { temperature: 0.7, top_p: 0.95, top_k: -1 };
        assert_eq!(sampling(wire), Sampling { temperature: 0.7, top_p: 0.95, top_k: -1 });
    }
}
