//! The maintenance of the file: the log is copied back into the database, free pages are given back, and the files must
//! keep their names.
//!
//! Separate from the commits, because it is about the file and not about commands.

use super::{super::settings::WAL_BYTES_MAX, Writer};
use crate::{
    error::StoreError,
    sql::{Connection as _, Row, Statement},
};

/// Bytes in the write-ahead log at which its pages are copied back into the database although commands are waiting. The
/// larger it is, the more often a page was rewritten before it is copied, which saves copies.
const WAL_BUSY_BYTES: i64 = 32 << 20;

/// Gives free pages back to the file system in slices of at most 1 MiB. A slice takes a few milliseconds, and a lease may
/// have to wait for it.
const VACUUM_PAGES: &str = "PRAGMA incremental_vacuum(64)";

/// Commits between two slices of such care while commands keep coming, because each slice is a commit of its own.
const CARE_EVERY_COMMITS: u32 = 8;

/// Bytes of free pages that are kept while commands keep coming, because the next rollouts need them.
const FREE_BYTES_KEPT: i64 = 16 << 20;

impl Writer {
    fn wal_bytes(&self) -> u64 {
        std::fs::metadata(&self.files.names.wal).map_or(0, |metadata| metadata.len())
    }

    /// Does the maintenance that cannot wait until no command is waiting.
    pub(super) async fn look_after_file(&mut self) {
        self.checkpoint_when_large().await;
        self.begin_segment_when_full().await;
        self.commits += 1;
        if self.commits >= CARE_EVERY_COMMITS {
            self.commits = 0;
            self.vacuum_when_due().await;
            self.remove_empty_segments().await;
            self.empty_sparse_segment_when_due().await;
        }
    }

    pub(super) async fn checkpoint_when_large(&mut self) {
        let bytes = self.wal_bytes();
        self.metrics.wal_bytes(bytes);
        if bytes > WAL_BYTES_MAX {
            self.maintain("PRAGMA wal_checkpoint(TRUNCATE)").await;
        } else if self.wal_pages().await > WAL_BUSY_BYTES / self.page_bytes {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
        }
    }

    /// The number of pages that are only in the log. The file's length does not show it, because the file keeps its
    /// length when the log starts again.
    async fn wal_pages(&mut self) -> i64 {
        let pages = |mut row: Row| Some(row.get::<i64>("log").ok()? - row.get::<i64>("checkpointed").ok()?);
        let rows = self.connection.fetch(Statement::new("PRAGMA wal_checkpoint(NOOP)"), Vec::new()).await;
        rows.ok().and_then(|rows| rows.into_iter().next()).and_then(pages).unwrap_or(0)
    }

    pub(super) async fn idle(&mut self) {
        if let Err(error) = self.check_places().await {
            self.health_reporter.failed(&error);
            return;
        }
        if std::mem::take(&mut self.dirty) {
            self.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
            self.vacuum_until_called().await;
            self.metrics.wal_bytes(self.wal_bytes());
            self.remove_empty_segments().await;
            self.move_payloads_until_called().await;
            // Its metrics are those of the last commits, too.
            let _ = self.too_much_is_dead().await;
        } else if self.is_moving_payloads() {
            self.move_payloads_until_called().await;
        }
    }

    /// Gives all free pages back, slice by slice. Stops when a command waits.
    async fn vacuum_until_called(&mut self) {
        let mut free = self.free_pages().await;
        while free > 0 {
            self.maintain(VACUUM_PAGES).await;
            self.checkpoint_when_large().await;
            let left = self.free_pages().await;
            if left >= free {
                break;
            }
            free = left;
            // Also set for the next pause: freed pages are in the log, and must be copied back from there.
            self.dirty = true;
            if !(self.control.is_empty() && self.bulk.is_empty()) {
                break;
            }
        }
    }

    /// Gives pages back while commands keep coming, so that the space that a purge frees does not stay used until the
    /// load ends.
    async fn vacuum_when_due(&mut self) {
        if self.free_pages().await > FREE_BYTES_KEPT / self.page_bytes {
            self.maintain(VACUUM_PAGES).await;
        }
    }

    async fn free_pages(&mut self) -> i64 {
        let rows = self.connection.fetch(Statement::new("PRAGMA freelist_count"), Vec::new()).await;
        let pages = |mut row: Row| row.get::<i64>("freelist_count").ok();
        rows.ok().and_then(|rows| rows.into_iter().next()).and_then(pages).unwrap_or(0)
    }

