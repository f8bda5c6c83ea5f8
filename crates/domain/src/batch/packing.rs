//! Batches with an exact number of samples: groups of unequal sizes are packed without splitting any.
//!
//! Groups become units first: a group of its environment's size is a unit, and smaller ones become one together. Then
//! units are taken in the order of delivery. If this misses the number, all combinations are considered.

use std::collections::BTreeMap;

use super::{Candidate, PackedEnvironment, Packing, sums::Sums};

/// The most samples of a batch for which combinations are considered. The time grows with the square of the number.
const COMBINED_MAX: usize = 8_192;

/// Groups that are delivered together.
struct Unit {
    /// Positions of its groups.
    groups: Vec<usize>,
    samples: usize,
    /// Its environment's index among the [`Minimum`]s; the number of minimums for all other environments.
    class: usize,
}

/// The samples that a batch has from an environment at least.
struct Minimum<'a> {
    environment: &'a str,
    samples: usize,
}

/// The positions of the groups of a batch, given all groups in the order of delivery. Units are in the order in which
/// their last groups became ready.
pub(super) fn pack(packing: &Packing, candidates: &[Candidate<'_>]) -> Option<Vec<usize>> {
    let wanted = packing.samples as usize;
    let minimums = minimums(packing);
    let units = units(packing, &minimums, candidates);
    let taken = first_units(wanted, &minimums, &units).or_else(|| any_units(wanted, &minimums, &units))?;
    Some(taken.into_iter().flat_map(|unit| units[unit].groups.iter().copied()).collect())
}

/// The positions of the groups that are in no unit.
pub(super) fn held_back(packing: &Packing, candidates: &[Candidate<'_>]) -> Vec<usize> {
    let mut is_held = vec![true; candidates.len()];
    for unit in units(packing, &[], candidates) {
        unit.groups.into_iter().for_each(|position| is_held[position] = false);
    }
    (0..candidates.len()).filter(|position| is_held[*position]).collect()
}

fn minimums(packing: &Packing) -> Vec<Minimum<'_>> {
    let wanted = packing.samples as usize;
    let shares = || packing.environments.iter().filter(|(_, of)| of.min_share > 0.0);
    let scale = shares().map(|(_, of)| of.min_share).sum::<f64>().max(1.0);
    let rounded = |is_up: bool| {
        let rounded = shares().map(move |(environment, of)| {
            let samples = (wanted as f64 * (of.min_share / scale)) as usize;
            let size = of.group_size.unwrap_or(1).max(1) as usize;
            let groups = if is_up { samples.div_ceil(size) } else { samples / size };
            Minimum { environment, samples: groups * size }
        });
        rounded.filter(|minimum| minimum.samples > 0).collect::<Vec<_>>()
    };
    let up = rounded(true);
    if up.iter().map(|minimum| minimum.samples).sum::<usize>() <= wanted { up } else { rounded(false) }
}

fn units(packing: &Packing, minimums: &[Minimum<'_>], candidates: &[Candidate<'_>]) -> Vec<Unit> {
    let mut held: BTreeMap<&str, Held> = BTreeMap::new();
    let mut units = Vec::new();
    for (position, group) in candidates.iter().enumerate() {
        let samples = usize::try_from(group.samples).unwrap_or(usize::MAX);
        let minimum = minimums.iter().position(|minimum| Some(minimum.environment) == group.environment);
        let class = minimum.unwrap_or(minimums.len());
        let known = group.environment.and_then(|environment| packing.environments.get_key_value(environment));
        let unit = match known {
            Some((environment, &PackedEnvironment { group_size: Some(size), .. })) if size as usize != samples => {
                let held = held.entry(environment).or_insert_with(|| Held::new(size, packing.samples));
                held.add(position, samples)
            }
            _ => Some((vec![position], samples)),
        };
        units.extend(unit.map(|(groups, samples)| Unit { groups, samples, class }));
    }
    units
}

/// Groups of an environment that have other sizes than it says, in the order of delivery.
struct Held {
    /// The size that it says.
    size: usize,
    groups: Vec<(usize, usize)>,
    sums: Sums,
}

impl Held {
    fn new(size: u32, batch: u32) -> Self {
        Self { size: size.max(1) as usize, groups: Vec::new(), sums: Sums::up_to(batch as usize) }
    }

    /// Adds a group. Returns the groups, and the sum of their samples, that became a unit by it.
    fn add(&mut self, position: usize, samples: usize) -> Option<(Vec<usize>, usize)> {
        self.groups.push((position, samples));
        self.sums.add(samples);
        let largest = self.groups.iter().map(|(_, samples)| *samples).max().unwrap_or(0);
        let mut multiples = (1..=largest.div_ceil(self.size)).map(|times| times * self.size);
        let (sum, members) = multiples.find_map(|sum| Some((sum, self.sums.numbers(sum)?)))?;
        let taken = members.iter().map(|member| self.groups[*member].0).collect();
        let left = self.groups.iter().enumerate().filter(|(at, _)| members.binary_search(at).is_err());
        self.groups = left.map(|(_, group)| *group).collect();
        self.sums = Sums::up_to(self.sums.bound());
        for (_, samples) in &self.groups {
            self.sums.add(*samples);
        }
        Some((taken, sum))
    }
}

/// Takes units in order: first what the minimums need, then what still fits. None if that is no batch.
fn first_units(wanted: usize, minimums: &[Minimum<'_>], units: &[Unit]) -> Option<Vec<usize>> {
    let mut is_taken = vec![false; units.len()];
    let mut left = wanted;
    let mut missing: Vec<usize> = minimums.iter().map(|minimum| minimum.samples).collect();
    for (taken, unit) in is_taken.iter_mut().zip(units) {
        let Some(missing) = missing.get_mut(unit.class).filter(|missing| **missing > 0) else { continue };
        if unit.samples <= left {
            *taken = true;
            left -= unit.samples;
            *missing = missing.saturating_sub(unit.samples);
        }
    }
    for (taken, unit) in is_taken.iter_mut().zip(units) {
        if !*taken && unit.samples <= left {
            *taken = true;
            left -= unit.samples;
        }
    }
    let is_exact = left == 0 && missing.iter().all(|missing| *missing == 0);
    is_exact.then(|| is_taken.iter().enumerate().filter(|(_, taken)| **taken).map(|(unit, _)| unit).collect())
}

/// Any units that are a batch: for each environment with a minimum, and for all others together, the sums that its units
/// can have, and then a combination of these sums.
fn any_units(wanted: usize, minimums: &[Minimum<'_>], units: &[Unit]) -> Option<Vec<usize>> {
    let there: usize = units.iter().map(|unit| unit.samples).fold(0, usize::saturating_add);
    if there < wanted || wanted > COMBINED_MAX {
        return None;
    }
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); minimums.len() + 1];
    let mut sums: Vec<Sums> = vec![Sums::up_to(wanted); minimums.len() + 1];
    for (position, unit) in units.iter().enumerate() {
        members[unit.class].push(position);
        sums[unit.class].add(unit.samples);
    }
    let least = |class: usize| minimums.get(class).map_or(0, |minimum| minimum.samples);
    // For each class and total of the classes up to it, the part of the class.
    let mut parts: Vec<Vec<Option<usize>>> = Vec::new();
    let mut totals = vec![0];
    for (class, of_class) in sums.iter().enumerate() {
        let mut part = vec![None; wanted + 1];
        for sum in of_class.all().filter(|sum| *sum >= least(class)) {
            for total in totals.iter().map(|total| total + sum).take_while(|total| *total <= wanted) {
                part[total].get_or_insert(sum);
            }
        }
        totals = (0..=wanted).filter(|total| part[*total].is_some()).collect();
        parts.push(part);
    }
    let mut taken = Vec::new();
    let mut total = wanted;
    for class in (0..sums.len()).rev() {
        let sum = parts[class][total]?;
        taken.extend(sums[class].numbers(sum)?.into_iter().map(|member| members[class][member]));
        total -= sum;
    }
    taken.sort_unstable();
    Some(taken)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 3] = ["a", "b", "c"];

    fn groups<'a>(sizes: &[(&'a str, u64)]) -> Vec<Candidate<'a>> {
        let of = |(environment, samples): &(&'a str, u64)| Candidate {
            environment: Some(environment).copied().filter(|name| !name.is_empty()),
            rollouts: *samples,
            samples: *samples,
            tokens: 1,
        };
        sizes.iter().map(of).collect()
    }

    fn packing(samples: u32, environments: &[(&str, Option<u32>, f64)]) -> Packing {
        let of = |(name, group_size, min_share): &(&str, Option<u32>, f64)| {
            ((*name).to_owned(), PackedEnvironment { group_size: *group_size, min_share: *min_share })
        };
        Packing { samples, environments: environments.iter().map(of).collect() }
    }

    #[test]
    fn a_batch_has_the_exact_number_or_does_not_exist() {
        let eight = packing(8, &[]);
        assert_eq!(pack(&eight, &groups(&[("", 4), ("", 4), ("", 4)])), Some(vec![0, 1]));
        assert_eq!(pack(&eight, &groups(&[("", 4)])), None);
        assert_eq!(pack(&eight, &groups(&[("", 3), ("", 4), ("", 4)])), Some(vec![1, 2]), "3 waits for 5");
        assert_eq!(pack(&eight, &groups(&[("", 9), ("", 8)])), Some(vec![1]));
        assert_eq!(pack(&eight, &[]), None);
    }

    #[test]
    fn groups_of_another_size_are_held_until_they_add_up() {
        let of_a = packing(4, &[("a", Some(4), 0.0)]);
        assert_eq!(pack(&of_a, &groups(&[("a", 2), ("b", 2)])), None, "b alone has no batch");
        assert_eq!(pack(&of_a, &groups(&[("a", 3), ("b", 4)])), Some(vec![1]));
        assert_eq!(pack(&of_a, &groups(&[("a", 3), ("a", 1), ("a", 4)])), Some(vec![0, 1]));
        assert_eq!(
            pack(&of_a, &groups(&[("a", 3), ("a", 2), ("a", 2)])),
            Some(vec![1, 2]),
            "not in order, but it fits"
        );
        let two = packing(2, &[("a", Some(4), 0.0)]);
        assert_eq!(pack(&two, &groups(&[("a", 2)])), None, "held, though the batch would have room");
    }

    #[test]
    fn groups_that_do_not_add_up_are_held_back() {
        let of_a = packing(8, &[("a", Some(4), 0.0)]);
        let held = |sizes: &[(&str, u64)]| held_back(&of_a, &groups(sizes));
        assert_eq!(held(&[("a", 4), ("a", 3), ("b", 3), ("", 1)]), [1]);
        assert_eq!(held(&[("a", 3), ("a", 2), ("a", 1), ("a", 2), ("a", 2)]), [4]);
        assert_eq!(held(&[]), [0; 0]);
    }

    #[test]
    fn a_group_above_the_size_is_added_up_to_a_multiple() {
        let of_a = packing(8, &[("a", Some(4), 0.0)]);
        assert_eq!(pack(&of_a, &groups(&[("a", 8)])), Some(vec![0]));
        assert_eq!(pack(&of_a, &groups(&[("a", 5), ("a", 3)])), Some(vec![0, 1]));
    }

    #[test]
    fn minimums_are_waited_for_and_the_rest_is_taken_in_order() {
        let halves = packing(8, &[("b", Some(2), 0.5)]);
        let a = [("a", 4), ("a", 4)];
        assert_eq!(pack(&halves, &groups(&a)), None);
        assert_eq!(pack(&halves, &groups(&[a[0], a[1], ("b", 2)])), None, "2 of 4");
        assert_eq!(pack(&halves, &groups(&[a[0], a[1], ("b", 2), ("b", 2)])), Some(vec![0, 2, 3]));
    }

    #[test]
    fn minimums_above_the_batch_are_scaled_down() {
        let too_much = packing(4, &[("a", None, 0.7), ("b", None, 0.6)]);
        assert_eq!(pack(&too_much, &groups(&[("a", 2), ("b", 2)])), Some(vec![0, 1]));
        // Two whole groups do not fit, so the minimum of the larger one does not hold.
        let large = packing(16, &[("a", Some(16), 0.5), ("b", Some(8), 0.5)]);
        assert_eq!(pack(&large, &groups(&[("a", 16), ("b", 8), ("b", 8)])), Some(vec![1, 2]));
    }

    #[test]
    fn if_the_first_groups_do_not_fit_others_are_combined() {
        let mixed = packing(8, &[("a", None, 0.5)]);
        assert_eq!(pack(&mixed, &groups(&[("a", 6), ("a", 4), ("b", 4)])), Some(vec![1, 2]));
    }

    /// The batch as the definition has it, for groups without known sizes: any groups with the sum and the minimums.
    fn exists(packing: &Packing, groups: &[Candidate<'_>]) -> bool {
        let minimums = minimums(packing);
        (0_u32..1 << groups.len()).any(|subset| {
            let taken = || (0..groups.len()).filter(|at| subset >> at & 1 == 1).map(|at| &groups[at]);
            let sum = |environment: Option<&str>| {
                let of = taken().filter(|group| environment.is_none() || group.environment == environment);
                of.map(|group| group.samples as usize).sum::<usize>()
            };
            sum(None) == packing.samples as usize
                && minimums.iter().all(|minimum| sum(Some(minimum.environment)) >= minimum.samples)
        })
    }

    proptest! {
        #[test]
        fn a_batch_is_found_exactly_if_there_is_one(
            sizes in prop::collection::vec((0_usize..3, 1_u64..9), 0..11),
            samples in 1_u32..25,
            shares in prop::collection::vec(0.0_f64..0.6, 3),
        ) {
            let sizes: Vec<(&str, u64)> = sizes.into_iter().map(|(name, size)| (NAMES[name], size)).collect();
            let environments: Vec<_> = NAMES.iter().zip(shares).map(|(name, share)| (*name, None, share)).collect();
            let (packing, groups) = (packing(samples, &environments), groups(&sizes));
            let found = pack(&packing, &groups);
            prop_assert_eq!(found.is_some(), exists(&packing, &groups));
            let Some(found) = found else { return Ok(()) };
            let mut distinct = found.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), found.len());
            prop_assert_eq!(found.iter().map(|at| groups[*at].samples).sum::<u64>(), u64::from(samples));
        }

        #[test]
        fn units_are_multiples_of_the_size_and_never_split(
            sizes in prop::collection::vec(1_u64..8, 0..30),
            size in 1_u32..6,
            times in 1_u32..5,
        ) {
            let sizes: Vec<(&str, u64)> = sizes.into_iter().map(|size| ("a", size)).collect();
            let (packing, mut left) = (packing(size * times, &[("a", Some(size), 0.0)]), groups(&sizes));
            while let Some(found) = pack(&packing, &left) {
                prop_assert_eq!(found.iter().map(|at| left[*at].samples).sum::<u64>(), u64::from(packing.samples));
                let mut at = 0;
                left.retain(|_| { at += 1; !found.contains(&(at - 1)) });
            }
            let whole = left.iter().filter(|group| group.samples == u64::from(size)).count();
            prop_assert!(whole < times as usize, "groups of the size are a batch together");
        }
    }
}
