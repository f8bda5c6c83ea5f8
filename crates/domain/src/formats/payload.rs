//! The stored form of a trajectory's bulk: packed columns behind a small header, with a digest.
//!
//! Only [`samples`](crate::samples) reads payloads. The form is: `u32 length of the first part | u32 length of
//! the second part | header JSON | floats | ids, masks and controls of floats`, little-endian. Ids take as few bytes as they
//! fit, and masks take one bit per token. The first two parts are compressed where that saves enough: ids of text shrink to
//! half, while what [`logprobs`] leaves of floats does not compress. The digest covers all bytes, so damage is found before
//! anything is decoded.

use std::{borrow::Cow, cell::RefCell, collections::BTreeMap};

use bytes::{Buf, BufMut, Bytes};
use forebay_wire::{ColumnUpload, MediaSpan, Sampling, Segment, Status, TurnSpan, VersionSpan};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    formats::{
        columns::{append_bits, append_ids, append_little_endian, id_bytes, put_bits, put_ids},
        logprobs,
    },
    trajectory::Trajectory,
};

/// Higher levels cost more time than the space they save is worth.
const ZSTD_LEVEL: i32 = 1;

/// Parts up to this length are not compressed, because that would save too little.
const PLAIN_BYTES_MAX: usize = 1 << 10;

/// Flag in the length of a part: the part is a zstd frame.
const COMPRESSED: u32 = 1 << 31;

/// The number of the form that is described above. It is stored with every payload, so that a version that has another
/// form knows which one a payload has.
pub const CODEC: u32 = 3;

/// Earlier forms, in which every float has four bytes and no control, and ids and masks come before them. The first one had
/// no column of advantages.
const PLAIN_FLOATS: [u32; 2] = [1, 2];

/// A payload as the store keeps it.
#[derive(Clone, Debug)]
pub struct Payload {
    /// The form of `body`: [`CODEC`], or an earlier one.
    pub codec: u32,
    /// BLAKE3 hash of `body`.
    pub digest: [u8; 32],
    /// The bytes, in this form.
    pub body: Bytes,
    /// The number of bytes that it unpacks to.
    pub unpacked_bytes: usize,
}

