//! The history of policies: the totals of their tallies, once a minute.
//!
//! Separate from [`tally`](crate::tally), which transactions update: a snapshot reads all tallies at once and is
//! written by the sweep. Rows have totals and not differences, so a row can be deleted, and what happened between the
//! rows around it stays right.
//!
//! The newest row of a policy stays. When the next one is written, it is known whether the older one is the last of its
//! ten minutes or of its hour, and therefore how long it is kept. The row of minute 0 has what was counted before the
//! oldest row, so that it never reads as something that happened.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::PolicyPk,
    looking::history::{History, KEEP_HOURS, KEEP_MINUTES, KEEP_TENS, ReadHistory, Snapshot, Totals},
    tally::{Tallies, Tally},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, collections::BTreeMap, fmt};

use super::steps;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, among_keys, args, key_list, locking},
    tally::minute,
};

/// The minute in which a row is deleted that stays.
const FOREVER: i64 = i64::MAX;

/// The most rows that one snapshot deletes. A policy that never rests writes and loses one row a minute, so this is
/// enough for several thousand policies.
const THINNED_MAX: i64 = 5_000;

/// Minutes between two deletions of the oldest steps of a policy.
const TRIM_EVERY: i64 = 60;

/// The name of the policy's version beside the names of tallies.
const VERSION: &str = "version";

/// A count and its amount in a row. The amount is left out if it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Total {
    Pair(i64, f64),
    Value(i64),
}

impl Total {
    fn of(value: i64, amount: f64) -> Option<Self> {
        match (value, amount == 0.0) {
            (0, true) => None,
            (value, true) => Some(Self::Value(value)),
            (value, false) => Some(Self::Pair(value, amount)),
        }
    }

    fn parts(self) -> (i64, f64) {
        match self {
            Self::Pair(value, amount) => (value, amount),
            Self::Value(value) => (value, 0.0),
        }
    }
}

/// Derived code would copy every value before it knows which of the two it is, and charts read a thousand rows.
impl<'de> Deserialize<'de> for Total {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;

        impl<'de> Visitor<'de> for Form {
            type Value = Total;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a count, or a list of a count and an amount")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Total, E> {
                Ok(Total::Value(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Total, E> {
                i64::try_from(value).map(Total::Value).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Total, A::Error> {
                let value = list.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let amount = list.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
                Ok(Total::Pair(value, amount))
            }
        }

        deserializer.deserialize_any(Form)
    }
}

/// The names and totals of a row as they are written, without those that are 0.
#[derive(Debug)]
struct Entries<'text>(Vec<(Cow<'text, str>, i64, f64)>);

impl<'text> Entries<'text> {
    fn parse(text: &'text str) -> Result<Self, StoreError> {
        serde_json::from_str(text)
            .map_err(|error| StoreError::Corrupt(format!("column `body` of the history: {error}")))
    }

    fn totals(self) -> Totals {
        let mut totals = Totals { tallies: Tallies::default(), version: 0 };
        for (name, value, amount) in self.0 {
            if name == VERSION {
                totals.version = value;
            } else if let Some(tally) = Tally::parse(&name) {
                if amount != 0.0 {
                    totals.tallies.amounts.insert(tally.clone(), amount);
                }
                totals.tallies.counts.insert(tally, value);
            }
        }
        totals
    }
}

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A name that is copied only if it has escapes.
        #[derive(Deserialize)]
        struct Name<'text>(#[serde(borrow)] Cow<'text, str>);

        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Entries<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of totals by the names of tallies")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<'de>, A::Error> {
                let mut entries = Vec::new();
                while let Some((Name(name), total)) = map.next_entry::<Name<'de>, Total>()? {
                    let (value, amount) = total.parts();
                    if value != 0 || amount != 0.0 {
                        entries.push((name, value, amount));
                    }
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

/// The totals in a row by the names of their tallies, without those that are 0.
#[derive(Clone, Debug, Default, PartialEq)]
struct Body(BTreeMap<String, Total>);

impl Body {
    fn parse(text: &str) -> Result<Self, StoreError> {
        let mut body = Self::default();
        for (name, value, amount) in Entries::parse(text)?.0 {
            body.add(name.into_owned(), value, amount);
        }
        Ok(body)
    }

    fn add(&mut self, name: String, value: i64, amount: f64) {
        if let Some(total) = Total::of(value, amount) {
            self.0.insert(name, total);
        }
    }

    fn text(&self) -> String {
        serde_json::to_string(&self.0).expect("names and finite numbers always serialize")
    }

