//! Staleness: how far behind the current version tokens may be at their first delivery, and which tokens `mask`
//! removes.
//!
//! Separate from [`batch`](crate::batch), because masking uses spans that only policies with `staleness.action
//! = "mask"` record.

use serde::{Deserialize, Serialize};

use crate::ids::Version;

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
