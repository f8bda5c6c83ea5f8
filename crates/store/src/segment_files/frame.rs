//! The bytes of a segment file: a head, then frames, each with the head of a payload and the payload.
//!
//! Numbers are little-endian. A head is 64 bytes long and ends with a checksum of itself, the first 8 bytes of its
//! BLAKE3 hash:
//!
//! - of a file: `FBSEG\0\0\1`, the number of the file (8), its mark (8), zeros;
//! - of a frame: `FBFR`, the codec (4), the key of the rollout (8), the length of the payload (8), its digest (32).
//!
//! Rows of the database say where the payloads are. The heads are for the doctor, and for moving frames: they say what
//! is in a file without the database.

use forebay_domain::{formats::payload::Payload, ids::RolloutPk};

/// Bytes of the head of a file or a frame.
pub(super) const HEAD_BYTES: u64 = 64;

const CHECKSUM_BYTES: usize = 8;

const FILE: &[u8; 8] = b"FBSEG\0\0\x01";

const FRAME: &[u8; 4] = b"FBFR";

/// A head as it is in a file.
pub(super) type Head = [u8; HEAD_BYTES as usize];

pub(super) fn of_file(number: i64, mark: i64) -> Head {
    let mut head = [0; HEAD_BYTES as usize];
    head[..8].copy_from_slice(FILE);
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head[16..24].copy_from_slice(&mark.to_le_bytes());
    sealed(head)
}

pub(super) fn of_frame(rollout: RolloutPk, payload: &Payload) -> Head {
    let mut head = [0; HEAD_BYTES as usize];
    head[..4].copy_from_slice(FRAME);
    head[4..8].copy_from_slice(&payload.codec.to_le_bytes());
    head[8..16].copy_from_slice(&rollout.0.to_le_bytes());
    head[16..24].copy_from_slice(&(payload.body.len() as u64).to_le_bytes());
    head[24..56].copy_from_slice(&payload.digest);
    sealed(head)
}

/// What the head of a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHead {
    pub(crate) codec: u32,
    pub(crate) rollout: RolloutPk,
    pub(crate) length: u64,
    pub(crate) digest: [u8; 32],
}

/// Reads the head of a frame; none if these bytes are something else, or damaged.
pub(super) fn read_frame(head: &Head) -> Option<FrameHead> {
    let is_frame = &head[..4] == FRAME && sealed(*head) == *head;
    is_frame.then(|| FrameHead {
        codec: u32::from_le_bytes(part(head, 4)),
        rollout: RolloutPk(i64::from_le_bytes(part(head, 8))),
        length: u64::from_le_bytes(part(head, 16)),
        digest: part(head, 24),
    })
}

fn part<const N: usize>(head: &Head, at: usize) -> [u8; N] {
    head[at..at + N].try_into().expect("the parts of a head have fixed lengths")
}

/// The head with its checksum.
fn sealed(mut head: Head) -> Head {
    let (content, checksum) = head.split_at_mut(HEAD_BYTES as usize - CHECKSUM_BYTES);
    checksum.copy_from_slice(&blake3::hash(content).as_bytes()[..CHECKSUM_BYTES]);
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head that hexadecimal digits stand for.
    fn bytes_of(digits: &str) -> Head {
        std::array::from_fn(|place| u8::from_str_radix(&digits[2 * place..2 * place + 2], 16).expect("two digits"))
    }

    /// Later versions must read these files, so these bytes never change.
    #[test]
    fn heads_are_written_as_in_all_versions() {
        // The form of the payload has a field here; that the newest form is another one later changes nothing.
        let payload = Payload { codec: 1, ..Payload::claimed(b"payload".to_vec()) };
        let file = "46425345470000010300000000000000feffffffffffffff\
            00000000000000000000000000000000000000000000000000000000000000007150c6d6ae69c725";
        assert_eq!(of_file(3, -2), bytes_of(file));
        let frame = "464246520100000007000000000000000700000000000000\
            ec90915fa26ab012a89a88ecc8b47e4dd76c4adfd6abd1fc10e321b0fca18d1d121b5d78d9023c8d";
        assert_eq!(of_frame(RolloutPk(7), &payload), bytes_of(frame));
    }

    #[test]
    fn a_head_with_one_changed_bit_is_no_head() {
        let payload = Payload::claimed(b"payload".to_vec());
        let head = of_frame(RolloutPk(7), &payload);
        let expected = FrameHead { codec: payload.codec, rollout: RolloutPk(7), length: 7, digest: payload.digest };
        assert_eq!(read_frame(&head), Some(expected));
        for bit in 0..8 * head.len() {
            let mut damaged = head;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_frame(&damaged), None, "{bit}");
        }
    }
}
