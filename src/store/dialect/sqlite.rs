//! SQLite: one writer owns one connection and commits in groups; a small pool reads.
//!
//! The writer takes commands from its queues, control before bulk, runs each inside a savepoint, commits once and then
//! answers everybody: durability costs one fsync per group. A commit with an urgent command takes no more bulk once it
//! has lasted for a moment. Nothing that writes can be cancelled by a caller.

use std::{
    collections::{HashMap, hash_map::Entry},
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::FutureExt as _;
use rusqlite::{
    CachedStatement, OpenFlags, ToSql,
    types::{ToSqlOutput, ValueRef},
};
use sqlx::{
    Column as _, Connection as _, Row as _, SqliteConnection, SqlitePool, TypeInfo as _, ValueRef as _,
    sqlite::{
        SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous,
    },
};
use tokio::sync::{mpsc, oneshot};

use super::{Class, Dialect, Op, connection};
use crate::{
    buffer::payload::Codec,
    clock::Timestamp,
    metrics::StoreMetrics,
    store::{
        Health, OpenError, StoreError,
        health::Vitals,
        rules_cache::RulesCache,
        sql::{Arg, Cell, Connection, Row, Statement, Tx},
        tally::TallyDelta,
    },
};

/// Older versions can corrupt a database in WAL mode with two connections.
const VERSION_MIN: i64 = 3_051_003;

/// 1.5 times faster than 4 KiB for payloads of 64 to 180 kB.
const PAGE_BYTES: u32 = 16_384;

/// Commands of one commit: their answers wait for one fsync together.
const COMMIT_COMMANDS_MAX: usize = 64;

/// Payload bytes of one commit.
const COMMIT_BYTES_MAX: usize = 8 << 20;

/// How long a commit goes on taking bulk once an urgent command is in it: long enough that a stream of those does not
/// make every body pay for an fsync of its own.
const URGENT_COMMIT: Duration = Duration::from_millis(5);

/// Commands waiting in each queue; beyond it callers wait to enqueue.
const QUEUE_COMMANDS_MAX: usize = 1_024;

/// Readers: batches are read in large pieces, so a few suffice.
const READERS_MAX: u32 = 4;

/// Size of the write-ahead log at which its pages go back into the database although commands are waiting.
const WAL_BUSY_BYTES: u64 = 16 << 20;

/// Size at which the log is also cut, because readers kept it from being reused.
const WAL_BYTES_MAX: u64 = 64 << 20;

/// Free pages given back to the file system in one idle slice.
const VACUUM_PAGES: &str = "PRAGMA incremental_vacuum(64)";

/// Statements that stay prepared: more than there are.
const STATEMENTS_MAX: usize = 256;

/// How long a connection waits for another's lock, e.g. while the log is reset.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the writer waits for a command before it looks after the file.
const IDLE: Duration = Duration::from_millis(500);

/// An embedded database in one file.
#[derive(Debug)]
pub(in crate::store) struct Sqlite {
    control: mpsc::Sender<Box<dyn Command>>,
    bulk: mpsc::Sender<Box<dyn Command>>,
    readers: SqlitePool,
    rules: Arc<RulesCache>,
    vitals: Vitals,
    writer: tokio::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
    /// Held for as long as the store is open: one process per file.
    lock: std::sync::Mutex<Option<std::fs::File>>,
    /// Removed with the store, for `sqlite::memory:`.
    _temporary: Option<tempfile::TempDir>,
}

impl Sqlite {
    /// Opens or creates the database and brings its schema up to date.
    pub(in crate::store) async fn open(path: &Path, metrics: StoreMetrics) -> Result<Self, OpenError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(|source| OpenError::file(folder, source))?;
        }
        Self::open_in(path.to_owned(), None, metrics).await
    }

    /// A database in a temporary folder: a reader pool on `:memory:` would see other databases.
    pub(in crate::store) async fn open_temporary(metrics: StoreMetrics) -> Result<Self, OpenError> {
        let folder = tempfile::Builder::new()
            .prefix("forebay-")
            .tempdir()
            .map_err(|source| OpenError::file(&std::env::temp_dir(), source))?;
        Self::open_in(folder.path().join("forebay.db"), Some(folder), metrics).await
    }

    async fn open_in(
        path: PathBuf,
        temporary: Option<tempfile::TempDir>,
        metrics: StoreMetrics,
    ) -> Result<Self, OpenError> {
        let lock = lock(&path)?;
        let unopened = |source| OpenError::database(&path, source);
        let mut migrating = SqliteConnection::connect_with(&file_options(&path)).await.map_err(unopened)?;
        check_version(&mut migrating).await?;
        sqlx::migrate!("migrations/sqlite")
            .run(&mut migrating)
            .await
            .map_err(|source| OpenError::schema(&path.display().to_string(), source))?;
        let connection =
            writing(&path).map_err(|error| OpenError::Writer { name: path.display().to_string(), source: error })?;
        // Not the last connection any more, so that its end does not copy the log back first.
        migrating.close().await.map_err(unopened)?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS_MAX)
            .test_before_acquire(false)
            // Only the writer sets how the file is organised.
            .connect_with(SqliteConnectOptions::new().filename(&path).read_only(true).busy_timeout(BUSY_TIMEOUT))
            .await
            .map_err(|source| OpenError::database(&path, source))?;
        let rules = Arc::new(RulesCache::default());
        let vitals = Vitals::default();
        let (control, control_queue) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let (bulk, bulk_queue) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let mut wal = path.into_os_string();
        wal.push("-wal");
        let writer = Writer {
            connection,
            control: control_queue,
            bulk: bulk_queue,
            rules: Arc::clone(&rules),
            wal: wal.into(),
            dirty: false,
            metrics,
            vitals: vitals.clone(),
        };
        let writer = tokio::sync::Mutex::new(Some(on_its_own_thread(writer)?));
        Ok(Self {
            control,
            bulk,
            readers,
            rules,
            vitals,
            writer,
            lock: std::sync::Mutex::new(Some(lock)),
            _temporary: temporary,
        })
    }
}

