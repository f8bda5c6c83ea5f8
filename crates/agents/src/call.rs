//! One call: the engine answers, and the call is recorded before the agent sees the end of the answer.

use std::{
    borrow::Cow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use axum::http::HeaderMap;
use forebay_bounds::budget::Shares;
use forebay_bounds::work;
use forebay_domain::{
    clock::Timestamp,
    ids::{CallPk, check_name},
    session::{SessionPolicy, notes::SessionNotes},
    warnings::Warning,
};
use forebay_gateway::{
    Completion, Dialect, DialectError, Request,
    canonical::{Canonical, Continued, Repeated},
    completion::{Finish, StopMatch},
    dialect::{ClientTools, Envelope, References, called},
    lineage::AgentLabel,
    request::LeftOut,
    upstream::{Answered, Streaming},
};
use forebay_service::{
    engines::NoUpstream,
    error::BufferError,
    session::record::{CallPermit, NewCall, Replayed, SentCall},
};
use forebay_telemetry::metrics::CallInFlight;
use forebay_wire::VersionSpan;
use tokio::runtime::Handle;
use tracing::Instrument as _;
use uuid::Uuid;

use crate::{
    Agents,
    asking::Asked,
    audits::Audit,
    blocking,
    body::{self, ReadBody},
    exact::Exact,
    histories::{Holds, Recorded},
    references, refusal,
    stored::StoredAnswer,
    upstreams::Route,
};

/// A parsed call of a session.
pub(crate) struct Call {
    pub(crate) agents: Agents,
    pub(crate) dialect: Dialect,
    pub(crate) request: Request,
    /// What the client calls its tools.
    pub(crate) tools: Arc<ClientTools>,
    /// The request as it is compared with the calls before. `None` if the call is not recorded.
    canonical: Option<Canonical>,
    pub(crate) permit: Arc<CallPermit>,
    pub(crate) digest: [u8; 32],
    /// How often the client says that it has repeated the call; `None` if it says nothing about repeats.
    retry_count: Option<u32>,
    agent: Option<AgentLabel>,
    pub(crate) id: String,
    created_s: u64,
    began: Timestamp,
    pub(crate) times: Times,
    /// Where the answer goes while it is sampled, if it goes as events.
    pub(crate) streaming: Option<Streaming>,
    _in_flight: CallInFlight,
    /// Held as long as the request.
    shares: Shares,
    /// Whether it was counted how the call ended.
    is_counted: AtomicBool,
    is_recorded: AtomicBool,
}

/// Times of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// When its body had been read.
    pub(crate) arrived: Instant,
    /// When it must be answered, if it is one without events.
    pub(crate) answer_by: Instant,
}

/// What a call is answered with.
pub(crate) struct Answer {
    pub(crate) completion: Completion,
    pub(crate) envelope: Envelope,
    /// The recorded call; none if it is not recorded.
    pub(crate) recorded: Option<CallPk>,
}

