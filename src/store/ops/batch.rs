//! Batches: their rows, and the moves that several stages share.

use forebay_client::wire::{BatchState, LossWeighting};

use super::{name_of, pair};
use crate::{
    buffer::{
        ids::{BatchId, BatchPk, GroupPk, LeaseToken, PolicyName},
        weights::BatchWeights,
    },
    clock::Timestamp,
    store::{
        Batch, Policy, StoreError,
        sql::{Row, Statement, Tx, args, key_list, locking},
        tally::LIVE_BYTES,
    },
};

/// Reason of a batch or group whose deliveries are used up.
const REASON_MAX_DELIVERIES: &str = "max-deliveries";

macro_rules! select_batch {
    ($tail:literal) => {
        concat!(
            "-- select_batch
            SELECT b.batch_pk, b.batch_id, b.policy_pk, p.name AS policy, b.state, b.reason, b.lease, b.consumer,
                b.epoch, b.expires_us, b.attempt, b.failed_deliveries, b.resumes, b.step, b.group_count, b.rollout_count,
                b.sample_count, b.token_count, b.loss_weighting, b.loss_constant, b.weight_samples, b.weight_tokens,
                b.version_current, b.version_min, b.version_max, b.metrics, b.live_bytes, b.created_us
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
    let rollouts = row.get("rollout_count")?;
    let weighting: LossWeighting = row.parse("loss_weighting")?;
    Ok(Batch {
        batch_pk: row.get("batch_pk")?,
        batch_id: row.get("batch_id")?,
        policy: PolicyName::parse(&policy).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        policy_pk: row.get("policy_pk")?,
        state: row.parse("state")?,
        reason: row.get("reason")?,
        lease: row.get::<Option<String>>("lease")?.map(|lease| LeaseToken::presented(&lease)),
        consumer: row.get("consumer")?,
        epoch: row.get("epoch")?,
        expires_at: row.get("expires_us")?,
        attempt: row.get("attempt")?,
        failed_deliveries: row.get("failed_deliveries")?,
        resumes: row.get("resumes")?,
        step: row.get("step")?,
        groups: row.get("group_count")?,
        rollouts,
        samples: row.get("sample_count")?,
        tokens: row.get("token_count")?,
        weights: BatchWeights {
            weighting,
            constant: row.get("loss_constant")?,
            rollouts: rollouts.into(),
            samples: row.get("weight_samples")?,
            trained_tokens: row.get("weight_tokens")?,
        },
        version_current: row.get("version_current")?,
        trained_versions: pair(&mut row, "version_min", "version_max")?,
        metrics: serde_json::from_str(&metrics).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        live_bytes: row.get("live_bytes")?,
        created_at: row.get("created_us")?,
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

/// Counts a batch's move to another state: the rollouts that it still has, for some may be forgotten.
pub(super) async fn tally_move(tx: &mut Tx<'_>, batch: &Batch, to: BatchState) -> Result<(), StoreError> {
    const COUNT_ROLLOUTS: Statement = Statement::new(
        "-- count_rollouts_of_batch
        SELECT CAST(COALESCE(SUM(kept + masked), 0) AS BIGINT) AS rollouts
        FROM rollout_group
        WHERE batch_pk = $1 AND state = 'batched'",
    );
    let (from, to) = (name_of(&batch.state), name_of(&to));
    let rollouts: i64 = tx.fetch_one(COUNT_ROLLOUTS, args![batch.batch_pk]).await?.get("rollouts")?;
    let tallies = tx.tallies();
    tallies.batches(batch.policy_pk, &from, -1);
    tallies.batches(batch.policy_pk, &to, 1);
    tallies.rollouts(batch.policy_pk, &from, -rollouts);
    tallies.rollouts(batch.policy_pk, &to, rollouts);
    let live = |state: &str| state == "leased" || state == "returned";
    let bytes = batch.live_bytes * (i64::from(live(&to)) - i64::from(live(&from)));
    tallies.add(batch.policy_pk, LIVE_BYTES, bytes);
    Ok(())
}

/// A delivery that failed, by expiry or nack: the batch comes back, or is quarantined when its deliveries are used up.
pub(super) async fn fail_delivery(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    reason: Option<&str>,
) -> Result<(), StoreError> {
    const FAIL_DELIVERY: Statement = Statement::new(
        "-- fail_delivery
        UPDATE batch
        SET state = $2, reason = $3, failed_deliveries = $4, expires_us = NULL, lease = NULL
        WHERE batch_pk = $1 AND state = 'leased'",
    );
    let failed = batch.failed_deliveries + 1;
    let used_up = failed >= policy.rules.lease.max_deliveries;
    let to = if used_up { BatchState::Quarantined } else { BatchState::Returned };
    let reason = reason.or(used_up.then_some(REASON_MAX_DELIVERIES));
    tx.guarded(FAIL_DELIVERY, args![batch.batch_pk, name_of(&to), reason, failed], 1).await?;
    tally_move(tx, batch, to).await
}

/// How often leases of a batch ended without an ack, which its groups remember when it is split.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    /// By expiry or nack.
    deliveries: u32,
    /// By a resume.
    resumes: u32,
}

/// Ends a batch that holds bad groups: those are quarantined, the others return to their places.
pub(super) async fn split(
    tx: &mut Tx<'_>,
    policy: &Policy,
    batch: &Batch,
    bad: &[GroupPk],
    reason: Option<&str>,
) -> Result<(), StoreError> {
    const SPLIT_BATCH: Statement = Statement::new(
        "-- split_batch
        UPDATE batch
        SET state = 'split', reason = $3, failed_deliveries = failed_deliveries + 1, expires_us = NULL, lease = NULL
        WHERE batch_pk = $1 AND state = $2",
    );
    let before = name_of(&batch.state);
    tx.guarded(SPLIT_BATCH, args![batch.batch_pk, before.as_str(), reason], 1).await?;
    let failed = batch.failed_deliveries + 1;
    let (bad, good): (Vec<_>, Vec<_>) =
        members(tx, batch.batch_pk).await?.into_iter().partition(|group| bad.contains(&group.group_pk));
    let ended = Ended { deliveries: failed, resumes: batch.resumes };
    quarantine(tx, &bad, ended, reason).await?;
    if failed >= policy.rules.lease.max_deliveries {
        quarantine(tx, &good, ended, Some(REASON_MAX_DELIVERIES)).await?;
        tally_split(tx, batch, &before, &[&bad, &good].map(Vec::as_slice).concat(), &[]);
    } else {
        put_back(tx, &good, ended).await?;
        tally_split(tx, batch, &before, &bad, &good);
    }
    Ok(())
}

/// A group of a batch, as far as moving it is concerned.
#[derive(Clone, Debug)]
pub(super) struct MemberGroup {
    pub(super) group_pk: GroupPk,
    pub(super) group_id: String,
    rollouts: i64,
    payload_bytes: i64,
    pub(super) purged: bool,
}

/// The groups that a batch holds now, locked.
pub(super) async fn members(tx: &mut Tx<'_>, batch: BatchPk) -> Result<Vec<MemberGroup>, StoreError> {
    const LOCK_MEMBERS: Statement = locking!(
        "-- lock_member_groups
        SELECT group_pk, group_id, kept + masked AS rollouts, payload_bytes, purged_us
        FROM rollout_group
        WHERE batch_pk = $1 AND state = 'batched'
        ORDER BY group_pk"
    );
    let rows = tx.fetch_all(LOCK_MEMBERS, args![batch]).await?;
    rows.into_iter().map(read_member).collect()
}

fn read_member(mut row: Row) -> Result<MemberGroup, StoreError> {
    Ok(MemberGroup {
        group_pk: row.get("group_pk")?,
        group_id: row.get("group_id")?,
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
    const QUARANTINE_GROUPS: Statement = Statement {
        sqlite: "-- quarantine_groups
            UPDATE rollout_group
            SET state = 'quarantined', failed_deliveries = $2, reason = $3, resumes = $4
            WHERE state = 'batched' AND group_pk IN (SELECT value FROM json_each($1))",
        postgres: "-- quarantine_groups
            UPDATE rollout_group
            SET state = 'quarantined', failed_deliveries = $2, reason = $3, resumes = $4
            WHERE state = 'batched'
                AND group_pk = ANY ($1::bigint[])",
    };
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    tx.guarded(QUARANTINE_GROUPS, args![keys, ended.deliveries, reason, ended.resumes], groups.len()).await
}

/// Groups return to their places among the ready ones, with the count of leases that ended.
async fn put_back(tx: &mut Tx<'_>, groups: &[MemberGroup], ended: Ended) -> Result<(), StoreError> {
    const PUT_BACK_GROUPS: Statement = Statement {
        sqlite: "-- put_back_groups
            UPDATE rollout_group
            SET state = 'ready', batch_pk = NULL, failed_deliveries = $2, resumes = $3, reason = NULL
            WHERE state IN ('batched', 'quarantined') AND group_pk IN (SELECT value FROM json_each($1))",
        postgres: "-- put_back_groups
            UPDATE rollout_group
            SET state = 'ready', batch_pk = NULL, failed_deliveries = $2, resumes = $3, reason = NULL
            WHERE state IN ('batched', 'quarantined')
                AND group_pk = ANY ($1::bigint[])",
    };
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    tx.guarded(PUT_BACK_GROUPS, args![keys, ended.deliveries, ended.resumes], groups.len()).await
}

fn tally_split(tx: &mut Tx<'_>, batch: &Batch, before: &str, bad: &[MemberGroup], good: &[MemberGroup]) {
    let rollouts = |groups: &[MemberGroup]| groups.iter().map(|group| group.rollouts).sum::<i64>();
    let bad_bytes: i64 = bad.iter().map(|group| group.payload_bytes).sum();
    let policy = batch.policy_pk;
    let tallies = tx.tallies();
    tallies.batches(policy, before, -1);
    tallies.batches(policy, "split", 1);
    tallies.groups(policy, "batched", -((bad.len() + good.len()) as i64));
    tallies.groups(policy, "quarantined", bad.len() as i64);
    tallies.groups(policy, "ready", good.len() as i64);
    tallies.rollouts(policy, before, -i64::from(batch.rollouts));
    tallies.rollouts(policy, "quarantined", rollouts(bad));
    tallies.rollouts(policy, "ready", rollouts(good));
    tallies.add(policy, LIVE_BYTES, -bad_bytes);
}

/// The quarantined groups of a split batch are ready again, with a fresh count.
pub(super) async fn readmit_groups(tx: &mut Tx<'_>, batch: &Batch) -> Result<usize, StoreError> {
    const LOCK_QUARANTINED: Statement = locking!(
        "-- lock_quarantined_groups
        SELECT group_pk, group_id, kept + masked AS rollouts, payload_bytes, purged_us
        FROM rollout_group
        WHERE batch_pk = $1 AND state = 'quarantined'
        ORDER BY group_pk"
    );
    let rows = tx.fetch_all(LOCK_QUARANTINED, args![batch.batch_pk]).await?;
    let groups: Vec<MemberGroup> = rows.into_iter().map(read_member).collect::<Result<_, _>>()?;
    put_back(tx, &groups, Ended::default()).await?;
    let rollouts: i64 = groups.iter().map(|group| group.rollouts).sum();
    let bytes: i64 = groups.iter().map(|group| group.payload_bytes).sum();
    let policy = batch.policy_pk;
    let tallies = tx.tallies();
    tallies.groups(policy, "quarantined", -(groups.len() as i64));
    tallies.groups(policy, "ready", groups.len() as i64);
    tallies.rollouts(policy, "quarantined", -rollouts);
    tallies.rollouts(policy, "ready", rollouts);
    tallies.add(policy, LIVE_BYTES, bytes);
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

/// Lets the tombstones of a batch that is settled expire, if its payloads went before.
pub(super) async fn schedule_forget(tx: &mut Tx<'_>, batch: BatchPk, forget_at: Timestamp) -> Result<(), StoreError> {
    const SCHEDULE_FORGET: Statement = Statement::new(
        "-- schedule_forget
        UPDATE rollout_group
        SET forget_us = $2
        WHERE batch_pk = $1 AND state = 'batched' AND purged_us IS NOT NULL AND forget_us IS NULL",
    );
    tx.execute(SCHEDULE_FORGET, args![batch, forget_at]).await.map(drop)
}
