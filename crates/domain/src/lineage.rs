//! Stage 6, lineage: the versions of the weights, and which batches they were trained on.

use crate::{
    clock::Timestamp,
    ids::{CallerId, Epoch, PolicyName, Run, Step, Version},
};

/// A report that a step was saved durably.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub policy: PolicyName,
    pub step: Step,
    /// Whether a step above the last acked one is accepted.
    pub force: bool,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// The time of the request.
    pub now: Timestamp,
}

/// Answer to a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Checkpointed {
    /// The last settled step.
    pub last: Step,
    /// Batches settled now.
    pub batches: u64,
}

/// A request to restart a trainer.
#[derive(Clone, Debug)]
pub struct Resume {
    pub policy: PolicyName,
    /// The last saved step.
    pub step: Option<Step>,
    /// Whether the step may be below what is settled or purged, or above what is acked.
    pub force: bool,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// Who resumes.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}

/// Answer to a resume.
#[derive(Clone, Copy, Debug)]
pub struct Resumed {
    /// The new epoch.
    pub epoch: Epoch,
    /// The current version.
    pub version: Version,
    /// Batches that came back.
    pub returned: u64,
    /// Batches quarantined because resumes have ended their leases too often.
    pub quarantined: u64,
    /// Batches that cannot be delivered again, because their payloads are purged.
    pub undeliverable: u64,
    /// Steps of the log that are now marked as undone.
    pub undone_steps: u64,
    /// Groups of those batches that were not settled and are now discarded.
    pub abandoned_groups: u64,
    /// Leases that had expired before.
    pub expired: u64,
}

/// A request to start the policy afresh.
#[derive(Clone, Debug)]
pub struct Reset {
    pub policy: PolicyName,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// Who resets it.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}

/// Answer to a reset.
#[derive(Clone, Copy, Debug)]
pub struct ResetDone {
    /// The new run.
    pub run: Run,
    /// The new epoch.
    pub epoch: Epoch,
    /// The number of groups that were discarded.
    pub groups: u64,
}

/// By how much a version may be greater than the one before, unless that is forced. After the largest number, no other
/// version could be published. A first version may be a time in milliseconds, and it takes 4 million publications to
/// reach the largest number.
pub const VERSION_RISE_MAX: i64 = 1 << 41;

/// A new weight version.
#[derive(Clone, Debug)]
pub struct Publish {
    pub policy: PolicyName,
    pub version: Version,
    /// The step after which the weights were taken.
    pub step: Option<Step>,
    /// Where the weights are stored.
    pub uri: Option<String>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// Whether the version may be greater by more than [`VERSION_RISE_MAX`].
    pub force: bool,
    /// The time of publication.
    pub now: Timestamp,
}