impl Call {
    pub(crate) async fn parse(
        agents: Agents,
        dialect: Dialect,
        permit: CallPermit,
        headers: &HeaderMap,
        ReadBody { bytes, mut shares, is_repaired }: ReadBody,
        times: Times,
    ) -> Result<Self, DialectError> {
        let length = bytes.len();
        let parse = |references: &mut References| {
            let Some(mut request) = dialect.parse_with(&bytes, references)? else { return Ok(None) };
            // A name that the session does not know is refused later.
            let is_to_be_recorded = permit.policy(&request.model).is_ok_and(|policy| policy.is_some());
            if is_to_be_recorded {
                request = request.recorded()?;
            }
            Ok::<_, DialectError>(Some((*blake3::hash(&bytes).as_bytes(), request, is_to_be_recorded)))
        };
        let mut references = References::default();
        let adapting = async {
            let mut parsed = work::run(length, || parse(&mut references)).await?;
            if parsed.is_none() {
                references::resolve(&agents, &permit, &mut references, &mut shares).await?;
                parsed = work::run(length, || parse(&mut references)).await?;
            }
            let (digest, request, is_to_be_recorded) = parsed.ok_or(DialectError::Internal)?;
            Ok((digest, agents.upstreams().adapted(&permit, request).await?, is_to_be_recorded))
        };
        let adapted = adapting.await;
        let notes = notes(is_repaired, &adapted);
        agents.buffer().note_session(&permit, notes).await.map_err(refusal::of)?;
        let (digest, mut request, is_to_be_recorded) = adapted?;
        drop(bytes);
        let canonical = work::run(length, || is_to_be_recorded.then(|| Canonical::of(&request))).await;
        check_name(&request.model).map_err(|why| DialectError::Invalid { field: "model".to_owned(), why })?;
        for warning in request.warnings.iter() {
            tracing::debug!(warning, "a part of a call was left out");
        }
        for part in request.warnings.kinds() {
            agents.metrics().part_left_out(part.undated());
        }
        let (agent, retry_count) = (AgentLabel::of(headers), number(headers, "x-stainless-retry-count"));
        let label = agent.as_ref().map(AgentLabel::as_str);
        let canonical =
            canonical.map(|canonical| canonical.sent_by(label, retry_count > Some(0)).in_attempt(permit.attempt()));
        let began = agents.buffer().now();
        let id = Uuid::now_v7().simple().to_string();
        tracing::Span::current().record("call.id", &id);
        Ok(Self {
            dialect,
            digest,
            tools: Arc::new(std::mem::take(&mut request.client_tools)),
            request,
            canonical,
            permit: Arc::new(permit),
            retry_count,
            agent,
            id,
            created_s: began.unix_s(),
            began,
            times,
            streaming: None,
            _in_flight: agents.metrics().call_begins(),
            agents,
            shares,
            is_counted: AtomicBool::new(false),
            is_recorded: AtomicBool::new(false),
        })
    }

    /// Answers the call: with what was recorded, if its client repeats it, else with what an engine answers.
    pub(crate) async fn answer(self: Arc<Self>) -> Result<Answer, DialectError> {
        match self.begin().await? {
            Some(replayed) => Ok(replayed),
            None => self.answer_anew().await,
        }
    }

    /// Has an engine answer the call.
    pub(crate) async fn answer_anew(self: Arc<Self>) -> Result<Answer, DialectError> {
        let model = &self.request.model;
        let policy = self.permit.policy(model).map_err(|error| refusal::of(error.into()))?;
        let route = self.agents.upstreams().of_call(model, policy).map_err(|error| no_upstream(&error))?;
        if policy.is_some() {
            route.check_scale(self.permit.sampling())?;
        }
        let (Some(policy), Some(canonical)) = (policy, &self.canonical) else {
            let Asked { answered, .. } = self.ask_until_ended(&route, None, None).await?;
            self.count("forwarded");
            return Ok(Answer { completion: answered.completion, envelope: self.own_envelope(), recorded: None });
        };
        let prompt = match &route.exact {
            Some(exact) => {
                route.await_probe().await;
                Some(self.prompt(&route, exact, policy, canonical).await?)
            }
            None => None,
        };
        let ids = prompt.as_ref().map(|prompt| &prompt.ids[..]);
        let asked = self.ask_until_ended(&route, Some(policy), ids).await?;
        let Asked { answered, engine_time } = asked;
        let answer = self.record(&route, policy, canonical, answered, prompt.as_ref()).await?;
        let added = self.times.arrived.elapsed().saturating_sub(engine_time);
        self.agents.metrics().call_added(self.dialect.name(), added);
        Ok(answer)
    }

    /// The prompt in the mode exact: the ids of the call that the request continues, and what is new.
    async fn prompt(
        self: &Arc<Self>,
        route: &Route,
        exact: &Arc<Exact>,
        policy: &SessionPolicy,
        canonical: &Canonical,
    ) -> Result<Prompt, DialectError> {
        let continuable = continued(&self.agents, &self.permit, policy, canonical, Purpose::Call).await?;
        let Continuable { continued, longest_path } = continuable;
        let continues = continued.as_ref().map(|continued| continued.seq);
        // The ids that a prompt has in common with a call are counted already.
        let session = longest_path.saturating_add(self.permit.tokens_left() as usize);
        let context = route.upstream.options().context_tokens.map_or(usize::MAX, |tokens| tokens as usize);
        let (call, exact) = (Arc::clone(self), Arc::clone(exact));
        let clock_s = self.permit.opened_at().unix_s() as i64;
        let memory = body::work_memory(&self.agents, self.body_bytes());
        let render = move |cancellation: &_| {
            let tokens_max = session.min(context);
            exact.prompt(&call.request, clock_s, continued.as_ref(), tokens_max, cancellation, &memory)
        };
        let Some((ids, special_tokens)) = blocking::run(render).await? else {
            if context < session {
                let detail = format!("it has more than {context} tokens, which are the context of the engine");
                return Err(DialectError::ContextLength { detail });
            }
            let refusal = self.agents.buffer().without_tokens(&self.permit).await;
            return Err(refusal::of(refusal.map_or_else(|error| error, BufferError::from)));
        };
        if special_tokens > 0 {
            self.agents.metrics().special_tokens(policy.policy.as_str(), special_tokens);
            let session_id = self.permit.session_id();
            tracing::info!(session.id = %session_id, special_tokens, "texts of an agent have special tokens of the model");
        }
        Ok(Prompt { ids, special_tokens, continues })
    }

