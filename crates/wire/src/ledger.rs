//! The ledger: what happened to every rollout, group and batch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Purpose, Status, Verdict};

/// What happened to a rollout, from its arrival until its payload is purged.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrajectoryStory {
    /// Policy of the rollout.
    pub policy: String,
    /// Whether it is trained, or evaluates the policy.
    #[serde(default, skip_serializing_if = "Purpose::is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Purpose>, default = "train"))]
    pub purpose: Purpose,
    /// Suite that it is a result of, if it evaluates the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suite: Option<String>,
    /// Its task in the suite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Run of the policy in which it arrived.
    pub run: i64,
    /// Identity of the rollout.
    pub rollout_id: String,
    /// Execution that the rollout belongs to.
    pub execution_id: String,
    /// Verdict of ingest.
    pub verdict: Verdict,
    /// Name of the filter, or the built-in code, that caused the verdict.
    pub reason: Option<String>,
    /// Filters whose evaluation failed for this rollout, at most 16 names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_filters: Vec<String>,
    /// State of the rollout.
    pub state: RolloutState,
    /// Required scores that the rollout lacks. As long as there are some, its verdict is not final.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scoring: Vec<String>,
    /// Group of the rollout.
    pub group: StoryGroup,
    /// Ids of the batches that contained the rollout, in order.
    pub batches: Vec<String>,
    /// Optimizer step that consumed the rollout.
    pub step: Option<i64>,
    /// Reward: as the producer sent it, or as the rules make it of scores.
    pub reward: Option<f64>,
    /// Advantage; present once the group is ready.
    pub advantage: Option<f64>,
    /// Weight version: the version of the oldest span with a trained token.
    pub policy_version: i64,
    /// True when the producer sent no version, or when the engine of a session did not say the version of every trained
    /// token. The version that was current then stands in.
    pub policy_version_assumed: bool,
    /// Number of segments.
    pub segments: u32,
    /// Number of prompt and response tokens.
    pub tokens: u64,
    /// Number of response tokens with mask 1, without those that are masked as stale.
    pub trained_tokens: u64,
    /// Number of response tokens.
    pub response_tokens: u64,
    /// How the execution ended.
    pub status: Status,
    /// Number of attempts of the session that was opened for the rollout; absent if there is none, or if it is forgotten.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub attempts: Option<u32>,
    /// Versions of the trained tokens; null if no token is trained.
    pub versions: Option<TrainedVersions>,
    /// When the rollout was received.
    pub received_at: String,
    /// When the group was decided.
    pub decided_at: Option<String>,
    /// When the batch was cut.
    pub batched_at: Option<String>,
    /// When the batch was acked.
    pub acked_at: Option<String>,
    /// When the payload was purged.
    pub purged_at: Option<String>,
}

/// The group in the story of a rollout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoryGroup {
    /// Id of the group.
    pub group_id: String,
    /// State of the group.
    pub state: GroupState,
    /// Why the group was discarded or quarantined.
    pub reason: Option<String>,
    /// Environment label of the group's first rollout.
    pub environment: Option<String>,
    /// Number of kept and masked rollouts.
    pub arrived: u32,
    /// Size of the group: the number of places for rollouts.
    pub size: u32,
}

/// The weight versions that generated trained tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrainedVersions {
    /// The oldest version.
    pub min: i64,
    /// The newest version.
    pub max: i64,
}

/// The order of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ListOrder {
    /// The oldest entries first.
    Oldest,
    /// The newest entries first.
    Newest,
}

