//! Dry runs: what other filters would have done with the groups that were decided last.
//!
//! They read the ledger and change nothing. They repeat the decisions of [`ingest`](crate::ingest) and
//! [`finalize`](crate::finalize) with the filters that the policy has now and with a draft. Everything else stays as it was:
//! the size of a group, what a dropped rollout means, and when the rollouts arrived. What agents would have sent instead is
//! not known, so the report says so where it matters.
//!
//! [`judge`] decides one group, and [`report`] adds up what was found.

pub mod judge;
pub mod report;

use std::{collections::HashMap, sync::Arc, time::Duration};

use forebay_wire::{FilterRule, Status};

use crate::{
    clock::Timestamp,
    formats::payload::{Damaged, Described},
    ids::{GroupPk, PolicyName, PolicyPk, RolloutPk, Run, Version},
    rules::Rules,
    scores::Score,
    states::Verdict,
};

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
    pub rollout_id: String,
    pub verdict: Verdict,
    /// The reason of its verdict.
    pub reason: Option<String>,
    /// Filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// Reward as sent.
    pub reward: Option<f64>,
    pub policy_version: Version,
    /// Whether the version was assumed, because the producer sent none. It is then the version at arrival.
    pub version_assumed: bool,
    pub segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Response tokens with mask 1, as sent.
    pub trained_tokens: u64,
    /// How its execution ended.
    pub status: Status,
    pub response_tokens: u64,
    /// Tokens of its longest segment.
    pub max_segment_tokens: u64,
    /// The number of bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// The time of its arrival.
    pub received_at: Timestamp,
}

/// The most groups that filters are tried on.
pub const GROUPS_MAX: u32 = 2_000;

/// The most examples of groups that are decided differently.
pub const EXAMPLES_MAX: u32 = 100;

/// Variables of scope `rollout` that only the payload has. The environment of a group is that of its first rollout, so
/// the row does not have the environment of each.
pub const IN_PAYLOAD: [&str; 5] = ["reward_components", "scores", "metadata", "temperature", "environment"];

/// A request to try filters.
#[derive(Clone, Debug)]
pub struct TryFilters {
    pub policy: PolicyName,
    /// The draft.
    pub filter: Vec<FilterRule>,
    /// The most groups, up to [`GROUPS_MAX`].
    pub groups_max: u32,
    /// Only groups of this environment.
    pub environment: Option<String>,
    /// The most examples, up to [`EXAMPLES_MAX`].
    pub examples_max: u32,
    /// What it may cost.
    pub bounds: Bounds,
}

/// What a dry run may cost. If a bound is reached, the report has the groups that were judged until then.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of payloads, unpacked.
    pub payload_bytes: u64,
    /// Time of evaluating filters.
    pub evaluation: Duration,
}

impl Default for Bounds {
    /// Enough for some thousand rollouts, and little beside what agents and trainers need.
    fn default() -> Self {
        Self { payload_bytes: 64 << 20, evaluation: Duration::from_millis(500) }
    }
}

/// What payloads say.
#[derive(Default)]
pub struct Payloads {
    pub described: HashMap<RolloutPk, Result<Described, Damaged>>,
    /// The scores that were given to these rollouts, if filters ask for them.
    pub scores: HashMap<RolloutPk, Vec<Score>>,
    pub too_large: Vec<RolloutPk>,
}
