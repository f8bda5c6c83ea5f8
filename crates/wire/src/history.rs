//! What happened to a policy over time, for people who look at it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What happened to a policy in the buckets of a window. All lists have one entry for each bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicySeries {
    /// Begin of the first bucket.
    pub from: String,
    /// End of the last bucket.
    pub to: String,
    /// Width of a bucket in seconds. It is more than requested if the window begins where only the totals of longer times
    /// are kept.
    pub step_s: u64,
    /// Begins of the buckets in seconds since the Unix epoch.
    pub at: Vec<i64>,
    /// Values by the names of the metrics: of a counter what happened in the bucket, of a gauge the number at its end. Null
    /// where the service was not running.
    pub metrics: BTreeMap<String, Vec<Option<f64>>>,
}

/// The steps of a trainer: one by one in `steps`, or several together in `buckets`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicySteps {
    /// Steps of the current run. A step that was acked again after a resume has an entry for each epoch.
    pub steps: Vec<StepInfo>,
    /// Cursor of the next page; null on the last page.
    pub next: Option<String>,
    /// The requested range of steps in parts of equal size, those without an acked step left out; empty if no range was
    /// requested.
    pub buckets: Vec<StepBucket>,
}

/// What the batches of a step had in all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepInfo {
    /// The step.
    pub step: i64,
    /// Epoch in which it was acked.
    pub epoch: i64,
    /// When its last batch was acked.
    pub acked_at: String,
    /// True if a resume went back before it.
    pub undone: bool,
    /// Number of batches.
    pub batches: i64,
    /// Number of groups.
    pub groups: i64,
    /// Number of groups of several rewards that are all equal: nothing can be learned from them. Groups whose turns or tokens
    /// have advantages of their own are not counted.
    pub flat_groups: i64,
    /// Number of rollouts.
    pub rollouts: i64,
    /// Number of tokens.
    pub tokens: i64,
    /// Number of trained tokens.
    pub trained_tokens: i64,
    /// Mean reward of the rollouts that count in the baselines; null if there are none.
    pub reward_trained: Option<f64>,
    /// Mean reward of all rollouts that arrived before the batches were cut; null if there are none.
    pub reward_all: Option<f64>,
    /// Mean over the groups of how many versions their oldest token is behind.
    pub staleness_mean: Option<f64>,
    /// The most of it.
    pub staleness_max: i64,
    /// Milliseconds for which the consumers had waited.
    pub waited_ms: i64,
    /// Milliseconds for which the consumers held the batches.
    pub held_ms: i64,
    /// Number of deliveries; more than `batches` if some failed.
    pub attempts: i64,
    /// Version when the batches were cut.
    pub version: i64,
}

/// Several steps of a trainer. Steps that a resume went back before are only counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepBucket {
    /// The first acked step.
    pub step_from: i64,
    /// The last acked step.
    pub step_to: i64,
    /// When the last batch was acked.
    pub acked_at: String,
    /// Number of steps.
    pub steps: i64,
    /// Number of steps that a resume went back before.
    pub undone: i64,
    /// Mean reward of the rollouts that count in the baselines.
    pub reward_trained: Option<NumberSpread>,
    /// Mean reward of all rollouts that arrived before the batches were cut.
    pub reward_all: Option<NumberSpread>,
    /// Mean staleness of the groups.
    pub staleness: Option<NumberSpread>,
    /// The greatest staleness of a group.
    pub staleness_max: Option<i64>,
    /// Tokens of a step.
    pub tokens: Option<NumberSpread>,
    /// Groups of a step.
    pub groups: Option<NumberSpread>,
    /// Groups of a step of several rewards that are all equal.
    pub flat_groups: Option<NumberSpread>,
    /// Milliseconds for which the consumers had waited.
    pub waited_ms: Option<NumberSpread>,
    /// Milliseconds for which the consumers held the batches.
    pub held_ms: Option<NumberSpread>,
    /// The most deliveries of a step.
    pub attempts_max: Option<i64>,
    /// The newest version when batches were cut.
    pub version: Option<i64>,
}

/// A number of several steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NumberSpread {
    /// The mean.
    pub mean: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

/// A page of the journal of a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JournalPage {
    /// Entries in the requested order.
    pub entries: Vec<JournalEntry>,
    /// Cursor of the next page; null on the last page.
    pub next: Option<String>,
}

/// Something that an operator or time did to a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JournalEntry {
    /// When it happened.
    pub at: String,
    /// What happened: `rules-changed`, `resumed`, `reset`, `batch-quarantined`, `groups-quarantined`, `readmitted`,
    /// `group-closed`, `group-discarded`, `leases-expired`, `backlog-full`, `backlog-freed` or `filter-fails`. More kinds may
    /// follow.
    pub kind: String,
    /// Id of the key of the caller; null if nobody called, or if the service needs no keys.
    pub key_id: Option<String>,
    /// More about it. The fields depend on the kind.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub detail: serde_json::Value,
}
