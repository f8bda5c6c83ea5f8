//! `GET /trajectories/content`: what one rollout consists of, for people who look at it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{BatchState, Sampling, Status, TrajectoryStory, VersionSpan};

/// A part of the content of one rollout: a window of its tokens and a page of its messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TrajectoryContent {
    /// What happened to the rollout.
    pub story: TrajectoryStory,
    /// Label of the environment.
    pub environment: Option<String>,
    /// How the execution ended.
    pub status: Status,
    /// Named parts of the reward.
    pub reward_components: BTreeMap<String, f64>,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// The batch that contains the rollout; null if none does.
    pub delivered: Option<Delivered>,
    /// Number of segments.
    pub segments_total: u32,
    /// Segments in order, at most the first 4,096.
    pub segments: Vec<SegmentSummary>,
    /// A part of one segment; null for a rollout without segments.
    pub window: Option<TokenWindow>,
    /// The whole of the same segment, in at most 512 parts; null for a rollout without segments.
    pub map: Option<TokenMap>,
    /// A page of the chat messages; null if the producer sent none.
    pub messages: Option<MessagePage>,
    /// Metadata as the producer sent it; null if it sent none, or more than 256 KiB.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
    /// Bytes of the metadata; 0 if the producer sent none.
    pub metadata_bytes: u64,
    /// The service's time.
    pub at: String,
}

/// The batch that contains a rollout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Delivered {
    /// Id of the batch.
    pub batch_id: String,
    /// State of the batch.
    pub state: BatchState,
    /// Number of its last delivery.
    pub attempt: u32,
    /// Optimizer step that consumed it, or that had consumed it before a resume brought it back.
    pub step: Option<i64>,
    /// Weight of each trained token in the loss, by segment; a rollout without segments has one.
    pub loss_weights: Vec<f64>,
}

/// One segment without its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SegmentSummary {
    /// Label of the segment.
    pub kind: Option<String>,
    /// Number of prompt and response tokens.
    pub tokens: u64,
    /// Number of response tokens; they are the last of the tokens.
    pub response_length: u64,
    /// Number of response tokens with mask 1, as sent.
    pub masked_in: u64,
    /// Number of response tokens that are trained: 0 unless the verdict is `kept`, and without stale tokens that the policy
    /// masks.
    pub trained: u64,
    /// The versions that generated it; null if the producer sent none by token.
    pub versions: Option<SegmentVersions>,
    /// What it has for each response token: `logprobs`, `teacher_logprobs`, `values`, `advantages`.
    pub has: Vec<String>,
}

/// The versions that generated a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SegmentVersions {
    /// The oldest version.
    pub min: i64,
    /// The newest version.
    pub max: i64,
    /// Number of spans.
    pub spans: u64,
}

/// Tokens of one segment. All lists except `versions` have one entry for each token of the window; the entries of prompt
/// tokens are null.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenWindow {
    /// Index of the segment, from 0.
    pub segment: u32,
    /// Index of the first token, from 0.
    pub from: u64,
    /// Index behind the last token.
    pub to: u64,
    /// Number of prompt tokens of the segment; the response begins behind them.
    pub prompt_tokens: u64,
    /// Token ids.
    pub tokens: Vec<i32>,
    /// The mask as the producer sent it.
    pub loss_mask: Vec<Option<u8>>,
    /// The mask as it is delivered, or would be now.
    pub trained_mask: Vec<Option<u8>>,
    /// Behaviour log-probabilities; null if the segment has none.
    pub logprobs: Option<Vec<Option<f32>>>,
    /// Teacher log-probabilities; null if the segment has none.
    pub teacher_logprobs: Option<Vec<Option<f32>>>,
    /// Critic values; null if the segment has none.
    pub values: Option<Vec<Option<f32>>>,
    /// Advantages that the producer sent; null if the segment has none.
    pub advantages: Option<Vec<Option<f32>>>,
    /// The version spans with a token in the window, as the producer sent them: `start` counts response tokens. Null if the
    /// producer sent none.
    pub versions: Option<Vec<VersionSpan>>,
}

/// A whole segment in parts of equal size. All lists have one entry for each part; the last part may be smaller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenMap {
    /// Index of the segment, from 0.
    pub segment: u32,
    /// Number of tokens of a part.
    pub tokens_per_bucket: u64,
    /// Number of parts, at most 512.
    pub buckets: u64,
    /// Share of response tokens among the tokens of the part.
    pub response: Vec<f64>,
    /// Share of tokens with mask 1, as sent.
    pub masked_in: Vec<f64>,
    /// Share of tokens that are trained.
    pub trained: Vec<f64>,
    /// Mean log-probability of the tokens with mask 1; null where there are none.
    pub logprob_mean: Vec<Option<f64>>,
    /// Smallest log-probability of the tokens with mask 1; null where there are none.
    pub logprob_min: Vec<Option<f64>>,
    /// Mean critic value of the response tokens; null if the segment has none.
    pub value_mean: Option<Vec<Option<f64>>>,
    /// Oldest version of a response token; null if the producer sent no versions by token.
    pub version_min: Option<Vec<Option<i64>>>,
}

/// A page of chat messages.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MessagePage {
    /// Number of messages of the rollout.
    pub count: u64,
    /// Index of the first message of the page.
    pub from: u64,
    /// Messages in order, together at most 1 MiB.
    pub items: Vec<ContentMessage>,
    /// Index of the first message of the next page; null on the last page.
    pub next: Option<u64>,
}

/// One chat message.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ContentMessage {
    /// Its index, from 0.
    pub index: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The message as the producer sent it; null if it has more than 256 KiB and was not asked for alone.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub message: Option<Box<RawValue>>,
    /// The `role` of a message that is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}