/// A payload or row differs from what was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stored data is damaged: {0}")]
pub struct Damaged(pub &'static str);

/// The bulk of a trajectory, as sent.
#[derive(Debug)]
pub struct Unpacked<S = Segment> {
    /// Label of the environment.
    pub environment: Option<String>,
    /// How the execution ended.
    pub status: Status,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// Named parts of the reward.
    pub reward_components: BTreeMap<String, f64>,
    /// Chat messages.
    pub messages: Option<Box<RawValue>>,
    /// Free-form object.
    pub metadata: Option<Box<RawValue>>,
    /// Training sequences in order.
    pub segments: Vec<S>,
}

/// The columns of many segments, joined in order. A segment that does not have a column adds nothing to it.
#[derive(Debug, Default)]
pub struct SegmentColumns {
    /// Prompt and response tokens.
    pub tokens: Vec<i32>,
    /// 0 or 1 per response token.
    pub loss_mask: Vec<u8>,
    /// Behaviour log-probabilities per response token.
    pub logprobs: Vec<f32>,
    /// Teacher log-probabilities per response token.
    pub teacher_logprobs: Vec<f32>,
    /// Critic values per response token.
    pub values: Vec<f32>,
    /// Advantages per response token, as sent.
    pub advantages: Vec<f32>,
}

/// The description of a trajectory, without its tokens and messages.
#[derive(Debug)]
pub struct Described {
    /// Label of the environment.
    pub environment: Option<String>,
    /// How the execution ended.
    pub status: Status,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// Named parts of the reward.
    pub reward_components: BTreeMap<String, f64>,
    /// Free-form object.
    pub metadata: Option<Box<RawValue>>,
    /// Tokens after the prompts, over all segments.
    pub response_tokens: u64,
    /// Tokens of the longest segment.
    pub max_segment_tokens: u64,
}

#[derive(Serialize, Deserialize)]
struct Header {
    environment: Option<String>,
    status: Status,
    sampling: Sampling,
    reward_components: BTreeMap<String, f64>,
    messages: Option<Box<RawValue>>,
    metadata: Option<Box<RawValue>>,
    segments: Vec<SegmentHeader>,
}

/// A segment without its columns: which it has, and how long they are.
#[derive(Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "one per column, not a state machine")]
pub struct SegmentHeader {
    pub kind: Option<String>,
    pub tokens: usize,
    pub response: usize,
    pub logprobs: bool,
    pub teacher_logprobs: bool,
    pub values: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub advantages: bool,
    pub versions: Option<Vec<VersionSpan>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<Vec<TurnSpan>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub columns: BTreeMap<String, ColumnUpload>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<MediaSpan>,
    /// The number of bytes of each token id.
    id_bytes: u8,
}

impl Payload {
    /// Packs a trajectory. This takes milliseconds for long ones, so async workers must not call it.
    #[must_use]
    pub fn pack(trajectory: &Trajectory) -> Self {
        let described = header(trajectory);
        let header = serde_json::to_vec(&described).expect("a header is text, numbers and checked JSON");
        let segments = || trajectory.segments.iter().zip(&described.segments);
        let narrow_bytes = |(segment, described): (&Segment, &SegmentHeader)| {
            usize::from(described.id_bytes) * segment.tokens.len() + segment.loss_mask.len().div_ceil(8)
        };
        let mut narrow = Vec::with_capacity(segments().map(narrow_bytes).sum());
        let unpacked_bytes = header.len() + columns_bytes(trajectory);
        let (header_length, header) = part(&header);
        let mut body = Vec::with_capacity(8 + header.len() + narrow.capacity());
        body.put_u32_le(header_length);
        // The length of the second part, once it is known.
        body.put_u32_le(0);
        body.put_slice(&header);
        for (segment, described) in segments() {
            put_ids(&mut narrow, &segment.tokens, described.id_bytes);
            put_bits(&mut narrow, &segment.loss_mask);
            floats(segment).for_each(|column| logprobs::put(&mut narrow, &mut body, column));
        }
        let (narrow_length, narrow) = part(&narrow);
        body[4..8].copy_from_slice(&narrow_length.to_le_bytes());
        body.put_slice(&narrow);
        // A column of floats has taken room for all of its bytes.
        body.shrink_to_fit();
        Self { unpacked_bytes, ..Self::claimed(body) }
    }

    /// A body with its digest, without checks. Tests use it to make data that was damaged before its digest was
    /// computed.
    #[doc(hidden)]
    #[must_use]
    pub fn claimed(body: Vec<u8>) -> Self {
        Self { codec: CODEC, digest: *blake3::hash(&body).as_bytes(), unpacked_bytes: body.len(), body: body.into() }
    }

    /// Checks the digest, and unpacks only the description of the trajectory.
    pub fn describe(&self) -> Result<Described, Damaged> {
        describe(&self.parts()?.header)
    }

    /// Checks the digest and the form, and finds the parts of the body.
    fn parts(&self) -> Result<Parts<'_>, Damaged> {
        if blake3::hash(&self.body) != blake3::Hash::from_bytes(self.digest) {
            return Err(Damaged("its digest differs"));
        }
        if self.codec != CODEC && !PLAIN_FLOATS.contains(&self.codec) {
            return Err(UNKNOWN_FORM);
        }
        let mut rest = &self.body[..];
        let header_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)?;
        let narrow_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)?;
        let header = take_part(&mut rest, header_length)?;
        let length = (narrow_length & !COMPRESSED) as usize;
        let (narrow, floats) = if self.has_controls() {
            let (floats, narrow) = rest.split_at_checked(rest.len().wrapping_sub(length)).ok_or(TOO_SHORT)?;
            (narrow, floats)
        } else {
            rest.split_at_checked(length).ok_or(TOO_SHORT)?
        };
        Ok(Parts { header, narrow_length, narrow, floats })
    }

    /// Whether a column of floats has a law and controls.
    fn has_controls(&self) -> bool {
        !PLAIN_FLOATS.contains(&self.codec)
    }

    /// Checks the digest, and unpacks.
    pub fn unpack(&self) -> Result<Unpacked, Damaged> {
        self.unpack_segments(|packed, header| {
            let mut columns = SegmentColumns::default();
            columns.append(packed, &header)?;
            let SegmentColumns { tokens, loss_mask, logprobs, teacher_logprobs, values, advantages } = columns;
            Ok(Segment {
                logprobs: header.logprobs.then_some(logprobs),
                teacher_logprobs: header.teacher_logprobs.then_some(teacher_logprobs),
                values: header.values.then_some(values),
                advantages: header.advantages.then_some(advantages),
                tokens,
                loss_mask,
                kind: header.kind,
                versions: header.versions,
                turns: header.turns,
                columns: header.columns,
                media: header.media,
                response_length: None,
            })
        })
    }

    /// Checks the digest, and appends the columns of the segments to others.
    pub fn unpack_onto(&self, columns: &mut SegmentColumns) -> Result<Unpacked<SegmentHeader>, Damaged> {
        self.unpack_segments(|packed, header| columns.append(packed, &header).map(|()| header))
    }

    /// Checks the digest, and makes of each segment what `segment` says. It must take all columns of the segment.
    fn unpack_segments<S>(
        &self,
        segment: impl FnMut(&mut PackedColumns<'_>, SegmentHeader) -> Result<S, Damaged>,
    ) -> Result<Unpacked<S>, Damaged> {
        let Parts { header, narrow_length, mut narrow, floats } = self.parts()?;
        let narrow = take_part(&mut narrow, narrow_length)?;
        let mut columns = PackedColumns { narrow: &narrow, floats, has_controls: self.has_controls() };
        let unpacked = unpack(&header, &mut columns, segment)?;
        if !columns.narrow.is_empty() || !columns.floats.is_empty() {
            return Err(Damaged("it has more columns than its header says"));
        }
        Ok(unpacked)
    }
}

