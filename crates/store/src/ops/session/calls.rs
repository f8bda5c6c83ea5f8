//! Recorded calls. A call is durable before the agent sees the end of its answer.
use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    formats::call::CallColumns,
    ids::{CallPk, PolicyName, PolicyPk, SessionPk},
    refusal::Refusal,
    session::{
        CallHead, CallTexts, Delivery, FindAnswer, KeepSession, RecordCall, RecordedCall, SessionBounds, StoredAnswer,
        StoredCall, notes::SessionNotes,
    },
    states::SessionState,
};

use super::{parked::unpark, read_warnings};
use crate::{
    error::StoreError,
    op::{Class, Op},
    sql::{Row, Statement, Tx, among_keys, args, key_list, locking},
};

/// The most warnings that a session keeps of the calls of a policy. An agent may name any types of parts.
const WARNINGS_MAX: usize = 32;

/// The session of a call, whose row is locked.
pub(super) struct Recording {
    pub(super) state: SessionState,
    pub(super) attempt: u32,
    pub(super) calls: u32,
    max_calls: u32,
    bytes: u64,
    segments: u64,
    tokens: u64,
    idle_s: u64,
    pub(super) expires_at: Timestamp,
}

impl Recording {
    pub(super) async fn lock(tx: &mut Tx<'_>, session: SessionPk) -> Result<Option<Self>, StoreError> {
        const LOCK_RECORDING: Statement = locking!(
            "-- lock_recording_session
            SELECT session_pk, state, attempt, calls, max_calls, bytes, segments, tokens, idle_s, expires_us
            FROM session
            WHERE session_pk = $1"
        );
        let Some(mut row) = tx.fetch_optional(LOCK_RECORDING, args![session]).await? else { return Ok(None) };
        Ok(Some(Self {
            state: row.get("state")?,
            attempt: row.get("attempt")?,
            calls: row.get("calls")?,
            max_calls: row.get("max_calls")?,
            bytes: row.get("bytes")?,
            segments: row.get("segments")?,
            tokens: row.get("tokens")?,
            idle_s: row.get("idle_s")?,
            expires_at: row.get("expires_us")?,
        }))
    }

    /// When the session is idle, if nothing comes from now on.
    pub(super) fn due_at(&self, now: Timestamp) -> Timestamp {
        self.expires_at.min(now.plus_seconds(self.idle_s))
    }

    /// Refuses what comes after the session has ended, or belongs to an attempt that is over.
    pub(super) fn check_attempt(&self, attempt: u32) -> Result<(), Refusal> {
        if self.attempt != attempt {
            return Err(Refusal::AttemptSuperseded { attempt: self.attempt, of: attempt });
        }
        if self.state.is_live() { Ok(()) } else { Err(Refusal::SessionEnded(self.state)) }
    }

    /// Refuses a call that the session must not or cannot take.
    fn check(&self, record: &RecordCall) -> Result<(), Refusal> {
        let SessionBounds { bytes_max, segments_max, tokens_max } = record.bounds;
        self.check_attempt(record.attempt)?;
        if self.calls >= self.max_calls {
            return Err(Refusal::SessionFull("calls"));
        }
        if self.bytes + record.bytes() as u64 > bytes_max {
            return Err(Refusal::SessionFull("bytes"));
        }
        if self.segments + record.segments > segments_max {
            return Err(Refusal::SessionFull("segments"));
        }
        if self.tokens + record.tokens > tokens_max {
            return Err(Refusal::SessionFull("tokens"));
        }
        Ok(())
    }
}

