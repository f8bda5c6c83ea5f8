//! Diagnosis: reads every row and compares it with the rows that refer to it. This takes long, so neither metrics nor
//! requests may use it.

use async_trait::async_trait;
use forebay_domain::{
    blobs::Blob,
    ids::{GroupPk, IdKey, PolicyName},
    looking::diagnosis::{Contradiction, Examination},
    samples::BatchMember,
    states::{BatchState, GroupState, RolloutState, Verdict, rollout_state},
    tally::Tally,
};
use std::collections::BTreeMap;

use crate::{
    error::StoreError,
    op::Op,
    ops::{
        blobs::{BlobPk, read_blob},
        policy::ReadTallies,
        samples::{read_members, select_members},
    },
    sql::{Row, Statement, Tx, args},
};

/// The most contradictions of one kind that are named. The rest are only counted.
const NAMED_MAX: i64 = 5;

/// Rows whose keys are checked together.
const KEYS_PAGE: i64 = 10_000;

/// Reads every row and compares it with the rows that refer to it.
pub struct Examine;

#[async_trait]
impl Op for Examine {
    type Output = Examination;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Examination, StoreError> {
        let mut contradictions = Vec::new();
        for (what, statement) in CONTRADICTIONS.iter().chain(SESSION_CONTRADICTIONS) {
            let rows = tx.fetch_all(*statement, args![NAMED_MAX]).await?;
            let Some(rows_found) = rows.len().try_into().ok().filter(|&count: &i64| count > 0) else { continue };
            let named = rows.into_iter().map(|mut row| row.get("name")).collect::<Result<_, _>>()?;
            contradictions.push(Contradiction { what, at_least: rows_found, named });
        }
        for (what, statement) in KEYED {
            contradictions.extend(foreign_keys(tx, what, *statement).await?);
        }
        let (counted, in_no_state) = recount(tx).await?;
        contradictions.extend(in_no_state);
        Ok(Examination { tallies: ReadTallies(None).run(tx).await?, counted, contradictions })
    }
}

