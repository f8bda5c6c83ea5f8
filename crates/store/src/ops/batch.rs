//! Batches: their rows, and the state changes that several stages share.

use forebay_domain::{
    clock::Timestamp,
    ids::{BatchId, BatchPk, GroupPk, LeaseToken, PolicyName, PolicyPk},
    lease::Batch,
    looking::journal::Happening,
    policies::Policy,
    reasons,
    states::{BatchMove, BatchState, GroupMove, GroupState},
    tally::Tally,
    weights::BatchWeights,
};
use forebay_wire::LossWeighting;

use super::{claim::line, journal, members_state, trained_versions};
use crate::{
    error::StoreError,
    sql::{Row, Statement, Tx, among_keys, args, key_list, locking},
    tally::CountedGroups,
};

/// Why groups are quarantined whose consumer gave no reason.
const NACKED: &str = "nacked";

macro_rules! select_batch {
    ($tail:literal) => {
        concat!(
            "-- select_batch
            SELECT b.batch_pk, b.batch_id, b.policy_pk, p.name AS policy, b.state, b.reason, b.lease, b.consumer,
                b.epoch, b.expires_us, b.attempt, b.failed_deliveries, b.resumes, b.step, b.group_count, b.rollout_count,
                b.sample_count, b.token_count, b.loss_weighting, b.loss_constant, b.weight_samples, b.weight_tokens,
                b.version_current, b.version_min, b.version_max, b.metrics, b.live_bytes, b.created_us, b.granted_us,
                b.waited_us, b.acked_us
            FROM batch AS b
            JOIN policy AS p ON p.policy_pk = b.policy_pk ",
            $tail
        )
    };
}
pub(super) use select_batch;

/// Reads a row of [`select_batch`].
pub(super) fn read(mut row: Row) -> Result<Batch, StoreError> {
    let policy: String = row.get("policy")?;
    let metrics: String = row.get("metrics")?;
    let (groups, rollouts) = (row.get("group_count")?, row.get("rollout_count")?);
    let weighting: LossWeighting = row.parse("loss_weighting")?;
    Ok(Batch {
        batch_pk: row.get("batch_pk")?,
        batch_id: row.get("batch_id")?,
        policy: PolicyName::stored(&policy).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        policy_pk: row.get("policy_pk")?,
        state: row.get("state")?,
        reason: row.get("reason")?,
        lease: row.get::<Option<String>>("lease")?.map(|lease| LeaseToken::presented(&lease)),
        consumer: row.get("consumer")?,
        epoch: row.get("epoch")?,
        expires_at: row.get("expires_us")?,
        attempt: row.get("attempt")?,
        failed_deliveries: row.get("failed_deliveries")?,
        resumes: row.get("resumes")?,
        step: row.get("step")?,
        groups,
        rollouts,
        samples: row.get("sample_count")?,
        tokens: row.get("token_count")?,
        weights: BatchWeights {
            weighting,
            constant: row.get("loss_constant")?,
            groups: u64::from(groups),
            rollouts: rollouts.into(),
            samples: row.get("weight_samples")?,
            trained_tokens: row.get("weight_tokens")?,
        },
        version_current: row.get("version_current")?,
        trained_versions: trained_versions(&mut row)?,
        metrics: serde_json::from_str(&metrics).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        live_bytes: row.get("live_bytes")?,
        created_at: row.get("created_us")?,
        granted_at: row.get("granted_us")?,
        waited_us: row.get("waited_us")?,
        acked_at: row.get("acked_us")?,
    })
}

/// Reads a batch.
pub(super) async fn find(tx: &mut Tx<'_>, batch_id: BatchId) -> Result<Option<Batch>, StoreError> {
    const SELECT_BATCH: Statement = Statement::new(select_batch!("WHERE b.batch_id = $1"));
    tx.fetch_optional(SELECT_BATCH, args![batch_id.as_bytes()]).await?.map(read).transpose()
}

