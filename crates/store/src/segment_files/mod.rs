//! Segment files: payloads in files beside a SQLite database, appended and synced, instead of in its pages.
//!
//! Separate from the dialect, which decides when a file is written, and which row names what is in it. A payload in the
//! database is written twice, to the log and to its pages, and its pages are copied whole. In a segment file it is
//! written once. (A segment of a rollout is something else: the name of these files is the usual one for files of a log.)
//!
//! The order that makes this safe: bytes are appended and synced, and then the rows that name them are committed. So a
//! row never names bytes that are not on disk. What a file has behind the bytes that rows name was never acknowledged.
//! Bytes that rows name never change, so they are read without locks.

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