/// The parts of a body. The columns are not decompressed yet.
struct Parts<'a> {
    header: Cow<'a, [u8]>,
    narrow_length: u32,
    narrow: &'a [u8],
    floats: &'a [u8],
}

impl SegmentColumns {
    fn append(&mut self, packed: &mut PackedColumns<'_>, header: &SegmentHeader) -> Result<(), Damaged> {
        packed.ids(&mut self.tokens, header.tokens, header.id_bytes)?;
        packed.mask(&mut self.loss_mask, header.response)?;
        let floats = [
            (header.logprobs, &mut self.logprobs),
            (header.teacher_logprobs, &mut self.teacher_logprobs),
            (header.values, &mut self.values),
            (header.advantages, &mut self.advantages),
        ];
        for (_, column) in floats.into_iter().filter(|(is_present, _)| *is_present) {
            packed.floats(column, header.response)?;
        }
        Ok(())
    }
}

/// Bytes of all columns at full width.
fn columns_bytes(trajectory: &Trajectory) -> usize {
    let of_segment = |segment: &Segment| {
        4 * segment.tokens.len() + segment.loss_mask.len() + 4 * floats(segment).map(Vec::len).sum::<usize>()
    };
    trajectory.segments.iter().map(of_segment).sum()
}

/// The columns of floats that the segment has, in the order in which they are written.
fn floats(segment: &Segment) -> impl Iterator<Item = &Vec<f32>> {
    [&segment.logprobs, &segment.teacher_logprobs, &segment.values, &segment.advantages].into_iter().flatten()
}

