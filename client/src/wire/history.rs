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
