//! Permits calls and records them. A call is durable before the agent sees the end of its answer.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use forebay_bounds::work;
use forebay_domain::{
    clock::Timestamp,
    formats::call::{CallColumns, pack_text, unpack_text},
    ids::{CallPk, PolicyName, SessionId, SessionPk, Version, check_name},
    refusal::Refusal,
    session::{
        ANY_MODEL, CallHead, FindAnswer, KeepSession, RecordCall, RecordedCall, ReplayCall, Session, SessionBounds,
        SessionKeyHash, SessionPolicy, StoredAnswer,
        notes::SessionNotes,
        paths::{CallPaths, Shared},
    },
    states::SessionState,
    warnings::{LOGPROB_MAX, Warning},
};
use forebay_store::{
    error::StoreError,
    ops::session::{
        FindSessionOfKey,
        calls::{MarkFull, NoteSession},
    },
};
use forebay_wire::{Sampling, VersionSpan, Violation};
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    session::{
        calls::{SessionCalls, in_own_task, one_of_few},
        delivery::Delivered,
        in_flight::Guard,
        recent::{KnownCalls, RecentSessions},
    },
};

/// Stands in lists for all names of a session in which other names are not recorded.
const ANY_NAME: &str = "default";

/// Ids that the trees of all sessions hold together: 64 MiB.
const CACHED_IDS_MAX: usize = 16 << 20;

/// Calls with more bytes than this are compressed on a thread for such work. Fewer bytes take a millisecond at most.
const PACKED_INLINE_BYTES_MAX: usize = 64 << 10;

/// Permission for one call of a session. While it exists, the call is in flight: keep it until the answer is delivered,
/// so that a finish waits for it.
#[derive(Debug)]
pub struct CallPermit {
    session: Session,
    tokens_max: u64,
    /// What the session has the most of that it may have.
    full: Option<&'static str>,
    guard: Guard,
    /// The recorded calls whose answers are sent with it.
    answered: Mutex<Vec<CallPk>>,
    delivered: Arc<Delivered>,
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let answered = self.answered.get_mut().unwrap_or_else(PoisonError::into_inner);
        for &call in answered.iter() {
            self.delivered.end(call);
        }
    }
}

/// A finished call of an agent.
#[derive(Clone, Debug, Default)]
pub struct NewCall {
    /// The policy whose rollout it belongs to.
    pub policy: PolicyName,
    /// Who made it, if the agent says so.
    pub agent: Option<String>,
    /// The API that the agent used.
    pub dialect: String,
    /// Name of the model that the agent asked for.
    pub model: String,
    /// The ids of the whole prompt, as the engine reports them.
    pub prompt: Vec<i32>,
    /// The sampled ids.
    pub ids: Vec<i32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// The spans of versions that tile `ids`.
    pub versions: Vec<VersionSpan>,
    /// Whether the engine did not say the version of every id, so that the published one stands in.
    pub version_assumed: bool,
    /// Why the engine stopped.
    pub finish_reason: String,
    /// The stop sequence that ended the call, if one did.
    pub stop: Option<String>,
    /// The id of its answer, without the prefix of the API.
    pub id: Option<String>,
    /// Whether the last id is a stop token.
    pub stopped_on_token: bool,
    /// Special tokens of the model in the texts of the request that no earlier call has.
    pub special_tokens: u64,
    /// What to tell the producer about it.
    pub warnings: Vec<Warning>,
    /// Digest of the request's body.
    pub body_digest: [u8; 32],
    /// How many times the client says that it has repeated the request.
    pub retry_count: u32,
    /// When it began; the time of the record if absent.
    pub started_at: Option<Timestamp>,
    /// The part of the request that is kept, as JSON.
    pub request: String,
    /// The response, as JSON. A repeated request is answered with it.
    pub response: String,
}

/// How a call was sent.
#[derive(Clone, Debug)]
pub struct SentCall {
    /// The API that the agent uses.
    pub dialect: String,
    /// Digest of the request's body.
    pub body_digest: [u8; 32],
    /// How many times the client says that it has repeated the request.
    pub retry_count: u32,
}