    /// The recorded answer, if the client says that it repeats the call, or if an earlier attempt of the session has made
    /// it, too. Any other call needs room in its session.
    pub(crate) async fn begin(&self) -> Result<Option<Answer>, DialectError> {
        let buffer = self.agents.buffer();
        let retry_count = self.retries();
        let sent = SentCall { dialect: self.dialect.name().to_owned(), body_digest: self.digest, retry_count };
        let (found, outcome) = match buffer.repeated_call(&self.permit, &sent).await.map_err(refusal::of)? {
            Some(found) => (Some(found), "replayed"),
            None => (self.resumed(&sent).await?, "resumed"),
        };
        let Some(Replayed { call, response, .. }) = found else {
            buffer.require_room(&self.permit).await.map_err(refusal::of)?;
            return Ok(None);
        };
        let read = work::run(response.len(), || serde_json::from_str(&response)).await;
        let stored: StoredAnswer<'_> = read.map_err(|error| {
            tracing::error!(error = %error, "a stored answer cannot be read");
            DialectError::Internal
        })?;
        self.count(outcome);
        let envelope = self.envelope(&stored.id, stored.created_s);
        Ok(Some(Answer { completion: stored.completion.into_owned(), envelope, recorded: Some(call.call_pk) }))
    }

    /// The recorded answer of an earlier attempt to the same call.
    async fn resumed(&self, sent: &SentCall) -> Result<Option<Replayed>, DialectError> {
        let policy = self.permit.policy(&self.request.model).map_err(|error| refusal::of(error.into()))?;
        let (Some(policy), Some(canonical)) = (policy, &self.canonical) else { return Ok(None) };
        // Nearly all sessions have one attempt.
        if self.permit.attempt() == 1 {
            return Ok(None);
        }
        let holds = if self.agents.upstreams().render_prompts() { Holds::Ids } else { Holds::Messages };
        let Repeated { equal, before } = {
            let history = self.agents.histories().of(self.permit.session_id());
            let mut history = history.lock().await;
            history.catch_up(self.agents.buffer(), &self.permit, holds).await.map_err(refusal::of)?;
            history.repeated(&policy.policy, canonical)
        };
        if equal.is_empty() {
            return Ok(None);
        }
        let found = self.agents.buffer().resumed_call(&self.permit, sent, equal, before).await;
        found.map_err(refusal::of)
    }

    /// Stores the call. It goes on if the client disconnects: an answer is recorded wholly or not at all.
    async fn record(
        self: &Arc<Self>,
        route: &Arc<Route>,
        policy: &SessionPolicy,
        canonical: &Canonical,
        answered: Answered,
        prompt: Option<&Prompt>,
    ) -> Result<Answer, DialectError> {
        let Answered { mut completion, .. } = answered;
        let audit = self.audit(route, policy, &completion);
        let holds = if route.exact.is_some() { Holds::Ids } else { Holds::Messages };
        let session_id = self.permit.session_id();
        let history = self.agents.histories().of(session_id);
        let bytes = self.request.bytes + answer_bytes(&completion);
        let (record, request) = {
            let mut history = history.lock().await;
            history.catch_up(self.agents.buffer(), &self.permit, holds).await.map_err(refusal::of)?;
            let write = || {
                let continues = prompt.and_then(|prompt| prompt.continues);
                let record = history.record(&policy.policy, canonical).continuing(continues);
                let text = record.to_json();
                (record, text)
            };
            work::run(bytes, write).await
        };
        let mut new = self.new_call(policy, prompt, &mut completion);
        let stored = StoredAnswer {
            id: Cow::Borrowed(&self.id),
            created_s: self.created_s,
            completion: Cow::Borrowed(&completion),
            model: Cow::Borrowed(&self.request.model),
            tools: called(&self.tools, &completion.message.tool_calls),
            instructions: self.request.instructions,
        };
        let write = || serde_json::to_string(&stored).expect("an answer is text and numbers");
        new.response = work::run(bytes, write).await;
        new.request = request;
        let (call, message) = (Arc::clone(self), completion.message.clone());
        let (policy_name, prompt, ids) = (new.policy.clone(), new.prompt.clone(), new.ids.clone());
        let recording = async move {
            let recorded = call.agents.buffer().record_call(&call.permit, new).await?;
            let mut history = history.lock().await;
            let (policy, prompt, ids) = (&policy_name, &prompt, &ids);
            let (seq, id) = (recorded.seq, &call.id);
            let added = Recorded { seq, policy, record: &record, prompt, ids, message: &message, id };
            work::run(bytes, || history.add(&added, holds)).await;
            call.agents.histories().note(session_id, history.size());
            audit.into_iter().for_each(Audit::begin);
            Ok::<_, BufferError>(recorded)
        };
        let recorded = match tokio::spawn(recording.in_current_span()).await {
            Ok(recorded) => recorded.map_err(refusal::of)?,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(DialectError::Internal),
        };
        self.is_recorded.store(true, Ordering::Relaxed);
        self.count("recorded");
        if self.request.constrained() {
            self.agents.metrics().call_constrained(policy.policy.as_str());
        }
        tracing::debug!(call.seq = recorded.seq, "a call was recorded");
        let envelope = self.own_envelope();
        Ok(Answer { completion, envelope, recorded: Some(recorded.call_pk) })
    }

    /// What is stored of the call, but for the texts of its request and its answer. Takes the tokens out of `completion`.
    fn new_call(&self, policy: &SessionPolicy, prompt: Option<&Prompt>, completion: &mut Completion) -> NewCall {
        let finish = match completion.finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::ToolCalls => "tool_calls",
        };
        let spans = std::mem::take(&mut completion.spans).into_iter();
        NewCall {
            policy: policy.policy.clone(),
            agent: self.agent.as_ref().map(|agent| agent.as_str().to_owned()),
            dialect: self.dialect.name().to_owned(),
            model: self.request.model.clone(),
            finish_reason: finish.to_owned(),
            stop: match &completion.stop_matched {
                Some(StopMatch::Text(text)) => Some(text.clone()),
                _ => None,
            },
            id: Some(self.id.clone()),
            version_assumed: completion.version_assumed,
            stopped_on_token: completion.stopped_on_token(),
            special_tokens: prompt.map_or(0, |prompt| prompt.special_tokens),
            warnings: self.request.warnings.kinds().map(left_out).collect(),
            body_digest: self.digest,
            retry_count: self.retries(),
            started_at: Some(self.began),
            prompt: std::mem::take(&mut completion.prompt_tokens),
            ids: std::mem::take(&mut completion.tokens),
            logprobs: std::mem::take(&mut completion.logprobs),
            versions: spans.map(|span| VersionSpan(span.version, span.start.into(), span.len.into())).collect(),
            ..NewCall::default()
        }
    }

    fn retries(&self) -> u32 {
        self.retry_count.unwrap_or(0)
    }

    /// Whether the client says that it repeats a call.
    pub(crate) fn is_repeat(&self) -> bool {
        self.retries() > 0
    }

    /// Whether the client counts its repeats, so that it may repeat this call.
    pub(crate) fn client_repeats(&self) -> bool {
        self.retry_count.is_some()
    }

    /// The bytes of the budget that the body holds.
    pub(crate) fn body_bytes(&self) -> usize {
        self.shares.bytes()
    }

    fn envelope(&self, id: &str, created_s: u64) -> Envelope {
        Envelope {
            id: id.to_owned(),
            created_s,
            model: self.request.model.clone(),
            stream_usage: self.request.stream_usage,
            tools: Arc::clone(&self.tools),
        }
    }

    /// The envelope of the call itself, which is not a repeat of another.
    pub(crate) fn own_envelope(&self) -> Envelope {
        self.envelope(&self.id, self.created_s)
    }

    /// Counts how the call ended.
    pub(crate) fn count(&self, outcome: &str) {
        self.is_counted.store(true, Ordering::Relaxed);
        self.agents.metrics().call_ended(self.dialect.name(), outcome);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !*self.is_counted.get_mut() {
            self.agents.metrics().call_ended(self.dialect.name(), "abandoned");
        }
        // The session is not idle, although nothing was recorded.
        if let (false, Ok(runtime)) = (*self.is_recorded.get_mut(), Handle::try_current()) {
            let (agents, permit) = (self.agents.clone(), Arc::clone(&self.permit));
            runtime.spawn(async move {
                // A session that has ended needs no more time, and a store that cannot answer gives none.
                let _ = agents.buffer().keep_session(&permit).await;
            });
        }
    }
}

