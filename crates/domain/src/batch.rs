//! Stage 4, batch: selects the ready groups of the next batch.
//!
//! The stage before is [`finalize`](crate::finalize), the next [`lease`](crate::lease). `packing.rs`
//! selects groups with an exact number of samples, and `shares.rs` gives environments their shares of a batch.

pub mod packing;
pub mod shares;
pub mod sums;

use std::collections::BTreeMap;

use forebay_wire::BatchRules;

/// The most groups of a batch. A batch is one transaction, and its groups are held in memory.
pub const GROUPS_MAX: u32 = 65_536;

/// The groups that are read for [`BatchSize::Samples`] in addition to those that can fill the batch, because some of the
/// first groups may not fit together.
const PACKING_LOOKAHEAD: u32 = 1_024;

/// The metric of a batch that is the mean reward of its kept rollouts.
pub const REWARD_TRAINED: &str = "reward/trained";

/// The name of the metric of a batch that is the mean of a reward component over its kept rollouts.
#[must_use]
pub fn component_metric(component: &str) -> String {
    format!("components/{component}/mean")
}

/// The reward component of a batch's metric.
#[must_use]
pub fn component(metric: &str) -> Option<&str> {
    metric.strip_prefix("components/")?.strip_suffix("/mean")
}

/// How large a new batch is. A batch that came back keeps its size.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum BatchSize {
    /// As large as `batch` of the policy's rules says.
    #[default]
    Rules,
    /// All groups that are ready, up to this many.
    Groups {
        /// The most groups, 1 to [`GROUPS_MAX`].
        at_most: u32,
    },
    /// Whole groups until there are enough rollouts. If the next group would exceed the greater number, the batch ends
    /// before it, also with fewer rollouts than the lesser number; a group that exceeds it alone is a batch of its own.
    /// With `partial`, the groups that are ready suffice.
    Rollouts {
        /// The number of rollouts at which the batch is full.
        at_least: u32,
        /// The most rollouts.
        at_most: u32,
    },
    /// Whole groups with an exact number of samples, or no batch.
    Samples(Packing),
}

/// A batch with an exact number of samples, which are the rows of its groups.
///
/// If an environment has a group size, only groups of this size count, and other groups of the environment are held
/// back until the samples of some of them add up to it, or to a multiple of it if one of them is larger. What was
/// added up is delivered together.
///
/// `max_tokens` of the rules does not apply, and `partial` neither. As many groups are considered as the batch has
/// samples, and 1,024 more, in the order of delivery. If no combination of them has the exact number, there is no batch
/// until one of them is discarded or becomes stale, or until the size changes. Above 8,192 samples, groups are only
/// taken in order, each if it still fits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Packing {
    /// The number of samples, 1 to [`GROUPS_MAX`].
    pub samples: u32,
    /// What is known about environments, by their labels.
    pub environments: BTreeMap<String, PackedEnvironment>,
}

/// What a batch with an exact number of samples takes from an environment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PackedEnvironment {
    /// The samples of a group; any number if absent.
    pub group_size: Option<u32>,
    /// The part of the batch's samples, 0 to 1, that comes from this environment at least, rounded down to whole
    /// samples. The batch waits for it. If the parts add up to more than 1, they are scaled down. If groups of the given
    /// sizes are too large for all parts, they are rounded down to whole groups.
    pub min_share: f64,
}

/// A ready group, as far as its selection depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Label of its environment.
    pub environment: Option<&'a str>,
    /// Kept and masked rollouts.
    pub rollouts: u64,
    /// Rows of samples.
    pub samples: u64,
    /// Prompt and response tokens.
    pub tokens: u64,
}

impl BatchSize {
    /// How many ready groups a selection of this size needs to know, in the order of delivery. It is one more than a
    /// batch can have, because whether the next group fits decides whether a batch is full.
    #[must_use]
    pub fn candidates(&self, rules: &BatchRules) -> u32 {
        match self {
            Self::Rules => rules.groups + 1,
            Self::Groups { at_most } | Self::Rollouts { at_most, .. } => at_most.clamp(&1, &GROUPS_MAX) + 1,
            Self::Samples(packing) => packing.samples.min(GROUPS_MAX) + PACKING_LOOKAHEAD,
        }
    }
}

