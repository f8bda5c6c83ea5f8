//! The errors of a store.

use std::{error::Error, fmt, sync::Arc};

use forebay_domain::refusal::Refusal;

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
