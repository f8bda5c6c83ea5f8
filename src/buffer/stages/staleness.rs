//! Staleness: how far behind the current version tokens may be at their first delivery, and which tokens `mask`
//! removes.
//!
//! Separate from [`batch`](crate::buffer::batch), because masking uses spans that only policies with `staleness.action
//! = "mask"` record.

use serde::{Deserialize, Serialize};

use crate::buffer::ids::Version;

/// Trained tokens of a segment that one version generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainedSpan(
    /// Index of the segment.
    pub u32,
    /// The version.
    pub i64,
    /// Tokens with mask 1.
    pub u64,
);

/// The mask of a rollout after stale tokens were masked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaskLeft {
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Tokens with mask 1.
    pub trained_tokens: u64,
    /// Oldest and newest version of these tokens.
    pub trained_versions: Option<(Version, Version)>,
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
    for &TrainedSpan(segment, version, tokens) in spans.iter().filter(|span| span.1 >= oldest.0) {
        left.trained_segments += u32::from(last_segment.replace(segment) != Some(segment));
        left.trained_tokens += tokens;
        let version = Version(version);
        left.trained_versions =
            Some(left.trained_versions.map_or((version, version), |(old, new)| (old.min(version), new.max(version))));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fresh_is_left() {
        let spans = [TrainedSpan(0, 3, 10), TrainedSpan(0, 5, 2), TrainedSpan(1, 4, 7), TrainedSpan(2, 6, 1)];
        let whole = mask_below(&spans, Version(3));
        assert_eq!((whole.trained_segments, whole.trained_tokens), (3, 20));
        assert_eq!(whole.trained_versions, Some((Version(3), Version(6))));
        let left = mask_below(&spans, oldest_fresh(Version(7), 2));
        assert_eq!((left.trained_segments, left.trained_tokens), (2, 3));
        assert_eq!(left.trained_versions, Some((Version(5), Version(6))));
        assert_eq!(mask_below(&spans, Version(7)), MaskLeft::default());
    }
}
