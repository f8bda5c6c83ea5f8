//! The rows about segment files, and the state of the store that is read from them at the start.
//!
//! Separate from [`segment_files`](crate::segment_files), which knows files and no rows.

use std::{path::PathBuf, sync::Arc};

use super::direct::Direct;
use crate::{
    error::StoreError,
    open::options::PayloadKind,
    segment_files::{Appended, Appender, FIRST_FRAME_AT, Reader, SegmentFolder, new_mark, new_store_id},
    sql::{Connection, Statement, args},
};

/// Where payloads are stored, as the database records it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recorded {
    pub(super) kind: PayloadKind,
    pub(super) store_id: u32,
}

/// Reads what the database records; none before its first start has come so far.
pub(super) async fn recorded(connection: &mut Direct) -> Result<Option<Recorded>, StoreError> {
    const FIND_STORE: Statement = Statement::new(
        "-- find_payload_store
        SELECT kind, store_id
        FROM payload_store",
    );
    let Some(mut row) = connection.fetch(FIND_STORE, args![]).await?.into_iter().next() else { return Ok(None) };
    let (kind, store_id): (String, i64) = (row.get("kind")?, row.get("store_id")?);
    let kind = PayloadKind::parse(&kind).ok_or_else(|| StoreError::Corrupt(format!("payload store `{kind}`")))?;
    let store_id = u32::try_from(store_id).map_err(|_| StoreError::Corrupt(format!("payload store {store_id}")))?;
    Ok(Some(Recorded { kind, store_id }))
}

/// Records where new payloads are stored.
async fn record(connection: &mut Direct, recorded: Recorded) -> Result<(), StoreError> {
    const FORGET_STORE: Statement = Statement::new("-- forget_payload_store\nDELETE FROM payload_store");
    const RECORD_STORE: Statement = Statement::new(
        "-- record_payload_store
        INSERT INTO payload_store (kind, store_id)
        VALUES ($1, $2)",
    );
    let row = args![recorded.kind.as_str(), i64::from(recorded.store_id)];
    transaction(connection, vec![(FORGET_STORE, args![]), (RECORD_STORE, row)]).await
}

/// Runs statements in a transaction of their own.
async fn transaction(
    connection: &mut Direct,
    statements: Vec<(Statement, Vec<crate::sql::Arg>)>,
) -> Result<(), StoreError> {
    connection.execute(Statement::new("BEGIN IMMEDIATE"), args![]).await?;
    for (statement, args) in statements {
        if let Err(error) = connection.execute(statement, args).await {
            let _ = connection.execute(Statement::new("ROLLBACK"), Vec::new()).await;
            return Err(error);
        }
    }
    connection.execute(Statement::new("COMMIT"), args![]).await.map(drop)
}

/// A segment file, as its row describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileRow {
    pub(super) file: i64,
    pub(super) mark: i64,
    pub(super) end: u64,
    pub(super) live_frames: u64,
    pub(super) live_bytes: u64,
}

/// The segment files in order. There is one for each 64 MiB of payloads.
pub(super) async fn files(connection: &mut Direct) -> Result<Vec<FileRow>, StoreError> {
    const LIST_FILES: Statement = Statement::new(
        "-- list_segment_files
        SELECT file, mark, end_at, live_frames, live_bytes
        FROM segment_file
        ORDER BY file",
    );
    let rows = connection.fetch(LIST_FILES, args![]).await?;
    rows.into_iter()
        .map(|mut row| {
            Ok(FileRow {
                file: row.get("file")?,
                mark: row.get("mark")?,
                end: row.get("end_at")?,
                live_frames: row.get("live_frames")?,
                live_bytes: row.get("live_bytes")?,
            })
        })
        .collect()
}

/// Begins a segment file: its row is committed before the file is created, so that every file of this database has a
/// row, also after a crash.
pub(super) async fn begin_file(connection: &mut Direct, folder: &SegmentFolder) -> Result<Appender, StoreError> {
    const BEGIN_FILE: Statement = Statement::new(
        "-- begin_segment_file
        INSERT INTO segment_file (file, mark, end_at, live_frames, live_bytes)
        VALUES ($1, $2, $3, 0, 0)",
    );
    let newest = files(connection).await?.last().map_or(0, |row| row.file);
    let number = 1 + newest.max(folder.numbers()?.last().copied().unwrap_or(0));
    let mark = new_mark();
    transaction(connection, vec![(BEGIN_FILE, args![number, mark, FIRST_FRAME_AT])]).await?;
    Ok(Appender::create(folder.clone(), number, mark)?)
}

/// Counts what the open transaction appends.
pub(super) async fn count_appended(connection: &mut Direct, appended: Appended) -> Result<(), StoreError> {
    const COUNT_APPENDED: Statement = Statement::new(
        "-- count_appended
        UPDATE segment_file
        SET end_at = $2, live_frames = live_frames + $3, live_bytes = live_bytes + $4
        WHERE file = $1",
    );
    let Appended { file, frames, bytes, end } = appended;
    let touched = connection.execute(COUNT_APPENDED, args![file, end, frames, bytes]).await?;
    if touched == 1 { Ok(()) } else { Err(StoreError::Corrupt(format!("segment file {file} has no row"))) }
}

/// Forgets files that have been removed.
pub(super) async fn forget_files(connection: &mut Direct, numbers: &[i64]) -> Result<(), StoreError> {
    const FORGET_FILE: Statement = Statement::new(
        "-- forget_segment_file
        DELETE FROM segment_file
        WHERE file = $1 AND live_frames = 0",
    );
    transaction(connection, numbers.iter().map(|&number| (FORGET_FILE, args![number])).collect()).await
}

/// Files without a frame that a row names, other than the newest one.
pub(super) async fn empty_files(connection: &mut Direct, newest: i64) -> Result<Vec<i64>, StoreError> {
    const FIND_EMPTY: Statement = Statement::new(
        "-- find_empty_segment_files
        SELECT file
        FROM segment_file
        WHERE live_frames = 0 AND file <> $1",
    );
    let rows = connection.fetch(FIND_EMPTY, args![newest]).await?;
    rows.into_iter().map(|mut row| row.get("file")).collect()
}

/// Opens the segment files as the database and the configuration say. Without a configured kind, the recorded one
/// stays, and a new database has segment files.
pub(super) async fn open(
    connection: &mut Direct,
    path: PathBuf,
    configured: Option<PayloadKind>,
) -> Result<(Arc<Reader>, PayloadKind), StoreError> {
    let found = recorded(connection).await?;
    let kind = configured.or(found.map(|found| found.kind)).unwrap_or(PayloadKind::Segments);
    let store_id = found.map_or_else(new_store_id, |found| found.store_id);
    if found.is_none_or(|found| found.kind != kind) {
        record(connection, Recorded { kind, store_id }).await?;
    }
    let folder = SegmentFolder::new(path, store_id);
    let rows = files(connection).await?;
    for row in rows.iter().filter(|row| row.live_frames > 0) {
        folder.check(row.file, row.mark, row.end)?;
    }
    if kind == PayloadKind::Segments {
        let appender = match rows.last() {
            Some(newest) if folder.check(newest.file, newest.mark, newest.end).is_ok() => {
                Appender::open(folder.clone(), newest.file, newest.mark, newest.end)?
            }
            // A start that was killed has written its row, and perhaps not the file.
            _ => begin_file(connection, &folder).await?,
        };
        connection.append_to(appender);
    }
    Ok((Arc::new(Reader::new(folder)), kind))
}
