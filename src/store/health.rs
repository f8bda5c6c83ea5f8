//! Whether the store can write: what readiness tells, what turns work away early, and when to give up.
//!
//! Separate from the dialects, because the rest of the service asks the same three questions of both.

use std::sync::Arc;

use tokio::sync::watch;

use super::StoreError;

/// SQLite's primary result code for I/O errors; extended codes carry it in their lowest byte.
const SQLITE_IOERR: i32 = 10;

/// SQLSTATEs of a server that cannot write or is not there: insufficient resources, shutdowns, I/O errors; a
/// transaction that may only read; a lock, or a whole statement, that took longer than a transaction waits.
const POSTGRES_UNABLE: [&str; 7] = ["53", "57P0", "58", "25006", "08", "55P03", "57014"];

/// What the last writes say about the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Nothing speaks against it.
    #[default]
    Writable,
    /// The last write failed for a reason that may pass: a full disk, a database that is away. The sweep tries again.
    Failing,
    /// A write to the file failed, and what is on disk is known only by reading it afresh: after a failed fsync the
    /// kernel may have dropped the pages and would report success to a second one. Or the file is not at its place any
    /// more, and what is written to it is lost. The process has to end.
    Broken,
}

/// The one place where a dialect says how it is doing.
#[derive(Clone, Debug)]
pub(super) struct Vitals(Arc<watch::Sender<Health>>);

impl Default for Vitals {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Health::default())))
    }
}

impl Vitals {
    pub(super) fn watch(&self) -> watch::Receiver<Health> {
        self.0.subscribe()
    }

    pub(super) fn health(&self) -> Health {
        *self.0.borrow()
    }

    /// A write was committed.
    pub(super) fn committed(&self) {
        if self.change(Health::Writable) {
            tracing::info!("the store can write again");
        }
    }

    /// A write failed; errors that say nothing about the store's health are passed over.
    pub(super) fn failed(&self, error: &StoreError) {
        let Some(found) = judge(error) else { return };
        if self.change(found) {
            tracing::error!(error = %error, broken = found == Health::Broken, "the store cannot write");
        }
    }

    /// What is broken stays broken.
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
fn judge(error: &StoreError) -> Option<Health> {
    let error = match error {
        StoreError::Database(error) => error,
        StoreError::Displaced(_) => return Some(Health::Broken),
        StoreError::Sqlite(error) => return judge_sqlite(error.sqlite_error()?.extended_code),
        _ => return None,
    };
    let Some(database) = error.as_database_error() else {
        use sqlx::Error as E;
        let away = matches!(
            **error,
            E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed
        );
        return away.then_some(Health::Failing);
    };
    let code = database.code()?;
    POSTGRES_UNABLE.iter().any(|prefix| code.starts_with(prefix)).then_some(Health::Failing)
}

fn judge_sqlite(code: i32) -> Option<Health> {
    /// The database file may only be read, or the disk is full, or no file can be opened.
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
        let found = [1_034, 778, 13, 2_067].map(judge_sqlite);
        assert_eq!(found, [Some(Health::Broken), Some(Health::Broken), Some(Health::Failing), None]);
    }

    #[test]
    fn what_is_broken_stays_broken() {
        let vitals = Vitals::default();
        assert!(vitals.change(Health::Failing) && vitals.change(Health::Broken));
        vitals.committed();
        assert_eq!(vitals.health(), Health::Broken);
    }
}
