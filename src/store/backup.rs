//! Copies of a SQLite database that is being served: one consistent snapshot, while writes continue.
//!
//! Postgres has its own tools for this. The copy is a complete database; [`restore`](mod@super::restore) replaces a
//! database with it.

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

/// The ending of the names of unfinished copies.
const PARTIAL: &str = ".partial";

/// A backup cannot be made. No file is left at the target.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The URL does not name a SQLite file.
    #[error("`{0}` is not `sqlite:PATH`; back up Postgres with `pg_dump`, also while the service runs")]
    NotAFile(String),
    /// The target of the copy exists.
    #[error("{0} already exists")]
    Exists(PathBuf),
    /// SQLite cannot open the database safely.
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
    /// The database cannot be read, or the copy cannot be written.
    #[error("cannot copy {path}")]
    Database {
        /// The database.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
}

/// Copies the database that `url` names to `to`, which must not exist. Returns the size of the copy in bytes.
///
/// The whole copy is on disk before it gets its name. This call blocks until then.
pub fn backup(url: &str, to: &Path) -> Result<u64, BackupError> {
    let from = super::sqlite_path(url).ok_or_else(|| BackupError::NotAFile(super::redact(url)))?;
    if to.exists() {
        return Err(BackupError::Exists(to.to_owned()));
    }
    super::check_exists(from)?;
    super::check_folder_of(to)?;
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
