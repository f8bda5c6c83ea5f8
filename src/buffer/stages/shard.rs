//! Shards: deterministic sets of whole rollouts, balanced by tokens, for trainers with several ranks.

/// The most shards that a trainer may ask for.
pub const SHARDS_MAX: u32 = 1_024;

/// One of `count` shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: u32,
    count: u32,
}

impl Shard {
    /// The whole batch.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Shard `index` of `count`.
    #[must_use]
    pub fn new(index: u32, count: u32) -> Option<Self> {
        (index < count && count <= SHARDS_MAX).then_some(Self { index, count })
    }

    /// For each of a batch's rollouts, given their token counts in batch order: whether it belongs to this shard.
    #[must_use]
    pub fn members(&self, tokens: &[u64]) -> Vec<bool> {
        assign(tokens, self.count).into_iter().map(|shard| shard == self.index).collect()
    }
}

/// The shard of every rollout. The longest rollout comes first, and each goes to the shard with the fewest tokens so
/// far.
///
/// Ties go to the earlier rollout and the lower shard, so every reader of a batch computes the same sets.
#[must_use]
pub fn assign(tokens: &[u64], count: u32) -> Vec<u32> {
    let mut longest_first: Vec<usize> = (0..tokens.len()).collect();
    longest_first.sort_by_key(|&rollout| (std::cmp::Reverse(tokens[rollout]), rollout));
    let mut load = vec![(0_u64, 0_u64); count as usize];
    let mut shards = vec![0; tokens.len()];
    for rollout in longest_first {
        // Rollouts without tokens count as work too. Otherwise all of them would be in one shard.
        let lightest = (0..load.len()).min_by_key(|&shard| load[shard]).unwrap_or(0);
        load[lightest].0 += tokens[rollout];
        load[lightest].1 += 1;
        shards[rollout] = lightest as u32;
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_partition_the_batch_and_balance_its_tokens() {
        let tokens = [900, 100, 100, 100, 300, 300, 0, 0];
        let shards = assign(&tokens, 2);
        let load = |shard| -> u64 { tokens.iter().zip(&shards).filter(|(_, s)| **s == shard).map(|(t, _)| t).sum() };
        assert_eq!((load(0), load(1)), (900, 900));
        let members: usize = (0..2)
            .map(|index| Shard::new(index, 2).expect("index is below count").members(&tokens))
            .map(|members| members.into_iter().filter(|member| *member).count())
            .sum();
        assert_eq!(members, tokens.len());
    }

    #[test]
    fn there_may_be_more_shards_than_rollouts() {
        assert_eq!(assign(&[5], 3), [0]);
        assert_eq!(Shard::new(2, 3).expect("index is below count").members(&[5]), [false]);
        assert_eq!(Shard::new(3, 3), None);
        assert_eq!(Shard::new(0, SHARDS_MAX + 1), None);
    }
}
