//! Stage 5 in the store: what the holder of a lease may do, fenced by its token, its end and its epoch.

use async_trait::async_trait;
use forebay_client::wire::{BatchState, Settle};

use super::{batch, name_of, policy};
use crate::{
    buffer::{
        ids::{BatchId, GroupId, GroupPk, Step},
        refusal::{LostLease, Refusal},
    },
    store::{
        Batch, LeaseProof, Policy, StoreError,
        dialect::Op,
        sql::{Statement, Tx, args},
    },
};

/// Locks the policy of a batch and reads both.
async fn lock(tx: &mut Tx<'_>, batch_id: BatchId) -> Result<Option<(Policy, Batch)>, StoreError> {
    let Some(found) = batch::find(tx, batch_id).await? else { return Ok(None) };
    let policy = policy::lock_by_key(tx, found.policy_pk).await?;
    // Read again: it may have moved before the lock was granted.
    Ok(Some((policy, batch::get(tx, found.batch_pk).await?)))
}

/// Whether the proof speaks for the batch's live lease.
fn check_lease(proof: &LeaseProof, policy: &Policy, batch: &Batch) -> Result<(), Refusal> {
    policy::check_epoch(proof.epoch, policy.epoch)?;
    let is_its_token = batch.lease.as_ref() == Some(&proof.lease);
    let lost = match batch.state {
        BatchState::Leased if !is_its_token => LostLease::OtherToken,
        BatchState::Leased if batch.expires_at.is_some_and(|end| end > proof.now) => return Ok(()),
        BatchState::Leased => LostLease::Expired,
        _ if batch.epoch < policy.epoch => LostLease::Resumed(policy.epoch),
        _ => LostLease::Ended,
    };
    Err(Refusal::LeaseLost(lost))
}

pub(in crate::store) struct Extend {
    pub(in crate::store) proof: LeaseProof,
    pub(in crate::store) ttl_s: u64,
}

