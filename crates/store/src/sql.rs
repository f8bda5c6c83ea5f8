//! The few types that cross into SQL, and an open transaction that works with them on either database.
//!
//! Separate from the operations, so that each operation is written once. A transaction binds [`Arg`]s and reads
//! [`Row`]s by column name, and a dialect's [`Connection`] translates both for its driver. Statements run unchanged on
//! both databases, except if a [`Statement`] has two texts.

mod values;

use std::{
    ops::RangeInclusive,
    sync::{Arc, OnceLock},
};

use async_trait::async_trait;
use forebay_domain::{
    formats::payload::Payload,
    ids::{IdKey, RolloutPk},
    rules::Rules,
};

use super::{rules_cache::RulesCache, segment_files::Place, tally::TallyDelta};
use crate::error::StoreError;

pub(super) use self::values::{Arg, Cell, Row, id_key_list, json_id_keys, json_keys, key_list};

/// One statement, with its text for each database.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statement {
    pub(super) sqlite: &'static str,
    pub(super) postgres: &'static str,
}

impl Statement {
    /// A statement with the same text on both databases.
    pub(super) const fn new(sql: &'static str) -> Self {
        Self { sqlite: sql, postgres: sql }
    }

    /// The name in the first line of its text.
    pub(super) fn name(&self) -> &'static str {
        self.sqlite.lines().next().unwrap_or_default().trim_start_matches("-- ")
    }
}

/// A `SELECT` that locks its rows until the end of the transaction. SQLite has only one writer, so it needs no lock.
///
/// `NO KEY` means that inserting rows that refer to a locked row does not wait.
macro_rules! locking {
    ($sql:expr) => {
        $crate::sql::Statement { sqlite: $sql, postgres: concat!($sql, "\nFOR NO KEY UPDATE") }
    };
}
pub(super) use locking;

/// A statement about the rows whose keys are in its first argument, a list. The text ends with the column of the keys,
/// and what follows the list is a second text.
macro_rules! among_keys {
    ($sql:expr $(, $rest:expr)?) => {
        $crate::sql::Statement {
            sqlite: concat!($sql, " IN (SELECT value FROM json_each($1))" $(, $rest)?),
            postgres: concat!($sql, " = ANY ($1::bigint[])" $(, $rest)?),
        }
    };
}
pub(super) use among_keys;

/// Builds the arguments of a statement, in order.
macro_rules! args {
    ($($value:expr),* $(,)?) => { vec![$($crate::sql::Arg::from($value)),*] };
}
pub(super) use args;

/// The most rows that one statement inserts, so that the memory for one statement stays small compared with a post.
const ROWS_PER_STATEMENT: usize = 256;

/// The most bytes of values that one statement inserts, unless a single row has more. Postgres has the values of a
/// statement in memory three times.
const BYTES_PER_STATEMENT: usize = 4 << 20;

/// An `INSERT` of any number of rows.
///
/// Postgres takes an array for each column, so that the rows are one message, and inserting takes one round trip. `COPY`
/// takes two.
#[derive(Debug)]
pub(super) struct InsertRows {
    name: &'static str,
    table: &'static str,
    columns: &'static str,
    statement: OnceLock<Statement>,
}

impl InsertRows {
    /// Key columns are listed like any other.
    pub(super) const fn new(name: &'static str, table: &'static str, columns: &'static str) -> Self {
        Self { name, table, columns, statement: OnceLock::new() }
    }

    /// The texts, built once per process; they are never freed. The columns have the types of the values of `row`.
    fn statement(&self, row: &[Arg]) -> Statement {
        *self.statement.get_or_init(|| {
            let Self { name, table, columns, .. } = self;
            let insert = format!("-- {name}\nINSERT INTO {table} ({columns})");
            let places: Vec<String> = (1..=row.len()).map(|column| format!("${column}")).collect();
            // In the list of a SELECT, `unnest` returns one row after the other. In FROM it would collect all of them
            // first, and write large ones to a temporary file.
            let unnested = row.iter().zip(&places).map(|(value, place)| format!("unnest({place}::{}[])", value.kind()));
            let unnested = unnested.collect::<Vec<_>>().join(", ");
            Statement {
                sqlite: String::leak(format!("{insert}\nVALUES ({})", places.join(", "))),
                postgres: String::leak(format!("{insert}\nOVERRIDING SYSTEM VALUE\nSELECT {unnested}")),
            }
        })
    }

