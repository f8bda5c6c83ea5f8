//! Whether the store can write. Readiness reports it, requests are refused early by it, and it decides when the process
//! has to end.
//!
//! Separate from the dialects, because the rest of the service needs the same three answers from both.
//!
//! If a write fails for a temporary reason (a full disk), posts are refused and `/readyz` answers 503 until a write
//! succeeds again. If only the object store fails, posts are refused and everything else goes on. An I/O error ends the
//! process, because after a failed fsync only a new start can find out what is on disk.

use std::sync::Arc;

use forebay_domain::health::Health;
use tokio::sync::watch;

use super::segment_files::{ObjectError, SegmentFileError};
use crate::error::StoreError;

/// SQLite's primary result code for I/O errors; extended codes carry it in their lowest byte.
const SQLITE_IOERR: i32 = 10;

/// SQLSTATEs of a server that cannot write or cannot be reached: insufficient resources, shutdowns, I/O errors, a
/// read-only transaction, and a lock or a statement that took longer than a transaction waits.
const POSTGRES_UNABLE: [&str; 7] = ["53", "57P0", "58", "25006", "08", "55P03", "57014"];

/// The health of the store, which only its dialect changes.
#[derive(Clone, Debug)]
pub(super) struct HealthReporter(Arc<watch::Sender<Health>>);

impl Default for HealthReporter {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Health::default())))
    }
}

impl HealthReporter {
    pub(super) fn watch(&self) -> watch::Receiver<Health> {
        self.0.subscribe()
    }

    pub(super) fn health(&self) -> Health {
        *self.0.borrow()
    }

    /// Records that a write was committed.
    pub(super) fn committed(&self) {
        if self.change(Health::Writable) {
            tracing::info!("the store can write again");
        }
    }

    /// Records that a write failed. Errors that say nothing about the store's health are ignored.
    pub(super) fn failed(&self, error: &StoreError) {
        let Some(found) = classify(error) else { return };
        if self.change(found) {
            tracing::error!(error = %error, broken = found == Health::Broken, "the store cannot write");
        }
    }

    /// Changes the health, unless it is broken: a broken store stays broken.
    fn change(&self, to: Health) -> bool {
        self.0.send_if_modified(|health| {
            let changes = *health != to && *health != Health::Broken;
            if changes {
                *health = to;
            }
            changes
        })
    }
}

/// What a failed write says about the next ones.
fn classify(error: &StoreError) -> Option<Health> {
    let failure = match error {
        StoreError::Database(failure) => failure,
        StoreError::Displaced(_) => return Some(Health::Broken),
        StoreError::Corrupt(_) | StoreError::Closed => return None,
    };
    if let Some(error) = failure.reported::<rusqlite::Error>() {
        return classify_sqlite(error.sqlite_error()?.extended_code);
    }
    if let Some(error) = failure.reported::<SegmentFileError>() {
        return error.health();
    }
    if failure.reported::<ObjectError>().is_some() {
        return Some(Health::WithoutPayloads);
    }
    let error = failure.reported::<sqlx::Error>()?;
    let Some(database) = error.as_database_error() else {
        use sqlx::Error as E;
        let away =
            matches!(error, E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed);
        return away.then_some(Health::Failing);
    };
    let code = database.code()?;
    POSTGRES_UNABLE.iter().any(|prefix| code.starts_with(prefix)).then_some(Health::Failing)
}

fn classify_sqlite(code: i32) -> Option<Health> {
    /// `SQLITE_READONLY`, `SQLITE_FULL` and `SQLITE_CANTOPEN`: the file may only be read, the disk is full, or no file
    /// can be opened.
    const MAY_PASS: [i32; 3] = [8, 13, 14];
    match code & 0xff {
        SQLITE_IOERR => Some(Health::Broken),
        primary if MAY_PASS.contains(&primary) => Some(Health::Failing),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_errors_are_final_and_a_full_disk_is_not() {
        // SQLITE_IOERR_FSYNC, SQLITE_IOERR_WRITE, SQLITE_FULL, SQLITE_CONSTRAINT_UNIQUE.
        let found = [1_034, 778, 13, 2_067].map(classify_sqlite);
        assert_eq!(found, [Some(Health::Broken), Some(Health::Broken), Some(Health::Failing), None]);
    }

    #[test]
    fn what_is_broken_stays_broken() {
        let health_reporter = HealthReporter::default();
        assert!(health_reporter.change(Health::Failing) && health_reporter.change(Health::Broken));
        health_reporter.committed();
        assert_eq!(health_reporter.health(), Health::Broken);
    }
}
