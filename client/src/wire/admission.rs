//! `POST /admissions`: room reserved before work starts.

use serde::{Deserialize, Serialize};

/// Asks for room for rollouts that are about to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AdmissionRequest {
    /// Policy that will produce the rollouts; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Rollouts to reserve room for, at least 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub rollouts: u32,
}

/// Room that was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Admission {
    /// What the posts name to use the room up: `admission_id` of a trajectory.
    pub admission_id: String,
    /// Rollouts that there is room for, from 0 to what was asked for.
    pub granted: u32,
    /// Current weight version: the version of rollouts that are posted under the admission without one of their own.
    pub policy_version: i64,
    /// Milliseconds until the rest of the room is given back.
    pub expires_in_ms: u64,
}