/// Reads a batch again, under the lock of its policy.
pub(super) async fn get(tx: &mut Tx<'_>, batch: BatchPk) -> Result<Batch, StoreError> {
    const SELECT_BATCH_BY_KEY: Statement = Statement::new(select_batch!("WHERE b.batch_pk = $1"));
    read(tx.fetch_one(SELECT_BATCH_BY_KEY, args![batch]).await?)
}

/// The keys of the batches of a run for which a condition holds.
macro_rules! select_batches {
    ($name:literal, $condition:literal) => {
        Statement::new(concat!(
            $name,
            "
            SELECT batch_pk
            FROM batch
            WHERE policy_pk = $1 AND run = $2 AND ",
            $condition
        ))
    };
}
pub(super) use select_batches;

/// The state of a batch after a move that the caller has checked.
pub(super) fn after(batch: &Batch, by: BatchMove) -> Result<BatchState, StoreError> {
    let not_allowed = || StoreError::Corrupt(format!("batch {} is `{}` before {by:?}", batch.batch_id, batch.state));
    batch.state.after(by).ok_or_else(not_allowed)
}

/// Updates the tallies for a batch's move to another state. Only the rollouts that still have rows are counted.
pub(super) async fn tally_move(tx: &mut Tx<'_>, batch: &Batch, to: BatchState) -> Result<(), StoreError> {
    const COUNT_ROLLOUTS: Statement = Statement::new(
        "-- count_rollouts_of_batch
        SELECT CAST(COALESCE(SUM(kept + masked), 0) AS BIGINT) AS rollouts
        FROM rollout_group
        WHERE batch_pk = $1 AND state = 'batched'",
    );
    let before = members_state(GroupState::Batched, Some(batch.state))?;
    let after = members_state(GroupState::Batched, Some(to))?;
    let rollouts: i64 = tx.fetch_one(COUNT_ROLLOUTS, args![batch.batch_pk]).await?.get("rollouts")?;
    let tallies = tx.tallies();
    tallies.batches(batch.policy_pk, batch.state, -1);
    tallies.batches(batch.policy_pk, to, 1);
    tallies.rollouts(batch.policy_pk, before, -rollouts);
    tallies.rollouts(batch.policy_pk, after, rollouts);
    let bytes = batch.live_bytes * (i64::from(after.is_live()) - i64::from(before.is_live()));
    tallies.add(batch.policy_pk, Tally::LiveBytes, bytes);
    Ok(())
}

/// Records a failed delivery, by expiry or nack: the batch comes back, or is quarantined if it has no deliveries left.
pub(super) async fn fail_delivery(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    reason: Option<&str>,
    now: Timestamp,
) -> Result<(), StoreError> {
    const FAIL_DELIVERY: Statement = Statement::new(
        "-- fail_delivery
        UPDATE batch
        SET state = $2, reason = $3, failed_deliveries = $4, expires_us = NULL, lease = NULL
        WHERE batch_pk = $1 AND state = 'leased'",
    );
    let failed = batch.failed_deliveries + 1;
    let used_up = failed >= policy.rules.lease.max_deliveries;
    let to = after(batch, if used_up { BatchMove::UseUp } else { BatchMove::Return })?;
    let reason = reason.or(used_up.then_some(reasons::MAX_DELIVERIES));
    tx.guarded(FAIL_DELIVERY, args![batch.batch_pk, to, reason, failed], 1).await?;
    if used_up {
        note_quarantined(tx, batch, failed, reason, now).await?;
    }
    tally_move(tx, batch, to).await
}

/// Writes into the journal that a batch is not delivered any more.
pub(super) async fn note_quarantined(
    tx: &mut Tx<'_>,
    batch: &Batch,
    failed_deliveries: u32,
    reason: Option<&str>,
    now: Timestamp,
) -> Result<(), StoreError> {
    let reason = reason.map(str::to_owned);
    let happening = Happening::BatchQuarantined { batch: batch.batch_id, failed_deliveries, reason };
    journal::write(tx, batch.policy_pk, &happening, None, now).await
}

/// How often leases of a batch ended without an ack. Its groups keep the count when it is split.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    /// By expiry or nack.
    deliveries: u32,
    /// By a resume.
    resumes: u32,
}