/// How the file is made and organised.
fn file_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .page_size(PAGE_BYTES)
        .auto_vacuum(SqliteAutoVacuum::Incremental)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY_TIMEOUT)
}

/// The writer's connection. Its statements run on the writer's own thread: through sqlx each would be handed to another
/// thread and back, which costs more than most of them.
struct Writing {
    connection: rusqlite::Connection,
    /// By the place of the statement's text in memory, since that is the same whenever it runs.
    shapes: HashMap<(usize, usize), Arc<Shape>>,
}

/// What a statement takes and gives, asked of SQLite once.
struct Shape {
    /// The argument of each parameter: to SQLite `$2` is a name, and its place is that of its first mention.
    args: Vec<usize>,
    columns: Arc<[String]>,
}

fn writing(path: &Path) -> Result<Writing, rusqlite::Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = rusqlite::Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    // NORMAL would lose acknowledged commits in a power cut, and with group commit it is no faster.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "journal_size_limit", WAL_BYTES_MAX as i64)?;
    // Savepoints keep the pages that they may restore: in memory, not in files that are made and removed each time.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    // The writer looks after the log itself.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    Ok(Writing { connection, shapes: HashMap::new() })
}

/// Its statements block, and on a thread of its own it does not queue behind the parsing of bodies.
fn on_its_own_thread(writer: Writer) -> Result<std::thread::JoinHandle<()>, OpenError> {
    let failed = |error: std::io::Error| OpenError::Settings(format!("the writer's thread does not start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(failed)?;
    let run = move || runtime.block_on(writer.run());
    std::thread::Builder::new().name("forebay-writer".to_owned()).spawn(run).map_err(failed)
}

/// One process per file: two writers would not see each other's queues, waiters and clocks.
fn lock(path: &Path) -> Result<std::fs::File, OpenError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let file = std::fs::File::create(&name).map_err(|source| OpenError::file(&name, source))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(OpenError::Locked(path.display().to_string())),
        Err(std::fs::TryLockError::Error(source)) => Err(OpenError::file(&name, source)),
    }
}

async fn check_version(connection: &mut SqliteConnection) -> Result<(), OpenError> {
    let version: String = sqlx::query_scalar("SELECT sqlite_version()")
        .fetch_one(connection)
        .await
        .map_err(|error| OpenError::Settings(error.to_string()))?;
    let number = version.split('.').try_fold(0_i64, |number, part| Some(number * 1_000 + part.parse::<i64>().ok()?));
    if number.is_some_and(|number| number >= VERSION_MIN) {
        return Ok(());
    }
    Err(OpenError::Settings(format!("SQLite {version} can corrupt its log: 3.51.3 or newer is needed")))
}

