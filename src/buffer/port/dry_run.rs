//! Dry runs in the store: the groups that were decided last, with everything that their decisions depended on.

use std::sync::Arc;

use async_trait::async_trait;
use forebay_wire::Status;

use super::StoreError;
use crate::{
    buffer::{
        ids::{GroupPk, PolicyPk, RolloutPk, Run, Version},
        rules::Rules,
        states::Verdict,
    },
    clock::Timestamp,
};

/// Past decisions.
#[async_trait]
pub trait DryRunStore: Send + Sync {
    /// Groups that rules decided, the newest first.
    async fn past_groups(&self, find: FindPastGroups) -> Result<PastGroups, StoreError>;
    /// The versions of a policy and when each was published, in the order of the versions.
    async fn published(&self, policy: PolicyPk) -> Result<Vec<(Version, Timestamp)>, StoreError>;
}

/// Which groups to read.
#[derive(Clone, Debug)]
pub struct FindPastGroups {
    /// Their policy.
    pub policy_pk: PolicyPk,
    /// Their run.
    pub run: Run,
    /// Only groups of this environment.
    pub environment: Option<String>,
    /// Only groups that were opened before this one.
    pub before: GroupPk,
    /// The most groups to return.
    pub limit: u32,
    /// The most groups to examine.
    pub examined_max: u32,
}

/// A page of groups.
#[derive(Clone, Debug)]
pub struct PastGroups {
    /// Groups, the newest first.
    pub groups: Vec<PastGroup>,
    /// The number of groups that were examined.
    pub examined: u32,
    /// Groups with too many rollouts, which were passed over.
    pub too_large: u32,
    /// The last group that was examined; none if there are no more.
    pub next: Option<GroupPk>,
}

/// A group as it was decided.
#[derive(Clone, Debug)]
pub struct PastGroup {
    /// Its id.
    pub group_id: String,
    /// Rules that it was opened with.
    pub rules: Arc<Rules>,
    /// The number of its places.
    pub size: u32,
    /// The number of rollouts that suffice.
    pub min_size: u32,
    /// Label of the environment of its first rollout.
    pub environment: Option<String>,
    /// Why it was discarded; none if it became ready.
    pub discarded: Option<String>,
    /// When its first rollout arrived.
    pub opened_at: Timestamp,
    /// When it was decided.
    pub decided_at: Timestamp,
    /// All of its rollouts in the order of their arrival: first those that arrived before the decision.
    pub rollouts: Vec<PastRollout>,
}

/// A rollout as it was posted, as far as its row has that.
#[derive(Clone, Debug)]
pub struct PastRollout {
    /// Key of its row.
    pub rollout_pk: RolloutPk,
    /// Its id.
    pub rollout_id: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// The reason of its verdict.
    pub reason: Option<String>,
    /// Filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// Reward as sent.
    pub reward: Option<f64>,
    /// Its version.
    pub policy_version: Version,
    /// Whether the version was assumed, because the producer sent none. It is then the version at arrival.
    pub version_assumed: bool,
    /// Segments.
    pub segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Response tokens with mask 1, as sent.
    pub trained_tokens: u64,
    /// How its execution ended; none in rows of earlier versions.
    pub status: Option<Status>,
    /// Response tokens; none in rows of earlier versions.
    pub response_tokens: Option<u64>,
    /// Tokens of its longest segment; none in rows of earlier versions.
    pub max_segment_tokens: Option<u64>,
    /// The number of bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// The time of its arrival.
    pub received_at: Timestamp,
}
