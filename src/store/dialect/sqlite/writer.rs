//! The writer: it owns one connection and a thread, and commits the commands in its queues in groups.
//!
//! It takes commands while a commit is open, control before bulk. It runs each so that it can be undone alone, commits
//! all of them once, and then answers them, so a group costs one fsync. A commit that contains an urgent command stops
//! taking bulk commands after a short time. Between commits the writer maintains the file.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::FutureExt as _;
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument as _, Span, field};

use super::{Files, PAGE_BYTES, WAL_BYTES_MAX, direct::Direct};
use crate::{
    buffer::port::{Health, StoreError},
    metrics::StoreMetrics,
    store::{
        OpenError,
        dialect::{Class, Op},
        health::HealthReporter,
        rules_cache::RulesCache,
        sql::{Connection as _, Row, Statement, Tx},
        tally::TallyDelta,
    },
    telemetry,
};

/// Commands waiting in each queue. When a queue is full, callers wait to enqueue.
const QUEUE_COMMANDS_MAX: usize = 1_024;

/// The most commands of one commit. Their answers wait for one fsync together.
const COMMIT_COMMANDS_MAX: usize = 64;

/// The most payload bytes of one commit.
const COMMIT_BYTES_MAX: usize = 8 << 20;

/// How long a commit keeps taking bulk commands once it contains an urgent one. It is long enough that a stream of
/// urgent commands does not make every bulk command pay for its own fsync.
const URGENT_COMMIT: Duration = Duration::from_millis(5);

/// Number of pages in the write-ahead log at which they are copied back into the database although commands are
/// waiting: 32 MiB. The larger it is, the more often a page was rewritten before it is copied, which saves copies.
const WAL_BUSY_PAGES: i64 = (32 << 20) / PAGE_BYTES as i64;

/// Gives free pages back to the file system in slices of 1 MiB. A slice takes a few milliseconds, and a lease may have
/// to wait for it.
const VACUUM_PAGES: &str = "PRAGMA incremental_vacuum(64)";

/// Commits between two slices while commands keep coming, because each slice is a commit of its own.
const VACUUM_EVERY_COMMITS: u32 = 8;

/// Free pages that are kept while commands keep coming, 16 MiB, because the next rollouts need them.
const FREE_PAGES_KEPT: i64 = (16 << 20) / PAGE_BYTES as i64;

/// How long the writer waits for a command before it maintains the file.
const IDLE: Duration = Duration::from_millis(500);

/// The sending ends of the writer's queues.
#[derive(Debug)]
pub(super) struct Handle {
    control: mpsc::Sender<Box<dyn Command>>,
    bulk: mpsc::Sender<Box<dyn Command>>,
}

impl Handle {
    /// Starts the writer on a thread of its own, because its statements block, and on a shared thread they would wait
    /// for the parsing of bodies.
    pub(super) fn start(
        connection: Direct,
        rules: Arc<RulesCache>,
        files: Arc<Files>,
        metrics: StoreMetrics,
        health_reporter: HealthReporter,
    ) -> Result<(Self, std::thread::JoinHandle<()>), OpenError> {
        let failed =
            |error: std::io::Error| OpenError::Settings(format!("the writer's thread cannot be started: {error}"));
        let (control, control_queue) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let (bulk, bulk_queue) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let writer = Writer {
            connection,
            control: control_queue,
            bulk: bulk_queue,
            rules,
            files,
            dirty: false,
            commits: 0,
            metrics,
            health_reporter,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(failed)?;
        let run = move || runtime.block_on(writer.run());
        let thread = std::thread::Builder::new().name("forebay-writer".to_owned()).spawn(run).map_err(failed)?;
        Ok((Self { control, bulk }, thread))
    }

    pub(super) async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        let (reply, answer) = oneshot::channel();
        let queue = match O::CLASS {
            Class::Control => &self.control,
            Class::Bulk => &self.bulk,
        };
        let command = Box::new(Pending { op, outcome: None, span: Span::current(), reply });
        queue.send(command).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Asks the writer to end. Returns once every earlier command is committed. The writer then copies the log back
    /// into the database.
    pub(super) async fn stop(&self) {
        let (reply, answer) = oneshot::channel();
        if self.control.send(Box::new(Close { reply: Some(reply) })).await.is_ok() {
            let _ = answer.await;
        }
    }
}

/// A command of any operation, waiting for its commit.
#[async_trait]
pub(super) trait Command: Send {
    /// Runs the operation. Returns whether it may be committed.
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool;

    /// Answers the caller after the commit, or with the reason why there was none.
    fn answer(self: Box<Self>, committed: Result<(), StoreError>);

    fn bytes(&self) -> usize;

