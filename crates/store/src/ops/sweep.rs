//! Stage 7 in the store: changes that time alone makes due, in slices, so that no sweep holds a lock for long.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchPk, GroupId, PolicyPk},
    lease::ExpiredLeases,
    looking::journal::Happening,
    policies::Policy,
    reasons,
    states::{BatchState, GroupMove, GroupState, RolloutState},
    tally::{LeaseEvent, Tally},
};

use super::{
    batch::{self, select_batches},
    blobs, group, journal, members_state,
    places::{count_released, read_place},
    policy, tallies,
};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args, locking},
    tally::minute,
};

/// Takes back the expired leases of a policy. Leases of earlier runs ended with their runs.
pub(super) async fn expire_of_policy(tx: &mut Tx<'_>, policy: &Policy, now: Timestamp) -> Result<u64, StoreError> {
    const SELECT_EXPIRED: Statement =
        select_batches!("-- select_expired_of_policy", "state = 'leased' AND expires_us <= $3");
    let rows = tx.fetch_all(SELECT_EXPIRED, args![policy.policy_pk, policy.run, now]).await?;
    let expired = rows.len() as u64;
    for mut row in rows {
        let batch = batch::get(tx, row.get::<BatchPk>("batch_pk")?).await?;
        batch::fail_delivery(tx, policy, &batch, None, now).await?;
        tx.tallies().lease(policy.policy_pk, LeaseEvent::Expired, now);
    }
    if expired > 0 {
        journal::write(tx, policy.policy_pk, &Happening::LeasesExpired(expired), None, now).await?;
    }
    Ok(expired)
}

/// Whether time has made anything due. This only reads, so that an idle service writes nothing.
pub struct AnythingDue(pub Timestamp);

#[async_trait]
impl Op for AnythingDue {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        // One lookup in each index of times, and for each policy lookups in those of open and of ready groups. EXISTS
        // would make Postgres expect that a third of a table is due and scan the table for the first row. Without CROSS
        // JOIN, SQLite would read the groups to find their policies.
        const SELECT_DUE: Statement = Statement::new(
            "-- select_due
            SELECT CAST(CASE
                WHEN (SELECT MIN(expires_us) FROM batch WHERE expires_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(deadline_us) FROM rollout_group WHERE deadline_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(due_us) FROM scoring) <= $1 THEN 1
                WHEN (SELECT MIN(expires_us) FROM score_work WHERE expires_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(purge_us) FROM rollout_group WHERE purge_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(forget_us) FROM rollout_group WHERE forget_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(expires_us) FROM admission) <= $1 THEN 1
                WHEN (SELECT MIN(due_us) FROM session WHERE due_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(purge_us) FROM session WHERE purge_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(forget_us) FROM session WHERE forget_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(expires_us) FROM blob WHERE expires_us IS NOT NULL) <= $1 THEN 1
                WHEN (SELECT MIN(minute) FROM recent) <= $2 THEN 1
                WHEN EXISTS (
                    SELECT 1
                    FROM policy AS p
                    CROSS JOIN rollout_group AS g
                    WHERE g.policy_pk = p.policy_pk AND g.run < p.run AND g.state = 'open'
                ) THEN 1
                WHEN EXISTS (
                    SELECT 1
                    FROM policy AS p
                    CROSS JOIN rollout_group AS g
                    WHERE g.policy_pk = p.policy_pk AND g.run < p.run AND g.state = 'ready'
                ) THEN 1
                ELSE 0
            END AS BIGINT) AS due",
        );
        let minute = minute(self.0) - policy::RECENT_MINUTES;
        tx.fetch_one(SELECT_DUE, args![self.0, minute]).await?.get("due")
    }
}

/// Sweep: takes back expired leases, up to `limit`.
pub struct ExpireLeases {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for ExpireLeases {
    type Output = Vec<ExpiredLeases>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // In the order of their keys, so that sweeps of two replicas lock policies in the same order.
        const SELECT_POLICIES: Statement = Statement::new(
            "-- select_policies_with_expired_leases
            SELECT DISTINCT policy_pk
            FROM (
                SELECT policy_pk
                FROM batch
                WHERE expires_us <= $1
                ORDER BY expires_us
                LIMIT $2
            ) AS expired
            ORDER BY policy_pk",
        );
        let mut expired = Vec::new();
        for mut row in tx.fetch_all(SELECT_POLICIES, args![self.now, self.limit]).await? {
            let policy = policy::lock_by_key(tx, row.get("policy_pk")?).await?;
            let leases = expire_of_policy(tx, &policy, self.now).await?;
            expired.push(ExpiredLeases { policy: policy.name, leases });
        }
        Ok(expired)
    }
}