/// The recorded answer to a request that is sent again.
#[derive(Clone, Debug)]
pub struct Replayed {
    pub call: RecordedCall,
    /// The response, as JSON.
    pub response: String,
}

impl CallPermit {
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.session.session_id
    }

    /// Notes that the answer of a call is being sent.
    fn begin(&self, call: CallPk) {
        self.delivered.begin(call, self.session.session_id);
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    /// The policy that a model name stands for, with its version; none if calls of the model are not recorded.
    pub fn policy(&self, model: &str) -> Result<Option<&SessionPolicy>, Refusal> {
        let Some(name) = self.session.spec.policy(model)? else { return Ok(None) };
        let found = self.session.policies.iter().find(|policy| policy.policy.public().as_str() == name);
        found.map(Some).ok_or_else(|| Refusal::UnknownModel(model.to_owned()))
    }

    /// Model names that an agent can call. The entry for all other names is listed by its policy's name.
    #[must_use]
    pub fn models(&self) -> BTreeSet<&str> {
        let mut names: BTreeSet<&str> = self.session.spec.models.keys().map(String::as_str).collect();
        if names.remove(ANY_MODEL) {
            let policy = self.session.spec.models.get(ANY_MODEL).and_then(Option::as_deref);
            names.insert(policy.unwrap_or(ANY_NAME));
        }
        names
    }

    /// How tokens are sampled.
    #[must_use]
    pub fn sampling(&self) -> Sampling {
        self.session.spec.sampling
    }

    /// The attempt of the session that the call belongs to.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.session.attempt
    }

    /// How many calls the session had when the call arrived.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.session.calls
    }

    /// When the session was opened.
    #[must_use]
    pub fn opened_at(&self) -> Timestamp {
        self.session.opened_at
    }

    pub(super) fn session_pk(&self) -> SessionPk {
        self.session.session_pk
    }

    /// How many tokens the trajectories of the session may have.
    #[must_use]
    pub fn tokens_max(&self) -> u64 {
        self.tokens_max
    }

    /// How many more tokens the trajectories of the session may have.
    #[must_use]
    pub fn tokens_left(&self) -> u64 {
        self.tokens_max.saturating_sub(self.session.tokens)
    }

    /// Returns when a finish no longer waits for the call, whose answer will not be recorded.
    pub async fn cancelled(&self) {
        self.guard.cancelled().await;
    }
}

impl Buffer {
    /// Permission for a call of the session that has this key; `id` is the session that the caller names. If the session
    /// has as many calls in flight as it may have, it waits for `wait` until one ends.
    #[instrument(level = "debug", skip_all)]
    pub async fn session_for_call(
        &self,
        id: Option<SessionId>,
        key: &str,
        wait: Duration,
    ) -> Result<CallPermit, BufferError> {
        let session = open_session(self, id, key).await?;
        let max = self.options.sessions.in_flight_max;
        let (session, guard) = match self.in_flight.begin(session.session_id, max) {
            Some(guard) => (session, guard),
            None if wait.is_zero() => return Err(Refusal::SessionBusy(max).into()),
            None => {
                let place = self.in_flight.wait(session.session_id, max, wait).await;
                let guard = place.ok_or(Refusal::SessionBusy(max))?;
                // Other calls were recorded meanwhile, or the session has ended.
                (open_session(self, id, key).await?, guard)
            }
        };
        let bounds = bounds(self);
        let full = [
            ("calls", session.calls >= session.max_calls),
            ("bytes", session.bytes >= bounds.bytes_max),
            ("segments", session.segments >= bounds.segments_max),
            ("tokens", session.tokens >= bounds.tokens_max),
        ];
        let full = full.into_iter().find(|(_, is_full)| *is_full).map(|(what, _)| what);
        let delivered = Arc::clone(&self.delivered);
        Ok(CallPermit { session, tokens_max: bounds.tokens_max, full, guard, answered: Mutex::default(), delivered })
    }
}