    fn totals(self) -> Totals {
        let parts = |(name, total): (String, Total)| {
            let (value, amount) = total.parts();
            (Cow::Owned(name), value, amount)
        };
        Entries(self.0.into_iter().map(parts).collect()).totals()
    }
}

/// The totals of a policy now.
#[derive(Clone, Debug, Default)]
struct Current {
    body: Body,
    /// The last minute in which a tally counted that notes its time.
    latest: i64,
}

/// The newest row of a policy.
struct Newest {
    history_pk: i64,
    minute: i64,
    since: i64,
    body: Body,
}

/// Writes the rows of a minute, unless a replica has.
pub(crate) struct TakeSnapshot {
    pub now: Timestamp,
    /// The minute in which this process wrote first since its last snapshot. None after its start: whoever wrote last may
    /// have ended before it could take a snapshot.
    pub since: Option<i64>,
}

/// What taking a snapshot did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Another replica has taken it.
    ByAnother,
    /// Nothing had changed.
    Unchanged,
    /// Something had changed.
    Changed,
}

#[async_trait]
impl Op for TakeSnapshot {
    type Output = Taken;

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Taken, StoreError> {
        const LOCK_HISTORY_MARK: Statement = locking!(
            "-- lock_history_mark
            SELECT minute
            FROM history_mark
            WHERE only_row = 1"
        );
        const SET_HISTORY_MARK: Statement = Statement::new(
            "-- set_history_mark
            UPDATE history_mark
            SET minute = $1
            WHERE only_row = 1 AND minute < $1",
        );
        let minute = minute(self.now);
        let mark: i64 = tx.fetch_one(LOCK_HISTORY_MARK, args![]).await?.get("minute")?;
        if mark >= minute {
            return Ok(Taken::ByAnother);
        }
        tx.guarded(SET_HISTORY_MARK, args![minute], 1).await?;
        let mut newest = newest(tx).await?;
        let mut outcome = Taken::Unchanged;
        for (policy, current) in current(tx).await? {
            // Reading as many steps as are kept takes milliseconds, so each policy has its minute of the hour.
            if minute % TRIM_EVERY == policy.0 % TRIM_EVERY {
                steps::trim(tx, policy).await?;
            }
            let newest = newest.remove(&policy);
            if newest.as_ref().map_or(&Body::default(), |newest| &newest.body) == &current.body {
                continue;
            }
            let earliest = newest.as_ref().map_or(mark, |newest| newest.minute.max(mark));
            let since = self.since.unwrap_or(current.latest).clamp(earliest.min(minute), minute);
            append(tx, policy, newest.as_ref(), &current.body, (since, minute, self.now)).await?;
            outcome = Taken::Changed;
        }
        thin(tx, minute).await?;
        Ok(outcome)
    }
}

/// The totals of all policies, with the policies that have none.
async fn current(tx: &mut Tx<'_>) -> Result<BTreeMap<PolicyPk, Current>, StoreError> {
    const SELECT_TOTALS: Statement = Statement::new(
        "-- select_totals
        SELECT policy_pk, name, CAST(SUM(value) AS BIGINT) AS value, SUM(amount) AS amount, MAX(latest_us) AS latest_us
        FROM tally_now
        GROUP BY policy_pk, name",
    );
    const SELECT_VERSIONS: Statement = Statement::new(
        "-- select_versions
        SELECT policy_pk, version
        FROM policy",
    );
    let mut found: BTreeMap<PolicyPk, Current> = BTreeMap::new();
    for mut row in tx.fetch_all(SELECT_VERSIONS, args![]).await? {
        found.entry(row.get("policy_pk")?).or_default().body.add(VERSION.to_owned(), row.get("version")?, 0.0);
    }
    for mut row in tx.fetch_all(SELECT_TOTALS, args![]).await? {
        let of_policy = found.entry(row.get("policy_pk")?).or_default();
        of_policy.latest = of_policy.latest.max(minute(Timestamp::from_micros(row.get("latest_us")?)));
        of_policy.body.add(row.get("name")?, row.get("value")?, row.get("amount")?);
    }
    Ok(found)
}