/// Which of the ready groups the next batch takes, given them in the order of delivery. The positions are in the order in
/// which the batch has its groups. None while there is no batch of this size.
///
/// A batch by the rules has exactly `groups` groups. It has fewer only if the next group would exceed `max_tokens`; a
/// group above `max_tokens` forms a batch by itself. With `partial`, the groups that are ready form a batch.
#[must_use]
pub fn select(rules: &BatchRules, size: &BatchSize, candidates: &[Candidate<'_>], partial: bool) -> Option<Vec<usize>> {
    if let BatchSize::Samples(packing) = size {
        return packing::pack(packing, candidates);
    }
    let bounds = Bounds::of(rules, size);
    let ready_suffice = partial || matches!(size, BatchSize::Groups { .. });
    front(&bounds, candidates, ready_suffice).map(|taken| (0..taken).collect())
}

/// The positions of groups that no batch takes, because the samples of their environment's groups do not add up to its
/// group size yet.
#[must_use]
pub fn held_back(packing: &Packing, candidates: &[Candidate<'_>]) -> Vec<usize> {
    packing::held_back(packing, candidates)
}

/// When a batch that takes groups from the front of the line is full.
struct Bounds {
    groups: usize,
    rollouts_min: u64,
    rollouts_max: u64,
    tokens_max: u64,
}

impl Bounds {
    fn of(rules: &BatchRules, size: &BatchSize) -> Self {
        let tokens_max = rules.max_tokens.unwrap_or(u64::MAX);
        let groups = size.candidates(rules) as usize - 1;
        let of_groups = Self { groups, rollouts_min: u64::MAX, rollouts_max: u64::MAX, tokens_max };
        match *size {
            BatchSize::Rollouts { at_least, at_most } => {
                Self { rollouts_min: at_least.max(1).into(), rollouts_max: at_most.into(), ..of_groups }
            }
            BatchSize::Rules | BatchSize::Groups { .. } | BatchSize::Samples(_) => of_groups,
        }
    }
}

/// How many groups a batch takes from the front of the line.
fn front(bounds: &Bounds, candidates: &[Candidate<'_>], ready_suffice: bool) -> Option<usize> {
    let (mut tokens, mut rollouts) = (0_u64, 0_u64);
    for (taken, group) in candidates.iter().enumerate() {
        if taken == bounds.groups || rollouts >= bounds.rollouts_min {
            return Some(taken);
        }
        tokens = tokens.saturating_add(group.tokens);
        rollouts = rollouts.saturating_add(group.rollouts);
        if tokens > bounds.tokens_max || rollouts > bounds.rollouts_max {
            return Some(taken.max(1));
        }
    }
    let there = candidates.len();
    let is_full = there == bounds.groups || rollouts >= bounds.rollouts_min;
    (is_full || (ready_suffice && there > 0)).then_some(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(groups: u32, max_tokens: Option<u64>) -> BatchRules {
        BatchRules { groups, max_tokens, ..BatchRules::default() }
    }

    fn of_tokens(tokens: &[u64]) -> Vec<Candidate<'static>> {
        let of = |tokens: &u64| Candidate { rollouts: 1, samples: 1, tokens: *tokens, ..Candidate::default() };
        tokens.iter().map(of).collect()
    }

    fn of_rollouts(rollouts: &[u64]) -> Vec<Candidate<'static>> {
        rollouts.iter().map(|rollouts| Candidate { rollouts: *rollouts, ..Candidate::default() }).collect()
    }

    fn cut(rules: &BatchRules, tokens: &[u64], partial: bool) -> Option<usize> {
        select(rules, &BatchSize::Rules, &of_tokens(tokens), partial).map(|taken| taken.len())
    }

    #[test]
    fn a_batch_is_exactly_full() {
        assert_eq!(cut(&rules(3, None), &[1, 1], false), None);
        assert_eq!(cut(&rules(3, None), &[1, 1, 1, 1], false), Some(3));
    }

    #[test]
    fn the_group_that_would_pass_the_token_bound_waits_for_the_next_batch() {
        assert_eq!(cut(&rules(3, Some(10)), &[4, 6, 1], false), Some(2));
        assert_eq!(cut(&rules(3, Some(10)), &[4, 5], false), None, "a third group may still fit");
    }

    #[test]
    fn an_oversize_group_goes_alone() {
        assert_eq!(cut(&rules(3, Some(10)), &[11], false), Some(1));
        assert_eq!(cut(&rules(3, Some(10)), &[2, 11], false), Some(1));
    }

    #[test]
    fn a_partial_batch_takes_what_is_there() {
        assert_eq!(cut(&rules(3, None), &[1, 1], true), Some(2));
        assert_eq!(cut(&rules(3, None), &[], true), None);
    }

    #[test]
    fn up_to_a_number_of_groups_means_those_that_are_ready() {
        let size = BatchSize::Groups { at_most: 3 };
        let cut = |tokens: &[u64]| select(&rules(100, Some(10)), &size, &of_tokens(tokens), false);
        assert_eq!(cut(&[]), None);
        assert_eq!(cut(&[1, 1]), Some(vec![0, 1]), "the groups of the rules do not matter");
        assert_eq!(cut(&[1, 1, 1, 1]), Some(vec![0, 1, 2]));
        assert_eq!(cut(&[6, 5]), Some(vec![0]), "max_tokens of the rules holds");
        let none = BatchSize::Groups { at_most: 0 };
        assert_eq!(select(&rules(1, None), &none, &of_tokens(&[1, 1]), false), Some(vec![0]), "0 counts as 1");
    }

    #[test]
    fn whole_groups_are_taken_until_there_are_enough_rollouts() {
        let cut = |at_least, at_most, rollouts: &[u64], partial| {
            let size = BatchSize::Rollouts { at_least, at_most };
            select(&rules(1, None), &size, &of_rollouts(rollouts), partial).map(|taken| taken.len())
        };
        assert_eq!(cut(5, 100, &[2, 2, 2, 2], false), Some(3));
        assert_eq!(cut(4, 100, &[2, 2], false), Some(2));
        assert_eq!(cut(5, 100, &[2, 2], false), None);
        assert_eq!(cut(5, 100, &[2, 2], true), Some(2));
        assert_eq!(cut(5, 5, &[2, 2, 2], false), Some(2), "a third group would be too much");
        assert_eq!(cut(5, 5, &[8, 2], false), Some(1), "a group above the bound goes alone");
        assert_eq!(cut(0, 5, &[2, 2], false), Some(1));
        assert_eq!(cut(0, 5, &[], true), None);
    }
}
