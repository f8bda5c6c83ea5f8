//! SQLite: one writer owns one connection and commits in groups; a small pool reads.
//!
//! A power cut during the first start can leave a log beside a file that is not in WAL mode. SQLite would use the log
//! in one connection and not in the next, so the service puts the file itself into WAL mode before it opens a second
//! connection.

mod direct;
mod files;
mod log_mark;
mod readers;
mod reading;
mod reserve;
mod schema;
mod segments;
mod settings;
mod temporary;
mod writer;

use async_trait::async_trait;
use forebay_telemetry::metrics::StoreMetrics;
use sqlx::{AssertSqlSafe, Connection as _, Row as _, SqliteConnection};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use self::{
    direct::Direct,
    readers::Readers,
    settings::{MIGRATIONS, PAGE_BYTES, check_version, file_options},
    temporary::Temporary,
    writer::{Handle, Payloads},
};
use super::SqlDialect;
use crate::{
    error::StoreError,
    health::HealthReporter,
    op::{AnyOp, AnyOutput},
    open::{
        error::OpenError,
        options::{PayloadKind, PayloadOptions},
    },
    peers::Peers,
    rules_cache::RulesCache,
    segment_files::{PlaceReader, Reader},
};

pub(crate) use self::{
    files::{Files, Names},
    log_mark::mark_copy,
    reading::SqliteReading,
    schema::missing_from,
};

/// Page size of new databases that have payloads in them: 1.5 times faster than 4 KiB for payloads of 64 to 180 kB.
const PAYLOAD_PAGE_BYTES: u32 = 16_384;

/// An embedded database in one file.
#[derive(Debug)]
pub(crate) struct Sqlite {
    path: PathBuf,
    writer: Handle,
    /// Taken by the caller that closes the store.
    thread: tokio::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
    readers: Readers,
    segment_files: Arc<Reader>,
    /// Set by the writer while payloads may be where the configuration does not want them.
    is_moving_payloads: Arc<AtomicBool>,
    health_reporter: HealthReporter,
    /// Held as long as the store is open, so that one process has the file.
    files: std::sync::Mutex<Option<Arc<Files>>>,
    /// Whether room on the disk is kept for the next start.
    keeps_reserve: bool,
    /// Removed with the store, for `sqlite::memory:`.
    _temporary: Option<Temporary>,
}

impl Sqlite {
    /// Opens or creates the database and brings its schema up to date.
    pub(crate) async fn open(path: &Path, payloads: PayloadOptions, metrics: StoreMetrics) -> Result<Self, OpenError> {
        match Self::open_in(path, None, payloads.clone(), metrics.clone()).await {
            Err(error) if reserve::is_full(&error) && reserve::release(path) => {
                tracing::warn!("the disk is full: the room that was kept for a start is used");
                Self::open_in(path, None, payloads, metrics).await
            }
            Ok(opened) if opened.keeps_reserve => {
                reserve::keep(&opened.path);
                Ok(opened)
            }
            opened => opened,
        }
    }

    /// Opens a database in a temporary folder. With `:memory:`, each reader of the pool would have a database of its
    /// own.
    pub(crate) async fn open_temporary(payloads: PayloadOptions, metrics: StoreMetrics) -> Result<Self, OpenError> {
        let folder = Temporary::new()?;
        Self::open_in(&folder.database(), Some(folder), payloads, metrics).await
    }

    async fn open_in(
        path: &Path,
        temporary: Option<Temporary>,
        payloads: PayloadOptions,
        metrics: StoreMetrics,
    ) -> Result<Self, OpenError> {
        let keeps_reserve = temporary.is_none() && payloads.kind.is_some();
        // This comes before opening the file, because opening replays the log beside it. It comes first, so that it is
        // dropped last.
        let files = Arc::new(Files::claim(path)?);
        let path = files.names.database.clone();
        let unopened = |source| OpenError::database(&path, source);
        let session = files.begin_session()?;
        let page_bytes = if payloads.kind == Some(PayloadKind::Database) { PAYLOAD_PAGE_BYTES } else { PAGE_BYTES };
        let options = file_options(&path).page_size(page_bytes);
        let mut migrating = SqliteConnection::connect_with(&options).await.map_err(unopened)?;
        check_version(&mut migrating).await?;
        if !files.is_in_wal_mode()? {
            enter_wal_mode(&mut migrating).await.map_err(unopened)?;
            if !files.is_in_wal_mode()? {
                let path = path.display();
                return Err(OpenError::Settings(format!("SQLite cannot put {path} into WAL mode on this file system")));
            }
        }
        MIGRATIONS
            .run(&mut migrating)
            .await
            .map_err(|source| OpenError::schema(&path.display().to_string(), source))?;
        let unused = |source| OpenError::Sqlite { name: path.display().to_string(), source };
        if mark(&mut migrating, session).await.map_err(unopened)? {
            files.settle_session()?;
        }
        let mut connection = Direct::writing(&path).map_err(unused)?;
        let segments = files.names.segments.clone();
        let (segment_files, kind) = segments::open(&mut connection, segments, payloads.kind)
            .await
            .map_err(|source| OpenError::Payloads { name: path.display().to_string(), source })?;
        // This is no longer the last connection, so closing it does not remove the log.
        migrating.close().await.map_err(unopened)?;
        files.remember_opened()?;
        let rules = Arc::new(RulesCache::default());
        let readers = Readers::open(path.clone(), Arc::clone(&rules)).map_err(unused)?;
        let health_reporter = HealthReporter::default();
        let payloads = Payloads::new(Arc::clone(&segment_files), kind, payloads.segment_file_bytes);
        let is_moving_payloads = payloads.is_moving();
        let (writer, thread) =
            Handle::start(connection, rules, Arc::clone(&files), payloads, metrics, health_reporter.clone())?;
        Ok(Self {
            path,
            writer,
            thread: tokio::sync::Mutex::new(Some(thread)),
            readers,
            segment_files,
            is_moving_payloads,
            health_reporter,
            files: std::sync::Mutex::new(Some(files)),
            keeps_reserve,
            _temporary: temporary,
        })
    }
}

