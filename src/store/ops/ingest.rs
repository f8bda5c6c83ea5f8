//! Stage 2 in the store: bundles are stored, verdicts given and complete groups decided in one transaction.
//!
//! Posts that wait at the same time share the transaction and its statements. Three steps, in reading order:
//! [`known`] reads what the store knows and locks it, [`desk`] decides bundle after bundle without touching the store,
//! [`write`] writes down what came of it. So a refused bundle has written nothing, and what a group looks like once it
//! is complete is written once.
//!
//! Groups are locked in one order, and opened in one order after that, so that transactions which share groups never
//! wait for each other in a circle; what a racing replica inserted meanwhile fails a unique index, and the transaction
//! runs again.

mod known;

mod desk;

mod write;

use async_trait::async_trait;

use self::{desk::Desk, known::Known};
use super::group::LockedGroup;
use crate::{
    buffer::{
        finalize::{GroupDecision, Member},
        ids::{GroupPk, IdKey, KeyForm, PolicyPk},
        ingest::{GroupFill, NewRollout, RolloutDecision},
    },
    store::{
        BundleOutcome, Ingest, StoreError,
        dialect::{Class, Op},
        sql::Tx,
    },
};

/// Posts that share a transaction; the outcomes of their bundles, post by post.
pub(in crate::store) struct Posts(pub(in crate::store) Vec<Ingest>);

#[async_trait]
impl Op for Posts {
    type Output = Vec<Vec<BundleOutcome>>;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.0.iter().map(Ingest::bytes).sum()
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let form = tx.key_form();
        // All know the same rules of deciding; the latest of their times is that of the transaction.
        let Some(latest) = self.0.iter().max_by_key(|post| post.now) else { return Ok(Vec::new()) };
        let bundles: Vec<Vec<Incoming<'_>>> = self
            .0
            .iter()
            .flat_map(|post| post.bundles.iter())
            .map(|bundle| bundle.iter().map(|new| Incoming::new(new, form)).collect())
            .collect();
        let known = Known::read(tx, &bundles, latest.now).await?;
        let mut desk = Desk::new(known, &*latest.decide, latest.now);
        let mut outcomes =
            bundles.iter().map(|bundle| desk.bundle(bundle, tx.tallies())).collect::<Vec<_>>().into_iter();
        write::write(tx, desk.into_changes(), latest.now).await?;
        Ok(self.0.iter().map(|post| outcomes.by_ref().take(post.bundles.len()).collect()).collect())
    }
}

/// A rollout as posted, with its keys, which are made once.
pub(super) struct Incoming<'b> {
    pub(super) new: &'b NewRollout,
    pub(super) rollout_key: IdKey,
    group_key: IdKey,
}

impl<'b> Incoming<'b> {
    fn new(new: &'b NewRollout, form: KeyForm) -> Self {
        let rollout_key = new.rollout_id.key(form);
        let group_key = new.group_id.as_ref().map_or(rollout_key, |group_id| group_id.key(form));
        Self { new, rollout_key, group_key }
    }
}

/// A rollout or group in the current run of its policy.
type Keyed = (PolicyPk, IdKey);

/// A rollout that is already stored, or was admitted before in the same transaction.
struct Stored {
    content: Vec<u8>,
    group_pk: GroupPk,
    decision: RolloutDecision,
    fill: GroupFill,
}

/// A locked group and what the transaction adds to it.
#[derive(Clone)]
struct GroupWork {
    locked: LockedGroup,
    /// The row of its rules when this transaction opens it; a stored group has its own.
    opened_under: Option<i64>,
    /// Kept and masked rollouts, where they may be needed for a decision.
    members: Vec<Member>,
    /// Rollouts that came after it was decided.
    late: i64,
    changed: bool,
    /// What this transaction decided.
    decision: Option<GroupDecision>,
}

impl GroupWork {
    fn stored(locked: LockedGroup) -> Self {
        Self { locked, opened_under: None, members: Vec::new(), late: 0, changed: false, decision: None }
    }
}
