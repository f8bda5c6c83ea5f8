//! Stage 3, finalize: decides a group, exactly once, in the transaction that completes it.
//!
//! The stage before is [`ingest`](crate::ingest), the next [`batch`](crate::batch).
//!
//! The checks run in this order: `min_size`, all-masked, the group filters; then the advantages are computed. The
//! totals of the group, which are all that batches need, are written to its row: nothing before the samples reads a
//! payload.

use std::{collections::BTreeMap, sync::Arc};

use forebay_wire::Advantage;

use crate::{
    advantage::{Voters, advantages},
    clock::Timestamp,
    credit::Turn,
    evaluation::FAILED_FILTERS_MAX,
    formats::seal::{self, SEAL_BYTES},
    ids::RolloutPk,
    reasons,
    rules::{
        Rules,
        filter::{Evaluation, Filters, facts::GroupFacts},
    },
    staleness::TrainedVersions,
    states::Verdict,
};

/// Why a group is decided now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Every place is taken by a kept or masked rollout.
    Complete,
    /// With `shrink`: every place is used, some by dropped rollouts.
    PlacesUsed,
    /// With `refill`: the posts are used up.
    Exhausted,
    /// Its deadline passed, or an API call closed it.
    TimedOut,
}

impl Cause {
    /// The reason for discarding a group that has too few rollouts when it is decided.
    fn shortage(self) -> &'static str {
        match self {
            Self::Exhausted => reasons::EXHAUSTED,
            Self::Complete | Self::PlacesUsed | Self::TimedOut => reasons::INCOMPLETE,
        }
    }
}

/// A group as read under its lock.
#[derive(Clone, Debug)]
pub struct GroupSnapshot {
    /// The number of its places.
    pub size: u32,
    /// The number of rollouts that suffice.
    pub min_size: u32,
    /// Label of the environment of its first rollout.
    pub environment: Option<String>,
    /// When its first rollout arrived.
    pub opened_at: Timestamp,
    /// Kept and masked rollouts in the order of arrival.
    pub rollouts: Vec<Member>,
}

impl GroupSnapshot {
    /// The rollouts that count in the baseline.
    #[must_use]
    pub fn voters(&self) -> Voters<'_> {
        let voters = || self.rollouts.iter().filter(|member| member.reward.is_some());
        Voters {
            rewards: voters().filter_map(|member| member.reward).collect(),
            components: voters().map(|member| &member.components).collect(),
            turns: voters().map(|member| &member.turns[..]).collect(),
        }
    }
}

/// A kept or masked rollout of a group.
#[derive(Clone, Debug)]
pub struct Member {
    /// Row of the rollout.
    pub rollout_pk: RolloutPk,
    /// Kept or masked.
    pub verdict: Verdict,
    /// Its reward, if it counts in the baseline.
    pub reward: Option<f64>,
    /// Those of its reward components that the rules of its group read.
    pub components: BTreeMap<String, f64>,
    /// Its turns, if the rules of its group compare turns.
    pub turns: Arc<[Turn]>,
    pub segments: u32,
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Response tokens with mask 1, as sent.
    pub trained_tokens: u64,
    /// Versions of its trained tokens, as delivered.
    pub trained_versions: Option<TrainedVersions>,
}

/// The result of deciding a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupOutcome {
    /// Whether it is ready or discarded.
    pub decision: GroupDecision,
    /// Totals over the members, also of a discarded group.
    pub totals: GroupTotals,
    /// Group filters that could not be evaluated and did not match.
    pub failed_filters: Vec<String>,
}

/// Whether a group is ready or discarded.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupDecision {
    /// Ready for a batch, with the data that batches need.
    Ready(ReadyGroup),
    /// Discarded, with the reason.
    Discard(String),
}

/// The results that finalize computes for a ready group.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadyGroup {
    /// The advantages of every member.
    pub advantages: Vec<MemberAdvantage>,
}

impl ReadyGroup {
    /// The seal of its advantages.
    #[must_use]
    pub fn seal(&self) -> [u8; SEAL_BYTES] {
        let members = self.advantages.iter();
        seal::of_group(members.map(|member| (member.rollout_pk, member.of_rollout, member.of_turns.as_deref())))
    }
}

/// The advantages of a rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberAdvantage {
    pub rollout_pk: RolloutPk,
    /// Of the whole rollout.
    pub of_rollout: f64,
    /// Of its turns; none if the rules do not compare turns, or if it does not count in the baseline.
    pub of_turns: Option<Vec<f64>>,
}

