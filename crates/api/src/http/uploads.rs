//! Reads uploads part by part, for answers that are never in memory as a whole.

use std::ops::Range;

use bytes::Bytes;
use forebay_domain::{
    blobs::{self, PART_BYTES, PIECE_BYTES},
    refusal::Refusal,
};
use forebay_service::blobs::FoundBlob;

use super::problem::Failure;
use crate::Api;

/// Bytes of an upload that are still to be sent.
pub(crate) struct Reading {
    pub(crate) api: Api,
    pub(crate) found: FoundBlob,
    pub(crate) wanted: Range<u64>,
}

impl Reading {
    fn next_pieces(&self) -> Range<u64> {
        let first = self.wanted.start / PIECE_BYTES;
        first..(first + PART_BYTES / PIECE_BYTES).min(blobs::pieces(self.wanted.end))
    }

    /// The bytes that the next part takes in memory: at most [`PART_BYTES`].
    pub(crate) fn next_bytes(&self) -> usize {
        let pieces = self.next_pieces();
        ((pieces.end * PIECE_BYTES).min(self.found.blob.bytes) - pieces.start * PIECE_BYTES) as usize
    }

    /// Reads and checks the next part. The caller has paid for it.
    pub(crate) async fn next(&mut self) -> Result<Vec<Bytes>, Failure> {
        let pieces = self.next_pieces();
        let read = self.api.buffer.pieces(&self.found, pieces.clone()).await?;
        let read = read.ok_or(Refusal::Unknown("the upload"))?;
        let frames = pieces.clone().zip(read).map(|(index, piece)| {
            let start = index * PIECE_BYTES;
            let from = self.wanted.start.saturating_sub(start) as usize;
            let to = (self.wanted.end - start).min(piece.len() as u64) as usize;
            piece.slice(from..to)
        });
        let frames = frames.collect();
        self.wanted.start = (pieces.end * PIECE_BYTES).min(self.wanted.end);
        Ok(frames)
    }
}
