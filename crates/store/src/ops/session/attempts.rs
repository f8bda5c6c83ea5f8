//! Attempts of sessions: an agent that died is started again, and goes on in the same session.
//!
//! The keys of earlier attempts stay, so that an agent that was given up is told so. What belongs to an earlier attempt is
//! refused under the lock of the session's row.

use std::cmp::Reverse;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::SessionId,
    refusal::Refusal,
    session::{Delivery, RecordedCall, ReplayCall, ResumeSession, SaveState, SavedState, Session, StoredAnswer},
    states::SessionState,
};

use super::{
    FindSession,
    calls::{self, Recording},
    open,
    parked::{moved, parked, unpark},
};
use crate::{
    error::StoreError,
    op::{Class, Op},
    sql::{Statement, Tx, among_keys, args, key_list},
};

#[async_trait]
impl Op for ResumeSession {
    type Output = Result<Session, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const BEGIN_ATTEMPT: Statement = Statement::new(
            "-- begin_attempt
            UPDATE session
            SET state = 'open', attempt = attempt + 1, due_us = $2
            WHERE session_pk = $1 AND attempt = $3 AND state IN ('open', 'parked')",
        );
        let unknown = Ok(Err(Refusal::Unknown("the session")));
        let Some(found) = FindSession(self.session_id).run(tx).await? else { return unknown };
        let session_pk = found.session_pk;
        let Some(locked) = Recording::lock(tx, session_pk).await? else { return unknown };
        // Its policies are read again under the lock.
        let Some(session) = FindSession(self.session_id).run(tx).await? else { return unknown };
        if let Err(refusal) = check(self, &locked, &session) {
            return Ok(Err(refusal));
        }
        let begin = args![session_pk, locked.due_at(self.now), locked.attempt];
        tx.guarded(BEGIN_ATTEMPT, begin, 1).await?;
        moved(tx, session_pk, locked.state, SessionState::Open).await?;
        open::insert_key(tx, session_pk, locked.attempt + 1, self.key).await?;
        FindSession(self.session_id).run(tx).await.map(|session| session.ok_or(Refusal::Unknown("the session")))
    }
}

fn check(resume: &ResumeSession, locked: &Recording, session: &Session) -> Result<(), Refusal> {
    if !locked.state.takes_calls() {
        return Err(Refusal::SessionEnded(locked.state));
    }
    if locked.expires_at <= resume.now {
        return Err(Refusal::SessionEnded(SessionState::Expired));
    }
    if let Some(reset) = session.policies.iter().find(|policy| policy.run != policy.current_run) {
        return Err(Refusal::SessionReset(reset.policy.public()));
    }
    if let Some(of) = resume.after.filter(|after| *after != locked.attempt) {
        return Err(Refusal::AttemptSuperseded { attempt: locked.attempt, of });
    }
    if locked.attempt >= session.max_attempts { Err(Refusal::NoAttemptsLeft(locked.attempt)) } else { Ok(()) }
}

/// Sweep: parks an open session whose agent makes no calls, if it may be resumed, which it may not after a reset. Returns
/// whether it is parked.
pub struct ParkSession {
    pub session_id: SessionId,
    pub now: Timestamp,
}

#[async_trait]
impl Op for ParkSession {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        const PARK: Statement = Statement::new(
            "-- park_session
            UPDATE session
            SET state = 'parked', due_us = expires_us
            WHERE session_id = $1 AND state = 'open' AND due_us <= $2 AND expires_us > $2 AND attempt < max_attempts
                AND NOT EXISTS (
                    SELECT 1
                    FROM session_policy AS sp
                    JOIN policy AS p ON p.policy_pk = sp.policy_pk
                    WHERE sp.session_pk = session.session_pk AND p.run <> sp.run
                )
            RETURNING session_pk",
        );
        let values = args![self.session_id.as_bytes(), self.now];
        let Some(mut row) = tx.fetch_optional(PARK, values).await? else { return Ok(false) };
        parked(tx, row.get("session_pk")?, self.now).await?;
        Ok(true)
    }
}