/// The session of a key, which must be open.
async fn open_session(buffer: &Buffer, id: Option<SessionId>, key: &str) -> Result<Session, BufferError> {
    let found = buffer.store.read(FindSessionOfKey(SessionKeyHash::of(key))).await?;
    let found = found.filter(|(session, _)| id.is_none_or(|id| id == session.session_id));
    let (session, of) = found.ok_or(Refusal::UnknownSessionKey)?;
    if of != session.attempt {
        return Err(Refusal::AttemptSuperseded { attempt: session.attempt, of }.into());
    }
    let now = buffer.clock.now();
    if !session.state.takes_calls() {
        return Err(Refusal::SessionEnded(session.state).into());
    }
    // The sweep ends sessions that are due, but not at the very moment.
    if session.expires_at <= now {
        return Err(Refusal::SessionEnded(SessionState::Expired).into());
    }
    if session.state == SessionState::Parked {
        // The agent is there after all, and its call may take longer than the session is idle.
        let (session_pk, attempt) = (session.session_pk, session.attempt);
        buffer.store.write(KeepSession { session_pk, attempt, now }).await??;
    }
    Ok(session)
}

impl Buffer {
    /// The refusal of a call whose prompt alone has more tokens than its session has left.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn without_tokens(&self, permit: &CallPermit) -> Result<Refusal, BufferError> {
        Ok(full_of(self, &permit.session, "tokens").await?)
    }

    /// Notes that the agent of a session is at work although no call is recorded, so that the session does not expire.
    /// Refused if the session has ended or another attempt has begun, also at another replica.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn keep_session(&self, permit: &CallPermit) -> Result<(), BufferError> {
        let Session { session_pk, attempt, .. } = permit.session;
        Ok(self.store.write(KeepSession { session_pk, attempt, now: self.clock.now() }).await??)
    }

    /// Remembers what happened to a call, for the receipts of the session.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn note_session(&self, permit: &CallPermit, notes: SessionNotes) -> Result<(), BufferError> {
        // Nearly all calls of a session note nothing, or what the first one has noted.
        if !permit.session.notes.has(notes) {
            self.store.write(NoteSession { session: permit.session.session_pk, notes }).await?;
        }
        Ok(())
    }

    /// Refuses a call if its session has as much as it may have. One that is answered with what was recorded adds nothing,
    /// and needs no room.
    pub async fn require_room(&self, permit: &CallPermit) -> Result<(), BufferError> {
        match permit.full {
            Some(what) => Err(full_of(self, &permit.session, what).await?.into()),
            None => Ok(()),
        }
    }

    /// The recorded answer to a request that its client repeats.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn repeated_call(&self, permit: &CallPermit, sent: &SentCall) -> Result<Option<Replayed>, BufferError> {
        if sent.retry_count == 0 {
            return Ok(None);
        }
        // A client repeats the call whose answer it did not receive. An agent that asks the same twice has two answers, so one
        // that was delivered is not given again.
        self.flush_delivered().await?;
        let Session { session_pk, session_id, attempt, .. } = permit.session;
        let SentCall { dialect, body_digest, retry_count } = sent.clone();
        let sending = self.delivered.sending(session_id);
        let find = FindAnswer { session_pk, attempt, dialect, body_digest, retry_count, sending };
        self.store.read(find).await?.map(|found| replayed(permit, &found)).transpose()
    }

    /// The answer to a call that an earlier attempt has made, too. `equal` are the numbers of the recorded calls that are
    /// equal to it, and `before` those of the calls that it may continue.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn resumed_call(
        &self,
        permit: &CallPermit,
        sent: &SentCall,
        equal: Vec<u32>,
        before: Vec<u32>,
    ) -> Result<Option<Replayed>, BufferError> {
        // What is known of the answers of earlier attempts is stored before, because this changes it.
        self.flush_delivered().await?;
        let Session { session_pk, attempt, .. } = permit.session;
        let SentCall { dialect, body_digest, retry_count } = sent.clone();
        let now = self.clock.now();
        let replay = ReplayCall { session_pk, attempt, equal, before, dialect, body_digest, retry_count, now };
        let found = self.store.write(replay).await??;
        found.map(|found| replayed(permit, &found)).transpose()
    }

    /// Records a call. It is durable when this returns.
    #[instrument(level = "debug", skip_all, fields(session.id = %permit.session_id()))]
    pub async fn record_call(&self, permit: &CallPermit, call: NewCall) -> Result<RecordedCall, BufferError> {
        check(&call)?;
        let session = &permit.session;
        let paths = self.call_paths.of(session.session_id);
        let shared = {
            let mut paths = paths.lock().await;
            paths.catch_up(self, session).await?;
            paths.shared(&call)
        };
        let now = self.clock.now();
        let (prompt, sampled) = (call.prompt.len(), call.ids.len());
        let columns = CallColumns {
            tail: call.prompt[shared.ids..].to_vec(),
            ids: call.ids.clone(),
            logprobs: call.logprobs.clone(),
            versions: call.versions.clone(),
            version_assumed: call.version_assumed,
            stop: call.stop.clone(),
            id: call.id.clone(),
        };
        let packed = pack(columns, call).await?;
        let Packed { body, digest, request, response, call } = packed;
        // A call that continues another one lengthens its segment. Any other call begins a segment with its whole prompt.
        let (segments, added) = match shared.continues {
            _ if sampled == 0 => (0, 0),
            Some((_, end)) => (0, prompt - end + sampled),
            None => (1, prompt + sampled),
        };
        let record = RecordCall {
            session_pk: session.session_pk,
            attempt: session.attempt,
            policy: call.policy.clone(),
            head: CallHead {
                agent: call.agent.clone(),
                dialect: call.dialect.clone(),
                model: call.model.clone(),
                finish_reason: call.finish_reason.clone(),
                stopped_on_token: call.stopped_on_token,
                body_digest: call.body_digest,
                retry_count: call.retry_count,
                started_at: call.started_at.unwrap_or(now),
            },
            parent: shared.call,
            shared: shared.ids,
            prompt,
            sampled,
            oldest_version: call.versions.iter().map(|span| Version(span.0)).min(),
            special_tokens: call.special_tokens,
            warnings: call.warnings.iter().map(ToString::to_string).collect(),
            body,
            digest,
            request,
            response,
            segments,
            tokens: added as u64,
            bounds: bounds(self),
            now,
        };
        let recorded = match self.store.write(record).await? {
            Ok(recorded) => recorded,
            Err(Refusal::SessionFull(what)) => return Err(full_of(self, session, what).await?.into()),
            Err(refusal) => return Err(refusal.into()),
        };
        permit.begin(recorded.call_pk);
        let ids = {
            let mut paths = paths.lock().await;
            paths.add(recorded.seq, &call);
            paths.len()
        };
        self.call_paths.note(session.session_id, ids);
        self.metrics.call_recorded(call.policy.as_str(), sampled as u64);
        Ok(recorded)
    }
}