/// Ends a batch that contains bad groups. The bad groups are quarantined, and the others become ready again in their
/// old order.
pub(super) async fn split(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    bad: &[GroupPk],
    reason: Option<&str>,
    now: Timestamp,
) -> Result<(), StoreError> {
    const SPLIT_BATCH: Statement = Statement::new(
        "-- split_batch
        UPDATE batch
        SET state = 'split', reason = $3, failed_deliveries = failed_deliveries + 1, expires_us = NULL, lease = NULL
        WHERE batch_pk = $1 AND state = $2",
    );
    let to = after(batch, BatchMove::Split)?;
    tx.guarded(SPLIT_BATCH, args![batch.batch_pk, batch.state, reason], 1).await?;
    let failed = batch.failed_deliveries + 1;
    let (bad, good): (Vec<_>, Vec<_>) =
        members(tx, batch.batch_pk).await?.into_iter().partition(|group| bad.contains(&group.group_pk));
    let ended = Ended { deliveries: failed, resumes: batch.resumes };
    quarantine(tx, &bad, ended, reason).await?;
    let is_last = failed >= policy.rules.lease.max_deliveries;
    let count = bad.len() + if is_last { good.len() } else { 0 };
    let why = reason.unwrap_or(if is_last { reasons::MAX_DELIVERIES } else { NACKED }).to_owned();
    let happening = Happening::GroupsQuarantined { batch: batch.batch_id, count, reason: why };
    journal::write(tx, policy.policy_pk, &happening, None, now).await?;
    if is_last {
        quarantine(tx, &good, ended, Some(reasons::MAX_DELIVERIES)).await?;
        tally_split(tx, batch, to, &[&bad, &good].map(Vec::as_slice).concat(), &[])
    } else {
        put_back(tx, policy.policy_pk, &good, ended).await?;
        tally_split(tx, batch, to, &bad, &good)
    }
}

/// The columns of a batch's group that moving it needs.
#[derive(Clone, Debug)]
pub(super) struct MemberGroup {
    pub(super) group_pk: GroupPk,
    pub(super) group_id: String,
    /// Its position in the line of ready groups.
    place: i64,
    rollouts: i64,
    payload_bytes: i64,
    pub(super) purged: bool,
}

/// The groups of a batch in a state, locked.
macro_rules! lock_groups {
    ($name:literal, $state:literal) => {
        locking!(concat!(
            $name,
            "
            SELECT group_pk, group_id, ready_seq, kept + masked AS rollouts, payload_bytes, purged_us
            FROM rollout_group
            WHERE batch_pk = $1 AND state = ",
            $state,
            "
            ORDER BY group_pk"
        ))
    };
}

/// The current groups of a batch, locked.
pub(super) async fn members(tx: &mut Tx<'_>, batch: BatchPk) -> Result<Vec<MemberGroup>, StoreError> {
    const LOCK_MEMBERS: Statement = lock_groups!("-- lock_member_groups", "'batched'");
    let rows = tx.fetch_all(LOCK_MEMBERS, args![batch]).await?;
    rows.into_iter().map(read_member).collect()
}

fn read_member(mut row: Row) -> Result<MemberGroup, StoreError> {
    Ok(MemberGroup {
        group_pk: row.get("group_pk")?,
        group_id: row.get("group_id")?,
        place: row.get("ready_seq")?,
        rollouts: row.get("rollouts")?,
        payload_bytes: row.get("payload_bytes")?,
        purged: row.get::<Option<Timestamp>>("purged_us")?.is_some(),
    })
}

async fn quarantine(
    tx: &mut Tx<'_>,
    groups: &[MemberGroup],
    ended: Ended,
    reason: Option<&str>,
) -> Result<(), StoreError> {
    const QUARANTINE_GROUPS: Statement = among_keys!(
        "-- quarantine_groups
        UPDATE rollout_group
        SET state = 'quarantined', failed_deliveries = $2, reason = $3, resumes = $4
        WHERE state = 'batched' AND group_pk"
    );
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    tx.guarded(QUARANTINE_GROUPS, args![keys, ended.deliveries, reason, ended.resumes], groups.len()).await
}

