//! Which sums can be made of some numbers, each used at most once.

const WORD_BITS: usize = u64::BITS as usize;

/// The sums up to a bound that can be made of the numbers added so far. Of the ways to make a sum, the one whose last
/// number was added first is known.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    /// A bit for each sum.
    can: Vec<u64>,
    /// For each sum, the position of the number that made it possible.
    last: Vec<u32>,
    added: Vec<usize>,
}

impl Sums {
    pub(super) fn up_to(bound: usize) -> Self {
        let mut can = vec![0; bound / WORD_BITS + 1];
        can[0] = 1;
        Self { can, last: vec![0; bound + 1], added: Vec::new() }
    }

    pub(super) fn bound(&self) -> usize {
        self.last.len() - 1
    }

    pub(super) fn can_make(&self, sum: usize) -> bool {
        sum <= self.bound() && self.can[sum / WORD_BITS] >> (sum % WORD_BITS) & 1 == 1
    }

    /// All sums that can be made, from the least.
    pub(super) fn all(&self) -> impl Iterator<Item = usize> {
        (0..=self.bound()).filter(|sum| self.can_make(*sum))
    }

    pub(super) fn add(&mut self, number: usize) {
        let position = self.added.len() as u32;
        self.added.push(number);
        if number == 0 || number > self.bound() {
            return;
        }
        let (words, bits) = (number / WORD_BITS, number % WORD_BITS);
        // From the highest word, so that the words below still have the sums without this number.
        for word in (words..self.can.len()).rev() {
            let from = word - words;
            let below = if bits > 0 && from > 0 { self.can[from - 1] >> (WORD_BITS - bits) } else { 0 };
            let mut new = (self.can[from] << bits | below) & !self.can[word];
            while new != 0 {
                let sum = word * WORD_BITS + new.trailing_zeros() as usize;
                new &= new - 1;
                if sum <= self.bound() {
                    self.can[word] |= 1 << (sum % WORD_BITS);
                    self.last[sum] = position;
                }
            }
        }
    }

    /// The positions, in the order of their addition, of numbers with this sum.
    pub(super) fn numbers(&self, sum: usize) -> Option<Vec<usize>> {
        if !self.can_make(sum) {
            return None;
        }
        let mut positions = Vec::new();
        let mut left = sum;
        while left > 0 {
            let position = self.last[left] as usize;
            positions.push(position);
            left -= self.added[position];
        }
        positions.reverse();
        Some(positions)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(numbers: &[usize], bound: usize) -> Sums {
        let mut sums = Sums::up_to(bound);
        for number in numbers {
            sums.add(*number);
        }
        sums
    }

    #[test]
    fn the_numbers_that_were_added_first_are_preferred() {
        assert_eq!(of(&[2, 2, 4, 2], 8).numbers(4), Some(vec![0, 1]));
        assert_eq!(of(&[3, 1, 4], 5).numbers(5), Some(vec![1, 2]));
        assert_eq!(of(&[2, 4], 6).numbers(3), None);
        assert_eq!(of(&[2, 4], 6).numbers(0), Some(vec![]));
        assert_eq!(of(&[70, 130, 64], 200).numbers(194), Some(vec![1, 2]), "also over several words");
    }

    proptest! {
        #[test]
        fn exactly_the_possible_sums_are_found(numbers in prop::collection::vec(0_usize..90, 0..12), bound in 1_usize..300) {
            let sums = of(&numbers, bound);
            let mut possible = vec![false; bound + 1];
            for subset in 0_u32..1 << numbers.len() {
                let sum: usize = (0..numbers.len()).filter(|at| subset >> at & 1 == 1).map(|at| numbers[at]).sum();
                if sum <= bound {
                    possible[sum] = true;
                }
            }
            for (sum, is_possible) in possible.into_iter().enumerate() {
                let found = sums.numbers(sum);
                prop_assert_eq!(found.is_some(), is_possible, "{}", sum);
                let Some(found) = found else { continue };
                prop_assert!(found.is_sorted_by(|a, b| a < b), "each is used at most once");
                prop_assert_eq!(found.iter().map(|at| numbers[*at]).sum::<usize>(), sum);
            }
        }
    }
}
