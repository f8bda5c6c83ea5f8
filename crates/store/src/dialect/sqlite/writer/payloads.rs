//! The payloads of the writer's transactions in segment files, and the care for these files: new ones begin, empty ones
//! are removed, sparse ones are emptied, and payloads move to where the configuration wants them.
//!
//! Separate from the maintenance of the database file, with which it shares the times at which it happens.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use forebay_domain::{clock::Timestamp, formats::payload::Payload, health::Health, ids::RolloutPk};

use super::Writer;
use crate::{
    dialect::sqlite::segments,
    error::StoreError,
    op::Op as _,
    open::options::PayloadKind,
    ops::{
        places::FindPlaces,
        relocate::{FindMisplaced, Misplaced, Relocate, with_bodies},
    },
    segment_files::{Mark, Place, Reader, Scan, ScannedFrame},
    sql::{Connection as _, Statement, Tx, args},
};

/// Bytes of the frames of one slice. A lease may have to wait for a slice.
const SLICE_BYTES: u64 = 1 << 20;

/// Frames that a slice examines.
const SLICE_FRAMES: usize = 256;

/// While commands keep coming, sparse files are emptied when all files have twice as many bytes as rows name, and so many
/// files more.
const DEAD_FILES_MAX: u64 = 4;

/// What the writer knows about segment files.
#[derive(Debug)]
pub(crate) struct Payloads {
    files: Arc<Reader>,
    kind: PayloadKind,
    /// The length at which no more frames are appended to a file.
    file_bytes: u64,
    /// The last row that was examined, while payloads may be where the configuration does not want them.
    moving: Option<RolloutPk>,
    /// Whether `moving` is set, for others to see.
    is_moving: Arc<AtomicBool>,
    /// The sparse file that is being emptied.
    emptying: Option<Scan>,
    /// Sparse files that stay, because a frame of theirs is damaged.
    damaged: HashSet<i64>,
}

impl Payloads {
    pub(crate) fn new(files: Arc<Reader>, kind: PayloadKind, file_bytes: u64) -> Self {
        Self {
            files,
            kind,
            file_bytes,
            moving: Some(RolloutPk(i64::MIN)),
            is_moving: Arc::new(AtomicBool::new(true)),
            emptying: None,
            damaged: HashSet::new(),
        }
    }

    /// Whether payloads may be where the configuration does not want them, for others to see.
    pub(crate) fn is_moving(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_moving)
    }

    /// Notes the last row that was examined; none if all were.
    fn moved_up_to(&mut self, last: Option<RolloutPk>) {
        self.moving = last;
        self.is_moving.store(last.is_some(), Ordering::Release);
    }
}

impl Writer {
    /// Drops payloads that the transaction has taken since a moment, or all of them.
    pub(super) fn undo_payloads(&mut self, to: Option<Mark>) {
        if let Some(appender) = self.connection.appender() {
            appender.undo_to(to.unwrap_or_default());
        }
    }

    /// Writes and syncs the payloads of the transaction, and counts them in it.
    pub(super) async fn write_payloads(&mut self) -> Result<(), StoreError> {
        let is_failing = self.health_reporter.health() == Health::Failing;
        let Some(appender) = self.connection.appender() else { return Ok(()) };
        if is_failing {
            appender.probe()?;
        }
        let Some(pending) = appender.pending() else { return Ok(()) };
        appender.write()?;
        segments::count_appended(&mut self.connection, pending).await
    }

    /// Begins another segment file when the newest one is full.
    pub(super) async fn begin_segment_when_full(&mut self) {
        let file_bytes = self.payloads.file_bytes;
        let is_full = self.connection.appender().is_some_and(|appender| appender.end() >= file_bytes);
        if is_full {
            let began = self.begin_segment_file().await;
            self.report("begin a segment file", began);
        }
    }

    async fn begin_segment_file(&mut self) -> Result<(), StoreError> {
        let folder = self.payloads.files.folder().clone();
        let next = segments::begin_file(&mut self.connection, &folder).await?;
        if let Some(full) = self.connection.appender() {
            // It costs space, not data, if the file stays longer than what is in it.
            let _ = full.trim();
        }
        self.connection.append_to(next);
        Ok(())
    }

