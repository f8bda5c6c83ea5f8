//! Stage 2, ingest: bundles of rollouts, each stored whole or not at all, and every group that they complete is decided.
//!
//! The store calls the functions of [`decide`] in its transaction, so the post that completes a group is answered after the
//! group is decided. The stage before is [`trajectory`](crate::trajectory), the next [`finalize`](crate::finalize).

pub mod decide;
pub mod new_rollout;

use std::sync::Arc;

use forebay_wire::{self as wire, Assembly};

use self::decide::{GroupFill, RolloutDecision};
use crate::{
    admission::Gates,
    clock::Timestamp,
    ids::{ExecutionId, GroupId, PolicyName, RolloutId},
    ingest::new_rollout::NewRollout,
    refusal::Refusal,
    session::EndSession,
    states::GroupState,
    warnings::Warning,
};

/// Bundles to ingest in one transaction, each all or nothing on its own.
#[derive(Clone)]
pub struct Ingest {
    /// Rollouts posted together.
    pub bundles: Arc<Vec<Bundle>>,
    /// The policies that this process has found full.
    pub gates: Arc<Gates>,
    /// The time of their arrival.
    pub now: Timestamp,
}

impl Ingest {
    /// The number of payload bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bundles.iter().flat_map(|bundle| bundle.iter()).map(NewRollout::payload_bytes).sum()
    }
}

/// Rollouts that are stored together, and the sessions that end with them.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    pub rollouts: Vec<NewRollout>,
    /// The sessions that recorded rollouts of the bundle.
    pub ends: Vec<EndSession>,
}

impl From<Vec<NewRollout>> for Bundle {
    fn from(rollouts: Vec<NewRollout>) -> Self {
        Self { rollouts, ends: Vec::new() }
    }
}

impl std::ops::Deref for Bundle {
    type Target = [NewRollout];

    fn deref(&self) -> &[NewRollout] {
        &self.rollouts
    }
}

pub type BundleOutcome = Result<Vec<Ingested>, Refusal>;

/// The outcome of one rollout.
#[derive(Clone, Debug)]
pub struct Ingested {
    pub policy: PolicyName,
    pub rollout_id: RolloutId,
    pub group_id: GroupId,
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    /// The verdict, from this post or from the first post of the rollout.
    pub decision: RolloutDecision,
    /// Warnings for its producer.
    pub warnings: Vec<Warning>,
    /// What became of its turns, if it was posted as turns.
    pub assembly: Option<Assembly>,
    /// Whether it was already stored.
    pub duplicate: bool,
    /// The group after the post.
    pub fill: GroupFill,
    /// The state of the group, if this post decided it.
    pub decided: Option<GroupState>,
    /// Why the group was discarded or quarantined, if it was.
    pub discarded: Option<String>,
    /// Group filters that could not be evaluated in this decision.
    pub failed_group_filters: Vec<String>,
}

impl Ingested {
    /// The receipt for its producer.
    #[must_use]
    pub fn receipt(&self) -> wire::Receipt {
        wire::Receipt {
            policy: self.policy.to_string(),
            rollout_id: self.rollout_id.to_string(),
            group_id: self.group_id.to_string(),
            execution_id: self.execution_id.to_string(),
            verdict: self.decision.verdict.into(),
            warnings: self.warnings.iter().map(ToString::to_string).collect(),
            reason: self.decision.reason.clone(),
            scoring: self.decision.scoring.clone(),
            duplicate: self.duplicate,
            group: wire::ReceiptGroup {
                state: self.fill.state.into(),
                reason: self.discarded.clone(),
                arrived: self.fill.arrived(),
                size: self.fill.size,
            },
            assembly: self.assembly,
        }
    }
}
