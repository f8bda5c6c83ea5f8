//! Blobs: bytes that are uploaded once, and that rollouts name by their digest, such as images.
//!
//! A blob is stored in pieces of a MiB, each as a payload of its own, so that no upload and no reader holds more than a few
//! pieces in memory. BLAKE3 is a tree, so the digest of the whole follows from those of the pieces: no byte is read again
//! when the last piece has come, and a reader of any range checks what it reads.

use blake3::hazmat::{self, ChainingValue, HasherExt as _, Mode};
use bytes::Bytes;

use crate::{clock::Timestamp, columns::COLUMN_BYTES_MAX, formats::payload::Payload, ids::BlobDigest};

/// Bytes of every piece but the last. A power of two of BLAKE3's chunks, so that a piece is a subtree.
pub const PIECE_BYTES: u64 = 1 << 20;

/// What one commit stores of a blob, and what is sent of one at a time.
pub const PART_BYTES: u64 = 2 * PIECE_BYTES;

/// The most pieces of a blob.
pub const PIECES_MAX: u64 = 4_096;

// A column fits.
const _: () = assert!(COLUMN_BYTES_MAX <= PIECES_MAX * PIECE_BYTES);

/// An upload stays for at least so long when no rollout names it. Each PUT begins this time anew.
pub const KEPT_UNUSED_S: u64 = 24 * 3_600;

/// The most bytes of all uploads that no rollout has ever named.
pub const UNUSED_BYTES_MAX: u64 = 16 << 30;

/// The most uploads that no rollout has ever named.
pub const UNUSED_MAX: u64 = 100_000;

/// The form of a payload that is a piece of a blob: its bytes as they are. Forms of trajectories have lower numbers.
const PIECE_CODEC: u32 = 1 << 16;

/// A blob as far as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    pub digest: BlobDigest,
    /// Bytes of the whole.
    pub bytes: u64,
    /// The bytes from the beginning that are stored: all of them, or whole pieces.
    pub stored: u64,
    /// The media type with which it was uploaded.
    pub media_type: Option<String>,
    /// When it is deleted if no rollout names it until then; none while one does.
    pub expires_at: Option<Timestamp>,
}

impl Blob {
    /// Whether all of it is stored, and has the digest that it is named by.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.stored == self.bytes
    }
}

/// The number of pieces that so many bytes have.
#[must_use]
pub fn pieces(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE_BYTES)
}

/// A piece as a payload. Its digest is that of its subtree, or that of the whole if it is the only one.
///
/// This hashes up to a MiB, so async workers must not call it.
#[must_use]
pub fn piece(blob_bytes: u64, index: u64, body: Bytes) -> Payload {
    let digest = if pieces(blob_bytes) == 1 {
        *blake3::hash(&body).as_bytes()
    } else {
        blake3::Hasher::new().set_input_offset(index * PIECE_BYTES).update(&body).finalize_non_root()
    };
    Payload { codec: PIECE_CODEC, digest, unpacked_bytes: body.len(), body }
}

/// Whether a piece that was read is the one that was stored.
#[must_use]
pub fn is_intact(blob_bytes: u64, index: u64, read: &Payload) -> bool {
    let start = index * PIECE_BYTES;
    let length = blob_bytes.saturating_sub(start).min(PIECE_BYTES);
    read.codec == PIECE_CODEC
        && read.body.len() as u64 == length
        && piece(blob_bytes, index, read.body.clone()).digest == read.digest
}

/// The digest of a blob, from those of all its pieces in order; none if there are too few or too many.
#[must_use]
pub fn digest_of(blob_bytes: u64, pieces: &[[u8; 32]]) -> Option<BlobDigest> {
    if pieces.len() as u64 != self::pieces(blob_bytes) {
        return None;
    }
    let [only] = pieces else {
        let (left, right) = halves(blob_bytes, pieces);
        return Some(BlobDigest(*hazmat::merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()));
    };
    Some(BlobDigest(*only))
}

/// The digests of the two subtrees below the root of a tree of several pieces.
fn halves(bytes: u64, pieces: &[[u8; 32]]) -> (ChainingValue, ChainingValue) {
    let left_bytes = hazmat::left_subtree_len(bytes);
    let (left, right) = pieces.split_at((left_bytes / PIECE_BYTES) as usize);
    (subtree(left_bytes, left), subtree(bytes - left_bytes, right))
}

fn subtree(bytes: u64, pieces: &[[u8; 32]]) -> ChainingValue {
    let [only] = pieces else {
        let (left, right) = halves(bytes, pieces);
        return hazmat::merge_subtrees_non_root(&left, &right, Mode::Hash);
    };
    *only
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..length).map(|_| next()).collect()
    }

    #[test]
    fn the_digest_of_a_blob_follows_from_its_pieces() {
        let piece_bytes = PIECE_BYTES as usize;
        for length in [1, 1_024, piece_bytes - 1, piece_bytes, piece_bytes + 1, 3 * piece_bytes, 5 * piece_bytes + 7] {
            let all = Bytes::from(bytes(length));
            let starts = (0..pieces(length as u64)).map(|index| index as usize * piece_bytes);
            let stored: Vec<Payload> = starts
                .enumerate()
                .map(|(index, start)| {
                    piece(length as u64, index as u64, all.slice(start..(start + piece_bytes).min(length)))
                })
                .collect();
            let digests: Vec<_> = stored.iter().map(|piece| piece.digest).collect();
            let expected = BlobDigest(*blake3::hash(&all).as_bytes());
            assert_eq!(digest_of(length as u64, &digests), Some(expected), "{length}");
            for (index, piece) in stored.iter().enumerate() {
                assert!(is_intact(length as u64, index as u64, piece), "{length}");
                // A piece elsewhere in the blob is another one, unless it is the only one.
                assert!(!is_intact(length as u64, index as u64 + 1, piece), "{length}");
            }
            assert_eq!(digest_of(length as u64, &digests[1..]), None);
        }
    }
}
