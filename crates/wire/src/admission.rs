//! `POST /admissions`: reserves room before the work starts.

use serde::{Deserialize, Serialize};

use super::Purpose;

/// A request to reserve room for rollouts that are about to start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AdmissionRequest {
    /// Policy that will produce the rollouts; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Number of rollouts to reserve room for, at least 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub rollouts: u32,
    /// Group of all these rollouts. Missing places of a group that has begun always get room, and a new group is opened
    /// only if all of its places fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub group_id: Option<String>,
    /// Rollouts of the group, if they are not as many as in the rules of the policy. Only together with `group_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub group_size: Option<u32>,
    /// Label of the environment of these rollouts. Room is kept for an environment whose `min_share` the next batch
    /// lacks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub environment: Option<String>,
    /// Whether they are trained (`train`, the default) or evaluate the policy (`eval`). Evaluation has its own
    /// room, `admissions.eval` of the rules.
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "Purpose::is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Purpose>, default = "train"))]
    pub purpose: Purpose,
    /// Name of the suite that they are results of; it may be known later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub suite: Option<String>,
    /// Name of their task in the suite, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub task: Option<String>,
}

/// Room that was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Admission {
    /// Id of the admission; posts that use it send it as the `admission_id` of the trajectory.
    pub admission_id: String,
    /// Number of rollouts with reserved room, from 0 to the number requested.
    pub granted: u32,
    /// Current weight version. Rollouts posted under the admission without a version of their own get this one.
    pub policy_version: i64,
    /// Milliseconds until unused room is given back.
    pub expires_in_ms: u64,
    /// Why nothing was granted: the rule and what ends it. Absent if room was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
