//! Stage 6 in the store: checkpoints, resume and reset. They decide what the weights have learned from.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchPk, Epoch, Run, Step, Version},
    lineage::{Checkpoint, Checkpointed, Reset, ResetDone, Resume, Resumed},
    looking::journal::Happening,
    policies::Policy,
    reasons,
    refusal::Refusal,
    states::{BatchMove, BatchState, GroupMove, GroupState},
    tally::LeaseEvent,
};
use forebay_wire::Settle;
use std::collections::{BTreeMap, BTreeSet};

use super::{
    admission,
    batch::{self, select_batches},
    blobs,
    claim::waiting,
    evals, journal, policy, scores, steps, sweep,
};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Arg, Statement, Tx, among_keys, args, key_list, locking},
    tally::CountedGroups,
};

#[async_trait]
impl Op for Checkpoint {
    type Output = Result<Checkpointed, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        if let Err(refusal) = policy::check_epoch(self.epoch, policy.epoch) {
            return Ok(Err(refusal));
        }
        if let Err(refusal) = check_known(&policy, Some(self.step), self.force) {
            return Ok(Err(refusal));
        }
        let batches = settle(tx, &policy, self.step, self.now).await?;
        let last = policy.checkpoint_step.map_or(self.step, |last| last.max(self.step));
        set_lineage(tx, &policy, policy.epoch, policy.acked_step, Some(last)).await?;
        Ok(Ok(Checkpointed { last, batches }))
    }
}

/// Refuses a step that the lineage has not reached, unless the caller forces it. It would settle batches that the saved
/// weights have not learned from, and the acks of all steps up to it would be refused.
fn check_known(policy: &Policy, step: Option<Step>, force: bool) -> Result<(), Refusal> {
    // A step that was settled by force is known as well, so that its trainer can resume from it.
    let last = policy.acked_step.max(policy.checkpoint_step);
    match step {
        Some(step) if policy.steps_known && !force && Some(step) > last => Err(Refusal::StepUnknown { step, last }),
        _ => Ok(()),
    }
}

/// Settles batches that were acked at or before a step.
async fn settle(tx: &mut Tx<'_>, policy: &Policy, step: Step, now: Timestamp) -> Result<u64, StoreError> {
    const SELECT_SETTLED: Statement = select_batches!("-- select_settled", "state = 'trained' AND step <= $3");
    let batches = batch_keys(tx, SELECT_SETTLED, args![policy.policy_pk, policy.run, step]).await?;
    let purge_at = now.plus_seconds(policy.rules.retention.settled_s);
    let mut columns = BTreeSet::new();
    for &batch_pk in &batches {
        set_settled(tx, batch_pk).await?;
        columns.extend(blobs::release_columns(tx, &policy.rules, batch_pk, true).await?);
        batch::schedule_purge(tx, batch_pk, Some(purge_at)).await?;
        batch::schedule_forget(tx, batch_pk, now.plus_seconds(policy.rules.retention.tombstone_s)).await?;
    }
    blobs::expire(tx, columns, now).await?;
    Ok(batches.len() as u64)
}

/// Keys of batches in the order in which they were cut. They are sorted here, because for an `ORDER BY` SQLite would
/// read all batches that the policy ever had.
pub(super) async fn batch_keys(
    tx: &mut Tx<'_>,
    statement: Statement,
    values: Vec<Arg>,
) -> Result<Vec<BatchPk>, StoreError> {
    let rows = tx.fetch_all(statement, values).await?;
    let mut batches = rows.into_iter().map(|mut row| row.get("batch_pk")).collect::<Result<Vec<BatchPk>, _>>()?;
    batches.sort_unstable();
    Ok(batches)
}

async fn set_settled(tx: &mut Tx<'_>, batch_pk: BatchPk) -> Result<(), StoreError> {
    const SETTLE_BATCH: Statement = Statement::new(
        "-- settle_batch
        UPDATE batch
        SET state = 'checkpointed'
        WHERE batch_pk = $1 AND state = 'trained'",
    );
    let batch = batch::get(tx, batch_pk).await?;
    let to = batch::after(&batch, BatchMove::Settle)?;
    tx.guarded(SETTLE_BATCH, args![batch_pk], 1).await?;
    batch::tally_move(tx, &batch, to).await
}

async fn set_lineage(
    tx: &mut Tx<'_>,
    policy: &Policy,
    epoch: Epoch,
    acked: Option<Step>,
    checkpoint: Option<Step>,
) -> Result<(), StoreError> {
    const SET_LINEAGE: Statement = Statement::new(
        "-- set_lineage
        UPDATE policy
        SET epoch = $2, acked_step = $3, checkpoint_step = $4
        WHERE policy_pk = $1",
    );
    tx.guarded(SET_LINEAGE, args![policy.policy_pk, epoch, acked, checkpoint], 1).await
}

