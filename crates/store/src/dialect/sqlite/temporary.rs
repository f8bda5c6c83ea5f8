//! Databases in temporary folders, for `sqlite::memory:`, and the removal of folders that killed processes left behind.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::folders::SEGMENTS;
use crate::open::error::OpenError;

/// The beginning of the names of these folders.
const PREFIX: &str = "forebay-temporary-";

/// Name of the database in its folder.
const NAME: &str = "forebay.db";

/// The endings, after [`NAME`], of all files that may be in such a folder.
const SUFFIXES: [&str; 5] = ["", "-wal", "-shm", "-journal", ".lock"];

/// A folder that is removed with this value, or by another process if this one was killed.
#[derive(Debug)]
pub(super) struct Temporary {
    folder: TempDir,
    /// The lock on the folder, held as long as its process lives.
    _lock: File,
}

impl Temporary {
    /// Creates a folder, and removes those whose processes have ended.
    pub(super) fn new() -> Result<Self, OpenError> {
        let parent = std::env::temp_dir();
        let made = Self::made_in(&parent).map_err(|source| OpenError::file(&parent, source))?;
        made.remove_abandoned(&parent);
        Ok(made)
    }

    fn made_in(parent: &Path) -> io::Result<Self> {
        loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            // Between creation and lock, another process may have removed the folder as abandoned. Then the next
            // attempt creates another.
            let lock = match File::open(folder.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if lock.try_lock().is_ok() && folder.path().exists() {
                return Ok(Self { folder, _lock: lock });
            }
        }
    }

    pub(super) fn database(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    /// Removes folders that no process holds. A folder that cannot be removed stays, because it may be another
    /// program's.
    fn remove_abandoned(&self, parent: &Path) {
        let Ok(own) = std::fs::metadata(self.folder.path()) else { return };
        let Ok(entries) = std::fs::read_dir(parent) else { return };
        for entry in entries.flatten() {
            let is_named_so = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
            // Another user's folder is not trusted: it may be replaced by a link at any time.
            let is_ours = || entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == own.uid());
            if is_named_so && is_ours() {
                remove_if_abandoned(&entry.path());
            }
        }
    }
}

fn remove_if_abandoned(folder: &Path) {
    let Ok(lock) = File::open(folder) else { return };
    if lock.try_lock().is_err() {
        return;
    }
    for suffix in SUFFIXES {
        let _ = std::fs::remove_file(folder.join(format!("{NAME}{suffix}")));
    }
    let _ = std::fs::remove_dir_all(folder.join(format!("{NAME}{SEGMENTS}")));
    // This fails if the folder contains anything else.
    if std::fs::remove_dir(folder).is_ok() {
        tracing::info!(folder = %folder.display(), "removed the temporary database of a process that has ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_are_gone_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().expect("a temporary folder can be made");
        let [held, abandoned, precious] = [(); 3].map(|()| Temporary::made_in(parent.path()).expect("it can be made"));
        for made in [&held, &abandoned, &precious] {
            std::fs::write(made.database(), "data").expect("it can be written");
        }
        std::fs::write(precious.folder.path().join("notes"), "precious").expect("it can be written");
        // As after a kill: the lock is released, and the folder stays.
        let [abandoned, precious] = [abandoned, precious].map(|Temporary { folder, _lock }| folder.keep());
        let other = parent.path().join("forebay-other");
        std::fs::create_dir(&other).expect("it can be made");

        held.remove_abandoned(parent.path());
        assert!(!abandoned.exists());
        assert_eq!(std::fs::read(precious.join("notes")).expect("it is there"), b"precious");
        assert!(held.database().exists() && other.exists());
    }
}
