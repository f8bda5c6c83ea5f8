//! The stored form of a trajectory's bulk: packed columns behind a small header, with a digest.
//!
//! Nothing before [`samples`](super::samples) reads a payload. The form is `u8 coding of the header | u32 its length |
//! header JSON | columns`, little-endian: ids in as few bytes as they fit, masks in bits, floats as they are. Columns are
//! not compressed: what a compressor finds in ids and masks the packing has taken, and log-probabilities are noise to
//! it. The digest is taken over the whole, so damage is found before anything is decoded.

use std::borrow::Cow;

use bytes::{Buf, BufMut};
use forebay_client::wire::{Sampling, Segment, Status, VersionSpan};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    columns::{bits, from_little_endian, id_bytes, ids, little_endian, put_bits, put_ids},
    trajectory::Trajectory,
};

/// Level of headers; higher ones cost more than they save.
const ZSTD_LEVEL: i32 = 1;

/// Headers longer than this are compressed: they are messages and metadata.
const HEADER_PLAIN_BYTES_MAX: usize = 4 << 10;

/// A payload as the store keeps it.
#[derive(Clone, Debug)]
pub struct Payload {
    /// The form of `body`; none when the store named one that is not known.
    pub codec: Option<Codec>,
    /// BLAKE3 hash of `body`.
    pub digest: [u8; 32],
    /// The bytes, in that form.
    pub body: Vec<u8>,
    /// Bytes that it unpacks to.
    pub unpacked_bytes: usize,
}

/// Forms of a payload's body; the numbers are those of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// One zstd frame of a header and full-width columns: version 0.1.
    Zstd = 1,
    /// A header and narrow columns.
    Columns = 2,
}

impl Codec {
    /// The form of a number.
    #[must_use]
    pub fn from_number(number: i64) -> Option<Self> {
        [Self::Zstd, Self::Columns].into_iter().find(|codec| *codec as i64 == number)
    }
}

/// How a header is written.
const PLAIN: u8 = 0;
const COMPRESSED: u8 = 1;

/// A payload that is not what was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what is stored is damaged: {0}")]
pub struct Damaged(pub(super) &'static str);

/// The bulk of a trajectory, as sent.
#[derive(Debug)]
pub struct Unpacked {
    /// Label of the environment.
    pub environment: Option<String>,
    /// How the execution ended.
    pub status: Status,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// Chat messages.
    pub messages: Option<Box<RawValue>>,
    /// Free-form object.
    pub metadata: Option<Box<RawValue>>,
    /// Training sequences in order.
    pub segments: Vec<Segment>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    environment: Option<String>,
    status: Status,
    sampling: Sampling,
    reward_components: std::collections::BTreeMap<String, f64>,
    messages: Option<Box<RawValue>>,
    metadata: Option<Box<RawValue>>,
    segments: Vec<SegmentHeader>,
}

#[derive(Serialize, Deserialize)]
struct SegmentHeader {
    kind: Option<String>,
    tokens: usize,
    response: usize,
    logprobs: bool,
    teacher_logprobs: bool,
    values: bool,
    versions: Option<Vec<VersionSpan>>,
    /// Bytes of each token id.
    #[serde(default = "full_width")]
    id_bytes: u8,
}

fn full_width() -> u8 {
    4
}

impl Payload {
    /// Packs. Takes milliseconds for long trajectories: not for an async worker.
    #[must_use]
    pub fn pack(trajectory: &Trajectory) -> Self {
        let header_of = header(trajectory);
        let header = serde_json::to_vec(&header_of).expect("a header is text, numbers and checked JSON");
        let (coding, stored) = if header.len() <= HEADER_PLAIN_BYTES_MAX {
            (PLAIN, header.as_slice().into())
        } else {
            let compressed = zstd::bulk::compress(&header, ZSTD_LEVEL);
            (COMPRESSED, Cow::Owned(compressed.expect("compressing memory into memory cannot fail")))
        };
        let tokens: usize = trajectory.segments.iter().map(|segment| segment.tokens.len()).sum();
        // Enough for a trajectory with logprobs that is all response.
        let mut body = Vec::with_capacity(5 + stored.len() + 8 * tokens);
        body.put_u8(coding);
        body.put_u32_le(stored.len() as u32);
        body.put_slice(&stored);
        let mut unpacked_bytes = header.len();
        for (segment, described) in trajectory.segments.iter().zip(&header_of.segments) {
            put_ids(&mut body, &segment.tokens, described.id_bytes);
            put_bits(&mut body, &segment.loss_mask);
            unpacked_bytes += 4 * segment.tokens.len() + segment.loss_mask.len();
            for column in [&segment.logprobs, &segment.teacher_logprobs, &segment.values].into_iter().flatten() {
                body.put_slice(&little_endian(column));
                unpacked_bytes += 4 * column.len();
            }
        }
        Self { codec: Some(Codec::Columns), digest: *blake3::hash(&body).as_bytes(), body, unpacked_bytes }
    }

    /// Bytes that claim to be a body, with a digest that is right: what damage before the digest looks like.
    #[doc(hidden)]
    #[must_use]
    pub fn claimed(codec: Codec, body: Vec<u8>) -> Self {
        Self { codec: Some(codec), digest: *blake3::hash(&body).as_bytes(), unpacked_bytes: body.len(), body }
    }

    /// Checks the digest, and unpacks.
    pub fn unpack(&self) -> Result<Unpacked, Damaged> {
        if blake3::hash(&self.body) != blake3::Hash::from_bytes(self.digest) {
            return Err(Damaged("its digest differs"));
        }
        match self.codec {
            None => Err(Damaged("its form is not known")),
            Some(Codec::Zstd) => {
                let packed = decompress(&self.body)?;
                let mut rest = packed.as_slice();
                let header_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)? as usize;
                let header = take(&mut rest, header_length)?;
                unpack(header, rest, |rest, count| take(rest, count).map(<[u8]>::to_vec))
            }
            Some(Codec::Columns) => {
                let mut rest = self.body.as_slice();
                let coding = rest.try_get_u8().map_err(|_| TOO_SHORT)?;
                let header_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)? as usize;
                let header = take(&mut rest, header_length)?;
                let header = if coding == PLAIN { header.into() } else { Cow::Owned(decompress(header)?) };
                unpack(&header, rest, |rest, count| Ok(bits(take(rest, count.div_ceil(8))?, count)))
            }
        }
    }
}