#[async_trait]
impl Op for Resume {
    type Output = Result<Resumed, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        if let Err(refusal) = policy::check_epoch(self.epoch, policy.epoch) {
            return Ok(Err(refusal));
        }
        let checked = check_known(&policy, self.step, self.force).and_then(|()| check_settled(self, &policy));
        if let Err(refusal) = checked {
            return Ok(Err(refusal));
        }
        let after = acked_after(tx, self, &policy).await?;
        if !after.lost.is_empty() && !self.force {
            return Ok(Err(Refusal::LineageGap(purged_detail(after.lost.len()))));
        }
        // Expired leases count as failed deliveries, even if the sweep has not seen them. Only the others are revoked.
        let expired = sweep::expire_of_policy(tx, &policy, self.now).await?;
        if let Some(step) = self.step {
            settle(tx, &policy, step, self.now).await?;
        }
        let (mut returned, mut quarantined) = (after.deliverable.len() as u64, 0);
        for batch_pk in leased(tx, &policy).await? {
            if revoke(tx, &policy, batch_pk, self.now).await? {
                quarantined += 1;
            } else {
                returned += 1;
            }
        }
        for batch_pk in after.deliverable {
            bring_back(tx, batch_pk).await?;
        }
        let mut abandoned_groups = 0;
        for &batch_pk in &after.lost {
            abandoned_groups += abandon(tx, &policy, batch_pk, self.now).await?;
        }
        let undone_steps = steps::undo_after(tx, &policy, self.step).await?;
        let version = rewind_version(tx, &policy, self.step).await?;
        let epoch = Epoch(policy.epoch.0 + 1);
        set_lineage(tx, &policy, epoch, self.step, self.step).await?;
        let happening = Happening::Resumed { step: self.step, returned };
        journal::write(tx, policy.policy_pk, &happening, self.by.as_ref(), self.now).await?;
        Ok(Ok(Resumed {
            epoch,
            version,
            returned,
            quarantined,
            undeliverable: after.lost.len() as u64 + after.lost_settled,
            undone_steps,
            abandoned_groups,
            expired,
        }))
    }
}

/// What the caller can do about a refused resume.
const BY_FORCE: &str =
    "with `\"force\": true` the resume takes place and returns the batches that can still be delivered";

fn purged_detail(batches: usize) -> String {
    match batches {
        1 => format!("the payloads of a batch that was acked after this step are purged; {BY_FORCE}"),
        _ => format!("the payloads of {batches} batches that were acked after this step are purged; {BY_FORCE}"),
    }
}

/// Refuses a resume below a settled step, unless the caller forces it.
fn check_settled(resume: &Resume, policy: &Policy) -> Result<(), Refusal> {
    match policy.checkpoint_step {
        Some(settled) if policy.rules.settle == Settle::Checkpoint && !resume.force && resume.step < Some(settled) => {
            let from = resume.step.map_or("nothing".to_owned(), |step| format!("step {step}"));
            Err(Refusal::LineageGap(format!(
                "a resume from {from} would skip what step {settled} has settled; {BY_FORCE}"
            )))
        }
        _ => Ok(()),
    }
}

/// Batches that were acked after a step, by whether they can still be delivered.
struct AckedAfter {
    deliverable: Vec<BatchPk>,
    /// Batches without payloads that are not settled.
    lost: Vec<BatchPk>,
    /// The number of settled batches without payloads. They stay settled.
    lost_settled: u64,
}

async fn acked_after(tx: &mut Tx<'_>, resume: &Resume, policy: &Policy) -> Result<AckedAfter, StoreError> {
    const SELECT_TRAINED_AFTER: Statement =
        select_batches!("-- select_trained_after", "state = 'trained' AND step > $3");
    const SELECT_SETTLED_AFTER: Statement =
        select_batches!("-- select_settled_after", "state = 'checkpointed' AND step > $3");
    // Steps begin at 0, so a resume from nothing is before all of them.
    let step = resume.step.map_or(-1, |step| step.0);
    let values = || args![policy.policy_pk, policy.run, step];
    let mut after = AckedAfter { deliverable: Vec::new(), lost: Vec::new(), lost_settled: 0 };
    for batch_pk in batch_keys(tx, SELECT_TRAINED_AFTER, values()).await? {
        if is_whole(tx, batch_pk).await? { after.deliverable.push(batch_pk) } else { after.lost.push(batch_pk) }
    }
    if resume.force && policy.rules.settle == Settle::Checkpoint {
        for batch_pk in batch_keys(tx, SELECT_SETTLED_AFTER, values()).await? {
            if is_whole(tx, batch_pk).await? { after.deliverable.push(batch_pk) } else { after.lost_settled += 1 }
        }
    }
    Ok(after)
}

