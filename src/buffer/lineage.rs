//! Stage 6, lineage: which steps the weights have learned from, and what a trainer that starts again gets back.
//!
//! The rule for trainers: start with resume(last saved step); lease, compute gradients, ack(step) and only then move
//! the weights; save, then checkpoint(step); publish. So the weights never hold data that is not acked, and no crash
//! trains twice or skips.

use super::{
    Buffer,
    ids::{Epoch, PolicyName, Run, Step},
    refusal::BufferError,
    replicas::Awaited,
};
use crate::store::{Publish, Resume, Resumed};

/// Reason of what was trained in a lineage that a forced resume gave up, and can be delivered to no other.
pub(crate) const REASON_LINEAGE_GAP: &str = "lineage-gap";

impl Buffer {
    /// The trainer has saved `step` durably; the last settled step and the batches settled now. A step above the last
    /// acked one is refused unless forced.
    pub async fn checkpoint(
        &self,
        policy: PolicyName,
        step: Step,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<(Step, u64), BufferError> {
        Ok(self.store.checkpoint(policy, step, force, epoch, self.clock.now()).await??)
    }

    /// A trainer (re)starts from its checkpoint of `step`, or from nothing.
    pub async fn resume(
        &self,
        policy: PolicyName,
        step: Option<Step>,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<Resumed, BufferError> {
        let resume = Resume { policy: policy.clone(), step, force, epoch, now: self.clock.now() };
        let resumed = self.store.resume(resume).await??;
        tracing::info!(
            policy.name = %policy,
            lineage.step = step.map(|step| step.0),
            lineage.epoch = resumed.epoch.0,
            policy.version = resumed.version.0,
            batches.returned = resumed.returned,
            batches.quarantined = resumed.quarantined,
            batches.undeliverable = resumed.undeliverable,
            "trainer resumed"
        );
        self.report_expired(&policy, resumed.expired);
        self.metrics.lease(policy.as_str(), "revoked", resumed.returned + resumed.quarantined);
        self.metrics.dropped_many(policy.as_str(), REASON_LINEAGE_GAP, resumed.abandoned_groups);
        if resumed.quarantined > 0 {
            tracing::warn!(
                policy.name = %policy,
                batches = resumed.quarantined,
                "batches quarantined: resumes have ended their leases too often"
            );
        }
        self.wake(Awaited::Batch, &policy);
        self.wake(Awaited::Version, &policy);
        Ok(resumed)
    }

    /// A fresh start of the policy; the new run and epoch and the groups discarded.
    pub async fn reset(&self, policy: PolicyName, epoch: Option<Epoch>) -> Result<(Run, Epoch, u64), BufferError> {
        let reset = self.store.reset(policy.clone(), epoch, self.clock.now()).await??;
        self.metrics.dropped_many(policy.as_str(), "reset", reset.2);
        tracing::info!(policy.name = %policy, policy.run = reset.0.0, groups.discarded = reset.2, "policy reset");
        self.wake(Awaited::Version, &policy);
        Ok(reset)
    }

    /// A new weight version; true unless it was an identical repeat.
    pub async fn publish(&self, mut publish: Publish) -> Result<bool, BufferError> {
        publish.now = self.clock.now();
        let policy = publish.policy.clone();
        let new = self.store.publish(publish).await??;
        self.wake(Awaited::Version, &policy);
        // Staleness is measured against the new version: what waited may have gone stale, what is ready may not.
        self.wake(Awaited::Batch, &policy);
        Ok(new)
    }
}
