//! Content: what one rollout consists of, for people who look at it.
//!
//! Not a stage that rollouts pass; it reads them in whichever state they are, as long as their payload is stored. Unlike
//! [`samples`](crate::samples), it shows the mask as sent beside the mask as delivered, and it changes nothing: a damaged
//! rollout is reported and not quarantined. An answer is bounded by a window of tokens and a page of messages.

pub mod map;
pub mod messages;
pub mod window;

use std::collections::BTreeMap;

use forebay_wire::{
    MessagePage, Sampling, Segment, SegmentSummary, SegmentVersions, Status, TokenMap, TokenWindow, VersionSpan,
    Violation,
};
use serde_json::value::RawValue;

use crate::{
    formats::payload::Payload,
    lease::Batch,
    refusal::Refusal,
    samples::{
        BatchMember,
        checked::{CheckedRollout, trained_tokens},
    },
};

/// The most tokens of a window.
pub const WINDOW_TOKENS_MAX: u64 = 16_384;

/// The most messages of a page.
pub const PAGE_MESSAGES_MAX: u64 = 1_000;

/// The most segments that an answer describes.
const SEGMENTS_MAX: usize = 4_096;

/// Metadata that is longer is left out, so that a window of tokens stays small.
const METADATA_BYTES_MAX: usize = 256 << 10;

/// Which part of a rollout is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Index of the segment.
    pub segment: u32,
    /// Index of the first token.
    pub from: u64,
    /// The most tokens.
    pub limit: u64,
    /// Index of the first message.
    pub messages_from: u64,
    /// The most messages.
    pub messages_limit: u64,
}

/// A part of a rollout.
#[derive(Debug)]
pub struct Content {
    /// Label of the environment.
    pub environment: Option<String>,
    /// How the execution ended.
    pub status: Status,
    /// Named parts of the reward.
    pub reward_components: BTreeMap<String, f64>,
    /// How tokens were sampled.
    pub sampling: Sampling,
    /// Weight of the trained tokens of each segment in the loss; empty if no batch contains the rollout.
    pub loss_weights: Vec<f64>,
    /// The number of segments.
    pub segments_total: usize,
    /// The first segments.
    pub segments: Vec<SegmentSummary>,
    /// The tokens of a part of a segment.
    pub window: Option<TokenWindow>,
    /// The whole segment.
    pub map: Option<TokenMap>,
    pub messages: Option<MessagePage>,
    /// Metadata as sent, if it is not too long.
    pub metadata: Option<Box<RawValue>>,
    /// Its length.
    pub metadata_bytes: usize,
}

/// What the mask of a rollout was when it was sent.
struct SentMasks {
    /// The number of tokens with mask 1, by segment.
    totals: Vec<u64>,
    /// The mask of the segment that is looked at.
    of_segment: Vec<u8>,
}

impl SentMasks {
    fn of(segments: &[Segment], index: usize) -> Self {
        let of_segment = segments.get(index).map(|segment| segment.loss_mask.clone()).unwrap_or_default();
        Self { totals: segments.iter().map(trained_tokens).collect(), of_segment }
    }
}

/// Checks and unpacks a rollout, and takes a part of it. This takes milliseconds for long ones, so async workers must
/// not call it.
pub fn look(member: BatchMember, payload: &Payload, batch: Option<&Batch>, part: Part) -> Result<Content, Refusal> {
    let index = part.segment as usize;
    let (rollout_id, group_id) = (member.row.rollout_id.clone(), member.row.group_id.clone());
    let looked = CheckedRollout::with_sent(member, payload, |segments| SentMasks::of(segments, index));
    let (checked, sent) = looked.map_err(|damage| {
        tracing::error!(
            rollout.id = %rollout_id,
            group.id = %group_id,
            error = %damage,
            "a rollout that was looked at is damaged; nothing was changed"
        );
        Refusal::DamagedContent { rollout_id: rollout_id.clone() }
    })?;
    let checked = with_advantages_of_turns(checked);
    let CheckedRollout { rollout, mask, .. } = checked;
    let segments = &rollout.segments;
    if index >= segments.len().max(1) {
        let detail = format!("must be below {}, the number of segments", segments.len().max(1));
        return Err(Refusal::Invalid(vec![Violation { pointer: "segment".to_owned(), detail }]));
    }
    let shown = segments.iter().zip(&sent.totals).take(SEGMENTS_MAX);
    let weights = |batch: &Batch| {
        let of = |segment: &Segment| batch.weights.of_sample(mask, trained_tokens(segment));
        if segments.is_empty() {
            vec![batch.weights.of_sample(mask, 0)]
        } else {
            segments.iter().take(SEGMENTS_MAX).map(of).collect()
        }
    };
    let metadata_bytes = rollout.metadata.as_ref().map_or(0, |metadata| metadata.get().len());
    Ok(Content {
        loss_weights: batch.map(weights).unwrap_or_default(),
        segments_total: segments.len(),
        segments: shown.map(|(segment, masked_in)| summary(segment, *masked_in)).collect(),
        window: segments.get(index).map(|segment| window::take(segment, &sent.of_segment, part)),
        map: segments.get(index).map(|segment| map::of(segment, &sent.of_segment, part.segment)),
        messages: match &rollout.messages {
            Some(messages) => Some(messages::page(messages, part).map_err(|_| Refusal::DamagedContent { rollout_id })?),
            None => None,
        },
        metadata: rollout.metadata.filter(|_| metadata_bytes <= METADATA_BYTES_MAX),
        metadata_bytes,
        environment: rollout.environment,
        status: rollout.status,
        reward_components: rollout.reward_components,
        sampling: rollout.sampling,
    })
}

/// The rollout with the advantages of its turns in place of those that were posted, if its rules compare turns.
fn with_advantages_of_turns(mut checked: CheckedRollout) -> CheckedRollout {
    if !checked.member.rules.compare_turns() {
        return checked;
    }
    let mut advantages = Vec::new();
    checked.put_token_advantages(&mut advantages);
    let is_known = checked.member.turn_advantages.is_some();
    let mut rest = advantages.into_iter();
    for segment in &mut checked.rollout.segments {
        let own = segment.loss_mask.iter().zip(rest.by_ref());
        let own: Vec<f32> = own.map(|(bit, advantage)| if *bit == 1 { advantage } else { 0.0 }).collect();
        segment.advantages = is_known.then_some(own);
    }
    checked
}

fn summary(segment: &Segment, masked_in: u64) -> SegmentSummary {
    let floats = [
        ("logprobs", &segment.logprobs),
        ("teacher_logprobs", &segment.teacher_logprobs),
        ("values", &segment.values),
        ("advantages", &segment.advantages),
    ];
    let has = floats.iter().filter(|(_, column)| column.is_some()).map(|(name, _)| (*name).to_owned());
    SegmentSummary {
        kind: segment.kind.clone(),
        tokens: segment.tokens.len() as u64,
        response_length: segment.loss_mask.len() as u64,
        masked_in,
        trained: trained_tokens(segment),
        versions: segment.versions.as_deref().and_then(versions),
        has: has.collect(),
    }
}

fn versions(spans: &[VersionSpan]) -> Option<SegmentVersions> {
    let versions = || spans.iter().map(|span| span.0);
    Some(SegmentVersions { min: versions().min()?, max: versions().max()?, spans: spans.len() as u64 })
}
