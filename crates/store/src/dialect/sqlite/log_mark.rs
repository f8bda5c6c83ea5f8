//! The note about which database file a write-ahead log belongs to.
//!
//! SQLite replays any log that it finds beside a file. If the file was replaced by a copy, that destroys the copy.
//! Every session therefore writes a random number into the file (`user_version`), and notes in the lock file that the
//! log belongs to the file with this number and this version of the schema. Copies differ in one of them: `forebay
//! backup` gives a copy another number, and copies made with SQLite's own tools have another version of the schema.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    path::Path,
};

/// Bytes of the header of a database file.
pub(super) const HEADER_BYTES: usize = 100;

/// Offset in the header of two bytes, which are both 2 in WAL mode.
const MODE_AT: usize = 18;

/// Offsets in the header of two numbers of four bytes each, big-endian.
const SCHEMA_VERSION_AT: usize = 40;
const USER_VERSION_AT: usize = 60;

/// Bytes of the note: less than a sector, so that it is written whole or not at all.
const NOTE_BYTES: usize = 256;

/// The most sessions in a note. There are several after successive starts that did not finish.
const SESSIONS_MAX: usize = 8;

/// The numbers in the header of a database file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileMark {
    pub(super) session: u32,
    schema: u32,
}

impl FileMark {
    pub(super) fn of(header: &[u8; HEADER_BYTES]) -> Self {
        let number = |at: usize| header[at..].iter().take(4).fold(0, |number, &byte| number << 8 | u32::from(byte));
        Self { session: number(USER_VERSION_AT), schema: number(SCHEMA_VERSION_AT) }
    }
}

/// Whether a database file is in WAL mode, by its header.
pub(super) fn is_in_wal_mode(header: &[u8; HEADER_BYTES]) -> bool {
    header[MODE_AT..].starts_with(&[2, 2])
}

/// The number of files that no session of this version has marked.
const UNMARKED: u32 = 0;

/// A number that no file has yet. It is never the number of unmarked files.
pub(super) fn new_session() -> u32 {
    rand::random_range(1..=u32::MAX)
}

/// Gives a copy that no process has open a number of its own, so that no log belongs to it.
pub(crate) fn mark_copy(path: &Path) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    file.write_all_at(&new_session().to_be_bytes(), USER_VERSION_AT as u64)
}

/// The files that the log belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Accepted {
    /// Numbers of sessions, each with the version of the schema if it is known.
    files: Vec<(u32, Option<u32>)>,
}

impl Accepted {
    /// Accepts only this file.
    pub(super) fn only(mark: FileMark) -> Self {
        Self { files: vec![(mark.session, Some(mark.schema))] }
    }

    /// Accepts a file that is being created. Until it is marked, the file may be empty and its whole content in the
    /// log.
    pub(super) fn first_start(session: u32) -> Self {
        Self { files: vec![(UNMARKED, None), (session, None)] }
    }

    /// Whether the log belongs to a file that was being created. The service answered no request from it, so its
    /// content does not matter.
    pub(super) fn is_of_first_start(&self) -> bool {
        matches!(self.files.as_slice(), [(UNMARKED, None), (_, None)])
    }

    /// Accepts no file.
    pub(super) fn nothing() -> Self {
        Self { files: vec![(new_session(), None)] }
    }

    /// Accepts these sessions, too, with any version of the schema, because the schema may be migrated meanwhile.
    pub(super) fn and(self, sessions: impl Iterator<Item = u32>) -> Self {
        let mut files: Vec<(u32, Option<u32>)> = Vec::new();
        for session in self.files.into_iter().map(|(session, _)| session).chain(sessions) {
            if !files.contains(&(session, None)) {
                files.push((session, None));
            }
        }
        let surplus = files.len().saturating_sub(SESSIONS_MAX);
        files.drain(..surplus);
        Self { files }
    }

    /// Whether the log belongs to this file. Without a note it does, because the files may have been moved without the
    /// lock file.
    pub(super) fn accept(&self, mark: FileMark) -> bool {
        let is_this = |&(session, schema): &(u32, Option<u32>)| {
            session == mark.session && schema.is_none_or(|schema| schema == mark.schema)
        };
        self.files.is_empty() || self.files.iter().any(is_this)
    }

