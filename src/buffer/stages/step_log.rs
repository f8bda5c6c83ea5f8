//! The log of steps: what the batches of each step of a trainer had in all, for people who look at it.
//!
//! Not a stage that rollouts pass. Acks write the log, and it outlives the batches.

use forebay_domain::{
    ids::{PolicyName, Step},
    looking::steps::{ReadStepBuckets, ReadSteps, StepBuckets, StepCursor, StepPage},
    pages::Order,
};

use crate::buffer::{Buffer, error::BufferError, policies};

pub(in crate::buffer) async fn steps(
    buffer: &Buffer,
    policy: &PolicyName,
    order: Order,
    after: Option<StepCursor>,
    limit: u32,
) -> Result<StepPage, BufferError> {
    let policy = policies::existing_policy(buffer, policy).await?;
    let read = ReadSteps { policy: policy.policy_pk, run: policy.run, order, after, limit };
    Ok(buffer.store.read(read).await?)
}

pub(in crate::buffer) async fn buckets(
    buffer: &Buffer,
    policy: &PolicyName,
    from: Step,
    to: Step,
    points: i64,
) -> Result<StepBuckets, BufferError> {
    let policy = policies::existing_policy(buffer, policy).await?;
    // Rounded up, so that there are not more buckets than points.
    let width = ((to.0.saturating_sub(from.0)) / points.max(1)).saturating_add(1);
    let read = ReadStepBuckets { policy: policy.policy_pk, run: policy.run, from: from.0, to: to.0, width };
    Ok(buffer.store.read(read).await?)
}
