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
    /// The code in words.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// What happened this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Id of the request, as in the log and in the `x-request-id` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// What is wrong with the request, at most 100 entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Violation>,
    /// Verdict of the stored rollout, in a `rollout-conflict`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Seconds to wait before a retry, as in `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
}

/// One thing wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Violation {
    /// JSON pointer (RFC 6901) into the body; a query parameter's name for requests without one.
    pub pointer: String,
    /// What is wrong, in words.
    pub detail: String,
}
