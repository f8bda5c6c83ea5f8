//! Policies as they are stored: their rules, and the contents of their buffers.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    admission::refused::RefusedRoom,
    batch::shares::CarriedShares,
    clock::Timestamp,
    ids::{BatchId, CallerId, Epoch, PolicyName, PolicyPk, Run, Step, Version},
    ingest::decide::GroupFill,
    quotas::Quotas,
    rules::Rules,
    staleness::Pause,
};

/// What metrics show of a policy, besides its tallies.
#[derive(Clone, Debug)]
pub struct PolicyGauges {
    pub policy: Policy,
    /// The metrics of its newest batch; empty if this run has none.
    pub newest_metrics: BTreeMap<String, f64>,
}

/// A policy's row.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Key of the row.
    pub policy_pk: PolicyPk,
    pub name: PolicyName,
    /// Its rules. They decide groups opened from now on, and apply to the next call on any group otherwise.
    pub rules: Arc<Rules>,
    /// Key of the row of the rules.
    pub rules_pk: i64,
    /// The number of its fresh starts.
    pub run: Run,
    /// Lineage of the weights.
    pub epoch: Epoch,
    /// Current weight version.
    pub version: Version,
    /// Step at which it was published.
    pub version_step: Option<Step>,
    /// Where its weights are.
    pub version_uri: Option<String>,
    /// Last acked step.
    pub acked_step: Option<Step>,
    /// Last settled step.
    pub checkpoint_step: Option<Step>,
    /// Whether the run has acks, so that the ledger knows its steps.
    pub steps_known: bool,
    /// Whether a restore began the epoch and no trainer has resumed since.
    pub restored: bool,
    /// Requests for room that were refused lately.
    pub refused: Vec<RefusedRoom>,
    /// Since when no batch is granted, for the sake of rollouts that are too old for the one after it.
    pub pause: Option<Pause>,
    /// Rollouts of this version and of older ones were waited for in vain.
    pub given_up: Option<Version>,
}

impl Policy {
    /// Whether a batch was trained whose version is not published.
    #[must_use]
    pub fn is_version_due(&self) -> bool {
        self.acked_step > self.version_step
    }
}

/// A request to write the rules of a policy.
#[derive(Clone, Debug)]
pub struct WriteRules {
    pub policy: PolicyName,
    pub rules: Arc<Rules>,
    /// What happens if the policy exists.
    pub existing: ExistingPolicy,
    /// What bounds new policies and greater backlogs. None for policies of the configuration.
    pub quotas: Option<Arc<Quotas>>,
    /// Who changes them.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}

/// What writing rules does to a policy that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingPolicy {
    /// It keeps its rules.
    Keep,
    /// Its rules are replaced.
    Replace,
    /// Its rules are replaced if they are those of this row.
    ReplaceOnly(i64),
}

/// The result of writing rules.
#[derive(Clone, Debug)]
pub enum RulesWritten {
    /// The policy is new.
    Created,
    /// The policy existed, with these rules.
    Existed(Arc<Rules>),
    /// The policy has other rules than the ones to be replaced; nothing changed.
    Outdated,
}

/// What the next batch of a policy is waiting for.
#[derive(Clone, Debug, Default)]
pub struct WaitingFor {
    /// The open groups that lack the fewest rollouts.
    pub fullest: Vec<OpenGroup>,
    /// Rollouts and groups that each rule dropped or discarded in the last hour.
    pub dropped: BTreeMap<String, i64>,
    /// Groups that went stale in the last hour.
    pub stale: i64,
    /// Consumers that wait for a batch, the longest waiting first, and at most a few.
    pub asking: Vec<WaitingConsumer>,
    /// Batches that consumers hold, the longest held first, and at most a few.
    pub holding: Vec<HeldBatch>,
}

/// A consumer that waits for a batch, at whichever replica.
#[derive(Clone, Debug)]
pub struct WaitingConsumer {
    /// Its name; empty if it has none.
    pub consumer: String,
    /// Since when.
    pub since: Timestamp,
    /// From then on it does not wait any more, unless it asks again.
    pub until: Timestamp,
}

/// A batch under a lease.
#[derive(Clone, Debug)]
pub struct HeldBatch {
    pub batch_id: BatchId,
    /// Who holds it; empty if it has no name.
    pub consumer: String,
    /// Since when.
    pub since: Timestamp,
    /// End of the lease.
    pub expires_at: Option<Timestamp>,
    /// Number of the delivery.
    pub attempt: u32,
}

#[derive(Clone, Debug)]
pub struct OpenGroup {
    pub group_id: String,
    /// Its places and rollouts.
    pub fill: GroupFill,
}

/// Which environments to read.
#[derive(Clone, Debug)]
pub struct ReadEnvironments {
    pub policy: PolicyPk,
    pub run: Run,
    pub labels: Vec<String>,
    /// The most ready groups that are counted of each.
    pub ready_max: u32,
}

#[derive(Clone, Debug, Default)]
pub struct EnvironmentGroups {
    /// Ready groups, of the environments that have some.
    pub ready: BTreeMap<String, i64>,
    /// Open groups among a bounded number of those of the policy, of the environments that have some.
    pub open: BTreeMap<String, i64>,
    /// What they carry from batch to batch.
    pub carried: CarriedShares,
}
