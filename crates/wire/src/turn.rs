//! The calls of an agent to its inference engine, from which the service assembles segments.

use serde::{Deserialize, Serialize};

use super::VersionSpan;

/// One call to an inference engine: the ids of its prompt and the ids that were sampled.
///
/// The order of the turns in the list is the order in which the calls ended. It decides labels, the order of the
/// segments, and which one of several retries is kept. It is not part of the content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// Id, unique within the trajectory. Only turns that another turn names in `after` need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub id: Option<String>,
    /// The id of another turn of the list. The prompt is then the prompt of that turn, its tokens, and
    /// `prompt_tokens` behind them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub after: Option<String>,
    /// Ids of the whole prompt, at least one, or of its part behind `after`.
    #[serde(default, alias = "prompt_token_ids", deserialize_with = "super::object::or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<i32>>))]
    pub prompt_tokens: Vec<i32>,
    /// Ids that were sampled. A turn without any is counted and dropped.
    #[serde(alias = "token_ids", alias = "response_token_ids", alias = "output_ids")]
    pub tokens: Vec<i32>,
    /// Log-probabilities of `tokens` under the behaviour policy. Either all turns have them or none.
    #[serde(
        default,
        alias = "rollout_log_probs",
        alias = "log_probs",
        alias = "response_logprobs",
        skip_serializing_if = "Option::is_none"
    )]
    pub logprobs: Option<Vec<f32>>,
    /// `[version, start, length]` spans that cover `tokens` without gaps or overlaps. If other turns have them and this
    /// one has none, its version is the `policy_version` of the trajectory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub versions: Option<Vec<VersionSpan>>,
    /// Why the engine stopped: `stop`, `length`, `tool_calls` or another label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub finish_reason: Option<String>,
    /// Whether the last of `tokens` is a stop token; `false` when absent. The next prompt may then have another id in
    /// its place.
    #[serde(default, deserialize_with = "super::object::or_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>, default = false))]
    pub stopped_on_token: bool,
    /// Name of the agent or sub-agent that made the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub agent: Option<String>,
    /// Whether the agent received the answer; `true` when absent.
    #[serde(default = "delivered", deserialize_with = "delivered_unless_false")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>, default = true))]
    pub delivered: bool,
    /// How often the client has made this call before, by its own account, as in `x-stainless-retry-count`; 0 when absent.
    #[serde(default, deserialize_with = "super::object::or_default", skip_serializing_if = "is_first")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>, default = 0))]
    pub retry_count: u32,
    /// Reward of this call, for policies whose rule `advantage` compares turns. It must be finite; the sign of a zero is not
    /// kept.
    #[serde(
        default,
        deserialize_with = "super::numbers::reward",
        skip_serializing_if = "Option::is_none",
        serialize_with = "super::finite::serialize"
    )]
    pub reward: Option<f64>,
    /// Name of the state in which the agent made the call. Calls of a group with the same one are compared with each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub state_key: Option<String>,
}

impl Default for Turn {
    fn default() -> Self {
        Self {
            id: None,
            after: None,
            prompt_tokens: Vec::new(),
            tokens: Vec::new(),
            logprobs: None,
            versions: None,
            finish_reason: None,
            stopped_on_token: false,
            agent: None,
            delivered: delivered(),
            retry_count: 0,
            reward: None,
            state_key: None,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_first(retry_count: &u32) -> bool {
    *retry_count == 0
}

fn delivered() -> bool {
    true
}

/// Reads a flag that is true when it is absent or `null`.
fn delivered_unless_false<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(delivered))
}

/// What became of posted turns. Calls that are in segments and calls that were dropped are together all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Assembly {
    /// Number of turns.
    pub calls: u32,
    /// Number of segments that were assembled.
    pub segments: u32,
    /// Number of prompts that share more than 64 ids with an earlier turn and then differ from what was recorded. Each
    /// of them begins a segment that a client which repeats its history exactly would not need.
    pub breaks: u32,
    /// Turns that are in no segment, by reason.
    pub dropped: DroppedCalls,
    /// Sampled stop tokens that are not trained, because the next prompt has another id in their place.
    pub trimmed: u32,
}

/// Turns that are in no segment, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DroppedCalls {
    /// Turns without tokens.
    pub empty: u32,
    /// Turns that were not delivered and that no other turn continues.
    pub undelivered: u32,
    /// Turns that were delivered and that no other turn continues, in whose place another one is trained.
    pub retry: u32,
}
