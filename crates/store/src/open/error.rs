//! Why a store cannot be opened.

use std::path::Path;

use sqlx::migrate::MigrateError;

use crate::error::StoreError;

/// The number of the first migration. Those of databases of before 0.1.0 are smaller.
pub(crate) const BASELINE: i64 = 100;

/// The store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL does not have the form of a database that this build supports.
    #[error("database `{0}` is not `sqlite:PATH`, `sqlite::memory:` or `postgres://...`")]
    Url(String),
    /// The file does not exist, and the command must not create it.
    #[error("database {0} does not exist: correct the path; only `forebay serve` creates a database")]
    Missing(String),
    /// The folder of the file does not exist. Most likely the path is mistyped.
    #[error("the folder {folder} of {name} does not exist: correct the path, or create the folder")]
    NoFolder {
        /// The file.
        name: String,
        folder: String,
    },
    /// The server does not answer, or rejects the connection.
    #[error("cannot open database {name}: {why}")]
    Unreachable {
        /// The database.
        name: String,
        /// The server's answer, or the error of the connection.
        why: String,
    },
    /// A file or folder cannot be used.
    #[error("cannot use {name}")]
    File {
        /// The file.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another process holds the file.
    #[error("database {0} is locked: another forebay serves it")]
    Locked(String),
    /// The write-ahead log beside the file does not belong to it.
    #[error("{0}")]
    Log(String),
    /// The database cannot be opened: damaged, not a database, or unreachable.
    #[error("cannot open database {name}")]
    Database {
        /// The database.
        name: String,
        /// Why.
        source: sqlx::Error,
    },
    /// A SQLite file cannot be used.
    #[error("cannot use database {name}")]
    Sqlite {
        /// The database.
        name: String,
        /// Why.
        source: rusqlite::Error,
    },
    /// The payloads cannot be used: a segment file is missing, was replaced, or cannot be opened.
    #[error("cannot use the payloads of database {name}: {source}")]
    Payloads {
        /// The database.
        name: String,
        /// Why.
        source: StoreError,
    },
    /// A newer version wrote the database.
    #[error("database {name} was written by a newer forebay (schema {version}): upgrade, or restore a backup")]
    Newer {
        /// The database.
        name: String,
        /// Number of the unknown migration.
        version: i64,
    },
    /// A version before 0.1.0 wrote the database, and this one does not read its form.
    #[error(
        "database {name} was written by a forebay of before 0.1.0: write its rollouts to files with that program \
         (`forebay export --format forebay`), and post them to a new database with this one (`forebay import --format \
         forebay`)"
    )]
    TooOld {
        /// The database.
        name: String,
    },
    /// The schema cannot be brought up to date.
    #[error("cannot migrate database {name}")]
    Schema {
        /// The database.
        name: String,
        /// Why.
        source: Box<MigrateError>,
    },
    /// The database's settings or its state do not allow the guarantees of the service.
    #[error("{0}")]
    Settings(String),
}

impl OpenError {
    pub(crate) fn file(path: &Path, source: std::io::Error) -> Self {
        Self::File { name: path.display().to_string(), source }
    }

    pub(crate) fn database(path: &Path, source: sqlx::Error) -> Self {
        Self::Database { name: path.display().to_string(), source }
    }

    pub(crate) fn schema(name: &str, source: MigrateError) -> Self {
        match source {
            MigrateError::VersionMissing(version) if version < BASELINE => Self::TooOld { name: name.to_owned() },
            MigrateError::VersionMissing(version) | MigrateError::VersionTooNew(version, _) => {
                Self::Newer { name: name.to_owned(), version }
            }
            MigrateError::Execute(source) => Self::Database { name: name.to_owned(), source },
            source => Self::Schema { name: name.to_owned(), source: Box::new(source) },
        }
    }
}