/// Rollouts, in the order in which they arrived, or the newest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrajectoryPage {
    /// Stories.
    pub trajectories: Vec<TrajectoryStory>,
    /// Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last.
    pub next: Option<String>,
    /// Number of entries that were examined to find those of the page, at most 10,000 in a filtered list.
    pub examined: u32,
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
    /// State of the group.
    pub state: GroupState,
    /// Why the group was discarded or quarantined.
    pub reason: Option<String>,
    /// Group filters whose evaluation failed for this group, at most 16 names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_filters: Vec<String>,
    /// Environment label of the group's first rollout.
    pub environment: Option<String>,
    /// Size of the group: the number of places for rollouts.
    pub size: u32,
    /// Number of rollouts that suffice when the group times out.
    pub min_size: u32,
    /// Number of kept and masked rollouts.
    pub arrived: u32,
    /// Number of kept rollouts.
    pub kept: u32,
    /// Number of masked rollouts.
    pub masked: u32,
    /// Number of dropped rollouts.
    pub dropped: u32,
    /// Number of kept rollouts that lack a required score.
    #[serde(default)]
    pub scoring: u32,
    /// Number of rollouts that arrived after the group was decided.
    pub late: u32,
    /// Batch that contains the group.
    pub batch_id: Option<String>,
    /// Number of prompt and response tokens of its kept and masked rollouts; null until it is decided.
    pub tokens: Option<u64>,
    /// Number of trained tokens of its kept rollouts; null until it is decided.
    pub trained_tokens: Option<u64>,
    /// Mean reward of its kept rollouts; null until it is decided.
    pub reward_mean: Option<f64>,
    /// Lowest reward of its kept rollouts. It is the highest as well if there is nothing to learn from the group.
    pub reward_min: Option<f64>,
    /// Highest reward of its kept rollouts.
    pub reward_max: Option<f64>,
    /// Versions of its trained tokens; null until it is decided, and if no token is trained.
    pub versions: Option<TrainedVersions>,
    /// When the first rollout of the group arrived.
    pub opened_at: String,
    /// When an open group is decided with the rollouts that have arrived.
    pub deadline_at: Option<String>,
    /// When the group was decided.
    pub decided_at: Option<String>,
    /// When its payloads were purged.
    pub purged_at: Option<String>,
}

/// Groups, in the order in which they were opened, or the newest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupPage {
    /// Groups.
    pub groups: Vec<GroupInfo>,
    /// Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last.
    pub next: Option<String>,
    /// Number of entries that were examined to find those of the page, at most 10,000 in a filtered list.
    pub examined: u32,
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
    /// Reason, 1 to 256 bytes.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub reason: String,
}

/// State of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum GroupState {
    /// Accepts rollouts. Leaves this state when it is complete, times out, or is closed or discarded.
    Open,
    /// Finalized and waiting for a batch. Leaves this state when a batch is cut from it, when it is stale, or by
    /// discard or reset.
    Ready,
    /// Part of a batch; the state of the batch says more. Leaves this state only by a nack that names groups, or by
    /// reset.
    Batched,
    /// Exceeded the staleness bound when a batch was cut. Final.
    Stale,
    /// Discarded, with a reason. Final.
    Discarded,
    /// Named in a nack, or found damaged. Leaves this state by readmit or discard.
    Quarantined,
}

/// State of a rollout. These states are the terms of the conservation equation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum RolloutState {
    /// In an open group, with a place and without a score that the rules require.
    Scoring,
    /// In an open group.
    Open,
    /// In a ready group.
    Ready,
    /// In a leased batch.
    Leased,
    /// In a batch that was returned.
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
    /// Dropped by a rule at ingest.
    Dropped,
    /// Arrived after its group was decided.
    Late,
}

/// The answer that shows that the process is alive.
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
    /// True when, for every policy, the number received equals the sum over all states.
    pub conserved: bool,
}

/// Totals of one policy since it was created.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyStats {
    /// Number of receipts with `duplicate = false`.
    pub received: i64,
    /// Number of rollouts by state; `forgotten` counts those whose tombstone expired.
    pub rollouts: BTreeMap<String, i64>,
    /// Number of groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Number of batches by state.
    pub batches: BTreeMap<String, i64>,
    /// Number of rollouts and groups dropped, by rule.
    pub dropped: BTreeMap<String, i64>,
    /// Bytes of stored payloads that are not yet trained.
    pub live_bytes: i64,
    /// True when `received` equals the sum of `rollouts`.
    pub conserved: bool,
}