    /// Checks that the files are still in place.
    pub(super) async fn check_places(&mut self) -> Result<(), StoreError> {
        let Err(displaced) = self.files.verify() else { return self.check_segment() };
        // The log is open here, even if it has lost its name. Copying it back keeps every acknowledged write in the
        // database.
        if self.files.is_intact() {
            let copied = self.connection.fetch(Statement::new("PRAGMA wal_checkpoint(TRUNCATE)"), Vec::new()).await;
            if let Err(error) = copied {
                tracing::error!(error = %error, "the write-ahead log could not be copied into the database");
            }
        }
        // Another log may have its name now. It must not be replayed.
        if let Err(error) = self.files.disown_log() {
            tracing::error!(error = %error, "the mark of the write-ahead log in the lock file could not be removed");
        }
        Err(StoreError::Displaced(displaced.to_string()))
    }

    /// Runs a pragma whose failure costs space, not data.
    pub(super) async fn maintain(&mut self, pragma: &'static str) {
        if let Err(error) = self.connection.fetch(Statement::new(pragma), Vec::new()).await {
            self.health_reporter.failed(&error);
            tracing::warn!(error = %error, pragma, "maintenance of the database file failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sqlx::{Connection as _, SqliteConnection};

    use super::*;
    use crate::{
        dialect::sqlite::{
            Files, Payloads,
            direct::Direct,
            settings::{self, file_options},
            writer::command::Idle,
        },
        open::options::{PayloadKind, SEGMENT_FILE_BYTES},
        segment_files::{Reader, SegmentFolder},
    };
    use forebay_domain::health::Health;

    const PAGE_BYTES: i64 = settings::PAGE_BYTES as i64;

    const FREE_PAGES_KEPT: i64 = FREE_BYTES_KEPT / PAGE_BYTES;

    /// A writer on a new file.
    async fn writer(folder: &std::path::Path) -> Writer {
        let path = folder.join("x.db");
        let made = SqliteConnection::connect_with(&file_options(&path)).await.expect("the file can be made");
        let connection = Direct::writing(&path).expect("the file can be written");
        made.close().await.expect("the other connection ends");
        let segments = Reader::new(SegmentFolder::new(folder.join("x.db-segments"), 1));
        let payloads = Payloads::new(Arc::new(segments), PayloadKind::Database, SEGMENT_FILE_BYTES);
        Writer::alone(connection, Files::hold(&path).expect("nobody else has it"), payloads)
    }

    #[tokio::test]
    async fn free_pages_are_given_back_in_slices_while_commands_keep_coming_and_all_of_them_after() {
        const SLICE: i64 = 64;
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        // Twice as many free pages as are kept for the next rollouts.
        for sql in ["CREATE TABLE t (body BLOB)", "INSERT INTO t VALUES (zeroblob(33554432))", "DELETE FROM t"] {
            writer.control_statement(sql).await.expect("the file can be written");
        }
        let mut free = writer.free_pages().await;
        assert!(free > FREE_PAGES_KEPT + 10 * SLICE, "{free}");
        for _ in 0..40 * CARE_EVERY_COMMITS {
            writer.commit(Box::new(Idle { is_urgent: false })).await;
            writer.look_after_file().await;
            let left = writer.free_pages().await;
            assert!((0..=SLICE).contains(&(free - left)), "{free} and then {left}");
            free = left;
        }
        assert!(((FREE_PAGES_KEPT - SLICE)..=FREE_PAGES_KEPT).contains(&free), "{free} stay free");
        writer.idle().await;
        assert_eq!(writer.free_pages().await, 0);
        writer.idle().await;
        let bytes = std::fs::metadata(folder.path().join("x.db")).expect("it is there").len();
        assert!(bytes < 1 << 20, "{bytes} bytes are left");
    }

    #[tokio::test]
    async fn a_writer_that_has_nothing_to_do_notices_that_its_file_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        writer.control_statement("CREATE TABLE t (body BLOB)").await.expect("the file can be written");
        writer.idle().await;
        assert_eq!(writer.health_reporter.health(), Health::Writable);
        std::fs::remove_file(folder.path().join("x.db")).expect("it is there");
        writer.idle().await;
        assert_eq!(writer.health_reporter.health(), Health::Broken);
    }

    #[tokio::test]
    async fn pages_that_were_copied_back_are_not_counted_although_the_log_stays_long() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut writer = writer(folder.path()).await;
        for sql in ["CREATE TABLE t (body BLOB)", "INSERT INTO t VALUES (zeroblob(1048576))"] {
            writer.control_statement(sql).await.expect("the file can be written");
        }
        let megabyte = (1 << 20) / PAGE_BYTES;
        assert!(writer.wal_pages().await >= megabyte);
        writer.maintain("PRAGMA wal_checkpoint(PASSIVE)").await;
        assert_eq!(writer.wal_pages().await, 0);
        writer.control_statement("INSERT INTO t VALUES ('one page')").await.expect("the file can be written");
        assert!((1..10).contains(&writer.wal_pages().await));
        assert!(writer.wal_bytes() >= 1 << 20);
    }
}
