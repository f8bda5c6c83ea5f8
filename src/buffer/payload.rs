//! The stored form of a trajectory's bulk: packed columns behind a small header, compressed, with a digest.
//!
//! Nothing before [`samples`](super::samples) reads a payload. The form is `u32 header length | header JSON | columns`,
//! little-endian, as one zstd frame; the digest is taken over the frame, so damage is found before it is decoded.

use bytes::{Buf, BufMut};
use forebay_client::wire::{Sampling, Segment, Status, VersionSpan};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    columns::{from_little_endian, little_endian},
    trajectory::Trajectory,
};

/// Level 1: 435 MB/s for a 1.6 times smaller file; higher levels cost more than they save on packed columns.
const ZSTD_LEVEL: i32 = 1;

/// A payload as the store keeps it.
#[derive(Clone, Debug)]
pub struct Payload {
    /// BLAKE3 hash of `body`.
    pub digest: [u8; 32],
    /// One zstd frame.
    pub body: Vec<u8>,
    /// Bytes that it unpacks to.
    pub unpacked_bytes: usize,
}

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
}

impl Payload {
    /// Packs and compresses. Takes milliseconds for long trajectories: not for an async worker.
    #[must_use]
    pub fn pack(trajectory: &Trajectory) -> Self {
        let header = serde_json::to_vec(&header(trajectory)).expect("a header is text, numbers and checked JSON");
        let tokens: usize = trajectory.segments.iter().map(|segment| segment.tokens.len()).sum();
        // 9 bytes per token is exact for a trajectory with logprobs that is all response.
        let mut packed = Vec::with_capacity(4 + header.len() + 9 * tokens);
        packed.put_u32_le(header.len() as u32);
        packed.put_slice(&header);
        for segment in &trajectory.segments {
            packed.put_slice(&little_endian(&segment.tokens));
            packed.put_slice(&segment.loss_mask);
            for column in [&segment.logprobs, &segment.teacher_logprobs, &segment.values].into_iter().flatten() {
                packed.put_slice(&little_endian(column));
            }
        }
        Self::packed(&packed)
    }

    /// Bytes that claim to be packed, with a digest that is right: what damage before the digest looks like.
    #[doc(hidden)]
    #[must_use]
    pub fn packed(packed: &[u8]) -> Self {
        let body = zstd::bulk::compress(packed, ZSTD_LEVEL).expect("compressing memory into memory cannot fail");
        Self { digest: *blake3::hash(&body).as_bytes(), body, unpacked_bytes: packed.len() }
    }

    /// Checks the digest, decompresses and unpacks.
    pub fn unpack(&self) -> Result<Unpacked, Damaged> {
        if blake3::hash(&self.body) != blake3::Hash::from_bytes(self.digest) {
            return Err(Damaged("its digest differs"));
        }
        let packed = zstd::decode_all(self.body.as_slice()).map_err(|_| Damaged("it does not decompress"))?;
        let mut rest = packed.as_slice();
        let header_length = rest.try_get_u32_le().map_err(|_| Damaged("it is too short"))? as usize;
        let header: Header =
            serde_json::from_slice(take(&mut rest, header_length)?).map_err(|_| Damaged("its header is malformed"))?;
        let segments = header.segments.into_iter().map(|segment| unpack_segment(&mut rest, segment));
        Ok(Unpacked {
            segments: segments.collect::<Result<_, _>>()?,
            environment: header.environment,
            status: header.status,
            sampling: header.sampling,
            messages: header.messages,
            metadata: header.metadata,
        })
    }
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

fn unpack_segment(rest: &mut &[u8], header: SegmentHeader) -> Result<Segment, Damaged> {
    let tokens = take(rest, header.tokens.saturating_mul(4))?;
    let loss_mask = take(rest, header.response)?.to_vec();
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
        tokens: from_little_endian(tokens),
        loss_mask,
        kind: header.kind,
        versions: header.versions,
        response_length: None,
    })
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Damaged> {
    let (head, tail) = rest.split_at_checked(length).ok_or(Damaged("it is too short"))?;
    *rest = tail;
    Ok(head)
}
