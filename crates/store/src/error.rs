//! The errors of a store, and which of them are worth another attempt.

use std::{error::Error, fmt, sync::Arc};

use forebay_domain::refusal::Refusal;
use sqlx::error::DatabaseError;

/// The store cannot answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The database failed. Only a later read shows whether a commit happened.
    #[error("the database failed: {0}")]
    Database(DatabaseFailure),
    /// A file of the database was removed or replaced while it was open.
    #[error("{0}")]
    Displaced(String),
    /// A row has a value that the schema and this version do not allow.
    #[error("the store is corrupt: {0}")]
    Corrupt(String),
    /// The store is closed or closing.
    #[error("the store is closed")]
    Closed,
}

/// Why a database failed, as its driver reports it. Only the store knows the driver.
///
/// The source is shared, because all operations of one commit fail together.
#[derive(Clone, Debug)]
pub struct DatabaseFailure(Arc<dyn Error + Send + Sync>);

impl DatabaseFailure {
    /// Wraps an error of a driver.
    #[must_use]
    pub fn new(reported: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(reported))
    }

    /// The driver's error, if it has this type.
    #[must_use]
    pub fn reported<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for DatabaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An answer of the store, or a refusal of the domain. A refusal changed nothing.
pub type Answer<T> = Result<Result<T, Refusal>, StoreError>;

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