/// Descriptions of contradictions, each with the statement that finds it: it selects `name`, at most $1 times.
const CONTRADICTIONS: &[(&str, Statement)] = &[
    (
        "rollouts that may still be delivered and have no payload",
        Statement::new(
            "-- find_missing_payloads
            SELECT r.rollout_id AS name
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.verdict IN ('kept', 'masked') AND g.purged_us IS NULL
                AND NOT EXISTS (SELECT 1 FROM payload AS y WHERE y.rollout_pk = r.rollout_pk)
            LIMIT $1",
        ),
    ),
    (
        "payloads without a rollout",
        Statement::new(
            "-- find_orphaned_payloads
            SELECT CAST(y.rollout_pk AS TEXT) AS name
            FROM payload AS y
            WHERE y.rollout_pk >= 0 AND NOT EXISTS (SELECT 1 FROM rollout AS r WHERE r.rollout_pk = y.rollout_pk)
            LIMIT $1",
        ),
    ),
    (
        "pieces of no upload",
        Statement::new(
            "-- find_orphaned_pieces
            SELECT CAST(y.rollout_pk AS TEXT) AS name
            FROM payload AS y
            WHERE y.rollout_pk < 0
                AND NOT EXISTS (
                    SELECT 1
                    FROM blob AS b
                    WHERE b.blob_pk = -y.rollout_pk / 4096 AND (-y.rollout_pk % 4096) * 1048576 < b.stored
                )
            LIMIT $1",
        ),
    ),
    (
        "uploads that lack pieces",
        Statement::new(
            "-- find_uploads_without_pieces
            SELECT CAST(b.blob_pk AS TEXT) AS name
            FROM blob AS b
            WHERE (b.stored + 1048575) / 1048576 <> (
                SELECT COUNT(*)
                FROM payload AS y
                WHERE y.rollout_pk BETWEEN -(b.blob_pk * 4096 + 4095) AND -(b.blob_pk * 4096)
            )
            LIMIT $1",
        ),
    ),
    (
        "uploads that rollouts name and that are not whole, or whose deletion nobody looks after",
        Statement::new(
            "-- find_broken_uploads
            SELECT CAST(b.blob_pk AS TEXT) AS name
            FROM blob AS b
            WHERE CASE
                WHEN EXISTS (SELECT 1 FROM blob_use AS u WHERE u.blob_pk = b.blob_pk) THEN b.stored < b.bytes
                ELSE b.expires_us IS NULL
            END
            LIMIT $1",
        ),
    ),
    (
        "rollouts that name uploads and have no payload",
        Statement::new(
            "-- find_uses_without_payload
            SELECT CAST(u.rollout_pk AS TEXT) AS name
            FROM blob_use AS u
            WHERE NOT EXISTS (SELECT 1 FROM payload AS y WHERE y.rollout_pk = u.rollout_pk)
            LIMIT $1",
        ),
    ),
    (
        "ready groups that no claim would find",
        Statement::new(
            "-- find_groups_before_the_line
            SELECT g.group_id AS name
            FROM rollout_group AS g
            JOIN policy AS p ON p.policy_pk = g.policy_pk AND p.run = g.run
            WHERE g.state = 'ready' AND g.ready_seq < p.ready_from
            LIMIT $1",
        ),
    ),
    (
        "rollouts without a group",
        Statement::new(
            "-- find_orphaned_rollouts
            SELECT r.rollout_id AS name
            FROM rollout AS r
            WHERE NOT EXISTS (SELECT 1 FROM rollout_group AS g WHERE g.group_pk = r.group_pk)
            LIMIT $1",
        ),
    ),
    (
        "groups whose counts differ from their rollouts",
        Statement::new(
            "-- find_miscounted_groups
            SELECT g.group_id AS name
            FROM rollout_group AS g
            WHERE (g.kept, g.masked, g.dropped, g.late, g.scoring) <> (
                SELECT
                    COALESCE(SUM(CASE WHEN r.verdict = 'kept' THEN 1 ELSE 0 END), 0),
                    COALESCE(SUM(CASE WHEN r.verdict = 'masked' THEN 1 ELSE 0 END), 0),
                    COALESCE(SUM(CASE WHEN r.verdict = 'dropped' THEN 1 ELSE 0 END), 0),
                    COALESCE(SUM(CASE WHEN r.verdict = 'late' THEN 1 ELSE 0 END), 0),
                    (SELECT COUNT(*) FROM scoring AS w WHERE w.group_pk = g.group_pk)
                FROM rollout AS r
                WHERE r.group_pk = g.group_pk
            )
            LIMIT $1",
        ),
    ),
    (
        "rollouts that lack scores and are not in an open group",
        Statement::new(
            "-- find_orphaned_scoring
            SELECT CAST(w.rollout_pk AS TEXT) AS name
            FROM scoring AS w
            WHERE NOT EXISTS (
                SELECT 1
                FROM rollout AS r
                JOIN rollout_group AS g ON g.group_pk = r.group_pk
                WHERE r.rollout_pk = w.rollout_pk AND r.group_pk = w.group_pk AND r.policy_pk = w.policy_pk
                    AND r.verdict = 'kept' AND g.state = 'open' AND g.deadline_us >= w.due_us
            )
            LIMIT $1",
        ),
    ),
    (
        "groups in a batch that does not carry them",
        Statement::new(
            "-- find_uncarried_groups
            SELECT g.group_id AS name
            FROM rollout_group AS g
            WHERE g.state = 'batched' AND NOT EXISTS (
                SELECT 1 FROM batch_group AS bg WHERE bg.group_pk = g.group_pk AND bg.batch_pk = g.batch_pk
            )
            LIMIT $1",
        ),
    ),
    (
        "groups in more than one batch that can still be trained",
        Statement::new(
            "-- find_groups_in_two_batches
            SELECT g.group_id AS name
            FROM batch_group AS bg
            JOIN batch AS b ON b.batch_pk = bg.batch_pk
            JOIN rollout_group AS g ON g.group_pk = bg.group_pk
            WHERE b.state IN ('leased', 'returned', 'trained', 'checkpointed', 'quarantined')
            GROUP BY g.group_pk, g.group_id
            HAVING COUNT(*) > 1
            LIMIT $1",
        ),
    ),
    (
        "live batches whose totals differ from those of their groups",
        Statement::new(
            "-- find_miscounted_batches
            SELECT CAST(b.batch_pk AS TEXT) AS name
            FROM batch AS b
            WHERE b.state IN ('leased', 'returned', 'quarantined')
                AND (b.group_count, b.rollout_count, b.sample_count, b.token_count, b.weight_samples, b.weight_tokens) <> (
                    SELECT COUNT(*), COALESCE(SUM(g.kept + g.masked), 0), COALESCE(SUM(g.samples), 0),
                        COALESCE(SUM(g.tokens), 0), COALESCE(SUM(g.trained_samples), 0),
                        COALESCE(SUM(g.trained_tokens), 0)
                    FROM batch_group AS bg
                    JOIN rollout_group AS g ON g.group_pk = bg.group_pk
                    WHERE bg.batch_pk = b.batch_pk
                )
            LIMIT $1",
        ),
    ),
];

