//! Connections that run statements on the calling thread: the writer's own thread, or the thread of a reader.
//!
//! With sqlx, each statement would be handed to another thread and back, and its rows one by one, which costs more than
//! most statements.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    path::Path,
    sync::Arc,
};

use async_trait::async_trait;
use forebay_domain::{formats::payload::Payload, ids::RolloutPk};
use rusqlite::{
    CachedStatement, OpenFlags, ToSql,
    types::{ToSqlOutput, ValueRef},
};

use super::settings::{BUSY_TIMEOUT, WAL_BYTES_MAX};
use crate::{
    error::StoreError,
    segment_files::{Appender, Place},
    sql::{Arg, Cell, Connection, Row, Statement, json_id_keys, json_keys},
};

/// Number of statements that stay prepared: more than the service has.
const STATEMENTS_MAX: usize = 256;

/// KiB of pages that the writer caches: the inner pages of the indexes of ten million rollouts, and the pages that
/// successive commits change again.
const CACHE_KIB: i64 = 32 << 10;

/// A connection to a file that exists.
pub(super) struct Direct {
    connection: rusqlite::Connection,
    /// Where the writer appends payloads, if they are stored in segment files.
    appender: Option<Appender>,
    /// By the address of the statement's text, which is the same for every run.
    shapes: HashMap<(usize, usize), Arc<Shape>>,
}

/// The parameters and columns of a statement, which SQLite is asked for once.
struct Shape {
    /// The argument of each parameter. SQLite treats `$2` as a name and numbers parameters by their first mention.
    args: Vec<usize>,
    columns: Arc<[String]>,
}

impl Direct {
    /// Opens the connection that writes.
    pub(super) fn writing(path: &Path) -> Result<Self, rusqlite::Error> {
        let opened = Self::open(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let connection = &opened.connection;
        // NORMAL would lose acknowledged commits in a power cut, and with group commit it is no faster.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.pragma_update(None, "journal_size_limit", WAL_BYTES_MAX as i64)?;
        connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
        // Savepoints keep copies of pages. They stay in memory instead of in files that would be created and removed
        // each time.
        connection.pragma_update(None, "temp_store", "MEMORY")?;
        // The writer copies the log back into the database itself.
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        Ok(opened)
    }

    /// Opens a connection that only reads. The writer sets how the file is organised.
    pub(super) fn reading(path: &Path) -> Result<Self, rusqlite::Error> {
        Self::open(path, OpenFlags::SQLITE_OPEN_READ_ONLY)
    }

    fn open(path: &Path, access: OpenFlags) -> Result<Self, rusqlite::Error> {
        let connection = rusqlite::Connection::open_with_flags(path, access | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        Ok(Self { connection, appender: None, shapes: HashMap::new() })
    }

    pub(super) fn close(self) -> Result<(), rusqlite::Error> {
        self.connection.close().map_err(|(_, error)| error)
    }

    /// Size of the pages of the file, which was chosen when it was created.
    pub(super) fn page_bytes(&self) -> Result<i64, rusqlite::Error> {
        self.connection.pragma_query_value(None, "page_size", |row| row.get(0))
    }

    /// Stores payloads in this file from now on.
    pub(super) fn append_to(&mut self, appender: Appender) {
        self.appender = Some(appender);
    }

    pub(super) fn appender(&mut self) -> Option<&mut Appender> {
        self.appender.as_mut()
    }

    /// Prepares a statement and binds its arguments.
    fn prepare(&mut self, statement: Statement, args: &[Arg]) -> Result<(CachedStatement<'_>, Arc<Shape>), StoreError> {
        // Logged in the form in which sqlx logs the statements of the readers.
        tracing::debug!(target: "sqlx::query", summary = statement.sqlite.lines().next(), db.statement = statement.sqlite);
        let mut prepared = self.connection.prepare_cached(statement.sqlite)?;
        let shape = match self.shapes.entry((statement.sqlite.as_ptr() as usize, statement.sqlite.len())) {
            Entry::Occupied(known) => Arc::clone(known.get()),
            Entry::Vacant(unknown) => Arc::clone(unknown.insert(Arc::new(Shape::of(&prepared)?))),
        };
        for (place, &index) in (1..).zip(&shape.args) {
            let arg = args.get(index);
            let arg = arg.ok_or_else(|| StoreError::Corrupt(format!("parameter {place} has no argument")))?;
            prepared.raw_bind_parameter(place, arg)?;
        }
        Ok((prepared, shape))
    }
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.connection.fmt(f)
    }
}

#[async_trait]
impl Connection for Direct {
    async fn execute(&mut self, statement: Statement, args: Vec<Arg>) -> Result<u64, StoreError> {
        let (mut prepared, _) = self.prepare(statement, &args)?;
        let mut rows = prepared.raw_query();
        while rows.next()?.is_some() {}
        drop(rows);
        drop(prepared);
        Ok(self.connection.changes())
    }