/// A part as it is stored, and its length with the flag that says whether it is compressed.
pub fn part(plain: &[u8]) -> (u32, Cow<'_, [u8]>) {
    thread_local! {
        static COMPRESSOR: RefCell<zstd::bulk::Compressor<'static>> = RefCell::new(
            zstd::bulk::Compressor::new(ZSTD_LEVEL).expect("zstd has this level")
        );
    }
    if plain.len() > PLAIN_BYTES_MAX {
        let compressed = COMPRESSOR.with_borrow_mut(|compressor| compressor.compress(plain));
        let compressed = compressed.expect("compressing memory into memory cannot fail");
        // Decompressing costs time, too, so a small saving is not worth it.
        if compressed.len() < plain.len() / 8 * 7 {
            return (compressed.len() as u32 | COMPRESSED, Cow::Owned(compressed));
        }
    }
    (plain.len() as u32, Cow::Borrowed(plain))
}

pub fn take_part<'a>(rest: &mut &'a [u8], length: u32) -> Result<Cow<'a, [u8]>, Damaged> {
    let stored = take(rest, (length & !COMPRESSED) as usize)?;
    if length & COMPRESSED == 0 { Ok(Cow::Borrowed(stored)) } else { decompress(stored).map(Cow::Owned) }
}

pub const TOO_SHORT: Damaged = Damaged("it is too short");

const UNKNOWN_FORM: Damaged = Damaged("its form is unknown");

const MALFORMED: Damaged = Damaged("its header is malformed");

fn decompress(bytes: &[u8]) -> Result<Vec<u8>, Damaged> {
    const DAMAGED: Damaged = Damaged("it does not decompress");
    thread_local! {
        static DECOMPRESSOR: RefCell<zstd::bulk::Decompressor<'static>> =
            RefCell::new(zstd::bulk::Decompressor::new().expect("a decompressor takes only memory"));
    }
    // zstd records the content size in a frame that was compressed from memory.
    let length = zstd::zstd_safe::get_frame_content_size(bytes).ok().flatten().ok_or(DAMAGED)?;
    let mut plain = Vec::new();
    plain.try_reserve_exact(usize::try_from(length).map_err(|_| DAMAGED)?).map_err(|_| DAMAGED)?;
    DECOMPRESSOR
        .with_borrow_mut(|decompressor| decompressor.decompress_to_buffer(bytes, &mut plain))
        .map_err(|_| DAMAGED)?;
    Ok(plain)
}

/// Packed columns, which come segment after segment in the order in which they were written. Each call appends the next
/// one to a column.
struct PackedColumns<'a> {
    narrow: &'a [u8],
    floats: &'a [u8],
    has_controls: bool,
}

impl PackedColumns<'_> {
    fn ids(&mut self, ids: &mut Vec<i32>, count: usize, width: u8) -> Result<(), Damaged> {
        // Another width would append another number of ids, and the ids of other segments follow in the same column.
        if !(2..=4).contains(&width) {
            return Err(MALFORMED);
        }
        take(&mut self.narrow, count.saturating_mul(width.into())).map(|bytes| append_ids(ids, bytes, width))
    }

    fn mask(&mut self, mask: &mut Vec<u8>, count: usize) -> Result<(), Damaged> {
        take(&mut self.narrow, count.div_ceil(8)).map(|bytes| append_bits(mask, bytes, count))
    }

    fn floats(&mut self, floats: &mut Vec<f32>, count: usize) -> Result<(), Damaged> {
        if self.has_controls {
            return logprobs::take_column(&mut self.narrow, &mut self.floats, floats, count);
        }
        take(&mut self.floats, count.saturating_mul(4)).map(|bytes| append_little_endian(floats, bytes))
    }
}

fn describe(header: &[u8]) -> Result<Described, Damaged> {
    let header: Header = serde_json::from_slice(header).map_err(|_| MALFORMED)?;
    Ok(Described {
        response_tokens: header.segments.iter().map(|segment| segment.response as u64).sum(),
        max_segment_tokens: header.segments.iter().map(|segment| segment.tokens as u64).max().unwrap_or(0),
        environment: header.environment,
        status: header.status,
        sampling: header.sampling,
        reward_components: header.reward_components,
        metadata: header.metadata,
    })
}