const SESSION_CONTRADICTIONS: &[(&str, Statement)] = &[
    (
        "sessions whose counts differ from their calls",
        Statement::new(
            "-- find_miscounted_sessions
            SELECT CAST(s.session_pk AS TEXT) AS name
            FROM session AS s
            WHERE (s.ended_us IS NULL OR s.purge_us IS NOT NULL) AND (s.calls, s.bytes) <> (
                SELECT COUNT(*),
                    COALESCE(SUM(length(c.body) + length(c.response) + COALESCE(length(c.request), 0)), 0)
                FROM session_call AS c
                WHERE c.session_pk = s.session_pk
            )
            LIMIT $1",
        ),
    ),
    (
        "sessions whose policies have other counts than their calls",
        Statement::new(
            "-- find_miscounted_session_policies
            SELECT CAST(sp.session_pk AS TEXT) AS name
            FROM session_policy AS sp
            JOIN session AS s ON s.session_pk = sp.session_pk
            WHERE (s.ended_us IS NULL OR s.purge_us IS NOT NULL) AND (sp.calls, sp.sampled) <> (
                SELECT COUNT(*), COALESCE(SUM(c.sampled), 0)
                FROM session_call AS c
                WHERE c.session_pk = sp.session_pk AND c.policy_pk = sp.policy_pk
            )
            LIMIT $1",
        ),
    ),
    (
        "calls that share ids with a call that is not before them",
        Statement::new(
            "-- find_unfounded_calls
            SELECT CAST(c.call_pk AS TEXT) AS name
            FROM session_call AS c
            WHERE c.parent IS NOT NULL AND NOT EXISTS (
                SELECT 1
                FROM session_call AS before
                WHERE before.session_pk = c.session_pk AND before.seq = c.parent AND before.seq < c.seq
                    AND before.prompt + before.sampled >= c.shared
            )
            LIMIT $1",
        ),
    ),
    (
        "sessions with keys, calls or saved states, but without a row",
        Statement::new(
            "-- find_orphaned_calls
            SELECT CAST(c.session_pk AS TEXT) AS name
            FROM (
                SELECT session_pk FROM session_call
                UNION
                SELECT session_pk FROM session_key
                UNION
                SELECT session_pk FROM session_saved
            ) AS c
            WHERE NOT EXISTS (SELECT 1 FROM session AS s WHERE s.session_pk = c.session_pk)
            LIMIT $1",
        ),
    ),
    (
        "ended sessions that count as live in their groups, or live ones that do not, or the same with parked ones",
        Statement::new(
            "-- find_misplaced_sessions
            SELECT CAST(sp.session_pk AS TEXT) AS name
            FROM session_policy AS sp
            JOIN session AS s ON s.session_pk = sp.session_pk
            WHERE (sp.is_live = 1) <> (s.ended_us IS NULL) OR (sp.is_parked = 1) <> (s.state = 'parked')
            LIMIT $1",
        ),
    ),
    (
        "sessions with calls or keys of attempts that have not begun",
        Statement::new(
            "-- find_attempts_to_come
            SELECT CAST(s.session_pk AS TEXT) AS name
            FROM (
                SELECT session_pk, attempt, used_in FROM session_call
                UNION ALL
                SELECT session_pk, attempt, attempt FROM session_key
                UNION ALL
                SELECT session_pk, attempt, attempt FROM session_saved
            ) AS made
            JOIN session AS s ON s.session_pk = made.session_pk
            WHERE made.attempt < 1 OR made.used_in < made.attempt OR made.used_in > s.attempt
            LIMIT $1",
        ),
    ),
    (
        "finished sessions without an answer",
        Statement::new(
            "-- find_unanswered_sessions
            SELECT CAST(session_pk AS TEXT) AS name
            FROM session
            WHERE ended_us IS NOT NULL AND (outcome IS NULL OR end_digest IS NULL)
            LIMIT $1",
        ),
    ),
];

