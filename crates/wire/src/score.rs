//! Scores: named numbers about rollouts, and the work of those who give them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, de::Visitor};
use serde_json::value::RawValue;

use super::{Problem, ReceiptGroup, ScoreWorkPer, Segment, Status, Verdict};

/// A score of a rollout, or with `failed` that the holder of a lease could not give it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
    /// The turn that the score is the reward of, for policies whose rule `advantage` compares turns: its number, counted from
    /// 0 over all segments, or the id of its call. It takes the place of the reward that came with the turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<ScoreTurn>,
    /// The score. It must be finite; the sign of a zero is not kept. Needed unless there is `failed`.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub value: Option<f64>,
    /// Why the holder of the lease could not give the score, in at most 1,024 bytes. The work can be leased again, until
    /// its attempts are used up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 1024))]
    pub failed: Option<String>,
    /// The lease of the work that this score settles. If it has ended, nothing is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub lease: Option<String>,
    /// Who gives the score, as scores of several scorers with one name are their mean; when absent, the scorer of the
    /// lease, without one the id of the key, or `anonymous` without keys.
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

/// A turn of a rollout: its number, or the id of its call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum ScoreTurn {
    /// Counted from 0 over all segments.
    Number(i64),
    /// The id of an answer as the agent received it, or of a turn that was posted.
    Call(String),
}

/// By hand, because derived code says of anything else that it matches no variant.
impl<'de> Deserialize<'de> for ScoreTurn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Turn;
        impl Visitor<'_> for Turn {
            type Value = ScoreTurn;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("the number of a turn or the id of its call")
            }

            fn visit_i64<E>(self, number: i64) -> Result<ScoreTurn, E> {
                Ok(ScoreTurn::Number(number))
            }

            fn visit_u64<E>(self, number: u64) -> Result<ScoreTurn, E> {
                Ok(ScoreTurn::Number(i64::try_from(number).unwrap_or(i64::MAX)))
            }

            fn visit_str<E>(self, call: &str) -> Result<ScoreTurn, E> {
                Ok(ScoreTurn::Call(call.to_owned()))
            }
        }
        deserializer.deserialize_any(Turn)
    }
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
    /// The number of the turn that it is the reward of; absent if it is about the whole rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u32>,
    /// Who gave it.
    pub scorer: String,
    /// True if the same score was already stored and this post changed nothing.
    pub duplicate: bool,
    /// Whether the decision about the rollout counts the score, or will. A score that comes after the decision is stored
    /// and shown, and changes nothing.
    pub applied: bool,
    /// True if no score was given, and the attempt of the lease's holder was counted as failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub failed: bool,
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
    /// The number of the turn that it is the reward of; absent if it is about the whole rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u32>,
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
    /// Which lease of its work it settled, counted from 1; absent if it was given without a lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
}

/// A request for work: scores that rollouts lack and that the rules let scorers lease (`scores.work`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScoreLeaseRequest {
    /// Policy of the rollouts; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Names of the scores that the scorer can give, 1 to 16.
    #[cfg_attr(feature = "openapi", schema(min_items = 1, max_items = 16))]
    pub names: Vec<String>,
    /// The most items, at most 256; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 256))]
    pub max: Option<u32>,
    /// Milliseconds to wait for work, at most 60,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 60000))]
    pub wait_ms: Option<u64>,
    /// Name of the scorer, the scope of `request_id`; when absent, the id of the key, or `anonymous` without keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub scorer: Option<String>,
    /// Makes the request safe to repeat: while one of its leases is alive, the same request returns the same items.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub request_id: Option<String>,
    /// Seconds of the leases, at most 86,400; `lease.ttl_s` of the rules when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400))]
    pub ttl_s: Option<u64>,
    /// What of the rollouts to send along.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub include: Vec<ScoreInclude>,
}

/// A part of a rollout that work for scorers can have with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScoreInclude {
    /// The chat messages.
    Messages,
    /// The metadata.
    Metadata,
    /// The segments as text, if the configuration has a tokenizer for the policy's model.
    Text,
    /// The segments with all of their columns.
    Segments,
}

/// Work that was leased.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreLeases {
    /// The items, oldest first; empty if there was no work in time.
    pub items: Vec<ScoreItem>,
}

/// One piece of work: a score of a rollout, or of the rollouts of a group.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreItem {
    /// Token that proves the lease, for `POST /scores`.
    pub lease: String,
    /// When the lease expires.
    pub expires_at: String,
    /// Milliseconds until then.
    pub expires_in_ms: i64,
    /// Number of this attempt, counted from 1.
    pub attempt: u32,
    /// How many there are.
    pub max_attempts: u32,
    /// Policy of the rollouts.
    pub policy: String,
    /// Name of the score.
    pub name: String,
    /// Whether it is about one rollout or about a whole group.
    pub per: ScoreWorkPer,
    /// Group of the rollouts.
    pub group_id: String,
    /// The rollout, or the kept and masked rollouts of the group.
    pub rollouts: Vec<ScoreItemRollout>,
}

/// A rollout that needs a score, or that stands beside one.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreItemRollout {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Required scores that it lacks. A rollout of a group that does not lack the score of the item needs none.
    pub scoring: Vec<String>,
    /// Weight version of the rollout.
    pub policy_version: i64,
    /// How its execution ended.
    pub status: Status,
    /// The reward that its producer sent.
    #[serde(serialize_with = "super::finite::serialize")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub reward: Option<f64>,
    /// Named parts of the reward that its producer sent; in a group, those of a rollout with all of its scores have these
    /// with them.
    pub reward_components: BTreeMap<String, f64>,
    /// Chat messages, if they were asked for and there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Box<RawValue>>,
    /// Metadata, if it was asked for and there is some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
    /// The segments as text, if that was asked for and the tokenizer is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<Vec<SegmentText>>,
    /// The segments, if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segments: Option<Vec<Segment>>,
    /// Why something is not here that was asked for, or that others have; absent if nothing is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted: Option<ScoreOmitted>,
}

/// The text of a segment, with special tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SegmentText {
    /// The prompt.
    pub prompt: String,
    /// The response.
    pub response: String,
}

/// Why the contents of a rollout are not sent along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ScoreOmitted {
    /// The answer would be too long with its contents, or with its reward components. `GET /trajectories/content` has them in
    /// parts.
    Size,
    /// The stored data is damaged.
    Damaged,
}

/// A heartbeat for leases of work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScoreExtendRequest {
    /// Policy of the work; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// The leases, 1 to 256.
    #[cfg_attr(feature = "openapi", schema(min_items = 1, max_items = 256))]
    pub leases: Vec<String>,
    /// Seconds from now until they expire, at most 86,400; `lease.ttl_s` of the rules when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400))]
    pub ttl_s: Option<u64>,
}

/// What became of leases that were to be extended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreExtended {
    /// When the leases that are held expire now.
    pub expires_at: String,
    /// Milliseconds until then.
    pub expires_in_ms: i64,
    /// Leases that are held, in the order of the request.
    pub held: Vec<String>,
    /// Leases that are lost: their work is settled, or will be given to others.
    pub lost: Vec<String>,
}

/// A request to try work again whose attempts are used up.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ScoreRetryRequest {
    /// Policy of the work; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Name of the score.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub name: String,
}

/// The answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScoreRetried {
    /// Items that have all of their attempts again.
    pub retried: u64,
}
