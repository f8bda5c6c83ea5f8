//! The effects of time: leases expire, groups time out, payloads are purged, tombstones are forgotten.

use forebay_wire::{BatchState, GroupState};

use super::{Reference, ingest::Cause};
use crate::model::view::BatchNumber;

impl Reference {
    pub(super) fn sweep(&mut self) {
        for policy in 0..self.policies.len() {
            self.expire_leases(policy);
        }
        self.expire_work();
        self.expire_sessions();
        self.drop_unscored();
        self.decide_overdue();
        for policy in 0..self.policies.len() {
            self.give_back_expired(policy);
        }
        self.purge();
        self.forget();
        self.forget_sessions();
        self.purge_sessions();
    }

    /// What a sweep at this time would do.
    pub(crate) fn due(&self) -> Vec<&'static str> {
        let now = self.now;
        let at_hand = |at: Option<i64>| at.is_some_and(|at| at <= now);
        let mut due: Vec<&'static str> = Vec::new();
        if self.batches.values().any(|batch| batch.state == BatchState::Leased && !self.is_live(batch)) {
            due.push("expired");
        }
        if self.groups.values().any(|group| at_hand(group.deadline_at)) {
            due.push("overdue");
        }
        if self.rollouts.values().any(|rollout| at_hand(rollout.unscored_at)) {
            due.push("unscored");
        }
        if self.groups.values().any(|group| at_hand(group.purge_at)) {
            due.push("purge");
        }
        if self.groups.values().any(|group| at_hand(group.forget_at)) {
            due.push("forget");
        }
        due.extend(self.due_sessions());
        if due.is_empty() {
            due.push("nothing");
        }
        due
    }

    /// In the order of their deadlines, then of their opening, which is the order in which they become ready.
    fn decide_overdue(&mut self) {
        let now = self.now;
        let deadline = |(number, group): (&usize, &super::Group)| {
            group.deadline_at.filter(|deadline| *deadline <= now).map(|deadline| (deadline, *number))
        };
        let mut overdue: Vec<(i64, usize)> = self.groups.iter().filter_map(deadline).collect();
        overdue.sort_unstable();
        for (_, group) in overdue {
            self.decide(group, Cause::TimedOut);
        }
    }

    fn purge(&mut self) {
        let due: Vec<usize> = self.groups.keys().copied().filter(|number| self.is_purgeable(*number)).collect();
        for number in due {
            let tombstone_s = self.groups[&number].rules.tombstone_s;
            // The tombstone of a batch stays until it is settled, because a resume below it must find the gap.
            let forget_at = (!self.is_unsettled(number)).then_some(self.now + tombstone_s);
            let now = self.now;
            let group = self.group_mut(number);
            (group.purge_at, group.purged_at, group.forget_at) = (None, Some(now), forget_at);
        }
    }

    fn is_purgeable(&self, group: usize) -> bool {
        self.groups[&group].purge_at.is_some_and(|at| at <= self.now)
    }

    fn is_unsettled(&self, group: usize) -> bool {
        let group = &self.groups[&group];
        let trained = |batch: BatchNumber| self.batches[&batch].state == BatchState::Trained;
        let current = group.run == self.policies[group.policy].run;
        current && group.state == GroupState::Batched && group.batch.is_some_and(trained)
    }

    fn forget(&mut self) {
        let now = self.now;
        let due = self.groups.iter().filter(|(_, group)| group.forget_at.is_some_and(|at| at <= now));
        let due: Vec<(usize, usize)> = due.map(|(number, group)| (*number, group.policy)).collect();
        for (number, policy) in due {
            let before = self.rollouts.len();
            self.rollouts.retain(|_, rollout| rollout.group != number);
            self.policies[policy].forgotten += (before - self.rollouts.len()) as i64;
            self.groups.remove(&number);
            for batch in self.batches.values_mut() {
                batch.carried.retain(|group| *group != number);
            }
        }
        // A batch is removed with the last of its groups.
        self.batches.retain(|_, batch| !batch.carried.is_empty());
    }

    /// Schedules or cancels the purge of a batch's payloads.
    pub(super) fn schedule_purge(&mut self, batch: BatchNumber, at: Option<i64>) {
        for group in self.held_by(batch) {
            let group = self.group_mut(group);
            if group.purged_at.is_none() {
                group.purge_at = at;
            }
        }
    }

    /// The tombstones of purged groups of this batch now depend only on time.
    pub(super) fn let_tombstones_go(&mut self, batch: BatchNumber, at: i64) {
        for group in self.held_by(batch) {
            let group = self.group_mut(group);
            if group.purged_at.is_some() {
                group.forget_at = group.forget_at.or(Some(at));
            }
        }
    }
}
