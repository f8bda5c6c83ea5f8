//! Staleness: how far behind the current version tokens may be at their first delivery, which tokens `mask` removes, and
//! which rollouts `wait` waits for.
//!
//! Separate from [`batch`](crate::batch), because masking uses spans that only policies that [mask](masks) record.

use std::ops::RangeInclusive;

use forebay_wire::{AfterWait, StalenessAction, StalenessRules};
use serde::{Deserialize, Serialize};

use crate::{
    clock::Timestamp,
    ids::{AdmissionId, SessionId, Version},
};

/// Trained tokens of a segment that one version generated. It is stored as an array of its fields in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, i64, u64)", into = "(u32, i64, u64)")]
pub struct TrainedSpan {
    /// Index of the segment.
    pub segment: u32,
    pub version: Version,
    /// Tokens with mask 1.
    pub tokens: u64,
}

impl From<(u32, i64, u64)> for TrainedSpan {
    fn from((segment, version, tokens): (u32, i64, u64)) -> Self {
        Self { segment, version: Version(version), tokens }
    }
}

impl From<TrainedSpan> for (u32, i64, u64) {
    fn from(span: TrainedSpan) -> Self {
        (span.segment, span.version.0, span.tokens)
    }
}

/// The oldest and the newest version of some trained tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainedVersions {
    pub oldest: Version,
    pub newest: Version,
}

impl TrainedVersions {
    /// The versions of tokens that one version generated.
    #[must_use]
    pub fn one(version: Version) -> Self {
        Self { oldest: version, newest: version }
    }

    /// The versions of several sets of tokens together; none if no token is trained.
    #[must_use]
    pub fn of_all(sets: impl IntoIterator<Item = Option<Self>>) -> Option<Self> {
        let both = |one: Self, other: Self| Self {
            oldest: one.oldest.min(other.oldest),
            newest: one.newest.max(other.newest),
        };
        sets.into_iter().flatten().reduce(both)
    }
}

/// The mask of a rollout after stale tokens were masked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaskLeft {
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Tokens with mask 1.
    pub trained_tokens: u64,
    /// The versions of these tokens.
    pub trained_versions: Option<TrainedVersions>,
}

/// Whether the rules mask tokens that are over the bound.
#[must_use]
pub fn masks(rules: &StalenessRules) -> bool {
    match rules.action {
        StalenessAction::Drop => false,
        StalenessAction::Mask => true,
        StalenessAction::Wait => rules.after_wait == AfterWait::Mask,
    }
}

/// The versions of rollouts for which a batch must wait, the oldest first and the newest last: they are not too old now, and
/// too old when the version is published that follows from training the batch. `ahead` versions come before that one, of
/// batches that its trainer holds or has trained. None if the rules do not wait for rollouts.
#[must_use]
pub fn last_chances(rules: &StalenessRules, current: Version, ahead: i64) -> Option<RangeInclusive<Version>> {
    let waits = rules.action == StalenessAction::Wait;
    let oldest = current.0.checked_sub(rules.max.filter(|_| waits)?.into())?;
    // Rollouts of versions that are not published are never too old.
    let newest = oldest.saturating_add(ahead).min(current.0);
    (newest >= 0).then_some(Version(oldest.max(0))..=Version(newest))
}

/// The number of versions after which a rollout is too old whose oldest version this is; 0 if it is too old now. None
/// without a bound.
#[must_use]
pub fn stale_after(rules: &StalenessRules, current: Version, oldest: Version) -> Option<i64> {
    let last = oldest.0.saturating_add(rules.max?.into());
    Some(last.saturating_add(1).saturating_sub(current.0).max(0))
}

/// Since when no batch is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The newest version of the rollouts that are waited for.
    pub version: Version,
    pub since: Timestamp,
}

impl Pause {
    /// When the wait ends, at the latest.
    #[must_use]
    pub fn until(&self, rules: &StalenessRules) -> Timestamp {
        self.since.plus_seconds(rules.wait_s)
    }
}

/// A rollout that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnderWay {
    /// Of an open session.
    Session { session_id: SessionId, rollout_id: String },
    /// One that room is reserved for.
    Admission(AdmissionId),
    /// It has arrived and waits for scores.
    Scoring { rollout_id: String },
}

/// The rollouts that a batch waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitedFor {
    /// The one that began first.
    pub first: UnderWay,
    /// When it began.
    pub began: Timestamp,
    /// The number of all of them.
    pub rollouts: u64,
    /// When the wait ends, at the latest.
    pub until: Timestamp,
}

/// The oldest version that is within the staleness bound.
#[must_use]
pub fn oldest_fresh(current: Version, max: u32) -> Version {
    Version(current.0.saturating_sub(max.into()))
}

/// The mask without tokens of versions below `oldest`.
#[must_use]
pub fn mask_below(spans: &[TrainedSpan], oldest: Version) -> MaskLeft {
    let mut left = MaskLeft::default();
    let mut last_segment = None;
    let fresh = || spans.iter().filter(|span| span.version >= oldest);
    for span in fresh() {
        left.trained_segments += u32::from(last_segment.replace(span.segment) != Some(span.segment));
        left.trained_tokens += span.tokens;
    }
    left.trained_versions = TrainedVersions::of_all(fresh().map(|span| Some(TrainedVersions::one(span.version))));
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_has_its_last_chance_at_the_bound() {
        let rules = |max| StalenessRules { max, action: StalenessAction::Wait, ..StalenessRules::default() };
        let chances = |max, current, ahead| {
            last_chances(&rules(max), Version(current), ahead).map(|versions| (versions.start().0, versions.end().0))
        };
        assert_eq!([chances(Some(2), 1, 0), chances(Some(2), 2, 0)], [None, Some((0, 0))]);
        // While its trainer holds another batch, the version that follows is one greater.
        assert_eq!([chances(Some(2), 1, 1), chances(Some(2), 7, 1)], [Some((0, 0)), Some((5, 6))]);
        assert_eq!([chances(Some(0), 3, 0), chances(Some(0), 3, 2)], [Some((3, 3)); 2]);
        assert_eq!(chances(None, 3, 0), None);
        let dropping = StalenessRules { action: StalenessAction::Drop, ..rules(Some(2)) };
        assert_eq!(last_chances(&dropping, Version(7), 0), None);
        let after = |current, oldest| stale_after(&rules(Some(2)), Version(current), Version(oldest));
        assert_eq!([after(5, 5), after(7, 5), after(8, 5), after(9, 5)], [Some(3), Some(1), Some(0), Some(0)]);
        assert_eq!(stale_after(&rules(None), Version(9), Version(0)), None);
    }

    #[test]
    fn what_is_fresh_is_left() {
        let spans = [(0, 3, 10), (0, 5, 2), (1, 4, 7), (2, 6, 1)].map(TrainedSpan::from);
        let whole = mask_below(&spans, Version(3));
        assert_eq!((whole.trained_segments, whole.trained_tokens), (3, 20));
        assert_eq!(whole.trained_versions, Some(TrainedVersions { oldest: Version(3), newest: Version(6) }));
        let left = mask_below(&spans, oldest_fresh(Version(7), 2));
        assert_eq!((left.trained_segments, left.trained_tokens), (2, 3));
        assert_eq!(left.trained_versions, Some(TrainedVersions { oldest: Version(5), newest: Version(6) }));
        assert_eq!(mask_below(&spans, Version(7)), MaskLeft::default());
    }
}