/// The newest row of each policy that has one.
async fn newest(tx: &mut Tx<'_>) -> Result<BTreeMap<PolicyPk, Newest>, StoreError> {
    // Besides the newest rows, only those of minute 0 stay.
    const SELECT_NEWEST_SNAPSHOTS: Statement = Statement::new(
        "-- select_newest_snapshots
        SELECT policy_pk, history_pk, minute, since, body
        FROM history
        WHERE keep_until = 9223372036854775807
        ORDER BY policy_pk, minute",
    );
    let mut found = BTreeMap::new();
    for mut row in tx.fetch_all(SELECT_NEWEST_SNAPSHOTS, args![]).await? {
        let newest = Newest {
            history_pk: row.get("history_pk")?,
            minute: row.get("minute")?,
            since: row.get("since")?,
            body: Body::parse(&row.get::<String>("body")?)?,
        };
        found.insert(row.get("policy_pk")?, newest);
    }
    Ok(found)
}

/// Writes the newest row of a policy and determines how long the one before is kept.
async fn append(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    before: Option<&Newest>,
    body: &Body,
    (since, minute, now): (i64, i64, Timestamp),
) -> Result<(), StoreError> {
    const INSERT_SNAPSHOT: Statement = Statement::new(
        "-- insert_snapshot
        INSERT INTO history (policy_pk, minute, since, at_us, keep_until, body)
        VALUES ($1, $2, $3, $4, $5, $6)",
    );
    const KEEP_SNAPSHOT: Statement = Statement::new(
        "-- keep_snapshot
        UPDATE history
        SET keep_until = $2
        WHERE history_pk = $1",
    );
    match before {
        None => {
            let nothing = Body::default().text();
            tx.guarded(INSERT_SNAPSHOT, args![policy, 0_i64, 0_i64, 0_i64, FOREVER, nothing], 1).await?;
        }
        Some(before) => {
            let keep_until = keep_until(before.since, before.minute, minute);
            tx.guarded(KEEP_SNAPSHOT, args![before.history_pk, keep_until], 1).await?;
        }
    }
    tx.guarded(INSERT_SNAPSHOT, args![policy, minute, since, now, FOREVER, body.text()], 1).await
}

/// The minute in which a row is deleted, if the next one has the minute `next`. The last row of ten minutes has what the
/// policy had at their end, and so for hours. Rows behind a gap are kept because only they show it.
fn keep_until(since: i64, minute: i64, next: i64) -> i64 {
    let is_last_of = |width: i64| next > (minute + width - 1).div_euclid(width) * width;
    let is_gap = minute - since > 1;
    let keep = if is_gap || is_last_of(60) {
        KEEP_HOURS
    } else if is_last_of(10) {
        KEEP_TENS
    } else {
        KEEP_MINUTES
    };
    minute + keep
}

/// Deletes rows that are due. What the oldest rows of a policy had counted becomes what was counted before its history.
async fn thin(tx: &mut Tx<'_>, minute: i64) -> Result<(), StoreError> {
    const SELECT_DUE_SNAPSHOTS: Statement = Statement::new(
        "-- select_due_snapshots
        SELECT history_pk, policy_pk, minute, keep_until
        FROM history
        WHERE keep_until <= $1
        ORDER BY keep_until
        LIMIT $2",
    );
    const SET_BEGINNING: Statement = Statement::new(
        "-- set_beginning
        UPDATE history
        SET body = (SELECT oldest.body FROM history AS oldest WHERE oldest.history_pk = $2)
        WHERE policy_pk = $1 AND minute = 0",
    );
    const DELETE_SNAPSHOTS: Statement = among_keys!(
        "-- delete_snapshots
        DELETE FROM history
        WHERE history_pk"
    );
    let mut due = Vec::new();
    let mut oldest: BTreeMap<PolicyPk, i64> = BTreeMap::new();
    for mut row in tx.fetch_all(SELECT_DUE_SNAPSHOTS, args![minute, THINNED_MAX]).await? {
        let history_pk: i64 = row.get("history_pk")?;
        let kept = row.get::<i64>("keep_until")? - row.get::<i64>("minute")?;
        if kept == KEEP_HOURS {
            // In the order of their minutes, so the newest of them is the last.
            oldest.insert(row.get("policy_pk")?, history_pk);
        }
        due.push(history_pk);
    }
    for (policy, history_pk) in oldest {
        tx.guarded(SET_BEGINNING, args![policy, history_pk], 1).await?;
    }
    if !due.is_empty() {
        tx.guarded(DELETE_SNAPSHOTS, args![key_list(due.iter().copied())], due.len()).await?;
    }
    Ok(())
}

