//! Scores: named numbers about rollouts.

use serde::{Deserialize, Serialize};

use super::{Problem, ReceiptGroup, Verdict};

/// A score of a rollout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScoreRequest {
    /// Policy of the rollout; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Id of the rollout, in the current run of its policy.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub rollout_id: String,
    /// Name of the score. `reward` is the reward, unless the rules compute another one.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub name: String,
    /// The score. It must be finite; the sign of a zero is not kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    #[cfg_attr(feature = "openapi", schema(required = true, value_type = f64))]
    pub value: Option<f64>,
    /// Who gives the score, as scores of several scorers with one name are their mean; when absent, the id of the key, or
    /// `anonymous` without keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub scorer: Option<String>,
    /// Why, in at most 16 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 16_384))]
    pub rationale: Option<String>,
    /// Whether the score may replace another value by the same scorer, as long as the rollout is not judged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub replace: bool,
}

/// The answer to a score.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreReceipt {
    /// Policy of the rollout.
    pub policy: String,
    /// Id of the rollout.
    pub rollout_id: String,
    /// Name of the score.
    pub name: String,
    /// Who gave it.
    pub scorer: String,
    /// True if the same score was already stored and this post changed nothing.
    pub duplicate: bool,
    /// Whether the decision about the rollout counts the score, or will. A score that comes after the decision is stored
    /// and shown, and changes nothing.
    pub applied: bool,
    /// Required scores that the rollout still lacks.
    pub scoring: Vec<String>,
    /// The decision about the rollout; not final as long as it lacks scores.
    pub verdict: Verdict,
    /// Name of the filter that matched, or a built-in code.
    pub reason: Option<String>,
    /// The group after this post.
    pub group: ReceiptGroup,
}

/// One line of the answer to scores that were sent as lines (`application/x-ndjson`).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreLine {
    /// Line of the request, counted from 1. Empty lines are counted but not answered.
    pub line: u64,
    /// HTTP status that the line would have received as a request of its own.
    pub status: u16,
    /// Receipt of a score that was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<ScoreReceipt>,
    /// Problem of a score that was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// The scores of a rollout.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreList {
    /// Policy of the rollout.
    pub policy: String,
    /// Id of the rollout.
    pub rollout_id: String,
    /// Required scores that the rollout lacks.
    pub scoring: Vec<String>,
    /// When the rollout is dropped if it still lacks one; null if it lacks none.
    pub deadline_at: Option<String>,
    /// Its scores, by name.
    pub scores: Vec<ScoreInfo>,
}

/// A score that was given.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreInfo {
    /// Name of the score.
    pub name: String,
    /// Who gave it; null for the producer of the rollout.
    pub scorer: Option<String>,
    /// The score.
    pub value: f64,
    /// Why.
    pub rationale: Option<String>,
    /// Whether the decision about the rollout counts the score, or will.
    pub applied: bool,
    /// When it was given.
    pub given_at: String,
}
