//! The rollouts of a session that ends: its calls are assembled, and each policy gets a trajectory.

use std::{collections::BTreeMap, sync::Arc};

use forebay_bounds::work;
use forebay_domain::{
    ids::{ExecutionId, PolicyName, SessionId},
    ingest::new_rollout::{Marks, NewRollout},
    refusal::Refusal,
    session::{EndSession, Session, SessionPolicy, notes::SessionNotes, without_indexes},
    warnings::Warning,
};
use forebay_store::error::StoreError;
use forebay_wire::{self as wire, Requirement, SessionAssembly, Status, replace_lone_surrogates};
use serde_json::value::RawValue;

use crate::{
    Buffer,
    error::BufferError,
    ingest,
    session::{
        breaks::{self, CallBreak},
        calls::{SessionCalls, circular, one_of_few},
        ending::{Ending, Finish, How},
        messages,
        turns::{self, Assembled},
    },
};

/// The rollouts of a session, and its end.
pub(super) struct Assembling {
    pub(super) rollouts: Vec<AssembledRollout>,
    end: EndSession,
    pub(super) by_policy: Vec<OfPolicy>,
}

/// What became of the calls of one policy.
#[derive(Clone, Debug)]
pub(super) struct OfPolicy {
    pub(super) policy: PolicyName,
    pub(super) totals: SessionAssembly,
    /// Why its prompts break, once for each break.
    pub(super) causes: Vec<&'static str>,
}

/// A rollout that is not packed yet.
pub(super) struct AssembledRollout {
    pub(super) session_id: SessionId,
    pub(super) policy: PolicyName,
    /// The teacher that scores its segments.
    pub(super) teacher: Option<String>,
    marks: Marks,
    /// What is ingested.
    pub(super) trajectory: wire::Trajectory,
}

