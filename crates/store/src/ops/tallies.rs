//! Tallies in the database: counts that every transaction updates together with its changes.
//!
//! On Postgres, transactions append their changes, and [`fold`] adds them to the counts with every sweep. A row that
//! every transaction updates would serialise the transactions, and each update would leave a dead row that cannot be
//! removed while a long transaction runs. The counts of the last hour are spread over slots. Both are written in the
//! order of their names, once per transaction, so that transactions do not deadlock. `tally_now` has the counts
//! together with the appended changes.

use crate::{
    error::StoreError,
    sql::{Arg, Statement, Tx, args},
    tally::{Change, TallyDelta},
};

/// Writes the changes of a transaction into `slot`.
pub(crate) async fn write(changes: TallyDelta, tx: &mut Tx<'_>, slot: i64) -> Result<(), StoreError> {
    // Postgres takes all rows in one statement: names and whole numbers as JSON, and amounts as an array of floats,
    // because floats are never passed as text. SQLite takes them one by one. `WHERE true` tells SQLite's parser
    // that ON CONFLICT follows.
    const ADD_TALLIES: Statement = Statement {
        sqlite: "-- add_tallies
            INSERT INTO tally (policy_pk, name, slot, value, amount, latest_us)
            VALUES ($1, $2, $3, $4, $5, $6)
            ON CONFLICT (policy_pk, name, slot) DO UPDATE SET
                value = tally.value + excluded.value,
                amount = tally.amount + excluded.amount,
                latest_us = MAX(tally.latest_us, excluded.latest_us)",
        postgres: "-- add_tallies
            INSERT INTO tally_change (policy_pk, name, value, amount, latest_us)
            SELECT (v ->> 0)::bigint, v ->> 1, (v ->> 2)::bigint, ($2::float8[])[place], (v ->> 3)::bigint
            FROM json_array_elements($1::json) WITH ORDINALITY AS t (v, place)",
    };
    const ADD_RECENT: Statement = Statement {
        sqlite: "-- add_recent
            INSERT INTO recent (policy_pk, minute, name, slot, value)
            SELECT value ->> 0, value ->> 1, value ->> 2, $2, value ->> 3
            FROM json_each($1)
            WHERE true
            ON CONFLICT (policy_pk, minute, name, slot) DO UPDATE SET value = recent.value + excluded.value",
        postgres: "-- add_recent
            INSERT INTO recent (policy_pk, minute, name, slot, value)
            SELECT (v ->> 0)::bigint, (v ->> 1)::bigint, v ->> 2, $2, (v ->> 3)::bigint
            FROM json_array_elements($1::json) AS v
            ON CONFLICT (policy_pk, minute, name, slot) DO UPDATE SET value = recent.value + excluded.value",
    };
    if !tx.takes_arrays() {
        for ((policy, tally), Change { value, amount, latest_us }) in &changes.totals {
            tx.insert(ADD_TALLIES, args![*policy, tally.name(), slot, *value, *amount, *latest_us], 1).await?;
        }
    } else if !changes.totals.is_empty() {
        let rows = changes
            .totals
            .iter()
            .map(|((policy, tally), change)| (policy.0, tally.name(), change.value, change.latest_us));
        let amounts = changes.totals.values().map(|change| change.amount).collect();
        let rows: Vec<_> = rows.collect();
        tx.insert(ADD_TALLIES, vec![json(&rows).into(), Arg::Reals(amounts)], rows.len()).await?;
    }
    if !changes.recent.is_empty() {
        let rows: Vec<_> = changes
            .recent
            .iter()
            .map(|((policy, minute, what), value)| (policy.0, minute, what.name(), value))
            .collect();
        tx.insert(ADD_RECENT, args![json(&rows), slot], rows.len()).await?;
    }
    Ok(())
}

/// Whether there are changes that can be added to the counts.
pub(super) async fn may_fold(tx: &mut Tx<'_>) -> Result<bool, StoreError> {
    const SELECT_CHANGED: Statement = Statement {
        sqlite: "-- select_changed
            SELECT 0 AS changed",
        postgres: "-- select_changed
            SELECT CAST(COUNT(*) AS BIGINT) AS changed
            FROM (
                SELECT 1
                FROM tally_change
                WHERE xid >= (SELECT COALESCE(MAX(below), 0) FROM tally_folded) AND xid < 9223372036854775807
                UNION ALL
                -- True after a dump was restored into a cluster whose transaction numbers are lower.
                SELECT 1
                FROM tally_folded
                WHERE below > CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS TEXT) AS BIGINT)
                LIMIT 1
            ) AS any_change",
    };
    tx.fetch_one(SELECT_CHANGED, args![]).await?.get("changed")
}

/// Adds the committed changes to the counts and deletes them, so that none is added twice.
///
/// The transactions that have ended are determined first: all below the oldest running one. They change nothing any
/// more, and this deletes all of their changes. Readers that begin at that number therefore miss no change, and pass
/// few deleted rows that are not yet removed.
pub(super) async fn fold(tx: &mut Tx<'_>) -> Result<(), StoreError> {
    // If another replica is folding now, it does so for all replicas. Its lock ends with its transaction.
    const SELECT_FOLD: Statement = Statement {
        sqlite: "-- select_fold
            SELECT 0 AS is_mine, 0 AS below, 0 AS folded",
        postgres: "-- select_fold
            SELECT CAST(pg_try_advisory_xact_lock(7308896101217) AS INTEGER)::BIGINT AS is_mine,
                CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS TEXT) AS BIGINT) AS below,
                (SELECT COALESCE(MAX(below), 0) FROM tally_folded) AS folded",
    };
    const FOLD_TALLIES: Statement = Statement {
        sqlite: "-- fold_tallies
            SELECT 0",
        postgres: "-- fold_tallies
            WITH folded AS (
                DELETE FROM tally_change
                WHERE xid >= $1 AND xid < 9223372036854775807
                RETURNING policy_pk, name, value, amount, latest_us
            )
            INSERT INTO tally (policy_pk, name, slot, value, amount, latest_us)
            SELECT policy_pk, name, 0, CAST(SUM(value) AS BIGINT), SUM(amount), MAX(latest_us)
            FROM folded
            GROUP BY policy_pk, name
            ORDER BY policy_pk, name
            ON CONFLICT (policy_pk, name, slot) DO UPDATE SET
                value = tally.value + excluded.value,
                amount = tally.amount + excluded.amount,
                latest_us = GREATEST(tally.latest_us, excluded.latest_us)",
    };
    const SET_FOLDED: Statement = Statement {
        sqlite: "-- set_folded
            SELECT 0",
        postgres: "-- set_folded
            INSERT INTO tally_folded (only_row, below)
            VALUES (1, $1)
            ON CONFLICT (only_row) DO UPDATE SET below = excluded.below",
    };
    let mut row = tx.fetch_one(SELECT_FOLD, args![]).await?;
    let (is_mine, below, folded): (bool, i64, i64) = (row.get("is_mine")?, row.get("below")?, row.get("folded")?);
    if !is_mine {
        return Ok(());
    }
    // A database that was copied into another cluster sees lower transaction numbers than before.
    let from = if below < folded { 0 } else { folded };
    tx.execute(FOLD_TALLIES, args![from]).await?;
    tx.execute(SET_FOLDED, args![below]).await.map(drop)
}

fn json(rows: &impl serde::Serialize) -> String {
    serde_json::to_string(rows).expect("tuples of numbers and names always serialize")
}