    /// Inserts rows in order.
    pub(super) async fn run(&self, tx: &mut Tx<'_>, rows: Vec<Vec<Arg>>) -> Result<(), StoreError> {
        let Some(statement) = rows.first().map(|row| self.statement(row)) else { return Ok(()) };
        if !tx.takes_arrays() {
            for row in rows {
                tx.insert(statement, row, 1).await?;
            }
            return Ok(());
        }
        let mut left = rows.into_iter().peekable();
        while let Some(first) = left.next() {
            let (mut count, mut bytes) = (1, bytes_of(&first));
            let mut columns: Vec<Vec<Arg>> = first.into_iter().map(|value| vec![value]).collect();
            while let Some(row) =
                left.next_if(|row| count < ROWS_PER_STATEMENT && bytes + bytes_of(row) <= BYTES_PER_STATEMENT)
            {
                (count, bytes) = (count + 1, bytes + bytes_of(&row));
                columns.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
            }
            tx.insert(statement, columns.into_iter().map(Arg::Column).collect(), count).await?;
        }
        Ok(())
    }
}

fn bytes_of(row: &[Arg]) -> usize {
    row.iter().map(Arg::bytes).sum()
}

/// Keys for new rows, ascending.
pub(super) type NewKeys = std::vec::IntoIter<i64>;

/// The consecutive numbers that a row of `last` and `run` stands for: `run` of them, up to `last`.
pub(super) fn key_run(row: &mut Row) -> Result<RangeInclusive<i64>, StoreError> {
    let (last, run): (i64, i64) = (row.get("last")?, row.get("run")?);
    Ok(last - run + 1..=last)
}

/// An open connection of either database.
#[async_trait]
pub(super) trait Connection: Send {
    /// Runs a statement. Returns the number of rows that it changed.
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError>;

    /// Runs a statement. Returns its rows, read completely.
    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError>;

    /// Whether the database takes arrays as arguments.
    fn takes_arrays(&self) -> bool {
        false
    }

    /// Takes a payload that is stored outside of the database, and says where it will be; none if it belongs in the row.
    fn place_payload(&mut self, _rollout: RolloutPk, _payload: &Payload) -> Option<Place> {
        None
    }

    /// Runs an `INSERT` that must insert or update exactly `rows` rows. No statement before the next one that is no
    /// `INSERT` sees its effect, so that a dialect may send several together.
    async fn insert(&mut self, statement: Statement, args: Vec<Arg>, rows: usize) -> Result<(), StoreError> {
        let touched = self.execute(statement, args).await?;
        check_touched(statement, touched, rows)
    }
}

/// One open transaction, with the counts that it adds to the tallies when it commits.
pub struct Tx<'c> {
    connection: &'c mut dyn Connection,
    rules: &'c RulesCache,
    tallies: TallyDelta,
}

impl<'c> Tx<'c> {
    pub(super) fn new(connection: &'c mut dyn Connection, rules: &'c RulesCache) -> Self {
        Self { connection, rules, tallies: TallyDelta::default() }
    }

    /// A transaction in which earlier operations have counted already.
    pub(super) fn after(tallies: TallyDelta, connection: &'c mut dyn Connection, rules: &'c RulesCache) -> Self {
        Self { tallies, ..Self::new(connection, rules) }
    }

    /// Runs a statement. Returns the number of rows that it changed.
    pub(super) async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError> {
        self.connection.execute(statement, args).await
    }

    /// Runs a guarded statement that must change exactly `rows` rows.
    pub(super) async fn guarded(
        &mut self,
        statement: Statement,
        args: Vec<Arg>,
        rows: usize,
    ) -> Result<(), StoreError> {
        let touched = self.execute(statement, args).await?;
        check_touched(statement, touched, rows)
    }

