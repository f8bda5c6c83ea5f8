//! The end of a session: its calls are assembled, and its rollouts are ingested in the transaction that ends it.
//!
//! A session that is refused its end is open again: nothing changed. If calls were recorded while a session was
//! assembled, or another request ended it, it is looked at again.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use forebay_client::wire::{self, Requirement, SessionAssembly, Status, Violation};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::{
    WAIT_MS_MAX,
    calls::{self, Assembled, SessionCalls, circular, one_of_few},
    record::flush_delivered,
    teacher, without_indexes,
};
use crate::{
    buffer::{
        Buffer,
        canonical::{ContentDigest, Hasher, check_json},
        formats::codes,
        ids::{ExecutionId, ID_BYTES_MAX, PolicyName, SessionId},
        ingest,
        port::{Bundle, EndSession, Session, SessionOutcome, SessionPolicy, StoreError},
        reasons,
        refusal::{BufferError, Refusal},
        states::SessionState,
    },
    clock::Timestamp,
};

/// How long a finish waits for calls in flight, if it does not say.
const WAIT_MS: u64 = 5_000;

/// How long a finish waits for other replicas to mark the answers that they have just delivered. They do so several times
/// a second.
const DELIVERY_WAIT: Duration = Duration::from_secs(1);

/// How often it looks for these marks.
const DELIVERY_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Seconds after which an answer that is not marked as delivered was probably not delivered.
const DELIVERY_S: u64 = 2;

/// How often the end of sessions is tried if they keep changing.
const ATTEMPTS_MAX: u32 = 8;

/// A request to finish a session, valid in itself.
#[derive(Clone, Debug)]
pub struct Finish {
    session_id: SessionId,
    sent: Arc<wire::SessionFinish>,
    rewards: BTreeMap<PolicyName, f64>,
    content: ContentDigest,
}

/// A request to end a session without a reward, valid in itself.
#[derive(Clone, Debug)]
pub struct Abort {
    /// The session.
    pub session_id: SessionId,
    /// Why.
    pub reason: String,
    /// Whether the trajectories have segments.
    pub keep: bool,
}

/// A session that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its id.
    pub session_id: SessionId,
    /// Its state.
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    /// Whether it had ended before.
    pub duplicate: bool,
    /// The answer of the request that ended it.
    pub outcome: SessionOutcome,
}

impl Finish {
    /// Checks a request; a refusal has every violation.
    pub fn parse(buffer: &Buffer, sent: wire::SessionFinish) -> Result<Self, Refusal> {
        let session_id = sent.session_id.parse().map_err(|_| Refusal::Unknown("the session"))?;
        let mut violations = Vec::new();
        let mut require = |holds: bool, pointer: &str, detail: String| {
            if !holds {
                violations.push(Violation { pointer: pointer.to_owned(), detail });
            }
        };
        require(sent.reward.is_none_or(f64::is_finite), "/reward", "must be finite".to_owned());
        let wait = sent.wait_ms.is_none_or(|wait_ms| wait_ms <= WAIT_MS_MAX);
        require(wait, "/wait_ms", format!("must be at most {WAIT_MS_MAX}"));
        let mut rewards = BTreeMap::new();
        for (policy, reward) in &sent.rewards {
            require(reward.is_finite(), &format!("/rewards/{policy}"), "must be finite".to_owned());
            match PolicyName::parse(policy) {
                Ok(policy) => drop(rewards.insert(policy, *reward)),
                Err(error) => require(false, &format!("/rewards/{policy}"), error.to_string()),
            }
        }
        let mut metadata = None;
        if let Some(raw) = &sent.metadata {
            let max = buffer.options.limits.metadata_bytes_max;
            require(raw.get().len() <= max, "/metadata", format!("must be at most {max} bytes"));
            match check_json(raw) {
                Ok(json) => {
                    require(raw.get().trim_start().starts_with('{'), "/metadata", "must be an object".to_owned());
                    metadata = Some(json.digest);
                }
                Err(detail) => require(false, "/metadata", detail),
            }
        }
        if !violations.is_empty() {
            return Err(Refusal::Invalid(violations));
        }
        let content = digest(&sent, metadata);
        Ok(Self { session_id, sent: Arc::new(sent), rewards, content })
    }

    /// The session.
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.session_id
    }

    /// Refuses rewards of policies that the session does not have.
    fn check(&self, session: &Session) -> Result<(), Refusal> {
        let is_known = |name: &PolicyName| session.policies.iter().any(|policy| policy.policy == *name);
        match self.rewards.keys().find(|name| !is_known(name)) {
            Some(name) => Err(Refusal::invalid(format!("/rewards/{name}"), "the session has no such policy")),
            None => Ok(()),
        }
    }
}

