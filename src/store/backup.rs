//! Copies of a SQLite database that is being served: one consistent snapshot, while writes go on.
//!
//! Postgres has its own tools for this. The copy is a database like any other: it is restored by serving it.

use std::path::{Path, PathBuf};

use sqlx::{Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};

/// A backup cannot be made. Nothing is left at its place.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The database is not a file of ours to copy.
    #[error("`{0}` is not `sqlite:PATH`; of Postgres, pg_dump makes consistent copies while it serves")]
    NotAFile(String),
    /// There is something where the copy should go.
    #[error("{0} exists already")]
    Exists(PathBuf),
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
        source: sqlx::Error,
    },
}

/// Copies the database that `url` names to `to`, which must not exist; the size of the copy in bytes.
///
/// The copy is on disk, whole, before it has its name.
pub async fn backup(url: &str, to: &Path) -> Result<u64, BackupError> {
    let from = match url.strip_prefix("sqlite:") {
        Some(path) if !path.is_empty() && path != ":memory:" => Path::new(path.strip_prefix("//").unwrap_or(path)),
        _ => return Err(BackupError::NotAFile(super::redact(url))),
    };
    if to.exists() {
        return Err(BackupError::Exists(to.to_owned()));
    }
    let mut partial = to.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let outcome = copy(from, &partial).await.and_then(|bytes| settle(&partial, to).map(|()| bytes));
    if outcome.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    outcome
}

async fn copy(from: &Path, partial: &Path) -> Result<u64, BackupError> {
    let failed = |source| BackupError::Database { path: from.to_owned(), source };
    // What an interrupted copy left behind is in the way, and nothing else has this name.
    let _ = std::fs::remove_file(partial);
    let options = SqliteConnectOptions::new().filename(from).read_only(true);
    let mut connection = SqliteConnection::connect_with(&options).await.map_err(failed)?;
    let target = partial.to_string_lossy().into_owned();
    sqlx::query("VACUUM INTO $1").bind(target).execute(&mut connection).await.map_err(failed)?;
    connection.close().await.map_err(failed)?;
    let size = std::fs::metadata(partial).map_err(|source| BackupError::File { path: partial.to_owned(), source })?;
    Ok(size.len())
}

/// Syncs the copy, gives it its name, and syncs that.
fn settle(partial: &Path, to: &Path) -> Result<(), BackupError> {
    let failed = |path: &Path, source| BackupError::File { path: path.to_owned(), source };
    std::fs::File::open(partial).and_then(|file| file.sync_all()).map_err(|source| failed(partial, source))?;
    std::fs::rename(partial, to).map_err(|source| failed(to, source))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(|source| failed(folder, source))
}
