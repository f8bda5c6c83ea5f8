//! What the database's file and its segment files have in common: names, permissions, and folders that are synced.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

/// Permissions with which SQLite creates its files, before the process's umask is applied.
pub(crate) const MODE: u32 = 0o644;

/// The ending of the name of the folder with a database's segment files.
pub(crate) const SEGMENTS: &str = "-segments";

/// The folder that contains a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A path with a suffix appended to its name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
