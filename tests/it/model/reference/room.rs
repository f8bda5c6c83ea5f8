//! Room for a session that begins a group.

use std::collections::{BTreeMap, BTreeSet};

use forebay_wire::{GroupState, RolloutState, Verdict};

use super::{Policy, Reference, shares};
use crate::model::view::{GroupName, Label, PolicyNumber, Post, label};

/// The newest rollouts whose tokens tell how many rollouts a batch has.
const RECENT: usize = 256;

/// The label of groups whose sessions name no environment.
const NO_ENVIRONMENT: Label = 0;

/// A group that has begun: missing places, and rollouts that room is reserved for.
#[derive(Clone, Copy, Debug, Default)]
struct Begun {
    missing: usize,
    reserved: usize,
}

impl Reference {
    /// Whether a new group may begin: all of its places fit beside those that others may still take, or the next batch
    /// lacks its environment, or nothing else goes on.
    pub(super) fn has_room(&self, policy: PolicyNumber, group: GroupName, size: u32) -> bool {
        let rules = &self.policies[policy].rules;
        let begun = self.begun(policy);
        let uncovered: usize = begun.values().map(|one| one.missing.saturating_sub(one.reserved)).sum();
        let lacking = self.lacking(policy);
        let groups_of = |one: Label| begun.keys().filter(|name| label(**name) == one).count();
        let begins = |one: Label| lacking.get(&one).map_or(0, |lacking| lacking.saturating_sub(groups_of(one)));
        let own = label(group);
        if begins(own) > 0 {
            return true;
        }
        let kept: usize = lacking.keys().filter(|one| **one != own).map(|one| begins(*one)).sum();
        let kept = if label(group) == NO_ENVIRONMENT { 0 } else { kept * rules.size as usize };
        let started = self.backlog(policy) + self.reserved(policy);
        // Where rollouts are waited for, a batch takes its room until its version is published.
        let Policy { acked_step, version_step, .. } = &self.policies[policy];
        let due = usize::from(rules.wait_s.is_some() && acked_step > version_step);
        let batches = |versions: i64| (versions as usize + 1 - due).max(1);
        let fresh = rules.staleness.map(|versions| batches(versions) * self.rollouts_of_batch(policy));
        let most = [fresh, rules.backlog].into_iter().flatten().min().unwrap_or(usize::MAX);
        if most.saturating_sub(started).saturating_sub(uncovered) >= size as usize + kept {
            return true;
        }
        self.nothing_goes_on(policy, group) && rules.backlog.is_none_or(|backlog| started < 2 * backlog)
    }

    /// Rollouts of a batch, with the group that would exceed its tokens.
    fn rollouts_of_batch(&self, policy: PolicyNumber) -> usize {
        let rules = &self.policies[policy].rules;
        let all = rules.batch_groups * rules.size as usize;
        let newest = self.rollouts.values().rev().filter(|rollout| rollout.policy == policy).take(RECENT);
        let tokens: Vec<u64> = newest.filter(|one| takes_place(one.verdict)).map(|one| one.body.tokens()).collect();
        match rules.max_tokens {
            Some(bound) if !tokens.is_empty() => {
                let of_group = tokens.iter().sum::<u64>().max(1) * u64::from(rules.size);
                all.min(((bound * tokens.len() as u64 / of_group) as usize + 1) * rules.size as usize)
            }
            _ => all,
        }
    }

    /// Groups that are open or that have live sessions, and are not decided.
    fn begun(&self, policy: PolicyNumber) -> BTreeMap<GroupName, Begun> {
        let mut begun = BTreeMap::new();
        let run = self.policies[policy].run;
        for (number, group) in self.groups.iter().filter(|(_, group)| group.policy == policy && group.run == run) {
            if group.state == GroupState::Open {
                let arrived = self.rollouts.values().filter(|one| one.group == *number && takes_place(one.verdict));
                let missing = if self.filled(*number).is_some() { 0 } else { group.size as usize - arrived.count() };
                begun.insert(group.name, Begun { missing, reserved: 0 });
            }
        }
        for (name, size) in self.reserved_groups(policy) {
            let one = begun.entry(name).or_insert(Begun { missing: size as usize, reserved: 0 });
            one.reserved += 1;
        }
        begun
    }

    /// The undecided groups that room is reserved for, one entry per rollout.
    fn reserved_groups(&self, policy: PolicyNumber) -> Vec<(GroupName, u32)> {
        let mut found = Vec::new();
        for session in self.sessions.values() {
            let reserved = session.policies.iter().filter(|of| of.policy == policy && of.reserved_until.is_some());
            let group = self.group_named(policy, session.group()).map(|number| &self.groups[&number]);
            if group.is_none_or(|group| group.state == GroupState::Open) {
                found.extend(reserved.map(|of| (session.group(), of.group_size)));
            }
        }
        found
    }

    /// Groups of environments that the next batch lacks.
    fn lacking(&self, policy: PolicyNumber) -> BTreeMap<Label, usize> {
        let (rules, carried) = (&self.policies[policy].rules, &self.policies[policy].carried);
        let ready = self.ready(policy);
        let lacking = |one: &Label| {
            let of_label = |number: &&usize| label(self.groups[*number].name) == *one;
            (*one, shares::needed(rules, carried, *one).saturating_sub(ready.iter().filter(of_label).count()))
        };
        rules.environments.keys().map(lacking).filter(|(_, lacking)| *lacking > 0).collect()
    }

    /// Whether no batch can be formed, nobody is at work, and a group of this name would help.
    pub(super) fn nothing_goes_on(&self, policy: PolicyNumber, group: GroupName) -> bool {
        let lacking = self.lacking(policy);
        let may_lack = |name: GroupName| label(name) == NO_ENVIRONMENT || lacking.contains_key(&label(name));
        let helps = |(name, _): &(GroupName, u32)| self.lacks_any(policy) || may_lack(*name);
        let is_at_work = self.is_in_training(policy) || self.reserved_groups(policy).iter().any(helps);
        let lacks_own =
            if label(group) == NO_ENVIRONMENT { !lacking.is_empty() } else { lacking.contains_key(&label(group)) };
        !is_at_work && (self.lacks_any(policy) || lacks_own)
    }

    /// The policies whose training waits for a group that these posts open: their backlog may be twice as large.
    pub(super) fn lacked<'p>(&self, posts: impl IntoIterator<Item = &'p Post>) -> BTreeSet<PolicyNumber> {
        let waits = |post: &&Post| {
            let (policy, group) = (post.policy, post.group());
            let opens = self.rollout_named(policy, post.rollout).is_none() && self.group_named(policy, group).is_none();
            let lacks_own = self.lacking(policy).contains_key(&label(group));
            opens && (lacks_own || (!self.is_in_training(policy) && self.lacks_any(policy)))
        };
        posts.into_iter().filter(waits).map(|post| post.policy).collect()
    }

    fn is_in_training(&self, policy: PolicyNumber) -> bool {
        [RolloutState::Leased, RolloutState::Returned].iter().any(|state| self.in_ledger(policy, *state) > 0)
    }

    /// Whether the next batch lacks groups of any environment.
    fn lacks_any(&self, policy: PolicyNumber) -> bool {
        let is_ready = |group: &&super::Group| group.policy == policy && group.state == GroupState::Ready;
        let ready = self.groups.values().filter(is_ready).count();
        ready + self.lacking(policy).values().sum::<usize>() < self.policies[policy].rules.batch_groups
    }
}

fn takes_place(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Kept | Verdict::Masked)
}