/// What the receipts of the session should tell of a call.
fn notes(is_repaired: bool, adapted: &Result<([u8; 32], Request, bool), DialectError>) -> SessionNotes {
    let noted = |applies: bool, note| if applies { note } else { SessionNotes::default() };
    let (refused, has_images) = match adapted {
        Ok((_, request, is_to_be_recorded)) => (false, *is_to_be_recorded && request.image.is_some()),
        Err(error) => (error.is_unsupported_part(), false),
    };
    noted(is_repaired, SessionNotes::LONE_SURROGATES)
        | noted(refused, SessionNotes::UNSUPPORTED_PART)
        | noted(has_images, SessionNotes::IMAGES_REPLACED)
}

/// A prompt that the service rendered.
struct Prompt {
    ids: Vec<i32>,
    /// The number of special tokens in the texts of what is new.
    special_tokens: u64,
    /// The call whose ids it begins with.
    continues: Option<u32>,
}

/// Why a prompt is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// For a call. If other requests have equal answers before them, they continue the others.
    Call,
    /// To count its tokens.
    Count,
}

/// What a request in the mode exact may have in common with recorded calls.
pub(crate) struct Continuable {
    /// The call that it continues.
    pub(crate) continued: Option<Continued>,
    /// The most ids that it has in common with any call, also where its messages differ.
    pub(crate) longest_path: usize,
}