/// A stored answer that is sent again.
fn replayed(permit: &CallPermit, found: &StoredAnswer) -> Result<Replayed, BufferError> {
    let call_pk = found.call.call_pk;
    permit.begin(call_pk);
    let response = unpack_text(&found.response)
        .map_err(|damage| StoreError::Corrupt(format!("response of call {call_pk}: {damage}")))?;
    Ok(Replayed { call: found.call, response })
}

/// What is stored of a call, compressed.
struct Packed {
    body: Vec<u8>,
    digest: [u8; 32],
    request: Vec<u8>,
    response: Vec<u8>,
    call: NewCall,
}

/// Compresses a call. A long one is compressed on a thread for such work, because it would hold up other requests.
async fn pack(columns: CallColumns, call: NewCall) -> Result<Packed, StoreError> {
    let ids = call.prompt.len() + call.ids.len();
    let bytes = call.request.len() + call.response.len() + ids * size_of::<i32>();
    let pack = move || {
        let (body, digest) = columns.pack();
        let (request, response) = (pack_text(&call.request), pack_text(&call.response));
        Packed { body, digest, request, response, call }
    };
    if bytes <= PACKED_INLINE_BYTES_MAX {
        return Ok(pack());
    }
    work::on_thread(pack).await.map_err(|_| StoreError::Closed)
}

/// Remembers that a bound was reached, and returns the refusal.
async fn full_of(buffer: &Buffer, session: &Session, what: &'static str) -> Result<Refusal, StoreError> {
    if !session.is_full {
        buffer.store.write(MarkFull(session.session_pk)).await?;
    }
    Ok(Refusal::SessionFull(what))
}