#[async_trait]
impl Op for Extend {
    type Output = Result<Batch, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const EXTEND_LEASE: Statement = Statement::new(
            "-- extend_lease
            UPDATE batch
            SET expires_us = $3
            WHERE batch_pk = $1 AND state = 'leased' AND lease = $2",
        );
        let Some((policy, batch)) = lock(tx, self.proof.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        if let Err(refusal) = check_lease(&self.proof, &policy, &batch) {
            return Ok(Err(refusal));
        }
        let expires_at = self.proof.now.plus_seconds(self.ttl_s);
        tx.guarded(EXTEND_LEASE, args![batch.batch_pk, self.proof.lease.as_str(), expires_at], 1).await?;
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

pub(in crate::store) struct Ack {
    pub(in crate::store) proof: LeaseProof,
    pub(in crate::store) step: Step,
}

#[async_trait]
impl Op for Ack {
    type Output = Result<Batch, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some((policy, batch)) = lock(tx, self.proof.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        let acked = matches!(batch.state, BatchState::Trained | BatchState::Checkpointed);
        if acked && batch.lease.as_ref() == Some(&self.proof.lease) {
            // A repeat is recognised before anything else could refuse it.
            return Ok(match batch.step {
                Some(step) if step != self.step => Err(Refusal::AlreadyAcked(step)),
                _ => Ok(batch),
            });
        }
        if let Err(refusal) = check_lease(&self.proof, &policy, &batch) {
            return Ok(Err(refusal));
        }
        if let Some(checkpoint) = policy.checkpoint_step
            && self.step <= checkpoint
        {
            return Ok(Err(Refusal::StepSettled { step: self.step, checkpoint }));
        }
        train(tx, self, &policy, &batch).await?;
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

async fn train(tx: &mut Tx<'_>, ack: &Ack, policy: &Policy, batch: &Batch) -> Result<(), StoreError> {
    // The token stays, so that a repeat of the ack is recognised.
    const TRAIN_BATCH: Statement = Statement::new(
        "-- train_batch
        UPDATE batch
        SET state = $3, step = $4, acked_us = $5, expires_us = NULL
        WHERE batch_pk = $1 AND state = 'leased' AND lease = $2",
    );
    const SET_ACKED_STEP: Statement = Statement::new(
        "-- set_acked_step
        UPDATE policy
        SET acked_step = $2, steps_known = 1
        WHERE policy_pk = $1",
    );
    let (to, kept_s) = match policy.rules.settle {
        Settle::Checkpoint => (BatchState::Trained, policy.rules.retention.trained_s),
        Settle::Ack => (BatchState::Checkpointed, policy.rules.retention.settled_s),
    };
    let now = ack.proof.now;
    let values = args![batch.batch_pk, ack.proof.lease.as_str(), name_of(&to), ack.step, now];
    tx.guarded(TRAIN_BATCH, values, 1).await?;
    batch::tally_move(tx, batch, to).await?;
    batch::schedule_purge(tx, batch.batch_pk, Some(now.plus_seconds(kept_s))).await?;
    let last = policy.acked_step.map_or(ack.step, |acked| acked.max(ack.step));
    tx.guarded(SET_ACKED_STEP, args![policy.policy_pk, last], 1).await
}

pub(in crate::store) struct Nack {
    pub(in crate::store) proof: LeaseProof,
    pub(in crate::store) reason: Option<String>,
    pub(in crate::store) groups: Vec<GroupId>,
}

#[async_trait]
impl Op for Nack {
    type Output = Result<Batch, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some((policy, batch)) = lock(tx, self.proof.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        if let Err(refusal) = check_lease(&self.proof, &policy, &batch) {
            return Ok(Err(refusal));
        }
        let reason = self.reason.as_deref();
        if self.groups.is_empty() {
            batch::fail_delivery(tx, &policy, &batch, reason).await?;
        } else {
            let members = batch::members(tx, batch.batch_pk).await?;
            let mut bad = Vec::with_capacity(self.groups.len());
            for (index, group_id) in self.groups.iter().enumerate() {
                let Some(member) = members.iter().find(|member| member.group_id == group_id.as_str()) else {
                    return Ok(Err(Refusal::invalid(format!("/groups/{index}"), "is not a group of this batch")));
                };
                bad.push(member.group_pk);
            }
            batch::split(tx, &policy, &batch, &bad, reason).await?;
        }
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

pub(in crate::store) struct Readmit {
    pub(in crate::store) batch_id: BatchId,
}

#[async_trait]
impl Op for Readmit {
    type Output = Result<Batch, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const READMIT_BATCH: Statement = Statement::new(
            "-- readmit_batch
            UPDATE batch
            SET state = 'returned', reason = NULL, failed_deliveries = 0, resumes = 0
            WHERE batch_pk = $1 AND state = 'quarantined'",
        );
        let Some((_, batch)) = lock(tx, self.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        match batch.state {
            BatchState::Quarantined => {
                tx.guarded(READMIT_BATCH, args![batch.batch_pk], 1).await?;
                batch::tally_move(tx, &batch, BatchState::Returned).await?;
            }
            BatchState::Split if batch::readmit_groups(tx, &batch).await? > 0 => {}
            _ => return Ok(Err(Refusal::BatchState("not quarantined"))),
        }
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

pub(in crate::store) struct QuarantineDamaged {
    pub(in crate::store) batch_id: BatchId,
    pub(in crate::store) group: GroupPk,
}

#[async_trait]
impl Op for QuarantineDamaged {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        let Some((policy, batch)) = lock(tx, self.batch_id).await? else { return Ok(()) };
        // A batch that is trained or split keeps its state: there is nothing left to protect it from.
        if matches!(batch.state, BatchState::Leased | BatchState::Returned) {
            batch::split(tx, &policy, &batch, &[self.group], Some("damaged")).await?;
        }
        Ok(())
    }
}
