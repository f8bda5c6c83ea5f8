//! The ledger: the history of rollouts and groups.

use forebay_wire::Status;

use crate::{
    clock::Timestamp,
    evals::Evaluates,
    ids::{BatchId, ExecutionId, GroupId, PolicyName, RolloutId, RolloutPk, Run, Step, Version},
    ingest::decide::GroupFill,
    pages::Cursor,
    staleness::TrainedVersions,
    states::{GroupState, RolloutState, Verdict},
};

/// The group of the newest rollout of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatestGroup {
    pub group_id: String,
    pub state: GroupState,
}

/// A rollout in the ledger.
#[derive(Clone, Debug)]
pub struct Story {
    /// The cursor of its entry.
    pub rollout_pk: RolloutPk,
    pub policy: PolicyName,
    /// What it is a result of, if it evaluates the policy.
    pub evaluates: Option<Evaluates>,
    pub run: Run,
    pub rollout_id: String,
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    pub verdict: Verdict,
    /// The reason of its verdict.
    pub reason: Option<String>,
    /// Filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// The required scores that it lacks.
    pub scoring: Vec<String>,
    pub state: RolloutState,
    pub group_id: String,
    pub group: GroupFill,
    pub group_reason: Option<String>,
    /// Its group's environment.
    pub environment: Option<String>,
    /// The batches that carried it.
    pub batches: Vec<BatchId>,
    /// The step that consumed it.
    pub step: Option<Step>,
    pub reward: Option<f64>,
    pub advantage: Option<f64>,
    pub policy_version: Version,
    /// Whether the version was assumed, because the producer sent none.
    pub version_assumed: bool,
    /// Versions of its trained tokens.
    pub trained_versions: Option<TrainedVersions>,
    /// The number of its segments.
    pub segments: u32,
    /// The number of its tokens.
    pub tokens: u64,
    /// The number of its tokens with mask 1, without those that are masked as stale.
    pub trained_tokens: u64,
    /// The number of its response tokens.
    pub response_tokens: u64,
    /// How its execution ended.
    pub status: Status,
    /// The attempts of the session that was opened for it.
    pub attempts: Option<u32>,
    /// The time of its arrival.
    pub received_at: Timestamp,
    /// The time of the decision of its group.
    pub decided_at: Option<Timestamp>,
    /// The time when its batch was cut.
    pub batched_at: Option<Timestamp>,
    /// The time when its batch was acked.
    pub acked_at: Option<Timestamp>,
    /// The time when its payload was purged.
    pub purged_at: Option<Timestamp>,
}

/// Which rollouts to list.
#[derive(Clone, Debug, Default)]
pub struct StoryFilter {
    /// Only rollouts of this policy. None is allowed only with `execution_id`, and means all policies.
    pub policy: Option<PolicyName>,
    /// Only the rollout with this id.
    pub rollout_id: Option<RolloutId>,
    /// Only rollouts of this execution, of all runs.
    pub execution_id: Option<ExecutionId>,
    /// Only rollouts of this group.
    pub group_id: Option<GroupId>,
    /// Only rollouts with this verdict.
    pub verdict: Option<Verdict>,
    /// Only rollouts with this reason.
    pub reason: Option<String>,
    /// Only rollouts in this state.
    pub state: Option<RolloutState>,
    /// Only rollouts that this step consumed.
    pub step: Option<Step>,
    /// Only rollouts of groups of this environment.
    pub environment: Option<String>,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries of a page.
    pub limit: u32,
}

impl StoryFilter {
    /// Whether a page may pass over rollouts of its policy, group or execution.
    #[must_use]
    pub fn has_filters(&self) -> bool {
        let in_execution = self.execution_id.is_some() && (self.policy.is_some() || self.group_id.is_some());
        let by_outcome = self.verdict.is_some() || self.reason.is_some() || self.state.is_some();
        in_execution || by_outcome || self.step.is_some() || self.environment.is_some()
    }
}

/// Which groups to list.
#[derive(Clone, Debug, Default)]
pub struct GroupFilter {
    pub policy: PolicyName,
    /// Only the group with this id.
    pub group_id: Option<GroupId>,
    /// Only groups that this batch was cut with, in their places.
    pub batch_id: Option<BatchId>,
    /// Only groups in this state.
    pub state: Option<GroupState>,
    /// Only groups that were discarded or quarantined for this reason.
    pub reason: Option<String>,
    /// Only groups of this environment.
    pub environment: Option<String>,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries of a page.
    pub limit: u32,
}