/// Puts the file itself into WAL mode. A power cut during the first start, also that of a restored copy, can leave a log
/// beside a file that is in another mode. SQLite then uses the log, and setting the mode changes nothing. But as soon as
/// the log is empty, the next connection would follow the file, and the two would lock each other out.
async fn enter_wal_mode(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    for mode in ["PRAGMA journal_mode = DELETE", "PRAGMA journal_mode = WAL"] {
        sqlx::query(mode).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Writes the session's number into the file itself, not only into the log. Returns whether that succeeded: while
/// another process reads, and while the disk is full, the log cannot be emptied.
async fn mark(connection: &mut SqliteConnection, session: u32) -> Result<bool, sqlx::Error> {
    // Pragmas take no parameters. The number is a signed one of 32 bits.
    let set = AssertSqlSafe(format!("PRAGMA user_version = {}", session as i32));
    sqlx::query(set).execute(&mut *connection).await?;
    match sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(connection).await {
        Ok(row) => Ok(row.try_get::<i64, _>(0)? == 0),
        // The rows stay in the log, and can be read there.
        Err(error) if reserve::is_full(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

#[async_trait]
impl SqlDialect for Sqlite {
    /// There is one writer, so more transactions would wait.
    fn ingests(&self) -> usize {
        1
    }

    async fn write_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        self.writer.write(op).await
    }

    async fn read_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        self.readers.read(op).await
    }

    async fn missing(&self) -> Result<Vec<String>, StoreError> {
        let path = self.path.clone();
        let missing = tokio::task::spawn_blocking(move || missing_from(&path));
        Ok(missing.await.map_err(|_| StoreError::Closed)??)
    }

    fn is_moving_payloads(&self) -> bool {
        self.is_moving_payloads.load(Ordering::Acquire)
    }

    fn places(&self) -> Option<PlaceReader> {
        Some(PlaceReader::Files(Arc::clone(&self.segment_files)))
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        None
    }

    fn health_reporter(&self) -> &HealthReporter {
        &self.health_reporter
    }

    async fn close(&self) {
        let Some(thread) = self.thread.lock().await.take() else { return };
        self.writer.stop().await;
        self.readers.close().await;
        // The thread copies the log back into the database before it ends.
        if !matches!(tokio::task::spawn_blocking(move || thread.join()).await, Ok(Ok(()))) {
            tracing::error!("the store's writer ended abnormally");
        }
        // The log is gone, so there is more room than before.
        if self.keeps_reserve {
            reserve::keep(&self.path);
        }
        self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;

    use super::*;
    use crate::{
        dialect::Runs as _,
        folders::with_suffix,
        op::{Class, Op},
        sql::{Statement, Tx, args},
    };
    use forebay_telemetry::metrics::Metrics;

    /// Writes a row once `gate` opens, and then fails if `fails` says so.
    struct Writes {
        row: &'static str,
        gate: Option<Arc<Notify>>,
        fails: bool,
    }

    #[async_trait]
    impl Op for Writes {
        type Output = ();

        const CLASS: Class = Class::Control;

        async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
            if let Some(gate) = &self.gate {
                gate.notified().await;
            }
            let insert = Statement::new("INSERT INTO rules (body, created_us) VALUES ($1, 0)");
            tx.execute(insert, args![self.row]).await?;
            if self.fails { Err(StoreError::Corrupt(self.row.to_owned())) } else { Ok(()) }
        }
    }

    struct Rows;

    #[async_trait]
    impl Op for Rows {
        type Output = Vec<String>;

        async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
            let rows = tx.fetch_all(Statement::new("SELECT body FROM rules ORDER BY rules_pk"), Vec::new()).await?;
            rows.into_iter().map(|mut row| row.get("body")).collect()
        }
    }

    /// A power cut during the first start can leave such files: the removal of the rollback journal is not on disk, and
    /// the name of the log is.
    #[tokio::test]
    async fn a_file_that_is_not_in_wal_mode_and_has_a_log_beside_it_can_be_opened() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("forebay.db");
        let made = rusqlite::Connection::open(&path).expect("a database can be made");
        made.execute_batch("PRAGMA auto_vacuum = INCREMENTAL; VACUUM").expect("the file is written");
        drop(made);
        let open = || Sqlite::open(&path, PayloadOptions::default(), Metrics::new().store());
        for row in ["new", "restored"] {
            std::fs::write(with_suffix(&path, "-wal"), [0; 32]).expect("a log can be written");
            let store = open().await.expect("the store opens");
            store.write(Writes { row, gate: None, fails: false }).await.expect("the store is written");
            store.close().await;
            // A backup is in this mode as well.
            let copied = rusqlite::Connection::open(&path).expect("the database can be opened");
            copied.pragma_update(None, "journal_mode", "DELETE").expect("the mode can be set");
        }
        let store = open().await.expect("the store opens again");
        assert_eq!(store.read(Rows).await.expect("the store is read"), ["new", "restored"]);
        store.close().await;
    }

    /// The rows that remain after a commit of three commands, one of which fails.
    async fn left_behind(failing: usize) -> Vec<String> {
        let store = Arc::new(
            Sqlite::open_temporary(PayloadOptions::default(), Metrics::new().store())
                .await
                .expect("a temporary store opens"),
        );
        let gate = Arc::new(Notify::new());
        let mut writes = Vec::new();
        for (place, row) in ["first", "second", "third"].into_iter().enumerate() {
            let gate = (place == 0).then(|| Arc::clone(&gate));
            let (store, op) = (Arc::clone(&store), Writes { row, gate, fails: place == failing });
            let mut write = Box::pin(async move { store.write(op).await });
            // After one poll, it is in the queue.
            assert!(futures::poll!(&mut write).is_pending());
            writes.push(write);
        }
        gate.notify_one();
        for (place, write) in writes.into_iter().enumerate() {
            assert_eq!(write.await.is_err(), place == failing, "{place}");
        }
        let rows = store.read(Rows).await.expect("rows can be read");
        store.close().await;
        rows
    }

    #[tokio::test]
    async fn a_command_that_fails_takes_nothing_of_others_with_it() {
        assert_eq!(left_behind(0).await, ["second", "third"]);
        assert_eq!(left_behind(1).await, ["first", "third"]);
        assert_eq!(left_behind(2).await, ["first", "second"]);
    }

    /// Leaves twice as many free pages as are kept for the next rollouts.
    struct Frees;

    #[async_trait]
    impl Op for Frees {
        type Output = ();

        async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
            for sql in [
                "INSERT INTO rules (body, created_us) VALUES (CAST(zeroblob(33554432) AS TEXT), 0)",
                "DELETE FROM rules",
            ] {
                tx.execute(Statement::new(sql), Vec::new()).await?;
            }
            Ok(())
        }
    }

    struct FreePages;

    #[async_trait]
    impl Op for FreePages {
        type Output = i64;

        async fn run(&self, tx: &mut Tx<'_>) -> Result<i64, StoreError> {
            tx.fetch_one(Statement::new("PRAGMA freelist_count"), Vec::new()).await?.get("freelist_count")
        }
    }

    #[tokio::test]
    async fn free_pages_are_given_back_although_commands_keep_coming() {
        const SLICE: i64 = 64;
        let store = Sqlite::open_temporary(PayloadOptions::default(), Metrics::new().store())
            .await
            .expect("a temporary store opens");
        store.write(Frees).await.expect("the file can be written");
        let before = store.write(FreePages).await.expect("pages can be counted");
        for _ in 0..40 {
            store.write(Writes { row: "row", gate: None, fails: false }).await.expect("the file can be written");
        }
        let after = store.write(FreePages).await.expect("pages can be counted");
        assert!(after <= before - SLICE, "{before} pages were free, and then {after}");
        store.close().await;
    }

    /// Reads and then fails, in the middle of a snapshot.
    struct Breaks {
        panics: bool,
    }

    #[async_trait]
    impl Op for Breaks {
        type Output = ();

        async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
            tx.fetch_all(Statement::new("SELECT body FROM rules"), Vec::new()).await?;
            assert!(!self.panics, "the test wants it");
            Err(StoreError::Corrupt("the test wants it".to_owned()))
        }
    }

    #[tokio::test]
    async fn readers_that_fail_are_in_nobodys_way() {
        let store = Sqlite::open_temporary(PayloadOptions::default(), Metrics::new().store())
            .await
            .expect("a temporary store opens");
        for panics in [false, true].repeat(8) {
            assert!(store.read(Breaks { panics }).await.is_err());
        }
        assert_eq!(store.read(Rows).await.expect("rows can be read"), Vec::<String>::new());
        store.close().await;
        assert!(matches!(store.read(Rows).await, Err(StoreError::Closed)));
    }
}
