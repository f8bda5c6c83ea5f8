//! The writer: it owns one connection and a thread, and commits the commands in its queues in groups.
//!
//! It takes commands while a commit is open, control before bulk. It runs each so that it can be undone alone,
//! commits all of them once, and then answers them, so all of them cost one fsync. A commit that contains an urgent
//! command stops taking bulk commands after a short time. Between commits the writer maintains the file.
//!
//! Up to 64 commands share one fsync (`synchronous = FULL`); one command may contain 32 posts or 1 MiB of payloads. A
//! command is undone with a savepoint, except the first: the whole transaction can be undone instead, and a savepoint
//! copies pages. A commit that contains an urgent command accepts no more bulk after 5 ms. The log is copied into the
//! database when the writer is idle or when 32 MiB of it are new, and truncated above 64 MiB.
//!
//! Pages that purges free are given back to the file system in slices of 1 MiB: all of them when the writer is idle,
//! and under load after every eighth commit. Under load, 16 MiB of free pages are kept for the next rollouts.

mod command;
mod intake;
mod maintenance;
mod payloads;

use std::{sync::Arc, time::Duration};

use forebay_domain::health::Health;
use forebay_telemetry::{metrics::StoreMetrics, requests};
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument as _, Span, field};

use self::{
    command::{Close, Command, Pending},
    intake::Intake,
};
use super::{direct::Direct, files::Files};
use crate::{
    error::StoreError,
    health::HealthReporter,
    op::{AnyOp, AnyOutput, Class},
    open::error::OpenError,
    ops::tallies,
    rules_cache::RulesCache,
    sql::{Connection as _, Statement, Tx},
    tally::TallyDelta,
};

pub(super) use self::payloads::Payloads;

/// Commands waiting in each queue. When a queue is full, callers wait to enqueue.
const QUEUE_COMMANDS_MAX: usize = 1_024;

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
        payloads: Payloads,
        metrics: StoreMetrics,
        health_reporter: HealthReporter,
    ) -> Result<(Self, std::thread::JoinHandle<()>), OpenError> {
        let page_bytes = connection
            .page_bytes()
            .map_err(|source| OpenError::Sqlite { name: files.names.database.display().to_string(), source })?;
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
            payloads,
            page_bytes,
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

    pub(super) async fn write(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        let (reply, answer) = oneshot::channel();
        let queue = match op.class() {
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

type Queue = mpsc::Receiver<Box<dyn Command>>;

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
    payloads: Payloads,
    /// Size of the pages of the file.
    page_bytes: i64,
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
        if let Some(appender) = self.connection.appender() {
            // It costs space, not data, if this fails.
            let _ = appender.trim();
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
            let requests = requests::request_ids(&span);
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
        // Payloads of a transaction that failed.
        self.undo_payloads(None);
        while let Some(command) = intake.next(&mut self.control, &mut self.bulk) {
            // A savepoint copies the pages that it may restore. The first command needs none, because the whole
            // transaction can be undone.
            if !is_first {
                self.control_statement("SAVEPOINT command").await?;
            }
            // A copy of a few counts, because the command reads the counts of earlier commands, and its own are dropped
            // if it is undone.
            let before = self.connection.appender().map(|appender| appender.mark());
            let mut tx = Tx::after(tallies.clone(), &mut self.connection, &self.rules);
            let commits = command.run(&mut tx).await;
            if commits {
                tallies = tx.take_tallies();
            } else {
                // Rows that were rolled back are gone, and other rows will get their keys.
                self.rules.clear();
                self.undo_payloads(before);
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
        tallies::write(tallies, &mut Tx::new(&mut self.connection, &self.rules), 0).await?;
        self.write_payloads().await?;
        self.control_statement("COMMIT").await
    }

    async fn control_statement(&mut self, sql: &'static str) -> Result<(), StoreError> {
        self.connection.execute(Statement::new(sql), Vec::new()).await.map(drop)
    }
}

#[cfg(test)]
impl Writer {
    /// A writer without queues, whose commits a test makes itself.
    fn alone(connection: Direct, files: Files, payloads: Payloads) -> Self {
        let [(_, control), (_, bulk)] = [(); 2].map(|()| mpsc::channel(1));
        Self {
            page_bytes: connection.page_bytes().expect("it is a pragma"),
            connection,
            control,
            bulk,
            rules: Arc::default(),
            files: Arc::new(files),
            payloads,
            dirty: false,
            commits: 0,
            metrics: forebay_telemetry::metrics::Metrics::new().store(),
            health_reporter: HealthReporter::default(),
        }
    }
}