fn bounds(buffer: &Buffer) -> SessionBounds {
    SessionBounds {
        bytes_max: buffer.options.sessions.bytes_max,
        segments_max: buffer.options.limits.segments_max as u64,
        tokens_max: buffer.options.limits.tokens_max as u64,
    }
}

/// Refuses a call that could not be ingested, or that contradicts itself.
fn check(call: &NewCall) -> Result<(), Refusal> {
    let mut violations = Vec::new();
    let mut require = |holds: bool, pointer: &str, detail: &str| {
        if !holds {
            violations.push(Violation { pointer: pointer.to_owned(), detail: detail.to_owned() });
        }
    };
    for (pointer, text) in [
        ("/agent", call.agent.as_deref()),
        ("/dialect", Some(call.dialect.as_str())),
        ("/model", Some(call.model.as_str())),
        ("/finish_reason", Some(call.finish_reason.as_str())),
    ] {
        if let Some(Err(detail)) = text.map(check_name) {
            require(false, pointer, &detail);
        }
    }
    require(!call.prompt.is_empty(), "/prompt", "must have at least one id");
    require(call.prompt.iter().chain(&call.ids).all(|&id| id >= 0), "/ids", "must be 0 or above");
    require(call.logprobs.len() == call.ids.len(), "/logprobs", "must be as many as there are ids");
    let is_logprob = |&logprob: &f32| logprob.is_finite() && logprob <= LOGPROB_MAX;
    require(call.logprobs.iter().all(is_logprob), "/logprobs", "must be finite and not above 0");
    let mut next = 0;
    let tiles = call.versions.iter().all(|&VersionSpan(version, start, length)| {
        let fits = version >= 0 && start == next && length >= 1;
        next = start.saturating_add(length);
        fits
    });
    require(tiles && next == call.ids.len() as i64, "/versions", "must tile the ids");
    if violations.is_empty() { Ok(()) } else { Err(Refusal::Invalid(violations)) }
}

/// The trees of the sessions that were active last.
pub(crate) type PathCache = RecentSessions<SessionPaths>;

/// No trees yet.
pub(crate) fn path_cache() -> PathCache {
    RecentSessions::new(CACHED_IDS_MAX)
}

/// The trees of a session, one per policy.
#[derive(Debug, Default)]
pub(crate) struct SessionPaths {
    policies: HashMap<PolicyName, CallPaths>,
    /// The calls that are in the trees.
    known: KnownCalls,
}

impl SessionPaths {
    /// Adds the stored calls that the trees lack: all after a restart, and those that other replicas have recorded.
    async fn catch_up(&mut self, buffer: &Buffer, session: &Session) -> Result<(), StoreError> {
        if self.known.has_all(session.calls) {
            return Ok(());
        }
        // A prompt may share ids with any earlier call, so all of them are read. After a restart every session does
        // this with its next call. Nobody who is one of the few waits for the trees of a session, so there is no
        // deadlock.
        let (buffer, session, mut paths) = (buffer.clone(), session.session_pk, std::mem::take(self));
        let reading = async move {
            let _few = one_of_few().await?;
            let stored = SessionCalls::read(&buffer, session).await?;
            for call in &stored.calls {
                if !paths.known.has(call.seq) {
                    let of_policy = paths.policies.entry(call.policy.clone()).or_default();
                    of_policy.add(call.seq, &stored.prompt(call), &call.columns.ids, call.head.stopped_on_token);
                    paths.known.learn(call.seq);
                }
            }
            Ok::<_, StoreError>(paths)
        };
        *self = in_own_task(reading).await?;
        Ok(())
    }

    fn shared(&self, call: &NewCall) -> Shared {
        self.policies.get(&call.policy).map(|paths| paths.shared(&call.prompt)).unwrap_or_default()
    }

    fn add(&mut self, seq: u32, call: &NewCall) {
        if self.known.has(seq) {
            return;
        }
        let paths = self.policies.entry(call.policy.clone()).or_default();
        paths.add(seq, &call.prompt, &call.ids, call.stopped_on_token);
        self.known.learn(seq);
    }

    fn len(&self) -> usize {
        self.policies.values().map(CallPaths::ids).sum()
    }
}
