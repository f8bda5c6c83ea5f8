//! A rollout as it is delivered: the stored data is checked first, then masked.
//!
//! Separate from the reader, which turns checked rollouts into rows and does not handle damage.

use forebay_client::wire::{Segment, VersionSpan};

use crate::buffer::{
    ids::Version,
    payload::{Damaged, Payload, Unpacked},
    port::BatchMember,
    seal::{self, RolloutSeal},
    staleness::{TrainedSpan, mask_below},
    states::Verdict,
    weights::RolloutMask,
};

/// A rollout whose stored data is undamaged, with its mask as delivered.
pub(in crate::buffer) struct CheckedRollout {
    pub(super) member: BatchMember,
    pub(super) rollout: Unpacked,
    pub(super) mask: RolloutMask,
    pub(super) policy_version: Version,
}

impl CheckedRollout {
    /// Checks digest and seal, unpacks, and zeroes the mask of tokens that must not be trained.
    pub(in crate::buffer) fn new(member: BatchMember, payload: &Payload) -> Result<Self, Damaged> {
        let seal = RolloutSeal {
            rollout_id: &member.rollout_id,
            group_id: &member.group_id,
            verdict: member.verdict,
            reward: member.reward,
            policy_version: member.policy_version,
            trained_spans: member.trained_spans.as_deref(),
            payload: &payload.digest,
        };
        if member.seal.is_some_and(|expected| expected != seal.checksum()) {
            return Err(Damaged("its row differs from its seal"));
        }
        let mut rollout = payload.unpack()?;
        let spans = member.trained_spans.as_deref().unwrap_or_default();
        let mut mask = RolloutMask { trained_tokens: 0, trained_samples: 0 };
        for (index, segment) in rollout.segments.iter_mut().enumerate() {
            if member.verdict != Verdict::Kept {
                segment.loss_mask.fill(0);
            } else if let Some(oldest) = member.mask_below {
                mask_stale(segment, index as u32, spans, oldest);
            }
            let trained = trained_tokens(segment);
            mask.trained_tokens += trained;
            mask.trained_samples += u64::from(trained > 0);
        }
        // The weights and the totals of the batch were computed from the row's numbers.
        let stated = (member.trained_tokens, u64::from(member.trained_segments));
        if member.verdict == Verdict::Kept && stated != (mask.trained_tokens, mask.trained_samples) {
            return Err(Damaged("its mask does not add up to its row"));
        }
        // A rollout's version is the oldest version of its trained tokens, with the mask as delivered.
        let left = member.mask_below.and_then(|oldest| mask_below(spans, oldest).trained_versions);
        let policy_version = left.map_or(member.policy_version, |versions| versions.oldest);
        Ok(Self { member, rollout, mask, policy_version })
    }
}

/// Response tokens of a segment with mask 1.
pub(super) fn trained_tokens(segment: &Segment) -> u64 {
    segment.loss_mask.iter().map(|&bit| u64::from(bit)).sum()
}

/// The first rollout of each group whose advantages do not match their seal.
pub(in crate::buffer) fn broken_groups(members: &[BatchMember]) -> impl Iterator<Item = &BatchMember> {
    let groups = members.chunk_by(|one, next| one.group_pk == next.group_pk);
    let is_broken = |group: &&[BatchMember]| {
        let found = seal::of_group(group.iter().map(|member| (member.rollout_pk, member.advantage)));
        group[0].group_seal.is_some_and(|expected| expected != found)
    };
    groups.filter(is_broken).map(|group| &group[0])
}

/// The samples and tokens that the weights of a batch count: N, and the sum of all masks.
pub(super) fn totals(members: &[BatchMember]) -> (u64, u64) {
    members.iter().fold((0, 0), |(samples, tokens), member| match member.verdict {
        Verdict::Kept => (samples + u64::from(member.trained_segments.max(1)), tokens + member.trained_tokens),
        Verdict::Masked | Verdict::Dropped | Verdict::Late => (samples + 1, tokens),
    })
}

/// Zeroes the mask of tokens of versions below `oldest`.
fn mask_stale(segment: &mut Segment, index: u32, trained: &[TrainedSpan], oldest: Version) {
    let Some(spans) = &segment.versions else {
        // If no span describes the segment, one version generated all of it.
        let version = trained.iter().find(|span| span.segment == index).map(|span| span.version);
        if version.is_some_and(|version| version < oldest) {
            segment.loss_mask.fill(0);
        }
        return;
    };
    for &VersionSpan(version, start, length) in spans {
        if version < oldest.0 {
            segment.loss_mask[start as usize..(start + length) as usize].fill(0);
        }
    }
}
