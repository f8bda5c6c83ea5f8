//! What the ledger knows about a policy and about the things that have an id, for people who ask why.

use std::sync::Arc;

use crate::{
    clock::Timestamp,
    groups::Group,
    ids::{GroupId, PolicyName, PolicyPk, RolloutId, Run, SessionId},
    lease::Batch,
    looking::{
        explain::facts::{Asking, Event, GroupFacts, Lease, ScoringFacts},
        history::Snapshot,
        ledger::Story,
        steps::StepRow,
    },
    rules::Rules,
    scores::Score,
};

/// Which policy to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadFacts {
    pub policy: PolicyPk,
    pub run: Run,
    /// The time now.
    pub now: Timestamp,
    /// The minutes in which the windows begin.
    pub windows: [i64; 3],
}

/// What is known about a policy.
#[derive(Clone, Debug)]
pub struct LedgerFacts {
    /// When it was created.
    pub created: Timestamp,
    /// For each window, the newest totals of its beginning or of before.
    pub before: [Option<Snapshot>; 3],
    /// The oldest totals of its history.
    pub oldest: Option<Snapshot>,
    /// When the group that has been ready longest was decided.
    pub oldest_ready: Option<Timestamp>,
    /// Consumers that wait.
    pub asking: Vec<Asking>,
    /// When a consumer asked last whose wait did not end with a batch.
    pub last_asked: Option<Timestamp>,
    /// Batches under a lease.
    pub leases: Vec<Lease>,
    /// Batches that came back.
    pub returned: Vec<Lease>,
    /// The newest steps, the newest first.
    pub steps: Vec<StepRow>,
    /// How many rollouts the fullest open groups lack.
    pub lacking: Vec<u32>,
    /// What waits for scores, if something does.
    pub scoring: Option<ScoringFacts>,
    /// The newest groups.
    pub groups: Vec<GroupFacts>,
    /// The newest entries of the journal, the newest first.
    pub events: Vec<Event>,
}

/// An id that several policies may have.
#[derive(Clone, Debug)]
pub struct FindId {
    /// The id as that of a rollout; none if it cannot be one.
    pub rollout_id: Option<RolloutId>,
    /// The id as that of a group; none if it cannot be one.
    pub group_id: Option<GroupId>,
    /// Where to look.
    pub policies: Vec<PolicyPk>,
}

/// The policies that have an id, by name.
#[derive(Clone, Debug, Default)]
pub struct IdMatches {
    /// Those that have a rollout with it.
    pub rollouts: Vec<PolicyName>,
    /// Those that have a group with it.
    pub groups: Vec<PolicyName>,
    /// Those that have a session of a rollout with it.
    pub sessions: Vec<(PolicyName, SessionId)>,
    /// Those that have open sessions of a group with it, and how many.
    pub open_sessions: Vec<(PolicyName, i64)>,
}

/// A rollout or a group whose life is asked for.
#[derive(Clone, Debug)]
pub struct FindLife {
    pub policy: PolicyName,
    /// What it is.
    pub of: LifeOf,
    /// Ready groups that are counted at most.
    pub line_max: i64,
}

/// Whose life is asked for.
#[derive(Clone, Debug)]
pub enum LifeOf {
    Rollout(RolloutId),
    Group(GroupId),
}

/// A rollout or a group with what explains its state.
#[derive(Clone, Debug)]
pub struct Life {
    /// The rollout, if one was asked for.
    pub story: Option<Story>,
    /// The group, or that of the rollout.
    pub group: Group,
    /// The rules that the group was opened under.
    pub rules: Arc<Rules>,
    /// The rollout that took the last place of the group.
    pub last_member: Option<LastMember>,
    /// How many groups were ready before this one and still are, if it is ready.
    pub line: Option<i64>,
    /// The newest batches that have carried the group, the oldest of them first.
    pub batches: Vec<Batch>,
    /// The scores that the rollout was given.
    pub scores: Vec<Score>,
}

/// The rollout that took the last place of a group.
#[derive(Clone, Debug)]
pub struct LastMember {
    pub rollout_id: String,
    /// When it arrived.
    pub received_at: Timestamp,
}
