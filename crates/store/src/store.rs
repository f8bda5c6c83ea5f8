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
use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::{Mutex, watch};

use crate::{
    dialect::{Runs as _, SqlDialect},
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
///
/// The futures of what does more than run operations are boxed, for the reason that [`Op`] gives.
pub struct Store {
    dialect: Arc<dyn SqlDialect>,
    group_commit: Arc<GroupCommit>,
    /// Whether anything was written since the clock was last marked. An idle service writes nothing, not even marks.
    wrote: AtomicBool,
    snapshots: SnapshotTimes,
    snapshotting: Mutex<()>,
}

impl Store {
    pub(crate) fn new(dialect: impl SqlDialect) -> Self {
        Self {
            group_commit: Arc::new(GroupCommit::new(dialect.ingests())),
            dialect: Arc::new(dialect),
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
        self.dialect.write(op).await
    }

    /// Runs an operation that only reads, on a consistent snapshot.
    pub async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
        self.dialect.read(op).await
    }

    fn note_work(&self) {
        self.wrote.store(true, Ordering::Release);
        self.snapshots.note_write();
    }

    /// Stores bundles, each all or nothing, and decides the groups that they complete. Posts that wait at the same time
    /// share a transaction.
    pub fn ingest(&self, ingest: Ingest) -> BoxFuture<'_, Result<Vec<BundleOutcome>, StoreError>> {
        async move {
            self.note_work();
            self.group_commit.ingest(&self.dialect, ingest).await
        }
        .boxed()
    }

    /// Payloads of rollouts, in the order of the argument. Missing ones are left out.
    pub fn payloads(&self, rollouts: Vec<RolloutPk>) -> BoxFuture<'_, Result<Vec<StoredPayload>, StoreError>> {
        async move { payloads::read(&*self.dialect, rollouts).await }.boxed()
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
        // An idle service writes nothing.
        if self.dialect.appends_tallies() && self.read(MayFoldTallies).await? {
            self.write(FoldTallies).await?;
        }
        Ok(())
    }

    /// Moves a slice of payloads to where the configuration wants them, and removes objects that are no longer needed.
    pub fn look_after_payloads(&self, now: Timestamp) -> BoxFuture<'_, Result<PayloadMoves, StoreError>> {
        async move {
            match self.dialect.object_care() {
                Some(care) => care.step(&*self.dialect, now).await,
                None if self.dialect.is_moving_payloads() => Ok(PayloadMoves::InBackground),
                None => Ok(PayloadMoves::Done),
            }
        }
        .boxed()
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
        found.extend(self.dialect.missing().await?);
        Ok(found)
    }

    /// Where payloads are.
    pub fn count_payloads(&self) -> BoxFuture<'_, Result<PayloadPlaces, StoreError>> {
        async move { payloads::count(&*self.dialect).await }.boxed()
    }

    /// Where payloads are, and what is wrong there.
    pub fn payload_places(&self) -> BoxFuture<'_, Result<PayloadPlaces, StoreError>> {
        async move { payloads::examine(&*self.dialect).await }.boxed()
    }

    /// What the last writes say about the next one.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.dialect.health_reporter().watch()
    }

    /// Returns when the database can read and write.
    pub async fn ping(&self) -> Result<(), StoreError> {
        // An idle service writes nothing. The store therefore writes only after a failure, to find out whether it can.
        match self.dialect.health_reporter().health() {
            Health::Writable | Health::WithoutPayloads => self.write(Ping).await,
            Health::Failing | Health::Broken => self.write(Probe).await,
        }
    }

    /// The connection to the other replicas, if the database can be shared.
    pub fn peers(&self) -> Option<Arc<dyn Peers>> {
        self.dialect.peers()
    }

    /// Flushes and closes the store. Later calls fail.
    pub async fn close(&self) {
        self.dialect.close().await;
    }
}