/// Sweep: discards groups that a concurrent post added to a run that `reset` had just ended.
pub struct DiscardStragglers {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for DiscardStragglers {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        const SELECT_STRAGGLERS: Statement = Statement::new(
            "-- select_stragglers
            SELECT policy_pk, run, group_id
            FROM (
                SELECT g.policy_pk, g.run, g.group_id, g.group_pk
                FROM policy AS p
                CROSS JOIN rollout_group AS g
                WHERE g.policy_pk = p.policy_pk AND g.run < p.run AND g.state = 'open'
                UNION ALL
                SELECT g.policy_pk, g.run, g.group_id, g.group_pk
                FROM policy AS p
                CROSS JOIN rollout_group AS g
                WHERE g.policy_pk = p.policy_pk AND g.run < p.run AND g.state = 'ready'
                LIMIT $1
            ) AS stragglers
            ORDER BY group_pk",
        );
        let mut discarded = 0;
        for mut row in tx.fetch_all(SELECT_STRAGGLERS, args![self.limit]).await? {
            let group_id: String = row.get("group_id")?;
            let group_id = GroupId::parse(&group_id).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            let locked = group::lock(tx, row.get("policy_pk")?, row.get("run")?, &group_id).await?;
            let Some(mut locked) = locked else { continue };
            let is_discarded = group::discard(
                tx,
                &mut locked,
                GroupMove::Straggle,
                reasons::RESET.to_owned(),
                reasons::RESET,
                self.now,
            )
            .await?;
            discarded += u64::from(is_discarded);
        }
        Ok(discarded)
    }
}

/// Purges payloads and deletes tombstones that are due, up to `limit` groups each. Returns how many were done.
pub struct Retire {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for Retire {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        const FORGET_MINUTES: Statement = Statement::new(
            "-- forget_minutes
            DELETE FROM recent
            WHERE minute <= $1",
        );
        let purged = purge(tx, self.now, self.limit).await?;
        let forgotten = forget(tx, self.now, self.limit).await?;
        tx.execute(FORGET_MINUTES, args![minute(self.now) - policy::RECENT_MINUTES]).await?;
        Ok(purged + forgotten)
    }
}

/// Deletes payloads that are due; the ledger rows stay as tombstones.
async fn purge(tx: &mut Tx<'_>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
    const LOCK_PURGEABLE: Statement = locking!(
        "-- lock_purgeable
        SELECT group_pk, rules_pk,
            CAST(COALESCE((
                SELECT CASE WHEN b.state = 'trained' AND b.run = p.run THEN 1 ELSE 0 END
                FROM batch AS b
                JOIN policy AS p ON p.policy_pk = b.policy_pk
                WHERE b.batch_pk = rollout_group.batch_pk
            ), 0) AS BIGINT) AS unsettled
        FROM rollout_group
        WHERE purge_us <= $1
        ORDER BY purge_us
        LIMIT $2"
    );
    const MARK_PURGED: Statement = Statement::new(
        "-- mark_purged
        UPDATE rollout_group
        SET purge_us = NULL, purged_us = $2, forget_us = $3
        WHERE group_pk = $1 AND purge_us IS NOT NULL",
    );
    let rows = tx.fetch_all(LOCK_PURGEABLE, args![now, limit]).await?;
    let purged = rows.len() as u64;
    let mut rollouts = Vec::new();
    for mut row in rows {
        let group_pk: i64 = row.get("group_pk")?;
        let rules = tx.rules(row.get("rules_pk")?).await?;
        // The tombstone of a group that is not settled stays until it is, because a resume below it must still find the
        // gap.
        let unsettled = row.get::<bool>("unsettled")?;
        let forget_at = (!unsettled).then(|| now.plus_seconds(rules.retention.tombstone_s));
        rollouts.extend(delete_payloads(tx, group_pk, now).await?);
        tx.guarded(MARK_PURGED, args![group_pk, now, forget_at], 1).await?;
    }
    blobs::release(tx, rollouts, now).await?;
    Ok(purged)
}

