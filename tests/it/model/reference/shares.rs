//! Batches in which environments have shares.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Reference, VOTING};
use crate::model::view::{Label, PolicyNumber, Rules, label};

/// A whole group, in billionths.
const WHOLE: i64 = 1_000_000_000;

/// What an environment has not had, of its share and of its minimum.
pub(super) type Carried = BTreeMap<Label, (i64, i64)>;

impl Reference {
    /// The groups of a new batch: each place goes to one environment, and the others carry their parts of it on.
    pub(super) fn take_turns(&mut self, policy: PolicyNumber, partial: bool) -> Option<Vec<usize>> {
        let (rules, carried) = (self.policies[policy].rules.clone(), self.policies[policy].carried.clone());
        let mut lines: BTreeMap<Label, VecDeque<usize>> =
            rules.environments.keys().map(|label| (*label, VecDeque::new())).collect();
        for group in self.ready(policy) {
            lines.entry(label(self.groups[&group].name)).or_default().push_back(group);
        }
        let with_groups: BTreeSet<Label> =
            lines.iter().filter(|(_, line)| !line.is_empty()).map(|(label, _)| *label).collect();
        let before = |label: &Label| carried.get(label).copied().unwrap_or_default();
        let mut credits: BTreeMap<Label, i64> = lines.keys().map(|label| (*label, before(label).0)).collect();
        let mut counts: BTreeMap<Label, i64> = BTreeMap::new();
        let mut left_out = BTreeSet::new();
        let (mut groups, mut tokens, mut full): (Vec<usize>, u64, bool) = (Vec::new(), 0, false);
        while !full && groups.len() < rules.batch_groups {
            let gained = parts(&rules, &with_groups, &left_out);
            for (label, part) in &gained {
                *credits.get_mut(label).expect("it has a line") += part;
            }
            let turn = loop {
                let parts = parts(&rules, &with_groups, &left_out);
                let last_place = |label: Label| ((WHOLE - credits[&label]).max(0) + parts[&label] - 1) / parts[&label];
                let able = parts.keys().copied().filter(|label| parts[label] > 0);
                let next = able.min_by_key(|label| (credits[label] <= 0, last_place(*label), *label));
                let Some(next) = next else { break None };
                if !lines[&next].is_empty() {
                    break Some(next);
                }
                let due = (before(&next).1 + minimum(&rules, next) * rules.batch_groups as i64) / WHOLE;
                if !partial && due > counts.get(&next).copied().unwrap_or(0) {
                    return None;
                }
                left_out.insert(next);
            };
            let group = turn.and_then(|turn| lines[&turn].front().copied());
            let more: u64 = group.map_or(0, |group| self.members(group, &VOTING).map(|one| one.body.tokens()).sum());
            let too_much = rules.max_tokens.is_some_and(|most| tokens + more > most);
            let (Some(turn), Some(group)) = (turn, group.filter(|_| !too_much || groups.is_empty())) else {
                full = too_much;
                for (label, part) in &gained {
                    *credits.get_mut(label).expect("it has a line") -= part;
                }
                break;
            };
            lines.get_mut(&turn).expect("it has groups").pop_front();
            *credits.get_mut(&turn).expect("it has a line") -= WHOLE;
            *counts.entry(turn).or_default() += 1;
            groups.push(group);
            tokens += more;
            full = too_much || groups.len() == rules.batch_groups;
        }
        if groups.is_empty() || !(full || partial) {
            return None;
        }
        let places = groups.len() as i64;
        let after = lines.keys().map(|label| {
            let had = counts.get(label).copied().unwrap_or(0);
            let owed = before(label).1 + minimum(&rules, *label) * places - had * WHOLE;
            (*label, (credits[label].clamp(1 - WHOLE, WHOLE - 1), owed.clamp(0, WHOLE - 1)))
        });
        self.policies[policy].carried = after.collect();
        Some(groups)
    }
}

fn minimum(rules: &Rules, label: Label) -> i64 {
    rules.environments.get(&label).map_or(0, |(_, percent)| *percent * WHOLE / 100)
}

/// The groups that an environment has in the next batch at least.
pub(super) fn needed(rules: &Rules, carried: &Carried, label: Label) -> usize {
    let owed = carried.get(&label).map_or(0, |(_, owed)| *owed);
    ((owed + minimum(rules, label) * rules.batch_groups as i64) / WHOLE) as usize
}

/// What each environment gets of a place: its minimum, and its part of the rest if it has groups.
fn parts(rules: &Rules, with_groups: &BTreeSet<Label>, left_out: &BTreeSet<Label>) -> BTreeMap<Label, i64> {
    let labels: BTreeSet<Label> = rules.environments.keys().chain(with_groups).copied().collect();
    let inside = |label: &&Label| !left_out.contains(*label);
    let weight = |label: &Label| rules.environments.get(label).map_or(1, |(weight, _)| *weight);
    let rest = WHOLE - labels.iter().filter(inside).map(|label| minimum(rules, *label)).sum::<i64>();
    let weights: i64 = with_groups.iter().filter(inside).map(weight).sum();
    let mut parts: BTreeMap<Label, i64> = labels.iter().map(|label| (*label, 0)).collect();
    for label in labels.iter().filter(inside) {
        *parts.get_mut(label).expect("it is there") += minimum(rules, *label);
    }
    let (mut sum, mut given) = (0, 0);
    for label in with_groups.iter().filter(inside) {
        sum += weight(label);
        let up_to_here = (2 * rest * sum + weights) / (2 * weights);
        *parts.get_mut(label).expect("it is there") += up_to_here - given;
        given = up_to_here;
    }
    parts
}
