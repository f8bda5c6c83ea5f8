//! Appends the payloads of a commit to the newest segment file.
//!
//! Only the writer has one. The places of payloads are decided while a transaction runs, and their bytes are written
//! together before it commits.

use std::{
    fs::File,
    io::{self, IoSlice, Seek as _, SeekFrom, Write as _},
    mem,
    os::unix::fs::FileExt as _,
};

use bytes::Bytes;
use forebay_domain::{formats::payload::Payload, ids::RolloutPk};
use rustix::fs::{FallocateFlags, fallocate};

use super::{
    folder::{FIRST_FRAME_AT, Place, SYNC, SegmentFileError, SegmentFolder, WRITE, identity},
    frame,
    pending::{Mark, Pending},
};

/// Disk space is taken from the file system in pieces of this size and more, because a sync is twice as fast if the file
/// does not grow.
const PIECE_BYTES: u64 = 1 << 20;

/// What a probe writes.
const PROBE_BYTES: usize = 64 << 10;

/// The largest piece.
const PIECE_BYTES_MAX: u64 = 16 << 20;

/// The file to which frames are appended, and the frames of the open transaction.
#[derive(Debug)]
pub(crate) struct Appender {
    folder: SegmentFolder,
    number: i64,
    file: File,
    /// Where the next write begins. Frames of a commit that failed may be before it, because a commit whose answer is an
    /// error may still have happened.
    end: u64,
    /// The length for which the file system has space.
    allocated: u64,
    pending: Pending,
}

/// What a commit appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Appended {
    pub(crate) file: i64,
    pub(crate) frames: usize,
    /// Bytes of the frames, with their heads.
    pub(crate) bytes: u64,
    /// Where the file ends then.
    pub(crate) end: u64,
}

impl Appender {
    /// Goes on behind the last frame of a file.
    pub(crate) fn open(folder: SegmentFolder, number: i64, mark: i64, end: u64) -> Result<Self, SegmentFileError> {
        let file = folder.open_to_append(number, mark, end)?;
        Ok(Self::at(folder, number, file, end))
    }

    /// Begins a file.
    pub(crate) fn create(folder: SegmentFolder, number: i64, mark: i64) -> Result<Self, SegmentFileError> {
        let file = folder.create(number, mark)?;
        Ok(Self::at(folder, number, file, FIRST_FRAME_AT))
    }

    fn at(folder: SegmentFolder, number: i64, file: File, end: u64) -> Self {
        Self { folder, number, file, end, allocated: end, pending: Pending::default() }
    }

    pub(crate) fn number(&self) -> i64 {
        self.number
    }

    /// The length of the file with all that was written to it.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Takes a payload into the transaction, and says where it will be.
    pub(crate) fn place(&mut self, rollout: RolloutPk, payload: &Payload) -> Place {
        self.pending.place(self.number, self.end, rollout, payload)
    }

    pub(crate) fn mark(&self) -> Mark {
        self.pending.mark()
    }

    /// Drops what the transaction has taken since a moment.
    pub(crate) fn undo_to(&mut self, mark: Mark) {
        self.pending.undo_to(mark);
    }

    /// What the transaction appends; none if it has no payloads.
    pub(crate) fn pending(&self) -> Option<Appended> {
        let (frames, bytes) = (self.pending.frames.len(), self.pending.bytes);
        (frames > 0).then_some(Appended { file: self.number, frames, bytes, end: self.end + bytes })
    }

    /// Writes and syncs what the transaction appends. The rows may be committed then. If this fails, they must not be,
    /// and the next transaction writes at the same place.
    pub(crate) fn write(&mut self) -> Result<(), SegmentFileError> {
        let Pending { frames, bytes } = mem::take(&mut self.pending);
        if frames.is_empty() {
            return Ok(());
        }
        let path = || self.folder.file(self.number);
        let end = self.end + bytes;
        if end > self.allocated {
            self.allocated = allocate(&self.file, self.allocated, end);
        }
        write_all(&mut self.file, self.end, &frames).map_err(|source| SegmentFileError::new(WRITE, &path(), source))?;
        self.file.sync_data().map_err(|source| SegmentFileError::new(SYNC, &path(), source))?;
        self.end = end;
        Ok(())
    }

    /// Whether the file can be written: writes where the next commit will. A log that is written again in place shows
    /// nothing about a disk that is full.
    pub(crate) fn probe(&self) -> Result<(), SegmentFileError> {
        let written = self.file.write_all_at(&vec![0; PROBE_BYTES], self.end);
        written.map_err(|source| SegmentFileError::new(WRITE, &self.path(), source))
    }

    /// Whether the file still has its name. What is written to it otherwise would be lost.
    pub(crate) fn is_in_place(&self) -> bool {
        let named = std::fs::metadata(self.folder.file(self.number));
        let opened = self.file.metadata();
        matches!((named, opened), (Ok(named), Ok(opened)) if identity(&named) == identity(&opened))
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.folder.file(self.number)
    }

    /// Gives back the space behind the last frame.
    pub(crate) fn trim(&self) -> io::Result<()> {
        self.file.set_len(self.end)
    }
}

/// Takes space for a file up to `end` and a piece behind it. Returns the length that has space. File systems without
/// this call, and full ones, give none. Then the write itself takes it, or fails.
fn allocate(file: &File, allocated: u64, end: u64) -> u64 {
    let wanted = end + (end / 2).clamp(PIECE_BYTES, PIECE_BYTES_MAX);
    match fallocate(file, FallocateFlags::empty(), allocated, wanted - allocated) {
        Ok(()) => wanted,
        Err(_) => allocated,
    }
}

fn write_all(file: &mut File, at: u64, frames: &[(frame::Head, Bytes)]) -> io::Result<()> {
    file.seek(SeekFrom::Start(at))?;
    let mut slices: Vec<IoSlice<'_>> =
        frames.iter().flat_map(|(head, body)| [IoSlice::new(head), IoSlice::new(body)]).collect();
    let mut left = slices.as_mut_slice();
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
