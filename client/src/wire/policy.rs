//! `/policies`: rules, versions and the lineage of the weights.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{PolicyRules, ReceiptGroup};

/// Names of all policies.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyList {
    /// Policies in the order of their names.
    pub policies: Vec<PolicyStatus>,
    /// Cursor of the next page; null on the last.
    pub next: Option<String>,
}

/// A policy: its rules, where its weights stand and what its buffer holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyStatus {
    /// Name of the policy.
    pub policy: String,
    /// Rules: some hold for groups opened from now on, the others from the next request on.
    pub rules: PolicyRules,
    /// In the answer to `PUT /policies/{p}`: settings that the request did not name and that it has changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Fresh starts under this name, from 1.
    pub run: i64,
    /// Lineage of the weights; every resume starts a new one.
    pub epoch: i64,
    /// Current weight version.
    pub version: i64,
    /// Step at which the version was published.
    pub version_step: Option<i64>,
    /// Where the version's weights are.
    pub version_uri: Option<String>,
    /// Last settled step.
    pub checkpoint_step: Option<i64>,
    /// The service was restored from a copy, and no trainer has resumed since: one that is `superseded` now was not replaced
    /// by another, and resumes.
    #[serde(default)]
    pub restored: bool,
    /// Rollouts by state, by the names of the ledger.
    pub rollouts: BTreeMap<String, i64>,
    /// Groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Batches by state.
    pub batches: BTreeMap<String, i64>,
    /// What a trainer is waiting for.
    pub waiting: Waiting,
}

/// What a trainer is waiting for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Waiting {
    /// Groups that are ready now.
    pub ready_groups: i64,
    /// Groups of a full batch.
    pub needed_groups: i64,
    /// Batches that came back and go out first.
    pub returned_batches: i64,
    /// Groups that are open.
    pub open_groups: i64,
    /// The open groups that lack the fewest rollouts, at most 5.
    pub fullest: Vec<OpenGroup>,
    /// Rollouts that room is reserved for and that are not posted.
    #[serde(default)]
    pub reserved_rollouts: i64,
    /// When the last rollout was received.
    pub last_post_at: Option<String>,
    /// Rollouts and groups dropped in the last hour, by rule.
    pub dropped_last_hour: BTreeMap<String, i64>,
    /// Groups that went stale in the last hour.
    pub stale_last_hour: i64,
}

/// An open group and how full it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OpenGroup {
    /// Id of the group.
    pub group_id: String,
    /// State, arrivals and places.
    #[serde(flatten)]
    pub fill: ReceiptGroup,
}

/// Publishes a weight version.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VersionRequest {
    /// Greater than the current version, or an identical repeat of it.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub version: i64,
    /// Step after which the weights were taken; the last acked step when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: Option<i64>,
    /// Where the weights are, up to 2,048 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 2048))]
    pub uri: Option<String>,
    /// Epoch of the caller; a superseded one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// The trainer has saved a step durably.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// The saved step: the last acked one, or below.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: i64,
    /// Settle a step above the last acked one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Epoch of the caller; a superseded one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CheckpointResponse {
    /// Last settled step.
    pub checkpoint_step: i64,
    /// Batches settled by this call.
    pub settled_batches: u64,
}

/// The trainer starts from its checkpoint of a step, or from nothing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Last saved step; null starts from nothing.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: Option<i64>,
    /// Resume below the last settled step, or over purged batches, with what can still be delivered; or above the last
    /// acked step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Epoch of the caller; a superseded one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a resume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResumeResponse {
    /// The new epoch.
    pub epoch: i64,
    /// The current weight version: the newest published at or before the step.
    pub version: i64,
    /// Batches that came back: revoked leases and acks after the step.
    pub returned_batches: u64,
    /// Batches that do not come back, because resumes have ended their leases `lease.max_resumes` times.
    #[serde(default)]
    pub quarantined_batches: u64,
    /// Batches acked after the step whose payloads are gone; above 0 only with `force`. Those that were not settled are
    /// discarded with reason `lineage-gap`.
    pub undeliverable_batches: u64,
}

/// Starts the policy afresh under the same name.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResetRequest {
    /// Epoch of the caller; a superseded one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a reset.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResetResponse {
    /// The new run.
    pub run: i64,
    /// The new epoch.
    pub epoch: i64,
    /// Groups discarded with reason `reset`.
    pub discarded_groups: u64,
}
