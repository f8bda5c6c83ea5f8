//! `/policies`: rules, versions and the lineage of the weights.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{PolicyRules, ReceiptGroup};

/// Names of all policies.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyList {
    /// Policies, in the order of their names.
    pub policies: Vec<PolicyStatus>,
    /// Cursor of the next page; null on the last page.
    pub next: Option<String>,
}

/// A policy: its rules, its weight versions and the contents of its buffer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyStatus {
    /// Name of the policy.
    pub policy: String,
    /// Rules. Some apply to groups opened from now on, the others from the next request on.
    pub rules: PolicyRules,
    /// In the answer to `PUT` and `PATCH /policies/{p}`: settings that changed although the request did not name them, and
    /// what the rules probably do not mean.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Number of the current run; it starts at 1 and grows with every reset.
    pub run: i64,
    /// Lineage of the weights; every resume starts a new epoch.
    pub epoch: i64,
    /// Current weight version.
    pub version: i64,
    /// Step at which the version was published.
    pub version_step: Option<i64>,
    /// URL of the version's weights.
    pub version_uri: Option<String>,
    /// Last settled step.
    pub checkpoint_step: Option<i64>,
    /// True after the service was restored from a backup, until a trainer resumes. A trainer that is refused as
    /// `superseded` in this time was not replaced by another one and should resume.
    #[serde(default)]
    pub restored: bool,
    /// Number of rollouts by state, with the state names of the ledger.
    pub rollouts: BTreeMap<String, i64>,
    /// Number of groups by state.
    pub groups: BTreeMap<String, i64>,
    /// Number of batches by state.
    pub batches: BTreeMap<String, i64>,
    /// What the next batch is waiting for.
    pub waiting: Waiting,
}

/// What the next batch is waiting for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Waiting {
    /// Number of groups that are ready now.
    pub ready_groups: i64,
    /// Number of groups in a full batch.
    pub needed_groups: i64,
    /// Number of returned batches, which are delivered first.
    pub returned_batches: i64,
    /// Number of open groups.
    pub open_groups: i64,
    /// The open groups that need the fewest further rollouts, at most 5.
    pub fullest: Vec<OpenGroup>,
    /// The environments that have shares in `batch.environments`, in the order of their labels. If no batch is ready
    /// although there are enough groups, it waits for those that have fewer ready groups than needed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environments: Vec<WaitingEnvironment>,
    /// Number of rollouts with reserved room that have not been posted.
    #[serde(default)]
    pub reserved_rollouts: i64,
    /// When the last rollout was received.
    pub last_post_at: Option<String>,
    /// Number of rollouts and groups dropped in the last hour, by rule.
    pub dropped_last_hour: BTreeMap<String, i64>,
    /// Number of groups that became stale in the last hour.
    pub stale_last_hour: i64,
    /// The consumers that wait for a batch at any replica, the longest waiting first, at most 8. What is shown may be 3
    /// seconds old.
    #[serde(default)]
    pub asking: Vec<WaitingConsumer>,
    /// The batches that consumers hold, the longest held first, at most 8.
    #[serde(default)]
    pub holding: Vec<HeldBatch>,
}

/// A consumer that waits for a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaitingConsumer {
    /// Its name; null if it sends none.
    pub consumer: Option<String>,
    /// Since when it waits. Short pauses between its requests are part of the wait.
    pub since: String,
    /// If it does not ask again until then, it does not wait any more.
    pub until: String,
}

/// A batch that a consumer holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HeldBatch {
    /// Id of the batch.
    pub batch_id: String,
    /// Who holds it; null if the consumer sent no name.
    pub consumer: Option<String>,
    /// When the lease began.
    pub since: String,
    /// When the lease ends, unless it is extended.
    pub expires_at: Option<String>,
    /// Number of the delivery.
    pub attempt: u32,
}

/// An environment, and how many of its groups the next batch needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaitingEnvironment {
    /// Its label.
    pub environment: String,
    /// Number of its groups that are ready, counted up to 1,000 or to the groups of a batch, whichever is more.
    pub ready_groups: i64,
    /// Number of its groups that the next batch waits for; 0 if it has no `min_share`.
    pub needed_groups: i64,
    /// Number of its open groups, among the first 1,000 open groups of the policy.
    pub open_groups: i64,
}

/// An open group and the number of rollouts in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OpenGroup {
    /// Id of the group.
    pub group_id: String,
    /// State, number of arrivals and number of places.
    #[serde(flatten)]
    pub fill: ReceiptGroup,
}

/// Publishes a weight version.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VersionRequest {
    /// Version; greater than the current version by at most 2^41, or an exact repeat of it.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub version: i64,
    /// Step after which the weights were saved; the last acked step when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: Option<i64>,
    /// URL of the weights, up to 2,048 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 2048))]
    pub uri: Option<String>,
    /// Epoch of the caller; the request is refused if the epoch is superseded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
    /// Also publishes a version that is greater by more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
}

/// Reports that the trainer has saved a step durably.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// The saved step: the last acked step or an earlier one.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: i64,
    /// Settle a step even if it is above the last acked one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Epoch of the caller; the request is refused if the epoch is superseded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CheckpointResponse {
    /// Last settled step.
    pub checkpoint_step: i64,
    /// Number of batches settled by this call.
    pub settled_batches: u64,
}

/// Reports that the trainer starts from its checkpoint of a step, or without a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Last saved step; null if the trainer starts without a checkpoint.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: Option<i64>,
    /// Permits a resume below the last settled step, over purged batches (what can still be delivered comes back), or
    /// above the last acked step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Epoch of the caller; the request is refused if the epoch is superseded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a resume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResumeResponse {
    /// The new epoch.
    pub epoch: i64,
    /// The current weight version: the newest version published at or before the step.
    pub version: i64,
    /// Number of batches that came back: those whose leases were revoked and those acked after the step.
    pub returned_batches: u64,
    /// Number of batches that do not come back, because resumes have ended their leases `lease.max_resumes` times.
    #[serde(default)]
    pub quarantined_batches: u64,
    /// Number of batches acked after the step whose payloads are purged; above 0 only with `force`. Those that were not
    /// settled are discarded with reason `lineage-gap`.
    pub undeliverable_batches: u64,
}

/// Starts a new run of the policy under the same name.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResetRequest {
    /// Epoch of the caller; the request is refused if the epoch is superseded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Answer to a reset.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResetResponse {
    /// Number of the new run.
    pub run: i64,
    /// The new epoch.
    pub epoch: i64,
    /// Number of groups discarded with reason `reset`.
    pub discarded_groups: u64,
}
