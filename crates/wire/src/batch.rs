//! `POST /batches` and the other calls that a trainer makes about a batch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{ColumnUpload, MediaSpan, Status, Verdict, VersionSpan};

/// A request for the next batch of a policy.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// Policy; `default` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$"))]
    pub policy: Option<String>,
    /// Name of the consumer, the scope of `request_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub consumer: Option<String>,
    /// Makes the request safe to repeat: while the lease is alive, the same request returns the same batch and lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub request_id: Option<String>,
    /// Milliseconds to wait for a batch, at most 60,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 60000))]
    pub wait_ms: Option<u64>,
    /// Return the groups that are ready after `wait_ms`, even if they are fewer than a full batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<bool>,
    /// Epoch of the caller; the request is refused if the epoch is superseded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// An immutable list of whole ready groups of one policy: what one optimizer step consumes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchDescriptor {
    /// Identity of the batch; the same at every delivery.
    pub batch_id: String,
    /// State of the batch.
    pub state: BatchState,
    /// Token that proves the lease; present only in the answer to `POST /batches`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Consumer that held the last lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumer: Option<String>,
    /// Epoch of the last lease.
    pub epoch: i64,
    /// Policy of every rollout in the batch.
    pub policy: String,
    /// When the lease expires; null when the batch is not leased.
    pub expires_at: Option<String>,
    /// Milliseconds until the lease expires; null when the batch is not leased.
    pub expires_in_ms: Option<i64>,
    /// Number of this delivery, counted from 1.
    pub attempt: u32,
    /// Optimizer step that consumed the batch, or that had consumed it before a resume brought it back.
    pub step: Option<i64>,
    /// Why the batch was given back or quarantined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Number of groups; a batch holds whole groups.
    pub groups: u32,
    /// Number of kept and masked rollouts.
    pub rollouts: u32,
    /// Number of rows of `/samples`: one per segment, and one for a rollout without segments.
    pub samples: u32,
    /// Number of prompt and response tokens.
    pub tokens: u64,
    /// Weight versions at the time of the cut.
    pub policy_version: VersionRange,
    /// Statistics for the trainer's log: rewards, staleness, and drops since the previous batch.
    pub metrics: BTreeMap<String, f64>,
    /// URL of the samples.
    pub samples_url: String,
    /// Contents of each shard, for `?shards=n`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<Vec<ShardCount>>,
    /// When the batch was cut.
    pub created_at: String,
    /// When the batch was acked; null unless it is trained or checkpointed.
    pub acked_at: Option<String>,
    /// Milliseconds for which the holder of the last lease had asked for a batch.
    pub waited_ms: i64,
    /// Milliseconds from the beginning of the last lease until the ack, or until now; null unless the batch is leased,
    /// trained or checkpointed.
    pub held_ms: Option<i64>,
}

/// Weight versions at the time a batch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VersionRange {
    /// The policy's version when the batch was cut.
    pub current: i64,
    /// Oldest version of a trained token; null when nothing is trained.
    pub min: Option<i64>,
    /// Newest version of a trained token; null when nothing is trained.
    pub max: Option<i64>,
}

/// Contents of one shard of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ShardCount {
    /// Number of rollouts that have a row in the shard. The rows of a rollout may be in several shards.
    pub rollouts: u32,
    /// Number of rows.
    pub samples: u32,
    /// Number of prompt and response tokens.
    pub tokens: u64,
}

/// What the shards of a batch have about equal amounts of: tokens, or the sum of the squared lengths of their rows, with
/// which the time of attention grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ShardBalance {
    /// Tokens.
    #[default]
    Tokens,
    /// The sum of the squared lengths of the rows. The time that attention takes grows with the square of the length.
    SquaredTokens,
}

/// State of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchState {
    /// Leased until the lease expires.
    Leased,
    /// Given back, expired or brought back by a resume. It is delivered before any new batch.
    Returned,
    /// Acked by an optimizer step that no checkpoint covers yet.
    Trained,
    /// Settled: only a resume with `force` can bring it back.
    Checkpointed,
    /// All its deliveries are used up; `readmit` brings it back.
    Quarantined,
    /// Given back with named groups: those groups are quarantined, and the others are ready again.
    Split,
    /// Its groups were discarded, by `reset` or by an operator.
    Discarded,
}

