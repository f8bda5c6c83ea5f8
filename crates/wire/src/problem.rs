//! Errors as RFC 9457 problem details.

use serde::{Deserialize, Serialize};

use super::Verdict;

/// Media type of every error body.
pub const PROBLEM_JSON: &str = "application/problem+json";

/// RFC 9457 problem details.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// Stable code of the problem, e.g. `rollout-conflict`; a relative reference in the sense of RFC 9457.
    #[serde(rename = "type")]
    pub kind: String,
    /// Title that belongs to the code.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// What happened in this request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Id of the request; the log and the `x-request-id` header show the same id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The errors in the request, at most 100 entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Violation>,
    /// In a `rollout-conflict`: the verdict of the stored rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Seconds to wait before a retry; the same as `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
}

/// One error in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Violation {
    /// JSON pointer (RFC 6901) into the body, or the name of the query parameter if the request has no body.
    pub pointer: String,
    /// Description of the error.
    pub detail: String,
}