#[async_trait]
impl Op for RecordCall {
    type Output = Result<RecordedCall, Refusal>;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.bytes()
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const FIND_POLICY: Statement = Statement::new(
            "-- find_recorded_policy
            SELECT sp.policy_pk, sp.warnings
            FROM policy AS p
            JOIN session_policy AS sp ON sp.policy_pk = p.policy_pk
            WHERE p.name = $1 AND sp.session_pk = $2",
        );
        const COUNT_CALL: Statement = Statement::new(
            "-- count_call
            UPDATE session
            SET calls = calls + 1, bytes = bytes + $2, segments = segments + $3, tokens = tokens + $4,
                last_call_us = $5, due_us = $6
            WHERE session_pk = $1 AND state IN ('open', 'finishing')",
        );
        const COUNT_CALL_OF_POLICY: Statement = Statement::new(
            "-- count_call_of_policy
            UPDATE session_policy
            SET calls = calls + 1, sampled = sampled + $3, special_tokens = special_tokens + $4,
                warnings = COALESCE($5, warnings),
                oldest_version = CASE WHEN CAST($6 AS BIGINT) IS NULL OR oldest_version <= $6 THEN oldest_version ELSE $6 END
            WHERE session_pk = $1 AND policy_pk = $2",
        );
        let Some(session) = Recording::lock(tx, self.session_pk).await? else {
            return Ok(Err(Refusal::Unknown("the session")));
        };
        if let Err(refusal) = session.check(self) {
            return Ok(Err(refusal));
        }
        let found = tx.fetch_optional(FIND_POLICY, args![self.policy.as_str(), self.session_pk]).await?;
        let Some(mut found) = found else { return Ok(Err(Refusal::UnknownPolicy(self.policy.clone()))) };
        let policy: PolicyPk = found.get("policy_pk")?;
        let warnings = new_warnings(self, read_warnings(found.get("warnings")?)?);
        let call = insert(self, tx, policy, session.calls + 1).await?;
        let due_at = session.due_at(self.now);
        unpark(tx, self.session_pk, session.state, due_at).await?;
        let counts = args![self.session_pk, self.bytes(), self.segments, self.tokens, self.now, due_at];
        tx.guarded(COUNT_CALL, counts, 1).await?;
        let sampled = args![self.sampled, self.special_tokens, warnings, self.oldest_version];
        let counts = args![self.session_pk, policy].into_iter().chain(sampled).collect();
        tx.guarded(COUNT_CALL_OF_POLICY, counts, 1).await?;
        Ok(Ok(call))
    }
}

/// The warnings of the session's policy with those of the call. `None` if nothing is new.
fn new_warnings(record: &RecordCall, mut stored: Vec<String>) -> Option<String> {
    let before = stored.len();
    for warning in &record.warnings {
        if stored.len() < WARNINGS_MAX && !stored.contains(warning) {
            stored.push(warning.clone());
        }
    }
    (stored.len() > before).then(|| serde_json::to_string(&stored).expect("texts are always JSON"))
}

async fn insert(record: &RecordCall, tx: &mut Tx<'_>, policy: PolicyPk, seq: u32) -> Result<RecordedCall, StoreError> {
    const INSERT_CALL: Statement = Statement::new(
        "-- insert_call
        INSERT INTO session_call (
            session_pk, seq, policy_pk, parent, shared, prompt, sampled, agent, dialect, model, finish_reason,
            stopped_on_token, delivered, retry_count, started_us, ended_us, body_digest, digest, body, request,
            response, attempt, used_in
        )
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, 0, $13, $14, $15, $16, $17, $18, $19, $20, $21, $21)
        RETURNING call_pk",
    );
    let head = &record.head;
    let values = args![
        record.session_pk,
        seq,
        policy,
        record.parent.map(i64::from),
        record.shared,
        record.prompt,
        record.sampled,
        head.agent.as_deref(),
        head.dialect.as_str(),
        head.model.as_str(),
        head.finish_reason.as_str(),
        head.stopped_on_token,
        head.retry_count,
        head.started_at,
        record.now,
        &head.body_digest[..],
        &record.digest[..],
        &record.body[..],
        &record.request[..],
        &record.response[..],
        record.attempt,
    ];
    let call_pk = tx.fetch_one(INSERT_CALL, values).await?.get("call_pk")?;
    Ok(RecordedCall { call_pk, seq })
}