#[async_trait]
impl Op for ReplayCall {
    type Output = Result<Option<StoredAnswer>, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_USES: Statement = among_keys!(
            "-- select_uses_of_calls
            SELECT call_pk, seq, attempt, used_in, delivered
            FROM session_call
            WHERE session_pk = $2 AND seq"
        );
        const USE_CALL: Statement = Statement::new(
            "-- use_call
            UPDATE session_call
            SET used_in = $2, delivered = 0, retry_count = $3, body_digest = $4, dialect = $5
            WHERE call_pk = $1 AND used_in < $2",
        );
        const KEEP_RESUMED: Statement = Statement::new(
            "-- keep_resumed_session
            UPDATE session
            SET last_call_us = $2, due_us = $3
            WHERE session_pk = $1 AND state IN ('open', 'finishing')",
        );
        let Some(session) = Recording::lock(tx, self.session_pk).await? else {
            return Ok(Err(Refusal::Unknown("the session")));
        };
        if let Err(refusal) = session.check_attempt(self.attempt) {
            return Ok(Err(refusal));
        }
        // Its end may have read already which calls are used.
        if !session.state.takes_calls() {
            return Ok(Err(Refusal::SessionEnded(session.state)));
        }
        let numbers = key_list(self.equal.iter().chain(&self.before).map(|seq| i64::from(*seq)));
        let mut uses = Vec::new();
        for mut row in tx.fetch_all(SELECT_USES, args![numbers, self.session_pk]).await? {
            let call = RecordedCall { call_pk: row.get("call_pk")?, seq: row.get("seq")? };
            let was_lost = row.get::<u32>("delivered")? == Delivery::Lost.code();
            uses.push(Use { call, attempt: row.get("attempt")?, used_in: row.get("used_in")?, was_lost });
        }
        let Some(call) = replayed(self, &uses) else { return Ok(Ok(None)) };
        let digest = &self.body_digest[..];
        let values = args![call.call_pk, self.attempt, self.retry_count, digest, self.dialect.as_str()];
        tx.guarded(USE_CALL, values, 1).await?;
        let due_at = session.due_at(self.now);
        unpark(tx, self.session_pk, session.state, due_at).await?;
        tx.guarded(KEEP_RESUMED, args![self.session_pk, self.now, due_at], 1).await?;
        calls::answer(tx, call).await.map(|answer| Ok(Some(answer)))
    }
}

/// The attempts that used a call.
struct Use {
    call: RecordedCall,
    /// The one that recorded it.
    attempt: u32,
    /// The last one.
    used_in: u32,
    /// Whether the last one did not receive its answer.
    was_lost: bool,
}

/// The recorded call that a call is answered with. What an engine has answered in this attempt, the agent has not seen in
/// earlier ones, so a call behind it is a new one, even if its prompt happens to be equal. Of several equal calls those
/// come first that the last attempt has used, of these those whose answers it may have received, and then the one that came
/// first.
fn replayed(call: &ReplayCall, uses: &[Use]) -> Option<RecordedCall> {
    let is_before = |of: &&Use| call.before.contains(&of.call.seq);
    let is_new = |of: &Use| of.attempt == call.attempt;
    let is_replayed = |of: &Use| !is_new(of) && of.used_in == call.attempt;
    let before: Vec<&Use> = uses.iter().filter(is_before).collect();
    if before.iter().any(|of| is_new(of)) && !before.iter().any(|of| is_replayed(of)) {
        return None;
    }
    let unused = uses.iter().filter(|of| call.equal.contains(&of.call.seq) && of.used_in < call.attempt);
    unused.max_by_key(|of| (of.used_in, !of.was_lost, Reverse(of.call.seq))).map(|of| of.call)
}

