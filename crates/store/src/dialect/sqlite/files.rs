//! The files of a database: which process holds them, and whether they are still in place.
//!
//! Separate from the connections, because all of this must be known before SQLite opens a file: opening replays any log
//! beside it.
//!
//! Two locks prevent that a second process serves the same database: one on the lock file, and on Linux one on the
//! database file itself, which protects it under all of its names. The descriptor of the second lock is closed last,
//! because closing any descriptor of a file releases the locks that SQLite has on the file. Before each answer and when
//! it is idle, the writer checks that the files still have their names. If they do not, the process ends; if the
//! database file is still the one that the process opened, the writer first copies the log into it.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use super::log_mark::{Accepted, FileMark, HEADER_BYTES, is_in_wal_mode};
use crate::{
    folders::{MODE, SEGMENTS, folder_of, with_suffix},
    open::error::OpenError,
};

/// Length up to which a write-ahead log is empty: it has only its header.
const EMPTY_WAL_BYTES: u64 = 32;

/// The paths of a database's files.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) database: PathBuf,
    pub(crate) wal: PathBuf,
    pub(crate) shm: PathBuf,
    pub(crate) lock: PathBuf,
    /// The folder of the segment files.
    pub(crate) segments: PathBuf,
}

impl Names {
    /// The paths for the file that a path leads to. SQLite keeps the log beside the file itself, not beside a symbolic
    /// link to it.
    pub(crate) fn of(path: &Path) -> Result<Self, OpenError> {
        let failed = |source| OpenError::file(path, source);
        let database = match path.canonicalize() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let name = path.file_name().ok_or_else(|| failed(error))?;
                folder_of(path).canonicalize().map_err(failed)?.join(name)
            }
            found => found.map_err(failed)?,
        };
        let beside = |suffix: &str| with_suffix(&database, suffix);
        Ok(Self {
            wal: beside("-wal"),
            shm: beside("-shm"),
            lock: beside(".lock"),
            segments: beside(SEGMENTS),
            database,
        })
    }

    /// Whether there is a log that is not empty.
    pub(crate) fn has_log(&self) -> Result<bool, OpenError> {
        match std::fs::metadata(&self.wal) {
            Ok(metadata) => Ok(metadata.len() > EMPTY_WAL_BYTES),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(OpenError::file(&self.wal, error)),
        }
    }
}

/// The files, which only this process holds as long as this value lives.
///
/// It must outlive every connection. When a process closes any descriptor of a file, the operating system drops all
/// record locks of the process on it, and SQLite uses such locks.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) names: Names,
    /// The lock file, locked by path, so that a database that does not exist can be locked too. It records which files
    /// the log belongs to.
    lock: File,
    /// The database, locked by its file, so that other names of the file are locked, too.
    database: OnceLock<File>,
    accepted: Mutex<Accepted>,
    /// The log and the shared memory that SQLite has open.
    opened: OnceLock<[Place; 2]>,
}

/// The device and the number of a file.
type Place = (u64, u64);

impl Files {
    /// Holds the files at a path, or fails if another process holds them. The database may be missing.
    pub(crate) fn hold(path: &Path) -> Result<Self, OpenError> {
        let names = Names::of(path)?;
        let lock = File::options().read(true).write(true).create(true).truncate(false).mode(MODE).open(&names.lock);
        let lock = lock.map_err(|source| OpenError::file(&names.lock, source))?;
        take(&lock, &names.database)?;
        let accepted = Accepted::read(&lock).map_err(|source| OpenError::file(&names.lock, source))?;
        let files =
            Self { names, lock, database: OnceLock::new(), accepted: Mutex::new(accepted), opened: OnceLock::new() };
        match File::open(&files.names.database) {
            Ok(database) => files.keep(database)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(OpenError::file(&files.names.database, error)),
        }
        Ok(files)
    }

    /// Holds the files at a path to open them. Creates the database if there is none. Refuses a log that does not
    /// belong to the database, because SQLite would replay it into the file.
    pub(super) fn claim(path: &Path) -> Result<Self, OpenError> {
        let files = Self::hold(path)?;
        let has_log = files.names.has_log()?;
        if files.mark()?.is_none() && has_log && !files.accepted().is_of_first_start() {
            return Err(files.names.log_without_database());
        }
        if files.database.get().is_none() {
            let path = &files.names.database;
            let created = File::options().read(true).write(true).create_new(true).mode(MODE).open(path);
            files.keep(created.map_err(|source| OpenError::file(path, source))?)?;
        }
        if has_log && files.mark()?.is_some_and(|mark| !files.accepted().accept(mark)) {
            return Err(files.names.foreign_log());
        }
        Ok(files)
    }

