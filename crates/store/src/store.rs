//! The store: an operation is a value that a database runs, so there is one way in for all that write and one for all
//! that read. The methods beside them are what is not one transaction.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use forebay_domain::{
    clock::Timestamp,
    formats::payload::Codec,
    health::Health,
    ids::RolloutPk,
    ingest::{BundleOutcome, Ingest},
    looking::diagnosis::PayloadPlaces,
    samples::StoredPayload,
    service_time::CorrectClock,
    sweep::PayloadMoves,
};
use tokio::sync::{Mutex, watch};

use super::{
    dialect::{Dialect, Op, Postgres, Sqlite, SqliteReading},
    group_commit::GroupCommit,
    ops::{
        clock::{AskClock, MarkClock},
        examine::Integrity,
        history::TakeSnapshot,
        sweep::{FoldTallies, MayFoldTallies, Ping, Probe},
    },
    payloads,
    snapshot_times::{Due, SnapshotTimes},
};
use crate::{error::StoreError, peers::Peers};

/// The database behind the service.
pub struct Store(Database);

/// The databases that there are.
enum Database {
    Sqlite(SqlStore<Sqlite>),
    /// A file that another process may serve, opened only for reading.
    SqliteReading(SqlStore<SqliteReading>),
    Postgres(SqlStore<Postgres>),
}

/// Evaluates an expression with the store of whichever database there is.
macro_rules! each {
    ($self:ident, $store:ident => $call:expr) => {
        match &$self.0 {
            Database::Sqlite($store) => $call,
            Database::SqliteReading($store) => $call,
            Database::Postgres($store) => $call,
        }
    };
}

impl Store {
    pub(crate) fn sqlite(dialect: Sqlite) -> Self {
        Self(Database::Sqlite(SqlStore::new(dialect)))
    }

    pub(crate) fn reading(dialect: SqliteReading) -> Self {
        Self(Database::SqliteReading(SqlStore::new(dialect)))
    }

    pub(crate) fn postgres(dialect: Postgres) -> Self {
        Self(Database::Postgres(SqlStore::new(dialect)))
    }

    /// Runs an operation that writes, and answers after its commit is durable. It continues if the caller is dropped.
    pub async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        each!(self, store => store.write(op).await)
    }

    /// Runs an operation that only reads, on a consistent snapshot.
    pub async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        each!(self, store => store.dialect.read(op).await)
    }

    /// The form in which the store wants payloads to be packed.
    pub fn payload_codec(&self) -> Codec {
        each!(self, store => store.payload_codec())
    }

    /// Stores bundles, each all or nothing, and decides the groups that they complete.
    pub async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError> {
        each!(self, store => store.ingest(ingest).await)
    }

    /// Payloads of rollouts, in the order of the argument. Missing ones are left out.
    pub async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
        each!(self, store => store.payloads(rollouts).await)
    }

    /// Once a minute, writes the totals of each policy whose totals have changed, and deletes what is too old to be read.
    /// One replica does it in each minute. Writes nothing while this process has written nothing since the last snapshot.
    pub async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError> {
        each!(self, store => store.snapshot(now).await)
    }

    /// Adds appended changes to the tallies, in a database that appends them.
    pub async fn fold_tallies(&self) -> Result<(), StoreError> {
        each!(self, store => store.fold_tallies().await)
    }

    /// Moves a slice of payloads to where the configuration wants them, and removes objects that are no longer needed.
    pub async fn look_after_payloads(&self, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        each!(self, store => store.look_after_payloads(now).await)
    }

    /// Stores the time that the service has reached, if anything else was written since the last mark or if the mark
    /// answers a question.
    pub async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError> {
        each!(self, store => store.mark_clock(now, answers).await)
    }

    /// Replaces the offset of service time. False if another replica has replaced it before.
    pub async fn correct_clock(&self, correct: CorrectClock) -> Result<bool, StoreError> {
        each!(self, store => store.correct_clock(correct).await)
    }

    /// Asks running replicas to check the clock. Returns the number of the question.
    pub async fn ask_clock(&self) -> Result<i64, StoreError> {
        each!(self, store => store.ask_clock().await)
    }

    /// Faults that the database finds in its own file.
    pub async fn integrity(&self) -> Result<Vec<String>, StoreError> {
        each!(self, store => store.integrity().await)
    }

    /// Where payloads are.
    pub async fn count_payloads(&self) -> Result<PayloadPlaces, StoreError> {
        each!(self, store => store.count_payloads().await)
    }

    /// Where payloads are, and what is wrong there.
    pub async fn payload_places(&self) -> Result<PayloadPlaces, StoreError> {
        each!(self, store => store.payload_places().await)
    }

    /// What the last writes say about the next one.
    pub fn health(&self) -> watch::Receiver<Health> {
        each!(self, store => store.health())
    }

    /// Returns when the database can read and write. After a failed write, it writes to find that out.
    pub async fn ping(&self) -> Result<(), StoreError> {
        each!(self, store => store.ping().await)
    }

    /// Writes to find out whether the database and the object store can be written.
    pub async fn probe(&self) -> Result<(), StoreError> {
        each!(self, store => store.probe().await)
    }

    /// The connection to the other replicas, if the database can be shared.
    pub fn peers(&self) -> Option<Arc<dyn Peers>> {
        each!(self, store => store.peers())
    }

    /// Flushes and closes the store. Later calls fail.
    pub async fn close(&self) {
        each!(self, store => store.close().await);
    }
}