/// Assembles the rollouts of a session.
pub(super) async fn assemble(buffer: &Buffer, wanted: &Ending, session: &Session) -> Result<Assembling, BufferError> {
    // A rollout of a run that has ended belongs to no run.
    let (current, reset): (Vec<&SessionPolicy>, Vec<_>) =
        session.policies.iter().partition(|policy| policy.run == policy.current_run);
    if let (Some(policy), How::Finish(_)) = (reset.first(), &wanted.how) {
        return Err(Refusal::SessionReset(policy.policy.clone()).into());
    }
    let Parts { assembled, teachers, mut causes } = if wanted.keeps_segments() && session.calls > 0 {
        from_calls(buffer, wanted, session, &current).await?
    } else {
        // There is none that it could say something of.
        SessionCalls::default().said(wanted)?;
        Parts::without_calls(&current)
    };
    let of_current = current.iter().zip(&assembled).map(|(policy, one)| (policy.policy.clone(), one.totals));
    let of_reset = reset.iter().map(|policy| (policy.policy.clone(), dropped_whole(policy).totals));
    let of_policy = |(policy, totals): (PolicyName, SessionAssembly)| {
        let causes = causes.remove(&policy).unwrap_or_default();
        OfPolicy { policy, totals, causes }
    };
    let by_policy: Vec<OfPolicy> = of_current.chain(of_reset).map(of_policy).collect();
    let mut totals = SessionAssembly::default();
    for one in &by_policy {
        turns::add(&mut totals, &one.totals);
    }
    if let How::Finish(finish) = &wanted.how
        && !matches!(stated(session, finish), Some(Status::Aborted | Status::Failed))
        && assembled.iter().all(|one| one.segments.is_empty() && !one.marks.sampled_nothing)
    {
        return Err(Refusal::NoTurns.into());
    }
    let metadata = metadata(session, wanted)?;
    let posted = if matches!(wanted.how, How::Expire { posts: false }) { &[][..] } else { &current[..] };
    let rollouts: Vec<AssembledRollout> = posted
        .iter()
        .zip(assembled)
        .zip(teachers)
        .map(|((policy, assembled), teacher)| {
            let left_out = policy.warnings.iter().filter_map(|text| Warning::of_session(text));
            AssembledRollout {
                session_id: session.session_id,
                policy: policy.policy.clone(),
                teacher,
                marks: Marks {
                    of_session: session
                        .notes
                        .warnings()
                        .into_iter()
                        .chain(left_out)
                        .chain(assembled.marks.of_session.iter().cloned())
                        .collect(),
                    ..assembled.marks.clone()
                },
                trajectory: trajectory(session, policy, wanted, assembled, metadata.clone()),
            }
        })
        .collect();
    let end = EndSession {
        session_pk: session.session_pk,
        calls: session.calls,
        attempt: session.attempt,
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

/// What the calls of a session make of its policies; the first two lists have an entry for each.
struct Parts {
    assembled: Vec<Assembled>,
    /// The teachers that score the segments.
    teachers: Vec<Option<String>>,
    causes: BTreeMap<PolicyName, Vec<&'static str>>,
}

impl Parts {
    fn without_calls(policies: &[&SessionPolicy]) -> Self {
        let assembled = policies.iter().map(|policy| dropped_whole(policy)).collect();
        Self { assembled, teachers: vec![None; policies.len()], causes: BTreeMap::new() }
    }
}

/// Reads the calls of a session and assembles the segments of each of `current`.
async fn from_calls(
    buffer: &Buffer,
    wanted: &Ending,
    session: &Session,
    current: &[&SessionPolicy],
) -> Result<Parts, BufferError> {
    let mut teachers = vec![None; current.len()];
    let mut policies = Vec::with_capacity(current.len());
    let mut without_segments = Vec::new();
    let mut keeps_messages = Vec::with_capacity(current.len());
    for (index, policy) in current.iter().enumerate() {
        let rules = turns::rules(buffer, &policy.policy).await?;
        match &wanted.how {
            How::Finish(_) => teachers[index].clone_from(&rules.sessions.teacher),
            // An abort does not wait for a teacher, so it has no scores that the policy could require.
            _ if rules.require.contains(&Requirement::TeacherLogprobs) => without_segments.push(index),
            _ => {}
        }
        policies.push((policy.policy.clone(), rules.sessions.retries));
        keeps_messages.push(rules.record.messages);
    }
    let _few = one_of_few().await?;
    let calls = SessionCalls::read(buffer, session.session_pk).await?;
    if calls.calls.len() as u32 != session.calls {
        return Err(Refusal::SessionChanged.into());
    }
    let said = calls.said(wanted)?;
    let calls = Arc::new(calls);
    let assemble = {
        let calls = Arc::clone(&calls);
        move || policies.iter().map(|(policy, retries)| calls.assemble(policy, *retries, &said)).collect()
    };
    let done: Result<Vec<Assembled>, _> = work::on_thread(assemble).await.map_err(|_| StoreError::Closed)?;
    let mut assembled = done.map_err(|_| circular(session.session_id))?;
    for index in without_segments {
        assembled[index] = dropped_whole(current[index]);
    }
    for (one, keeps) in assembled.iter_mut().zip(keeps_messages) {
        let Some(last) = one.last.filter(|_| keeps) else { continue };
        match messages::of_call(buffer, session.session_pk, last).await? {
            Ok(found) => one.messages = found,
            Err(warning) => one.marks.of_session.push(warning),
        }
    }
    let breaks: Vec<CallBreak> = assembled.iter_mut().flat_map(|one| std::mem::take(&mut one.breaks)).collect();
    let of_breaks = breaks::causes(buffer, session.session_pk, &calls, &breaks).await?;
    let mut causes: BTreeMap<PolicyName, Vec<&'static str>> = BTreeMap::new();
    for (found, cause) in breaks.into_iter().zip(of_breaks) {
        causes.entry(found.policy).or_default().push(cause);
    }
    Ok(Parts { assembled, teachers, causes })
}

/// Validates and packs the rollouts of a session. They belong to `execution` if the session was opened without one.
pub(super) async fn pack(
    buffer: &Buffer,
    assembled: Assembling,
    execution: &ExecutionId,
) -> Result<(Vec<NewRollout>, EndSession), BufferError> {
    let (marks, trajectories): (Vec<_>, Vec<_>) =
        assembled.rollouts.into_iter().map(|rollout| (rollout.marks, rollout.trajectory)).unzip();
    let prepare = {
        let (buffer, execution) = (buffer.clone(), execution.clone());
        // The segments are there already, and no further memory is needed.
        move || ingest::prepare(&buffer, trajectories, &execution, &mut |_| true)
    };
    let rollouts = work::on_thread(prepare).await.map_err(|_| StoreError::Closed)?;
    let mut rollouts = rollouts.map_err(without_indexes)?;
    for (rollout, marks) in rollouts.iter_mut().zip(marks) {
        rollout.mark(marks);
    }
    Ok((rollouts, assembled.end))
}

/// The totals of a policy whose segments are not kept.
fn dropped_whole(policy: &SessionPolicy) -> Assembled {
    let mut totals =
        SessionAssembly { calls: policy.calls.into(), sampled_tokens: policy.sampled, ..SessionAssembly::default() };
    (totals.dropped.aborted, totals.dropped_tokens.aborted) = (policy.calls.into(), policy.sampled);
    Assembled { totals, ..Assembled::default() }
}

/// The status that a finish gives its rollouts. An agent that met a part of a message that sessions cannot record did not
/// fail by its own fault, so its rollouts are aborted unless the program says otherwise.
fn stated(session: &Session, finish: &Finish) -> Option<Status> {
    let met = session.notes.has(SessionNotes::UNSUPPORTED_PART);
    finish.sent.status.or(met.then_some(Status::Aborted))
}

/// The trajectory of a policy. Without a trained call, it is aborted, unless all answers are empty: its group takes
/// another rollout instead of waiting for it.
fn trajectory(
    session: &Session,
    policy: &SessionPolicy,
    wanted: &Ending,
    assembled: Assembled,
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
        purpose: spec.purpose,
        suite: spec.suite.clone(),
        task: spec.task.clone(),
        ..wire::Trajectory::default()
    };
    if let How::Finish(finish) = &wanted.how {
        let stated = stated(session, finish);
        let is_failure = matches!(stated, Some(Status::Aborted | Status::Failed));
        if is_failure || assembled.marks.sampled_nothing || !assembled.segments.is_empty() {
            let whole = if session.is_full { Status::Truncated } else { Status::Completed };
            trajectory.status = stated.unwrap_or(whole);
            trajectory.reward = finish.rewards.get(&policy.policy.public()).copied().or(finish.sent.reward);
            trajectory.reward_components = finish.sent.reward_components.clone();
        }
    }
    trajectory.segments = assembled.segments;
    trajectory.messages = assembled.messages;
    trajectory
}

/// The metadata of the session, with the members that the finish adds or replaces. The spelling of values is kept.
fn metadata(session: &Session, wanted: &Ending) -> Result<Option<Box<RawValue>>, Refusal> {
    let added = match &wanted.how {
        How::Finish(finish) => finish.sent.metadata.clone(),
        How::Abort { .. } | How::Expire { .. } => None,
    };
    let (opened, added) = match (session.spec.metadata.clone(), added) {
        (Some(opened), Some(added)) => (opened, added),
        (opened, added) => return Ok(opened.or(added)),
    };
    // A name may have half of a surrogate pair, which is replaced in values when the trajectory is checked.
    let members = |raw: &RawValue| {
        let text = replace_lone_surrogates(raw.get());
        let read = serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(raw.get());
        read.or_else(|_| serde_json::from_str(&text))
    };
    let merged = members(&opened).and_then(|mut merged| {
        merged.extend(members(&added)?);
        serde_json::value::to_raw_value(&merged)
    });
    merged.map(Some).map_err(|_| Refusal::invalid("/metadata", "must be an object"))
}
