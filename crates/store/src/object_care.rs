//! The care for payloads in an object store: they move to where the configuration wants them, and objects that no row
//! names are removed, if the database owns them.
//!
//! Separate from the dialect, because each step is an operation of its own, and the object store is asked between them.
//! Every replica does this. What two of them do at the same time is done once.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use forebay_domain::{clock::Timestamp, ids::RolloutPk, sweep::PayloadMoves};
use forebay_telemetry::metrics::StoreMetrics;

use super::{
    dialect::{Runs as _, SqlDialect},
    ops::relocate::{FindEmptied, FindKnown, FindMisplaced, ForgetObjects, Relocate, with_bodies},
    segment_files::{Objects, Place, STEP_TIMEOUT, Standing, wall_clock_s},
};
use crate::{error::StoreError, open::options::PayloadKind};

/// Objects that are looked up at once, or removed after one proof of ownership.
const OBJECTS_AT_ONCE: usize = 100;

/// For how long after a proof of ownership has begun removals may begin. Another database may adopt the objects at any
/// time, and what it finds then is to stay. Each removal gives up after `STEP_TIMEOUT`, so the last one has ended within a
/// minute after the adoption.
const PROOF_HOLDS: Duration = Duration::from_secs(20);

const _: () = assert!(PROOF_HOLDS.as_secs() + STEP_TIMEOUT.as_secs() <= 60);

/// Seconds between two proofs of ownership while nothing is removed. Another database that removes objects without a row
/// must be noticed before its second look for them.
const PROOF_INTERVAL_S: i64 = 300;

/// Seconds between two looks for objects without a row: much longer than a transaction may take. An object is removed when
/// two of these looks in a row have found no row. So only service time counts, and not the clocks of the replicas.
const ORPHANS_INTERVAL_S: i64 = 3_600;

/// How far back the first look goes: a week.
const ORPHANS_BACK_S: u64 = 7 * 86_400;

/// How far the clocks of replicas, which number the objects, may differ without objects being passed over.
const CLOCKS_DIFFER_S: u64 = 2 * 3_600;

/// Objects without a row that are remembered between two looks. A later look finds the others.
const SUSPECTS_MAX: usize = 100_000;

/// The time of the first proof, if it is due at once.
const NEVER: i64 = i64::MIN;

/// No payload is left where the configuration does not want it.
const DONE: i64 = i64::MAX;

/// What this process has done.
#[derive(Debug)]
pub(super) struct ObjectCare {
    objects: Objects,
    /// Whether new payloads are to become objects.
    wants_objects: bool,
    standing: Mutex<Standing>,
    /// When ownership was last proved, in seconds of service time.
    proved_s: AtomicI64,
    grace_s: u64,
    metrics: StoreMetrics,
    /// The last row whose place was examined.
    examined: AtomicI64,
    orphans: Mutex<Orphans>,
}

/// What is known about objects without a row.
#[derive(Debug)]
struct Orphans {
    /// When this process last looked for them, in seconds of service time.
    looked_s: Option<i64>,
    /// The second of the oldest object that the next look lists.
    from_s: u64,
    /// Objects that had no row at the last look.
    suspects: Vec<i64>,
}

impl ObjectCare {
    pub(super) fn new(
        objects: Objects,
        wants_objects: bool,
        standing: Standing,
        grace_s: u64,
        metrics: StoreMetrics,
    ) -> Self {
        let from_s = wall_clock_s().saturating_sub(ORPHANS_BACK_S);
        let care = Self {
            objects,
            wants_objects,
            standing: Mutex::new(Standing::Unclaimed),
            proved_s: AtomicI64::new(NEVER),
            grace_s,
            metrics,
            examined: AtomicI64::new(i64::MIN),
            orphans: Mutex::new(Orphans { looked_s: None, from_s, suspects: Vec::new() }),
        };
        care.stand(standing);
        care
    }

    pub(super) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Whether new payloads become objects. Objects of a database that does not own the folder would be removed by the
    /// owner, so its payloads go into the database.
    pub(super) fn writes_objects(&self) -> bool {
        self.wants_objects && self.is_owner()
    }

    /// One step of each kind that is due.
    pub(super) async fn step(&self, dialect: &dyn SqlDialect, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        let second = now.as_micros() / 1_000_000;
        if second.saturating_sub(self.proved_s.load(Ordering::Relaxed)) >= PROOF_INTERVAL_S {
            self.prove(dialect).await?;
            self.proved_s.store(second, Ordering::Relaxed);
        }
        let moves = self.move_slice(dialect, now).await?;
        if self.is_owner() {
            self.remove_emptied(dialect, now).await?;
            if let Some(suspects) = self.suspects_when_due(second) {
                self.remove_orphans(dialect, suspects).await?;
            }
        } else {
            // Objects that another owner has written since must be seen twice, too.
            self.orphans().suspects.clear();
        }
        Ok(moves)
    }

