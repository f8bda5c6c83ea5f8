//! Files that are written under a temporary name and get their own name when they are complete and on disk.

use std::{
    fs::{File, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempPath;

use super::folders::{MODE, SEGMENTS, folder_of, sync_folder, with_suffix};

/// The endings of the files that SQLite and Forebay put beside a database.
const BESIDE: [&str; 4] = ["-wal", "-shm", "-journal", ".lock"];

/// A file that does not have its final name yet. If it never gets the name, it is removed, with all files that belong
/// to it.
#[derive(Debug)]
pub(super) struct Staged {
    path: TempPath,
    beside: Beside,
    /// The lock shows other processes that the file is in use and was not left behind by a killed process.
    lock: Option<File>,
}

impl Staged {
    /// Creates an empty file for `target`, whose name ends with `ending`. Removes the files that killed processes left
    /// behind.
    pub(super) fn new(target: &Path, ending: &str) -> io::Result<Self> {
        let folder = folder_of(target);
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
        remove_abandoned(folder, &name, ending)?;
        loop {
            let made = tempfile::Builder::new()
                .prefix(&format!("{name}."))
                .suffix(ending)
                .permissions(Permissions::from_mode(MODE))
                .tempfile_in(folder)?;
            let (lock, path) = made.into_parts();
            // Between creation and lock, another process may have removed the file as left behind. Then the next
            // attempt creates another.
            if lock.try_lock().is_ok() && path.exists() {
                let beside = Beside(path.to_path_buf());
                return Ok(Self { path, beside, lock: Some(lock) });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, open for writing.
    pub(super) fn file(&self) -> io::Result<&File> {
        self.lock.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Releases the lock, because a database that is opened on the file takes its own.
    pub(super) fn unlock(&mut self) {
        self.lock = None;
    }

    /// Syncs the file, gives it its name, which must be free, and syncs the name.
    pub(super) fn name(self, target: &Path) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        self.path.persist_noclobber(target).map_err(|error| error.error)?;
        drop(self.beside);
        sync_folder(folder_of(target))
    }

    /// Syncs the file and replaces the file that has the name, with one rename.
    pub(super) fn replace(self, target: &Path) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        self.path.persist(target).map_err(|error| error.error)?;
        drop(self.beside);
        sync_folder(folder_of(target))
    }
}

/// The files that belong to a file. They are removed when this value is dropped.
#[derive(Debug)]
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        for suffix in BESIDE {
            let _ = std::fs::remove_file(with_suffix(&self.0, suffix));
        }
        let _ = std::fs::remove_dir_all(with_suffix(&self.0, SEGMENTS));
    }
}

fn remove_abandoned(folder: &Path, name: &str, ending: &str) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let found = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let random = found.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(ending));
        let is_random = random.is_some_and(|random| random.chars().all(|character| character.is_ascii_alphanumeric()));
        if is_random && File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            match std::fs::remove_file(&path) {
                Ok(()) => drop(Beside(path)),
                // Another process may have removed it at the same time.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