    /// Refuses a log that does not belong to the database at a path, without holding the files, because a running
    /// service may hold them.
    pub(crate) fn check_log(path: &Path) -> Result<(), OpenError> {
        let names = Names::of(path)?;
        let unreadable = |source| OpenError::file(path, source);
        let mut header = [0; HEADER_BYTES];
        File::open(&names.database).and_then(|file| file.read_exact_at(&mut header, 0)).map_err(unreadable)?;
        let accepted = match File::open(&names.lock) {
            Ok(lock) => Accepted::read(&lock).map_err(unreadable)?,
            Err(_) => Accepted::default(),
        };
        if names.has_log()? && !accepted.accept(FileMark::of(&header)) {
            return Err(names.foreign_log());
        }
        Ok(())
    }

    fn keep(&self, database: File) -> Result<(), OpenError> {
        // On other systems than Linux, both kinds of lock are the same, and this lock would lock SQLite out.
        if cfg!(target_os = "linux") {
            take(&database, &self.names.database)?;
        }
        let names = database.metadata().map_err(|source| OpenError::file(&self.names.database, source))?.nlink();
        if names > 1 {
            tracing::warn!(
                database = %self.names.database.display(), names,
                "the database has several names (hard links): SQLite looks for the log beside the name that is opened"
            );
        }
        self.database.set(database).map_err(|_| OpenError::Settings("the database is already held".to_owned()))
    }

