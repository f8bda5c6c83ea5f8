//! Moves payloads: between the database and files or objects, and out of sparse files.
//!
//! Separate from those who decide what moves when: the writer of SQLite, and the care for objects of Postgres. Their bytes
//! are read between the two operations.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_domain::{clock::Timestamp, formats::payload::Payload, ids::RolloutPk};
use std::collections::HashMap;

use super::places::{count_released, read_place};
use crate::{
    error::StoreError,
    op::Op,
    open::options::PayloadKind,
    segment_files::{Found, Place},
    sql::{Statement, Tx, among_keys, args, key_list},
};

/// Payload bytes of one slice.
const SLICE_BYTES: u64 = 1 << 20;

/// Rows that a slice examines.
const SLICE_ROWS: usize = 256;

/// A payload that moves, as its row has it.
#[derive(Clone, Debug)]
pub(crate) struct Misplaced {
    pub(crate) rollout: RolloutPk,
    /// Its body is empty if it is elsewhere.
    pub(crate) payload: Payload,
    pub(crate) place: Option<Place>,
}

/// The payloads that are outside of the database get the bytes that were found there, in order. One whose bytes are not all
/// there stays what it is: damaged.
pub(crate) fn with_bodies(rows: Vec<Misplaced>, found: Vec<Found>) -> Vec<Misplaced> {
    let mut found = found.into_iter();
    let with_body = |row: Misplaced| match (row.place, row.place.and_then(|_| found.next())) {
        (None, _) => Some(row),
        (Some(place), Some(Found::Bytes(body))) if body.len() as u64 == place.length => {
            Some(Misplaced { payload: Payload { body, ..row.payload }, ..row })
        }
        _ => None,
    };
    rows.into_iter().filter_map(with_body).collect()
}

/// Payloads behind a row that are not where they belong, and the last row that was examined; none at the end.
pub(crate) struct FindMisplaced {
    pub after: RolloutPk,
    pub kind: PayloadKind,
}

#[async_trait]
impl Op for FindMisplaced {
    type Output = (Option<RolloutPk>, Vec<Misplaced>);

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const EXAMINE_PLACES: Statement = Statement::new(
            "-- examine_places
            SELECT rollout_pk, file, CAST(COALESCE(length, LENGTH(body)) AS BIGINT) AS bytes
            FROM payload
            WHERE rollout_pk > $1
            ORDER BY rollout_pk
            LIMIT $2",
        );
        const FIND_MISPLACED: Statement = Statement::new(
            "-- find_misplaced
            SELECT codec, digest, body, file, start, length
            FROM payload
            WHERE rollout_pk = $1",
        );
        let belongs_outside = self.kind != PayloadKind::Database;
        let (mut last, mut found, mut bytes) = (None, Vec::new(), 0);
        for mut row in tx.fetch_all(EXAMINE_PLACES, args![self.after, SLICE_ROWS]).await? {
            if bytes >= SLICE_BYTES {
                break;
            }
            let rollout = row.get("rollout_pk")?;
            last = Some(rollout);
            if row.get::<Option<i64>>("file")?.is_some() == belongs_outside {
                continue;
            }
            bytes += row.get::<u64>("bytes")?;
            let Some(mut row) = tx.fetch_optional(FIND_MISPLACED, args![rollout]).await? else { continue };
            let place = read_place(&mut row)?;
            let body: Bytes = row.get("body")?;
            let payload =
                Payload { codec: row.get("codec")?, digest: row.get("digest")?, unpacked_bytes: body.len(), body };
            found.push(Misplaced { rollout, payload, place });
        }
        Ok((last, found))
    }
}

/// Stores payloads anew where the transaction stores payloads, unless their rows have changed. Returns how many moved.
pub(crate) struct Relocate {
    pub rows: Vec<Misplaced>,
    /// Only Postgres notes when an object became empty.
    pub now: Timestamp,
}

#[async_trait]
impl Op for Relocate {
    type Output = usize;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<usize, StoreError> {
        // The lock keeps other replicas from moving the same payloads.
        const LOCK_MOVING: Statement = Statement {
            sqlite: "-- lock_moving
                SELECT rollout_pk, file, start, length
                FROM payload
                WHERE rollout_pk IN (SELECT value FROM json_each($1))",
            postgres: "-- lock_moving
                SELECT rollout_pk, file, start, length
                FROM payload
                WHERE rollout_pk = ANY ($1::bigint[])
                ORDER BY rollout_pk
                FOR NO KEY UPDATE",
        };
        const MOVE_PAYLOAD: Statement = Statement::new(
            "-- move_payload
            UPDATE payload
            SET body = $2, file = $3, start = $4, length = $5
            WHERE rollout_pk = $1",
        );
        let keys = key_list(self.rows.iter().map(|row| row.rollout.0));
        let mut places: HashMap<RolloutPk, Option<Place>> = HashMap::new();
        for mut row in tx.fetch_all(LOCK_MOVING, args![keys]).await? {
            let place = read_place(&mut row)?;
            places.insert(row.get("rollout_pk")?, place);
        }
        let (mut moved, mut left) = (0, Vec::new());
        for Misplaced { rollout, payload, place } in &self.rows {
            // Another replica may have moved it, or a purge has deleted it.
            if places.get(rollout) != Some(place) {
                continue;
            }
            let to = tx.place_payload(*rollout, payload);
            let body = if to.is_some() { Bytes::new() } else { payload.body.clone() };
            let [file, start, length] = Place::columns(to);
            tx.guarded(MOVE_PAYLOAD, args![*rollout, body, file, start, length], 1).await?;
            left.extend(*place);
            moved += 1;
        }
        count_released(tx, &left, self.now).await?;
        Ok(moved)
    }
}

/// Objects without a payload that a row names, since before a time.
pub(crate) struct FindEmptied {
    pub before: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for FindEmptied {
    type Output = Vec<i64>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Vec<i64>, StoreError> {
        const FIND_EMPTIED: Statement = Statement::new(
            "-- find_emptied
            SELECT file
            FROM segment_file
            WHERE live_frames = 0 AND emptied_us <= $1
            ORDER BY emptied_us
            LIMIT $2",
        );
        let rows = tx.fetch_all(FIND_EMPTIED, args![self.before, self.limit]).await?;
        rows.into_iter().map(|mut row| row.get("file")).collect()
    }
}

/// Forgets objects that were removed.
pub(crate) struct ForgetObjects(pub Vec<i64>);

#[async_trait]
impl Op for ForgetObjects {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const FORGET_OBJECTS: Statement = among_keys!(
            "-- forget_objects
            DELETE FROM segment_file
            WHERE live_frames = 0 AND file"
        );
        tx.execute(FORGET_OBJECTS, args![key_list(self.0.iter().copied())]).await.map(drop)
    }
}

/// Which of these objects have a row.
pub(crate) struct FindKnown(pub Vec<i64>);

#[async_trait]
impl Op for FindKnown {
    type Output = Vec<i64>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Vec<i64>, StoreError> {
        const FIND_KNOWN: Statement = among_keys!(
            "-- find_known
            SELECT file
            FROM segment_file
            WHERE file"
        );
        let rows = tx.fetch_all(FIND_KNOWN, args![key_list(self.0.iter().copied())]).await?;
        rows.into_iter().map(|mut row| row.get("file")).collect()
    }
}
