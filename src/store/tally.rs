//! Tallies: counts kept in the transactions that change them, so that no metric ever counts rows.
//!
//! On Postgres changes are appended, and [`fold`] adds them to the counts with every sweep: a row that every transaction changes
//! would serialise them, and leave a dead row each time, which nobody removes under a long transaction. The counts of the
//! last hour are spread over slots. Both are written in the order of their names, once per transaction, so that
//! transactions never wait for each other in a circle. `tally_now` has the counts with the changes to come.

use std::collections::BTreeMap;

use super::{
    StoreError,
    sql::{Arg, Statement, Tx, args},
};
use crate::{buffer::ids::PolicyPk, clock::Timestamp};

/// Name of the tally of receipts with `duplicate = false`.
pub(super) const RECEIVED: &str = "received";
/// Name of the tally of payload bytes of what is not yet trained.
pub(super) const LIVE_BYTES: &str = "live_bytes";
/// Name of the tally of rollouts that room is reserved for.
pub(super) const RESERVED: &str = "reserved";
/// Name of the tally of rewards received: their count and sum.
pub(super) const REWARD: &str = "reward";
/// Name of the tally of rollouts whose version was assumed.
pub(super) const ASSUMED_VERSION: &str = "assumed_version";

/// Rewards count in the mean up to here: a single absurd one must not overflow the sum of all.
const REWARD_TALLY_MAX: f64 = 1e15;

#[derive(Clone, Copy, Debug, Default)]
struct Change {
    value: i64,
    amount: f64,
    latest_us: i64,
}

/// Changes to tallies that one transaction makes.
#[derive(Clone, Debug, Default)]
pub(super) struct TallyDelta {
    totals: BTreeMap<(PolicyPk, String), Change>,
    recent: BTreeMap<(PolicyPk, i64, String), i64>,
}

impl TallyDelta {
    /// Adds to a count.
    pub(super) fn add(&mut self, policy: PolicyPk, name: impl Into<String>, value: i64) {
        if value != 0 {
            self.totals.entry((policy, name.into())).or_default().value += value;
        }
    }

    /// What the transaction has added to a count so far, and no statement sees yet.
    pub(super) fn pending(&self, policy: PolicyPk, name: &str) -> i64 {
        self.totals.get(&(policy, name.to_owned())).map_or(0, |change| change.value)
    }

    /// Adds rollouts to a state of the ledger, by its name.
    pub(super) fn rollouts(&mut self, policy: PolicyPk, state: &str, value: i64) {
        self.add(policy, format!("rollout.{state}"), value);
    }

    /// Adds groups to a state.
    pub(super) fn groups(&mut self, policy: PolicyPk, state: &str, value: i64) {
        self.add(policy, format!("group.{state}"), value);
    }

    /// Adds batches to a state.
    pub(super) fn batches(&mut self, policy: PolicyPk, state: &str, value: i64) {
        self.add(policy, format!("batch.{state}"), value);
    }

    /// Counts a rollout or group that a rule took out.
    pub(super) fn dropped(&mut self, policy: PolicyPk, reason: &str, now: Timestamp) {
        self.dropped_many(policy, reason, 1, now);
    }

    /// Counts so many rollouts or groups that a rule took out.
    pub(super) fn dropped_many(&mut self, policy: PolicyPk, reason: &str, count: i64, now: Timestamp) {
        self.add(policy, format!("dropped.{reason}"), count);
        self.recent(policy, format!("dropped.{reason}"), count, now);
    }

    /// Counts something for the last hour.
    pub(super) fn recent(&mut self, policy: PolicyPk, name: String, value: i64, now: Timestamp) {
        *self.recent.entry((policy, minute(now), name)).or_default() += value;
    }

    /// Counts a rollout at its arrival.
    pub(super) fn received(&mut self, policy: PolicyPk, reward: Option<f64>, now: Timestamp) {
        let received = self.totals.entry((policy, RECEIVED.to_owned())).or_default();
        received.value += 1;
        received.latest_us = received.latest_us.max(now.as_micros());
        if let Some(reward) = reward {
            let rewards = self.totals.entry((policy, REWARD.to_owned())).or_default();
            rewards.value += 1;
            rewards.amount += reward.clamp(-REWARD_TALLY_MAX, REWARD_TALLY_MAX);
        }
    }

    /// Adds all changes of another.
    pub(super) fn merge(&mut self, other: Self) {
        for (key, change) in other.totals {
            let total = self.totals.entry(key).or_default();
            total.value += change.value;
            total.amount += change.amount;
            total.latest_us = total.latest_us.max(change.latest_us);
        }
        for (key, value) in other.recent {
            *self.recent.entry(key).or_default() += value;
        }
    }

    /// Writes the changes into `slot`.
    pub(super) async fn write(self, tx: &mut Tx<'_>, slot: i64) -> Result<(), StoreError> {
        // Postgres takes all rows in one statement: names and whole numbers as JSON, amounts as an array of floats, for
        // a float never travels as text. SQLite takes them one by one. `WHERE true` tells its parser that ON CONFLICT
        // follows.
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
            for ((policy, name), Change { value, amount, latest_us }) in &self.totals {
                tx.guarded(ADD_TALLIES, args![*policy, name.as_str(), slot, *value, *amount, *latest_us], 1).await?;
            }
        } else if !self.totals.is_empty() {
            let rows =
                self.totals.iter().map(|((policy, name), change)| (policy.0, name, change.value, change.latest_us));
            let amounts = self.totals.values().map(|change| change.amount).collect();
            let rows: Vec<_> = rows.collect();
            tx.execute(ADD_TALLIES, vec![json(&rows).into(), Arg::Reals(amounts)]).await?;
        }
        if !self.recent.is_empty() {
            let rows: Vec<_> =
                self.recent.iter().map(|((policy, minute, name), value)| (policy.0, minute, name, value)).collect();
            tx.execute(ADD_RECENT, args![json(&rows), slot]).await?;
        }
        Ok(())
    }
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
                LIMIT 1
            ) AS any_change",
    };
    tx.fetch_one(SELECT_CHANGED, args![]).await?.get("changed")
}

/// Adds the changes that are committed to the counts, and deletes them: none is added twice.
///
/// Which transactions have ended is asked before: those below the oldest one that goes on change nothing any more, and all
/// of their changes are deleted here. So readers pass over none when they begin there, and meet few rows that are deleted
/// and still in the way.
pub(super) async fn fold(tx: &mut Tx<'_>) -> Result<(), StoreError> {
    // Another replica that folds at this moment does it for all. Its lock ends with its transaction.
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
    // A copy of the database in another cluster begins with lower numbers of transactions than it has seen.
    let from = if below < folded { 0 } else { folded };
    tx.execute(FOLD_TALLIES, args![from]).await?;
    tx.execute(SET_FOLDED, args![below]).await.map(drop)
}

/// The minute of a time, as `recent` counts them.
pub(super) fn minute(time: Timestamp) -> i64 {
    time.as_micros().div_euclid(60_000_000)
}

fn json(rows: &impl serde::Serialize) -> String {
    serde_json::to_string(rows).expect("tuples of numbers and names always serialize")
}
