//! Copies of a SQLite database that is being served: one consistent snapshot, while writes go on.
//!
//! Postgres has its own tools for this. The copy is a database like any other; [`restore`](super::restore) puts it in
//! the place of one.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use rusqlite::{Connection, OpenFlags};

use super::{
    OpenError,
    dialect::{Files, mark_copy},
    staging::Staged,
};

/// What names of unfinished copies end with.
const PARTIAL: &str = ".partial";

/// A backup cannot be made. Nothing is left at its place.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The database is not a file of ours to copy.
    #[error("`{0}` is not `sqlite:PATH`; of Postgres, pg_dump makes consistent copies while it serves")]
    NotAFile(String),
    /// There is something where the copy should go.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// The database is not as SQLite may open it.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file cannot be used.
    #[error("cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The database cannot be read, or the copy not be written.
    #[error("cannot copy {path}")]
    Database {
        /// The database.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
}

/// Copies the database that `url` names to `to`, which must not exist; the size of the copy in bytes.
///
/// The copy is on disk, whole, before it has its name. Blocks until then.
pub fn backup(url: &str, to: &Path) -> Result<u64, BackupError> {
    let from = super::sqlite_path(url).ok_or_else(|| BackupError::NotAFile(super::redact(url)))?;
    if to.exists() {
        return Err(BackupError::Exists(to.to_owned()));
    }
    Files::check_log(from)?;
    let failed = |source| BackupError::File { path: to.to_owned(), source };
    let staged = Staged::new(to, PARTIAL).map_err(failed)?;
    copy(from, staged.path()).map_err(|source| BackupError::Database { path: from.to_owned(), source })?;
    mark_copy(staged.path()).map_err(failed)?;
    let bytes = staged.path().metadata().map_err(failed)?.len();
    staged.name(to).map_err(|source| match source.kind() {
        ErrorKind::AlreadyExists => BackupError::Exists(to.to_owned()),
        _ => failed(source),
    })?;
    Ok(bytes)
}

fn copy(from: &Path, to: &Path) -> Result<(), rusqlite::Error> {
    let connection = Connection::open_with_flags(from, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.execute("VACUUM INTO ?1", [to.to_string_lossy()])?;
    connection.close().map_err(|(_, error)| error)
}
