//! Stage 3, groups: they are decided or discarded outside of ingest as well.

use crate::{
    clock::Timestamp,
    ids::{BatchId, CallerId, GroupId, GroupPk, PolicyName, Run},
    ingest::decide::GroupFill,
    staleness::TrainedVersions,
};

/// A request to decide an open group.
#[derive(Clone, Debug)]
pub struct CloseGroup {
    pub policy: PolicyName,
    pub group_id: GroupId,
    /// Who closes it.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}

/// A request to discard a group.
#[derive(Clone, Debug)]
pub struct DiscardGroup {
    pub policy: PolicyName,
    pub group_id: GroupId,
    /// The reason that the caller gave.
    pub reason: String,
    /// Who discards it.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}

/// A group that the sweep decided.
#[derive(Clone, Debug)]
pub struct DecidedGroup {
    /// Rollouts that were dropped before, for want of a score.
    pub unscored: usize,
    pub policy: PolicyName,
    /// The group as decided.
    pub group: Group,
}

/// A group in the ledger.
#[derive(Clone, Debug)]
pub struct Group {
    /// The cursor of its entry.
    pub group_pk: GroupPk,
    /// The run of the policy that it belongs to.
    pub run: Run,
    pub group_id: String,
    /// Its places and rollouts.
    pub fill: GroupFill,
    /// Why it was discarded or quarantined.
    pub reason: Option<String>,
    /// Group filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// Environment of its first rollout.
    pub environment: Option<String>,
    /// The number of rollouts that suffice.
    pub min_size: u32,
    /// The number of rollouts that arrived after the decision.
    pub late: u32,
    pub batch_id: Option<BatchId>,
    /// The number of tokens of its kept and masked rollouts; none while it is open.
    pub tokens: Option<u64>,
    /// The number of its trained tokens; none while it is open.
    pub trained_tokens: Option<u64>,
    /// Versions of its trained tokens.
    pub trained_versions: Option<TrainedVersions>,
    pub reward_mean: Option<f64>,
    /// The lowest of its rewards.
    pub reward_min: Option<f64>,
    /// The highest of its rewards.
    pub reward_max: Option<f64>,
    /// The arrival of its first rollout.
    pub opened_at: Timestamp,
    /// The time at which it is decided at the latest.
    pub deadline_at: Option<Timestamp>,
    /// The time of its decision.
    pub decided_at: Option<Timestamp>,
    /// The time when its payloads were purged.
    pub purged_at: Option<Timestamp>,
}
