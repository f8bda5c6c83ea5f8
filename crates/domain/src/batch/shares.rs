//! Batches in which environments have shares: whose turn it is.
//!
//! A batch is a sequence of places. The share of an environment is its part of each place: its `min_share`, and its part,
//! by weight, of what the minimums leave. A place goes to one environment, and what the others had of it is carried to
//! the next places, also of later batches. So an environment gets as many groups as its share of all places is, to
//! within one group.
//!
//! With turns in the order of their deadlines, among the environments that may have one, no deadline is missed while
//! the shares stay the same: the deadline is the last place at which the environment has less than one group too few,
//! and it may have a turn if it has not had more than its share. This is the order of R. Tijdeman, "The chairman assignment
//! problem" (1980).

use std::collections::BTreeMap;

use forebay_wire::BatchRules;
use serde::{Deserialize, Serialize};

use super::{BatchSize, Bounds, Candidate};

/// A whole group. Shares and what is carried are integers in billionths, so that nothing is lost by rounding, and so
/// that they are the same on every machine.
const WHOLE: i64 = 1_000_000_000;

/// What environments carry from batch to batch, by their labels. Groups without a label have an empty one.
pub type CarriedShares = BTreeMap<String, Carried>;

/// What an environment carries from batch to batch, in billionths of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// How much of its share it has not had; negative if it had more. It is always less than a group.
    credit: i64,
    /// How much of its minimum it has not had. It is always less than a group.
    owed: i64,
}

/// The ready groups of an environment.
#[derive(Clone, Debug)]
pub struct EnvironmentLine<'a> {
    /// The label; empty for groups without one.
    pub environment: &'a str,
    /// Its weight in what the minimums leave.
    pub weight: f64,
    /// The first of them, in the order of delivery.
    pub ready: Vec<Candidate<'a>>,
    /// Whether these are all of them, or as many as a batch can have.
    pub is_all: bool,
}

/// The selection from the lines of environments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turns {
    /// A batch takes the next group of these lines, in this order, and this is carried to the next batch.
    Batch(Vec<usize>, CarriedShares),
    /// More groups of this line must be known.
    More(usize),
    /// There is no batch of this size, or an environment has fewer groups than its minimum.
    Nothing,
}

/// The groups that each environment with a minimum has in the next batch at least.
#[must_use]
pub fn needed<'r>(rules: &'r BatchRules, carried: &CarriedShares) -> BTreeMap<&'r str, u64> {
    let owed = |environment: &str| carried.get(environment).map_or(0, |carried| carried.owed);
    let minimums = minimums(rules).into_iter();
    minimums.map(|(label, minimum)| (label, due(owed(label), minimum, rules.groups as usize) as u64)).collect()
}

/// The weight of an environment in what the minimums leave.
#[must_use]
pub fn weight(rules: &BatchRules, environment: &str) -> f64 {
    rules.environments.get(environment).map_or(1.0, |of| of.weight)
}

/// How many groups of each of these environments are read first, for a batch that takes up to `most`: its share, if all
/// of them have ready groups, and a few more.
#[must_use]
pub fn first_reads(rules: &BatchRules, most: u32, labels: &[String]) -> Vec<u32> {
    let of = |label: &String| rules.environments.get(label).map_or((1.0, 0.0), |of| (of.weight, of.min_share));
    let weights: f64 = labels.iter().map(|label| of(label).0).sum();
    let rest = 1.0 - rules.environments.values().map(|of| of.min_share).sum::<f64>();
    let share = |(weight, minimum): (f64, f64)| minimum + rest.max(0.0) * weight / weights;
    labels.iter().map(|label| ((f64::from(most) * share(of(label))) as u32).saturating_add(3).min(most)).collect()
}

