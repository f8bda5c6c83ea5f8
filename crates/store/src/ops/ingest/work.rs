//! What the steps of ingest hand to each other: bundles with their keys, stored rollouts, and groups with their changes.

use forebay_domain::{
    clock::Timestamp,
    finalize::{GroupDecision, Member},
    ids::{ExecutionId, GroupId, GroupPk, IdKey, PolicyPk},
    ingest::{
        Bundle,
        decide::{GroupFill, RolloutDecision},
        new_rollout::NewRollout,
    },
    session::EndSession,
};

use crate::ops::group::LockedGroup;

/// A bundle as posted.
pub(super) struct IncomingBundle<'b> {
    pub(super) rollouts: Vec<Incoming<'b>>,
    pub(super) ends: &'b [EndSession],
}

impl<'b> IncomingBundle<'b> {
    pub(super) fn new(bundle: &'b Bundle) -> Self {
        Self { rollouts: bundle.iter().map(Incoming::new).collect(), ends: &bundle.ends }
    }
}

/// A rollout as posted, with its keys, which are computed once.
pub(crate) struct Incoming<'b> {
    pub(crate) new: &'b NewRollout,
    pub(crate) rollout_key: IdKey,
    pub(super) group_key: IdKey,
}

impl<'b> Incoming<'b> {
    fn new(new: &'b NewRollout) -> Self {
        let rollout_key = new.rollout_id.key();
        let group_key = new.group_id.as_ref().map_or(rollout_key, GroupId::key);
        Self { new, rollout_key, group_key }
    }
}

/// The key of a rollout or group in the current run of its policy.
pub(super) type Keyed = (PolicyPk, IdKey);

/// A rollout that is already stored, or that this transaction accepted before.
pub(super) struct Stored {
    pub(super) content: Vec<u8>,
    pub(super) execution_id: ExecutionId,
    pub(super) group_pk: GroupPk,
    pub(super) decision: RolloutDecision,
    pub(super) fill: GroupFill,
    /// Why its group was discarded or quarantined, if it was.
    pub(super) discarded: Option<String>,
}

/// A locked group and the changes of this transaction to it.
#[derive(Clone)]
pub(super) struct GroupWork {
    pub(super) locked: LockedGroup,
    /// Key of the rules under which this transaction opens the group; none for a stored group.
    pub(super) opened_under: Option<i64>,
    /// Kept and masked rollouts, if a decision may need them.
    pub(super) members: Vec<Member>,
    /// The number of rollouts that arrived after its decision.
    pub(super) late: i64,
    pub(super) changed: bool,
    /// The latest time at which a rollout of this transaction must have its scores. The group is not decided before.
    pub(super) scored_until: Option<Timestamp>,
    /// The decision of this transaction, if it made one.
    pub(super) decision: Option<GroupDecision>,
}

impl GroupWork {
    pub(super) fn stored(locked: LockedGroup) -> Self {
        Self {
            locked,
            opened_under: None,
            members: Vec::new(),
            late: 0,
            changed: false,
            scored_until: None,
            decision: None,
        }
    }
}