    /// Removes files in which no row names anything. Their space is free at once.
    pub(super) async fn remove_empty_segments(&mut self) {
        let removed = self.try_remove_empty_segments().await;
        self.report("remove segment files", removed);
    }

    async fn try_remove_empty_segments(&mut self) -> Result<(), StoreError> {
        let newest = self.connection.appender().map_or(0, |appender| appender.number());
        let empty = segments::empty_files(&mut self.connection, newest).await?;
        if empty.is_empty() {
            return Ok(());
        }
        for &file in &empty {
            self.payloads.files.remove(file)?;
            self.payloads.damaged.remove(&file);
            self.payloads.emptying.take_if(|scan| scan.number() == file);
        }
        segments::forget_files(&mut self.connection, &empty).await
    }

    /// Whether payloads may be where the configuration does not want them.
    pub(super) fn is_moving_payloads(&self) -> bool {
        self.payloads.moving.is_some()
    }

    /// Moves payloads, slice by slice. Stops when a command waits.
    pub(super) async fn move_payloads_until_called(&mut self) {
        while self.control.is_empty() && self.bulk.is_empty() && self.move_payloads().await {
            self.checkpoint_when_large().await;
            self.begin_segment_when_full().await;
        }
    }

    /// Empties a sparse file while commands keep coming, if sparse files take much more space than what is in them.
    pub(super) async fn empty_sparse_segment_when_due(&mut self) {
        let due = self.payloads.moving.is_none() && self.too_much_is_dead().await.unwrap_or(false);
        if due {
            self.move_payloads().await;
        }
    }

    /// Counts the segment files for the metrics. Returns whether too many of their bytes are named by no row.
    pub(super) async fn too_much_is_dead(&mut self) -> Result<bool, StoreError> {
        const SUM_SEGMENTS: Statement = Statement::new(
            "-- sum_segment_files
            SELECT COUNT(*) AS files, COALESCE(SUM(end_at), 0) AS bytes, COALESCE(SUM(live_bytes), 0) AS live
            FROM segment_file",
        );
        let rows = self.connection.fetch(SUM_SEGMENTS, args![]).await?;
        let Some(mut row) = rows.into_iter().next() else { return Ok(false) };
        let (files, bytes, live): (u64, u64, u64) = (row.get("files")?, row.get("bytes")?, row.get("live")?);
        self.metrics.segment_files(files, bytes, live);
        Ok(bytes > 2 * live + DEAD_FILES_MAX * self.payloads.file_bytes)
    }

    /// Checks that the file to which payloads are appended still has its name.
    pub(super) fn check_segment(&mut self) -> Result<(), StoreError> {
        match self.connection.appender() {
            Some(appender) if !appender.is_in_place() => {
                let path = appender.path();
                let displaced = format!("{} was removed or replaced while the database was served", path.display());
                Err(StoreError::Displaced(displaced))
            }
            _ => Ok(()),
        }
    }

    /// Moves a slice of payloads to where they belong: into segment files or into the database, or out of a sparse file.
    /// Returns whether more may be left.
    pub(super) async fn move_payloads(&mut self) -> bool {
        let moved = self.try_move_payloads().await;
        let is_more = matches!(moved, Ok(true));
        // What cannot be read or understood now will not be later. A disk that is full may have space again.
        if moved.is_err() && self.health_reporter.health() == Health::Writable {
            match self.payloads.emptying.take() {
                Some(scan) => drop(self.payloads.damaged.insert(scan.number())),
                None => self.payloads.moved_up_to(None),
            }
        }
        self.report("move payloads", moved.map(drop));
        is_more
    }