#[async_trait]
impl Op for KeepSession {
    type Output = Result<(), Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const KEEP_SESSION: Statement = Statement::new(
            "-- keep_session
            UPDATE session
            SET due_us = $2
            WHERE session_pk = $1 AND state IN ('open', 'finishing')",
        );
        let Some(session) = Recording::lock(tx, self.session_pk).await? else {
            return Ok(Err(Refusal::Unknown("the session")));
        };
        if let Err(refusal) = session.check_attempt(self.attempt) {
            return Ok(Err(refusal));
        }
        let due_at = session.due_at(self.now);
        unpark(tx, self.session_pk, session.state, due_at).await?;
        tx.guarded(KEEP_SESSION, args![self.session_pk, due_at], 1).await?;
        Ok(Ok(()))
    }
}

/// Remembers that a call was refused because a bound was reached.
pub struct MarkFull(pub SessionPk);

#[async_trait]
impl Op for MarkFull {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const MARK_FULL: Statement = Statement::new(
            "-- mark_session_full
            UPDATE session
            SET is_full = 1
            WHERE session_pk = $1 AND is_full = 0 AND state IN ('open', 'finishing')",
        );
        tx.execute(MARK_FULL, args![self.0]).await.map(drop)
    }
}

/// Adds to what a live session remembers of its calls.
pub struct NoteSession {
    pub session: SessionPk,
    pub notes: SessionNotes,
}

#[async_trait]
impl Op for NoteSession {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const NOTE_SESSION: Statement = Statement::new(
            "-- note_session
            UPDATE session
            SET notes = notes | $2
            WHERE session_pk = $1 AND state IN ('open', 'finishing')",
        );
        tx.execute(NOTE_SESSION, args![self.session, i64::from(self.notes.number())]).await.map(drop)
    }
}

/// Marks whether the agents received the answers of calls. A call that was delivered stays so.
pub struct MarkCalls {
    pub calls: Vec<CallPk>,
    pub delivery: Delivery,
}

#[async_trait]
impl Op for MarkCalls {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        // Two replicas mark no call both, because only the one that recorded a call answers it. An answer that was lost
        // may be sent again, but not the other way round.
        const MARK_CALLS: Statement = among_keys!(
            "-- mark_calls
            UPDATE session_call
            SET delivered = CASE WHEN delivered = 1 THEN delivered ELSE $2 END
            WHERE call_pk"
        );
        let calls = key_list(self.calls.iter().map(|call| call.0));
        tx.execute(MARK_CALLS, args![calls, self.delivery.code()]).await.map(drop)
    }
}

/// Whether it is not known of a call that ended after a time whether its answer was delivered.
pub struct FindUnmarked {
    pub session: SessionPk,
    pub ended_after: Timestamp,
}

#[async_trait]
impl Op for FindUnmarked {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        const FIND_UNMARKED: Statement = Statement::new(
            "-- find_unmarked
            SELECT call_pk
            FROM session_call
            WHERE session_pk = $1 AND seq > 0 AND delivered = 0 AND ended_us > $2
            LIMIT 1",
        );
        Ok(tx.fetch_optional(FIND_UNMARKED, args![self.session, self.ended_after]).await?.is_some())
    }
}

#[async_trait]
impl Op for FindAnswer {
    type Output = Option<StoredAnswer>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // An agent may have many equal calls in flight, whose answers are all lost with one connection.
        const FIND_LOST: Statement = Statement::new(
            "-- find_lost_answers
            SELECT call_pk, seq
            FROM session_call
            WHERE session_pk = $1 AND body_digest = $2 AND retry_count < $3 AND dialect = $4 AND delivered <> 1
                AND used_in = $5
            ORDER BY seq
            LIMIT 64",
        );
        let dialect = self.dialect.as_str();
        let values = args![self.session_pk, &self.body_digest[..], self.retry_count, dialect, self.attempt];
        let mut lost = Vec::new();
        for mut row in tx.fetch_all(FIND_LOST, values).await? {
            lost.push(RecordedCall { call_pk: row.get("call_pk")?, seq: row.get("seq")? });
        }
        let Some(call) = lost.into_iter().min_by_key(|call| (self.sending.contains(&call.call_pk), call.seq)) else {
            return Ok(None);
        };
        answer(tx, call).await.map(Some)
    }
}