fn digest(sent: &wire::SessionFinish, metadata: Option<ContentDigest>) -> ContentDigest {
    let mut hasher = Hasher::default();
    hasher.text("finish");
    hasher.option(sent.reward, |hasher, reward| hasher.float(reward + 0.0));
    for components in [&sent.rewards, &sent.reward_components] {
        hasher.int(components.len() as i64);
        for (name, value) in components {
            hasher.text(name);
            hasher.float(*value + 0.0);
        }
    }
    hasher.option(sent.status, |hasher, status| hasher.tag(codes::of_status(status)));
    hasher.option(metadata, Hasher::digest);
    hasher.finish()
}

/// How a session ends.
#[derive(Clone)]
enum How {
    Finish(Finish),
    Abort {
        reason: String,
        keep: bool,
    },
    /// `posts` says whether its rollouts are posted.
    Expire {
        posts: bool,
    },
}

/// A session to end.
#[derive(Clone)]
struct Wanted {
    session_id: SessionId,
    how: How,
}

impl Wanted {
    fn state(&self) -> SessionState {
        match self.how {
            How::Finish(_) => SessionState::Finished,
            How::Abort { .. } => SessionState::Aborted,
            How::Expire { .. } => SessionState::Expired,
        }
    }

    fn reason(&self) -> Option<String> {
        match &self.how {
            How::Finish(_) => None,
            How::Abort { reason, .. } => Some(reason.clone()),
            How::Expire { .. } => Some(reasons::SESSION_EXPIRED.to_owned()),
        }
    }

    fn content(&self) -> ContentDigest {
        let mut hasher = Hasher::default();
        match &self.how {
            How::Finish(finish) => return finish.content,
            How::Abort { reason, keep } => {
                hasher.text("abort");
                hasher.text(reason);
                hasher.tag(u8::from(*keep));
            }
            How::Expire { .. } => hasher.text("expire"),
        }
        hasher.finish()
    }

    fn keeps_segments(&self) -> bool {
        match self.how {
            How::Finish(_) => true,
            How::Abort { keep, .. } => keep,
            How::Expire { .. } => false,
        }
    }

    fn wait(&self) -> Duration {
        let ms = match &self.how {
            How::Finish(finish) => finish.sent.wait_ms.unwrap_or(WAIT_MS),
            How::Abort { .. } | How::Expire { .. } => 0,
        };
        Duration::from_millis(ms)
    }

    /// Refuses what can be refused without reading the calls.
    fn check(&self, session: &Session, now: Timestamp) -> Result<(), Refusal> {
        self.ended(session)?;
        match &self.how {
            How::Finish(finish) => finish.check(session),
            // A call may have been recorded since the session was due.
            How::Expire { .. } if session.due_at.is_some_and(|due_at| due_at > now) => Err(Refusal::SessionChanged),
            How::Abort { .. } | How::Expire { .. } => Ok(()),
        }
    }

    /// The answer if the session has ended before by the same request; none if it has not ended.
    fn ended(&self, session: &Session) -> Result<Option<Ended>, Refusal> {
        if session.state.is_live() {
            return Ok(None);
        }
        if session.state != self.state() {
            return Err(Refusal::SessionEnded(session.state));
        }
        if session.end != Some(self.content()) {
            return Err(Refusal::EndConflict(session.state));
        }
        let outcome = session.outcome.clone().ok_or(Refusal::SessionEnded(session.state))?;
        Ok(Some(Ended {
            session_id: session.session_id,
            state: session.state,
            reason: session.reason.clone(),
            duplicate: true,
            outcome,
        }))
    }
}

pub(in crate::buffer) async fn finish(buffer: &Buffer, finishes: Vec<Finish>) -> Result<Vec<Ended>, BufferError> {
    let wanted = finishes.into_iter().map(|finish| Wanted { session_id: finish.session_id, how: How::Finish(finish) });
    end_all(buffer, &wanted.collect::<Vec<_>>()).await
}

pub(in crate::buffer) async fn abort(buffer: &Buffer, abort: Abort) -> Result<Ended, BufferError> {
    let Abort { session_id, reason, keep } = abort;
    let ended = end_all(buffer, &[Wanted { session_id, how: How::Abort { reason, keep } }]).await?.pop();
    Ok(ended.ok_or(StoreError::Closed)?)
}