    async fn try_move_payloads(&mut self) -> Result<bool, StoreError> {
        if let Some(after) = self.payloads.moving {
            let find = FindMisplaced { after, kind: self.payloads.kind };
            let (last, rows) = find.run(&mut Tx::new(&mut self.connection, &self.rules)).await?;
            self.relocate(rows).await?;
            self.try_remove_empty_segments().await?;
            self.payloads.moved_up_to(last);
            return Ok(true);
        }
        let Some(mut scan) = self.sparse_file().await? else { return Ok(false) };
        self.payloads.emptying = Some(scan);
        let frames = self.payloads.files.next_frames(&mut scan, SLICE_FRAMES, SLICE_BYTES)?;
        if frames.is_empty() {
            // What is left are frames whose heads cannot be read.
            self.payloads.emptying = None;
            self.payloads.damaged.insert(scan.number());
            return Ok(true);
        }
        let rows = self.named(frames).await?;
        self.relocate(rows).await?;
        self.payloads.emptying = Some(scan);
        self.try_remove_empty_segments().await?;
        Ok(true)
    }

    /// The sparse file that is being emptied, or the next one.
    async fn sparse_file(&mut self) -> Result<Option<Scan>, StoreError> {
        if self.payloads.kind != PayloadKind::Segments {
            return Ok(None);
        }
        if let Some(scan) = self.payloads.emptying {
            return Ok(Some(scan));
        }
        let newest = self.connection.appender().map_or(0, |appender| appender.number());
        let rows = segments::files(&mut self.connection).await?;
        let is_sparse =
            |row: &&segments::FileRow| row.file != newest && row.live_frames > 0 && row.live_bytes * 2 < row.end;
        let sparse = rows.iter().filter(is_sparse).find(|row| !self.payloads.damaged.contains(&row.file));
        Ok(sparse.map(|row| Scan::new(row.file, row.end)))
    }

    /// The payloads of the frames that rows name.
    async fn named(&mut self, frames: Vec<ScannedFrame>) -> Result<Vec<Misplaced>, StoreError> {
        let find = FindPlaces(frames.iter().map(|frame| frame.head.rollout).collect());
        let rows = find.run(&mut Tx::new(&mut self.connection, &self.rules)).await?;
        let named = frames.into_iter().filter_map(|ScannedFrame { place, head }| {
            let (_, digest) = rows.get(&head.rollout).filter(|(named, _)| *named == place)?;
            let payload = Payload { codec: head.codec, digest: *digest, body: Bytes::new(), unpacked_bytes: 0 };
            Some(Misplaced { rollout: head.rollout, payload, place: Some(place) })
        });
        Ok(named.collect())
    }

    /// Stores payloads anew, in one transaction, and names their new places.
    async fn relocate(&mut self, rows: Vec<Misplaced>) -> Result<(), StoreError> {
        let places: Vec<Place> = rows.iter().filter_map(|row| row.place).collect();
        let rows = with_bodies(rows, self.payloads.files.read(&places)?);
        if rows.is_empty() {
            return Ok(());
        }
        self.undo_payloads(None);
        self.control_statement("BEGIN IMMEDIATE").await?;
        let moved = self.relocate_in_transaction(Relocate { rows, now: Timestamp::from_micros(0) }).await;
        match &moved {
            Ok(count) => self.metrics.payloads_moved(*count),
            Err(_) => drop(self.control_statement("ROLLBACK").await),
        }
        self.dirty = true;
        moved.map(drop)
    }

    async fn relocate_in_transaction(&mut self, relocate: Relocate) -> Result<usize, StoreError> {
        let count = relocate.run(&mut Tx::new(&mut self.connection, &self.rules)).await?;
        self.write_payloads().await?;
        self.control_statement("COMMIT").await?;
        Ok(count)
    }