/// Makes groups ready again in their old order, and keeps the count of ended leases.
async fn put_back(tx: &mut Tx<'_>, policy: PolicyPk, groups: &[MemberGroup], ended: Ended) -> Result<(), StoreError> {
    const PUT_BACK_GROUPS: Statement = among_keys!(
        "-- put_back_groups
        UPDATE rollout_group
        SET state = 'ready', batch_pk = NULL, failed_deliveries = $2, resumes = $3, reason = NULL
        WHERE state IN ('batched', 'quarantined') AND group_pk"
    );
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    tx.guarded(PUT_BACK_GROUPS, args![keys, ended.deliveries, ended.resumes], groups.len()).await?;
    match groups.iter().map(|group| group.place).min() {
        Some(first) => line::put_back(tx, policy, first).await,
        None => Ok(()),
    }
}

fn tally_split(
    tx: &mut Tx<'_>,
    batch: &Batch,
    to: BatchState,
    bad: &[MemberGroup],
    good: &[MemberGroup],
) -> Result<(), StoreError> {
    let tallies = tx.tallies();
    tallies.batches(batch.policy_pk, batch.state, -1);
    tallies.batches(batch.policy_pk, to, 1);
    let of_batch = |groups| counted(GroupState::Batched, Some(batch.state), groups);
    tallies.move_groups(batch.policy_pk, of_batch(bad), GroupMove::Quarantine)?;
    tallies.move_groups(batch.policy_pk, of_batch(good), GroupMove::PutBack)
}

/// The numbers of a batch's groups, for the tallies.
pub(super) fn counted(state: GroupState, batch: Option<BatchState>, groups: &[MemberGroup]) -> CountedGroups {
    CountedGroups {
        state,
        batch,
        groups: groups.len() as i64,
        rollouts: groups.iter().map(|group| group.rollouts).sum(),
        // No group is decided while one of its rollouts lacks a score.
        scoring: 0,
        bytes: groups.iter().map(|group| group.payload_bytes).sum(),
    }
}

/// Makes the quarantined groups of a split batch ready again, with a fresh count.
pub(super) async fn readmit_groups(tx: &mut Tx<'_>, batch: &Batch) -> Result<usize, StoreError> {
    const LOCK_QUARANTINED: Statement = lock_groups!("-- lock_quarantined_groups", "'quarantined'");
    let rows = tx.fetch_all(LOCK_QUARANTINED, args![batch.batch_pk]).await?;
    let groups: Vec<MemberGroup> = rows.into_iter().map(read_member).collect::<Result<_, _>>()?;
    put_back(tx, batch.policy_pk, &groups, Ended::default()).await?;
    let counted = counted(GroupState::Quarantined, None, &groups);
    tx.tallies().move_groups(batch.policy_pk, counted, GroupMove::Readmit)?;
    Ok(groups.len())
}

/// Schedules or cancels the purge of a batch's payloads.
pub(super) async fn schedule_purge(
    tx: &mut Tx<'_>,
    batch: BatchPk,
    purge_at: Option<Timestamp>,
) -> Result<(), StoreError> {
    const SCHEDULE_PURGE: Statement = Statement::new(
        "-- schedule_purge
        UPDATE rollout_group
        SET purge_us = $2
        WHERE batch_pk = $1 AND state = 'batched' AND purged_us IS NULL",
    );
    tx.execute(SCHEDULE_PURGE, args![batch, purge_at]).await.map(drop)
}

/// Schedules the deletion of the tombstones of a settled batch, if its payloads were purged before.
pub(super) async fn schedule_forget(tx: &mut Tx<'_>, batch: BatchPk, forget_at: Timestamp) -> Result<(), StoreError> {
    const SCHEDULE_FORGET: Statement = Statement::new(
        "-- schedule_forget
        UPDATE rollout_group
        SET forget_us = $2
        WHERE batch_pk = $1 AND state = 'batched' AND purged_us IS NOT NULL AND forget_us IS NULL",
    );
    tx.execute(SCHEDULE_FORGET, args![batch, forget_at]).await.map(drop)
}
