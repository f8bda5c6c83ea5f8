//! `POST /trajectories`: what agents post, and the receipt that they get.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Assembly, GroupState, Problem, Purpose, Turn};

/// The complete record of one rollout: one execution of an agent by one policy on one task.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Trajectory {
    /// Policy in training that produced the rollout; `default` when absent.
    #[serde(default, alias = "policy_name", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Id, unique within policy and run, 1 to 256 bytes. If absent, the service creates one, and a retry is not
    /// recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub rollout_id: Option<String>,
    /// Id of the group: rollouts of one task that are compared with each other. If absent, the rollout is a group of
    /// one.
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
    /// Id of the execution that the rollout belongs to, which rollouts of several policies may have in common. If absent,
    /// the service creates one; the rollouts of a bundle that have none share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub execution_id: Option<String>,
    /// Weight version that generated the rollout; the current version at arrival when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub policy_version: Option<i64>,
    /// The admission whose reserved room the rollout uses. It is not part of the rollout's content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"))]
    pub admission_id: Option<String>,
    /// Whether the rollout is trained (`train`, the default) or evaluates the policy (`eval`).
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "Purpose::is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Purpose>, default = "train"))]
    pub purpose: Purpose,
    /// Name of the suite that it is a result of; needed with the purpose `eval`, and only with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub suite: Option<String>,
    /// Name of its task in the suite, with the purpose `eval`; the id of the rollout when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub task: Option<String>,
    /// How the execution ended; `completed` when absent.
    #[serde(default, deserialize_with = "super::object::or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Status>, default = "completed"))]
    pub status: Status,
    /// Reward of the whole rollout. It must be finite; the sign of a zero is not kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub reward: Option<f64>,
    /// Named parts of the reward, for filters and export. Each name may occur once.
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
    /// The calls of the agent to its inference engine, in the order in which they ended. They are sent instead of
    /// `segments`, and the service assembles the segments from them.
    #[serde(default, deserialize_with = "super::object::many_or_none", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Turn>>))]
    pub turns: Vec<Turn>,
    /// Chat messages as a JSON array, returned verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Box<RawValue>>,
    /// JSON object of bounded depth and size, returned verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
}

/// How an execution ended, as reported by the producer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The agent finished on its own.
    #[default]
    Completed,
    /// A length or time bound cut it short.
    Truncated,
    /// The infrastructure failed; the policy was not the cause.
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

/// Sampling parameters. Importance ratios are biased unless the full vocabulary was sampled.
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

/// Sampling parameters as they are sent. `null` means the same as absent, as in all optional fields.
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

/// One training sequence of a rollout. All per-token arrays cover only the response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Label: `turn`, `subagent`, `compaction`, `final`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub kind: Option<String>,
    /// Prompt and response token ids. At least one of them must be a prompt token.
    pub tokens: Vec<i32>,
    /// 0 or 1 per response token. The length of this array is the length of the response. It is empty if nothing was
    /// sampled.
    #[serde(deserialize_with = "super::numbers::mask")]
    pub loss_mask: Vec<u8>,
    /// Length of the response; must equal the length of the mask when present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_length: Option<u32>,
    /// Log-probabilities under the behaviour policy: log-softmax of logits / temperature. Where the mask is 0 they are
    /// ignored and may be null.
    #[serde(
        default,
        deserialize_with = "super::numbers::logprobs",
        alias = "rollout_log_probs",
        alias = "log_probs",
        alias = "response_logprobs",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Option<f32>>>))]
    pub logprobs: Option<Vec<f32>>,
    /// Log-probabilities under a teacher. Where the mask is 0 they are ignored and may be null.
    #[serde(
        default,
        deserialize_with = "super::numbers::logprobs",
        alias = "teacher_log_probs",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Option<f32>>>))]
    pub teacher_logprobs: Option<Vec<f32>>,
    /// Critic values, read before each response token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Vec<f32>>,
    /// Advantage of each response token, for policies with the rule `advantage = "posted"`. Where the mask is 0 they are
    /// ignored and may be null.
    #[serde(default, deserialize_with = "super::numbers::logprobs", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Option<f32>>>))]
    pub advantages: Option<Vec<f32>>,
    /// `[version, start, length]` spans that cover the response without gaps or overlaps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub versions: Option<Vec<VersionSpan>>,
    /// The turns of the response, in order, for policies whose rule `advantage` compares turns. A segment without any has
    /// one for each run of tokens with mask 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<Vec<TurnSpan>>,
    /// Columns of the segment that were uploaded, by the names that the rules of the policy declare.
    #[serde(default, deserialize_with = "super::object::named", skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<BTreeMap<String, ColumnUpload>>))]
    pub columns: BTreeMap<String, ColumnUpload>,
    /// Where media stand over placeholder tokens, in order.
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<MediaSpan>>))]
    pub media: Vec<MediaSpan>,
}