    /// Whether its caller expects an answer at once and it writes little.
    fn is_urgent(&self) -> bool;

    /// What it shows about the store once it is committed: the error with which it ended, or that writing works.
    fn finding(&self) -> Option<Result<(), &StoreError>> {
        None
    }

    /// The span of its caller.
    fn span(&self) -> Option<&Span> {
        None
    }

    /// Whether it asks the writer to end.
    fn closes(&self) -> bool {
        false
    }
}

struct Pending<O: Op> {
    op: O,
    outcome: Option<Result<O::Output, StoreError>>,
    span: Span,
    reply: oneshot::Sender<Result<O::Output, StoreError>>,
}

#[async_trait]
impl<O: Op> Command for Pending<O> {
    async fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        if O::ABANDONABLE && self.reply.is_closed() {
            return false;
        }
        // A bug in one operation must not end the writer for all callers.
        let run = AssertUnwindSafe(self.op.run(tx)).catch_unwind();
        let outcome = run.await.unwrap_or_else(|_| Err(StoreError::Corrupt("an operation panicked".to_owned())));
        self.outcome.insert(outcome).is_ok()
    }

    fn answer(self: Box<Self>, committed: Result<(), StoreError>) {
        let outcome = match (committed, self.outcome) {
            // An operation's own error is more specific than that of its commit.
            (_, Some(Err(error))) | (Err(error), _) => Err(error),
            (Ok(()), Some(output)) => output,
            (Ok(()), None) => Err(StoreError::Closed),
        };
        // If the caller has gone, the outcome is the same.
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

    fn span(&self) -> Option<&Span> {
        Some(&self.span)
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

/// The commands of one commit, which it takes one after the other.
struct Intake {
    commands: Vec<Box<dyn Command>>,
    /// How many of them have been handed out to run.
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

/// Whether the writer continues.
#[derive(PartialEq, Eq)]
enum Goes {
    On,
    Ends,
}

struct Writer {
    connection: Direct,
    control: Queue,
    bulk: Queue,
    rules: Arc<RulesCache>,
    /// Held until the connection is closed.
    files: Arc<Files>,
    /// Whether commits happened since the log was last copied back.
    dirty: bool,
    /// Commits since pages were last given back.
    commits: u32,
    metrics: StoreMetrics,
    health_reporter: HealthReporter,
}

impl Writer {
    async fn run(mut self) {
        while self.health_reporter.health() != Health::Broken {
            let first = tokio::select! {
                biased;
                Some(command) = self.control.recv() => command,
                Some(command) = self.bulk.recv() => command,
                () = tokio::time::sleep(IDLE) => {
                    self.idle().await;
                    // Closed queues never complete the branches above, and no caller is left.
                    if self.control.is_closed() && self.bulk.is_closed() {
                        break;
                    }
                    continue;
                }
            };
            if self.commit(first).await == Goes::Ends {
                break;
            }
            self.look_after_file().await;
        }
        if self.health_reporter.health() == Health::Broken {
            // Copying the log back would only write more. The next start reads what is on disk.
            return;
        }
        self.maintain("PRAGMA wal_checkpoint(TRUNCATE)").await;
        if let Err(error) = self.connection.close() {
            tracing::warn!(error = %error, "the database did not close cleanly");
        }
    }

    /// Commits `first` and the commands that wait with it, and answers them all.
    async fn commit(&mut self, first: Box<dyn Command>) -> Goes {
        let mut commands = Intake::new(first);
        let span = tracing::error_span!("commit", commands = field::Empty);
        let mut outcome = self.transaction(&mut commands).instrument(span.clone()).await;
        if outcome.is_ok() {
            // Checked before any caller is answered, because writes to files that have lost their names are lost.
            outcome = self.check_places().await;
        }
        let Intake { commands, started, .. } = commands;
        for caller in commands.iter().filter_map(|command| command.span()) {
            span.follows_from(caller);
        }
        span.record("commands", commands.len() as i64);
        self.metrics.committed(commands.len(), started.elapsed(), outcome.is_ok());
        if let Err(error) = &outcome {
            let requests = telemetry::request_ids(&span);
            tracing::error!(parent: &span, error = %error, request.ids = requests, "a commit failed");
            // After a failed COMMIT SQLite may or may not still be inside the transaction.
            let _ = self.connection.execute(Statement::new("ROLLBACK"), Vec::new()).await;
            // Rows that were rolled back are gone, and other rows will get their keys.
            self.rules.clear();
        }
        // A write that fails in the middle of an operation may end the whole transaction. Its error is the reason.
        for finding in commands.iter().filter_map(|command| command.finding()).chain(outcome.as_ref().err().map(Err)) {
            match finding {
                Ok(()) if outcome.is_ok() => self.health_reporter.committed(),
                Ok(()) => {}
                Err(error) => self.health_reporter.failed(error),
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
        self.control_statement("BEGIN IMMEDIATE").await?;
        let mut tallies = TallyDelta::default();
        let mut is_first = true;
        while let Some(command) = intake.next(&mut self.control, &mut self.bulk) {
            // A savepoint copies the pages that it may restore. The first command needs none, because the whole
            // transaction can be undone.
            if !is_first {
                self.control_statement("SAVEPOINT command").await?;
            }
            let mut tx = Tx::after(tallies.clone(), &mut self.connection, &self.rules);
            let commits = command.run(&mut tx).await;
            if commits {
                tallies = tx.take_tallies();
            }
            if !commits {
                // Rows that were rolled back are gone, and other rows will get their keys.
                self.rules.clear();
            }
            match (is_first, commits) {
                (true, true) => is_first = false,
                (true, false) => {
                    // A write that failed may have ended the transaction.
                    let _ = self.control_statement("ROLLBACK").await;
                    self.control_statement("BEGIN IMMEDIATE").await?;
                }
                (false, true) => self.control_statement("RELEASE SAVEPOINT command").await?,
                (false, false) => {
                    self.control_statement("ROLLBACK TO SAVEPOINT command").await?;
                    self.control_statement("RELEASE SAVEPOINT command").await?;
                }
            }
        }
        tallies.write(&mut Tx::new(&mut self.connection, &self.rules), 0).await?;
        self.control_statement("COMMIT").await
    }

    async fn control_statement(&mut self, sql: &'static str) -> Result<(), StoreError> {
        self.connection.execute(Statement::new(sql), Vec::new()).await.map(drop)
    }

    fn wal_bytes(&self) -> u64 {
        std::fs::metadata(&self.files.names.wal).map_or(0, |metadata| metadata.len())
    }

    /// Does the maintenance that cannot wait until no command is waiting.
    async fn look_after_file(&mut self) {
        self.checkpoint_when_large().await;
        self.vacuum_when_due().await;
    }

    async fn checkpoint_when_large(&mut self) {
        let bytes = self.wal_bytes();
        self.metrics.wal_bytes(bytes);
        if bytes > WAL_BYTES_MAX {
            self.maintain("PRAGMA wal_checkpoint(TRUNCATE)").await;
        } else if self.wal_pages().await > WAL_BUSY_PAGES {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
        }
    }

    /// The number of pages that are only in the log. The file's length does not show it, because the file keeps its
    /// length when the log starts again.
    async fn wal_pages(&mut self) -> i64 {
        let pages = |mut row: Row| Some(row.get::<i64>("log").ok()? - row.get::<i64>("checkpointed").ok()?);
        let rows = self.connection.fetch(Statement::new("PRAGMA wal_checkpoint(NOOP)"), Vec::new()).await;
        rows.ok().and_then(|rows| rows.into_iter().next()).and_then(pages).unwrap_or(0)
    }

    async fn idle(&mut self) {
        if let Err(error) = self.check_places().await {
            self.health_reporter.failed(&error);
            return;
        }
        if std::mem::take(&mut self.dirty) {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
            self.vacuum_until_called().await;
            self.metrics.wal_bytes(self.wal_bytes());
        }
    }

    /// Gives all free pages back, slice by slice. Stops when a command waits.
    async fn vacuum_until_called(&mut self) {
        let mut free = self.free_pages().await;
        while free > 0 {
            self.maintain(VACUUM_PAGES).await;
            self.checkpoint_when_large().await;
            let left = self.free_pages().await;
            if left >= free {
                break;
            }
            free = left;
            // Also set for the next pause: freed pages are in the log, and must be copied back from there.
            self.dirty = true;
            if !(self.control.is_empty() && self.bulk.is_empty()) {
                break;
            }
        }
    }

    /// Gives pages back while commands keep coming, so that the space that a purge frees does not stay used until the
    /// load ends.
    async fn vacuum_when_due(&mut self) {
        self.commits += 1;
        if self.commits >= VACUUM_EVERY_COMMITS {
            self.commits = 0;
            if self.free_pages().await > FREE_PAGES_KEPT {
                self.maintain(VACUUM_PAGES).await;
            }
        }
    }

    async fn free_pages(&mut self) -> i64 {
        let rows = self.connection.fetch(Statement::new("PRAGMA freelist_count"), Vec::new()).await;
        let pages = |mut row: Row| row.get::<i64>("freelist_count").ok();
        rows.ok().and_then(|rows| rows.into_iter().next()).and_then(pages).unwrap_or(0)
    }

    /// Checks that the files are still in place.
    async fn check_places(&mut self) -> Result<(), StoreError> {
        let Err(displaced) = self.files.verify() else { return Ok(()) };
        // The log is open here, even if it has lost its name. Copying it back keeps every acknowledged write in the
        // database.
        if self.files.is_intact() {
            let copied = self.connection.fetch(Statement::new("PRAGMA wal_checkpoint(TRUNCATE)"), Vec::new()).await;
            if let Err(error) = copied {
                tracing::error!(error = %error, "the write-ahead log could not be copied into the database");
            }
        }
        // Another log may have its name now. It must not be replayed.
        if let Err(error) = self.files.disown_log() {
            tracing::error!(error = %error, "the mark of the write-ahead log in the lock file could not be removed");
        }
        Err(StoreError::Displaced(displaced.to_string()))
    }

    /// Runs a pragma whose failure costs space, not data.
    async fn maintain(&mut self, pragma: &'static str) {
        if let Err(error) = self.connection.fetch(Statement::new(pragma), Vec::new()).await {
            self.health_reporter.failed(&error);
            tracing::warn!(error = %error, pragma, "maintenance of the database file failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use sqlx::{Connection as _, SqliteConnection};

    use super::{super::file_options, *};
    use crate::{buffer::ids::KeyForm, metrics::Metrics};

    /// The commands that a commit takes from full queues when it began `ago`: whether each is urgent.
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

    /// A writer on a new file.
    async fn writer(folder: &std::path::Path) -> Writer {
        let path = folder.join("x.db");
        let made = SqliteConnection::connect_with(&file_options(&path)).await.expect("the file can be made");
        let connection = Direct::writing(&path, KeyForm::Ordered).expect("the file can be written");
        made.close().await.expect("the other connection ends");
        let [(_, control), (_, bulk)] = [(); 2].map(|()| mpsc::channel(1));
        Writer {
            connection,
            control,
            bulk,
            rules: Arc::default(),
            files: Arc::new(Files::hold(&path).expect("nobody else has it")),
            dirty: false,
            commits: 0,
            metrics: Metrics::new().store(),
            health_reporter: HealthReporter::default(),
        }
    }

    #[tokio::test]
    async fn free_pages_are_given_back_in_slices_while_commands_keep_coming_and_all_of_them_after() {
        const SLICE: i64 = 64;
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        // Twice as many free pages as are kept for the next rollouts.
        for sql in ["CREATE TABLE t (body BLOB)", "INSERT INTO t VALUES (zeroblob(33554432))", "DELETE FROM t"] {
            writer.control_statement(sql).await.expect("the file can be written");
        }
        let mut free = writer.free_pages().await;
        assert!(free > FREE_PAGES_KEPT + 10 * SLICE, "{free}");
        for _ in 0..20 * VACUUM_EVERY_COMMITS {
            writer.commit(Box::new(Idle { is_urgent: false })).await;
            writer.look_after_file().await;
            let left = writer.free_pages().await;
            assert!((0..=SLICE).contains(&(free - left)), "{free} and then {left}");
            free = left;
        }
        assert!(((FREE_PAGES_KEPT - SLICE)..=FREE_PAGES_KEPT).contains(&free), "{free} stay free");
        writer.idle().await;
        assert_eq!(writer.free_pages().await, 0);
        writer.idle().await;
        let bytes = std::fs::metadata(folder.path().join("x.db")).expect("it is there").len();
        assert!(bytes < 1 << 20, "{bytes} bytes are left");
    }

    #[tokio::test]
    async fn a_writer_that_has_nothing_to_do_notices_that_its_file_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        writer.control_statement("CREATE TABLE t (body BLOB)").await.expect("the file can be written");
        writer.idle().await;
        assert_eq!(writer.health_reporter.health(), Health::Writable);
        std::fs::remove_file(folder.path().join("x.db")).expect("it is there");
        writer.idle().await;
        assert_eq!(writer.health_reporter.health(), Health::Broken);
    }

    #[tokio::test]
    async fn pages_that_were_copied_back_are_not_counted_although_the_log_stays_long() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        for sql in ["CREATE TABLE t (body BLOB)", "INSERT INTO t VALUES (zeroblob(1048576))"] {
            writer.control_statement(sql).await.expect("the file can be written");
        }
        let megabyte = (1 << 20) / i64::from(PAGE_BYTES);
        assert!(writer.wal_pages().await >= megabyte);
        writer.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
        assert_eq!(writer.wal_pages().await, 0);
        writer.control_statement("INSERT INTO t VALUES ('one page')").await.expect("the file can be written");
        assert!((1..10).contains(&writer.wal_pages().await));
        assert!(writer.wal_bytes() >= 1 << 20);
    }
}
