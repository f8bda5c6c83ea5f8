//! Reads payloads, wherever they are stored, and examines where they are.
//!
//! Separate from the operation that reads their rows, because segment files are read outside of its transaction, on a
//! thread that may block.

use std::{collections::HashMap, time::Duration};

use forebay_domain::{
    formats::payload::Payload, ids::RolloutPk, looking::diagnosis::PayloadPlaces, samples::StoredPayload,
};

use super::{
    dialect::{Runs as _, SqlDialect},
    ops::{
        places::{CountPlaces, CountedFile, CountedPlaces, FindPlaces},
        samples::{FoundPayload, ReadPayloads},
    },
    segment_files::{Found, Place},
};
use crate::error::StoreError;

/// How often rows are read because the file that they named is gone. A file is removed after its payloads were moved to
/// another one, or purged; then the next read of the rows says so.
const ATTEMPTS: u32 = 4;

/// The pause before the third read, and ten times as long before the fourth: an object store may show an object late.
const PAUSE: Duration = Duration::from_millis(100);

/// Payloads of rollouts, in the order of the argument. Missing ones are left out.
pub(super) async fn read(dialect: &dyn SqlDialect, rollouts: Vec<RolloutPk>) -> Result<Vec<StoredPayload>, StoreError> {
    let mut payloads: HashMap<RolloutPk, Payload> = HashMap::with_capacity(rollouts.len());
    let mut left = rollouts.clone();
    for attempt in 1..=ATTEMPTS {
        if attempt > 2 {
            tokio::time::sleep(PAUSE * 10_u32.pow(attempt - 3)).await;
        }
        let rows = dialect.read(ReadPayloads(std::mem::take(&mut left))).await?;
        let (outside, inside): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.place.is_some());
        payloads.extend(inside.into_iter().map(|row| (row.stored.rollout_pk, row.stored.payload)));
        let places: Vec<Place> = outside.iter().filter_map(|row| row.place).collect();
        let found = read_places(dialect, places).await?;
        for (FoundPayload { stored, place }, found) in outside.into_iter().zip(found) {
            let StoredPayload { rollout_pk, payload } = stored;
            match found {
                Found::Bytes(body) => {
                    payloads.insert(rollout_pk, Payload { body, ..payload });
                }
                Found::NoFile if attempt < ATTEMPTS => left.push(rollout_pk),
                // Its digest shows that this payload is damaged.
                Found::NoFile => {
                    let file = place.map_or(0, |place| place.file);
                    tracing::error!(segment.file = file, "a segment file is missing");
                    payloads.insert(rollout_pk, payload);
                }
            }
        }
        if left.is_empty() {
            break;
        }
    }
    let in_order = rollouts
        .into_iter()
        .filter_map(|rollout_pk| payloads.remove(&rollout_pk).map(|payload| StoredPayload { rollout_pk, payload }));
    Ok(in_order.collect())
}

async fn read_places(dialect: &dyn SqlDialect, places: Vec<Place>) -> Result<Vec<Found>, StoreError> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let nowhere = || StoreError::Corrupt("a row names a place outside of the database, and there is none".to_owned());
    dialect.places().ok_or_else(nowhere)?.read(places).await
}

/// How often a file is examined at most, if its rows change each time.
const EXAMINATIONS: usize = 8;

/// Frames whose rows are looked up together.
const FRAMES: usize = 256;

/// Counts where payloads are.
pub(super) async fn count(dialect: &dyn SqlDialect) -> Result<PayloadPlaces, StoreError> {
    Ok(sum(&dialect.read(CountPlaces).await?))
}

fn sum(counted: &CountedPlaces) -> PayloadPlaces {
    PayloadPlaces {
        in_database: counted.in_database,
        in_files: counted.files.iter().map(|file| file.counted.0).sum(),
        files: counted.files.len() as u64,
        file_bytes: counted.files.iter().map(|file| file.end).sum(),
        named_bytes: counted.files.iter().map(|file| file.counted.1).sum(),
        findings: Vec::new(),
    }
}

/// Examines where payloads are: each segment file is there, is the one that the database wrote, and has every frame that
/// a row names, and the counts agree.
pub(super) async fn examine(dialect: &dyn SqlDialect) -> Result<PayloadPlaces, StoreError> {
    let counted = dialect.read(CountPlaces).await?;
    let mut places = sum(&counted);
    for (file, payloads) in &counted.without_row {
        places.findings.push(format!("{payloads} payloads are in segment file {file}, which has no row"));
    }
    for file in &counted.files {
        let (frames, bytes) = file.counted;
        if file.live != file.counted {
            places.findings.push(format!(
                "segment file {} is counted with {} frames of {} bytes, the rows say {frames} of {bytes}",
                file.file, file.live.0, file.live.1
            ));
        }
        if frames > 0 {
            places.findings.extend(examine_file(dialect, *file).await?);
        }
    }
    Ok(places)
}

/// Examines a file. Payloads may be purged, moved or added while it is read, and then the file and its count differ. So
/// a finding is reported only if the count is the same before and after.
async fn examine_file(dialect: &dyn SqlDialect, counted: CountedFile) -> Result<Option<String>, StoreError> {
    let (mut file, mut finding) = (counted, None);
    for _ in 0..EXAMINATIONS {
        finding = compare_file(dialect, file).await?;
        if finding.is_none() {
            break;
        }
        let now = dialect.read(CountPlaces).await?.files.into_iter().find(|now| now.file == file.file);
        match now {
            Some(now) if (now.counted, now.end) == (file.counted, file.end) => break,
            Some(now) if now.counted.0 > 0 => file = now,
            Some(_) | None => return Ok(None),
        }
    }
    Ok(finding)
}

async fn compare_file(dialect: &dyn SqlDialect, file: CountedFile) -> Result<Option<String>, StoreError> {
    let Some(reader) = dialect.places() else { return Ok(None) };
    let frames = match reader.frames(file.file, file.mark, file.end).await? {
        Ok(frames) => frames,
        Err(finding) => return Ok(Some(finding)),
    };
    let (mut named, mut differing) = (0, 0);
    for frames in frames.chunks(FRAMES) {
        let rows = dialect.read(FindPlaces(frames.iter().map(|frame| frame.head.rollout).collect())).await?;
        for frame in frames {
            let row = rows.get(&frame.head.rollout).filter(|(place, _)| *place == frame.place);
            named += u64::from(row.is_some());
            differing += u64::from(row.is_some_and(|(_, digest)| *digest != frame.head.digest));
        }
    }
    let name = reader.name(file.file);
    if named != file.counted.0 {
        return Ok(Some(format!("{name} has {named} of the {} frames that rows name", file.counted.0)));
    }
    Ok((differing > 0).then(|| format!("{name} has {differing} frames whose digests differ from their rows")))
}