/// Ends sessions that are due, up to `limit`. A session with calls in flight in this process is not idle.
pub(in crate::buffer) async fn expire(buffer: &Buffer, limit: u32) -> Result<(), StoreError> {
    let now = buffer.clock.now();
    for session_id in buffer.store.due_sessions(now, limit).await? {
        let is_busy = buffer.in_flight.has_calls(session_id);
        if is_busy && buffer.store.session(session_id).await?.is_some_and(|session| now < session.expires_at) {
            continue;
        }
        let mut outcome = end_all(buffer, &[Wanted { session_id, how: How::Expire { posts: true } }]).await;
        if let Err(BufferError::Refused(refusal)) = &outcome
            && !is_over(refusal)
        {
            // For example, another rollout with its id was posted meanwhile.
            tracing::warn!(reason = %refusal, session.id = %session_id, "a session expired without a rollout");
            outcome = end_all(buffer, &[Wanted { session_id, how: How::Expire { posts: false } }]).await;
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
async fn end_all(buffer: &Buffer, wanted: &[Wanted]) -> Result<Vec<Ended>, BufferError> {
    let mut stopped = Vec::new();
    let outcome = end_stable(buffer, wanted, &mut stopped).await;
    if outcome.is_err() && !stopped.is_empty() {
        // Nothing changed, so the agents may go on.
        buffer.store.reopen_sessions(stopped).await?;
    }
    outcome
}

/// Tries to end sessions until no call is recorded and no other request ends one of them meanwhile. `stopped` receives
/// the sessions that were open before.
async fn end_stable(
    buffer: &Buffer,
    wanted: &[Wanted],
    stopped: &mut Vec<SessionId>,
) -> Result<Vec<Ended>, BufferError> {
    for _ in 0..ATTEMPTS_MAX {
        let mut found = Vec::with_capacity(wanted.len());
        for one in wanted {
            let session = buffer.store.session(one.session_id).await?.ok_or(Refusal::Unknown("the session"))?;
            one.check(&session, buffer.clock.now())?;
            found.push(session);
        }
        if wanted.iter().any(|one| !matches!(one.how, How::Expire { .. })) {
            let open = found.iter().filter(|session| session.state == SessionState::Open);
            stopped.extend(open.map(|session| session.session_id));
            found = buffer.store.begin_finish(wanted.iter().map(|one| one.session_id).collect()).await??;
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
async fn end_found(buffer: &Buffer, wanted: &[Wanted], found: Vec<Session>) -> Result<Vec<Ended>, BufferError> {
    let mut answers: Vec<Option<Ended>> = Vec::with_capacity(found.len());
    for (one, session) in wanted.iter().zip(&found) {
        answers.push(one.ended(session)?);
    }
    for ((one, session), _) in wanted.iter().zip(&found).zip(&answers).filter(|(_, answer)| answer.is_none()) {
        buffer.in_flight.settle(session.session_id, one.wait()).await;
    }
    flush_delivered(buffer).await?;
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
        let Some(session) = buffer.store.session(session.session_id).await? else {
            return Err(Refusal::Unknown("the session").into());
        };
        if let Some(ended) = one.ended(&session)? {
            answers[index] = Some(ended);
            continue;
        }
        assembled.push((index, assemble(buffer, one, &session).await?));
    }
    // All sessions are assembled before, so that nothing is scored if one of them has no turns.
    teacher::score(buffer, assembled.iter_mut().flat_map(|(_, one)| &mut one.rollouts)).await?;
    let mut owners = Vec::new();
    let mut ending = Vec::new();
    for (index, one) in assembled {
        let by_policy = one.by_policy.clone();
        let (rollouts, end) = pack(buffer, one, &execution).await?;
        owners.extend(rollouts.iter().map(|_| index));
        bundle.rollouts.extend(rollouts);
        bundle.ends.push(end);
        ending.push((index, by_policy));
    }
    if !bundle.ends.is_empty() {
        let ends = bundle.ends.clone();
        let stored = ingest::ingest_all(buffer, vec![bundle]).await?.pop().ok_or(StoreError::Closed)?;
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

/// Waits until other replicas have marked the answers that they have just delivered.
async fn settle_delivery(buffer: &Buffer, session: &Session, wait: Duration) -> Result<(), StoreError> {
    let deadline = Instant::now() + wait;
    let recent = Timestamp::from_micros(buffer.clock.now().as_micros() - 1_000_000 * DELIVERY_S as i64);
    while buffer.replicas.is_some()
        && Instant::now() < deadline
        && buffer.store.has_undelivered(session.session_pk, recent).await?
    {
        tokio::time::sleep(DELIVERY_POLL_INTERVAL).await;
    }
    Ok(())
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
fn report(buffer: &Buffer, session_id: SessionId, by_policy: &[(PolicyName, SessionAssembly)]) {
    buffer.call_paths.forget(session_id);
    for (policy, totals) in by_policy {
        let tokens = &totals.dropped_tokens;
        let dropped = [
            ("undelivered", tokens.undelivered),
            ("retry", tokens.retry),
            ("aborted", tokens.aborted),
            ("trimmed", totals.trimmed),
        ];
        buffer.metrics.session_ended(policy.as_str(), &dropped, totals.breaks);
    }
}

/// The rollouts of a session, and its end.
struct Assembling {
    rollouts: Vec<AssembledRollout>,
    end: EndSession,
    by_policy: Vec<(PolicyName, SessionAssembly)>,
}

/// A rollout that is not packed yet.
pub(super) struct AssembledRollout {
    /// Its session.
    pub(super) session_id: SessionId,
    /// Its policy.
    pub(super) policy: PolicyName,
    /// The teacher that scores its segments.
    pub(super) teacher: Option<String>,
    /// What is ingested.
    pub(super) trajectory: wire::Trajectory,
}

/// Assembles the rollouts of a session.
async fn assemble(buffer: &Buffer, wanted: &Wanted, session: &Session) -> Result<Assembling, BufferError> {
    // A rollout of a run that has ended belongs to no run.
    let (current, reset): (Vec<&SessionPolicy>, Vec<_>) =
        session.policies.iter().partition(|policy| policy.run == policy.current_run);
    if let (Some(policy), How::Finish(_)) = (reset.first(), &wanted.how) {
        return Err(Refusal::SessionReset(policy.policy.clone()).into());
    }
    let mut assembled: Vec<Assembled> = current.iter().map(|policy| dropped_whole(policy)).collect();
    let mut teachers = vec![None; current.len()];
    if wanted.keeps_segments() && session.calls > 0 {
        let mut policies = Vec::with_capacity(current.len());
        let mut without_segments = Vec::new();
        for (index, policy) in current.iter().enumerate() {
            let rules = calls::rules(buffer, &policy.policy).await?;
            match &wanted.how {
                How::Finish(_) => teachers[index].clone_from(&rules.sessions.teacher),
                // An abort does not wait for a teacher, so it has no scores that the policy could require.
                _ if rules.require.contains(&Requirement::TeacherLogprobs) => without_segments.push(index),
                _ => {}
            }
            policies.push((policy.policy.clone(), rules.sessions.retries));
        }
        let _few = one_of_few().await?;
        let calls = SessionCalls::read(buffer, session.session_pk).await?;
        if calls.calls.len() as u32 != session.calls {
            return Err(Refusal::SessionChanged.into());
        }
        let assemble = move || policies.iter().map(|(policy, retries)| calls.assemble(policy, *retries)).collect();
        let done: Result<Vec<Assembled>, _> =
            tokio::task::spawn_blocking(assemble).await.map_err(|_| StoreError::Closed)?;
        assembled = done.map_err(|_| circular(session.session_id))?;
        for index in without_segments {
            assembled[index] = dropped_whole(current[index]);
        }
    }
    let of_current = current.iter().zip(&assembled).map(|(policy, one)| (policy.policy.clone(), one.totals));
    let of_reset = reset.iter().map(|policy| (policy.policy.clone(), dropped_whole(policy).totals));
    let by_policy: Vec<(PolicyName, SessionAssembly)> = of_current.chain(of_reset).collect();
    let mut totals = SessionAssembly::default();
    for (_, one) in &by_policy {
        calls::add(&mut totals, one);
    }
    if let How::Finish(finish) = &wanted.how
        && !matches!(finish.sent.status, Some(Status::Aborted | Status::Failed))
        && totals.segments == 0
    {
        return Err(Refusal::NoTurns.into());
    }
    let metadata = metadata(session, wanted)?;
    let posted = if matches!(wanted.how, How::Expire { posts: false }) { &[][..] } else { &current[..] };
    let rollouts: Vec<AssembledRollout> = posted
        .iter()
        .zip(assembled)
        .zip(teachers)
        .map(|((policy, assembled), teacher)| AssembledRollout {
            session_id: session.session_id,
            policy: policy.policy.clone(),
            teacher,
            trajectory: trajectory(session, policy, wanted, assembled.segments, metadata.clone()),
        })
        .collect();
    let end = EndSession {
        session_pk: session.session_pk,
        calls: session.calls,
        runs: current.iter().map(|policy| (policy.policy.clone(), policy.run)).collect(),
        state: wanted.state(),
        reason: wanted.reason(),
        request: wanted.content(),
        rollouts: rollouts.len(),
        assembly: totals,
        admissions: session.policies.iter().map(|policy| policy.admission_id).collect(),
    };
    Ok(Assembling { rollouts, end, by_policy })
}

/// Validates and packs the rollouts of a session. They belong to `execution` if the session was opened without one.
async fn pack(
    buffer: &Buffer,
    assembled: Assembling,
    execution: &ExecutionId,
) -> Result<(Vec<ingest::NewRollout>, EndSession), BufferError> {
    let trajectories = assembled.rollouts.into_iter().map(|rollout| rollout.trajectory).collect();
    let prepare = {
        let (buffer, execution) = (buffer.clone(), execution.clone());
        // The segments are there already, and no further memory is needed.
        move || ingest::prepare(&buffer, trajectories, &execution, &mut |_| true)
    };
    let rollouts = tokio::task::spawn_blocking(prepare).await.map_err(|_| StoreError::Closed)?;
    Ok((rollouts.map_err(without_indexes)?, assembled.end))
}

/// The totals of a policy whose segments are not kept.
fn dropped_whole(policy: &SessionPolicy) -> Assembled {
    let mut totals =
        SessionAssembly { calls: policy.calls.into(), sampled_tokens: policy.sampled, ..SessionAssembly::default() };
    (totals.dropped.aborted, totals.dropped_tokens.aborted) = (policy.calls.into(), policy.sampled);
    Assembled { segments: Vec::new(), totals }
}

/// The trajectory of a policy. Without a call, it is aborted: its group takes another rollout instead of waiting for it.
fn trajectory(
    session: &Session,
    policy: &SessionPolicy,
    wanted: &Wanted,
    segments: Vec<wire::Segment>,
    metadata: Option<Box<RawValue>>,
) -> wire::Trajectory {
    let spec = &session.spec;
    let mut trajectory = wire::Trajectory {
        policy: Some(policy.policy.to_string()),
        rollout_id: Some(spec.rollout_id.clone()),
        group_id: spec.group_id.clone(),
        group_size: spec.group_id.as_ref().map(|_| policy.group_size),
        environment: spec.environment.clone(),
        execution_id: spec.execution_id.clone(),
        policy_version: Some(policy.version.0),
        admission_id: Some(policy.admission_id.to_string()),
        status: Status::Aborted,
        sampling: spec.sampling,
        metadata,
        ..wire::Trajectory::default()
    };
    if let How::Finish(finish) = &wanted.how {
        let stated = finish.sent.status;
        let is_failure = matches!(stated, Some(Status::Aborted | Status::Failed));
        if is_failure || !segments.is_empty() {
            let whole = if session.is_full { Status::Truncated } else { Status::Completed };
            trajectory.status = stated.unwrap_or(whole);
            trajectory.reward = finish.rewards.get(&policy.policy).copied().or(finish.sent.reward);
            trajectory.reward_components = finish.sent.reward_components.clone();
        }
    }
    trajectory.segments = segments;
    trajectory
}

/// The metadata of the session, with the members that the finish adds or replaces. The spelling of values is kept.
fn metadata(session: &Session, wanted: &Wanted) -> Result<Option<Box<RawValue>>, Refusal> {
    let added = match &wanted.how {
        How::Finish(finish) => finish.sent.metadata.clone(),
        How::Abort { .. } | How::Expire { .. } => None,
    };
    let (opened, added) = match (session.spec.metadata.clone(), added) {
        (Some(opened), Some(added)) => (opened, added),
        (opened, added) => return Ok(opened.or(added)),
    };
    let members = |raw: &RawValue| serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(raw.get());
    let merged = members(&opened).and_then(|mut merged| {
        merged.extend(members(&added)?);
        serde_json::value::to_raw_value(&merged)
    });
    merged.map(Some).map_err(|_| Refusal::invalid("/metadata", "must be an object"))
}

impl Abort {
    /// Checks a request.
    pub fn parse(session_id: SessionId, sent: wire::AbortRequest) -> Result<Self, Refusal> {
        let wire::AbortRequest { reason, keep } = sent;
        if reason.is_empty() || reason.len() > ID_BYTES_MAX || reason.chars().any(char::is_control) {
            let detail = format!("must be 1 to {ID_BYTES_MAX} bytes without control characters");
            return Err(Refusal::invalid("/reason", detail));
        }
        Ok(Self { session_id, reason, keep })
    }
}
