//! Stage 5 in the store: the calls of a lease's holder. The lease's token, its end and the epoch fence them.
use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchId, GroupPk, LeaseToken, Step},
    lease::{Ack, Batch, Extend, LeaseProof, Nack, Readmit},
    looking::journal::Happening,
    policies::Policy,
    reasons,
    refusal::{LostLease, Refusal},
    states::{BatchMove, BatchState},
    tally::{LeaseEvent, Tally},
};
use forebay_wire::Settle;

use super::{batch, blobs, journal, policy, steps};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Locks the policy of a batch and reads both.
async fn lock(tx: &mut Tx<'_>, batch_id: BatchId) -> Result<Option<(Policy, Batch)>, StoreError> {
    let Some(found) = batch::find(tx, batch_id).await? else { return Ok(None) };
    let policy = policy::lock_by_key(tx, found.policy_pk).await?;
    // Read again, because the batch may have changed before the lock was granted.
    Ok(Some((policy, batch::get(tx, found.batch_pk).await?)))
}

/// Checks that the proof belongs to the batch's current lease.
pub(super) fn check_lease(proof: &LeaseProof, policy: &Policy, batch: &Batch) -> Result<(), Refusal> {
    policy::check_epoch(proof.epoch, policy.epoch)?;
    let is_its_token = batch.lease.as_ref() == Some(&proof.lease);
    let lost = match batch.state {
        BatchState::Leased if !is_its_token => LostLease::OtherToken,
        BatchState::Leased if batch.expires_at.is_some_and(|end| end > proof.now) => return Ok(()),
        BatchState::Leased => LostLease::Expired,
        BatchState::Returned
        | BatchState::Trained
        | BatchState::Checkpointed
        | BatchState::Quarantined
        | BatchState::Split
        | BatchState::Discarded => {
            let is_resumed = batch.epoch < policy.epoch;
            if is_resumed { LostLease::Resumed(policy.epoch) } else { LostLease::Ended }
        }
    };
    Err(Refusal::LeaseLost(lost))
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

#[async_trait]
impl Op for Ack {
    type Output = Result<Batch, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some((policy, batch)) = lock(tx, self.proof.batch_id).await? else {
            return Ok(Err(Refusal::Unknown("the batch")));
        };
        if batch.state.is_acked() && batch.lease.as_ref() == Some(&self.proof.lease) {
            // A repeated ack is recognised before any check that could refuse it.
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
        train(tx, &policy, &batch, policy.rules.settle, self.step, self.proof.now).await?;
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

/// Moves a leased batch to the state of an acked one.
pub(super) async fn train(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    settle: Settle,
    step: Step,
    now: Timestamp,
) -> Result<(), StoreError> {
    // The token is kept, so that a repeated ack is recognised.
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
    let to = batch::after(batch, BatchMove::Ack(settle))?;
    let kept_s = match settle {
        Settle::Checkpoint => policy.rules.retention.trained_s,
        Settle::Ack => policy.rules.retention.settled_s,
    };
    let lease = batch.lease.as_ref().map(LeaseToken::as_str);
    let values = args![batch.batch_pk, lease, to, step, now];
    tx.guarded(TRAIN_BATCH, values, 1).await?;
    batch::tally_move(tx, batch, to).await?;
    tx.tallies().happened(policy.policy_pk, Tally::Acked, 1, batch.tokens as f64, now);
    tx.tallies().add(policy.policy_pk, Tally::AckedRollouts, i64::from(batch.rollouts));
    steps::log(tx, policy, batch, step, now).await?;
    batch::schedule_purge(tx, batch.batch_pk, Some(now.plus_seconds(kept_s))).await?;
    let columns = blobs::release_columns(tx, &policy.rules, batch.batch_pk, settle == Settle::Ack).await?;
    blobs::expire(tx, columns, now).await?;
    let last = policy.acked_step.map_or(step, |acked| acked.max(step));
    tx.guarded(SET_ACKED_STEP, args![policy.policy_pk, last], 1).await
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
            batch::fail_delivery(tx, &policy, &batch, reason, self.proof.now).await?;
        } else {
            let members = batch::members(tx, batch.batch_pk).await?;
            let mut bad = Vec::with_capacity(self.groups.len());
            for (index, group_id) in self.groups.iter().enumerate() {
                let Some(member) = members.iter().find(|member| member.group_id == group_id.as_str()) else {
                    return Ok(Err(Refusal::invalid(format!("/groups/{index}"), "is not a group of this batch")));
                };
                bad.push(member.group_pk);
            }
            batch::split(tx, &policy, &batch, &bad, reason, self.proof.now).await?;
        }
        tx.tallies().lease(policy.policy_pk, LeaseEvent::Nacked, self.proof.now);
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
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
        // A split batch itself stays split; only its quarantined groups become available again.
        let is_split = batch.state == BatchState::Split;
        if let Some(to) = batch.state.after(BatchMove::Readmit) {
            tx.guarded(READMIT_BATCH, args![batch.batch_pk], 1).await?;
            batch::tally_move(tx, &batch, to).await?;
        } else if !is_split || batch::readmit_groups(tx, &batch).await? == 0 {
            return Ok(Err(Refusal::BatchState("not quarantined")));
        }
        let happening = Happening::Readmitted(batch.batch_id);
        journal::write(tx, batch.policy_pk, &happening, self.by.as_ref(), self.now).await?;
        batch::get(tx, batch.batch_pk).await.map(Ok)
    }
}

/// Quarantines a group with a damaged payload before it is delivered.
pub struct QuarantineDamaged {
    pub batch_id: BatchId,
    pub group: GroupPk,
    pub now: Timestamp,
}

#[async_trait]
impl Op for QuarantineDamaged {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        let Some((policy, batch)) = lock(tx, self.batch_id).await? else { return Ok(()) };
        // A batch that is trained or split keeps its state, because it will not be delivered again as it is.
        if batch.state.after(BatchMove::Split).is_some() {
            batch::split(tx, &policy, &batch, &[self.group], Some(reasons::DAMAGED), self.now).await?;
        }
        Ok(())
    }
}