/// Batches in the order in which they were cut, or the newest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchPage {
    /// Descriptors, without leases.
    pub batches: Vec<BatchDescriptor>,
    /// Cursor of the next page; null on the last page. A page of a filtered list may be empty without being the last.
    pub next: Option<String>,
    /// Number of entries that were examined to find those of the page, at most 10,000 in a filtered list.
    pub examined: u32,
}

/// Extends a lease (a heartbeat).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ExtendRequest {
    /// The lease.
    pub lease: String,
    /// Seconds from now until the lease expires, 1 to 86,400.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400))]
    pub ttl_s: u64,
    /// Epoch of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Reports that an optimizer step consumed the batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AckRequest {
    /// The lease.
    pub lease: String,
    /// Optimizer step, 0 or above.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub step: i64,
    /// Epoch of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// Gives a batch back.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NackRequest {
    /// The lease.
    pub lease: String,
    /// Reason, up to 1,024 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Ids of the groups to quarantine; the batch is then split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<String>>,
    /// Epoch of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// One row of `/samples`: one segment of a rollout.
///
/// `loss = sum_i loss_weight_i * sum_t loss_mask_it * l_it` over the rows of a batch, however the rows are split into
/// microbatches.
///
/// `messages` and `metadata` belong to the rollout and are sent once, on its first row (`segment` 0). The other rows may
/// be in other shards.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sample {
    /// Rollout that the segment belongs to.
    pub rollout_id: String,
    /// Group of the rollout.
    pub group_id: String,
    /// Position of the segment in its rollout, from 0.
    pub segment: i32,
    /// Number of segments of the rollout.
    pub segments: i32,
    /// Label of the segment.
    pub kind: Option<String>,
    /// Label of the environment.
    pub environment: Option<String>,
    /// `kept` or `masked`.
    pub verdict: Verdict,
    /// How the execution ended.
    pub status: Status,
    /// Prompt and response token ids; null for a rollout without segments.
    pub tokens: Option<Vec<i32>>,
    /// Number of response tokens; they are the last of `tokens`.
    pub response_length: i32,
    /// 0 or 1 per response token; all 0 where the verdict is `masked`.
    pub loss_mask: Option<Vec<u8>>,
    /// Behaviour log-probabilities per response token.
    pub logprobs: Option<Vec<f32>>,
    /// Teacher log-probabilities per response token.
    pub teacher_logprobs: Option<Vec<f32>>,
    /// Critic values per response token.
    pub values: Option<Vec<f32>>,
    /// Divisor of the logits at sampling.
    pub temperature: f32,
    /// Nucleus mass at sampling; below 1, importance ratios are biased.
    pub top_p: f32,
    /// Number of candidates at sampling, -1 for all; above 0, importance ratios are biased.
    pub top_k: i32,
    /// Reward of the rollout.
    #[serde(serialize_with = "super::finite::serialize")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub reward: Option<f64>,
    /// Advantage of the rollout; null if each token has its own.
    pub advantage: Option<f32>,
    /// Advantage of each response token, 0 where the mask is 0; null if the rollout has one.
    #[serde(default)]
    pub advantages: Option<Vec<f32>>,
    /// Weight of each trained token of this row in the loss.
    pub loss_weight: f64,
    /// Weight version of the rollout: its oldest span with a trained token.
    pub policy_version: Option<i64>,
    /// Version spans as the producer sent them.
    pub versions: Option<Vec<VersionSpan>>,
    /// Uploads of those columns that the caller asked for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub columns: BTreeMap<String, ColumnUpload>,
    /// Where media stand among the tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub media: Vec<MediaSpan>,
    /// Messages as the producer sent them, on the row of segment 0; null on the other rows of the rollout.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Box<RawValue>>,
    /// Metadata as the producer sent it, on the row of segment 0; null on the other rows of the rollout.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
}
