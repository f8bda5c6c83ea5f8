//! The care for payloads in an object store: they move to where the configuration wants them, and objects that no row
//! names are removed.
//!
//! Separate from the dialect, because each step is an operation of its own, and the object store is asked between them.
//! Every replica does this. What two of them do at the same time is done once.

use std::{
    ops::Range,
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
};

use super::{
    PayloadKind,
    dialect::Dialect,
    ops::relocate::{FindEmptied, FindKnown, FindMisplaced, ForgetObjects, Misplaced, Relocate},
    payloads::PlaceReader,
    segment_files::{Found, Objects, Place, wall_clock_s},
};
use crate::{
    buffer::{ids::RolloutPk, payload::Payload, port::StoreError},
    clock::Timestamp,
    metrics::StoreMetrics,
};

/// Seconds between two looks for objects that may be removed.
const REMOVAL_INTERVAL_S: i64 = 2;

/// Objects that are removed at once.
const REMOVED_MAX: u32 = 100;

/// Seconds after which an object without a row will not get one: much longer than a transaction may take.
const ORPHAN_AGE_S: u64 = 3_600;

/// How far back a process looks at first for objects without rows: a week.
const ORPHANS_BACK_S: u64 = 7 * 86_400;

/// No payload is left where the configuration does not want it.
const DONE: i64 = i64::MAX;

/// What this process has done.
#[derive(Debug)]
pub(super) struct ObjectCare {
    objects: Objects,
    kind: PayloadKind,
    grace_s: u64,
    metrics: StoreMetrics,
    /// The last row whose place was examined.
    examined: AtomicI64,
    /// When objects were last removed, in seconds of service time.
    removed_s: AtomicI64,
    /// The second up to which objects without rows were removed.
    orphans_s: AtomicU64,
}

impl ObjectCare {
    pub(super) fn new(objects: Objects, kind: PayloadKind, grace_s: u64, metrics: StoreMetrics) -> Self {
        Self {
            objects,
            kind,
            grace_s,
            metrics,
            examined: AtomicI64::new(0),
            removed_s: AtomicI64::new(0),
            orphans_s: AtomicU64::new(wall_clock_s().saturating_sub(ORPHANS_BACK_S)),
        }
    }

    pub(super) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// One step of each kind that is due. Returns whether payloads may be left to move.
    pub(super) async fn step<D: Dialect>(&self, dialect: &D, now: Timestamp) -> Result<bool, StoreError> {
        let is_more = self.move_slice(dialect, now).await?;
        let second = now.as_micros() / 1_000_000;
        if second - self.removed_s.load(Ordering::Relaxed) >= REMOVAL_INTERVAL_S {
            self.removed_s.store(second, Ordering::Relaxed);
            self.remove_emptied(dialect, now).await?;
            self.remove_orphans(dialect).await?;
        }
        Ok(is_more)
    }

    async fn move_slice<D: Dialect>(&self, dialect: &D, now: Timestamp) -> Result<bool, StoreError> {
        let after = self.examined.load(Ordering::Relaxed);
        if after == DONE {
            return Ok(false);
        }
        let (last, rows) = dialect.read(FindMisplaced { after: RolloutPk(after), kind: self.kind }).await?;
        let rows = self.with_bodies(rows).await?;
        if !rows.is_empty() {
            let moved = dialect.write(Relocate { rows, now }).await?;
            self.metrics.payloads_moved(moved);
        }
        self.examined.store(last.map_or(DONE, |last| last.0), Ordering::Relaxed);
        Ok(last.is_some())
    }

    /// The payloads with their bodies. One that cannot be read stays what it is: damaged.
    async fn with_bodies(&self, rows: Vec<Misplaced>) -> Result<Vec<Misplaced>, StoreError> {
        let places: Vec<Place> = rows.iter().filter_map(|row| row.place).collect();
        let mut bodies = PlaceReader::Objects(self.objects.clone()).read(places).await?.into_iter();
        let with_body = |row: Misplaced| {
            let Some(place) = row.place else { return Some(row) };
            match bodies.next() {
                Some(Found::Bytes(body)) if body.len() as u64 == place.length => {
                    Some(Misplaced { payload: Payload { body, ..row.payload }, ..row })
                }
                _ => None,
            }
        };
        Ok(rows.into_iter().filter_map(with_body).collect())
    }

    /// Removes objects whose payloads were all purged or moved, after the grace.
    async fn remove_emptied<D: Dialect>(&self, dialect: &D, now: Timestamp) -> Result<(), StoreError> {
        let grace = i64::try_from(self.grace_s).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        let before = Timestamp::from_micros(now.as_micros().saturating_sub(grace));
        loop {
            let emptied = dialect.read(FindEmptied { before, limit: REMOVED_MAX }).await?;
            if emptied.is_empty() {
                return Ok(());
            }
            self.objects.remove(&emptied).await?;
            let is_last = emptied.len() < REMOVED_MAX as usize;
            dialect.write(ForgetObjects(emptied)).await?;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Removes objects of transactions that failed.
    async fn remove_orphans<D: Dialect>(&self, dialect: &D) -> Result<(), StoreError> {
        let span: Range<u64> = self.orphans_s.load(Ordering::Relaxed)..wall_clock_s().saturating_sub(ORPHAN_AGE_S);
        if span.is_empty() {
            return Ok(());
        }
        let end = span.end;
        let made = self.objects.made_in(span).await?;
        for numbers in made.chunks(REMOVED_MAX as usize) {
            let known = dialect.read(FindKnown(numbers.to_vec())).await?;
            let orphans: Vec<i64> = numbers.iter().copied().filter(|number| !known.contains(number)).collect();
            if !orphans.is_empty() {
                tracing::info!(objects = orphans.len(), "removing objects of transactions that failed");
                self.objects.remove(&orphans).await?;
            }
        }
        self.orphans_s.store(end, Ordering::Relaxed);
        Ok(())
    }
}
