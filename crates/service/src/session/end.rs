//! The end of a session: its calls are assembled, and its rollouts are ingested in the transaction that ends it.
//!
//! A session that is refused its end is open again: nothing changed. If calls were recorded while a session was
//! assembled, or another request ended it, it is looked at again.

use std::time::Duration;

use forebay_domain::{
    clock::Timestamp,
    ids::{ExecutionId, SessionId},
    ingest::Bundle,
    refusal::Refusal,
    session::{Session, without_indexes},
};
use forebay_store::{
    error::StoreError,
    ops::session::{
        BeginFinish, FindSession, ReopenSessions, attempts::ParkSession, calls::FindUnmarked, sweep::DueSessions,
    },
};
use forebay_wire::Violation;
use tokio::time::Instant;
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    ingest,
    session::{
        ending::{Abort, Ended, Ending, Finish, How},
        rollouts::{self, OfPolicy},
        teacher,
    },
};

/// How long a finish waits for other replicas to mark the answers that they have just sent. They do so several times a
/// second.
const DELIVERY_WAIT: Duration = Duration::from_secs(1);

/// How often it looks for these marks.
const DELIVERY_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Seconds after which an answer that is not marked was probably sent by a process that was killed.
const DELIVERY_S: u64 = 2;

/// How often the end of sessions is tried if they keep changing.
const ATTEMPTS_MAX: u32 = 8;

impl Buffer {
    /// Finishes sessions, all or none: their rollouts are ingested as one bundle.
    #[instrument(level = "debug", skip_all)]
    pub async fn finish_sessions(&self, finishes: Vec<Finish>) -> Result<Vec<Ended>, BufferError> {
        let wanted =
            finishes.into_iter().map(|finish| Ending { session_id: finish.session_id, how: How::Finish(finish) });
        end_all(self, &wanted.collect::<Vec<_>>()).await
    }

    /// Ends a session without a reward.
    #[instrument(level = "debug", skip_all, fields(session.id = %abort.session_id))]
    pub async fn abort_session(&self, abort: Abort) -> Result<Ended, BufferError> {
        let Abort { session_id, reason, keep, attempt } = abort;
        let ended = end_all(self, &[Ending { session_id, how: How::Abort { reason, keep, attempt } }]).await?.pop();
        Ok(ended.ok_or(StoreError::Closed)?)
    }
}