/// Rows with a key that is computed from their name, after a key, at most $2 of them: `pk`, `key`, `name`.
const KEYED: &[(&str, Statement)] = &[
    (
        "rollouts that cannot be found by their names",
        Statement::new(
            "-- page_rollout_keys
            SELECT rollout_pk AS pk, rollout_key AS key, rollout_id AS name
            FROM rollout
            WHERE rollout_pk > $1
            ORDER BY rollout_pk
            LIMIT $2",
        ),
    ),
    (
        "groups that cannot be found by their names",
        Statement::new(
            "-- page_group_keys
            SELECT group_pk AS pk, group_key AS key, group_id AS name
            FROM rollout_group
            WHERE group_pk > $1
            ORDER BY group_pk
            LIMIT $2",
        ),
    ),
];

/// Finds rows whose stored key is not the key of their name. A retry of such a rollout would be stored as a new one.
async fn foreign_keys(
    tx: &mut Tx<'_>,
    what: &'static str,
    statement: Statement,
) -> Result<Option<Contradiction>, StoreError> {
    let (mut after, mut found) = (0_i64, Contradiction { what, at_least: 0, named: Vec::new() });
    loop {
        let rows = tx.fetch_all(statement, args![after, KEYS_PAGE]).await?;
        if rows.is_empty() {
            return Ok((found.at_least > 0).then_some(found));
        }
        for mut row in rows {
            after = row.get("pk")?;
            let (key, name): (Vec<u8>, String) = (row.get("key")?, row.get("name")?);
            if key != IdKey::of(&name).as_bytes() {
                found.at_least += 1;
                if found.at_least <= NAMED_MAX {
                    found.named.push(name);
                }
            }
        }
    }
}

