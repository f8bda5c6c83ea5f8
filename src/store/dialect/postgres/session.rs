//! A session of the server, and how statements run in it.
//!
//! A pooler such as `PgBouncer` gives each transaction another session, so that no state may be left in a session.
//! Without a pooler, statements have names: the server then parses each once per session, and running it takes one
//! round trip instead of two. The server plans a statement again at every run, with or without a name. A kept plan
//! would fit the tables as they were when it was made. Nothing replaces it before the first ANALYZE, and on a new
//! database it would scan all rows of tables that were nearly empty when it was made.

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{
    Column as _, Connection as _, Executor, PgConnection, Postgres, Row as _, TypeInfo as _, ValueRef as _,
    postgres::{PgArguments, PgConnectOptions, PgRow},
    query::Query,
};
use uuid::Uuid;

use super::copy;
use crate::{
    buffer::{ids::RolloutPk, payload::Payload, port::StoreError},
    store::{
        segment_files::{Appended, Objects, PendingObject, Place},
        sql::{Arg, Cell, Connection, Row, Statement, args},
    },
};

/// Number of statements that a session keeps prepared: more than the service has.
const STATEMENTS_MAX: usize = 512;

/// A setting that a session has only if this connection began it, because a pooler refuses or drops the setting.
const MARK: &str = "forebay.session";
const READ_MARK: &str = "SELECT current_setting('forebay.session', true)";

/// SQLSTATE with which `PgBouncer` refuses a startup parameter that it does not know.
const PROTOCOL_VIOLATION: &str = "08P01";

/// The owner of the sessions that connections use.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Each session belongs to its connection and has this mark.
    Own(Uuid),
    /// The sessions belong to a pooler.
    Shared,
}

/// A parameter in the URL that turns names of statements off, for poolers that are not detected.
const WITHOUT_NAMES: &str = "statement-cache-capacity=0";

/// The kind of sessions that a URL and its options lead to, and the options for them.
pub(super) async fn kind(url: &str, options: PgConnectOptions) -> Result<(Kind, PgConnectOptions), sqlx::Error> {
    if url.contains(WITHOUT_NAMES) {
        return Ok((Kind::Shared, options));
    }
    let mark = Uuid::new_v4();
    let marked = mark_with(options.clone(), mark)
        .options([("plan_cache_mode", "force_custom_plan")])
        .statement_cache_capacity(STATEMENTS_MAX);
    let mut connection = match PgConnection::connect_with(&marked).await {
        Err(error) if is_refused_parameter(&error) => return Ok((Kind::Shared, options)),
        connected => connected?,
    };
    let is_own = has_mark(&mut connection, mark).await?;
    connection.close().await?;
    Ok(if is_own { (Kind::Own(mark), marked) } else { (Kind::Shared, options) })
}

/// Refuses a session of a pooler if there was no pooler at the start, because statements with names would fail in it.
pub(super) async fn check(connection: &mut PgConnection, kind: Kind) -> Result<(), sqlx::Error> {
    match kind {
        Kind::Own(mark) if !has_mark(connection, mark).await? => Err(sqlx::Error::Configuration(
            "a pooler was put in front of the database after the service started: restart the service".into(),
        )),
        Kind::Own(_) | Kind::Shared => Ok(()),
    }
}

/// Options that mark the sessions that they begin.
pub(super) fn mark_with(options: PgConnectOptions, mark: Uuid) -> PgConnectOptions {
    options.options([(MARK, mark)])
}

/// Whether a session has this mark.
pub(super) async fn has_mark<'e>(
    session: impl Executor<'e, Database = Postgres>,
    mark: Uuid,
) -> Result<bool, sqlx::Error> {
    let row = sqlx::raw_sql(READ_MARK).fetch_one(session).await?;
    Ok(row.try_get::<Option<String>, _>(0)? == Some(mark.to_string()))
}

/// Whether a pooler refused the setting that marks a session.
pub(super) fn is_refused_parameter(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some(PROTOCOL_VIOLATION))
}