/// Totals over the kept and masked rollouts of a group, with the mask as delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupTotals {
    /// The number of rows of `/samples`.
    pub samples: u64,
    /// Sum of max(1, samples with a trained token) over rollouts.
    pub trained_samples: u64,
    /// Prompt and response tokens.
    pub tokens: u64,
    pub trained_tokens: u64,
    /// Sum of the rewards of kept rollouts.
    pub reward_sum: f64,
    /// Kept rollouts.
    pub reward_count: u64,
    /// The lowest and the highest reward that counts in the baseline, of kept and masked rollouts; none without rewards.
    pub reward_range: Option<(f64, f64)>,
    /// Versions of trained tokens; none if no token is trained.
    pub trained_versions: Option<TrainedVersions>,
}

/// Decides a group. The checks run in this order: too few rollouts, no trained token, the group filters. If none
/// discards the group, its advantages are computed.
#[must_use]
pub fn decide(rules: &Rules, group: &GroupSnapshot, cause: Cause, now: Timestamp) -> GroupOutcome {
    decide_by(rules.filters(), &rules.advantage, group, cause, now)
}

/// Decides a group by these filters.
pub fn decide_by(
    filters: &Filters,
    advantage: &Advantage,
    group: &GroupSnapshot,
    cause: Cause,
    now: Timestamp,
) -> GroupOutcome {
    let totals = totals(&group.rollouts);
    let discard = |reason: &str, failed_filters| GroupOutcome {
        decision: GroupDecision::Discard(reason.to_owned()),
        totals,
        failed_filters,
    };
    if group.rollouts.len() < group.min_size as usize {
        return discard(cause.shortage(), Vec::new());
    }
    if !group.rollouts.iter().any(|member| member.verdict == Verdict::Kept) {
        return discard(reasons::ALL_MASKED, Vec::new());
    }
    let voters = group.voters();
    let Evaluation { matched, failed, .. } = filters.evaluate_group(&filter_facts(group, &voters, now));
    let failed_filters = failed.into_iter().take(FAILED_FILTERS_MAX).map(str::to_owned).collect();
    if let Some(found) = matched {
        return discard(found.name, failed_filters);
    }
    let found = advantages(advantage, &voters);
    let (mut of_rollouts, mut of_turns) = (found.of_rollouts.into_iter(), found.of_turns.into_iter());
    let of_member = |member: &Member| MemberAdvantage {
        rollout_pk: member.rollout_pk,
        of_rollout: member.reward.and_then(|_| of_rollouts.next()).unwrap_or(0.0),
        of_turns: member.reward.and_then(|_| of_turns.next()),
    };
    let ready = ReadyGroup { advantages: group.rollouts.iter().map(of_member).collect() };
    GroupOutcome { decision: GroupDecision::Ready(ready), totals, failed_filters }
}

fn totals(members: &[Member]) -> GroupTotals {
    let mut totals = GroupTotals::default();
    for member in members {
        totals.samples += u64::from(member.segments.max(1));
        totals.tokens += member.tokens;
        if let Some(reward) = member.reward {
            let (low, high) = totals.reward_range.unwrap_or((reward, reward));
            totals.reward_range = Some((low.min(reward), high.max(reward)));
        }
        let kept = member.verdict == Verdict::Kept;
        totals.trained_samples += if kept { u64::from(member.trained_segments.max(1)) } else { 1 };
        if !kept {
            continue;
        }
        totals.trained_tokens += member.trained_tokens;
        totals.reward_sum += member.reward.unwrap_or(0.0);
        totals.reward_count += 1;
        totals.trained_versions = TrainedVersions::of_all([totals.trained_versions, member.trained_versions]);
    }
    totals
}

pub fn filter_facts<'a>(group: &'a GroupSnapshot, voters: &'a Voters<'a>, now: Timestamp) -> GroupFacts<'a> {
    let masked = group.rollouts.iter().filter(|member| member.verdict == Verdict::Masked).count();
    GroupFacts {
        size: i64::from(group.size),
        kept: (group.rollouts.len() - masked) as i64,
        masked: masked as i64,
        rewards: &voters.rewards,
        components: &voters.components,
        tokens: group.rollouts.iter().map(|member| member.tokens as i64).sum(),
        environment: group.environment.as_deref(),
        age_s: now.micros_since(group.opened_at) as f64 / 1e6,
    }
}
