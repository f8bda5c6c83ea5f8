//! A rollout as it is delivered: the stored data is checked first, then masked.
//!
//! Separate from the reader, which turns checked rollouts into rows and does not handle damage.

use std::collections::BTreeMap;

use forebay_wire::{Segment, TurnSpan, VersionSpan};

use crate::{
    advantage::standardized,
    credit::{self, Spanned},
    formats::{
        payload::{Damaged, Payload, SegmentColumns, SegmentHeader, Unpacked},
        seal,
    },
    ids::Version,
    samples::{BatchMember, pages},
    scores,
    staleness::{TrainedSpan, mask_below},
    states::Verdict,
    weights::RolloutMask,
};

/// A rollout whose stored data is undamaged, with its mask as delivered.
pub struct CheckedRollout<S = Segment> {
    pub member: BatchMember,
    pub rollout: Unpacked<S>,
    pub mask: RolloutMask,
    pub policy_version: Version,
    /// Its turns, if its rules compare turns.
    turns: Vec<Spanned>,
    /// Response tokens of all segments.
    response: usize,
}

impl CheckedRollout {
    /// Checks digest and seal, unpacks, and zeroes the mask of tokens that must not be trained.
    pub fn new(member: BatchMember, payload: &Payload) -> Result<Self, Damaged> {
        Self::with_sent(member, payload, |_| ()).map(|(checked, ())| checked)
    }

    /// The same, with what a function makes of the segments as sent.
    pub fn with_sent<T>(
        member: BatchMember,
        payload: &Payload,
        sent: impl FnOnce(&[Segment]) -> T,
    ) -> Result<(Self, T), Damaged> {
        let mut rollout = pages::unpack(&member.row, payload)?;
        check_components(&member, &rollout.reward_components)?;
        let posted = rollout.segments.iter().map(|segment| (segment.turns.as_deref(), &segment.loss_mask[..]));
        let turns = turns(&member, posted)?;
        let sent = sent(&rollout.segments);
        let response = rollout.segments.iter().map(|segment| segment.loss_mask.len()).sum();
        let masks =
            rollout.segments.iter_mut().map(|segment| (segment.versions.as_deref(), &mut segment.loss_mask[..]));
        let (mask, policy_version) = mask_as_delivered(&member, masks)?;
        Ok((Self { member, rollout, mask, policy_version, turns, response }, sent))
    }
}

impl CheckedRollout<SegmentHeader> {
    /// Checks digest and seal, unpacks the columns of the segments after those of other rollouts, and zeroes the mask of
    /// tokens that must not be trained. After an error, the columns have a part of the rollout.
    pub fn unpack_onto(columns: &mut SegmentColumns, member: BatchMember, payload: &Payload) -> Result<Self, Damaged> {
        pages::check_seal(&member.row, payload)?;
        let start = columns.loss_mask.len();
        let rollout = payload.unpack_onto(columns)?;
        check_components(&member, &rollout.reward_components)?;
        let mut rest = &columns.loss_mask[start..];
        let posted = rollout.segments.iter().map(|segment| {
            let (mask, others) = rest.split_at(segment.response);
            rest = others;
            (segment.turns.as_deref(), mask)
        });
        let turns = turns(&member, posted)?;
        let mut rest = &mut columns.loss_mask[start..];
        let masks = rollout.segments.iter().map(|segment| {
            let (mask, others) = std::mem::take(&mut rest).split_at_mut(segment.response);
            rest = others;
            (segment.versions.as_deref(), mask)
        });
        let (mask, policy_version) = mask_as_delivered(&member, masks)?;
        let response = columns.loss_mask.len() - start;
        Ok(Self { member, rollout, mask, policy_version, turns, response })
    }
}

impl<S> CheckedRollout<S> {
    /// Appends the advantage of each response token of all segments to a column, from those of the turns. They count where
    /// the mask is 1. A rollout without any, which does not count in the baseline, has 0.
    pub fn put_token_advantages(&self, column: &mut Vec<f32>) {
        let (start, of_turns) = (column.len(), self.member.turn_advantages.as_deref().unwrap_or_default());
        // A trained token outside of all turns has the advantage of the rollout.
        column.resize(start + self.response, self.member.advantage as f32);
        for (turn, advantage) in self.turns.iter().zip(of_turns) {
            column[start..][turn.range.clone()].fill(*advantage as f32);
        }
    }
}

/// Fails if the advantages of a group were computed from reward components that the rollout neither was posted with nor was
/// given as scores. No seal covers the column that the decision read.
fn check_components(member: &BatchMember, posted: &BTreeMap<String, f64>) -> Result<(), Damaged> {
    let read = member.rules.components_of(posted);
    let read = match &member.scores[..] {
        [] => read,
        given => member.rules.components_of(&scores::components(posted, scores::all(posted, None, given))),
    };
    if member.components != read {
        return Err(Damaged("its reward components differ from those of its row"));
    }
    Ok(())
}