/// Deletes the payloads of a group. Returns the rollouts that had them.
async fn delete_payloads(tx: &mut Tx<'_>, group_pk: i64, now: Timestamp) -> Result<Vec<i64>, StoreError> {
    const DELETE_PAYLOADS: Statement = Statement {
        sqlite: "-- delete_payloads
            DELETE FROM payload
            WHERE rollout_pk IN (SELECT rollout_pk FROM rollout WHERE group_pk = $1)
            RETURNING rollout_pk, file, start, length",
        postgres: "-- delete_payloads
            DELETE FROM payload
            WHERE rollout_pk = ANY (ARRAY(SELECT rollout_pk FROM rollout WHERE group_pk = $1))
            RETURNING rollout_pk, file, start, length",
    };
    let (mut rollouts, mut places) = (Vec::new(), Vec::new());
    for mut row in tx.fetch_all(DELETE_PAYLOADS, args![group_pk]).await? {
        rollouts.push(row.get("rollout_pk")?);
        places.extend(read_place(&mut row)?);
    }
    count_released(tx, &places, now).await?;
    Ok(rollouts)
}

/// Deletes tombstones that are due. Their rollouts are counted as forgotten.
async fn forget(tx: &mut Tx<'_>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
    const LOCK_FORGETTABLE: Statement = locking!(
        "-- lock_forgettable
        SELECT group_pk, policy_pk, state, kept + masked AS rollouts, dropped, late,
            (SELECT b.state FROM batch AS b WHERE b.batch_pk = rollout_group.batch_pk) AS batch_state
        FROM rollout_group
        WHERE forget_us <= $1
        ORDER BY forget_us
        LIMIT $2"
    );
    const SELECT_POLICIES: Statement = Statement::new(
        "-- select_policies_with_forgettable_groups
        SELECT DISTINCT policy_pk
        FROM (
            SELECT policy_pk
            FROM rollout_group
            WHERE forget_us <= $1
            ORDER BY forget_us
            LIMIT $2
        ) AS due
        ORDER BY policy_pk",
    );
    // Batches change their states under the locks of their policies, so the states that are counted below cannot change
    // meanwhile.
    let mut locked = Vec::new();
    for mut row in tx.fetch_all(SELECT_POLICIES, args![now, limit]).await? {
        let policy = policy::lock_by_key(tx, row.get("policy_pk")?).await?;
        locked.push(policy.policy_pk);
    }
    let (mut forgotten, mut rollouts) = (0, Vec::new());
    for mut row in tx.fetch_all(LOCK_FORGETTABLE, args![now, limit]).await? {
        let policy = row.get("policy_pk")?;
        // If another replica has deleted some of these tombstones, others are selected in their place. They wait for
        // the next slice.
        if locked.contains(&policy) {
            rollouts.extend(forget_group(tx, policy, row, now).await?);
            forgotten += 1;
        }
    }
    blobs::release(tx, rollouts, now).await?;
    Ok(forgotten)
}

