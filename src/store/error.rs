//! Converts the errors of the drivers into the port's [`StoreError`], and tells which of them are worth another
//! attempt.

use sqlx::error::DatabaseError;

use crate::buffer::port::error::{DatabaseFailure, StoreError};

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(DatabaseFailure::new(error))
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(DatabaseFailure::new(error))
    }
}

/// Whether Postgres ended this transaction in favour of another one, so that it may succeed when it is run again.
pub(super) fn is_conflict(error: &StoreError) -> bool {
    // unique_violation: two replicas created the same row at once, and the second one must read again.
    const CONFLICTS: [&str; 3] = ["40001", "40P01", "23505"];
    let StoreError::Database(failure) = error else { return false };
    let reported = failure.reported::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    reported.and_then(DatabaseError::code).is_some_and(|code| CONFLICTS.contains(&&*code))
}