/// Counts from the rows what the tallies count. Also finds rollouts whose state cannot be derived, because their group
/// and its batch contradict each other.
async fn recount(tx: &mut Tx<'_>) -> Result<(Counts, Option<Contradiction>), StoreError> {
    // Only `rollout_state` derives the state of a rollout, so these two statements select its arguments.
    const COUNT_ROLLOUTS: Statement = Statement::new(
        "-- count_rollouts
        SELECT p.name AS policy, r.verdict, g.state AS group_state, b.state AS batch_state,
            CAST(CASE WHEN w.rollout_pk IS NULL THEN 0 ELSE 1 END AS BIGINT) AS lacks_scores, COUNT(*) AS value
        FROM rollout AS r
        JOIN policy AS p ON p.policy_pk = r.policy_pk
        JOIN rollout_group AS g ON g.group_pk = r.group_pk
        LEFT JOIN batch AS b ON b.batch_pk = g.batch_pk
        LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
        GROUP BY 1, 2, 3, 4, 5",
    );
    const SUM_BYTES: Statement = Statement::new(
        "-- sum_bytes
        SELECT p.name AS policy, r.verdict, g.state AS group_state, b.state AS batch_state,
            CAST(CASE WHEN w.rollout_pk IS NULL THEN 0 ELSE 1 END AS BIGINT) AS lacks_scores,
            CAST(SUM(COALESCE(y.length, LENGTH(y.body)) + COALESCE(m.bytes, 0)) AS BIGINT) AS value
        FROM payload AS y
        LEFT JOIN (
            SELECT u.rollout_pk, SUM(b.bytes) AS bytes
            FROM blob_use AS u
            JOIN blob AS b ON b.blob_pk = u.blob_pk
            GROUP BY u.rollout_pk
        ) AS m ON m.rollout_pk = y.rollout_pk
        JOIN rollout AS r ON r.rollout_pk = y.rollout_pk
        JOIN policy AS p ON p.policy_pk = r.policy_pk
        JOIN rollout_group AS g ON g.group_pk = r.group_pk
        LEFT JOIN batch AS b ON b.batch_pk = g.batch_pk
        LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
        GROUP BY 1, 2, 3, 4, 5",
    );
    const COUNT_GROUPS: Statement = Statement::new(
        "-- count_groups
        SELECT p.name AS policy, g.state, COUNT(*) AS value
        FROM rollout_group AS g
        JOIN policy AS p ON p.policy_pk = g.policy_pk
        GROUP BY 1, 2",
    );
    const COUNT_BATCHES: Statement = Statement::new(
        "-- count_batches
        SELECT p.name AS policy, b.state, COUNT(*) AS value
        FROM batch AS b
        JOIN policy AS p ON p.policy_pk = b.policy_pk
        GROUP BY 1, 2",
    );
    const COUNT_SESSIONS: Statement = Statement::new(
        "-- count_sessions
        SELECT p.name AS policy, s.state, COUNT(*) AS value
        FROM session_policy AS sp
        JOIN session AS s ON s.session_pk = sp.session_pk
        JOIN policy AS p ON p.policy_pk = sp.policy_pk
        GROUP BY 1, 2",
    );
    const SUM_RESERVED: Statement = Statement::new(
        "-- sum_reserved
        SELECT p.name AS policy, CAST(SUM(a.granted - a.used) AS BIGINT) AS value
        FROM admission AS a
        JOIN policy AS p ON p.policy_pk = a.policy_pk
        GROUP BY 1",
    );
    let mut counts = Counts::new();
    let mut in_no_state =
        Contradiction { what: "rollouts whose state cannot be derived", at_least: 0, named: Vec::new() };
    for mut row in tx.fetch_all(COUNT_ROLLOUTS, args![]).await? {
        let (combination, state) = read_state(&mut row)?;
        if let Some(state) = state {
            count(&mut counts, &mut row, Tally::Rollouts(state))?;
        } else {
            in_no_state.at_least += row.get::<i64>("value")?;
            in_no_state.named.push(combination);
        }
    }
    for mut row in tx.fetch_all(SUM_BYTES, args![]).await? {
        if read_state(&mut row)?.1.is_some_and(RolloutState::is_live) {
            count(&mut counts, &mut row, Tally::LiveBytes)?;
        }
    }
    for mut row in tx.fetch_all(COUNT_GROUPS, args![]).await? {
        let tally = Tally::Groups(row.get("state")?);
        count(&mut counts, &mut row, tally)?;
    }
    for mut row in tx.fetch_all(COUNT_BATCHES, args![]).await? {
        let tally = Tally::Batches(row.get("state")?);
        count(&mut counts, &mut row, tally)?;
    }
    for mut row in tx.fetch_all(COUNT_SESSIONS, args![]).await? {
        let tally = Tally::Sessions(row.get("state")?);
        count(&mut counts, &mut row, tally)?;
    }
    for mut row in tx.fetch_all(SUM_RESERVED, args![]).await? {
        count(&mut counts, &mut row, Tally::Reserved)?;
    }
    Ok((counts, Some(in_no_state).filter(|found| found.at_least > 0)))
}