    fn accepted(&self) -> Accepted {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn accept(&self, accepted: Accepted) -> Result<(), OpenError> {
        accepted.write(&self.lock).map_err(|source| OpenError::file(&self.names.lock, source))?;
        *self.accepted.lock().unwrap_or_else(PoisonError::into_inner) = accepted;
        Ok(())
    }

    /// The numbers in the database's header; none if the file is missing or empty.
    fn mark(&self) -> Result<Option<FileMark>, OpenError> {
        Ok(self.header()?.as_ref().map(FileMark::of))
    }

    /// Whether the database file is in WAL mode, by its header.
    pub(super) fn is_in_wal_mode(&self) -> Result<bool, OpenError> {
        Ok(self.header()?.as_ref().is_some_and(is_in_wal_mode))
    }

    /// The database's header; none if the file is missing or empty.
    fn header(&self) -> Result<Option<[u8; HEADER_BYTES]>, OpenError> {
        let Some(file) = self.database.get() else { return Ok(None) };
        let mut header = [0; HEADER_BYTES];
        match file.read_exact_at(&mut header, 0) {
            Ok(()) => Ok(Some(header)),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(OpenError::file(&self.names.database, error)),
        }
    }

    /// Notes a new session, whose number is written into the database next. The log may belong to the file as it is now
    /// and as it will be.
    pub(super) fn begin_session(&self) -> Result<u32, OpenError> {
        let session = super::log_mark::new_session();
        self.accept(match self.mark()? {
            Some(mark) => self.accepted().and([mark.session, session].into_iter()),
            None => Accepted::first_start(session),
        })?;
        Ok(session)
    }

    /// Notes that the database has the session's number and that the log is empty. From then on the log belongs to this
    /// file alone.
    pub(super) fn settle_session(&self) -> Result<(), OpenError> {
        match self.mark()? {
            Some(mark) => self.accept(Accepted::only(mark)),
            None => Ok(()),
        }
    }

    /// Ties the log to the database as it is now, so that it does not belong to a file that replaces the database.
    pub(crate) fn pin_log(&self) -> Result<(), OpenError> {
        match self.mark()? {
            Some(mark) if self.accepted().accept(mark) => self.accept(Accepted::only(mark)),
            Some(_) => Ok(()),
            None => self.disown_log(),
        }
    }

    /// Notes that the log belongs to no file.
    pub(super) fn disown_log(&self) -> Result<(), OpenError> {
        self.accept(Accepted::nothing())
    }

    /// Remembers the log and the shared memory that SQLite has opened.
    pub(super) fn remember_opened(&self) -> Result<(), OpenError> {
        let place = |path: &Path| place(path).map_err(|source| OpenError::file(path, source));
        let opened = [place(&self.names.wal)?, place(&self.names.shm)?];
        self.opened.set(opened).map_err(|_| OpenError::Settings("the database is already open".to_owned()))
    }

    /// Checks that the files that SQLite has open still have their names. Writes to other files would be lost.
    pub(super) fn verify(&self) -> Result<(), Displaced> {
        let displaced = |path: &Path, why| Displaced { name: path.display().to_string(), why };
        let names = &self.names;
        let held = self.database.get().and_then(|file| file.metadata().ok()).map(|found| (found.dev(), found.ino()));
        let expected = [&names.database, &names.wal, &names.shm]
            .into_iter()
            .zip([held].into_iter().chain(self.opened.get().into_iter().flatten().copied().map(Some)));
        for (path, expected) in expected {
            match place(path) {
                Ok(found) if Some(found) == expected => {}
                Ok(_) => return Err(displaced(path, "was replaced")),
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(displaced(path, "was removed")),
                Err(_) => return Err(displaced(path, "cannot be found")),
            }
        }
        if self.is_intact() { Ok(()) } else { Err(displaced(&names.database, "was overwritten")) }
    }

    /// Whether the open database file is still the one that was opened, even if it has another name.
    pub(super) fn is_intact(&self) -> bool {
        matches!(self.mark(), Ok(Some(mark)) if self.accepted().accept(mark))
    }
}

/// Releases the locks explicitly. A lock belongs to the open file, not to one descriptor of it, and a process that this
/// one has just started has a copy of each descriptor until it runs its own program. Closing alone would keep the files
/// locked until then.
impl Drop for Files {
    fn drop(&mut self) {
        for file in self.database.get().into_iter().chain([&self.lock]) {
            if let Err(error) = file.unlock() {
                tracing::warn!(database = %self.names.database.display(), %error, "a lock was not released");
            }
        }
    }
}

/// A file of a database that is being served was removed, replaced or overwritten.
#[derive(Debug, thiserror::Error)]
#[error("{name} {why} while the database was served")]
pub(super) struct Displaced {
    name: String,
    why: &'static str,
}

impl Names {
    fn foreign_log(&self) -> OpenError {
        let (database, wal, lock) = (self.database.display(), self.wal.display(), self.lock.display());
        OpenError::Log(format!(
            "the log {wal} does not belong to {database}: the database was replaced, but the log of the old one is \
             still there. Nothing was changed. To put a copy in place, use `forebay restore COPY --database \
             sqlite:{database}`. If {database} is the copy already, move {wal} away. If both files were moved here \
             together, move {lock} away"
        ))
    }

    fn log_without_database(&self) -> OpenError {
        let (database, wal) = (self.database.display(), self.wal.display());
        OpenError::Log(format!(
            "the log {wal} exists, but its database {database} is missing or empty. Nothing was changed. Bring the \
             database back, or put a copy in place with `forebay restore COPY --database sqlite:{database}`; to begin \
             with an empty database, move the log away"
        ))
    }
}

/// Lets only one process use a file: two writers would not see each other's queues, waiters and clocks.
fn take(file: &File, database: &Path) -> Result<(), OpenError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(std::fs::TryLockError::WouldBlock) => Err(OpenError::Locked(database.display().to_string())),
        Err(std::fs::TryLockError::Error(source)) => Err(OpenError::file(database, source)),
    }
}

fn place(path: &Path) -> io::Result<Place> {
    std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child process has copies of all descriptors between its fork and the start of its own program.
    #[test]
    fn files_are_released_while_a_child_process_still_has_copies_of_their_descriptors() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let path = folder.path().join("forebay.db");
        let files = Files::claim(&path).expect("nobody has the files");
        assert!(matches!(Files::hold(&path), Err(OpenError::Locked(_))), "the files are held");
        let database = files.database.get().expect("the database was created");
        let copies = [&files.lock, database].map(|file| file.try_clone().expect("a descriptor can be copied"));
        drop(files);
        Files::hold(&path).expect("the files were released");
        drop(copies);
    }
}
