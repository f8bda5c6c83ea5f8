//! `POST /trajectories`: what agents hand in, and the receipt that answers it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{GroupState, Problem};

/// The complete record of one rollout: one execution of an agent by one policy on one task.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Trajectory {
    /// Policy in training that produced the rollout; `default` when absent.
    #[serde(default, alias = "policy_name", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Identity within policy and run, 1 to 256 bytes. Minted when absent, and then a retry is not recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub rollout_id: Option<String>,
    /// Rollouts of one task that are compared with each other; absent means a group of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub group_id: Option<String>,
    /// Size of the group in rollouts; fixed by the group's first rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub group_size: Option<u32>,
    /// Label of the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub environment: Option<String>,
    /// Weight version that generated the rollout; absent means the current one at arrival.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub policy_version: Option<i64>,
    /// The admission whose room the rollout uses up. Not part of its content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"))]
    pub admission_id: Option<String>,
    /// How the execution ended; `completed` when absent.
    #[serde(default, deserialize_with = "super::object::or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Status>, default = "completed"))]
    pub status: Status,
    /// Finite reward of the whole rollout; the sign of a zero is not kept.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "super::finite::serialize")]
    pub reward: Option<f64>,
    /// Named parts of the reward, for filters and export; every name once.
    #[serde(default, deserialize_with = "super::object::components", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, f64>>))]
    pub reward_components: BTreeMap<String, f64>,
    /// How tokens were sampled.
    #[serde(default, deserialize_with = "super::object::one_or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Sampling>))]
    pub sampling: Sampling,
    /// Training sequences of the rollout, in order.
    #[serde(default, deserialize_with = "super::object::many_or_none", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Segment>>))]
    pub segments: Vec<Segment>,
    /// Chat messages as a JSON array, returned verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Box<RawValue>>,
    /// Free form JSON object of bounded depth and size, returned verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
}

/// How an execution ended, in the words of its producer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The agent finished on its own.
    #[default]
    Completed,
    /// A length or time bound cut it short.
    Truncated,
    /// Its infrastructure gave up: not the policy's doing.
    Aborted,
    /// The agent or environment raised an error.
    Failed,
}

impl Status {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Truncated => "truncated",
            Self::Aborted => "aborted",
            Self::Failed => "failed",
        }
    }
}

/// Sampling parameters; anything but the full vocabulary biases importance ratios.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, from = "SamplingAsSent")]
pub struct Sampling {
    /// Divisor of the logits, above 0.
    pub temperature: f32,
    /// Nucleus mass, in (0, 1].
    pub top_p: f32,
    /// Number of candidates, -1 for all.
    pub top_k: i32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: -1 }
    }
}

/// Sampling parameters as they are sent: `null` is as good as absent, as in all optional fields.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SamplingAsSent {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
}

impl From<SamplingAsSent> for Sampling {
    fn from(SamplingAsSent { temperature, top_p, top_k }: SamplingAsSent) -> Self {
        let defaults = Self::default();
        Self {
            temperature: temperature.unwrap_or(defaults.temperature),
            top_p: top_p.unwrap_or(defaults.top_p),
            top_k: top_k.unwrap_or(defaults.top_k),
        }
    }
}

/// One training sequence of a rollout. All per-token arrays cover the response region alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Label: turn, subagent, compaction, final, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub kind: Option<String>,
    /// Prompt and response token ids, at least one of them prompt.
    pub tokens: Vec<i32>,
    /// 0 or 1 per response token; its length, at least 1, is the response length.
    pub loss_mask: Vec<u8>,
    /// Length of the response, checked against the mask when present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_length: Option<u32>,
    /// Log-probabilities under the behaviour policy: log-softmax of logits / temperature.
    #[serde(
        default,
        alias = "rollout_log_probs",
        alias = "log_probs",
        alias = "response_logprobs",
        skip_serializing_if = "Option::is_none"
    )]
    pub logprobs: Option<Vec<f32>>,
    /// Log-probabilities under a teacher.
    #[serde(default, alias = "teacher_log_probs", skip_serializing_if = "Option::is_none")]
    pub teacher_logprobs: Option<Vec<f32>>,
    /// Critic values read before each response token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Vec<f32>>,
    /// `[version, start, length]` spans that tile the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub versions: Option<Vec<VersionSpan>>,
}

/// `[version, start, length]`: response tokens `start..start + length` were generated by weight version `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VersionSpan(
    /// Weight version.
    pub i64,
    /// First response token of the span.
    pub i64,
    /// Number of response tokens.
    pub i64,
);

/// What ingest decided about one rollout; a retry repeats the first verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Receipt {
    /// Policy of the rollout.
    pub policy: String,
    /// Identity of the rollout, minted when the producer sent none.
    pub rollout_id: String,
    /// Group of the rollout.
    pub group_id: String,
    /// The decision.
    pub verdict: Verdict,
    /// Name of the filter that matched, or a built-in code: `no-reward`, `group-decided`.
    pub reason: Option<String>,
    /// True when the same rollout was already stored; nothing changed.
    pub duplicate: bool,
    /// What a producer should know and was not refused for: each is a name, a colon and a sentence. The names are
    /// `group-decided`, `no-reward`, `admission-lapsed`, `filter-failed`, `filter-over-budget`, `logprobs-above-zero`, `logprobs-improbable`,
    /// `sampling-truncated`, `mask-without-ones` and `version-ahead`.
    pub warnings: Vec<String>,
    /// The group after this post.
    pub group: ReceiptGroup,
}

/// A group as its producers see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReceiptGroup {
    /// State after the post.
    pub state: GroupState,
    /// Kept and masked rollouts.
    pub arrived: u32,
    /// Places.
    pub size: u32,
}

/// What ingest decided about a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Takes a place, votes and trains.
    Kept,
    /// Takes a place and votes in the baseline, trains nothing.
    Masked,
    /// Refused by a rule; stays in the ledger alone.
    Dropped,
    /// Arrived after its group was decided; stays in the ledger alone.
    Late,
}

impl Verdict {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Masked => "masked",
            Self::Dropped => "dropped",
            Self::Late => "late",
        }
    }
}

/// One line of the answer to a bulk (`application/x-ndjson`) post.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BulkLine {
    /// Line of the request, from 1; empty lines count and are not answered.
    pub line: u64,
    /// HTTP status that the line would have had on its own.
    pub status: u16,
    /// Receipt of an accepted line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
    /// Problem of a refused line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}
