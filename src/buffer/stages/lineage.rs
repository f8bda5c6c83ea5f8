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

use crate::buffer::{Buffer, error::BufferError, replicas, sweep};

pub(in crate::buffer) async fn checkpoint(
    buffer: &Buffer,
    policy: PolicyName,
    step: Step,
    force: bool,
    epoch: Option<Epoch>,
) -> Result<Checkpointed, BufferError> {
    let checkpoint = Checkpoint { policy, step, force, epoch, now: buffer.clock.now() };
    Ok(buffer.store.write(checkpoint).await??)
}

pub(in crate::buffer) async fn resume(
    buffer: &Buffer,
    policy: PolicyName,
    step: Option<Step>,
    force: bool,
    epoch: Option<Epoch>,
) -> Result<Resumed, BufferError> {
    let by = buffer.acting.clone();
    let resume = Resume { policy: policy.clone(), step, force, epoch, by, now: buffer.clock.now() };
    let resumed = buffer.store.write(resume).await??;
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
    sweep::report_expired(buffer, &policy, resumed.expired);
    buffer.metrics.lease(policy.as_str(), "revoked", resumed.returned + resumed.quarantined);
    buffer.metrics.dropped_many(policy.as_str(), reasons::LINEAGE_GAP, resumed.abandoned_groups);
    if resumed.quarantined > 0 {
        tracing::warn!(
            policy.name = %policy,
            batches = resumed.quarantined,
            "batches quarantined: resumes have ended their leases too often"
        );
    }
    replicas::wake(buffer, Awaited::Batch, &policy);
    replicas::wake(buffer, Awaited::Version, &policy);
    Ok(resumed)
}

pub(in crate::buffer) async fn reset(
    buffer: &Buffer,
    policy: PolicyName,
    epoch: Option<Epoch>,
) -> Result<ResetDone, BufferError> {
    let by = buffer.acting.clone();
    let reset = Reset { policy: policy.clone(), epoch, by, now: buffer.clock.now() };
    let done = buffer.store.write(reset).await??;
    buffer.metrics.dropped_many(policy.as_str(), reasons::RESET, done.groups);
    tracing::info!(policy.name = %policy, policy.run = done.run.0, groups.discarded = done.groups, "policy reset");
    replicas::wake(buffer, Awaited::Version, &policy);
    Ok(done)
}

pub(in crate::buffer) async fn publish(buffer: &Buffer, mut publish: Publish) -> Result<bool, BufferError> {
    publish.now = buffer.clock.now();
    let policy = publish.policy.clone();
    let new = buffer.store.write(PublishVersion(publish)).await??;
    replicas::wake(buffer, Awaited::Version, &policy);
    // Staleness is measured against the new version, so other groups may be ready now.
    replicas::wake(buffer, Awaited::Batch, &policy);
    Ok(new)
}
