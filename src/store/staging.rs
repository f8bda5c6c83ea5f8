//! Files that are made beside their place and get their name when they are whole and on disk.

use std::{
    fs::{File, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempPath;

use super::dialect::{folder_of, sync_folder, with_suffix};

/// What SQLite and we put beside a database, after its name.
const BESIDE: [&str; 4] = ["-wal", "-shm", "-journal", ".lock"];

/// Permissions as SQLite gives them, less the process's mask.
const MODE: u32 = 0o644;

/// A file without its name. It is removed unless it gets one, with all that belongs to it.
#[derive(Debug)]
pub(super) struct Staged {
    path: TempPath,
    beside: Beside,
    /// As long as it is held, nobody takes the file for one that a killed process left behind.
    lock: Option<File>,
}

impl Staged {
    /// Makes an empty file for `target`, whose name ends with `ending`. Those of processes that were killed are removed.
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
            // Between the two, another process may take it for left behind: then there is a next one.
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

    /// Leaves the lock to a database that is opened on the file.
    pub(super) fn unlock(&mut self) {
        self.lock = None;
    }

    /// Puts the file on disk, gives it its name, which nothing may have, and puts that on disk.
    pub(super) fn name(self, target: &Path) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        self.path.persist_noclobber(target).map_err(|error| error.error)?;
        drop(self.beside);
        sync_folder(folder_of(target))
    }

    /// The same in the place of what has the name, at one stroke.
    pub(super) fn replace(self, target: &Path) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        self.path.persist(target).map_err(|error| error.error)?;
        drop(self.beside);
        sync_folder(folder_of(target))
    }
}

/// What belongs to a file, removed with this.
#[derive(Debug)]
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        for suffix in BESIDE {
            let _ = std::fs::remove_file(with_suffix(&self.0, suffix));
        }
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
                // Another process found it at the same time.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