type Counts = BTreeMap<PolicyName, BTreeMap<Tally, i64>>;

/// The state of the rollouts of a row, and a description of what it was derived from.
fn read_state(row: &mut Row) -> Result<(String, Option<RolloutState>), StoreError> {
    let (verdict, group): (Verdict, GroupState) = (row.get("verdict")?, row.get("group_state")?);
    let batch: Option<BatchState> = row.get("batch_state")?;
    let lacks_scores: bool = row.get("lacks_scores")?;
    let lacks = if lacks_scores { " without its scores" } else { "" };
    let combination = format!("{verdict}{lacks} in {group} of {}", batch.map_or("no batch", BatchState::as_str));
    Ok((combination, rollout_state(verdict, lacks_scores, group, batch)))
}

fn count(counts: &mut Counts, row: &mut Row, tally: Tally) -> Result<(), StoreError> {
    let policy: String = row.get("policy")?;
    let policy = PolicyName::stored(&policy).map_err(|error| StoreError::Corrupt(error.to_string()))?;
    *counts.entry(policy).or_default().entry(tally).or_default() += row.get::<i64>("value")?;
    Ok(())
}

/// The faults that a database finds in its own file. Empty on Postgres, whose server checks its files itself.
pub(crate) struct Integrity;

#[async_trait]
impl Op for Integrity {
    type Output = Vec<String>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Vec<String>, StoreError> {
        const CHECK_FILE: Statement = Statement {
            sqlite: "PRAGMA integrity_check(100)",
            postgres: "-- check_file
                SELECT 'ok' AS integrity_check",
        };
        const CHECK_REFERENCES: Statement = Statement {
            sqlite: "-- check_references
                SELECT DISTINCT \"table\" || ' refers to a missing row of ' || parent AS found
                FROM pragma_foreign_key_check",
            postgres: "-- check_references
                SELECT '' AS found WHERE false",
        };
        let mut found = Vec::new();
        for mut row in tx.fetch_all(CHECK_FILE, args![]).await? {
            found.push(row.get("integrity_check")?);
        }
        found.retain(|line: &String| line != "ok");
        for mut row in tx.fetch_all(CHECK_REFERENCES, args![]).await? {
            found.push(row.get("found")?);
        }
        Ok(found)
    }
}

/// The rollouts with payloads of the groups after a group, a few groups at a time.
pub struct GroupMembers {
    pub after: GroupPk,
    pub groups: u32,
}

#[async_trait]
impl Op for GroupMembers {
    type Output = Vec<BatchMember>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_GROUP_MEMBERS: Statement = Statement::new(select_members!(
            "-- select_group_members",
            "FROM rollout_group AS g
            JOIN rollout AS r ON r.group_pk = g.group_pk
            WHERE r.verdict IN ('kept', 'masked') AND g.purged_us IS NULL AND g.group_pk IN (
                SELECT group_pk FROM rollout_group WHERE group_pk > $1 AND kept + masked > 0 AND purged_us IS NULL
                ORDER BY group_pk LIMIT $2
            )
            ORDER BY g.group_pk, r.rollout_pk"
        ));
        let rows = tx.fetch_all(SELECT_GROUP_MEMBERS, args![self.after, self.groups]).await?;
        read_members(tx, rows).await
    }
}

/// Uploads behind another one, in the order of their keys.
pub struct Uploads {
    pub after: Option<BlobPk>,
    pub limit: u32,
}

#[async_trait]
impl Op for Uploads {
    type Output = Vec<(BlobPk, Blob)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_UPLOADS: Statement = Statement::new(
            "-- select_uploads
            SELECT blob_pk, digest, bytes, stored, media_type, expires_us
            FROM blob
            WHERE blob_pk > $1
            ORDER BY blob_pk
            LIMIT $2",
        );
        let after = self.after.map_or(0, BlobPk::as_i64);
        let rows = tx.fetch_all(SELECT_UPLOADS, args![after, self.limit]).await?;
        rows.into_iter().map(|mut row| read_blob(&mut row)).collect()
    }
}