/// Whether a batch can be delivered as it was cut, because no payload and no row of its groups is deleted.
async fn is_whole(tx: &mut Tx<'_>, batch_pk: BatchPk) -> Result<bool, StoreError> {
    let cut = batch::get(tx, batch_pk).await?.groups as usize;
    let members = batch::members(tx, batch_pk).await?;
    Ok(members.len() == cut && members.iter().all(|group| !group.purged))
}

/// Batches with a lease of the current run.
pub(super) async fn leased(tx: &mut Tx<'_>, policy: &Policy) -> Result<Vec<BatchPk>, StoreError> {
    const SELECT_LEASED: Statement = select_batches!("-- select_leased", "state = 'leased'");
    batch_keys(tx, SELECT_LEASED, args![policy.policy_pk, policy.run]).await
}

/// Ends a lease because of a resume. This is not a failed delivery, but a batch that makes every trainer fail must stop
/// being delivered, so after `max_resumes` it is quarantined. Returns whether it is.
pub(super) async fn revoke(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch_pk: BatchPk,
    now: Timestamp,
) -> Result<bool, StoreError> {
    const REVOKE_LEASE: Statement = Statement::new(
        "-- revoke_lease
        UPDATE batch
        SET state = $2, reason = $3, resumes = $4, lease = NULL, expires_us = NULL
        WHERE batch_pk = $1 AND state = 'leased'",
    );
    let batch = batch::get(tx, batch_pk).await?;
    let resumes = batch.resumes + 1;
    let most = policy.rules.lease.max_resumes;
    let used_up = most > 0 && resumes >= most;
    let to = batch::after(&batch, if used_up { BatchMove::UseUp } else { BatchMove::Return })?;
    let reason = used_up.then_some(reasons::MAX_RESUMES);
    tx.guarded(REVOKE_LEASE, args![batch_pk, to, reason, resumes], 1).await?;
    tx.tallies().lease(policy.policy_pk, LeaseEvent::Revoked, now);
    batch::tally_move(tx, &batch, to).await?;
    if used_up {
        batch::note_quarantined(tx, &batch, batch.failed_deliveries, reason, now).await?;
    }
    Ok(used_up)
}

/// Makes an acked batch available again as it was cut. This counts neither as a failed delivery nor as a resume,
/// because the batch was trained.
async fn bring_back(tx: &mut Tx<'_>, batch_pk: BatchPk) -> Result<(), StoreError> {
    const BRING_BACK: Statement = Statement::new(
        "-- bring_back
        UPDATE batch
        SET state = 'returned', lease = NULL, acked_us = NULL
        WHERE batch_pk = $1 AND state IN ('trained', 'checkpointed')",
    );
    let batch = batch::get(tx, batch_pk).await?;
    let to = batch::after(&batch, BatchMove::BringBack)?;
    tx.guarded(BRING_BACK, args![batch_pk], 1).await?;
    batch::tally_move(tx, &batch, to).await?;
    batch::schedule_purge(tx, batch_pk, None).await
}

/// Gives up a batch that an abandoned lineage had trained and whose payloads are purged: no later lineage can learn
/// from it, and no checkpoint may settle it. Returns the number of its groups.
async fn abandon(tx: &mut Tx<'_>, policy: &Policy, batch_pk: BatchPk, now: Timestamp) -> Result<u64, StoreError> {
    const ABANDON_BATCH: Statement = Statement::new(
        "-- abandon_batch
        UPDATE batch
        SET state = 'discarded', reason = $2, lease = NULL
        WHERE batch_pk = $1 AND state = 'trained'",
    );
    // The tombstones of purged groups were kept for a checkpoint that will not come. Payloads that are left are purged
    // at their time.
    const ABANDON_GROUPS: Statement = Statement::new(
        "-- abandon_groups
        UPDATE rollout_group
        SET state = 'discarded', reason = $2,
            forget_us = CASE WHEN purged_us IS NULL THEN NULL ELSE CAST($3 AS BIGINT) END
        WHERE batch_pk = $1 AND state = 'batched'",
    );
    let batch = batch::get(tx, batch_pk).await?;
    let to = batch::after(&batch, BatchMove::GiveUp)?;
    batch::tally_move(tx, &batch, to).await?;
    let members = batch::members(tx, batch_pk).await?;
    let groups = members.len();
    let forget_at = now.plus_seconds(policy.rules.retention.tombstone_s);
    tx.guarded(ABANDON_BATCH, args![batch_pk, reasons::LINEAGE_GAP], 1).await?;
    tx.guarded(ABANDON_GROUPS, args![batch_pk, reasons::LINEAGE_GAP, forget_at], groups).await?;
    // Their rollouts were counted with the batch.
    let counted = batch::counted(GroupState::Batched, Some(to), &members);
    let discarded = CountedGroups { rollouts: 0, bytes: 0, ..counted };
    tx.tallies().move_groups(policy.policy_pk, discarded, GroupMove::GiveUp)?;
    tx.tallies().discarded(policy.policy_pk, reasons::LINEAGE_GAP, groups as i64, counted.rollouts, now);
    Ok(groups as u64)
}

