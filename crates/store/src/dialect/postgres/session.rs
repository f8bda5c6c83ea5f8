//! A session of the server, and how statements run in it.
//!
//! Every statement waits for an answer from the server, which may be far away. Rows are therefore inserted together, in
//! one statement with a part for each table: when another statement could see them, and otherwise at the end of the
//! transaction.
//!
//! A pooler such as `PgBouncer` gives each transaction another session, so that no state may be left in a session.
//! Without a pooler, statements have names: the server then parses each once per session, and running it takes one
//! round trip instead of two. The server plans a statement again at every run, with or without a name. A kept plan
//! would fit the tables as they were when it was made. Nothing replaces it before the first ANALYZE, and on a new
//! database it would scan all rows of tables that were nearly empty when it was made.
//!
//! The rows of a part are one array for each column. `COPY` would take two round trips for each table. In addition,
//! sqlx 0.9 writes the data of a `COPY` and its end separately and does not set `TCP_NODELAY` (transact-rs/sqlx#4335),
//! so the end would wait for the server's delayed acknowledgement: 40 ms for each table. A connection that was used
//! within the last second is not tested before it is used again.
//!
//! When the service starts, it begins a session with a mark, which `PgBouncer` refuses or drops: so it knows whether
//! there is a pooler.

use std::sync::Arc;

use async_trait::async_trait;
use forebay_domain::{
    formats::payload::Payload,
    ids::{IdKey, RolloutPk},
};
use sqlx::{
    Arguments as _, AssertSqlSafe, Column as _, Connection as _, Executor, PgConnection, Postgres, Row as _,
    SqlSafeStr, TypeInfo as _, ValueRef as _,
    error::BoxDynError,
    postgres::{PgArguments, PgConnectOptions, PgRow},
    query::Query,
};
use uuid::Uuid;

use crate::{
    error::StoreError,
    segment_files::{Appended, Objects, PendingObject, Place},
    sql::{Arg, Cell, Connection, Row, Statement, args, check_touched},
};

/// Number of statements that a session keeps prepared: more than the service has.
const STATEMENTS_MAX: usize = 512;

/// A setting that a session has only if this connection began it, because a pooler refuses or drops the setting.
const MARK: &str = "forebay.session";
const READ_MARK: &str = "SELECT current_setting('forebay.session', true)";

/// Bytes of values that wait to be inserted. Beyond them, a round trip takes less time than the bytes.
const INSERTS_BYTES_MAX: usize = 4 << 20;

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
    inserts: Vec<Insert>,
}

/// An `INSERT` that has not been sent.
struct Insert {
    statement: Statement,
    args: Vec<Arg>,
    /// The rows that it must insert or update.
    rows: usize,
}

impl<'c> Session<'c> {
    pub(super) fn new(connection: &'c mut PgConnection, kind: Kind) -> Self {
        Self { connection, kind, object: None, inserts: Vec::new() }
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
        self.insert(ADD_OBJECT, args![file, object.mark, end, frames, bytes], 1).await?;
        // Before the object, so that a transaction that must run again has not written one.
        self.send_inserts().await?;
        Ok(objects.put(object).await?)
    }

