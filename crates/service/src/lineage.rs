//! Stage 6, lineage: which steps the weights have learned from, and which batches a restarted trainer gets back.
//!
//! The rule for trainers: start with resume(last saved step); lease, compute gradients, ack(step), and only then update
//! the weights; save, then checkpoint(step); publish. The weights then never contain data that is not acked, and no
//! crash makes the trainer train a batch twice or skip one.

use forebay_domain::{
    ids::{Epoch, PolicyName, Step},
    lineage::{Checkpoint, Checkpointed, Publish, Reset, ResetDone, Resume, Resumed},
    peers::Awaited,
    reasons,
};
use forebay_store::ops::policy::PublishVersion;
use tracing::instrument;

use crate::{Buffer, error::BufferError, sweep, waiting::replicas};

impl Buffer {
    /// Records that the trainer has saved `step` durably. A step above the last acked one is refused unless forced.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn checkpoint(
        &self,
        policy: PolicyName,
        step: Step,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<Checkpointed, BufferError> {
        let checkpoint = Checkpoint { policy, step, force, epoch, now: self.clock.now() };
        Ok(self.store.write(checkpoint).await??)
    }

    /// Restarts a trainer from its checkpoint of `step`, or from nothing.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn resume(
        &self,
        policy: PolicyName,
        step: Option<Step>,
        force: bool,
        epoch: Option<Epoch>,
    ) -> Result<Resumed, BufferError> {
        let by = self.acting.clone();
        let resume = Resume { policy: policy.clone(), step, force, epoch, by, now: self.clock.now() };
        let resumed = self.store.write(resume).await??;
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
        sweep::report_expired(self, &policy, resumed.expired);
        self.metrics.lease(policy.as_str(), "revoked", resumed.returned + resumed.quarantined);
        self.metrics.dropped_many(policy.as_str(), reasons::LINEAGE_GAP, resumed.abandoned_groups);
        if resumed.quarantined > 0 {
            tracing::warn!(
                policy.name = %policy,
                batches = resumed.quarantined,
                "batches quarantined: resumes have ended their leases too often"
            );
        }
        replicas::wake(self, Awaited::Batch, &policy);
        replicas::wake(self, Awaited::Version, &policy);
        Ok(resumed)
    }

    /// Starts the policy afresh.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn reset(&self, policy: PolicyName, epoch: Option<Epoch>) -> Result<ResetDone, BufferError> {
        let by = self.acting.clone();
        let reset = Reset { policy: policy.clone(), epoch, by, now: self.clock.now() };
        let done = self.store.write(reset).await??;
        self.metrics.dropped_many(policy.as_str(), reasons::RESET, done.groups);
        tracing::info!(policy.name = %policy, policy.run = done.run.0, groups.discarded = done.groups, "policy reset");
        replicas::wake(self, Awaited::Version, &policy);
        Ok(done)
    }

    /// Publishes a weight version. True unless it was an identical repeat.
    #[instrument(level = "debug", skip_all)]
    pub async fn publish(&self, mut publish: Publish) -> Result<bool, BufferError> {
        publish.now = self.clock.now();
        let policy = publish.policy.clone();
        let new = self.store.write(PublishVersion(publish)).await??;
        replicas::wake(self, Awaited::Version, &policy);
        // Staleness is measured against the new version, so other groups may be ready now.
        replicas::wake(self, Awaited::Batch, &policy);
        Ok(new)
    }
}
