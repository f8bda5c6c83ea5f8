//! Reads uploads part by part, for answers that are never in memory as a whole.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use forebay_bounds::budget::Share;
use forebay_domain::{
    blobs::{self, PART_BYTES, PIECE_BYTES},
    refusal::Refusal,
};
use forebay_service::blobs::FoundBlob;

use super::{pages::FIRST_PAGE_WAIT, problem::Failure};
use crate::Api;

/// Bytes of an upload that are still to be sent.
pub(crate) struct Reading {
    pub(crate) api: Api,
    pub(crate) found: FoundBlob,
    pub(crate) wanted: Range<u64>,
    pub(crate) is_first: bool,
}

impl Reading {
    /// Reads and checks the next part, and returns what pays for it until it is written.
    pub(crate) async fn next(&mut self) -> Result<(Vec<Bytes>, Arc<Share>), Failure> {
        let first = self.wanted.start / PIECE_BYTES;
        let pieces = first..(first + PART_BYTES / PIECE_BYTES).min(blobs::pieces(self.wanted.end));
        let bytes = ((pieces.end * PIECE_BYTES).min(self.found.blob.bytes) - pieces.start * PIECE_BYTES) as usize;
        let budget = &self.api.budgets.samples;
        // Who has got the first part waits for the others, as readers of samples do.
        let share = if std::mem::take(&mut self.is_first) {
            budget.wait_at_most(FIRST_PAGE_WAIT, bytes).await?
        } else {
            budget.wait_for(bytes).await
        };
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
        Ok((frames, Arc::new(share)))
    }
}