    /// Sends the inserts that wait, in one statement.
    pub(super) async fn send_inserts(&mut self) -> Result<(), StoreError> {
        let inserts = std::mem::take(&mut self.inserts);
        if inserts.is_empty() {
            return Ok(());
        }
        let (mut names, mut parts, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        let mut arguments = PgArguments::default();
        for (number, Insert { statement, args, .. }) in inserts.iter().enumerate() {
            names.push(statement.name());
            let text = with_later_places(statement.postgres, arguments.len());
            parts.push(format!("insert_{number} AS (\n{text}\nRETURNING 1\n)"));
            counts.push(format!("(SELECT COUNT(*) FROM insert_{number})"));
            for arg in args {
                add(&mut arguments, arg)?;
            }
        }
        let text = format!("-- {}\nWITH {}\nSELECT {}", names.join(" + "), parts.join(", "), counts.join(", "));
        let row = self.query(AssertSqlSafe(text), arguments).fetch_one(&mut *self.connection).await?;
        for (number, Insert { statement, rows, .. }) in inserts.iter().enumerate() {
            check_touched(*statement, row.try_get::<i64, _>(number)? as u64, *rows)?;
        }
        Ok(())
    }

    fn query<'q>(&self, text: impl SqlSafeStr, arguments: PgArguments) -> Query<'q, Postgres, PgArguments> {
        sqlx::query_with(text, arguments).persistent(matches!(self.kind, Kind::Own(_)))
    }
}

#[async_trait]
impl Connection for Session<'_> {
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError> {
        self.send_inserts().await?;
        let query = self.query(statement.postgres, arguments(&args)?);
        Ok(query.execute(&mut *self.connection).await?.rows_affected())
    }

    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError> {
        self.send_inserts().await?;
        let rows = self.query(statement.postgres, arguments(&args)?).fetch_all(&mut *self.connection).await?;
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

    async fn insert(&mut self, statement: Statement, args: Vec<Arg>, rows: usize) -> Result<(), StoreError> {
        let bytes = |args: &[Arg]| args.iter().map(Arg::bytes).sum::<usize>();
        let waiting: usize = self.inserts.iter().map(|insert| bytes(&insert.args)).sum();
        if waiting + bytes(&args) > INSERTS_BYTES_MAX {
            self.send_inserts().await?;
        }
        self.inserts.push(Insert { statement, args, rows });
        Ok(())
    }
}

/// A statement whose places `$1`, `$2` and so on come after `before` other ones.
fn with_later_places(text: &str, before: usize) -> String {
    let mut pieces = text.split('$');
    let mut renumbered = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (number, rest) = piece.split_at(piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len()));
        let place: usize = number.parse().expect("in the statements of the store, `$` begins a place");
        renumbered.extend(["$", &(place + before).to_string(), rest]);
    }
    renumbered
}

fn arguments(args: &[Arg]) -> Result<PgArguments, StoreError> {
    let mut arguments = PgArguments::default();
    for arg in args {
        add(&mut arguments, arg)?;
    }
    Ok(arguments)
}

fn add(arguments: &mut PgArguments, arg: &Arg) -> Result<(), StoreError> {
    /// Adds the values of a column, which all are of one kind.
    macro_rules! column {
        ($values:expr, $($kind:pat => $value:expr),+) => {{
            let values = $values.iter().map(|arg| match arg {
                $($kind => Ok($value),)+
                other => Err(StoreError::Corrupt(format!("a {} is in a column of another type", other.kind()))),
            });
            arguments.add(values.collect::<Result<Vec<_>, _>>()?)
        }};
    }
    let added: Result<(), BoxDynError> = match arg {
        Arg::Int(value) => arguments.add(value),
        Arg::Real(value) => arguments.add(value),
        Arg::Text(value) => arguments.add(value),
        Arg::Blob(value) => arguments.add(value),
        Arg::Shared(value) => arguments.add(&value[..]),
        Arg::Reals(values) => arguments.add(values),
        Arg::Keys(keys) => arguments.add(keys),
        Arg::IdKeys(keys) => arguments.add(keys.iter().map(IdKey::as_bytes).collect::<Vec<&[u8]>>()),
        Arg::Column(values) => match values.first() {
            Some(Arg::Real(_)) => column!(values, Arg::Real(value) => *value),
            Some(Arg::Text(_)) => column!(values, Arg::Text(value) => value.as_deref()),
            Some(Arg::Blob(_) | Arg::Shared(_)) => {
                column!(values, Arg::Blob(value) => value.as_deref(), Arg::Shared(value) => Some(&value[..]))
            }
            _ => column!(values, Arg::Int(value) => *value),
        },
    };
    added.map_err(|error| sqlx::Error::Encode(error).into())
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