/// A session in a transaction.
pub(super) struct Session<'c> {
    connection: &'c mut PgConnection,
    kind: Kind,
    /// The payloads of the transaction, if they become an object.
    object: Option<PendingObject>,
}

impl<'c> Session<'c> {
    pub(super) fn new(connection: &'c mut PgConnection, kind: Kind) -> Self {
        Self { connection, kind, object: None }
    }

    /// Collects the payloads of the transaction for an object.
    pub(super) fn collect_payloads(&mut self) {
        self.object = Some(PendingObject::default());
    }

    /// Writes the object of the transaction, and the row about it.
    pub(super) async fn write_payloads(&mut self, objects: &Objects) -> Result<(), StoreError> {
        const ADD_OBJECT: Statement = Statement::new(
            "-- add_object
            INSERT INTO segment_file (file, mark, end_at, live_frames, live_bytes)
            VALUES ($1, $2, $3, $4, $5)",
        );
        let Some(object) = self.object.take() else { return Ok(()) };
        let Some(Appended { file, frames, bytes, end }) = object.appended() else { return Ok(()) };
        self.execute(ADD_OBJECT, args![file, object.mark, end, frames, bytes]).await?;
        Ok(objects.put(object).await?)
    }

    fn query(&self, statement: Statement, args: Vec<Arg>) -> Query<'static, Postgres, PgArguments> {
        let query = sqlx::query(statement.postgres).persistent(matches!(self.kind, Kind::Own(_)));
        args.into_iter().fold(query, |query, arg| match arg {
            Arg::Int(value) => query.bind(value),
            Arg::Real(value) => query.bind(value),
            Arg::Text(value) => query.bind(value),
            Arg::Blob(value) => query.bind(value),
            Arg::Shared(value) => query.bind(value.to_vec()),
            Arg::Reals(values) => query.bind(values),
            Arg::Keys(keys) => query.bind(keys),
            Arg::IdKeys(keys) => query.bind(keys.iter().map(|key| key.as_bytes().to_vec()).collect::<Vec<_>>()),
        })
    }
}

#[async_trait]
impl Connection for Session<'_> {
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError> {
        Ok(self.query(statement, args).execute(&mut *self.connection).await?.rows_affected())
    }

    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError> {
        let rows = self.query(statement, args).fetch_all(&mut *self.connection).await?;
        let Some(first) = rows.first() else { return Ok(Vec::new()) };
        let columns: Arc<[String]> = first.columns().iter().map(|column| column.name().to_owned()).collect();
        let read = |row| {
            let cells = (0..columns.len()).map(|index| cell(row, index)).collect::<Result<_, _>>()?;
            Ok(Row::new(Arc::clone(&columns), cells))
        };
        rows.iter().map(read).collect()
    }

    fn takes_arrays(&self) -> bool {
        true
    }

    fn place_payload(&mut self, rollout: RolloutPk, payload: &Payload) -> Option<Place> {
        self.object.as_mut().map(|object| object.place(rollout, payload))
    }

    async fn insert(&mut self, statement: Statement, rows: Vec<Vec<Arg>>) -> Result<u64, StoreError> {
        let data = copy::binary(rows)?;
        let mut copy = self.connection.copy_in_raw(statement.postgres).await?;
        copy.send(data).await?;
        Ok(copy.finish().await?)
    }
}

fn cell(row: &PgRow, index: usize) -> Result<Cell, sqlx::Error> {
    let value = row.try_get_raw(index)?;
    if value.is_null() {
        return Ok(Cell::Null);
    }
    Ok(match value.type_info().name() {
        "INT8" => Cell::Int(row.try_get_unchecked(index)?),
        "FLOAT8" => Cell::Real(row.try_get_unchecked(index)?),
        "BYTEA" => Cell::Blob(row.try_get_unchecked(index)?),
        _ => Cell::Text(row.try_get_unchecked(index)?),
    })
}