/// The turns of a rollout whose rules compare turns. Fails if the advantages of a group were computed from others.
fn turns<'a>(
    member: &BatchMember,
    segments: impl Iterator<Item = (Option<&'a [TurnSpan]>, &'a [u8])>,
) -> Result<Vec<Spanned>, Damaged> {
    // The row of a rollout that takes no place in its group has no turns.
    if !member.rules.compare_turns() || !member.row.verdict.takes_place() {
        return Ok(Vec::new());
    }
    let posted: Vec<Spanned> = credit::spanned(segments).collect();
    let mut turns: Vec<_> = posted.iter().map(|spanned| spanned.turn).collect();
    credit::reward(&mut turns, member.turn_rewards.iter().copied());
    let advantages = member.turn_advantages.as_ref().map_or(turns.len(), Vec::len);
    if member.turns != Some(blake3::hash(&credit::pack(&turns))) || advantages != turns.len() {
        return Err(Damaged("its turns differ from those of its row"));
    }
    Ok(posted)
}

/// Zeroes the mask of tokens that must not be trained. Returns what is left of the mask, and the version of the rollout.
fn mask_as_delivered<'a>(
    member: &BatchMember,
    segments: impl Iterator<Item = (Option<&'a [VersionSpan]>, &'a mut [u8])>,
) -> Result<(RolloutMask, Version), Damaged> {
    let spans = member.row.trained_spans.as_deref().unwrap_or_default();
    let (mut mask, mut count) =
        (RolloutMask { trained_tokens: 0, trained_samples: 0, group_tokens: member.group_trained_tokens }, 0);
    for (index, (versions, loss_mask)) in segments.enumerate() {
        count += 1;
        if member.row.verdict != Verdict::Kept {
            loss_mask.fill(0);
        } else if let Some(oldest) = member.mask_below {
            mask_stale(versions, loss_mask, index as u32, spans, oldest);
        }
        let trained = ones(loss_mask);
        mask.trained_tokens += trained;
        mask.trained_samples += u64::from(trained > 0);
    }
    // Shards count rows before payloads are read. A row that they did not count would be in no shard.
    if member.rows() != count.max(1) {
        return Err(Damaged("it has another number of segments than its row says"));
    }
    // The weights and the totals of the batch were computed from the row's numbers.
    let stated = (member.trained_tokens, u64::from(member.trained_segments));
    if member.row.verdict == Verdict::Kept && stated != (mask.trained_tokens, mask.trained_samples) {
        return Err(Damaged("its mask does not add up to its row"));
    }
    // A rollout's version is the oldest version of its trained tokens, with the mask as delivered.
    let left = member.mask_below.and_then(|oldest| mask_below(spans, oldest).trained_versions);
    Ok((mask, left.map_or(member.row.policy_version, |versions| versions.oldest)))
}

/// Response tokens of a segment with mask 1.
pub fn trained_tokens(segment: &Segment) -> u64 {
    ones(&segment.loss_mask)
}

/// The number of ones in a mask.
pub fn ones(mask: &[u8]) -> u64 {
    mask.iter().map(|&bit| u64::from(bit)).sum()
}

/// The first rollout of each group whose advantages do not match their seal.
pub fn broken_groups(members: &[BatchMember]) -> impl Iterator<Item = &BatchMember> {
    let groups = members.chunk_by(|one, next| one.group_pk == next.group_pk);
    let is_broken = |group: &&[BatchMember]| {
        let found = seal::of_group(
            group.iter().map(|member| (member.row.rollout_pk, member.advantage, member.turn_advantages.as_deref())),
        );
        group[0].group_seal.is_some_and(|expected| expected != found)
    };
    groups.filter(is_broken).map(|group| &group[0])
}

/// Whitens the advantages of the groups whose rules say so, over all of their rollouts in the batch that count in the
/// baseline.
pub fn whiten(members: &mut [BatchMember]) {
    let is_whitened = |member: &&mut BatchMember| member.row.reward.is_some() && member.rules.whiten();
    let mut voters: Vec<&mut BatchMember> = members.iter_mut().filter(is_whitened).collect();
    let advantages: Vec<f64> = voters.iter().map(|member| member.advantage).collect();
    for (member, whitened) in voters.iter_mut().zip(standardized(&advantages)) {
        member.advantage = whitened;
    }
}

/// The samples and tokens that the weights of a batch count: N, and the sum of all masks. None if the tokens of a group
/// are not those of its rollouts.
pub fn totals(members: &[BatchMember]) -> Option<(u64, u64)> {
    let (mut samples, mut tokens) = (0, 0);
    for group in members.chunk_by(|one, next| one.group_pk == next.group_pk) {
        let kept = || group.iter().filter(|member| member.row.verdict == Verdict::Kept);
        let of_group: u64 = kept().map(|member| member.trained_tokens).sum();
        if group.iter().any(|member| member.group_trained_tokens != of_group) {
            return None;
        }
        tokens += of_group;
        samples += (group.len() - kept().count()) as u64;
        samples += kept().map(|member| u64::from(member.trained_segments.max(1))).sum::<u64>();
    }
    Some((samples, tokens))
}

/// Zeroes the mask of tokens of versions below `oldest`.
fn mask_stale(
    versions: Option<&[VersionSpan]>,
    loss_mask: &mut [u8],
    index: u32,
    trained: &[TrainedSpan],
    oldest: Version,
) {
    let Some(versions) = versions else {
        // If no span describes the segment, one version generated all of it.
        let version = trained.iter().find(|span| span.segment == index).map(|span| span.version);
        if version.is_some_and(|version| version < oldest) {
            loss_mask.fill(0);
        }
        return;
    };
    for &VersionSpan(version, start, length) in versions {
        if version < oldest.0 {
            loss_mask[start as usize..(start + length) as usize].fill(0);
        }
    }
}
