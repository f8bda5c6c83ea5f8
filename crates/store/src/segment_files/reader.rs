//! Reads payloads from segment files, on any thread, and walks through a file frame by frame.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt as _,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;

use super::{
    folder::{FIRST_FRAME_AT, Place, SegmentFileError, SegmentFolder},
    frame,
};

/// Files that stay open. A batch is usually in one or two of them.
const OPEN_FILES_MAX: usize = 32;

/// The most bytes of neighbouring frames that are read with one call.
const RUN_BYTES_MAX: u64 = 8 << 20;

/// What is at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The bytes. Their digest is not checked here.
    Bytes(Bytes),
    /// There is no such file: it was removed after its frames were moved or purged, or it is lost.
    NoFile,
}

/// The segment files of a database, open for reading.
#[derive(Debug)]
pub(crate) struct Reader {
    folder: SegmentFolder,
    open: Mutex<HashMap<i64, Arc<File>>>,
}

impl Reader {
    pub(crate) fn new(folder: SegmentFolder) -> Self {
        Self { folder, open: Mutex::default() }
    }

    pub(crate) fn folder(&self) -> &SegmentFolder {
        &self.folder
    }

    /// Reads payloads, in the order of their places. This blocks, so it needs a thread for that.
    ///
    /// Bytes that are missing at the end of a file are missing in the answer, and the digest shows it.
    pub(crate) fn read(&self, places: &[Place]) -> Result<Vec<Found>, SegmentFileError> {
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_unstable_by_key(|&index| places[index]);
        let mut found = vec![Found::NoFile; places.len()];
        let follows = |&a: &usize, &b: &usize| {
            let (before, place) = (places[a], places[b]);
            before.file == place.file && before.end().saturating_add(frame::HEAD_BYTES) == place.start
        };
        for neighbours in order.chunk_by(follows) {
            let mut left = neighbours;
            while let Some(&first) = left.first() {
                let start = places[first].start;
                let ends = |&&index: &&usize| places[index].end() - start <= RUN_BYTES_MAX;
                let count = left.iter().take_while(ends).count().max(1);
                let (run, rest) = left.split_at(count);
                left = rest;
                let Some(file) = self.file(places[first].file)? else { continue };
                let last = places[run[count - 1]];
                let bytes = read_at_most(&file, start, last.end() - start)
                    .map_err(|source| SegmentFileError::new("read", &self.folder.file(last.file), source))?;
                for &index in run {
                    let at = ((places[index].start - start) as usize).min(bytes.len());
                    let end = (at + places[index].length as usize).min(bytes.len());
                    found[index] = Found::Bytes(bytes.slice(at..end));
                }
            }
        }
        Ok(found)
    }

    fn file(&self, number: i64) -> Result<Option<Arc<File>>, SegmentFileError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&number) {
            return Ok(Some(Arc::clone(file)));
        }
        let path = self.folder.file(number);
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => Arc::new(file.map_err(|source| SegmentFileError::new("read", &path, source))?),
        };
        if open.len() >= OPEN_FILES_MAX {
            open.clear();
        }
        open.insert(number, Arc::clone(&file));
        Ok(Some(file))
    }

    /// Removes a file whose frames no row names. Its space is free once nobody reads it.
    pub(crate) fn remove(&self, number: i64) -> Result<(), SegmentFileError> {
        self.folder.remove(number)?;
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        Ok(())
    }

    /// The next frames of a walk: at most so many, and no more once they have so many bytes.
    pub(crate) fn next_frames(
        &self,
        scan: &mut Scan,
        frames_max: usize,
        bytes_max: u64,
    ) -> Result<Vec<ScannedFrame>, SegmentFileError> {
        let (mut frames, mut bytes) = (Vec::new(), 0);
        while frames.len() < frames_max && bytes < bytes_max {
            let Some(frame) = self.next_frame(scan)? else { break };
            bytes += frame.place.length;
            frames.push(frame);
        }
        Ok(frames)
    }

    /// The next frame of a walk; none at the end, and where bytes are no frame.
    fn next_frame(&self, scan: &mut Scan) -> Result<Option<ScannedFrame>, SegmentFileError> {
        let Some(file) = self.file(scan.number)? else { return Ok(None) };
        if scan.at + frame::HEAD_BYTES > scan.end {
            return Ok(None);
        }
        let failed = |source| SegmentFileError::new("read", &self.folder.file(scan.number), source);
        let mut head = [0; frame::HEAD_BYTES as usize];
        match file.read_exact_at(&mut head, scan.at) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            read => read.map_err(failed)?,
        }
        let Some(head) = frame::read_frame(&head) else { return Ok(None) };
        let place = Place { file: scan.number, start: scan.at + frame::HEAD_BYTES, length: head.length };
        scan.at = place.end();
        Ok(Some(ScannedFrame { place, head }))
    }
}

/// A walk through a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scan {
    number: i64,
    at: u64,
    end: u64,
}

impl Scan {
    /// Begins to walk through a file up to `end`.
    pub(crate) fn new(number: i64, end: u64) -> Self {
        Self { number, at: FIRST_FRAME_AT, end }
    }

    pub(crate) fn number(&self) -> i64 {
        self.number
    }
}

/// A frame as a walk finds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScannedFrame {
    pub(crate) place: Place,
    pub(crate) head: frame::FrameHead,
}

/// Reads bytes of a file, and fewer at its end.
fn read_at_most(file: &File, at: u64, length: u64) -> io::Result<Bytes> {
    // A row that is damaged may name any length. The file has no more than this.
    let length = length.min(file.metadata()?.len().saturating_sub(at));
    let mut bytes = vec![0; length as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes.into())
}
