//! Room on the disk that is kept for a start. SQLite needs some to open a database, also to read it: the log and its
//! index are new files. Without this, a service that is restarted on a full disk would not come up.
//!
//! Separate from the files of the database, because nothing in it is ever read.

use std::{
    error::Error,
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate};
use sqlx::error::DatabaseError;

use super::files::Names;
use crate::folders::with_suffix;

/// What a start writes, several times over: pages of the log, 32 KiB of its index for every 32 MiB of the log, the first
/// bytes of a segment file.
const RESERVE_BYTES: u64 = 1 << 20;

/// Bytes of the blocks that the system counts for a file.
const BLOCK_BYTES: u64 = 512;

/// SQLite's codes for a full disk, and for an index of the log that has no room.
const FULL: [i32; 2] = [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_IOERR_SHMSIZE];

fn path_of(database: &Path) -> PathBuf {
    with_suffix(database, ".reserve")
}

/// Frees the room, if there is any.
pub(super) fn release(database: &Path) -> bool {
    Names::of(database).is_ok_and(|names| std::fs::remove_file(path_of(&names.database)).is_ok())
}

/// Takes the room, unless it is taken. A disk without it is no error.
pub(super) fn keep(database: &Path) {
    let path = path_of(database);
    if std::fs::metadata(&path).is_ok_and(|found| found.blocks() * BLOCK_BYTES >= RESERVE_BYTES) {
        return;
    }
    let take = |file: File| Ok(fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES)?);
    if let Err(error) = File::create(&path).and_then(take) {
        tracing::debug!(path = %path.display(), %error, "no room is kept for a start on a full disk");
        let _ = std::fs::remove_file(&path);
    }
}

/// Whether a database cannot be opened because the disk is full.
pub(super) fn is_full(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let code = match (error.downcast_ref::<sqlx::Error>(), error.downcast_ref::<rusqlite::Error>()) {
            (Some(error), _) => {
                error.as_database_error().and_then(DatabaseError::code).and_then(|code| code.parse().ok())
            }
            (_, Some(error)) => error.sqlite_error().map(|error| error.extended_code),
            _ => None,
        };
        let is_full = error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::StorageFull);
        if is_full || code.is_some_and(|code| FULL.contains(&code)) {
            return true;
        }
        cause = error.source();
    }
    false
}
