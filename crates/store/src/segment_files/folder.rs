//! The files of a database in their folder, where the bytes of a payload are in one of them, and what can fail.

use std::{
    fs::File,
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use forebay_domain::health::Health;

use super::frame;
use crate::{
    error::{DatabaseFailure, StoreError},
    folders::{MODE, folder_of, sync_folder},
};

/// The ending of the names of segment files.
const ENDING: &str = ".segment";

/// Where the bytes of a payload are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) file: i64,
    /// The first byte of the payload. The head of its frame is before it.
    pub(crate) start: u64,
    pub(crate) length: u64,
}

impl Place {
    /// The bytes that so many frames take with payloads of so many bytes.
    pub(crate) fn frames_bytes(frames: u64, payload_bytes: u64) -> u64 {
        frames * frame::HEAD_BYTES + payload_bytes
    }

    /// The values of the columns `file`, `start` and `length` of a payload; nulls if it is in the database.
    pub(crate) fn columns(place: Option<Self>) -> [Option<i64>; 3] {
        match place {
            Some(Self { file, start, length }) => [Some(file), Some(start as i64), Some(length as i64)],
            None => [None; 3],
        }
    }

    /// The byte behind the payload.
    pub(super) fn end(self) -> u64 {
        self.start.saturating_add(self.length)
    }

    /// The bytes that its frame takes in the file.
    pub(crate) fn frame_bytes(self) -> u64 {
        frame::HEAD_BYTES + self.length
    }
}

/// The head of a new file takes so many bytes.
pub(crate) const FIRST_FRAME_AT: u64 = frame::HEAD_BYTES;

/// A segment file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}: {source}")]
pub(crate) struct SegmentFileError {
    action: &'static str,
    path: String,
    source: io::Error,
}

pub(super) const SYNC: &str = "sync";

pub(super) const WRITE: &str = "write";

impl SegmentFileError {
    pub(super) fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self { action, path: path.display().to_string(), source }
    }

    /// What it says about the next commits. After a sync that failed, nothing is known about the file until it is opened
    /// again. A disk that is full may have space later. Commits need no file to be read, created or removed.
    pub(crate) fn health(&self) -> Option<Health> {
        match (self.action, self.source.kind()) {
            (WRITE, ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => Some(Health::Failing),
            (WRITE | SYNC, _) => Some(Health::Broken),
            _ => None,
        }
    }
}

impl From<SegmentFileError> for StoreError {
    fn from(error: SegmentFileError) -> Self {
        Self::Database(DatabaseFailure::new(error))
    }
}

/// The folder of a database's segment files, and the number in their names.
///
/// A database that is restored gets a new number, so that its files and those of the database that it replaces can be in
/// one folder.
#[derive(Clone, Debug)]
pub(crate) struct SegmentFolder {
    pub(super) path: PathBuf,
    pub(super) store_id: u32,
}

impl SegmentFolder {
    pub(crate) fn new(path: PathBuf, store_id: u32) -> Self {
        Self { path, store_id }
    }

    pub(crate) fn file(&self, number: i64) -> PathBuf {
        self.path.join(format!("{:08x}-{number:08}{ENDING}", self.store_id))
    }

    /// The numbers of the files of this database that are in the folder.
    pub(crate) fn numbers(&self) -> Result<Vec<i64>, SegmentFileError> {
        let prefix = format!("{:08x}-", self.store_id);
        let failed = |source| SegmentFileError::new("read", &self.path, source);
        let entries = match std::fs::read_dir(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(ENDING));
            numbers.extend(number.and_then(|number| number.parse::<i64>().ok()));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Creates a file that is empty but for its head. It is on disk when this returns, with its name.
    pub(super) fn create(&self, number: i64, mark: i64) -> Result<File, SegmentFileError> {
        let path = self.file(number);
        let failed = |source| SegmentFileError::new("create", &path, source);
        if !self.path.is_dir() {
            std::fs::create_dir_all(&self.path).and_then(|()| sync_folder(folder_of(&self.path))).map_err(failed)?;
        }
        // A file of this number may be left from a start that was killed before a frame was in it.
        let file = File::options().read(true).write(true).create(true).truncate(true).mode(MODE).open(&path);
        let mut file = file.map_err(failed)?;
        file.write_all(&frame::of_file(number, mark)).map_err(failed)?;
        let synced = file.sync_all().and_then(|()| sync_folder(&self.path));
        synced.map_err(|source| SegmentFileError::new(SYNC, &path, source))?;
        Ok(file)
    }

    /// Opens a file to append behind `end`. What is behind it is cut off: no row names it.
    pub(super) fn open_to_append(&self, number: i64, mark: i64, end: u64) -> Result<File, SegmentFileError> {
        let path = self.file(number);
        let failed = |source| SegmentFileError::new("open", &path, source);
        self.check(number, mark, end)?;
        let file = File::options().read(true).write(true).open(&path).map_err(failed)?;
        file.set_len(end).map_err(failed)?;
        Ok(file)
    }

    /// Checks that a file is there, is the one with this mark, and has the bytes that rows name.
    pub(crate) fn check(&self, number: i64, mark: i64, end: u64) -> Result<(), SegmentFileError> {
        let path = self.file(number);
        let failed = |source| SegmentFileError::new("open", &path, source);
        let wrong = |why: &str| failed(io::Error::new(ErrorKind::InvalidData, why.to_owned()));
        let file = File::open(&path).map_err(failed)?;
        let mut head = [0; frame::HEAD_BYTES as usize];
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        if head != frame::of_file(number, mark) {
            return Err(wrong("it is another file than the one that this database wrote under this name"));
        }
        if file.metadata().map_err(failed)?.len() < end {
            return Err(wrong("it is shorter than what the database has stored in it"));
        }
        Ok(())
    }

    /// Removes a file, if it is there.
    pub(crate) fn remove(&self, number: i64) -> Result<(), SegmentFileError> {
        let path = self.file(number);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|source| SegmentFileError::new("remove", &path, source)),
        }
    }
}

/// A number for the names of a database's files.
pub(crate) fn new_store_id() -> u32 {
    rand::random_range(1..=u32::MAX)
}

/// A mark of a file. It is positive, as all integers in SQL that are written in documents.
pub(crate) fn new_mark() -> i64 {
    rand::random_range(1..=i64::MAX)
}

/// Device and number of a file.
pub(super) fn identity(metadata: &std::fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
