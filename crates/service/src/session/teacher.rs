//! A teacher scores the segments of sessions that are finished, between their assembling and the transaction that stores
//! them. No transaction waits for it, and if it fails, nothing has changed.

use std::{sync::Arc, time::Instant};

use forebay_domain::{ids::PolicyName, refusal::Refusal};
use forebay_store::ops::policy::FindPolicy;

use crate::{
    Buffer,
    error::BufferError,
    session::{open::OpenSession, rollouts::AssembledRollout},
    teachers::{TeacherFault, Unscored},
};

/// Refuses a session of a policy whose teacher could not score its segments at the end.
pub(super) async fn check(buffer: &Buffer, open: &OpenSession) -> Result<(), BufferError> {
    let temperature = open.spec().sampling.temperature;
    for policy in open.policies() {
        let found = buffer.store.read(FindPolicy(policy.clone())).await?.map(|policy| policy.rules);
        // A policy that does not exist yet is created with these rules, or refused later.
        let rules = found.unwrap_or_else(|| Arc::clone(&buffer.options.policy_defaults));
        let Some(teacher) = &rules.sessions.teacher else { continue };
        let refuse = |pointer, why: &dyn std::fmt::Display| {
            Refusal::invalid(pointer, format!("the teacher `{teacher}` of policy `{policy}` cannot be used: {why}"))
        };
        buffer.teachers.check(teacher, temperature).await.map_err(|fault| match &fault {
            TeacherFault::Unknown => refuse("/models", &fault),
            TeacherFault::Unsuited(_) => refuse("/sampling/temperature", &fault),
            TeacherFault::Failed(_) => failed(policy, teacher, &fault),
        })?;
    }
    Ok(())
}

/// Fills in the scores of all rollouts that have a teacher, at the same time. The teachers bound how many segments they
/// score at once.
pub(super) async fn score(
    buffer: &Buffer,
    rollouts: impl Iterator<Item = &mut AssembledRollout>,
) -> Result<(), Refusal> {
    futures::future::try_join_all(rollouts.map(|rollout| score_one(buffer, rollout))).await?;
    Ok(())
}

async fn score_one(buffer: &Buffer, rollout: &mut AssembledRollout) -> Result<(), Refusal> {
    let Some(teacher) = rollout.teacher.as_deref() else { return Ok(()) };
    let temperature = rollout.trajectory.sampling.temperature;
    let segments = &mut rollout.trajectory.segments;
    let unscored: Vec<Unscored<'_>> = segments
        .iter()
        .map(|segment| Unscored { ids: &segment.tokens, prompt: segment.tokens.len() - segment.loss_mask.len() })
        .collect();
    if unscored.is_empty() {
        return Ok(());
    }
    let began = Instant::now();
    let scored = buffer.teachers.score(teacher, rollout.session_id, temperature, &unscored).await;
    let outcome = scored.as_ref().map_or_else(TeacherFault::name, |_| "scored");
    buffer.metrics.taught(rollout.policy.as_str(), outcome, began.elapsed());
    let scored = scored.map_err(|fault| {
        tracing::warn!(
            upstream.name = teacher,
            policy.name = %rollout.policy,
            session.id = %rollout.session_id,
            error = %fault,
            "a teacher did not score the segments of a session, which goes on"
        );
        failed(&rollout.policy, teacher, &fault)
    })?;
    for (segment, scores) in segments.iter_mut().zip(scored) {
        // Like the log-probabilities of the behaviour policy, those of tokens that were not sampled are 0.
        let of_mask =
            scores.into_iter().zip(&segment.loss_mask).map(|(score, &bit)| if bit == 1 { score } else { 0.0 });
        segment.teacher_logprobs = Some(of_mask.collect());
    }
    Ok(())
}

fn failed(policy: &PolicyName, teacher: &str, fault: &TeacherFault) -> Refusal {
    Refusal::TeacherFailed { policy: policy.clone(), teacher: teacher.to_owned(), why: fault.to_string() }
}