    pub(super) fn read(mut lock: &File) -> io::Result<Self> {
        let mut note = Vec::new();
        lock.seek(SeekFrom::Start(0))?;
        lock.take(NOTE_BYTES as u64).read_to_end(&mut note)?;
        Ok(Self::parse(&String::from_utf8_lossy(&note)))
    }

    /// Writes in place, because a new file would not be the one that is locked.
    pub(super) fn write(&self, lock: &File) -> io::Result<()> {
        let mut note = String::from("forebay\n");
        for (session, schema) in &self.files {
            let schema = schema.map_or_else(|| "-".to_owned(), |schema| format!("{schema:08x}"));
            let _ = writeln!(note, "log-of {session:08x} {schema}");
        }
        lock.write_all_at(format!("{note:NOTE_BYTES$}").as_bytes(), 0)?;
        lock.sync_all()
    }

    fn parse(note: &str) -> Self {
        let number = |text: &str| u32::from_str_radix(text, 16).ok();
        let file = |line: &str| {
            let mut words = line.strip_prefix("log-of ")?.split_whitespace();
            Some((number(words.next()?)?, words.next().and_then(number)))
        };
        Self { files: note.lines().filter_map(file).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileMark = FileMark { session: 0xfb00_0001, schema: 7 };

    fn written(accepted: &Accepted) -> Accepted {
        let lock = tempfile::tempfile().expect("a temporary file can be made");
        accepted.write(&lock).expect("it can be written");
        assert_eq!(lock.metadata().expect("it is there").len(), NOTE_BYTES as u64);
        Accepted::read(&lock).expect("it can be read")
    }

    #[test]
    fn a_log_belongs_to_one_file_and_not_to_copies_of_it() {
        let accepted = written(&Accepted::only(FILE));
        assert!(accepted.accept(FILE));
        assert!(!accepted.accept(FileMark { session: 5, ..FILE }), "a copy that `forebay backup` made");
        assert!(!accepted.accept(FileMark { schema: 8, ..FILE }), "a copy that another tool made");
        assert!(!written(&Accepted::nothing()).accept(FILE));
        assert!(written(&Accepted::default()).accept(FILE), "without a note, every file is accepted");
    }

    #[test]
    fn while_a_file_is_opened_its_log_belongs_to_what_it_is_and_what_it_will_be() {
        let mut accepted = Accepted::only(FILE);
        for session in 1..=2 * SESSIONS_MAX as u32 {
            accepted = written(&accepted.and([FILE.session, session].into_iter()));
            assert!(accepted.accept(FileMark { session, schema: 1 }));
        }
        assert_eq!(accepted.files.len(), SESSIONS_MAX);
    }

    #[test]
    fn a_first_start_that_did_not_get_to_its_end_is_known() {
        let begun = written(&Accepted::first_start(7));
        assert!(begun.is_of_first_start());
        for session in [UNMARKED, 7] {
            assert!(begun.accept(FileMark { session, schema: 3 }));
        }
        for other in [Accepted::default(), Accepted::nothing(), Accepted::only(FILE)] {
            assert!(!written(&other).is_of_first_start());
        }
    }

    #[test]
    fn the_numbers_are_where_sqlite_has_them() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("x.db");
        let connection = rusqlite::Connection::open(&path).expect("the file can be made");
        connection.execute_batch("CREATE TABLE t (x); CREATE TABLE u (x); PRAGMA user_version = -2").expect("valid");
        connection.close().expect("it closes");
        let mark = || {
            let mut header = [0; HEADER_BYTES];
            File::open(&path).and_then(|file| file.read_exact_at(&mut header, 0)).expect("it has a header");
            FileMark::of(&header)
        };
        assert_eq!(mark(), FileMark { session: u32::MAX - 1, schema: 2 });
        mark_copy(&path).expect("it can be written");
        assert_ne!(mark().session, u32::MAX - 1);
    }
}
