//! `GET /exports`: stored rollouts as they were posted, with what became of them.

use serde::{Deserialize, Serialize};

use super::{RolloutState, Trajectory, Verdict};

/// One line of an export: a rollout, and what became of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExportedRollout {
    /// The rollout as `POST /trajectories` takes it. `rollout_id`, `group_id` and `group_size` are always present, and
    /// segments stand in the place of turns. `policy_version` is absent only if every segment has `versions`.
    pub trajectory: Trajectory,
    /// What became of the rollout.
    pub result: ExportResult,
}

/// What became of an exported rollout, as it was when its row was read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExportResult {
    /// Run of the policy.
    pub run: i64,
    /// The decision of ingest.
    pub verdict: Verdict,
    /// Name of the filter that matched, or a built-in code.
    pub reason: Option<String>,
    /// State.
    pub state: RolloutState,
    /// Advantage; null until the group is decided.
    #[serde(serialize_with = "super::finite::serialize")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub advantage: Option<f64>,
    /// Optimizer step that consumed the rollout.
    pub step: Option<i64>,
    /// Weight version of the rollout: its oldest span with a trained token.
    pub policy_version: i64,
    /// Whether that version was assumed, because the producer sent none.
    pub policy_version_assumed: bool,
    /// Time of arrival.
    pub received_at: String,
}

/// The last line of an export with `summary=true`. A response without it is incomplete.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSummary {
    /// The counts.
    pub summary: ExportCounts,
}

/// How many rollouts an export has, and how many it left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportCounts {
    /// Rollouts that were exported.
    pub rollouts: u64,
    /// Rollouts left out by `state`, `verdict`, `min_reward` or `where`.
    pub filtered: u64,
    /// Rollouts among `filtered` on which `where` could not be evaluated, for example because it compares a reward that
    /// is absent.
    pub unevaluated: u64,
    /// Rollouts left out because their payload is purged.
    pub purged: u64,
    /// Rollouts left out because their stored data is damaged.
    pub damaged: u64,
}
