//! `POST /batches` and what a trainer does with a batch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Status, Verdict, VersionSpan};

/// Asks for the next batch of a policy.
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
    /// Makes the request repeatable: while its lease lives, the same request returns the same batch and lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 256))]
    pub request_id: Option<String>,
    /// Milliseconds to wait for a batch, at most 60,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 60000))]
    pub wait_ms: Option<u64>,
    /// Take what is there after `wait_ms`, even if it is less than a full batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<bool>,
    /// Epoch of the caller; a superseded one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// An immutable list of whole ready groups of one policy: what one optimizer step consumes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchDescriptor {
    /// Identity of the batch; the same at every delivery.
    pub batch_id: String,
    /// Where the batch stands.
    pub state: BatchState,
    /// Proof of the claim, only in the answer to `POST /batches`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Consumer of the last lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumer: Option<String>,
    /// Epoch of the last lease.
    pub epoch: i64,
    /// Policy of every rollout in it.
    pub policy: String,
    /// End of the lease; null when it is not leased.
    pub expires_at: Option<String>,
    /// Milliseconds to the end of the lease; null when it is not leased.
    pub expires_in_ms: Option<i64>,
    /// Number of this delivery, from 1.
    pub attempt: u32,
    /// Optimizer step that consumed it, or had consumed it before it came back.
    pub step: Option<i64>,
    /// Why it was given back or quarantined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whole groups.
    pub groups: u32,
    /// Kept and masked rollouts.
    pub rollouts: u32,
    /// Rows of `/samples`: one per segment, one for a rollout without segments.
    pub samples: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Weight versions.
    pub policy_version: VersionRange,
    /// What the trainer may log: rewards, staleness, drops since the batch before.
    pub metrics: BTreeMap<String, f64>,
    /// Where the samples are.
    pub samples_url: String,
    /// Contents of each shard, under `?shards=n`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<Vec<ShardCount>>,
    /// When it was cut.
    pub created_at: String,
}

/// Weight versions at the cut of a batch.
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

/// What one shard of a batch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ShardCount {
    /// Whole rollouts.
    pub rollouts: u32,
    /// Rows.
    pub samples: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
}

/// Where a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum BatchState {
    /// Claimed until its lease expires.
    Leased,
    /// Given back, expired or brought back by a resume; goes out before any new batch.
    Returned,
    /// Acked by an optimizer step that no checkpoint covers yet.
    Trained,
    /// Settled: no resume without force brings it back.
    Checkpointed,
    /// Its deliveries are used up; `readmit` brings it back.
    Quarantined,
    /// Given back with named groups: those are quarantined, the others are ready again.
    Split,
    /// Its groups were discarded by `reset` or by hand.
    Discarded,
}

/// Batches in the order in which they were cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchPage {
    /// Descriptors without leases.
    pub batches: Vec<BatchDescriptor>,
    /// Cursor of the next page; null on the last. A page of a filtered list may be empty and not be the last.
    pub next: Option<String>,
}

/// Heartbeat of a lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ExtendRequest {
    /// The lease.
    pub lease: String,
    /// Seconds from now until it expires, 1 to 86,400.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400))]
    pub ttl_s: u64,
    /// Epoch of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// The batch was consumed by an optimizer step.
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
    /// Why, up to 1,024 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Ids of groups to quarantine; the batch is then split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<String>>,
    /// Epoch of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<i64>,
}

/// One row of `/samples`: one segment of a rollout.
///
/// `loss = sum_i loss_weight_i * sum_t loss_mask_it * l_it` over the rows of a batch, on any microbatching.
///
/// `messages` and `metadata` belong to the rollout and travel once, on its first row (`segment` 0). A shard holds whole
/// rollouts, so that row is always in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sample {
    /// Rollout of the segment.
    pub rollout_id: String,
    /// Group of the rollout.
    pub group_id: String,
    /// Place of the segment in its rollout, from 0.
    pub segment: i32,
    /// Segments of the rollout.
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
    /// Response tokens, the last of `tokens`.
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
    #[serde(default = "full_mass")]
    pub top_p: f32,
    /// Number of candidates at sampling, -1 for all; above 0, importance ratios are biased.
    #[serde(default = "all_candidates")]
    pub top_k: i32,
    /// Reward of the rollout.
    #[serde(serialize_with = "super::finite::serialize")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub reward: Option<f64>,
    /// Advantage of the rollout.
    pub advantage: f32,
    /// Weight of each trained token of this row in the loss.
    pub loss_weight: f64,
    /// Weight version of the rollout: its oldest span with a trained token.
    pub policy_version: Option<i64>,
    /// Spans as sent.
    pub versions: Option<Vec<VersionSpan>>,
    /// Messages as sent, on the row of segment 0; null on the other rows of the rollout.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Box<RawValue>>,
    /// Metadata as sent, on the row of segment 0; null on the other rows of the rollout.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Box<RawValue>>,
}

fn full_mass() -> f32 {
    1.0
}

fn all_candidates() -> i32 {
    -1
}
