//! The ledger: what became of every rollout, group and batch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Verdict;

/// A rollout's story.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrajectoryStory {
    /// Policy of the rollout.
    pub policy: String,
    /// Run of the policy in which it arrived.
    pub run: i64,
    /// Identity of the rollout.
    pub rollout_id: String,
    /// What ingest decided.
    pub verdict: Verdict,
    /// Filter or built-in code behind the verdict.
    pub reason: Option<String>,
    /// Filters whose evaluation failed on it, at most 16 names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_filters: Vec<String>,
    /// Where it stands.
    pub state: RolloutState,
    /// Its group.
    pub group: StoryGroup,
    /// Ids of the batches that carried it, in order.
    pub batches: Vec<String>,
    /// Optimizer step that consumed it.
    pub step: Option<i64>,
    /// Reward as sent.
    pub reward: Option<f64>,
    /// Advantage, once its group is ready.
    pub advantage: Option<f64>,
    /// Weight version: its oldest span with a trained token.
    pub policy_version: i64,
    /// True when the producer sent no version.
    pub policy_version_assumed: bool,
    /// Segments.
    pub segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// When it was received.
    pub received_at: String,
    /// When its group was decided.
    pub decided_at: Option<String>,
    /// When its batch was cut.
    pub batched_at: Option<String>,
    /// When its batch was acked.
    pub acked_at: Option<String>,
    /// When its payload was purged.
    pub purged_at: Option<String>,
}

/// The group in a rollout's story.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoryGroup {
    /// Id of the group.
    pub group_id: String,
    /// Where it stands.
    pub state: GroupState,
    /// Why it was discarded or quarantined.
    pub reason: Option<String>,
    /// Kept and masked rollouts.
    pub arrived: u32,
    /// Places.
    pub size: u32,
}

/// Rollouts in the order in which they arrived.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrajectoryPage {
    /// Stories.
    pub trajectories: Vec<TrajectoryStory>,
    /// Cursor of the next page; null on the last. A page of a filtered list may be empty and not be the last.
    pub next: Option<String>,
}

/// A group in the ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupInfo {
    /// Policy of the group.
    pub policy: String,
    /// Run of the policy in which it was opened.
    pub run: i64,
    /// Id of the group.
    pub group_id: String,
    /// Where it stands.
    pub state: GroupState,
    /// Why it was discarded or quarantined.
    pub reason: Option<String>,
    /// Group filters whose evaluation failed on it, at most 16 names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_filters: Vec<String>,
    /// Label of the environment of its first rollout.
    pub environment: Option<String>,
    /// Places.
    pub size: u32,
    /// Rollouts that suffice at the timeout.
    pub min_size: u32,
    /// Kept and masked rollouts.
    pub arrived: u32,
    /// Rollouts kept.
    pub kept: u32,
    /// Rollouts masked.
    pub masked: u32,
    /// Rollouts dropped.
    pub dropped: u32,
    /// Rollouts that came after the decision.
    pub late: u32,
    /// Batch that carries it.
    pub batch_id: Option<String>,
    /// When its first rollout arrived.
    pub opened_at: String,
    /// When it is decided with what is there, while open.
    pub deadline_at: Option<String>,
    /// When it was decided.
    pub decided_at: Option<String>,
}

/// Groups in the order in which they were opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupPage {
    /// Groups.
    pub groups: Vec<GroupInfo>,
    /// Cursor of the next page; null on the last. A page of a filtered list may be empty and not be the last.
    pub next: Option<String>,
}

/// Decides a group now, as if it had timed out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CloseRequest {
    /// Policy; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Id of the group.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub group_id: String,
}

/// Discards a group that is open, ready or quarantined.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiscardRequest {
    /// Policy; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Id of the group.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub group_id: String,
    /// Why, 1 to 256 bytes.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub reason: String,
}

/// Where a group stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum GroupState {
    /// Takes rollouts. Left when it is complete, times out, or is closed or discarded.
    Open,
    /// Finalized and waiting for a batch. Left by the cut of a batch, staleness, discard or reset.
    Ready,
    /// Part of a batch, whose state says the rest. Left only by a nack that names groups, or reset.
    Batched,
    /// Was over the staleness bound when its turn came. Final.
    Stale,
    /// Decided against, with a reason. Final.
    Discarded,
    /// Named in a nack, or found damaged. Left by readmit or discard.
    Quarantined,
}

/// Where a rollout stands: the terms of the conservation equation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum RolloutState {
    /// In an open group.
    Open,
    /// In a ready group.
    Ready,
    /// In a leased batch.
    Leased,
    /// In a batch that came back.
    Returned,
    /// In a batch acked by a step that is not settled.
    Trained,
    /// In a settled batch.
    Checkpointed,
    /// In a discarded group.
    Discarded,
    /// In a stale group.
    Stale,
    /// In a quarantined group or batch.
    Quarantined,
    /// Refused by a rule at ingest.
    Dropped,
    /// Came after its group was decided.
    Late,
}

/// The process is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Always `ok`.
    pub status: String,
    /// The service's version, e.g. `0.1.0`.
    pub version: String,
}

/// Totals of the whole service.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stats {
    /// Totals of every policy, by name.
    pub policies: BTreeMap<String, PolicyStats>,
    /// True when received equals the sum of all states, for every policy.
    pub conserved: bool,
}

/// Totals of one policy since it exists.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyStats {
    /// Receipts with `duplicate = false`.
    pub received: i64,
    /// Rollouts by state, with `forgotten` for those whose tombstone expired.
    pub rollouts: BTreeMap<String, i64>,
    /// Groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Batches by state.
    pub batches: BTreeMap<String, i64>,
    /// Rollouts and groups dropped, by rule.
    pub dropped: BTreeMap<String, i64>,
    /// Bytes of stored payloads of what is not yet trained.
    pub live_bytes: i64,
    /// True when received equals the sum of `rollouts`.
    pub conserved: bool,
}