/// A column of a segment: an upload with the bytes of its rows, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ColumnUpload {
    /// BLAKE3 digest of the upload.
    #[cfg_attr(feature = "openapi", schema(pattern = "^[0-9a-f]{64}$"))]
    pub digest: String,
    /// Its length in bytes.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub bytes: u64,
}

/// `[start, length, digest, kind]`: tokens `start..start + length` of the segment stand for a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaSpan(
    /// First token, counted from the first one of the prompt.
    pub i64,
    /// Number of tokens.
    pub i64,
    /// BLAKE3 digest of the upload.
    pub String,
    /// Label: `image`, `video`, `audio`, ...
    pub String,
);

/// The derived one says that all parts are objects.
#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for MediaSpan {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, Type};
        let of = |kind| ObjectBuilder::new().schema_type(kind);
        ArrayBuilder::new()
            .description(Some(
                "`[start, length, digest, kind]`: tokens `start..start + length` of the segment stand for a medium.",
            ))
            .items(OneOfBuilder::new().item(of(Type::Integer)).item(of(Type::String)))
            .min_items(Some(4))
            .max_items(Some(4))
            .into()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for MediaSpan {}

/// One turn of a segment: response tokens `start..start + length`, of which at least one has mask 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TurnSpan {
    /// First response token of the turn.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub start: i64,
    /// Number of response tokens.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub length: i64,
    /// Reward of the turn. It must be finite; the sign of a zero is not kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub reward: Option<f64>,
    /// Name of the state in which the turn began. Turns of a group with the same one are compared with each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub state_key: Option<String>,
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

/// The decision of ingest about one rollout. A retry receives the same verdict as the first post.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Receipt {
    /// Policy of the rollout.
    pub policy: String,
    /// Id of the rollout; created by the service if the producer sent none.
    pub rollout_id: String,
    /// Group of the rollout.
    pub group_id: String,
    /// Execution of the rollout; created by the service if the producer sent none.
    pub execution_id: String,
    /// The decision.
    pub verdict: Verdict,
    /// Name of the filter that matched, or a built-in code: `no-reward`, `group-decided`, `group-full`, `unscored`.
    pub reason: Option<String>,
    /// Required scores that the rollout lacks. As long as there are some, its verdict is `kept` and not final.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scoring: Vec<String>,
    /// True if the same rollout was already stored and this post changed nothing.
    pub duplicate: bool,
    /// Problems for which the rollout was not refused. Each is a name, a colon and a sentence. The names are
    /// `group-decided`, `group-full`, `no-reward`, `admission-lapsed`, `delivered-dropped`, `filter-failed`, `filter-over-budget`,
    /// `logprobs-above-zero`, `logprobs-improbable`, `sampling-truncated`, `mask-without-ones`, `mixed-environments`,
    /// `lone-surrogates`, `unsupported-part`, `images-replaced` and `version-ahead`.
    pub warnings: Vec<String>,
    /// The group after this post.
    pub group: ReceiptGroup,
    /// What became of the turns; absent if the rollout was posted without turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assembly: Option<Assembly>,
}

/// The state of a group, as receipts show it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReceiptGroup {
    /// State after this post.
    pub state: GroupState,
    /// Why it was discarded or quarantined, such as the name of a filter; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Number of kept and masked rollouts.
    pub arrived: u32,
    /// Size of the group: the number of places for rollouts.
    pub size: u32,
}

/// The decision of ingest about a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Uses a place, counts in the baseline and is trained on.
    Kept,
    /// Uses a place and counts in the baseline, but is not trained on.
    Masked,
    /// Dropped by a rule and never delivered. Its payload is kept for `retention.dropped_s`.
    Dropped,
    /// Arrived after its group was decided and is never delivered. Its payload is kept for `retention.dropped_s`.
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
    /// Line of the request, counted from 1. Empty lines are counted but not answered.
    pub line: u64,
    /// HTTP status that the line would have received as a request of its own.
    pub status: u16,
    /// Receipt of a line that was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
    /// Problem of a line that was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}
