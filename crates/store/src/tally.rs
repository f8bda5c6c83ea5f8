//! Tallies in the store: counts that every transaction updates together with its changes. [`Tally`] defines what they
//! count.
//!
//! On Postgres, transactions append their changes, and [`fold`] adds them to the counts with every sweep. A row that
//! every transaction updates would serialise the transactions, and each update would leave a dead row that cannot be
//! removed while a long transaction runs. The counts of the last hour are spread over slots. Both are written in the
//! order of their names, once per transaction, so that transactions do not deadlock. `tally_now` has the counts
//! together with the appended changes.

use std::collections::BTreeMap;

use forebay_domain::{
    clock::Timestamp,
    ids::PolicyPk,
    states::{self, BatchState, GroupMove, GroupState, RolloutState},
    tally::{LeaseEvent, Tally},
};

use super::sql::{Arg, Statement, Tx, args};
use crate::error::StoreError;

/// Bound of a reward in the mean, so that a single extreme reward cannot overflow the sum.
const REWARD_TALLY_MAX: f64 = 1e15;

/// Groups in the same state, with their totals.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountedGroups {
    /// The state of the groups.
    pub(super) state: GroupState,
    /// The state of the batch that they are part of, or become part of.
    pub(super) batch: Option<BatchState>,
    /// The number of groups.
    pub(super) groups: i64,
    /// The number of their kept and masked rollouts.
    pub(super) rollouts: i64,
    /// The payload bytes of these rollouts.
    pub(super) bytes: i64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Change {
    value: i64,
    amount: f64,
    latest_us: i64,
}

/// A count of the last hour, ordered by its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Recent {
    /// Rollouts that a rule dropped and groups that a rule discarded.
    Dropped(String),
    /// Groups that a claim found over the staleness bound.
    Stale,
}

impl Recent {
    fn name(&self) -> String {
        match self {
            Self::Dropped(rule) => format!("dropped.{rule}"),
            Self::Stale => "stale".to_owned(),
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        match name.strip_prefix("dropped.") {
            Some(rule) => Some(Self::Dropped(rule.to_owned())),
            None => (name == "stale").then_some(Self::Stale),
        }
    }
}

/// The changes that one transaction makes to tallies.
#[derive(Clone, Debug, Default)]
pub(super) struct TallyDelta {
    totals: BTreeMap<(PolicyPk, Tally), Change>,
    recent: BTreeMap<(PolicyPk, i64, Recent), i64>,
}

impl TallyDelta {
    /// Adds to a count.
    pub(super) fn add(&mut self, policy: PolicyPk, tally: Tally, value: i64) {
        if value != 0 {
            self.totals.entry((policy, tally)).or_default().value += value;
        }
    }

    /// The change of a count in this transaction so far, which statements do not see yet.
    pub(super) fn pending(&self, policy: PolicyPk, tally: Tally) -> i64 {
        self.totals.get(&(policy, tally)).map_or(0, |change| change.value)
    }

    /// Adds rollouts to a state.
    pub(super) fn rollouts(&mut self, policy: PolicyPk, state: RolloutState, value: i64) {
        self.add(policy, Tally::Rollouts(state), value);
    }

    /// Adds groups to a state.
    pub(super) fn groups(&mut self, policy: PolicyPk, state: GroupState, value: i64) {
        self.add(policy, Tally::Groups(state), value);
    }

    /// Adds batches to a state.
    pub(super) fn batches(&mut self, policy: PolicyPk, state: BatchState, value: i64) {
        self.add(policy, Tally::Batches(state), value);
    }