    /// Until when removals may begin, if the database owns the objects now.
    async fn prove(&self, dialect: &dyn SqlDialect) -> Result<Option<Instant>, StoreError> {
        let until = Instant::now() + PROOF_HOLDS;
        let standing = dialect.prove_ownership(&self.objects, self.is_owner()).await?;
        self.stand(standing);
        Ok((standing == Standing::Owner).then_some(until))
    }

    /// Removes objects, if the database owns them. Returns those that were removed.
    async fn remove(&self, dialect: &dyn SqlDialect, objects: &[i64]) -> Result<Vec<i64>, StoreError> {
        match self.prove(dialect).await? {
            Some(until) => Ok(self.objects.remove(objects, until).await?),
            None => Ok(Vec::new()),
        }
    }

    fn is_owner(&self) -> bool {
        *self.standing.lock().unwrap_or_else(PoisonError::into_inner) == Standing::Owner
    }

    fn stand(&self, standing: Standing) {
        let before = std::mem::replace(&mut *self.standing.lock().unwrap_or_else(PoisonError::into_inner), standing);
        if standing != before && standing != Standing::Owner {
            tracing::error!(
                "no object is removed or written, and new payloads are stored in the database: {}. If this database \
                 replaces the other one, stop the other one and start this one once with --adopt-objects",
                standing.why()
            );
        }
    }

    async fn move_slice(&self, dialect: &dyn SqlDialect, now: Timestamp) -> Result<PayloadMoves, StoreError> {
        let after = self.examined.load(Ordering::Relaxed);
        if after == DONE || self.wants_objects && !self.is_owner() {
            return Ok(PayloadMoves::Done);
        }
        let kind = if self.wants_objects { PayloadKind::Objects } else { PayloadKind::Database };
        let (last, rows) = dialect.read(FindMisplaced { after: RolloutPk(after), kind }).await?;
        let places: Vec<Place> = rows.iter().filter_map(|row| row.place).collect();
        let rows = with_bodies(rows, self.objects.read(&places).await?);
        if !rows.is_empty() {
            let moved = dialect.write(Relocate { rows, now }).await?;
            self.metrics.payloads_moved(moved);
        }
        self.examined.store(last.map_or(DONE, |last| last.0), Ordering::Relaxed);
        Ok(if last.is_some() { PayloadMoves::More } else { PayloadMoves::Done })
    }

    /// Removes objects whose payloads were all purged or moved, after the grace.
    async fn remove_emptied(&self, dialect: &dyn SqlDialect, now: Timestamp) -> Result<(), StoreError> {
        let grace = i64::try_from(self.grace_s).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        let before = Timestamp::from_micros(now.as_micros().saturating_sub(grace));
        loop {
            let emptied = dialect.read(FindEmptied { before, limit: OBJECTS_AT_ONCE as u32 }).await?;
            if emptied.is_empty() {
                return Ok(());
            }
            let removed = self.remove(dialect, &emptied).await?;
            let is_whole = removed.len() == emptied.len();
            dialect.write(ForgetObjects(removed)).await?;
            if !is_whole {
                return Ok(());
            }
        }
    }

    /// The objects that had no row at the last look, if the next look is due.
    fn suspects_when_due(&self, second: i64) -> Option<Vec<i64>> {
        let mut orphans = self.orphans();
        if orphans.looked_s.is_some_and(|looked_s| second - looked_s < ORPHANS_INTERVAL_S) {
            return None;
        }
        orphans.looked_s = Some(second);
        Some(orphans.suspects.clone())
    }

    /// Removes objects of transactions that failed.
    async fn remove_orphans(&self, dialect: &dyn SqlDialect, suspects: Vec<i64>) -> Result<(), StoreError> {
        let orphans = without_row(dialect, suspects).await?;
        if !orphans.is_empty() {
            tracing::info!(objects = orphans.len(), "removing objects of transactions that failed");
        }
        for orphans in orphans.chunks(OBJECTS_AT_ONCE) {
            // The next look tries again to remove the suspects of this one.
            if self.remove(dialect, orphans).await?.len() < orphans.len() {
                return Ok(());
            }
        }
        let (from_s, now_s) = (self.orphans().from_s, wall_clock_s());
        let listed = self.objects.made_since(from_s, SUSPECTS_MAX).await?;
        let is_whole = listed.len() < SUSPECTS_MAX;
        let suspects = without_row(dialect, listed).await?;
        let mut orphans = self.orphans();
        orphans.suspects = suspects;
        if is_whole {
            orphans.from_s = now_s.saturating_sub(CLOCKS_DIFFER_S);
        }
        Ok(())
    }

    fn orphans(&self) -> MutexGuard<'_, Orphans> {
        self.orphans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those of some objects that have no row.
async fn without_row(dialect: &dyn SqlDialect, numbers: Vec<i64>) -> Result<Vec<i64>, StoreError> {
    let mut found = Vec::new();
    for numbers in numbers.chunks(OBJECTS_AT_ONCE) {
        let known = dialect.read(FindKnown(numbers.to_vec())).await?;
        found.extend(numbers.iter().copied().filter(|number| !known.contains(number)));
    }
    Ok(found)
}
