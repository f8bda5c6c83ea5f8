//! Facts for explanations: a few statements per policy, each of which examines a bounded number of rows.
use std::collections::BTreeSet;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{BatchId, PolicyPk},
    looking::{
        explain::facts::{Asking, Event, GroupFacts, Lease, ScoringFacts, WORK_COUNTED_MAX, WorkFacts},
        insight::{LedgerFacts, ReadFacts},
        journal::ReadJournal,
        steps::{ReadSteps, StepRow},
    },
    pages::{Cursor, Order},
    states::{BatchState, GroupState},
};

use crate::{
    error::StoreError,
    op::Op,
    ops::{history, places_left, read_json},
    sql::{Statement, Tx, args},
};

/// Consumers that wait and are named.
const ASKING_MAX: i64 = 64;

/// Batches of each live state that are looked at.
const BATCHES_MAX: i64 = 64;

/// The newest steps that are read. Explanations look at 20 that are not undone, and compare the newest of them with the
/// one 20 steps before.
const STEPS_READ: u32 = 64;

/// The newest groups that are looked at.
const GROUPS_READ: i64 = 200;

/// Open groups that are read to find the fullest ones.
const OPEN_READ: i64 = 1_000;

/// The rollouts that have waited longest for scores, whose missing scores are named.
const SCORING_MAX: i64 = 16;

/// The missing scores whose work is counted.
const WORK_NAMES_MAX: usize = 4;

/// The fullest open groups that are kept.
const FULLEST_MAX: usize = 64;

/// The newest entries of the journal that are read.
const EVENTS_READ: u32 = 50;

const SELECT_TOTALS_BEFORE: Statement = Statement::new(
    "-- select_totals_before
    SELECT since, minute, body
    FROM history
    WHERE policy_pk = $1 AND minute <= $2
    ORDER BY minute DESC
    LIMIT 1",
);

const SELECT_OLDEST_TOTALS: Statement = Statement::new(
    "-- select_oldest_totals
    SELECT since, minute, body
    FROM history
    WHERE policy_pk = $1 AND minute > 0
    ORDER BY minute
    LIMIT 1",
);

#[async_trait]
impl Op for ReadFacts {
    type Output = LedgerFacts;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<LedgerFacts, StoreError> {
        const SELECT_CREATED: Statement = Statement::new(
            "-- select_created
            SELECT created_us
            FROM policy
            WHERE policy_pk = $1",
        );
        let mut before = [None, None, None];
        for (slot, begin) in before.iter_mut().zip(self.windows) {
            let row = tx.fetch_optional(SELECT_TOTALS_BEFORE, args![self.policy, begin]).await?;
            *slot = row.map(history::snapshot).transpose()?;
        }
        let oldest = tx.fetch_optional(SELECT_OLDEST_TOTALS, args![self.policy]).await?;
        let (asking, last_asked) = asking(tx, self.policy, self.now).await?;
        let returned = batches(self, tx, BatchState::Returned).await?;
        let lacking = lacking(self, tx).await?;
        Ok(LedgerFacts {
            created: tx.fetch_one(SELECT_CREATED, args![self.policy]).await?.get("created_us")?,
            before,
            oldest: oldest.map(history::snapshot).transpose()?,
            oldest_ready: oldest_ready(self, tx).await?,
            asking,
            last_asked,
            leases: batches(self, tx, BatchState::Leased).await?,
            returned,
            steps: steps(self, tx).await?,
            lacking: lacking.iter().copied().filter(|lacks| *lacks > 0).take(FULLEST_MAX).collect(),
            scoring: scoring(tx, self.policy, lacking.iter().filter(|lacks| **lacks == 0).count()).await?,
            groups: groups(tx, self.policy).await?,
            events: events(tx, self.policy).await?,
        })
    }
}