/// How many groups of each environment a new batch takes. `lines` has the lines of all environments that have ready
/// groups or a minimum, in the order of their labels.
///
/// Environments that have no ready groups left get no turns, and the others share them, by weight. A batch by the rules
/// that is not `partial` waits for an environment that has fewer groups than its minimum when it is its turn.
#[must_use]
pub fn take_turns(
    rules: &BatchRules,
    size: &BatchSize,
    partial: bool,
    carried: &CarriedShares,
    lines: &[EnvironmentLine<'_>],
) -> Turns {
    let bounds = Bounds::of(rules, size);
    let guaranteed = (*size == BatchSize::Rules && !partial).then_some(bounds.groups);
    let mut shares = Shares::new(rules, carried, lines);
    let mut order = Vec::new();
    let (mut tokens, mut rollouts, mut is_full) = (0_u64, 0_u64, false);
    while !is_full {
        shares.begin_place();
        let line = loop {
            let Some(line) = shares.next() else { break None };
            if shares.has_ready(line) {
                break Some(line);
            }
            if !lines[line].is_all {
                return Turns::More(line);
            }
            if guaranteed.is_some_and(|groups| shares.lacks_minimum(line, groups)) {
                return Turns::Nothing;
            }
            shares.leave_out(line);
        };
        let Some(line) = line else {
            shares.undo_place();
            break;
        };
        let group = shares.group(line);
        tokens = tokens.saturating_add(group.tokens);
        rollouts = rollouts.saturating_add(group.rollouts);
        let is_too_much = tokens > bounds.tokens_max || rollouts > bounds.rollouts_max;
        if is_too_much && !order.is_empty() {
            shares.undo_place();
            is_full = true;
            break;
        }
        shares.take(line);
        order.push(line);
        is_full = is_too_much || order.len() == bounds.groups || rollouts >= bounds.rollouts_min;
    }
    let ready_suffice = partial || matches!(size, BatchSize::Groups { .. });
    if order.is_empty() || !(is_full || ready_suffice) {
        return Turns::Nothing;
    }
    let carried = shares.carried(rules, carried, order.len());
    Turns::Batch(order, carried)
}

/// The minimums of the environments that have one, in billionths of each place.
fn minimums(rules: &BatchRules) -> BTreeMap<&str, i64> {
    let mut left = WHOLE;
    let mut found = BTreeMap::new();
    for (label, of) in &rules.environments {
        let minimum = ((of.min_share * WHOLE as f64).round() as i64).clamp(0, left);
        left -= minimum;
        if minimum > 0 {
            found.insert(label.as_str(), minimum);
        }
    }
    found
}

/// The whole groups of what is owed after this many places.
fn due(owed: i64, minimum: i64, places: usize) -> i64 {
    (owed + minimum * places as i64) / WHOLE
}

/// The state of all environments between two places of a batch.
struct Shares<'l> {
    of: Vec<Share<'l>>,
}

struct Share<'l> {
    line: &'l EnvironmentLine<'l>,
    minimum: i64,
    weight: f64,
    /// Its part of each place.
    part: i64,
    /// What it got of the current place.
    added: i64,
    credit: i64,
    owed: i64,
    taken: usize,
    is_left_out: bool,
}

