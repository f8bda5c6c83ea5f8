//! The log of steps: what the batches of each step of a trainer had in all, for people who look at it.
//!
//! Not a stage that rollouts pass. Acks write the log, and it outlives the batches.

use forebay_domain::{
    ids::{PolicyName, Step},
    looking::steps::{ReadStepBuckets, ReadSteps, StepBuckets, StepCursor, StepPage},
    pages::Order,
};
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

impl Buffer {
    /// The steps of the current run of a policy, one by one.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn steps(
        &self,
        policy: &PolicyName,
        order: Order,
        after: Option<StepCursor>,
        limit: u32,
    ) -> Result<StepPage, BufferError> {
        let policy = policies::existing_policy(self, policy).await?;
        let read = ReadSteps { policy: policy.policy_pk, run: policy.run, order, after, limit };
        Ok(self.store.read(read).await?)
    }

    /// The steps of the current run of a policy, several together: from a step up to another one, in at most `points`
    /// buckets.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn step_buckets(
        &self,
        policy: &PolicyName,
        from: Step,
        to: Step,
        points: i64,
    ) -> Result<StepBuckets, BufferError> {
        let policy = policies::existing_policy(self, policy).await?;
        // Rounded up, so that there are not more buckets than points.
        let width = ((to.0.saturating_sub(from.0)) / points.max(1)).saturating_add(1);
        let read = ReadStepBuckets { policy: policy.policy_pk, run: policy.run, from: from.0, to: to.0, width };
        Ok(self.store.read(read).await?)
    }
}
