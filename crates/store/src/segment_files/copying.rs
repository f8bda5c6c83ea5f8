//! Copies the segment files that a copy of a database names, for backups and restores.
//!
//! Separate from the rest, because it works on files that no store has open, by the rows of a copy.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use rusqlite::{Connection, OpenFlags};

use super::folder::{SegmentFileError, SegmentFolder};
use crate::folders::sync_folder;

/// The segment files that a database names.
#[derive(Clone, Debug)]
pub(crate) struct NamedFiles {
    pub(crate) store_id: u32,
    files: Vec<NamedFile>,
    /// The number of the newest file, to which a store on this database appends.
    newest: i64,
}

#[derive(Clone, Copy, Debug)]
struct NamedFile {
    number: i64,
    mark: i64,
    end: u64,
}

impl NamedFiles {
    /// Reads them from a database that no process has open; none if it has never had any.
    pub(crate) fn read(database: &Path) -> Result<Option<Self>, rusqlite::Error> {
        let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        let known =
            "SELECT COUNT(*) FROM sqlite_schema WHERE type = 'table' AND name IN ('payload_store', 'segment_file')";
        if connection.query_row(known, [], |row| row.get::<_, i64>(0))? < 2 {
            return Ok(None);
        }
        let mut stores = connection.prepare("SELECT store_id FROM payload_store")?;
        let Some(store_id) = stores.query_map([], |row| row.get(0))?.next().transpose()? else { return Ok(None) };
        let newest = connection.query_row("SELECT COALESCE(MAX(file), 0) FROM segment_file", [], |row| row.get(0))?;
        let mut files =
            connection.prepare("SELECT file, mark, end_at FROM segment_file WHERE live_frames > 0 ORDER BY file")?;
        let file = |row: &rusqlite::Row<'_>| {
            Ok(NamedFile { number: row.get(0)?, mark: row.get(1)?, end: row.get::<_, i64>(2)? as u64 })
        };
        let files = files.query_map([], file)?.collect::<Result<_, _>>()?;
        Ok(Some(Self { store_id, files, newest }))
    }

    /// Gives each of these files to `to`. Full files never change, so they get a second name where the file system
    /// allows it. The newest one is copied, because its store appends to it. Files that `previous` has are taken from
    /// there, files that `to` has already are kept, and others are removed from it. Returns the bytes; none if a file was
    /// removed meanwhile, because its frames moved or were purged.
    pub(crate) fn copy(
        &self,
        from: &SegmentFolder,
        to: &SegmentFolder,
        previous: Option<&SegmentFolder>,
    ) -> Result<Option<u64>, SegmentFileError> {
        let mut bytes = 0;
        if !self.files.is_empty() {
            fs::create_dir_all(&to.path).map_err(|source| SegmentFileError::new("create", &to.path, source))?;
        }
        for file in &self.files {
            bytes += file.end;
            let target = to.file(file.number);
            if to.check(file.number, file.mark, file.end).is_ok() {
                continue;
            }
            let is_sealed = file.number != self.newest;
            let has = |folder: &&SegmentFolder| folder.check(file.number, file.mark, file.end).is_ok();
            let sources = previous.into_iter().filter(has).chain([from]);
            let linked = is_sealed && sources.into_iter().any(|folder| link(folder, file, &target));
            if linked {
                continue;
            }
            match copy(&from.file(file.number), &target, file.end) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                copied => copied.map_err(|source| SegmentFileError::new("copy", &from.file(file.number), source))?,
            }
            to.check(file.number, file.mark, file.end)?;
        }
        for number in to.numbers()?.into_iter().filter(|&number| self.files.iter().all(|file| file.number != number)) {
            to.remove(number)?;
        }
        if !self.files.is_empty() {
            sync_folder(&to.path).map_err(|source| SegmentFileError::new("sync", &to.path, source))?;
        }
        Ok(Some(bytes))
    }
}

/// Notes the number that the names of a database's files have.
pub(crate) fn rename_files(database: &Path, folder: &SegmentFolder) -> Result<(), rusqlite::Error> {
    let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection.execute("UPDATE payload_store SET store_id = ?1", [folder.store_id])?;
    connection.close().map_err(|(_, error)| error)
}

/// Gives a full file a second name. Fails on other file systems, and if a file is not the one that rows name.
fn link(folder: &SegmentFolder, file: &NamedFile, target: &Path) -> bool {
    let _ = fs::remove_file(target);
    folder.check(file.number, file.mark, file.end).is_ok() && fs::hard_link(folder.file(file.number), target).is_ok()
}

/// Copies the first bytes of a file, and syncs the copy.
fn copy(from: &Path, to: &Path, length: u64) -> io::Result<()> {
    let mut source = File::open(from)?.take(length);
    let mut target = File::create(to)?;
    let copied = io::copy(&mut source, &mut target)?;
    if copied < length {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, "it is shorter than what the database has stored in it"));
    }
    target.sync_all()
}

/// Gives all segment files of a folder second names in another folder, or copies them. Nothing happens if there are
/// none.
pub(crate) fn keep(from: &Path, to: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    fs::create_dir_all(to)?;
    for entry in entries {
        let (path, target) = {
            let entry = entry?;
            (entry.path(), to.join(entry.file_name()))
        };
        if path.is_file() && fs::hard_link(&path, &target).is_err() {
            copy(&path, &target, path.metadata()?.size())?;
        }
    }
    sync_folder(to)
}