    /// Logs that care for segment files failed, and what that says about the store.
    fn report(&mut self, what: &str, outcome: Result<(), StoreError>) {
        if let Err(error) = outcome {
            self.health_reporter.failed(&error);
            tracing::warn!(error = %error, "cannot {what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sqlx::{Connection as _, SqliteConnection};

    use super::*;
    use crate::{
        dialect::sqlite::{
            Files,
            direct::Direct,
            settings::{MIGRATIONS, file_options},
        },
        ops::places::read_place,
        segment_files::Found,
    };

    /// The length of files in these tests: two payloads.
    const FILE_BYTES: u64 = 10_000;

    async fn writer(folder: &Path, kind: PayloadKind) -> Writer {
        let path = folder.join("x.db");
        let mut made = SqliteConnection::connect_with(&file_options(&path)).await.expect("the file can be made");
        MIGRATIONS.run(&mut made).await.expect("the schema can be made");
        let mut connection = Direct::writing(&path).expect("the file can be written");
        made.close().await.expect("the other connection ends");
        // Payloads of no rollouts.
        connection.execute(Statement::new("PRAGMA foreign_keys = 0"), args![]).await.expect("it is a pragma");
        let opened = segments::open(&mut connection, folder.join("x.db-segments"), Some(kind)).await;
        let (files, kind) = opened.expect("the segment files can be used");
        let held = Files::hold(&path).expect("nobody else has it");
        Writer::alone(connection, held, Payloads::new(files, kind, FILE_BYTES))
    }

    fn body(rollout: i64) -> Vec<u8> {
        (0..5_000_i64).map(|place| (place * rollout) as u8).collect()
    }

    impl Writer {
        async fn sql(&mut self, sql: &'static str) {
            self.connection.execute(Statement::new(sql), args![]).await.expect("it is valid");
        }

        async fn value(&mut self, sql: &'static str) -> i64 {
            let rows = self.connection.fetch(Statement::new(sql), args![]).await.expect("it is valid");
            rows.into_iter().next().expect("it returns a row").get("value").expect("a number")
        }

        async fn store(&mut self, rollouts: std::ops::RangeInclusive<i64>) {
            for rollout in rollouts {
                self.sql("BEGIN IMMEDIATE").await;
                self.insert(rollout).await;
                self.write_payloads().await.expect("there is space");
                self.sql("COMMIT").await;
                self.begin_segment_when_full().await;
            }
        }

        async fn insert(&mut self, rollout: i64) {
            const INSERT: Statement = Statement::new(
                "INSERT INTO payload (rollout_pk, codec, digest, body, file, start, length) VALUES ($1, 1, $2, $3, $4, $5, $6)",
            );
            let payload = Payload::claimed(body(rollout));
            let place = self.connection.place_payload(RolloutPk(rollout), &payload);
            let [file, start, length] = Place::columns(place);
            let stored = if place.is_some() { bytes::Bytes::new() } else { payload.body.clone() };
            let row = args![rollout, &payload.digest[..], stored, file, start, length];
            self.connection.execute(INSERT, row).await.expect("the row is new");
        }

        /// As a purge does it.
        async fn purge(&mut self, rollouts: &[i64]) {
            for &rollout in rollouts {
                let rows = self
                    .connection
                    .fetch(
                        Statement::new("DELETE FROM payload WHERE rollout_pk = $1 RETURNING file, start, length"),
                        args![rollout],
                    )
                    .await;
                let mut row = rows.expect("it is valid").into_iter().next().expect("it is there");
                let place = read_place(&mut row).expect("it is valid").expect("it is in a file");
                let release = Statement::new(
                    "UPDATE segment_file SET live_frames = live_frames - 1, live_bytes = live_bytes - $2 WHERE file = $1",
                );
                let released = args![place.file, place.frame_bytes()];
                self.connection.execute(release, released).await.expect("it is valid");
            }
        }

        /// Every payload that a row names is what was stored.
        async fn check(&mut self, rollouts: &[i64]) {
            let rows = Statement::new("SELECT rollout_pk, body, file, start, length FROM payload ORDER BY rollout_pk");
            let rows = self.connection.fetch(rows, args![]).await.expect("it is valid");
            let mut found = Vec::new();
            for mut row in rows {
                let rollout: i64 = row.get("rollout_pk").expect("a number");
                let bytes = match read_place(&mut row).expect("it is valid") {
                    None => Found::Bytes(row.get("body").expect("bytes")),
                    Some(place) => self.payloads.files.read(&[place]).expect("it can be read").remove(0),
                };
                assert_eq!(bytes, Found::Bytes(body(rollout).into()), "{rollout}");
                found.push(rollout);
            }
            assert_eq!(found, rollouts);
        }

        fn files(&self) -> Vec<i64> {
            self.payloads.files.folder().numbers().expect("the folder can be read")
        }
    }

    #[tokio::test]
    async fn files_without_payloads_are_removed_and_sparse_ones_are_emptied() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path(), PayloadKind::Segments).await;
        writer.store(1..=8).await;
        assert_eq!(writer.files(), [1, 2, 3, 4, 5], "two payloads are in each file");
        writer.purge(&[1, 2, 3]).await;
        writer.remove_empty_segments().await;
        assert_eq!(writer.files(), [2, 3, 4, 5]);
        writer.purge(&[5]).await;
        while writer.move_payloads().await {}
        // Files 2 and 3 had one payload each, which is half of them.
        writer.check(&[4, 6, 7, 8]).await;
        assert_eq!(writer.files(), [4, 5]);
        assert_eq!(writer.value("SELECT SUM(live_frames) AS value FROM segment_file").await, 4);
        let lives = "SELECT SUM(live_bytes) AS value FROM segment_file";
        assert_eq!(writer.value(lives).await, 4 * (5_000 + 64));
    }

    #[tokio::test]
    async fn what_a_command_or_a_transaction_took_is_gone_when_it_is_undone() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path(), PayloadKind::Segments).await;
        writer.sql("BEGIN IMMEDIATE").await;
        writer.insert(1).await;
        let before = writer.connection.appender().map(|appender| appender.mark());
        writer.sql("SAVEPOINT command").await;
        writer.insert(2).await;
        writer.sql("ROLLBACK TO SAVEPOINT command").await;
        writer.undo_payloads(before);
        writer.insert(3).await;
        writer.write_payloads().await.expect("there is space");
        writer.sql("COMMIT").await;
        writer.check(&[1, 3]).await;
        assert_eq!(writer.value("SELECT live_frames AS value FROM segment_file").await, 2);
        assert_eq!(writer.value("SELECT end_at AS value FROM segment_file").await, 64 + 2 * (5_000 + 64));

