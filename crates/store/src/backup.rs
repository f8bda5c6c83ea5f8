//! Copies of a SQLite database that is being served: one consistent snapshot, while writes continue.
//!
//! Postgres has its own tools for this. The copy is a complete database; [`restore`](mod@super::restore) replaces a
//! database with it.

use std::{
    fs::File,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use rusqlite::{Connection, OpenFlags};

use super::{
    dialect::sqlite::{Files, Names, mark_copy},
    folders::{folder_of, sync_folder},
    segment_files::{NamedFiles, SegmentFolder, new_store_id, rename_files},
    staging::Staged,
};
use crate::{error::StoreError, open::error::OpenError};

/// How often a database is copied, because segment files that the copy names were removed meanwhile.
const ATTEMPTS: usize = 5;

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
    /// A segment file cannot be copied.
    #[error(transparent)]
    Payloads(#[from] StoreError),
    /// Segment files were removed each time that the database was copied.
    #[error("payloads moved or were purged all the time that the copy was made: try again")]
    Moving,
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
///
/// The segment files that the copy names are in a folder beside it. Those that do not change any more are hard links where
/// the file system allows it, to the files of the database, or to those of `previous`, an earlier copy.
pub fn backup(url: &str, to: &Path, previous: Option<&Path>) -> Result<u64, BackupError> {
    let from =
        crate::open::url::sqlite_path(url).ok_or_else(|| BackupError::NotAFile(crate::open::url::redact(url)))?;
    if to.exists() {
        return Err(BackupError::Exists(to.to_owned()));
    }
    crate::open::check_exists(from)?;
    crate::open::check_folder_of(to)?;
    let to_segments = Names::of(to)?.segments;
    if to_segments.exists() {
        return Err(BackupError::Exists(to_segments));
    }
    Files::check_log(from)?;
    let failed = |source| BackupError::File { path: to.to_owned(), source };
    let staged = Staged::new(to, PARTIAL).map_err(failed)?;
    let segment_bytes = copy_whole(from, staged.path(), previous)?;
    mark_copy(staged.path()).map_err(failed)?;
    let bytes = staged.path().metadata().map_err(failed)?.len() + segment_bytes;
    let staged_segments = Names::of(staged.path())?.segments;
    if staged_segments.exists() {
        let named = std::fs::rename(&staged_segments, &to_segments).and_then(|()| sync_folder(folder_of(to)));
        named.map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => BackupError::Exists(to_segments.clone()),
            _ => BackupError::File { path: to_segments.clone(), source },
        })?;
    }
    staged.name(to).map_err(|source| match source.kind() {
        ErrorKind::AlreadyExists => BackupError::Exists(to.to_owned()),
        _ => failed(source),
    })?;
    Ok(bytes)
}

/// Copies a database and the segment files that the copy names. Returns the bytes of these files.
///
/// While the database is copied, a segment file may be removed, because its payloads moved to another one or were purged.
/// Then the database is copied again, with what has been moved or purged.
fn copy_whole(from: &Path, staged: &Path, previous: Option<&Path>) -> Result<u64, BackupError> {
    let unread = |path: &Path, source| BackupError::Database { path: path.to_owned(), source };
    // The files of the copy have another number in their names, so that the copy finds no file of the database.
    let target = SegmentFolder::new(segments_of(staged)?, new_store_id());
    let earlier = previous.map(earlier_files).transpose()?.flatten();
    for _ in 0..ATTEMPTS {
        // `VACUUM INTO` needs an empty file.
        File::options()
            .write(true)
            .open(staged)
            .and_then(|file| file.set_len(0))
            .map_err(|source| BackupError::File { path: staged.to_owned(), source })?;
        copy(from, staged).map_err(|source| unread(from, source))?;
        let Some(named) = NamedFiles::read(staged).map_err(|source| unread(staged, source))? else { return Ok(0) };
        let source = SegmentFolder::new(segments_of(from)?, named.store_id);
        if let Some(bytes) = named.copy(&source, &target, earlier.as_ref()).map_err(StoreError::from)? {
            rename_files(staged, &target).map_err(|source| unread(staged, source))?;
            return Ok(bytes);
        }
    }
    Err(BackupError::Moving)
}

fn earlier_files(copy: &Path) -> Result<Option<SegmentFolder>, BackupError> {
    crate::open::check_exists(copy)?;
    let named = NamedFiles::read(copy);
    let named = named.map_err(|source| BackupError::Database { path: copy.to_owned(), source })?;
    let folder = segments_of(copy)?;
    Ok(named.map(|named| SegmentFolder::new(folder, named.store_id)))
}

fn segments_of(database: &Path) -> Result<PathBuf, OpenError> {
    Names::of(database).map(|names| names.segments)
}

fn copy(from: &Path, to: &Path) -> Result<(), rusqlite::Error> {
    let connection = Connection::open_with_flags(from, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.execute("VACUUM INTO ?1", [to.to_string_lossy()])?;
    connection.close().map_err(|(_, error)| error)
}