const TOO_SHORT: Damaged = Damaged("it is too short");

fn decompress(bytes: &[u8]) -> Result<Vec<u8>, Damaged> {
    zstd::decode_all(bytes).map_err(|_| Damaged("it does not decompress"))
}

/// Reads a mask of so many tokens.
type TakeMask = fn(&mut &[u8], usize) -> Result<Vec<u8>, Damaged>;

fn unpack(header: &[u8], mut rest: &[u8], mask: TakeMask) -> Result<Unpacked, Damaged> {
    let header: Header = serde_json::from_slice(header).map_err(|_| Damaged("its header is malformed"))?;
    let segments = header.segments.into_iter().map(|segment| unpack_segment(&mut rest, segment, mask));
    Ok(Unpacked {
        segments: segments.collect::<Result<_, _>>()?,
        environment: header.environment,
        status: header.status,
        sampling: header.sampling,
        messages: header.messages,
        metadata: header.metadata,
    })
}

fn header(trajectory: &Trajectory) -> Header {
    let segments = trajectory.segments.iter().map(|segment| SegmentHeader {
        kind: segment.kind.clone(),
        tokens: segment.tokens.len(),
        response: segment.loss_mask.len(),
        logprobs: segment.logprobs.is_some(),
        teacher_logprobs: segment.teacher_logprobs.is_some(),
        values: segment.values.is_some(),
        versions: segment.versions.clone(),
        id_bytes: id_bytes(&segment.tokens),
    });
    Header {
        environment: trajectory.facts.environment.clone(),
        status: trajectory.facts.status,
        sampling: trajectory.sampling,
        reward_components: trajectory.facts.reward_components.clone(),
        messages: trajectory.messages.clone(),
        metadata: trajectory.facts.metadata.clone(),
        segments: segments.collect(),
    }
}

fn unpack_segment(rest: &mut &[u8], header: SegmentHeader, mask: TakeMask) -> Result<Segment, Damaged> {
    let tokens = take(rest, header.tokens.saturating_mul(header.id_bytes.into()))?;
    let loss_mask = mask(rest, header.response)?;
    let mut floats = |present: bool| -> Result<Option<Vec<f32>>, Damaged> {
        if !present {
            return Ok(None);
        }
        let bytes = take(rest, header.response.saturating_mul(4))?;
        Ok(Some(from_little_endian(bytes)))
    };
    Ok(Segment {
        logprobs: floats(header.logprobs)?,
        teacher_logprobs: floats(header.teacher_logprobs)?,
        values: floats(header.values)?,
        tokens: ids(tokens, header.id_bytes),
        loss_mask,
        kind: header.kind,
        versions: header.versions,
        response_length: None,
    })
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Damaged> {
    let (head, tail) = rest.split_at_checked(length).ok_or(TOO_SHORT)?;
    *rest = tail;
    Ok(head)
}
