//! The few types that cross into SQL, and an open transaction that works with them on either database.
//!
//! Separate from the operations, so that each operation is written once. A transaction binds [`Arg`]s and reads
//! [`Row`]s by column name, and a dialect's [`Connection`] translates both for its driver. Statements run unchanged on
//! both databases, except if a [`Statement`] has two texts.

mod values;

use std::sync::Arc;

use async_trait::async_trait;

pub(super) use self::values::{Arg, Cell, Row, id_key_list, json_id_keys, json_keys, key_list};
use super::{rules_cache::RulesCache, segment_files::Place, tally::TallyDelta};
use crate::buffer::{
    ids::{IdKey, KeyForm, RolloutPk},
    payload::Payload,
    port::StoreError,
    rules::Rules,
};

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
}

/// A `SELECT` that locks its rows until the end of the transaction. SQLite has only one writer, so it needs no lock.
///
/// `NO KEY` means that inserting rows that refer to a locked row does not wait.
macro_rules! locking {
    ($sql:expr) => {
        $crate::store::sql::Statement { sqlite: $sql, postgres: concat!($sql, "\nFOR NO KEY UPDATE") }
    };
}
pub(super) use locking;

/// A statement about the rows whose keys are in its first argument, a list. The text ends with the column of the keys,
/// and what follows the list is a second text.
macro_rules! among_keys {
    ($sql:expr $(, $rest:expr)?) => {
        $crate::store::sql::Statement {
            sqlite: concat!($sql, " IN (SELECT value FROM json_each($1))" $(, $rest)?),
            postgres: concat!($sql, " = ANY ($1::bigint[])" $(, $rest)?),
        }
    };
}
pub(super) use among_keys;

/// Builds the arguments of a statement, in order.
macro_rules! args {
    ($($value:expr),* $(,)?) => { vec![$($crate::store::sql::Arg::from($value)),*] };
}
pub(super) use args;

/// The most rows that one statement inserts, so that the memory for one statement stays small compared with a post.
const ROWS_PER_STATEMENT: usize = 256;

/// An `INSERT` of any number of rows.
///
/// Postgres runs it as `COPY`, which needs no plan and writes the rows of a page together.
#[derive(Debug)]
pub(super) struct InsertRows {
    statement: Statement,
}

impl InsertRows {
    /// Builds the texts once per process; they are never freed. Key columns are listed like any other.
    pub(super) fn new(name: &str, table: &str, columns: &str) -> Self {
        let places: Vec<String> = (1..=columns.split(',').count()).map(|column| format!("${column}")).collect();
        let places = places.join(", ");
        let sqlite = format!("-- {name}\nINSERT INTO {table} ({columns})\nVALUES ({places})");
        let postgres = format!("-- {name}\nCOPY {table} ({columns}) FROM STDIN (FORMAT binary)");
        Self { statement: Statement { sqlite: String::leak(sqlite), postgres: String::leak(postgres) } }
    }

    /// Inserts rows in order.
    pub(super) async fn run(&self, tx: &mut Tx<'_>, rows: Vec<Vec<Arg>>) -> Result<(), StoreError> {
        let mut left = rows.into_iter();
        while left.len() > 0 {
            let rows: Vec<Vec<Arg>> = left.by_ref().take(ROWS_PER_STATEMENT).collect();
            let expected = rows.len();
            let inserted = tx.connection.insert(self.statement, rows).await?;
            check_touched(self.statement, inserted, expected)?;
        }
        Ok(())
    }
}

/// Keys for new rows, ascending.
pub(super) type NewKeys = std::vec::IntoIter<i64>;

/// Takes `count` numbers from a sequence. The statement returns the last number of every run of consecutive ones.
pub(super) async fn new_keys(tx: &mut Tx<'_>, statement: Statement, count: usize) -> Result<NewKeys, StoreError> {
    let mut keys = Vec::with_capacity(count);
    if count > 0 {
        for mut row in tx.fetch_all(statement, args![count]).await? {
            let (last, run): (i64, i64) = (row.get("last")?, row.get("run")?);
            keys.extend(last - run + 1..=last);
        }
        keys.sort_unstable();
    }
    Ok(keys.into_iter())
}

/// An open connection of either database.
#[async_trait]
pub(super) trait Connection: Send {
    /// Runs a statement. Returns the number of rows that it changed.
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError>;

    /// Runs a statement. Returns its rows, read completely.
    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError>;

    /// The form in which the database writes ids.
    fn key_form(&self) -> KeyForm {
        KeyForm::Hashed
    }

    /// Whether the database takes arrays as arguments.
    fn takes_arrays(&self) -> bool {
        false
    }

    /// Takes a payload that is stored outside of the database, and says where it will be; none if it belongs in the row.
    fn place_payload(&mut self, _rollout: RolloutPk, _payload: &Payload) -> Option<Place> {
        None
    }

    /// Inserts rows, whose values have the types of the columns. Returns the number of inserted rows.
    async fn insert(&mut self, statement: Statement, rows: Vec<Vec<Arg>>) -> Result<u64, StoreError> {
        let mut inserted = 0;
        for row in rows {
            inserted += self.execute(statement, row).await?;
        }
        Ok(inserted)
    }
}

/// One open transaction, with the counts that it adds to the tallies when it commits.
pub(super) struct Tx<'c> {
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

    /// The form in which indexes write ids.
    pub(super) fn key_form(&self) -> KeyForm {
        self.connection.key_form()
    }

    /// The key of a row with this name. Fails if the row was not asked for: its stored key is damaged and finds the
    /// wrong name.
    pub(super) fn key_found(&self, name: &str, is_asked: impl FnOnce(&IdKey) -> bool) -> Result<IdKey, StoreError> {
        let not_asked = || StoreError::Corrupt(format!("`{name}` was found by the key of another name"));
        Some(self.key_form().key(name)).filter(is_asked).ok_or_else(not_asked)
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

    /// Sets a float in each of several existing rows, by their keys.
    ///
    /// The statement for Postgres takes an array of keys and an array of floats, and the one for SQLite takes a key and
    /// a float. Floats are never passed as text, because SQLite does not always read the nearest float from JSON.
    pub(super) async fn set_reals(&mut self, statement: Statement, values: &[(i64, f64)]) -> Result<(), StoreError> {
        if self.takes_arrays() {
            let (keys, reals) = values.iter().copied().unzip();
            return self.guarded(statement, vec![Arg::Keys(keys), Arg::Reals(reals)], values.len()).await;
        }
        for &(key, real) in values {
            self.guarded(statement, args![key, real], 1).await?;
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

    /// All rows of a statement.
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

/// Fails if a statement changed another number of rows than expected.
fn check_touched(statement: Statement, touched: u64, expected: usize) -> Result<(), StoreError> {
    if touched == expected as u64 {
        return Ok(());
    }
    let name = statement.sqlite.lines().next().unwrap_or_default();
    Err(StoreError::Corrupt(format!("`{name}` changed {touched} rows instead of {expected}")))
}
