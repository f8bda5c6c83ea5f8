//! Where payloads are: the rows of segment files, and which frames rows name.

use async_trait::async_trait;
use forebay_domain::{clock::Timestamp, ids::RolloutPk};
use std::collections::{BTreeMap, HashMap};

use crate::{
    error::StoreError,
    op::Op,
    segment_files::Place,
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// A segment file: what its row says, and what the rows of payloads say.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountedFile {
    pub(crate) file: i64,
    pub(crate) mark: i64,
    pub(crate) end: u64,
    /// Frames and their bytes, as its row counts them.
    pub(crate) live: (u64, u64),
    /// The same, counted from the rows of payloads.
    pub(crate) counted: (u64, u64),
}

/// Where all payloads are.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountedPlaces {
    /// Payloads in the database.
    pub(crate) in_database: u64,
    pub(crate) files: Vec<CountedFile>,
    /// Payloads in files that have no row: number of the file, and payloads.
    pub(crate) without_row: Vec<(i64, u64)>,
}

pub(crate) struct CountPlaces;

#[async_trait]
impl Op for CountPlaces {
    type Output = CountedPlaces;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<CountedPlaces, StoreError> {
        const COUNT_PLACES: Statement = Statement::new(
            "-- count_places
            SELECT file, COUNT(*) AS payloads, CAST(COALESCE(SUM(length), 0) AS BIGINT) AS bytes
            FROM payload
            GROUP BY file
            ORDER BY file",
        );
        const LIST_FILES: Statement = Statement::new(
            "-- list_counted_segment_files
            SELECT file, mark, end_at, live_frames, live_bytes
            FROM segment_file
            ORDER BY file",
        );
        let mut places = CountedPlaces::default();
        let mut counted = HashMap::new();
        for mut row in tx.fetch_all(COUNT_PLACES, args![]).await? {
            let (payloads, bytes): (u64, u64) = (row.get("payloads")?, row.get("bytes")?);
            match row.get::<Option<i64>>("file")? {
                None => places.in_database = payloads,
                Some(file) => drop(counted.insert(file, (payloads, Place::frames_bytes(payloads, bytes)))),
            }
        }
        for mut row in tx.fetch_all(LIST_FILES, args![]).await? {
            let file = row.get("file")?;
            let (mark, end) = (row.get("mark")?, row.get("end_at")?);
            let live = (row.get("live_frames")?, row.get("live_bytes")?);
            places.files.push(CountedFile {
                file,
                mark,
                end,
                live,
                counted: counted.remove(&file).unwrap_or_default(),
            });
        }
        places.without_row = counted.into_iter().map(|(file, (payloads, _))| (file, payloads)).collect();
        places.without_row.sort_unstable();
        Ok(places)
    }
}

/// Where the payloads of some rollouts are, with their digests.
pub(crate) struct FindPlaces(pub Vec<RolloutPk>);

#[async_trait]
impl Op for FindPlaces {
    type Output = HashMap<RolloutPk, (Place, [u8; 32])>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const FIND_PLACES: Statement = among_keys!(
            "-- find_places
            SELECT rollout_pk, file, start, length, digest
            FROM payload
            WHERE rollout_pk"
        );
        let keys = key_list(self.0.iter().map(|rollout| rollout.0));
        let mut places = HashMap::with_capacity(self.0.len());
        for mut row in tx.fetch_all(FIND_PLACES, args![keys]).await? {
            if let Some(place) = read_place(&mut row)? {
                places.insert(row.get("rollout_pk")?, (place, row.get("digest")?));
            }
        }
        Ok(places)
    }
}

/// The place that a row names in the columns `file`, `start` and `length`; none if the payload is in the database.
pub(crate) fn read_place(row: &mut Row) -> Result<Option<Place>, StoreError> {
    let Some(file) = row.get("file")? else { return Ok(None) };
    Ok(Some(Place { file, start: row.get("start")?, length: row.get("length")? }))
}

/// Counts that no row names these places any more.
pub(super) async fn count_released(tx: &mut Tx<'_>, places: &[Place], now: Timestamp) -> Result<(), StoreError> {
    const COUNT_RELEASED: Statement = Statement::new(
        "-- count_released
        UPDATE segment_file
        SET live_frames = live_frames - $2, live_bytes = live_bytes - $3,
            emptied_us = CASE WHEN live_frames = $2 THEN $4 END
        WHERE file = $1",
    );
    let mut files: BTreeMap<i64, (u64, u64)> = BTreeMap::new();
    for place in places {
        let (frames, bytes) = files.entry(place.file).or_default();
        *frames += 1;
        *bytes += place.frame_bytes();
    }
    for (file, (frames, bytes)) in files {
        tx.guarded(COUNT_RELEASED, args![file, frames, bytes, now], 1).await?;
    }
    Ok(())
}