/// A call with its answer.
pub(super) async fn answer(tx: &mut Tx<'_>, call: RecordedCall) -> Result<StoredAnswer, StoreError> {
    const FIND_RESPONSE: Statement = Statement::new(
        "-- find_response
        SELECT response
        FROM session_call
        WHERE call_pk = $1",
    );
    let mut row = tx.fetch_one(FIND_RESPONSE, args![call.call_pk]).await?;
    Ok(StoredAnswer { call, response: row.get("response")? })
}

/// The calls of a session after a number, in order.
pub struct FindCalls {
    pub session: SessionPk,
    pub after: u32,
    pub limit: u32,
}

#[async_trait]
impl Op for FindCalls {
    type Output = Vec<StoredCall>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_CALLS: Statement = Statement::new(
            "-- select_calls
            SELECT c.call_pk, c.seq, p.name AS policy, c.parent, c.shared, c.prompt, c.agent, c.dialect, c.model,
                c.finish_reason, c.stopped_on_token, c.delivered, c.retry_count, c.attempt, c.used_in, c.started_us,
                c.ended_us, c.body_digest, c.digest, c.body
            FROM session_call AS c
            JOIN policy AS p ON p.policy_pk = c.policy_pk
            WHERE c.session_pk = $1 AND c.seq > $2
            ORDER BY c.seq
            LIMIT $3",
        );
        let rows = tx.fetch_all(SELECT_CALLS, args![self.session, self.after, self.limit]).await?;
        rows.into_iter().map(read).collect()
    }
}

fn read(mut row: Row) -> Result<StoredCall, StoreError> {
    let call_pk: CallPk = row.get("call_pk")?;
    let corrupt = |what: String| StoreError::Corrupt(format!("call {call_pk}: {what}"));
    let policy: String = row.get("policy")?;
    let body: Vec<u8> = row.get("body")?;
    let delivery: u32 = row.get("delivered")?;
    Ok(StoredCall {
        seq: row.get("seq")?,
        policy: PolicyName::stored(&policy).map_err(|error| corrupt(error.to_string()))?,
        parent: row.get("parent")?,
        shared: row.get::<u64>("shared")? as usize,
        prompt: row.get::<u64>("prompt")? as usize,
        delivery: Delivery::of_code(delivery).ok_or_else(|| corrupt(format!("its delivery is {delivery}")))?,
        attempt: row.get("attempt")?,
        used_in: row.get("used_in")?,
        ended_at: row.get("ended_us")?,
        columns: CallColumns::unpack(&body, row.get("digest")?).map_err(|damage| corrupt(damage.to_string()))?,
        head: CallHead {
            agent: row.get("agent")?,
            dialect: row.get("dialect")?,
            model: row.get("model")?,
            finish_reason: row.get("finish_reason")?,
            stopped_on_token: row.get("stopped_on_token")?,
            body_digest: row.get("body_digest")?,
            retry_count: row.get("retry_count")?,
            started_at: row.get("started_us")?,
        },
    })
}

/// The requests and responses of the calls of a session after a number, in order.
pub struct FindTexts {
    pub session: SessionPk,
    pub after: u32,
    pub limit: u32,
}

#[async_trait]
impl Op for FindTexts {
    type Output = Vec<CallTexts>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_CALL_TEXTS: Statement = Statement::new(
            "-- select_call_texts
            SELECT seq, request, response
            FROM session_call
            WHERE session_pk = $1 AND seq > $2
            ORDER BY seq
            LIMIT $3",
        );
        let rows = tx.fetch_all(SELECT_CALL_TEXTS, args![self.session, self.after, self.limit]).await?;
        let read = |mut row: Row| {
            Ok(CallTexts { seq: row.get("seq")?, request: row.get("request")?, response: row.get("response")? })
        };
        rows.into_iter().map(read).collect()
    }
}