        writer.sql("BEGIN IMMEDIATE").await;
        writer.insert(4).await;
        writer.write_payloads().await.expect("there is space");
        writer.sql("ROLLBACK").await;
        writer.undo_payloads(None);
        writer.store(5..=5).await;
        writer.check(&[1, 3, 5]).await;
        // The payload of the transaction that failed stays in the file, and no row names it.
        assert_eq!(writer.value("SELECT live_frames AS value FROM segment_file WHERE file = 1").await, 3);
        assert_eq!(
            writer.value("SELECT end_at AS value FROM segment_file WHERE file = 1").await,
            64 + 4 * (5_000 + 64)
        );
    }

    #[tokio::test]
    async fn payloads_move_into_files_and_back() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut inside = writer(folder.path(), PayloadKind::Database).await;
        inside.store(1..=5).await;
        assert_eq!(inside.value("SELECT COUNT(*) AS value FROM payload WHERE file IS NULL").await, 5);
        while inside.move_payloads().await {}
        inside.check(&[1, 2, 3, 4, 5]).await;
        drop(inside);

        let mut outside = writer(folder.path(), PayloadKind::Segments).await;
        while outside.move_payloads().await {}
        outside.check(&[1, 2, 3, 4, 5]).await;
        assert_eq!(outside.value("SELECT COUNT(*) AS value FROM payload WHERE file IS NULL").await, 0);
        assert_eq!(outside.value("SELECT SUM(LENGTH(body)) AS value FROM payload").await, 0);
        drop(outside);

        let mut inside = writer(folder.path(), PayloadKind::Database).await;
        while inside.move_payloads().await {}
        inside.check(&[1, 2, 3, 4, 5]).await;
        assert_eq!(inside.files(), Vec::<i64>::new());
        assert_eq!(inside.value("SELECT COUNT(*) AS value FROM segment_file").await, 0);
    }

    #[tokio::test]
    async fn a_damaged_frame_stays_where_it_is_and_nothing_waits_for_it() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path(), PayloadKind::Segments).await;
        writer.store(1..=6).await;
        writer.purge(&[1, 3]).await;
        let file = writer.payloads.files.folder().file(1);
        let mut bytes = std::fs::read(&file).expect("it is there");
        bytes[64 + 5_064] ^= 1;
        std::fs::write(&file, bytes).expect("it can be written");
        while writer.move_payloads().await {}
        assert_eq!(writer.files(), [1, 3, 4], "the other sparse file is emptied");
        writer.check(&[2, 4, 5, 6]).await;
    }
}