#[async_trait]
impl Op for SaveState {
    type Output = Result<forebay_wire::SavedState, Refusal>;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.content.len()
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SAVE_STATE: Statement = Statement::new(
            "-- put_session_saved
            INSERT INTO session_saved (session_pk, seq, attempt, content, stored_us)
            VALUES ($1, $2, $3, $4, $5)
            ON CONFLICT (session_pk) DO UPDATE
            SET seq = excluded.seq, attempt = excluded.attempt, content = excluded.content, stored_us = excluded.stored_us",
        );
        let unknown = Ok(Err(Refusal::Unknown("the session")));
        let Some(found) = FindSession(self.session_id).run(tx).await? else { return unknown };
        let Some(session) = Recording::lock(tx, found.session_pk).await? else { return unknown };
        if let Err(refusal) = session.check_attempt(self.attempt.unwrap_or(session.attempt)) {
            return Ok(Err(refusal));
        }
        let seq = self.call.unwrap_or(session.calls);
        if seq > session.calls {
            let detail = format!("the session has recorded {} calls, so none has the number {seq}", session.calls);
            return Ok(Err(Refusal::invalid("/call", detail)));
        }
        let values = args![found.session_pk, seq, session.attempt, &self.content[..], self.now];
        tx.guarded(SAVE_STATE, values, 1).await?;
        Ok(Ok(forebay_wire::SavedState {
            call: seq,
            attempt: session.attempt,
            bytes: self.content.len() as u64,
            stored_at: self.now.to_string(),
        }))
    }
}

/// What was stored last of a session to go on from.
pub struct FindSavedState(pub SessionId);

#[async_trait]
impl Op for FindSavedState {
    type Output = Option<SavedState>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const FIND_SAVED: Statement = Statement::new(
            "-- find_session_saved
            SELECT f.seq, f.attempt, f.content
            FROM session AS s
            JOIN session_saved AS f ON f.session_pk = s.session_pk
            WHERE s.session_id = $1",
        );
        let Some(mut row) = tx.fetch_optional(FIND_SAVED, args![self.0.as_bytes()]).await? else { return Ok(None) };
        Ok(Some(SavedState { seq: row.get("seq")?, attempt: row.get("attempt")?, content: row.get("content")? }))
    }
}

#[cfg(test)]
mod tests {
    use forebay_domain::ids::{CallPk, SessionPk};

    use super::*;

    fn of(seq: u32, attempt: u32, used_in: u32) -> Use {
        Use { call: RecordedCall { call_pk: CallPk(seq.into()), seq }, attempt, used_in, was_lost: false }
    }

    fn found(attempt: u32, equal: &[u32], before: &[u32], uses: &[Use]) -> Option<u32> {
        let call = ReplayCall {
            session_pk: SessionPk(1),
            attempt,
            equal: equal.to_vec(),
            before: before.to_vec(),
            dialect: "chat".to_owned(),
            body_digest: [0; 32],
            retry_count: 0,
            now: Timestamp::from_micros(0),
        };
        replayed(&call, uses).map(|call| call.seq)
    }

    #[test]
    fn a_call_is_replayed_once_in_each_attempt_and_those_of_the_last_attempt_come_first() {
        let equal = [of(1, 1, 1), of(2, 1, 1), of(3, 1, 2)];
        assert_eq!(found(2, &[1, 2, 3], &[], &equal), Some(1));
        assert_eq!(found(3, &[1, 2, 3], &[], &equal), Some(3));
        assert_eq!(found(2, &[3], &[], &equal), None);
        assert_eq!(found(2, &[], &[], &equal), None);
        // The agent sent it again, because it did not receive the first answer.
        let lost = [Use { was_lost: true, ..of(1, 1, 1) }, of(2, 1, 1)];
        assert_eq!(found(2, &[1, 2], &[], &lost), Some(2));
    }

    #[test]
    fn nothing_is_replayed_behind_an_answer_that_the_agent_got_in_this_attempt() {
        // The second call continues the first, and the third is the first one sampled anew.
        let uses = |first_used_in| [of(1, 1, first_used_in), of(2, 1, 1), of(3, 2, 2)];
        assert_eq!(found(2, &[2], &[1, 3], &uses(1)), None);
        // The agent has both answers, which are equal, and may mean either.
        assert_eq!(found(2, &[2], &[1, 3], &uses(2)), Some(2));
        // An agent that knows its conversation from a file begins in the middle.
        assert_eq!(found(3, &[2], &[1, 3], &uses(1)), Some(2));
    }
}