/// Consumers that wait, and when a consumer asked last that still waits or whose wait ended without a batch.
async fn asking(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    now: Timestamp,
) -> Result<(Vec<Asking>, Option<Timestamp>), StoreError> {
    const SELECT_ASKING: Statement = Statement::new(
        "-- select_asking
        SELECT consumer, since_us
        FROM waiting_consumer
        WHERE policy_pk = $1 AND until_us > $2
        ORDER BY until_us
        LIMIT $3",
    );
    const SELECT_LAST_ASKED: Statement = Statement::new(
        "-- select_last_asked
        SELECT asked_us
        FROM waiting_consumer
        WHERE policy_pk = $1 AND until_us < $2
        ORDER BY until_us DESC
        LIMIT 1",
    );
    let mut asking = Vec::new();
    for mut row in tx.fetch_all(SELECT_ASKING, args![policy, now, ASKING_MAX]).await? {
        asking.push(Asking { consumer: row.get("consumer")?, since: row.get("since_us")? });
    }
    let last = tx.fetch_optional(SELECT_LAST_ASKED, args![policy, i64::MAX]).await?;
    Ok((asking, last.map(|mut row| row.get("asked_us")).transpose()?))
}

async fn oldest_ready(read: &ReadFacts, tx: &mut Tx<'_>) -> Result<Option<Timestamp>, StoreError> {
    const SELECT_OLDEST_READY: Statement = Statement::new(
        "-- select_oldest_ready
        SELECT decided_us
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND state = 'ready'
        ORDER BY ready_seq
        LIMIT 1",
    );
    let row = tx.fetch_optional(SELECT_OLDEST_READY, args![read.policy, read.run]).await?;
    Ok(row.map(|mut row| row.get::<Option<Timestamp>>("decided_us")).transpose()?.flatten())
}

/// Batches of a live state, some of them if there are many.
async fn batches(read: &ReadFacts, tx: &mut Tx<'_>, state: BatchState) -> Result<Vec<Lease>, StoreError> {
    const SELECT_LIVE_BATCHES: Statement = Statement::new(
        "-- select_live_batches
        SELECT batch_id, consumer, granted_us AS since_us, failed_deliveries
        FROM batch
        WHERE policy_pk = $1 AND run = $2 AND state = $3
        ORDER BY step, batch_pk
        LIMIT $4",
    );
    let mut found = Vec::new();
    for mut row in tx.fetch_all(SELECT_LIVE_BATCHES, args![read.policy, read.run, state, BATCHES_MAX]).await? {
        found.push(Lease {
            batch_id: row.get::<BatchId>("batch_id")?.to_string(),
            consumer: row.get("consumer")?,
            since: row.get("since_us")?,
            failed: row.get("failed_deliveries")?,
        });
    }
    Ok(found)
}

async fn steps(read: &ReadFacts, tx: &mut Tx<'_>) -> Result<Vec<StepRow>, StoreError> {
    let newest = ReadSteps { policy: read.policy, run: read.run, order: Order::Newest, after: None, limit: STEPS_READ };
    Ok(newest.run(tx).await?.steps)
}

/// How many rollouts each of a bounded number of open groups lacks, the fewest first. Groups that lack none wait for scores.
async fn lacking(read: &ReadFacts, tx: &mut Tx<'_>) -> Result<Vec<u32>, StoreError> {
    const SELECT_LACKING: Statement = Statement::new(
        "-- select_lacking
        SELECT rules_pk, state, size, kept, masked, dropped, scoring
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND state = 'open'
        LIMIT $3",
    );
    let rows = tx.fetch_all(SELECT_LACKING, args![read.policy, read.run, OPEN_READ]).await?;
    let mut lacking = Vec::with_capacity(rows.len());
    for mut row in rows {
        lacking.push(places_left(tx, &mut row).await?);
    }
    lacking.sort_unstable();
    Ok(lacking)
}

/// What waits for scores, if something does.
async fn scoring(tx: &mut Tx<'_>, policy: PolicyPk, groups: usize) -> Result<Option<ScoringFacts>, StoreError> {
    const SELECT_LONGEST_SCORING: Statement = Statement::new(
        "-- select_longest_scoring
        SELECT missing, since_us
        FROM scoring
        WHERE policy_pk = $1 AND since_us <= $2
        ORDER BY since_us
        LIMIT $3",
    );
    let mut found: Option<ScoringFacts> = None;
    for mut row in tx.fetch_all(SELECT_LONGEST_SCORING, args![policy, i64::MAX, SCORING_MAX]).await? {
        let oldest = row.get("since_us")?;
        let none = || ScoringFacts { groups: groups as i64, oldest, names: BTreeSet::new(), work: Vec::new() };
        let facts = found.get_or_insert_with(none);
        facts.names.extend(read_json::<Vec<String>>(&mut row, "missing")?.unwrap_or_default());
    }
    if let Some(facts) = &mut found {
        for name in facts.names.iter().take(WORK_NAMES_MAX) {
            facts.work.extend(work(tx, policy, name).await?);
        }
    }
    Ok(found)
}

