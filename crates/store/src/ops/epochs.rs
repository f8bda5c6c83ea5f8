//! After a restore, every policy begins an epoch, so that trainers from before the restore are refused and must resume.
use async_trait::async_trait;
use forebay_domain::{
    ids::{BatchPk, Epoch, PolicyPk},
    states::BatchMove,
};

use super::{batch, lineage, policy};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Begins an epoch of every policy, this one or a later one, and takes leased batches back. Returns the number of
/// policies.
pub struct BeginEpochs(pub Epoch);

#[async_trait]
impl Op for BeginEpochs {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        const SELECT_ALL_POLICIES: Statement = Statement::new(
            "-- select_all_policies
            SELECT policy_pk
            FROM policy
            WHERE name NOT LIKE '%@%'
            ORDER BY policy_pk",
        );
        // Trainers may be ahead of the copy, which does not know the steps that were acked after it was made.
        const BEGIN_EPOCH: Statement = Statement::new(
            "-- begin_epoch
            UPDATE policy
            SET epoch = $2, restored_epoch = $2, steps_known = 0
            WHERE policy_pk = $1",
        );
        let rows = tx.fetch_all(SELECT_ALL_POLICIES, args![]).await?;
        let policies = rows.len() as u64;
        for mut row in rows {
            let policy = policy::lock_by_key(tx, row.get::<PolicyPk>("policy_pk")?).await?;
            for batch in lineage::leased(tx, &policy).await? {
                end_lease(tx, batch).await?;
            }
            let epoch = Epoch((policy.epoch.0 + 1).max(self.0.0));
            tx.guarded(BEGIN_EPOCH, args![policy.policy_pk, epoch], 1).await?;
        }
        Ok(policies)
    }
}

/// Ends a lease from before the restore. This counts neither as a failed delivery nor as a resume.
async fn end_lease(tx: &mut Tx<'_>, batch_pk: BatchPk) -> Result<(), StoreError> {
    const END_LEASE: Statement = Statement::new(
        "-- end_lease
        UPDATE batch
        SET state = 'returned', lease = NULL, expires_us = NULL
        WHERE batch_pk = $1 AND state = 'leased'",
    );
    let batch = batch::get(tx, batch_pk).await?;
    let to = batch::after(&batch, BatchMove::Return)?;
    tx.guarded(END_LEASE, args![batch_pk], 1).await?;
    batch::tally_move(tx, &batch, to).await
}
