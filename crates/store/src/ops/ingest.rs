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

mod decide;
mod read;
pub(super) mod work;
mod write;

use async_trait::async_trait;
use forebay_domain::ingest::{BundleOutcome, Ingest};

use self::{decide::Decider, read::Snapshot, work::IncomingBundle};
use crate::{
    error::StoreError,
    op::{Class, Op},
    sql::Tx,
};

/// Posts that share a transaction. The output has the outcomes of their bundles, post by post.
pub(crate) struct Posts(pub Vec<Ingest>);

#[async_trait]
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