    /// Moves groups to another state, and their rollouts and live bytes with them.
    pub(super) fn move_groups(
        &mut self,
        policy: PolicyPk,
        moved: CountedGroups,
        by: GroupMove,
    ) -> Result<(), StoreError> {
        let CountedGroups { state, batch, groups, rollouts, bytes } = moved;
        let not_allowed = || StoreError::Corrupt(format!("groups are `{state}` before {by:?}"));
        let to = state.after(by).ok_or_else(not_allowed)?;
        let before = states::members_state(state, batch).ok_or_else(not_allowed)?;
        let after = states::members_state(to, batch).ok_or_else(not_allowed)?;
        self.groups(policy, state, -groups);
        self.groups(policy, to, groups);
        self.rollouts(policy, before, -rollouts);
        self.rollouts(policy, after, rollouts);
        self.add(policy, Tally::LiveBytes, bytes * (i64::from(after.is_live()) - i64::from(before.is_live())));
        Ok(())
    }

    /// Counts events with an amount, and notes their time.
    pub(super) fn happened(&mut self, policy: PolicyPk, tally: Tally, value: i64, amount: f64, now: Timestamp) {
        let total = self.totals.entry((policy, tally)).or_default();
        total.value += value;
        total.amount += amount;
        total.latest_us = total.latest_us.max(now.as_micros());
    }

    /// Counts a rollout that a rule dropped.
    pub(super) fn dropped(&mut self, policy: PolicyPk, reason: &str, now: Timestamp) {
        self.happened(policy, Tally::Dropped(reason.to_owned()), 1, 1.0, now);
        self.recent(policy, Recent::Dropped(reason.to_owned()), 1, now);
    }

    /// Counts groups that a rule discarded, and their kept and masked rollouts.
    pub(super) fn discarded(&mut self, policy: PolicyPk, reason: &str, groups: i64, rollouts: i64, now: Timestamp) {
        self.happened(policy, Tally::Dropped(reason.to_owned()), groups, rollouts as f64, now);
        self.happened(policy, Tally::Discarded(reason.to_owned()), groups, rollouts as f64, now);
        self.recent(policy, Recent::Dropped(reason.to_owned()), groups, now);
    }

    /// Counts what happened to a lease.
    pub(super) fn lease(&mut self, policy: PolicyPk, event: LeaseEvent, now: Timestamp) {
        self.happened(policy, Tally::Leases(event), 1, 0.0, now);
    }

    /// Adds to a count of the last hour.
    pub(super) fn recent(&mut self, policy: PolicyPk, what: Recent, value: i64, now: Timestamp) {
        *self.recent.entry((policy, minute(now), what)).or_default() += value;
    }

    /// Counts a rollout at its arrival.
    pub(super) fn received(&mut self, policy: PolicyPk, tokens: u64, reward: Option<f64>, now: Timestamp) {
        self.happened(policy, Tally::Received, 1, tokens as f64, now);
        if let Some(reward) = reward {
            let rewards = self.totals.entry((policy, Tally::Reward)).or_default();
            rewards.value += 1;
            rewards.amount += reward.clamp(-REWARD_TALLY_MAX, REWARD_TALLY_MAX);
        }
    }

    /// Adds all changes of another delta.
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
            for ((policy, tally), Change { value, amount, latest_us }) in &self.totals {
                tx.insert(ADD_TALLIES, args![*policy, tally.name(), slot, *value, *amount, *latest_us], 1).await?;
            }
        } else if !self.totals.is_empty() {
            let rows = self
                .totals
                .iter()
                .map(|((policy, tally), change)| (policy.0, tally.name(), change.value, change.latest_us));
            let amounts = self.totals.values().map(|change| change.amount).collect();
            let rows: Vec<_> = rows.collect();
            tx.insert(ADD_TALLIES, vec![json(&rows).into(), Arg::Reals(amounts)], rows.len()).await?;
        }
        if !self.recent.is_empty() {
            let rows: Vec<_> = self
                .recent
                .iter()
                .map(|((policy, minute, what), value)| (policy.0, minute, what.name(), value))
                .collect();
            tx.insert(ADD_RECENT, args![json(&rows), slot], rows.len()).await?;
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

/// The minute of a time, as `recent` counts minutes.
pub(super) fn minute(time: Timestamp) -> i64 {
    time.as_micros().div_euclid(60_000_000)
}

fn json(rows: &impl serde::Serialize) -> String {
    serde_json::to_string(rows).expect("tuples of numbers and names always serialize")
}
