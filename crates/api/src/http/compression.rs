//! Compression of response bodies while they are sent.

use std::{
    io::{Result, Write as _},
    sync::Arc,
};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The fastest level. Most of the gain is that siblings share their prompt, which every level finds.
const LEVEL: i32 = 1;

/// Bytes that are compressed at a time.
const PIECE_BYTES: usize = 1 << 20;

/// The most bodies that are compressed at the same time. Each compressor takes about 1 MiB in addition to its data.
const COMPRESSORS_MAX: usize = 64;

/// Limits the number of compressors to [`COMPRESSORS_MAX`].
#[derive(Clone, Debug)]
pub(crate) struct Compressors(Arc<Semaphore>);

impl Default for Compressors {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(COMPRESSORS_MAX)))
    }
}

/// One zstd frame. Without [`end`](Self::end) the frame is incomplete, and a reader treats the body as cut off.
pub(crate) struct Compressor {
    encoder: zstd::Encoder<'static, Vec<u8>>,
    /// Counts the compressor until it is dropped.
    _permit: OwnedSemaphorePermit,
}

impl Compressor {
    /// Creates a compressor. None if [`COMPRESSORS_MAX`] are in use: the body is then sent uncompressed, which every
    /// client accepts.
    pub(crate) fn new(compressors: &Compressors) -> Option<Self> {
        let permit = Arc::clone(&compressors.0).try_acquire_owned().ok()?;
        let encoder = zstd::Encoder::new(Vec::new(), LEVEL).expect("the level is valid");
        Some(Self { encoder, _permit: permit })
    }

    /// Compresses parts and flushes, so that the client can read all of them without the following ones.
    pub(crate) fn parts(&mut self, parts: Vec<Bytes>) -> Result<Vec<Bytes>> {
        let mut compressed = Vec::new();
        for part in parts {
            // A single output buffer would be copied as it grows.
            for piece in part.chunks(PIECE_BYTES) {
                self.encoder.write_all(piece)?;
                compressed.push(self.take());
            }
        }
        self.encoder.flush()?;
        compressed.push(self.take());
        Ok(compressed)
    }

    /// Ends the frame. Returns its last bytes.
    pub(crate) fn end(&mut self) -> Result<Bytes> {
        self.encoder.do_finish()?;
        Ok(self.take())
    }

    fn take(&mut self) -> Bytes {
        std::mem::take(self.encoder.get_mut()).into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn no_more_are_compressed_at_once_than_there_are_places() {
        let places = Compressors::default();
        let taken: Vec<_> = std::iter::from_fn(|| Compressor::new(&places)).collect();
        assert_eq!(taken.len(), COMPRESSORS_MAX);
        drop(taken);
        assert!(Compressor::new(&places).is_some());
    }

    #[test]
    fn what_was_sent_can_be_read_before_the_end_which_tells_a_whole_body_from_a_broken_one() {
        let mut compressor = Compressor::new(&Compressors::default()).expect("a place is free");
        let mut part =
            |text: &'static str| compressor.parts(vec![Bytes::from_static(text.as_bytes())]).expect("memory");
        let mut sent = part("one ").concat();
        let read = |sent: &[u8]| {
            let mut text = String::new();
            let end = zstd::Decoder::new(sent).expect("memory").read_to_string(&mut text);
            (text, end.is_ok())
        };
        assert_eq!(read(&sent), ("one ".to_owned(), false));
        sent.extend(part("two").concat());
        assert_eq!(read(&sent), ("one two".to_owned(), false));
        sent.extend(compressor.end().expect("memory"));
        assert_eq!(read(&sent), ("one two".to_owned(), true));
    }
}
