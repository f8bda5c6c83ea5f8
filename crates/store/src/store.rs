//! The store: an operation is a value that a database runs, so there is one way in for all that write and one for all
//! that read. The methods beside them are what is not one transaction.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use forebay_domain::{
    clock::Timestamp,
    health::Health,
    ids::RolloutPk,
    ingest::{BundleOutcome, Ingest},
    looking::diagnosis::PayloadPlaces,
    samples::StoredPayload,
    sweep::PayloadMoves,
};
use tokio::sync::{Mutex, watch};

use crate::{
    dialect::{
        SqlDialect,
        postgres::Postgres,
        sqlite::{Sqlite, SqliteReading},
    },
    error::StoreError,
    group_commit::GroupCommit,
    op::Op,
    ops::{
        clock::MarkClock,
        history::TakeSnapshot,
        looking::examine::Integrity,
        sweep::{FoldTallies, MayFoldTallies, Ping, Probe},
    },
    payloads,
    peers::Peers,
    snapshot_times::{Due, SnapshotTimes},
};

/// The database behind the service.
pub struct Store {
    database: Database,
    group_commit: Arc<GroupCommit>,
    /// Whether anything was written since the clock was last marked. An idle service writes nothing, not even marks.
    wrote: AtomicBool,
    snapshots: SnapshotTimes,
    snapshotting: Mutex<()>,
}

/// The databases that there are.
enum Database {
    Sqlite(Arc<Sqlite>),
    /// A file that another process may serve, opened only for reading.
    SqliteReading(Arc<SqliteReading>),
    Postgres(Arc<Postgres>),
}

/// Evaluates an expression with whichever database there is.
macro_rules! with {
    ($dialect:ident of $store:expr => $call:expr) => {
        match &$store.database {
            Database::Sqlite($dialect) => $call,
            Database::SqliteReading($dialect) => $call,
            Database::Postgres($dialect) => $call,
        }
    };
}

impl Store {
    pub(crate) fn sqlite(dialect: Sqlite) -> Self {
        Self::new::<Sqlite>(Database::Sqlite(Arc::new(dialect)))
    }

    pub(crate) fn reading(dialect: SqliteReading) -> Self {
        Self::new::<SqliteReading>(Database::SqliteReading(Arc::new(dialect)))
    }

    pub(crate) fn postgres(dialect: Postgres) -> Self {
        Self::new::<Postgres>(Database::Postgres(Arc::new(dialect)))
    }

    fn new<D: SqlDialect>(database: Database) -> Self {
        Self {
            database,
            group_commit: Arc::new(GroupCommit::new(D::INGESTS)),
            wrote: AtomicBool::new(true),
            snapshots: SnapshotTimes::default(),
            snapshotting: Mutex::default(),
        }
    }

    /// Runs an operation that writes, and answers after its commit is durable. It continues if the caller is dropped.
    pub async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        if O::IS_WORK {
            self.note_work();
        }
        with!(dialect of self => dialect.write(op).await)
    }

    /// Runs an operation that only reads, on a consistent snapshot.
    pub async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        with!(dialect of self => dialect.read(op).await)
    }

    fn note_work(&self) {
        self.wrote.store(true, Ordering::Release);
        self.snapshots.note_write();
    }

    /// Stores bundles, each all or nothing, and decides the groups that they complete. Posts that wait at the same time
    /// share a transaction.
    pub async fn ingest(&self, ingest: Ingest) -> Result<Vec<BundleOutcome>, StoreError> {
        self.note_work();
        with!(dialect of self => self.group_commit.ingest(dialect, ingest).await)
    }

    /// Payloads of rollouts, in the order of the argument. Missing ones are left out.
    pub async fn payloads(&self, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
        with!(dialect of self => payloads::read(&**dialect, rollouts).await)
    }

    /// Once a minute, writes the totals of each policy whose totals have changed, and deletes what is too old to be read.
    /// One replica does it in each minute. Writes nothing while this process has written nothing since the last snapshot.
    pub async fn snapshot(&self, now: Timestamp) -> Result<(), StoreError> {
        // A caller may rely on the snapshot when this returns, even if another task has begun it.
        let _one = self.snapshotting.lock().await;
        let Some(Due { since }) = self.snapshots.due(now) else { return Ok(()) };
        let taken = self.write(TakeSnapshot { now, since }).await;
        self.snapshots.done(now, taken.as_ref().ok());
        taken.map(drop)
    }

    /// Adds appended changes to the tallies, in a database that appends them.
    pub async fn fold_tallies(&self) -> Result<(), StoreError> {
        fn appends<D: SqlDialect>(_: &Arc<D>) -> bool {
            D::APPENDS_TALLIES
        }
        // An idle service writes nothing.
        if with!(dialect of self => appends(dialect)) && self.read(MayFoldTallies).await? {
            self.write(FoldTallies).await?;
        }
        Ok(())
    }

    /// Moves a slice of payloads to where the configuration wants them, and removes objects that are no longer needed.
    pub async fn look_after_payloads(&self, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        with!(dialect of self => match dialect.object_care() {
            Some(care) => care.step(&**dialect, now).await,
            None if dialect.is_moving_payloads() => Ok(PayloadMoves::InBackground),
            None => Ok(PayloadMoves::Done),
        })
    }

    /// Stores the time that the service has reached, if anything else was written since the last mark or if the mark
    /// answers a question.
    pub async fn mark_clock(&self, now: Timestamp, answers: Option<i64>) -> Result<(), StoreError> {
        if !self.wrote.swap(false, Ordering::AcqRel) && answers.is_none() {
            return Ok(());
        }
        self.write(MarkClock { now, answers }).await
    }

    /// Faults that the database finds in its own file.
    pub async fn integrity(&self) -> Result<Vec<String>, StoreError> {
        let mut found = self.read(Integrity).await?;
        found.extend(with!(dialect of self => dialect.missing().await)?);
        Ok(found)
    }

    /// Where payloads are.
    pub async fn count_payloads(&self) -> Result<PayloadPlaces, StoreError> {
        with!(dialect of self => payloads::count(&**dialect).await)
    }

    /// Where payloads are, and what is wrong there.
    pub async fn payload_places(&self) -> Result<PayloadPlaces, StoreError> {
        with!(dialect of self => payloads::examine(&**dialect).await)
    }

    /// What the last writes say about the next one.
    pub fn health(&self) -> watch::Receiver<Health> {
        with!(dialect of self => dialect.health_reporter().watch())
    }

    /// Returns when the database can read and write.
    pub async fn ping(&self) -> Result<(), StoreError> {
        // An idle service writes nothing. The store therefore writes only after a failure, to find out whether it can.
        match with!(dialect of self => dialect.health_reporter().health()) {
            Health::Writable | Health::WithoutPayloads => self.write(Ping).await,
            Health::Failing | Health::Broken => self.write(Probe).await,
        }
    }

    /// The connection to the other replicas, if the database can be shared.
    pub fn peers(&self) -> Option<Arc<dyn Peers>> {
        with!(dialect of self => dialect.peers())
    }

    /// Flushes and closes the store. Later calls fail.
    pub async fn close(&self) {
        with!(dialect of self => dialect.close().await);
    }
}
