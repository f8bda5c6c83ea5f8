//! The frames of an open transaction, which are written together before it commits.

use bytes::Bytes;
use forebay_domain::{formats::payload::Payload, ids::RolloutPk};

use super::{folder::Place, frame};

/// Frames that are not written yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) frames: Vec<(frame::Head, Bytes)>,
    pub(super) bytes: u64,
}

/// A moment of a transaction to which it can be undone. By default its beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mark {
    frames: usize,
    bytes: u64,
}

impl Pending {
    /// Takes a payload, and says where it will be in a file that ends at `end` without these frames.
    pub(super) fn place(&mut self, file: i64, end: u64, rollout: RolloutPk, payload: &Payload) -> Place {
        let start = end + self.bytes + frame::HEAD_BYTES;
        let place = Place { file, start, length: payload.body.len() as u64 };
        self.frames.push((frame::of_frame(rollout, payload), payload.body.clone()));
        self.bytes += place.frame_bytes();
        place
    }

    pub(super) fn mark(&self) -> Mark {
        Mark { frames: self.frames.len(), bytes: self.bytes }
    }

    /// Drops what was taken since a moment.
    pub(super) fn undo_to(&mut self, mark: Mark) {
        self.frames.truncate(mark.frames);
        self.bytes = mark.bytes;
    }
}