/// Deletes the versions above a step. The newest of the remaining versions becomes current, or 0 if none remains.
async fn rewind_version(tx: &mut Tx<'_>, policy: &Policy, step: Option<Step>) -> Result<Version, StoreError> {
    // A version published before any ack has no step, and belongs to every lineage of the run.
    const FORGET_VERSIONS: Statement = Statement::new(
        "-- forget_versions
        DELETE FROM version
        WHERE policy_pk = $1 AND step IS NOT NULL AND (CAST($2 AS BIGINT) IS NULL OR step > $2)
        RETURNING version",
    );
    const SELECT_NEWEST_VERSION: Statement = Statement::new(
        "-- select_newest_version
        SELECT version, step, uri
        FROM version
        WHERE policy_pk = $1
        ORDER BY version DESC
        LIMIT 1",
    );
    let mut undone: Option<Version> = None;
    for mut row in tx.fetch_all(FORGET_VERSIONS, args![policy.policy_pk, step]).await? {
        let version = row.get("version")?;
        undone = Some(undone.map_or(version, |oldest| oldest.min(version)));
    }
    if let Some(oldest) = undone {
        evals::undo_from(tx, policy, oldest).await?;
    }
    let newest = tx.fetch_optional(SELECT_NEWEST_VERSION, args![policy.policy_pk]).await?;
    let (version, step, uri): (Version, Option<Step>, Option<String>) = match newest {
        Some(mut row) => (row.get("version")?, row.get("step")?, row.get("uri")?),
        None => (Version(0), None, None),
    };
    policy::set_version(tx, policy.policy_pk, version, step, uri.as_deref()).await?;
    // Its numbers will be published again.
    waiting::forget(tx, policy).await?;
    Ok(version)
}

#[async_trait]
impl Op for Reset {
    type Output = Result<ResetDone, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const START_RUN: Statement = Statement::new(
            "-- start_run
            UPDATE policy
            SET run = $2, epoch = $3, version = 0, version_step = NULL, version_uri = NULL, acked_step = NULL,
                checkpoint_step = NULL, steps_known = 0, pause_version = NULL, pause_us = NULL, given_up_version = NULL
            WHERE policy_pk = $1",
        );
        const FORGET_ALL_VERSIONS: Statement = Statement::new(
            "-- forget_all_versions
            DELETE FROM version
            WHERE policy_pk = $1",
        );
        const SELECT_TRAINED: Statement = select_batches!("-- select_trained", "state = 'trained'");
        let Some(policy) = policy::lock(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        if let Err(refusal) = policy::check_epoch(self.epoch, policy.epoch) {
            return Ok(Err(refusal));
        }
        admission::void(tx, policy.policy_pk).await?;
        let groups = discard_live_groups(tx, &policy, self.now).await?;
        discard_live_batches(tx, &policy).await?;
        // No resume can need the trained and purged rows of the old run any more.
        for batch_pk in batch_keys(tx, SELECT_TRAINED, args![policy.policy_pk, policy.run]).await? {
            batch::schedule_forget(tx, batch_pk, self.now.plus_seconds(policy.rules.retention.tombstone_s)).await?;
        }
        let (run, epoch) = (Run(policy.run.0 + 1), Epoch(policy.epoch.0 + 1));
        tx.execute(FORGET_ALL_VERSIONS, args![policy.policy_pk]).await?;
        tx.guarded(START_RUN, args![policy.policy_pk, run, epoch], 1).await?;
        if let Some(evaluations) = policy::find(tx, &policy.name.evaluations()).await? {
            admission::void(tx, evaluations.policy_pk).await?;
            discard_live_groups(tx, &evaluations, self.now).await?;
            evals::follow(tx, policy.policy_pk).await?;
        }
        journal::write(tx, policy.policy_pk, &Happening::Reset(run), self.by.as_ref(), self.now).await?;
        Ok(Ok(ResetDone { run, epoch, groups }))
    }
}