    /// Runs an `INSERT` that must insert or update exactly `rows` rows, which no other `INSERT` of this transaction
    /// reads or changes. An error may be returned by a later statement.
    pub(super) async fn insert(&mut self, statement: Statement, args: Vec<Arg>, rows: usize) -> Result<(), StoreError> {
        self.connection.insert(statement, args, rows).await
    }

    /// Sets a value of one kind in each of several existing rows, by their keys.
    ///
    /// The statement for Postgres takes an array of keys and an array of values, and the one for SQLite takes a key and
    /// a value. Floats are never passed as text, because SQLite does not always read the nearest float from JSON.
    pub(super) async fn set_each(&mut self, statement: Statement, values: Vec<(i64, Arg)>) -> Result<(), StoreError> {
        if values.is_empty() {
            return Ok(());
        }
        if self.takes_arrays() {
            let rows = values.len();
            let (keys, values) = values.into_iter().unzip();
            return self.guarded(statement, vec![Arg::Keys(keys), Arg::Column(values)], rows).await;
        }
        for (key, value) in values {
            self.guarded(statement, vec![key.into(), value], 1).await?;
        }
        Ok(())
    }

    /// Takes a payload that is stored outside of the database, and says where it will be; none if it belongs in the row.
    pub(super) fn place_payload(&mut self, rollout: RolloutPk, payload: &Payload) -> Option<Place> {
        self.connection.place_payload(rollout, payload)
    }

    /// Whether the database takes arrays as arguments.
    pub(super) fn takes_arrays(&self) -> bool {
        self.connection.takes_arrays()
    }

    pub(super) async fn fetch_all(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError> {
        self.connection.fetch(statement, args).await
    }

    /// The first row of a statement; none if there are no rows.
    pub(super) async fn fetch_optional(
        &mut self,
        statement: Statement,
        args: Vec<Arg>,
    ) -> Result<Option<Row>, StoreError> {
        Ok(self.fetch_all(statement, args).await?.into_iter().next())
    }

    /// The only row of a statement that always returns one.
    pub(super) async fn fetch_one(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Row, StoreError> {
        let row = self.fetch_optional(statement, args).await?;
        row.ok_or_else(|| StoreError::Corrupt("a row that must exist is missing".to_owned()))
    }

    /// Rules by their row, parsed once per process.
    pub(super) async fn rules(&mut self, rules_pk: i64) -> Result<Arc<Rules>, StoreError> {
        const SELECT_RULES: Statement = Statement::new("-- select_rules\nSELECT body FROM rules WHERE rules_pk = $1");
        if let Some(rules) = self.rules.get(rules_pk) {
            return Ok(rules);
        }
        let mut row = self.fetch_one(SELECT_RULES, args![rules_pk]).await?;
        let body: String = row.get("body")?;
        self.rules.insert(rules_pk, &body)
    }

    /// Counts that are committed with this transaction.
    pub(super) fn tallies(&mut self) -> &mut TallyDelta {
        &mut self.tallies
    }

    /// Takes the counts out, so that they are written once at the end of the transaction.
    pub(super) fn take_tallies(&mut self) -> TallyDelta {
        std::mem::take(&mut self.tallies)
    }
}

/// The key of a row with this name. Fails if the row was not asked for: its stored key is damaged and finds the wrong
/// name.
pub(super) fn key_found(name: &str, is_asked: impl FnOnce(&IdKey) -> bool) -> Result<IdKey, StoreError> {
    let not_asked = || StoreError::Corrupt(format!("`{name}` was found by the key of another name"));
    Some(IdKey::of(name)).filter(is_asked).ok_or_else(not_asked)
}

/// Fails if a statement changed another number of rows than expected.
pub(super) fn check_touched(statement: Statement, touched: u64, expected: usize) -> Result<(), StoreError> {
    if touched == expected as u64 {
        return Ok(());
    }
    let name = statement.name();
    Err(StoreError::Corrupt(format!("`-- {name}` changed {touched} rows instead of {expected}")))
}