/// A store in a SQL database.
struct SqlStore<D> {
    dialect: Arc<D>,
    group_commit: Arc<GroupCommit>,
    /// Whether anything was written since the clock was last marked. An idle service writes nothing, not even marks.
    wrote: AtomicBool,
    snapshots: SnapshotTimes,
    snapshotting: Mutex<()>,
}

impl<D: Dialect> SqlStore<D> {
    fn new(dialect: D) -> Self {
        Self {
            dialect: Arc::new(dialect),
            group_commit: Arc::new(GroupCommit::new(D::INGESTS)),
            wrote: AtomicBool::new(true),
            snapshots: SnapshotTimes::default(),
            snapshotting: Mutex::default(),
        }
    }
}

impl<D: Dialect> SqlStore<D> {
    async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.note_write();
        self.dialect.write(op).await
    }

    fn note_write(&self) {
        self.wrote.store(true, Ordering::Release);
        self.snapshots.note_write();
    }
}

impl<D: Dialect> SqlStore<D> {
    #[expect(clippy::unused_self, reason = "it says which database it is")]
    fn payload_codec(&self) -> Codec {
        D::PAYLOADS
    }

    async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError> {
        self.note_write();
        self.group_commit.ingest(&self.dialect, ingest).await
    }

    async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
        payloads::read(&*self.dialect, rollouts).await
    }

    async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError> {
        // A caller may rely on the snapshot when this returns, even if another task has begun it.
        let _one = self.snapshotting.lock().await;
        let Some(Due { since }) = self.snapshots.due(now) else { return Ok(()) };
        let taken = self.dialect.write(TakeSnapshot { now, since }).await;
        self.snapshots.done(now, taken.as_ref().ok());
        taken.map(drop)
    }

    async fn fold_tallies(&self) -> Result<(), StoreError> {
        // An idle service writes nothing.
        if D::APPENDS_TALLIES && self.dialect.read(MayFoldTallies).await? {
            self.dialect.write(FoldTallies).await?;
        }
        Ok(())
    }

    async fn look_after_payloads(&self, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        match self.dialect.object_care() {
            Some(care) => care.step(&*self.dialect, now).await,
            None if self.dialect.is_moving_payloads() => Ok(PayloadMoves::InBackground),
            None => Ok(PayloadMoves::Done),
        }
    }

    async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError> {
        if !self.wrote.swap(false, Ordering::AcqRel) && answers.is_none() {
            return Ok(());
        }
        self.dialect.write(MarkClock { now, answers }).await
    }

    async fn correct_clock(&self, correct: CorrectClock) -> Result<bool, StoreError> {
        self.dialect.write(correct).await
    }

    async fn ask_clock(&self) -> Result<i64, StoreError> {
        self.dialect.write(AskClock).await
    }

    async fn integrity(&self) -> Result<Vec<String>, StoreError> {
        let mut found = self.dialect.read(Integrity).await?;
        found.extend(self.dialect.missing().await?);
        Ok(found)
    }

    async fn count_payloads(&self) -> Result<PayloadPlaces, StoreError> {
        payloads::count(&*self.dialect).await
    }

    async fn payload_places(&self) -> Result<PayloadPlaces, StoreError> {
        payloads::examine(&*self.dialect).await
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.dialect.health_reporter().watch()
    }

    async fn ping(&self) -> Result<(), StoreError> {
        // An idle service writes nothing. The store therefore writes only after a failure, to find out whether it can.
        match self.dialect.health_reporter().health() {
            Health::Writable | Health::WithoutPayloads => self.dialect.write(Ping).await,
            Health::Failing | Health::Broken => self.probe().await,
        }
    }

    async fn probe(&self) -> Result<(), StoreError> {
        self.dialect.write(Probe).await
    }

    fn peers(&self) -> Option<Arc<dyn Peers>> {
        self.dialect.peers()
    }

    async fn close(&self) {
        self.dialect.close().await;
    }
}