#[async_trait]
impl Dialect for Sqlite {
    const PAYLOADS: Codec = Codec::Columns;

    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        let (reply, answer) = oneshot::channel();
        let queue = match O::CLASS {
            Class::Control => &self.control,
            Class::Bulk => &self.bulk,
        };
        let command = Box::new(Pending { op, outcome: None, reply });
        queue.send(command).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        let (readers, rules) = (self.readers.clone(), Arc::clone(&self.rules));
        // A caller that is dropped in the middle would leave a connection in an unknown state.
        let task = tokio::spawn(async move {
            let mut transaction = readers.begin().await?;
            let output = op.run(&mut Tx::new(&mut *transaction, &rules)).await;
            transaction.rollback().await?;
            output
        });
        task.await.map_err(|_| StoreError::Closed)?
    }

    async fn now(&self) -> Result<Option<Timestamp>, StoreError> {
        Ok(None)
    }

    fn vitals(&self) -> &Vitals {
        &self.vitals
    }

    async fn close(&self) {
        let Some(writer) = self.writer.lock().await.take() else { return };
        // The writer ends when it has served the queue up to this request.
        let (reply, answer) = oneshot::channel();
        if self.control.send(Box::new(Close { reply: Some(reply) })).await.is_ok() {
            let _ = answer.await;
        }
        self.readers.close().await;
        // It copies the log back before it ends.
        if !matches!(tokio::task::spawn_blocking(move || writer.join()).await, Ok(Ok(()))) {
            tracing::error!("the store's writer ended abnormally");
        }
        self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

/// A command of any operation, waiting for its commit.
#[async_trait]
trait Command: Send {
    /// Runs the operation inside a savepoint; whether it may commit.
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool;

    /// Answers after the commit, or with the reason why there was none.
    fn answer(self: Box<Self>, committed: Result<(), StoreError>);

    fn bytes(&self) -> usize;

    /// Its caller waits for a moment, not for megabytes.
    fn is_urgent(&self) -> bool;

    /// What it says about the store once it is committed: the error with which it ended, or that writing works.
    fn finding(&self) -> Option<Result<(), &StoreError>> {
        None
    }

    /// Asks the writer to end instead.
    fn closes(&self) -> bool {
        false
    }
}

struct Pending<O: Op> {
    op: O,
    outcome: Option<Result<O::Output, StoreError>>,
    reply: oneshot::Sender<Result<O::Output, StoreError>>,
}

#[async_trait]
impl<O: Op> Command for Pending<O> {
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        if O::ABANDONABLE && self.reply.is_closed() {
            return false;
        }
        // A bug in one operation must not end the writer for all.
        let run = AssertUnwindSafe(self.op.run(tx)).catch_unwind();
        let outcome = run.await.unwrap_or_else(|_| Err(StoreError::Corrupt("an operation panicked".to_owned())));
        let commits = outcome.as_ref().is_ok_and(|output| !O::undoes(output));
        self.outcome = Some(outcome);
        commits
    }

    fn answer(self: Box<Self>, committed: Result<(), StoreError>) {
        let outcome = match (committed, self.outcome) {
            // An operation's own error says more than that of the commit around it.
            (_, Some(Err(error))) | (Err(error), _) => Err(error),
            (Ok(()), Some(output)) => output,
            (Ok(()), None) => Err(StoreError::Closed),
        };
        // A caller that went away does not change what happened.
        let _ = self.reply.send(outcome);
    }

    fn bytes(&self) -> usize {
        self.op.bytes()
    }

    fn is_urgent(&self) -> bool {
        O::CLASS == Class::Control
    }

    fn finding(&self) -> Option<Result<(), &StoreError>> {
        match self.outcome.as_ref()? {
            Ok(_) => O::PROBES.then_some(Ok(())),
            Err(error) => Some(Err(error)),
        }
    }
}

struct Close {
    reply: Option<oneshot::Sender<()>>,
}

#[async_trait]
impl Command for Close {
    async fn run(&mut self, _tx: &mut Tx<'_>) -> bool {
        true
    }

    fn answer(mut self: Box<Self>, _committed: Result<(), StoreError>) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(());
        }
    }

    fn bytes(&self) -> usize {
        0
    }

    fn is_urgent(&self) -> bool {
        true
    }

    fn closes(&self) -> bool {
        true
    }
}

/// What one commit takes along, one command after the other as it gets to them.
struct Intake {
    commands: Vec<Box<dyn Command>>,
    /// How many of them were handed out to be run.
    begun: usize,
    bytes: usize,
    urgent: bool,
    started: Instant,
}

type Queue = mpsc::Receiver<Box<dyn Command>>;

impl Intake {
    fn new(first: Box<dyn Command>) -> Self {
        let mut intake = Self { commands: Vec::new(), begun: 0, bytes: 0, urgent: false, started: Instant::now() };
        intake.push(first);
        intake
    }

    fn push(&mut self, command: Box<dyn Command>) {
        self.bytes += command.bytes();
        self.urgent |= command.is_urgent();
        self.commands.push(command);
    }

