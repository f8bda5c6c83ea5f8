//! Stage 2 in the store: in one transaction, bundles are stored, their rollouts get verdicts, and complete groups are
//! decided.
//!
//! Posts that wait at the same time share the transaction and its statements. It has three steps, in reading order:
//! [`read`] reads the stored rows and locks them, [`decide`] decides one bundle after the other without the store, and
//! [`write`](mod@write) writes the results. A refused bundle therefore has written nothing, and the final values of a group are
//! written once.
//!
//! Groups are locked in the order of their keys, and new groups are inserted in that order afterwards, so that
//! transactions with common groups do not deadlock. If a concurrent replica inserted the same row, a unique index makes
//! the transaction fail, and it runs again.

mod read;

mod decide;

mod write;
use forebay_domain::{
    finalize::{GroupDecision, Member},
    ids::{ExecutionId, GroupId, GroupPk, IdKey, PolicyPk},
    ingest::{
        Bundle, BundleOutcome, Ingest, NewRollout,
        decide::{GroupFill, RolloutDecision},
    },
    session::EndSession,
};

use self::{decide::Decider, read::Snapshot};
use super::group::LockedGroup;
use crate::{
    error::StoreError,
    op::{Class, Op},
    sql::Tx,
};

/// Posts that share a transaction. The output has the outcomes of their bundles, post by post.
pub(crate) struct Posts(pub Vec<Ingest>);

impl Op for Posts {
    type Output = Vec<Vec<BundleOutcome>>;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.0.iter().map(Ingest::bytes).sum()
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // All posts come from this process, so their gates are the same. The latest of their times is the time of the
        // transaction.
        let Some(latest) = self.0.iter().max_by_key(|post| post.now) else { return Ok(Vec::new()) };
        let bundles: Vec<IncomingBundle<'_>> =
            self.0.iter().flat_map(|post| post.bundles.iter()).map(IncomingBundle::new).collect();
        let snapshot = Snapshot::read(tx, &bundles, latest.now).await?;
        let mut decider = Decider::new(snapshot, &latest.gates, latest.now);
        let mut outcomes =
            bundles.iter().map(|bundle| decider.bundle(bundle, tx.tallies())).collect::<Vec<_>>().into_iter();
        write::write(tx, decider.into_changes(), latest.now).await?;
        Ok(self.0.iter().map(|post| outcomes.by_ref().take(post.bundles.len()).collect()).collect())
    }
}

/// A bundle as posted.
struct IncomingBundle<'b> {
    rollouts: Vec<Incoming<'b>>,
    ends: &'b [EndSession],
}

impl<'b> IncomingBundle<'b> {
    fn new(bundle: &'b Bundle) -> Self {
        Self { rollouts: bundle.iter().map(Incoming::new).collect(), ends: &bundle.ends }
    }
}

/// A rollout as posted, with its keys, which are computed once.
pub(super) struct Incoming<'b> {
    pub(super) new: &'b NewRollout,
    pub(super) rollout_key: IdKey,
    group_key: IdKey,
}

impl<'b> Incoming<'b> {
    fn new(new: &'b NewRollout) -> Self {
        let rollout_key = new.rollout_id.key();
        let group_key = new.group_id.as_ref().map_or(rollout_key, GroupId::key);
        Self { new, rollout_key, group_key }
    }
}

/// The key of a rollout or group in the current run of its policy.
type Keyed = (PolicyPk, IdKey);

/// A rollout that is already stored, or that this transaction accepted before.
struct Stored {
    content: Vec<u8>,
    execution_id: ExecutionId,
    group_pk: GroupPk,
    decision: RolloutDecision,
    fill: GroupFill,
}

/// A locked group and the changes of this transaction to it.
#[derive(Clone)]
struct GroupWork {
    locked: LockedGroup,
    /// Key of the rules under which this transaction opens the group; none for a stored group.
    opened_under: Option<i64>,
    /// Kept and masked rollouts, if a decision may need them.
    members: Vec<Member>,
    /// The number of rollouts that arrived after its decision.
    late: i64,
    changed: bool,
    /// The decision of this transaction, if it made one.
    decision: Option<GroupDecision>,
}

impl GroupWork {
    fn stored(locked: LockedGroup) -> Self {
        Self { locked, opened_under: None, members: Vec::new(), late: 0, changed: false, decision: None }
    }
}