impl<'l> Shares<'l> {
    fn new(rules: &BatchRules, carried: &CarriedShares, lines: &'l [EnvironmentLine<'l>]) -> Self {
        let minimums = minimums(rules);
        let of = lines.iter().map(|line| {
            let before = carried.get(line.environment).copied().unwrap_or_default();
            Share {
                line,
                minimum: minimums.get(line.environment).copied().unwrap_or(0),
                weight: line.weight,
                part: 0,
                added: 0,
                credit: before.credit,
                owed: before.owed,
                taken: 0,
                is_left_out: false,
            }
        });
        let mut shares = Self { of: of.collect() };
        shares.divide();
        shares
    }

    /// Divides a place among the environments: their minimums, and the rest by weight among those with ready groups.
    fn divide(&mut self) {
        let takes_part = |share: &&mut Share<'_>| !share.is_left_out && !share.line.ready.is_empty();
        let minimums: i64 = self.of.iter().filter(|share| !share.is_left_out).map(|share| share.minimum).sum();
        let rest = (WHOLE - minimums) as f64;
        let weights: f64 = self.of.iter_mut().filter(takes_part).map(|share| share.weight).sum();
        for share in &mut self.of {
            share.part = if share.is_left_out { 0 } else { share.minimum };
        }
        // The parts are differences of rounded sums, so that they add up to the rest.
        let (mut sum, mut given) = (0.0, 0);
        for share in self.of.iter_mut().filter(takes_part) {
            sum += share.weight;
            let up_to_here = (rest * (sum / weights)).round() as i64;
            share.part += up_to_here - given;
            given = up_to_here;
        }
    }

    fn begin_place(&mut self) {
        for share in &mut self.of {
            share.added = share.part;
            share.credit += share.added;
        }
    }

    /// Nobody takes the place.
    fn undo_place(&mut self) {
        for share in &mut self.of {
            share.credit -= share.added;
        }
    }

    /// Whose turn it is: the first deadline, among those that have not had more than their share.
    fn next(&self) -> Option<usize> {
        let takes_part = self.of.iter().enumerate().filter(|(_, share)| share.part > 0);
        let urgency = |share: &Share<'_>| {
            let places = (WHOLE - share.credit).max(0);
            (share.credit <= 0, (places + share.part - 1) / share.part)
        };
        takes_part.min_by_key(|(_, share)| urgency(share)).map(|(line, _)| line)
    }

    fn has_ready(&self, line: usize) -> bool {
        self.of[line].taken < self.of[line].line.ready.len()
    }

    fn lacks_minimum(&self, line: usize, places: usize) -> bool {
        let share = &self.of[line];
        due(share.owed, share.minimum, places) > share.taken as i64
    }

    /// The environment gets no more turns in this batch.
    fn leave_out(&mut self, line: usize) {
        self.of[line].is_left_out = true;
        self.divide();
    }

    fn group(&self, line: usize) -> Candidate<'l> {
        self.of[line].line.ready[self.of[line].taken]
    }

    fn take(&mut self, line: usize) {
        self.of[line].credit -= WHOLE;
        self.of[line].taken += 1;
    }

    /// What is carried to the next batch. Environments without ready groups and without rules are forgotten.
    fn carried(&self, rules: &BatchRules, before: &CarriedShares, places: usize) -> CarriedShares {
        let named = before.iter().filter(|(label, _)| rules.environments.contains_key(*label));
        let mut carried: CarriedShares = named.map(|(label, carried)| (label.clone(), *carried)).collect();
        for share in &self.of {
            let owed = share.owed + share.minimum * places as i64 - share.taken as i64 * WHOLE;
            let after = Carried { credit: share.credit.clamp(1 - WHOLE, WHOLE - 1), owed: owed.clamp(0, WHOLE - 1) };
            carried.insert(share.line.environment.to_owned(), after);
        }
        carried.retain(|_, carried| *carried != Carried::default());
        carried
    }
}

#[cfg(test)]
mod tests {
    use forebay_wire::EnvironmentRules;
    use proptest::prelude::*;

    use super::*;

    fn rules(groups: u32, environments: &[(&str, f64, f64)]) -> BatchRules {
        let of = |(label, weight, min_share): &(&str, f64, f64)| {
            ((*label).to_owned(), EnvironmentRules { weight: *weight, min_share: *min_share })
        };
        BatchRules { groups, environments: environments.iter().map(of).collect(), ..BatchRules::default() }
    }

    const GROUP: Candidate<'static> = Candidate { environment: None, rollouts: 2, samples: 2, tokens: 10 };