    /// The next command to run: control before bulk, within the bounds of a commit.
    fn next(&mut self, control: &mut Queue, bulk: &mut Queue) -> Option<&mut Box<dyn Command>> {
        let full = self.commands.len() >= COMMIT_COMMANDS_MAX || self.bytes >= COMMIT_BYTES_MAX;
        let closes = self.commands.last().is_some_and(|command| command.closes());
        if self.begun == self.commands.len() && !full && !closes {
            let hurry = || self.urgent && self.started.elapsed() >= URGENT_COMMIT;
            let next = control.try_recv().or_else(|empty| if hurry() { Err(empty) } else { bulk.try_recv() });
            if let Ok(command) = next {
                self.push(command);
            }
        }
        let command = self.commands.get_mut(self.begun)?;
        self.begun += 1;
        Some(command)
    }
}

/// Whether the writer serves on.
#[derive(PartialEq, Eq)]
enum Goes {
    On,
    Ends,
}

struct Writer {
    connection: Writing,
    control: Queue,
    bulk: Queue,
    rules: Arc<RulesCache>,
    wal: PathBuf,
    /// Commits happened since the log was last copied back.
    dirty: bool,
    metrics: StoreMetrics,
    vitals: Vitals,
}

impl Writer {
    async fn run(mut self) {
        while self.vitals.health() != Health::Broken {
            let first = tokio::select! {
                biased;
                Some(command) = self.control.recv() => command,
                Some(command) = self.bulk.recv() => command,
                () = tokio::time::sleep(IDLE) => {
                    self.idle().await;
                    // Closed queues never wake the branches above: nobody is left to serve.
                    if self.control.is_closed() && self.bulk.is_closed() {
                        break;
                    }
                    continue;
                }
            };
            if self.commit(first).await == Goes::Ends {
                break;
            }
            self.checkpoint_when_large().await;
        }
        if self.vitals.health() == Health::Broken {
            // Copying the log back would only write more; the next start reads what is on disk.
            return;
        }
        self.maintain("PRAGMA wal_checkpoint(TRUNCATE)").await;
        if let Err((_, error)) = self.connection.connection.close() {
            tracing::warn!(error = %error, "the database did not close cleanly");
        }
    }

    /// Commits `first` and what waits beside it, and answers them all.
    async fn commit(&mut self, first: Box<dyn Command>) -> Goes {
        let mut commands = Intake::new(first);
        let outcome = self.transaction(&mut commands).await;
        let Intake { commands, started, .. } = commands;
        self.metrics.committed(commands.len(), started.elapsed(), outcome.is_ok());
        if let Err(error) = &outcome {
            tracing::error!(error = %error, commands = commands.len(), "a commit failed");
            // After a failed COMMIT SQLite may or may not still be inside the transaction.
            let _ = self.connection.execute(Statement::new("ROLLBACK"), Vec::new()).await;
            // Keys of rows that are gone will be given to others.
            self.rules.clear();
        }
        // A write that fails in the middle of an operation may end the whole transaction, and then says why it failed.
        for finding in commands.iter().filter_map(|command| command.finding()).chain(outcome.as_ref().err().map(Err)) {
            match finding {
                Ok(()) if outcome.is_ok() => self.vitals.committed(),
                Ok(()) => {}
                Err(error) => self.vitals.failed(error),
            }
        }
        self.dirty = true;
        let ends = commands.iter().any(|command| command.closes());
        for command in commands {
            command.answer(outcome.clone());
        }
        if ends { Goes::Ends } else { Goes::On }
    }

    async fn transaction(&mut self, intake: &mut Intake) -> Result<(), StoreError> {
        self.connection.execute(Statement::new("BEGIN IMMEDIATE"), Vec::new()).await?;
        let mut tallies = TallyDelta::default();
        while let Some(command) = intake.next(&mut self.control, &mut self.bulk) {
            let mut tx = Tx::after(tallies.clone(), &mut self.connection, &self.rules);
            tx.execute(Statement::new("SAVEPOINT command"), Vec::new()).await?;
            if command.run(&mut tx).await {
                tallies = tx.take_tallies();
            } else {
                tx.execute(Statement::new("ROLLBACK TO SAVEPOINT command"), Vec::new()).await?;
            }
            tx.execute(Statement::new("RELEASE SAVEPOINT command"), Vec::new()).await?;
        }
        tallies.write(&mut Tx::new(&mut self.connection, &self.rules), 0).await?;
        self.connection.execute(Statement::new("COMMIT"), Vec::new()).await?;
        Ok(())
    }