#[async_trait]
impl Op for ReadHistory {
    type Output = History;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<History, StoreError> {
        // The last row before the part. Its gap may reach into the part.
        const SELECT_SNAPSHOT_BEFORE: Statement = Statement::new(
            "-- select_snapshot_before
            SELECT since, minute, body
            FROM history
            WHERE policy_pk = $1 AND minute <= $2
            ORDER BY minute DESC
            LIMIT 1",
        );
        // The last row of each bucket. Without CROSS JOIN, SQLite would read all rows of the policy in order. All rows of
        // the part are looked at, of which there are at most 8,000, because rows are thinned out.
        const SELECT_SNAPSHOTS: Statement = Statement::new(
            "-- select_snapshots
            SELECT h.since, h.minute, h.body
            FROM (
                SELECT MAX(minute) AS minute
                FROM history
                WHERE policy_pk = $1 AND minute > $2 AND since < $3
                GROUP BY CASE WHEN since < $2 THEN -1 ELSE (since - $2) / $4 END
            ) AS ends
            CROSS JOIN history AS h
            WHERE h.policy_pk = $1 AND h.minute = ends.minute
            ORDER BY h.minute",
        );
        const SELECT_TOTALS_OF: Statement = Statement::new(
            "-- select_totals_of
            SELECT name, CAST(SUM(value) AS BIGINT) AS value, SUM(amount) AS amount
            FROM tally_now
            WHERE policy_pk = $1
            GROUP BY name",
        );
        const SELECT_VERSION_OF: Statement = Statement::new(
            "-- select_version_of
            SELECT version
            FROM policy
            WHERE policy_pk = $1",
        );
        let mut history = History::default();
        if let Some(row) = tx.fetch_optional(SELECT_SNAPSHOT_BEFORE, args![self.policy, self.from]).await? {
            history.snapshots.push(snapshot(row)?);
        }
        let part = args![self.policy, self.from, self.to, self.step];
        for row in tx.fetch_all(SELECT_SNAPSHOTS, part).await? {
            history.snapshots.push(snapshot(row)?);
        }
        let mut now = Body::default();
        now.add(VERSION.to_owned(), tx.fetch_one(SELECT_VERSION_OF, args![self.policy]).await?.get("version")?, 0.0);
        for mut row in tx.fetch_all(SELECT_TOTALS_OF, args![self.policy]).await? {
            now.add(row.get("name")?, row.get("value")?, row.get("amount")?);
        }
        history.now = now.totals();
        Ok(history)
    }
}

pub(super) fn snapshot(mut row: Row) -> Result<Snapshot, StoreError> {
    let totals = Entries::parse(&row.get::<String>("body")?)?.totals();
    Ok(Snapshot { since: row.get("since")?, minute: row.get("minute")?, totals })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_of_an_hour_is_kept_longest_and_a_gap_is_kept() {
        for (since, minute, next, keep) in [
            (61, 62, 63, KEEP_MINUTES),
            (61, 62, 70, KEEP_MINUTES),
            (61, 62, 71, KEEP_TENS),
            (69, 70, 71, KEEP_TENS),
            (61, 62, 120, KEEP_TENS),
            (61, 62, 121, KEEP_HOURS),
            (119, 120, 121, KEEP_HOURS),
            (50, 62, 63, KEEP_HOURS),
        ] {
            assert_eq!(keep_until(since, minute, next), minute + keep, "{minute} before {next}");
        }
    }

    #[test]
    fn a_body_is_read_as_it_is_written() {
        let mut body = Body::default();
        body.add("received".to_owned(), 3, 0.1 + 0.2);
        body.add("group.ready".to_owned(), 2, 0.0);
        body.add("reserved".to_owned(), 0, 0.0);
        assert_eq!(body.text(), r#"{"group.ready":2,"received":[3,0.30000000000000004]}"#);
        assert_eq!(Body::parse(&body.text()).expect("it parses"), body);
        let totals =
            Entries::parse(r#"{"dropped.a\"b":[2,5.5],"version":7,"of another version":1}"#).expect("it parses");
        let totals = totals.totals();
        let tally = Tally::Dropped("a\"b".to_owned());
        assert_eq!((totals.tallies.count(&tally), totals.tallies.amount(&tally), totals.version), (2, 5.5, 7));
        for wrong in
            ["[]", r#"{"received":null}"#, r#"{"received":[1]}"#, r#"{"received":[1,2,3]}"#, r#"{"received":1.5}"#]
        {
            assert!(matches!(Body::parse(wrong), Err(StoreError::Corrupt(_))), "{wrong}");
        }
    }
}
