//! Record batches of an export that arrives as an Arrow stream, and the summary that follows it.

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::ArrowError;
use bytes::Bytes;
use forebay_exports::batch;
use forebay_wire::ExportCounts;

/// Bytes that arrive become record batches.
#[derive(Default)]
pub(super) struct Columns {
    rows: StreamDecoder,
    summary: StreamDecoder,
    /// Whether the stream of rows has reached its end.
    has_ended: bool,
    arrived: Buffer,
    counts: Option<ExportCounts>,
}

impl Columns {
    /// Takes bytes after those that [`next`](Self::next) has used up.
    pub(super) fn push(&mut self, bytes: Bytes) {
        self.arrived = Buffer::from(bytes);
    }

    /// The next record batch of rollouts, or none if it has not arrived completely.
    pub(super) fn next(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        if !self.has_ended {
            match self.rows.decode(&mut self.arrived) {
                Ok(batch) => return batch.as_ref().map(batch::conform).transpose(),
                // The bytes that are left are those of the next stream.
                Err(ArrowError::IpcError(detail)) if detail == "Unexpected EOS" => self.has_ended = true,
                Err(error) => return Err(error),
            }
        }
        while let Some(summary) = self.summary.decode(&mut self.arrived)? {
            self.counts = batch::counts(&summary);
        }
        Ok(None)
    }

    /// The numbers of rollouts; none if the export has not arrived to its end.
    pub(super) fn counts(&self) -> Option<ExportCounts> {
        self.counts
    }
}
