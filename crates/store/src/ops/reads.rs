//! Stage 5 in the store, for consumers whose next read acks the previous one. Their leases are found by their names.
use async_trait::async_trait;
use forebay_domain::{
    ids::{BatchPk, ConsumerName, Step},
    lease::Batch,
    policies::Policy,
    reads::{AckReads, GiveBackReads, MarkRead, ReleaseRead},
    refusal::Refusal,
    states::BatchMove,
};
use forebay_wire::Settle;

use super::{
    batch::{self, select_batches},
    lease, lineage, policy, sweep,
};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

#[async_trait]
impl Op for AckReads {
    type Output = Result<Vec<Batch>, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        // A lease that has ended is not acked, because its batch may be delivered to others.
        sweep::expire_of_policy(tx, &policy, self.now).await?;
        // Consumers of this kind count no steps, so every read is a step.
        let last = policy.acked_step.max(policy.checkpoint_step);
        let step = Step(last.map_or(0, |last| last.0.saturating_add(1)));
        let mut acked = Vec::new();
        for batch_pk in held(tx, &policy, &self.consumer).await? {
            let batch = batch::get(tx, batch_pk).await?;
            lease::train(tx, &policy, &batch, Settle::Ack, step, self.now).await?;
            acked.push(batch::get(tx, batch_pk).await?);
        }
        Ok(Ok(acked))
    }
}

#[async_trait]
impl Op for MarkRead {
    type Output = Result<(), Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const HAND_OVER: Statement = Statement::new(
            "-- hand_over_lease
            UPDATE batch
            SET consumer = $3, expires_us = $4
            WHERE batch_pk = $1 AND state = 'leased' AND lease = $2",
        );
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let mut batches = Vec::with_capacity(self.proofs.len());
        for proof in &self.proofs {
            let Some(batch) = batch::find(tx, proof.batch_id).await? else {
                return Ok(Err(Refusal::Unknown("the batch")));
            };
            if let Err(refusal) = lease::check_lease(proof, &policy, &batch) {
                return Ok(Err(refusal));
            }
            batches.push((batch.batch_pk, proof.lease.as_str()));
        }
        for (batch_pk, lease) in batches {
            tx.guarded(HAND_OVER, args![batch_pk, lease, self.consumer.as_str(), self.expires_at], 1).await?;
        }
        Ok(Ok(()))
    }
}

#[async_trait]
impl Op for ReleaseRead {
    type Output = Result<(), Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const RELEASE_LEASE: Statement = Statement::new(
            "-- release_lease
            UPDATE batch
            SET state = 'returned', lease = NULL, expires_us = NULL
            WHERE batch_pk = $1 AND state = 'leased' AND lease = $2",
        );
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let Some(batch) = batch::find(tx, self.proof.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        if let Err(refusal) = lease::check_lease(&self.proof, &policy, &batch) {
            return Ok(Err(refusal));
        }
        let to = batch::after(&batch, BatchMove::Return)?;
        tx.guarded(RELEASE_LEASE, args![batch.batch_pk, self.proof.lease.as_str()], 1).await?;
        batch::tally_move(tx, &batch, to).await.map(Ok)
    }
}

#[async_trait]
impl Op for GiveBackReads {
    type Output = Result<u64, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        sweep::expire_of_policy(tx, &policy, self.now).await?;
        let mut returned = 0;
        for consumer in &self.consumers {
            for batch_pk in held(tx, &policy, consumer).await? {
                // The start of a trainer is like a resume: a batch that ends every trainer is quarantined at last.
                returned += u64::from(!lineage::revoke(tx, &policy, batch_pk, self.now).await?);
            }
        }
        Ok(Ok(returned))
    }
}

/// The batches whose leases a consumer holds.
async fn held(tx: &mut Tx<'_>, policy: &Policy, consumer: &ConsumerName) -> Result<Vec<BatchPk>, StoreError> {
    const SELECT_HELD_BY: Statement = select_batches!("-- select_held_by", "state = 'leased' AND consumer = $3");
    lineage::batch_keys(tx, SELECT_HELD_BY, args![policy.policy_pk, policy.run, consumer.as_str()]).await
}