    fn lines<'a>(rules: &BatchRules, ready: &[(&'a str, usize)]) -> Vec<EnvironmentLine<'a>> {
        let of = |(environment, groups): &(&'a str, usize)| EnvironmentLine {
            environment,
            weight: weight(rules, environment),
            ready: vec![GROUP; *groups],
            is_all: true,
        };
        ready.iter().map(of).collect()
    }

    /// How many groups of each line a batch has.
    fn counts(turns: Turns, lines: usize) -> Option<(Vec<usize>, CarriedShares)> {
        let Turns::Batch(order, carried) = turns else { return None };
        let of = |line: usize| order.iter().filter(|turn| **turn == line).count();
        Some(((0..lines).map(of).collect(), carried))
    }

    /// The groups of each line in batches that are cut one after the other.
    fn batches(rules: &BatchRules, runs: &[&[(&str, usize)]]) -> Vec<Option<Vec<usize>>> {
        let mut carried = CarriedShares::new();
        let batch = |ready: &&[(&str, usize)]| {
            let turns = take_turns(rules, &BatchSize::Rules, false, &carried, &lines(rules, ready));
            let (counts, next) = counts(turns, ready.len())?;
            carried = next;
            Some(counts)
        };
        runs.iter().map(batch).collect()
    }

    #[test]
    fn shares_that_are_no_whole_number_of_groups_are_carried_over() {
        let ten = rules(10, &[("math", 3.0, 0.0), ("swe", 1.0, 0.0)]);
        let both: &[(&str, usize)] = &[("math", 100), ("swe", 100)];
        let quarter: Vec<_> = [[8, 2], [7, 3], [8, 2], [7, 3]].map(|counts| Some(counts.to_vec())).to_vec();
        assert_eq!(batches(&ten, &[both; 4]), quarter);
    }

    #[test]
    fn weights_divide_what_the_minimums_leave() {
        // swe: 0.25 + 0.75 / 2.
        let rules = rules(16, &[("swe", 1.0, 0.25)]);
        let two: &[(&str, usize)] = &[("math", 100), ("swe", 100)];
        assert_eq!(batches(&rules, &[two; 2]), vec![Some(vec![6, 10]); 2]);
        // Of three environments, the two without an entry have weight 1: 0.25 + 0.75 / 3.
        let three: &[(&str, usize)] = &[("", 100), ("math", 100), ("swe", 100)];
        assert_eq!(batches(&rules, &[three]), vec![Some(vec![4, 4, 8])]);
    }

    #[test]
    fn a_batch_waits_for_a_minimum_and_for_nothing_else() {
        let rules = rules(8, &[("swe", 1.0, 0.25)]);
        assert_eq!(batches(&rules, &[&[("math", 100), ("swe", 1)]]), vec![None]);
        assert_eq!(batches(&rules, &[&[("math", 100), ("swe", 2)]]), vec![Some(vec![6, 2])], "2 of its share of 5");
        assert_eq!(batches(&rules, &[&[("math", 0), ("swe", 8)]]), vec![Some(vec![0, 8])]);
        assert_eq!(batches(&rules, &[&[("math", 4), ("swe", 3)]]), vec![None], "7 of 8");
    }

    #[test]
    fn a_minimum_that_is_no_whole_number_is_owed() {
        let rules = rules(10, &[("swe", 1e-6, 0.25)]);
        let poor = |groups| [("math", 100), ("swe", groups)];
        assert_eq!(batches(&rules, &[&poor(2)[..], &poor(2)]), vec![Some(vec![8, 2]), None]);
        assert_eq!(batches(&rules, &[&poor(2)[..], &poor(3)]), vec![Some(vec![8, 2]), Some(vec![7, 3])]);
    }

    #[test]
    fn a_partial_batch_takes_what_is_there() {
        let rules = rules(8, &[("swe", 1.0, 0.5)]);
        let partial = |ready: &[(&'static str, usize)]| {
            let turns = take_turns(&rules, &BatchSize::Rules, true, &CarriedShares::new(), &lines(&rules, ready));
            counts(turns, ready.len()).map(|(counts, _)| counts)
        };
        assert_eq!(partial(&[("math", 100), ("swe", 0)]), Some(vec![8, 0]));
        assert_eq!(partial(&[("math", 2), ("swe", 1)]), Some(vec![2, 1]));
        assert_eq!(partial(&[("math", 0), ("swe", 0)]), None);
    }

    #[test]
    fn groups_that_are_not_known_are_asked_for_only_if_they_are_needed() {
        let rules = rules(4, &[("swe", 1.0, 0.0)]);
        let mut both = lines(&rules, &[("math", 2), ("swe", 3)]);
        both[0].is_all = false;
        let turns = |lines: &[_]| take_turns(&rules, &BatchSize::Rules, false, &CarriedShares::new(), lines);
        assert!(matches!(turns(&both), Turns::Batch(..)), "two of each");
        both[0].ready.pop();
        assert_eq!(turns(&both), Turns::More(0));
    }

    #[test]
    fn max_tokens_ends_a_batch_before_the_group_whose_turn_it_is() {
        let rules = BatchRules { max_tokens: Some(35), ..rules(8, &[("math", 1.0, 0.0)]) };
        let both: &[(&str, usize)] = &[("math", 100), ("swe", 100)];
        let found = batches(&rules, &[both; 4]);
        assert_eq!(found, [[2, 1], [1, 2], [2, 1], [1, 2]].map(|counts| Some(counts.to_vec())), "3 groups each");
    }

    #[test]
    fn other_sizes_take_turns_too() {
        let rules = rules(1, &[("swe", 1.0, 0.5)]);
        let take = |size: BatchSize, ready: &[(&'static str, usize)]| {
            let turns = take_turns(&rules, &size, false, &CarriedShares::new(), &lines(&rules, ready));
            counts(turns, ready.len()).map(|(counts, _)| counts)
        };
        let both = [("math", 100), ("swe", 100)];
        assert_eq!(take(BatchSize::Groups { at_most: 8 }, &both), Some(vec![2, 6]));
        assert_eq!(take(BatchSize::Groups { at_most: 8 }, &[("math", 3), ("swe", 0)]), Some(vec![3, 0]));
        assert_eq!(take(BatchSize::Rollouts { at_least: 15, at_most: 16 }, &both), Some(vec![2, 6]));
    }

    const LABELS: [&str; 5] = ["", "a", "b", "c", "d"];

    proptest! {
        /// `parts` are the shares, as the documentation defines them.
        #[test]
        fn over_any_run_of_batches_the_groups_are_within_one_of_the_share(
            weights in prop::collection::vec(0.01_f64..10.0, 4),
            minimums in prop::collection::vec(prop_oneof![Just(0.0), 0.0_f64..0.25], 4),
            groups in 1_u32..30,
            runs in 1_usize..40,
        ) {
            let environments: Vec<_> =
                (0..4).map(|at| (LABELS[at + 1], weights[at], minimums[at])).collect();
            let rules = rules(groups, &environments);
            let ready: Vec<_> = LABELS.iter().map(|label| (*label, groups as usize)).collect();
            let rest = 1.0 - minimums.iter().sum::<f64>();
            let sum = 1.0 + weights.iter().sum::<f64>();
            let share = |at: usize| if at == 0 { rest / sum } else { minimums[at - 1] + rest * weights[at - 1] / sum };
            let mut totals = [0_usize; 5];
            for (run, batch) in batches(&rules, &vec![ready.as_slice(); runs]).into_iter().enumerate() {
                let batch = batch.expect("all groups are there");
                prop_assert_eq!(batch.iter().sum::<usize>(), groups as usize);
                for at in 0..5 {
                    totals[at] += batch[at];
                    let exact = share(at) * (run + 1) as f64 * f64::from(groups);
                    prop_assert!((totals[at] as f64 - exact).abs() < 1.0 + 1e-4, "{} of {exact}", totals[at]);
                }
            }
        }

        #[test]
        fn minimums_hold_and_no_place_is_lost_however_the_groups_arrive(
            minimums in prop::collection::vec(prop_oneof![Just(0.0), 0.0_f64..0.25], 4),
            groups in 1_u32..12,
            ready in prop::collection::vec(prop::collection::vec(0_usize..12, 5), 1..30),
        ) {
            let environments: Vec<_> = (0..4).map(|at| (LABELS[at + 1], 1.0, minimums[at])).collect();
            let rules = rules(groups, &environments);
            let mut carried = CarriedShares::new();
            for there in ready {
                let ready: Vec<_> = LABELS.iter().copied().zip(there.iter().copied()).collect();
                let needed = needed(&rules, &carried);
                let turns = take_turns(&rules, &BatchSize::Rules, false, &carried, &lines(&rules, &ready));
                let lacks = |at: usize| needed.get(LABELS[at]).is_some_and(|needed| *needed > there[at] as u64);
                let can_be_full = there.iter().sum::<usize>() >= groups as usize;
                let Some((counts, next)) = counts(turns, 5) else {
                    prop_assert!(!can_be_full || (0..5).any(lacks), "a batch was possible");
                    continue;
                };
                prop_assert!(can_be_full);
                prop_assert_eq!(counts.iter().sum::<usize>(), groups as usize);
                for (at, count) in counts.iter().enumerate() {
                    prop_assert!(*count <= there[at]);
                }
                for carried in next.values() {
                    prop_assert!(carried.credit.abs() < WHOLE && (0..WHOLE).contains(&carried.owed));
                }
                carried = next;
            }
        }
    }
}