async fn discard_live_groups(tx: &mut Tx<'_>, policy: &Policy, now: Timestamp) -> Result<u64, StoreError> {
    // Locked first, so that no post can add to an open group after its numbers were read.
    const LOCK_LIVE_GROUPS: Statement = locking!(
        "-- lock_live_groups
        SELECT group_pk, state, kept + masked AS rollouts, scoring, payload_bytes,
            (SELECT b.state FROM batch AS b WHERE b.batch_pk = rollout_group.batch_pk) AS batch_state
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND state IN ('open', 'ready', 'quarantined', 'batched')
        ORDER BY group_pk"
    );
    const DISCARD_GROUPS: Statement = among_keys!(
        "-- discard_groups
        UPDATE rollout_group
        SET state = 'discarded', reason = $5, decided_us = COALESCE(decided_us, $2), deadline_us = NULL,
            purge_us = $3, scoring = 0
        WHERE state = $4 AND group_pk"
    );
    let mut live: BTreeMap<(GroupState, Option<BatchState>), (CountedGroups, Vec<i64>)> = BTreeMap::new();
    for mut row in tx.fetch_all(LOCK_LIVE_GROUPS, args![policy.policy_pk, policy.run]).await? {
        let (state, batch): (GroupState, Option<BatchState>) = (row.get("state")?, row.get("batch_state")?);
        if state == GroupState::Batched && batch.is_some_and(BatchState::is_acked) {
            continue;
        }
        let none = CountedGroups { state, batch, groups: 0, rollouts: 0, scoring: 0, bytes: 0 };
        let (counted, keys) = live.entry((state, batch)).or_insert((none, Vec::new()));
        keys.push(row.get("group_pk")?);
        counted.groups += 1;
        counted.rollouts += row.get::<i64>("rollouts")?;
        counted.scoring += row.get::<i64>("scoring")?;
        counted.bytes += row.get::<i64>("payload_bytes")?;
    }
    let purge_at = now.plus_seconds(policy.rules.retention.dropped_s);
    let mut discarded = 0;
    for (counted, keys) in live.into_values() {
        let groups = keys.len();
        if counted.scoring > 0 {
            scores::end_of_groups(tx, keys.clone()).await?;
        }
        tx.guarded(DISCARD_GROUPS, args![key_list(keys), now, purge_at, counted.state, reasons::RESET], groups).await?;
        tx.tallies().move_groups(policy.policy_pk, counted, GroupMove::Reset)?;
        tx.tallies().discarded(policy.policy_pk, reasons::RESET, groups as i64, counted.rollouts, now);
        discarded += groups as u64;
    }
    Ok(discarded)
}

/// Ends the batches of discarded groups. Their rollouts were counted with the groups.
async fn discard_live_batches(tx: &mut Tx<'_>, policy: &Policy) -> Result<(), StoreError> {
    const COUNT_LIVE_BATCHES: Statement = Statement::new(
        "-- count_live_batches
        SELECT state, COUNT(*) AS batches
        FROM batch
        WHERE policy_pk = $1 AND run = $2 AND state IN ('leased', 'returned', 'quarantined')
        GROUP BY state",
    );
    const DISCARD_BATCHES: Statement = Statement::new(
        "-- discard_batches
        UPDATE batch
        SET state = 'discarded', reason = $3, lease = NULL, expires_us = NULL
        WHERE policy_pk = $1 AND run = $2 AND state IN ('leased', 'returned', 'quarantined')",
    );
    let mut batches = 0;
    for mut row in tx.fetch_all(COUNT_LIVE_BATCHES, args![policy.policy_pk, policy.run]).await? {
        let (state, count): (BatchState, i64) = (row.get("state")?, row.get("batches")?);
        let not_allowed = || StoreError::Corrupt(format!("batches are `{state}` at a reset"));
        let to = state.after(BatchMove::Reset).ok_or_else(not_allowed)?;
        tx.tallies().batches(policy.policy_pk, state, -count);
        tx.tallies().batches(policy.policy_pk, to, count);
        batches += count;
    }
    tx.guarded(DISCARD_BATCHES, args![policy.policy_pk, policy.run, reasons::RESET], batches as usize).await
}