/// Looks at all calls of the session, also at those that other replicas have recorded.
pub(crate) async fn continued(
    agents: &Agents,
    permit: &CallPermit,
    policy: &SessionPolicy,
    canonical: &Canonical,
    purpose: Purpose,
) -> Result<Continuable, DialectError> {
    let history = agents.histories().of(permit.session_id());
    let mut history = history.lock().await;
    history.catch_up(agents.buffer(), permit, Holds::Ids).await.map_err(refusal::of)?;
    let continued = history.continued(&policy.policy, canonical);
    if let (Purpose::Call, Some(continued)) = (purpose, &continued) {
        history.take(&policy.policy, continued.seq, canonical);
    }
    Ok(Continuable { continued, longest_path: history.longest_path() })
}

/// About how many bytes an answer has as JSON.
pub(crate) fn answer_bytes(completion: &Completion) -> usize {
    let message = &completion.message;
    let texts = [&message.content, &message.reasoning].into_iter().flatten().map(String::len);
    let calls = message.tool_calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len());
    // An id has up to seven bytes, and a log-probability up to twelve.
    texts.chain(calls).sum::<usize>() + 7 * completion.prompt_tokens.len() + 19 * completion.tokens.len()
}

pub(crate) fn number(headers: &HeaderMap, name: &str) -> Option<u32> {
    let text = headers.get(name)?.to_str().ok()?.trim();
    // Some clients write seconds with a fraction.
    text.split('.').next()?.parse().ok()
}

/// What the producer is told of a part that was left out.
fn left_out(part: &LeftOut) -> Warning {
    let LeftOut { what, kind } = part;
    Warning::new("part-left-out", format!("calls had a part of type {kind:?} ({what}), which cannot be used here"))
}

fn no_upstream(error: &NoUpstream) -> DialectError {
    DialectError::NotFound { what: error.what() }
}
