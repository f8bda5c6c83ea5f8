//! Bodies that are compressed while they are sent.

use std::{
    io::{Result, Write as _},
    sync::Arc,
};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The fastest: most of what there is to gain is that siblings share their prompt, which every level finds.
const LEVEL: i32 = 1;

/// Bytes that are compressed together.
const PIECE_BYTES: usize = 1 << 20;

/// Bodies that are compressed at once: each takes about a MiB besides what is compressed.
const COMPRESSORS_MAX: usize = 64;

/// The places of compressors, of which there are [`COMPRESSORS_MAX`].
#[derive(Clone, Debug)]
pub(super) struct Compressors(Arc<Semaphore>);

impl Default for Compressors {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(COMPRESSORS_MAX)))
    }
}

/// One zstd frame. Without [`end`](Self::end) it stays open, which a reader takes for a body that broke off.
pub(super) struct Compressor {
    encoder: zstd::Encoder<'static, Vec<u8>>,
    _place: OwnedSemaphorePermit,
}

impl Compressor {
    /// None when all places are taken: the body then goes as it is, which every client takes.
    pub(super) fn new(places: &Compressors) -> Option<Self> {
        let place = Arc::clone(&places.0).try_acquire_owned().ok()?;
        let encoder = zstd::Encoder::new(Vec::new(), LEVEL).expect("the level is one that there is");
        Some(Self { encoder, _place: place })
    }

    /// Compresses parts such that all of them can be read from what was sent so far.
    pub(super) fn parts(&mut self, parts: Vec<Bytes>) -> Result<Vec<Bytes>> {
        let mut compressed = Vec::new();
        for part in parts {
            // One buffer for all of it would be copied as it grows.
            for piece in part.chunks(PIECE_BYTES) {
                self.encoder.write_all(piece)?;
                compressed.push(self.take());
            }
        }
        self.encoder.flush()?;
        compressed.push(self.take());
        Ok(compressed)
    }

    /// Ends the frame.
    pub(super) fn end(&mut self) -> Result<Bytes> {
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