/// Deletes the tombstone of a group. Returns the rollouts that still had payloads.
async fn forget_group(tx: &mut Tx<'_>, policy: PolicyPk, mut row: Row, now: Timestamp) -> Result<Vec<i64>, StoreError> {
    const FORGET_SCORES: Statement = Statement {
        sqlite: "-- forget_scores
            DELETE FROM score
            WHERE rollout_pk IN (SELECT rollout_pk FROM rollout WHERE group_pk = $1)",
        postgres: "-- forget_scores
            DELETE FROM score
            WHERE rollout_pk = ANY (ARRAY(SELECT rollout_pk FROM rollout WHERE group_pk = $1))",
    };
    const FORGET_EVAL_ROLLOUTS: Statement = Statement {
        sqlite: "-- forget_eval_rollouts
            DELETE FROM eval_rollout
            WHERE rollout_pk IN (SELECT rollout_pk FROM rollout WHERE group_pk = $1)",
        postgres: "-- forget_eval_rollouts
            DELETE FROM eval_rollout
            WHERE rollout_pk = ANY (ARRAY(SELECT rollout_pk FROM rollout WHERE group_pk = $1))",
    };
    const FORGET_TURN_SCORES: Statement = Statement {
        sqlite: "-- forget_turn_scores
            DELETE FROM turn_score
            WHERE rollout_pk IN (SELECT rollout_pk FROM rollout WHERE group_pk = $1)",
        postgres: "-- forget_turn_scores
            DELETE FROM turn_score
            WHERE rollout_pk = ANY (ARRAY(SELECT rollout_pk FROM rollout WHERE group_pk = $1))",
    };
    const FORGET_ROLLOUTS: Statement = Statement::new(
        "-- forget_rollouts
        DELETE FROM rollout
        WHERE group_pk = $1",
    );
    const SELECT_CARRIERS: Statement = Statement::new(
        "-- select_carriers
        SELECT batch_pk
        FROM batch_group
        WHERE group_pk = $1",
    );
    const FORGET_PLACES: Statement = Statement::new(
        "-- forget_places
        DELETE FROM batch_group
        WHERE group_pk = $1",
    );
    const FORGET_GROUP: Statement = Statement::new(
        "-- forget_group
        DELETE FROM rollout_group
        WHERE group_pk = $1",
    );
    let group_pk: i64 = row.get("group_pk")?;
    let carriers = tx.fetch_all(SELECT_CARRIERS, args![group_pk]).await?;
    let with_payloads = delete_payloads(tx, group_pk, now).await?;
    for statement in
        [FORGET_EVAL_ROLLOUTS, FORGET_SCORES, FORGET_TURN_SCORES, FORGET_ROLLOUTS, FORGET_PLACES, FORGET_GROUP]
    {
        tx.execute(statement, args![group_pk]).await?;
    }
    for mut carrier in carriers {
        forget_empty_batch(tx, carrier.get("batch_pk")?).await?;
    }
    let (state, batch): (GroupState, Option<BatchState>) = (row.get("state")?, row.get("batch_state")?);
    let members = members_state(state, batch)?;
    let (rollouts, dropped, late): (i64, i64, i64) = (row.get("rollouts")?, row.get("dropped")?, row.get("late")?);
    let tallies = tx.tallies();
    tallies.groups(policy, state, -1);
    tallies.rollouts(policy, members, -rollouts);
    tallies.rollouts(policy, RolloutState::Dropped, -dropped);
    tallies.rollouts(policy, RolloutState::Late, -late);
    tallies.add(policy, Tally::Forgotten, rollouts + dropped + late);
    Ok(with_payloads)
}

/// Deletes a batch with the last of its groups.
async fn forget_empty_batch(tx: &mut Tx<'_>, batch: BatchPk) -> Result<(), StoreError> {
    const FORGET_BATCH: Statement = Statement::new(
        "-- forget_batch
        DELETE FROM batch
        WHERE batch_pk = $1 AND NOT EXISTS (SELECT 1 FROM batch_group WHERE batch_pk = $1)
        RETURNING policy_pk, state",
    );
    if let Some(mut row) = tx.fetch_optional(FORGET_BATCH, args![batch]).await? {
        let (policy, state): (PolicyPk, BatchState) = (row.get("policy_pk")?, row.get("state")?);
        tx.tallies().batches(policy, state, -1);
    }
    Ok(())
}

/// Whether there are appended changes that must be added to the tallies.
pub(crate) struct MayFoldTallies;

#[async_trait]
impl Op for MayFoldTallies {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        tallies::may_fold(tx).await
    }
}

pub(crate) struct FoldTallies;

#[async_trait]
impl Op for FoldTallies {
    type Output = ();

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        tallies::fold(tx).await
    }
}

/// Reads and writes without effect. It answers when the database does.
pub(crate) struct Ping;

#[async_trait]
impl Op for Ping {
    type Output = ();

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const TOUCH: Statement = Statement::new("-- touch\nUPDATE policy SET run = run WHERE policy_pk = 0");
        tx.execute(TOUCH, args![]).await.map(drop)
    }
}

/// Updates a row to its own values. It answers when the database can write.
pub struct Probe;

#[async_trait]
impl Op for Probe {
    type Output = ();

    const IS_WORK: bool = false;

    const PROBES: bool = true;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        // On Postgres, a lock on a table that posts write to would block every post. While there is such a lock, the
        // database is not ready, and the check must not wait for it.
        const REACH_TABLES: Statement = Statement {
            sqlite: "-- reach_tables\nSELECT 1 AS reached",
            postgres: "-- reach_tables
                LOCK TABLE policy, rollout_group, rollout, payload, batch, batch_group, admission, tally, tally_change, recent,
                    session, session_policy, session_key, session_call, session_saved, scoring, score, blob, blob_use
                IN ROW EXCLUSIVE MODE NOWAIT",
        };
        const PROBE: Statement = Statement::new("-- probe\nUPDATE policy SET run = run WHERE name = 'default'");
        tx.execute(REACH_TABLES, args![]).await?;
        tx.guarded(PROBE, args![], 1).await
    }
}