/// The work for a score, if there is some.
async fn work(tx: &mut Tx<'_>, policy: PolicyPk, name: &str) -> Result<Option<WorkFacts>, StoreError> {
    const COUNT_WORK: Statement = Statement::new(
        "-- count_work
        SELECT
            (
                SELECT COUNT(*)
                FROM (
                    SELECT 1 FROM score_work WHERE policy_pk = $1 AND name = $2 AND state = 'open' LIMIT $3
                ) AS o
            ) AS open,
            (
                SELECT COUNT(*)
                FROM (
                    SELECT 1 FROM score_work WHERE policy_pk = $1 AND name = $2 AND state = 'leased' LIMIT $3
                ) AS l
            ) AS leased,
            (
                SELECT COUNT(*)
                FROM (
                    SELECT 1 FROM score_work WHERE policy_pk = $1 AND name = $2 AND state = 'exhausted' LIMIT $3
                ) AS e
            ) AS exhausted,
            (
                SELECT failure
                FROM score_work
                WHERE policy_pk = $1 AND name = $2 AND state = 'exhausted'
                ORDER BY since_us, work_pk
                LIMIT 1
            ) AS failure,
            (SELECT asked_us FROM score_asked WHERE policy_pk = $1 AND name = $2) AS asked_us",
    );
    let mut row = tx.fetch_one(COUNT_WORK, args![policy, name, WORK_COUNTED_MAX + 1]).await?;
    let facts = WorkFacts {
        name: name.to_owned(),
        open: row.get("open")?,
        leased: row.get("leased")?,
        exhausted: row.get("exhausted")?,
        failure: row.get("failure")?,
        asked: row.get("asked_us")?,
    };
    Ok((facts.open + facts.leased + facts.exhausted > 0).then_some(facts))
}

/// The newest groups of a policy.
async fn groups(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<Vec<GroupFacts>, StoreError> {
    const SELECT_NEWEST_GROUPS: Statement = Statement::new(
        "-- select_newest_groups
        SELECT state, reason, opened_us, decided_us, tokens, kept + masked AS rollouts, reward_min, reward_max
        FROM rollout_group
        WHERE policy_pk = $1 AND group_pk < $2
        ORDER BY group_pk DESC
        LIMIT $3",
    );
    let mut groups = Vec::new();
    for mut row in tx.fetch_all(SELECT_NEWEST_GROUPS, args![policy, i64::MAX, GROUPS_READ]).await? {
        let state: GroupState = row.get("state")?;
        let opened: Timestamp = row.get("opened_us")?;
        let decided = row.get::<Option<Timestamp>>("decided_us")?;
        let (tokens, rollouts): (i64, i64) = (row.get("tokens")?, row.get("rollouts")?);
        let reason: Option<String> = row.get("reason")?;
        let rewards: (Option<f64>, Option<f64>) = (row.get("reward_min")?, row.get("reward_max")?);
        groups.push(GroupFacts {
            is_stale: state == GroupState::Stale,
            is_batched: state == GroupState::Batched,
            filled_us: decided.map(|decided| decided.micros_since(opened).max(0)),
            tokens_mean: (decided.is_some() && rollouts > 0).then(|| tokens as f64 / rollouts as f64),
            discarded_by: reason.filter(|_| state == GroupState::Discarded),
            rewards: rewards.0.zip(rewards.1),
        });
    }
    Ok(groups)
}

async fn events(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<Vec<Event>, StoreError> {
    let newest = ReadJournal { policy, from: Cursor::first(Order::Newest), limit: EVENTS_READ };
    let entries = newest.run(tx).await?.entries;
    let event = |entry: forebay_domain::looking::journal::JournalEntry| Event {
        at: entry.at,
        filter: entry.detail["filter"].as_str().map(str::to_owned),
        kind: entry.kind,
        key_id: entry.key_id.map(|key_id| key_id.as_str().to_owned()),
    };
    Ok(entries.into_iter().map(event).collect())
}
