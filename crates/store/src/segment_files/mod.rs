//! Segment files: payloads in files beside a SQLite database, appended and synced, instead of in its pages.
//!
//! Separate from the dialect, which decides when a file is written, and which row names what is in it. A payload in the
//! database is written twice, to the log and to its pages, and its pages are copied whole. In a segment file it is
//! written once. (A segment of a rollout is something else: the name of these files is the usual one for files of a log.)
//!
//! The order that makes this safe: bytes are appended and synced, and then the rows that name them are committed. So a
//! row never names bytes that are not on disk. What a file has behind the bytes that rows name was never acknowledged.
//! Bytes that rows name never change, so they are read without locks.
//!
//! A command that is undone drops its payloads. If a commit fails, its payloads stay in the file without a row, because
//! a commit whose answer is an error may have happened. A file begins with its row: the row is committed before the
//! file is created, so every file of a database has a row, also after a crash. At the start, the newest file is cut off
//! behind the last byte that a commit has counted.
//!
//! Rows of files count the payloads that rows name, and a purge lowers the count. A file without such payloads is
//! removed, and then its row. Payloads of a sparse file move to the newest one, a MiB in a transaction; the heads of
//! the frames say which rollouts they belong to, so no index is needed. Reads take rows in one snapshot and bytes after
//! it. If a file is gone then, its payloads have moved or were purged, and the rows are read again. A backup copies the
//! database and then links or copies the files that the copy names. Their names have a number that a restore renews, so
//! that the files of both databases can be in one folder while the database is replaced.

mod appender;
mod copying;
mod folder;
mod frame;
mod object;
mod object_cache;
mod owner;
mod pending;
mod place_reader;
mod reader;

pub(super) use self::{
    appender::{Appended, Appender},
    copying::{NamedFiles, keep, rename_files},
    folder::{FIRST_FRAME_AT, Place, SegmentFileError, SegmentFolder, new_mark, new_store_id},
    object::{ObjectError, Objects, PendingObject, STEP_TIMEOUT, check_url, wall_clock_s},
    owner::{Owner, Standing, fence_step},
    pending::Mark,
    place_reader::PlaceReader,
    reader::{Found, Reader, Scan, ScannedFrame},
};