/// Parks or ends sessions that are due, up to `limit`. A session with calls in flight in this process is not idle.
pub(crate) async fn expire(buffer: &Buffer, limit: u32) -> Result<(), StoreError> {
    let now = buffer.clock.now();
    for session_id in buffer.store.read(DueSessions { now, limit }).await? {
        let is_busy = buffer.in_flight.has_calls(session_id);
        if is_busy && buffer.store.read(FindSession(session_id)).await?.is_some_and(|session| now < session.expires_at)
        {
            continue;
        }
        if buffer.store.write(ParkSession { session_id, now }).await? {
            tracing::info!(session.id = %session_id, "a session was parked: its agent makes no calls, and can be resumed");
            continue;
        }
        let mut outcome = end_all(buffer, &[Ending { session_id, how: How::Expire { posts: true } }]).await;
        if let Err(BufferError::Refused(refusal)) = &outcome
            && !is_over(refusal)
        {
            // For example, another rollout with its id was posted meanwhile.
            tracing::warn!(reason = %refusal, session.id = %session_id, "a session expired without a rollout");
            outcome = end_all(buffer, &[Ending { session_id, how: How::Expire { posts: false } }]).await;
        }
        match outcome {
            Err(BufferError::Refused(refusal)) if is_over(&refusal) => {}
            // One session that cannot be ended must not hold up the others.
            Err(error) => tracing::error!(error = %error, session.id = %session_id, "a session cannot be expired"),
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Whether a refusal means that a session is no longer due.
fn is_over(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::SessionEnded(_) | Refusal::SessionChanged | Refusal::Unknown(_))
}

/// Ends sessions, all or none.
async fn end_all(buffer: &Buffer, wanted: &[Ending]) -> Result<Vec<Ended>, BufferError> {
    let mut stopped = Vec::new();
    let outcome = end_stable(buffer, wanted, &mut stopped).await;
    if outcome.is_err() && !stopped.is_empty() {
        // Nothing changed, so the agents may go on.
        buffer.store.write(ReopenSessions(stopped)).await?;
    }
    outcome
}

/// Tries to end sessions until no call is recorded and no other request ends one of them meanwhile. `stopped` receives
/// the sessions that took calls before.
async fn end_stable(
    buffer: &Buffer,
    wanted: &[Ending],
    stopped: &mut Vec<SessionId>,
) -> Result<Vec<Ended>, BufferError> {
    for _ in 0..ATTEMPTS_MAX {
        let mut found = Vec::with_capacity(wanted.len());
        for (index, one) in wanted.iter().enumerate() {
            let session =
                buffer.store.read(FindSession(one.session_id)).await?.ok_or(Refusal::Unknown("the session"))?;
            let checked = one.check(&session, buffer.clock.now());
            checked.map_err(|refusal| of_one(refusal.into(), index, wanted.len()))?;
            found.push(session);
        }
        if wanted.iter().any(|one| !matches!(one.how, How::Expire { .. })) {
            let open = found.iter().filter(|session| session.state.takes_calls());
            stopped.extend(open.map(|session| session.session_id));
            let sessions = wanted.iter().map(|one| one.session_id).collect();
            let begin = BeginFinish { sessions, now: buffer.clock.now() };
            found = buffer.store.write(begin).await??;
        }
        match end_found(buffer, wanted, found).await {
            // The sessions are looked at again: another request may have ended them with the same content.
            Err(BufferError::Refused(Refusal::SessionChanged | Refusal::SessionEnded(_))) => {}
            outcome => return outcome,
        }
    }
    Err(Refusal::SessionChanged.into())
}

/// Ends sessions that take no new calls. Those that have ended before are answered as they were then.
async fn end_found(buffer: &Buffer, wanted: &[Ending], found: Vec<Session>) -> Result<Vec<Ended>, BufferError> {
    let mut answers: Vec<Option<Ended>> = Vec::with_capacity(found.len());
    for (one, session) in wanted.iter().zip(&found) {
        answers.push(one.ended(session)?);
    }
    for ((one, session), _) in wanted.iter().zip(&found).zip(&answers).filter(|(_, answer)| answer.is_none()) {
        buffer.in_flight.settle(session.session_id, one.wait()).await;
        buffer.delivered.give_up(session.session_id);
    }
    buffer.flush_delivered().await?;
    for ((one, session), _) in wanted.iter().zip(&found).zip(&answers).filter(|(_, answer)| answer.is_none()) {
        settle_delivery(buffer, session, one.wait().min(DELIVERY_WAIT)).await?;
    }
    let mut bundle = Bundle::default();
    let execution = ExecutionId::mint();
    let mut assembled = Vec::new();
    for (index, (one, session)) in wanted.iter().zip(found).enumerate() {
        if answers[index].is_some() {
            continue;
        }
        let Some(session) = buffer.store.read(FindSession(session.session_id)).await? else {
            return Err(Refusal::Unknown("the session").into());
        };
        if let Some(ended) = one.ended(&session)? {
            answers[index] = Some(ended);
            continue;
        }
        // Another attempt may have begun, or a call may have opened a parked session.
        one.check(&session, buffer.clock.now())?;
        let done = rollouts::assemble(buffer, one, &session).await;
        assembled.push((index, done.map_err(|error| of_one(error, index, wanted.len()))?));
    }
    // All sessions are assembled before, so that nothing is scored if one of them has no turns.
    teacher::score(buffer, assembled.iter_mut().flat_map(|(_, one)| &mut one.rollouts)).await?;
    let mut owners = Vec::new();
    let mut ending = Vec::new();
    for (index, one) in assembled {
        let by_policy = one.by_policy.clone();
        let packed = rollouts::pack(buffer, one, &execution).await;
        let (rollouts, end) = packed.map_err(|error| of_one(error, index, wanted.len()))?;
        owners.extend(rollouts.iter().map(|_| index));
        bundle.rollouts.extend(rollouts);
        bundle.ends.push(end);
        ending.push((index, by_policy));
    }
    if !bundle.ends.is_empty() {
        let ends = bundle.ends.clone();
        let stored = ingest::ingest_bundles(buffer, vec![bundle]).await?.pop().ok_or(StoreError::Closed)?;
        let stored = stored.map_err(|refusal| of_request(refusal, &owners, wanted.len()))?;
        let mut rest = stored.as_slice();
        for ((index, by_policy), end) in ending.into_iter().zip(&ends) {
            let (own, others) = rest.split_at(end.rollouts.min(rest.len()));
            rest = others;
            report(buffer, wanted[index].session_id, &by_policy);
            answers[index] = Some(Ended {
                session_id: wanted[index].session_id,
                state: end.state,
                reason: end.reason.clone(),
                duplicate: false,
                outcome: end.outcome(own),
            });
        }
    }
    Ok(answers.into_iter().flatten().collect())
}

/// Waits until other replicas have marked the answers that they have just sent.
async fn settle_delivery(buffer: &Buffer, session: &Session, wait: Duration) -> Result<(), StoreError> {
    let deadline = Instant::now() + wait;
    let recent = Timestamp::from_micros(buffer.clock.now().as_micros() - 1_000_000 * DELIVERY_S as i64);
    while buffer.replicas.is_some()
        && Instant::now() < deadline
        && buffer.store.read(FindUnmarked { session: session.session_pk, ended_after: recent }).await?
    {
        tokio::time::sleep(DELIVERY_POLL_INTERVAL).await;
    }
    Ok(())
}

/// Makes the pointers of a refusal of one session those of the request, which is a list if it names several.
fn of_one(error: BufferError, index: usize, sessions: usize) -> BufferError {
    match error {
        BufferError::Refused(Refusal::Invalid(mut violations)) if sessions > 1 => {
            for violation in &mut violations {
                violation.pointer.insert_str(0, &format!("/{index}"));
            }
            Refusal::Invalid(violations).into()
        }
        other => other,
    }
}

/// Makes the pointers and indexes of a refusal those of the request.
fn of_request(refusal: Refusal, owners: &[usize], sessions: usize) -> Refusal {
    let owner = |index: usize| owners.get(index).copied().unwrap_or(0);
    match refusal {
        Refusal::Invalid(_) if sessions == 1 => without_indexes(refusal),
        Refusal::Invalid(violations) => {
            Refusal::Invalid(violations.into_iter().map(|violation| of_session(violation, &owner)).collect())
        }
        Refusal::RolloutConflict { rollout_id, index, verdict } => {
            Refusal::RolloutConflict { rollout_id, index: owner(index), verdict }
        }
        Refusal::GroupSizeConflict { group_id, index, size } => {
            Refusal::GroupSizeConflict { group_id, index: owner(index), size }
        }
        other => other,
    }
}

/// Replaces the index of a rollout, which the pointer begins with, by that of its session.
fn of_session(violation: Violation, owner: &impl Fn(usize) -> usize) -> Violation {
    let rest = violation.pointer.strip_prefix('/').and_then(|pointer| pointer.split_once('/'));
    let pointer = rest.and_then(|(index, rest)| Some(format!("/{}/{rest}", owner(index.parse().ok()?))));
    Violation { pointer: pointer.unwrap_or(violation.pointer), ..violation }
}

/// Counts what became of a session.
fn report(buffer: &Buffer, session_id: SessionId, by_policy: &[OfPolicy]) {
    buffer.call_paths.forget(session_id);
    for OfPolicy { policy, totals, causes } in by_policy {
        let tokens = &totals.dropped_tokens;
        let dropped = [
            ("undelivered", tokens.undelivered),
            ("retry", tokens.retry),
            ("abandoned", tokens.abandoned),
            ("aborted", tokens.aborted),
            ("trimmed", totals.trimmed),
        ];
        buffer.metrics.session_ended(policy.as_str(), &dropped, causes);
    }
}