fn unpack<S>(
    header: &[u8],
    columns: &mut PackedColumns<'_>,
    mut segment: impl FnMut(&mut PackedColumns<'_>, SegmentHeader) -> Result<S, Damaged>,
) -> Result<Unpacked<S>, Damaged> {
    let header: Header = serde_json::from_slice(header).map_err(|_| MALFORMED)?;
    let segments = header.segments.into_iter().map(|header| segment(columns, header));
    Ok(Unpacked {
        segments: segments.collect::<Result<_, _>>()?,
        environment: header.environment,
        status: header.status,
        sampling: header.sampling,
        reward_components: header.reward_components,
        messages: header.messages,
        metadata: header.metadata,
    })
}

fn header(trajectory: &Trajectory) -> Header {
    let segments = trajectory.segments.iter().map(|segment| {
        // All fields are named, so that no new one is lost. The length of the response is that of the mask.
        let Segment {
            kind,
            tokens,
            loss_mask,
            response_length: _,
            logprobs,
            teacher_logprobs,
            values,
            advantages,
            versions,
            turns,
            columns,
            media,
        } = segment;
        SegmentHeader {
            kind: kind.clone(),
            tokens: tokens.len(),
            response: loss_mask.len(),
            logprobs: logprobs.is_some(),
            teacher_logprobs: teacher_logprobs.is_some(),
            values: values.is_some(),
            advantages: advantages.is_some(),
            versions: versions.clone(),
            turns: turns.clone(),
            columns: columns.clone(),
            media: media.clone(),
            id_bytes: id_bytes(tokens),
        }
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

pub fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Damaged> {
    let (head, tail) = rest.split_at_checked(length).ok_or(TOO_SHORT)?;
    *rest = tail;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use forebay_wire as wire;

    use super::*;
    use crate::{surrogates::LoneSurrogates, trajectory::TrajectoryLimits};

    const LIMITS: TrajectoryLimits = TrajectoryLimits {
        tokens_max: 100_000,
        segments_max: 8,
        metadata_bytes_max: 100_000,
        lone_surrogates: LoneSurrogates::Replace,
    };

    /// Two segments with ids of the given number of bits, and metadata that is long enough to be compressed.
    fn trajectory(bits: u32) -> Trajectory {
        let id = |index: i32| (index % 500) << (bits - 9);
        let segment = |response: usize| Segment {
            tokens: (0..=response as i32).map(id).collect(),
            loss_mask: (0..response).map(|index| u8::from(index % 3 > 0)).collect(),
            // Of tokens that are likely and of tokens that are not, as `log_softmax` makes them.
            logprobs: Some((0..response).map(|index| 0.0 - (1.0 + (index % 64) as f32 * 1e-4).ln()).collect()),
            ..Segment::default()
        };
        let metadata = serde_json::value::to_raw_value(&serde_json::json!({"note": "again ".repeat(1_000)}));
        let sent = wire::Trajectory {
            segments: vec![segment(5_001), segment(3)],
            metadata: Some(metadata.expect("it is JSON")),
            ..wire::Trajectory::default()
        };
        Trajectory::parse(sent, &LIMITS).expect("it is valid")
    }

    #[test]
    fn ids_of_every_width_come_back_as_they_were_sent() {
        for bits in [16, 17, 24, 25, 31] {
            let trajectory = trajectory(bits);
            let payload = Payload::pack(&trajectory);
            let unpacked = payload.unpack().expect("it is not damaged");
            assert_eq!(unpacked.segments, trajectory.segments, "{bits}");
            let described = payload.describe().expect("it is not damaged");
            assert_eq!((described.response_tokens, described.max_segment_tokens), (5_004, 5_002));
            assert_eq!(
                described.metadata.as_ref().map(|of| of.get().to_owned()),
                unpacked.metadata.as_ref().map(|of| of.get().to_owned())
            );
            let metadata = unpacked.metadata.expect("metadata was sent");
            assert_eq!(Some(metadata.get()), trajectory.facts.metadata.as_deref().map(RawValue::get));
        }
    }

    #[test]
    fn columns_are_appended_to_those_of_other_segments() {
        let trajectory = trajectory(17);
        let payload = Payload::pack(&trajectory);
        let mut columns = SegmentColumns::default();
        for _ in 0..2 {
            let unpacked = payload.unpack_onto(&mut columns).expect("it is not damaged");
            let shapes = unpacked.segments.iter().map(|header| (header.tokens, header.response, header.logprobs));
            assert_eq!(shapes.collect::<Vec<_>>(), [(5_002, 5_001, true), (4, 3, true)]);
        }
        let [first, second] = &trajectory.segments[..] else { panic!("it has two segments") };
        assert_eq!(columns.tokens, [&first.tokens[..], &second.tokens].concat().repeat(2));
        assert_eq!(columns.loss_mask, [&first.loss_mask[..], &second.loss_mask].concat().repeat(2));
        let logprobs = [first, second].map(|segment| segment.logprobs.clone().expect("both have them"));
        assert_eq!(columns.logprobs, logprobs.concat().repeat(2));
        assert!(columns.teacher_logprobs.is_empty() && columns.values.is_empty() && columns.advantages.is_empty());
    }

    #[test]
    fn what_repeats_is_compressed_and_log_probabilities_have_fewer_bytes() {
        let mut trajectory = trajectory(17);
        let bytes = Payload::pack(&trajectory).body.len();
        assert!((5_004..3 * 5_004).contains(&bytes), "less than a byte per id and two per log-probability: {bytes}");
        for segment in &mut trajectory.segments {
            segment.logprobs = None;
            segment.values = Some((0..segment.loss_mask.len()).map(|index| -(index as f32).sqrt()).collect());
        }
        let floats = 4 * 5_004;
        let bytes = Payload::pack(&trajectory).body.len();
        assert!((floats..floats + 5_006).contains(&bytes), "other floats have all of theirs: {bytes}");
    }

    #[test]
    fn ids_of_a_width_that_is_not_known_are_damage() {
        let sent = wire::Trajectory {
            segments: vec![Segment { tokens: vec![1; 9], loss_mask: vec![1; 8], ..Segment::default() }],
            ..wire::Trajectory::default()
        };
        let packed = Payload::pack(&Trajectory::parse(sent, &LIMITS).expect("it is valid")).body;
        for width in [b'0', b'1', b'5', b'8'] {
            let mut body = packed.to_vec();
            let place = body.windows(10).position(|part| part == b"id_bytes\":").expect("the header is not compressed");
            body[place + 10] = width;
            let mut columns = SegmentColumns::default();
            assert_eq!(Payload::claimed(body).unpack_onto(&mut columns).err(), Some(MALFORMED));
        }
    }

    #[test]
    fn every_column_of_floats_comes_back() {
        let mut trajectory = trajectory(17);
        trajectory.segments[1].advantages = Some(vec![0.5, -1.0, 2.0]);
        let payload = Payload::pack(&trajectory);
        assert_eq!(payload.unpack().expect("it is not damaged").segments, trajectory.segments);
        let narrow = u32::from_le_bytes(payload.body[4..8].try_into().expect("it has four bytes")) & !COMPRESSED;
        let (before, narrow) = payload.body.split_at(payload.body.len() - narrow as usize);
        let longer = Payload::claimed([before, &[0; 4], narrow].concat());
        assert_eq!(longer.unpack().err(), Some(Damaged("it has more columns than its header says")));
    }

    #[test]
    fn a_form_that_is_not_known_is_damage() {
        let payload = Payload { codec: CODEC + 1, ..Payload::pack(&trajectory(17)) };
        assert_eq!(payload.unpack().err(), Some(Damaged("its form is unknown")));
    }
}