    fn wal_bytes(&self) -> u64 {
        std::fs::metadata(&self.wal).map_or(0, |metadata| metadata.len())
    }

    async fn checkpoint_when_large(&mut self) {
        let bytes = self.wal_bytes();
        self.metrics.wal_bytes(bytes);
        if bytes > WAL_BYTES_MAX {
            self.maintain("PRAGMA wal_checkpoint(TRUNCATE)").await;
        } else if bytes > WAL_BUSY_BYTES && self.dirty {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
        }
    }

    async fn idle(&mut self) {
        if std::mem::take(&mut self.dirty) {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
            self.maintain(VACUUM_PAGES).await;
            self.metrics.wal_bytes(self.wal_bytes());
        }
    }

    /// Runs a pragma whose failure costs space, not data.
    async fn maintain(&mut self, pragma: &'static str) {
        if let Err(error) = self.connection.fetch(Statement::new(pragma), Vec::new()).await {
            self.vitals.failed(&error);
            tracing::warn!(error = %error, pragma, "looking after the database file failed");
        }
    }
}

connection!(SqliteConnection, sqlx::Sqlite, sqlite, cell);

fn cell(row: &SqliteRow, index: usize) -> Result<Cell, sqlx::Error> {
    let value = row.try_get_raw(index)?;
    if value.is_null() {
        return Ok(Cell::Null);
    }
    // SQLite types values, not columns: sums and expressions have no declared type.
    Ok(match value.type_info().name() {
        "INTEGER" => Cell::Int(row.try_get_unchecked(index)?),
        "REAL" => Cell::Real(row.try_get_unchecked(index)?),
        "BLOB" => Cell::Blob(row.try_get_unchecked(index)?),
        _ => Cell::Text(row.try_get_unchecked(index)?),
    })
}

#[async_trait]
impl Connection for Writing {
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
}

impl Writing {
    /// A statement with its arguments bound.
    fn prepare(&mut self, statement: Statement, args: &[Arg]) -> Result<(CachedStatement<'_>, Arc<Shape>), StoreError> {
        // As sqlx tells about those of the readers.
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
    use super::*;

    #[tokio::test]
    async fn commits_are_on_disk_before_they_are_answered() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("x.db");
        let made = SqliteConnection::connect_with(&file_options(&path)).await.expect("the file can be made");
        let connection = writing(&path).expect("the file can be written");
        made.close().await.expect("the other connection ends");
        let pragma = |name: &str| connection.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        // 2 is FULL: the log is synced at every commit.
        for (name, expected) in [("synchronous", 2), ("page_size", 16_384), ("foreign_keys", 1)] {
            assert_eq!(pragma(name), Ok(expected), "{name}");
        }
        let journal = connection.connection.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0));
        assert_eq!(journal.as_deref(), Ok("wal"));
    }

    /// What one commit takes from full queues when it began a while ago: whether each is urgent.
    fn taken(first: bool, ago: Duration) -> Vec<bool> {
        let (control, mut control_queue) = mpsc::channel::<Box<dyn Command>>(2);
        let (bulk, mut bulk_queue) = mpsc::channel::<Box<dyn Command>>(2);
        for _ in 0..2 {
            assert!(control.try_send(Box::new(Idle { is_urgent: true })).is_ok());
            assert!(bulk.try_send(Box::new(Idle { is_urgent: false })).is_ok());
        }
        let mut intake = Intake::new(Box::new(Idle { is_urgent: first }));
        intake.started = intake.started.checked_sub(ago).expect("the machine has been up for that long");
        let mut taken = Vec::new();
        while let Some(command) = intake.next(&mut control_queue, &mut bulk_queue) {
            taken.push(command.is_urgent());
        }
        taken
    }

    struct Idle {
        is_urgent: bool,
    }

    #[async_trait]
    impl Command for Idle {
        async fn run(&mut self, _tx: &mut Tx<'_>) -> bool {
            true
        }

        fn answer(self: Box<Self>, _committed: Result<(), StoreError>) {}

        fn bytes(&self) -> usize {
            0
        }

        fn is_urgent(&self) -> bool {
            self.is_urgent
        }
    }

    #[test]
    fn a_commit_takes_control_first_and_soon_no_more_bulk_once_a_lease_is_in_it() {
        let while_ago = 2 * URGENT_COMMIT;
        assert_eq!(taken(false, Duration::ZERO), [false, true, true, false, false]);
        assert_eq!(taken(false, while_ago), [false, true, true]);
        assert_eq!(taken(true, while_ago), [true, true, true]);
    }
}
