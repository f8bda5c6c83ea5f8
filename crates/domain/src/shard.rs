//! Shards: deterministic sets of the rows of a batch, balanced by their tokens, for trainers with several ranks.
//!
//! The unit is the row and not the rollout, because one rollout may have forty segments where the others have one. The
//! weight of a row does not depend on the shard it is in, so the loss of a batch is the same for every division.

use std::{cmp::Reverse, collections::BinaryHeap};

use forebay_wire::ShardBalance;

/// The most shards that a trainer may ask for.
pub const SHARDS_MAX: u32 = 1_024;

/// How a batch is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    count: u32,
    balance: ShardBalance,
}

impl Division {
    /// `count` shards.
    #[must_use]
    pub fn new(count: u32, balance: ShardBalance) -> Option<Self> {
        (1..=SHARDS_MAX).contains(&count).then_some(Self { count, balance })
    }

    /// The number of shards.
    #[must_use]
    pub fn count(self) -> u32 {
        self.count
    }

    /// The shard of every row, given the rows' token counts in batch order. The longest row comes first, and each goes
    /// to the shard with the least so far.
    ///
    /// Ties go to the earlier row and the lower shard, so every reader of a batch computes the same sets.
    #[must_use]
    pub fn assign(self, tokens: &[u64]) -> Vec<u32> {
        let mut longest_first: Vec<usize> = (0..tokens.len()).collect();
        longest_first.sort_by_key(|&row| (Reverse(tokens[row]), row));
        let mut least_first: BinaryHeap<_> = (0..self.count).map(|shard| Reverse((0_u128, 0_u64, shard))).collect();
        let mut shards = vec![0; tokens.len()];
        for row in longest_first {
            let Some(mut lightest) = least_first.peek_mut() else { break };
            let Reverse((load, rows, shard)) = &mut *lightest;
            *load = u128::saturating_add(*load, self.work(tokens[row]));
            // Rows without tokens count as work too. Otherwise all of them would be in one shard.
            *rows += 1;
            shards[row] = *shard;
        }
        shards
    }

    fn work(self, tokens: u64) -> u128 {
        match self.balance {
            ShardBalance::Tokens => tokens.into(),
            ShardBalance::SquaredTokens => u128::from(tokens) * u128::from(tokens),
        }
    }
}

/// One of the shards of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: u32,
    division: Division,
}

impl Shard {
    /// Shard `index` of a division.
    #[must_use]
    pub fn new(index: u32, division: Division) -> Option<Self> {
        (index < division.count).then_some(Self { index, division })
    }

    /// For each row: whether it belongs to this shard.
    #[must_use]
    pub fn members(self, tokens: &[u64]) -> Vec<bool> {
        self.division.assign(tokens).into_iter().map(|shard| shard == self.index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assign(tokens: &[u64], count: u32) -> Vec<u32> {
        Division::new(count, ShardBalance::Tokens).expect("the count is allowed").assign(tokens)
    }

    fn loads(work: impl Fn(u64) -> u64, tokens: &[u64], shards: &[u32]) -> Vec<u64> {
        let of =
            |shard| tokens.iter().zip(shards).filter(|(_, of)| **of == shard).map(|(tokens, _)| work(*tokens)).sum();
        (0..=*shards.iter().max().expect("there are rows")).map(of).collect()
    }

    #[test]
    fn shards_partition_the_batch_and_balance_its_tokens() {
        let tokens = [900, 100, 100, 100, 300, 300, 0, 0];
        let shards = assign(&tokens, 2);
        assert_eq!(loads(|tokens| tokens, &tokens, &shards), [900, 900]);
        let division = Division::new(2, ShardBalance::Tokens).expect("the count is allowed");
        let members: usize = (0..2)
            .map(|index| Shard::new(index, division).expect("index is below count").members(&tokens))
            .map(|members| members.into_iter().filter(|member| *member).count())
            .sum();
        assert_eq!(members, tokens.len());
    }

    /// Ranks read at different times and from different replicas, which may have different versions.
    #[test]
    fn the_division_stays_the_same() {
        let tokens = [500, 4_000, 2_000, 2_000, 0, 500, 4_000, 1, 2_000, 0];
        assert_eq!(assign(&tokens, 3), [1, 0, 2, 2, 2, 2, 1, 1, 0, 2]);
        let squares = Division::new(3, ShardBalance::SquaredTokens).expect("the count is allowed");
        assert_eq!(squares.assign(&tokens), [2, 0, 2, 2, 2, 2, 1, 2, 2, 2]);
    }

    #[test]
    fn squares_are_balanced_if_they_are_asked_for() {
        let tokens = [300, 200, 200, 200, 100, 100, 100, 100];
        let squares = Division::new(2, ShardBalance::SquaredTokens).expect("the count is allowed");
        let square = |tokens: u64| tokens * tokens;
        assert_eq!(loads(square, &tokens, &squares.assign(&tokens)), [120_000, 130_000]);
        assert_eq!(loads(square, &tokens, &assign(&tokens, 2)), [150_000, 100_000]);
        assert_eq!(squares.assign(&[u64::MAX; 3]), [0, 1, 0], "no sum overflows");
    }

    #[test]
    fn there_may_be_more_shards_than_rows() {
        assert_eq!(assign(&[5], 3), [0]);
        let division = Division::new(3, ShardBalance::Tokens).expect("the count is allowed");
        assert_eq!(Shard::new(2, division).expect("index is below count").members(&[5]), [false]);
        assert_eq!(Shard::new(3, division), None);
        assert_eq!(Division::new(SHARDS_MAX + 1, ShardBalance::Tokens), None);
        assert_eq!(Division::new(0, ShardBalance::Tokens), None);
    }
}