    async fn fetch(&mut self, statement: Statement, args: Vec<Arg>) -> Result<Vec<Row>, StoreError> {
        let (mut prepared, shape) = self.prepare(statement, &args)?;
        let mut rows = prepared.raw_query();
        let mut found = Vec::new();
        while let Some(row) = rows.next()? {
            let cells =
                (0..shape.columns.len()).map(|index| row.get_ref(index).map(owned)).collect::<Result<_, _>>()?;
            found.push(Row::new(Arc::clone(&shape.columns), cells));
        }
        Ok(found)
    }

    fn place_payload(&mut self, rollout: RolloutPk, payload: &Payload) -> Option<Place> {
        self.appender.as_mut().map(|appender| appender.place(rollout, payload))
    }
}

impl Shape {
    fn of(prepared: &rusqlite::Statement<'_>) -> Result<Self, StoreError> {
        let arg = |place| {
            let name = prepared.parameter_name(place).and_then(|name| name.strip_prefix('$')?.parse::<usize>().ok());
            let index = name.and_then(|number| number.checked_sub(1));
            index.ok_or_else(|| StoreError::Corrupt(format!("parameter {place} has no number")))
        };
        Ok(Self {
            args: (1..=prepared.parameter_count()).map(arg).collect::<Result<_, _>>()?,
            columns: prepared.column_names().into_iter().map(str::to_owned).collect(),
        })
    }
}

impl ToSql for Arg {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let value = match self {
            Self::Int(value) => value.map(ValueRef::Integer),
            Self::Real(value) => value.map(ValueRef::Real),
            Self::Text(value) => value.as_ref().map(|text| ValueRef::Text(text.as_bytes())),
            Self::Blob(value) => value.as_deref().map(ValueRef::Blob),
            Self::Shared(value) => Some(ValueRef::Blob(value)),
            Self::Keys(keys) => return Ok(json_keys(keys).into()),
            Self::IdKeys(keys) => return Ok(json_id_keys(keys).into()),
            Self::Reals(_) | Self::Column(_) => {
                return Err(rusqlite::Error::ToSqlConversionFailure("SQLite takes no arrays".into()));
            }
        };
        Ok(ToSqlOutput::Borrowed(value.unwrap_or(ValueRef::Null)))
    }
}

fn owned(value: ValueRef<'_>) -> Cell {
    match value {
        ValueRef::Null => Cell::Null,
        ValueRef::Integer(value) => Cell::Int(value),
        ValueRef::Real(value) => Cell::Real(value),
        ValueRef::Text(text) => Cell::Text(String::from_utf8_lossy(text).into_owned()),
        ValueRef::Blob(bytes) => Cell::Blob(bytes.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use sqlx::{Connection as _, SqliteConnection};

    use super::{super::settings::file_options, *};

    #[tokio::test]
    async fn commits_are_on_disk_before_they_are_answered() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("x.db");
        let made = SqliteConnection::connect_with(&file_options(&path)).await.expect("the file can be made");
        let connection = Direct::writing(&path).expect("the file can be written");
        made.close().await.expect("the other connection ends");
        let pragma = |name: &str| connection.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        // 2 is FULL: the log is synced at every commit.
        for (name, expected) in [("synchronous", 2), ("page_size", 8_192), ("foreign_keys", 1)] {
            assert_eq!(pragma(name), Ok(expected), "{name}");
        }
        let journal = connection.connection.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0));
        assert_eq!(journal.as_deref(), Ok("wal"));
    }
}
