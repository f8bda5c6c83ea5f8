//! What can be observed of the reference.

use std::collections::BTreeMap;

use forebay_wire::{BatchState, GroupState, RolloutState, Verdict};

use super::{Reference, Rollout, VOTING};
use crate::model::{
    operation::EXECUTIONS,
    view::{BatchNumber, BatchView, GroupView, Ledger, PolicyNumber, PolicyView, StoryView, millionths, name_of},
};

impl Reference {
    pub(crate) fn ledger(&self) -> Ledger {
        (0..self.policies.len()).map(|policy| self.policy_view(policy)).collect()
    }

    fn policy_view(&self, number: PolicyNumber) -> PolicyView {
        let policy = &self.policies[number];
        let groups = self.groups.iter().filter(|(_, group)| group.policy == number);
        let batches = self.batches.iter().filter(|(_, batch)| batch.policy == number);
        PolicyView {
            run: policy.run,
            epoch: policy.epoch,
            version: policy.version,
            version_step: policy.version_step,
            version_uri: policy.version_uri,
            checkpoint_step: policy.checkpoint_step,
            tallies: self.tallies(number),
            executions: (0..EXECUTIONS).map(|execution| self.of_execution(number, execution)).collect(),
            stories: self.rollouts.values().filter(|story| story.policy == number).map(|r| self.story(r)).collect(),
            groups: groups.map(|(key, group)| ((group.run, group.name), self.group_view(*key))).collect(),
            batches: batches.map(|(key, _)| self.batch_view(*key)).collect(),
            sessions: self.session_views(number),
        }
    }

    fn of_execution(&self, policy: PolicyNumber, execution: usize) -> Vec<(i64, usize)> {
        let of_policy = self.rollouts.values().filter(|rollout| rollout.policy == policy);
        let of_both = of_policy.filter(|rollout| rollout.body.execution == Some(execution));
        of_both.map(|rollout| (rollout.run, rollout.name)).collect()
    }

    fn tallies(&self, number: PolicyNumber) -> BTreeMap<String, i64> {
        let policy = &self.policies[number];
        let mut tallies = BTreeMap::new();
        let mut add = |name: String, count: i64| *tallies.entry(name).or_insert(0) += count;
        add("received".to_owned(), policy.received);
        add("rollout.forgotten".to_owned(), policy.forgotten);
        for (rule, count) in &policy.dropped {
            add(format!("dropped.{rule}"), *count);
        }
        for rollout in self.rollouts.values().filter(|rollout| rollout.policy == number) {
            add(format!("rollout.{}", name_of(&self.rollout_state(rollout))), 1);
        }
        for group in self.groups.values().filter(|group| group.policy == number) {
            add(format!("group.{}", name_of(&group.state)), 1);
        }
        for batch in self.batches.values().filter(|batch| batch.policy == number) {
            add(format!("batch.{}", name_of(&batch.state)), 1);
        }
        for session in self.sessions.values().filter(|session| session.has(number)) {
            add(format!("session.{}", name_of(&session.state)), 1);
        }
        add("reserved".to_owned(), self.reserved(number) as i64);
        tallies.retain(|_, count| *count != 0);
        tallies
    }

    pub(crate) fn rollout_state(&self, rollout: &Rollout) -> RolloutState {
        match rollout.verdict {
            Verdict::Dropped => RolloutState::Dropped,
            Verdict::Late => RolloutState::Late,
            Verdict::Kept if rollout.unscored_at.is_some() => RolloutState::Scoring,
            Verdict::Kept | Verdict::Masked => self.group_state(rollout.group),
        }
    }

    /// State of the kept and masked rollouts of a group.
    pub(crate) fn group_state(&self, group: usize) -> RolloutState {
        let group = &self.groups[&group];
        match group.state {
            GroupState::Open => RolloutState::Open,
            GroupState::Ready => RolloutState::Ready,
            GroupState::Stale => RolloutState::Stale,
            GroupState::Discarded => RolloutState::Discarded,
            GroupState::Quarantined => RolloutState::Quarantined,
            GroupState::Batched => match self.batches[&group.batch.expect("a batched group has a batch")].state {
                BatchState::Leased => RolloutState::Leased,
                BatchState::Returned => RolloutState::Returned,
                BatchState::Trained => RolloutState::Trained,
                BatchState::Checkpointed => RolloutState::Checkpointed,
                BatchState::Quarantined => RolloutState::Quarantined,
                BatchState::Split | BatchState::Discarded => unreachable!("such a batch holds no groups"),
            },
        }
    }

    fn story(&self, rollout: &Rollout) -> StoryView {
        let group = &self.groups[&rollout.group];
        let delivered = VOTING.contains(&rollout.verdict);
        let batch = group.batch.filter(|_| delivered && group.state == GroupState::Batched);
        let batch = batch.map(|number| &self.batches[&number]);
        let carried = self.batches.iter().filter(|(_, batch)| delivered && batch.carried.contains(&rollout.group));
        StoryView {
            run: rollout.run,
            rollout: rollout.name,
            execution: rollout.body.execution,
            group: group.name,
            verdict: rollout.verdict,
            reason: rollout.reason.clone(),
            state: self.rollout_state(rollout),
            group_reason: group.reason.clone(),
            batches: carried.map(|(number, _)| *number).collect(),
            // A returned batch keeps its step, which determines its order of delivery.
            step: batch.filter(|batch| batch.acked_at.is_some()).and_then(|batch| batch.step),
            advantage: rollout.advantage.map(millionths),
            policy_version: rollout.version,
            version_assumed: rollout.version_assumed,
            segments: rollout.body.segments.len(),
            tokens: rollout.body.tokens(),
            received_at: rollout.received_at,
            decided_at: group.decided_at,
            batched_at: batch.map(|batch| batch.created_at),
            acked_at: batch.and_then(|batch| batch.acked_at),
            purged_at: group.purged_at,
        }
    }

    pub(super) fn group_view(&self, number: usize) -> GroupView {
        let group = &self.groups[&number];
        GroupView {
            run: group.run,
            name: group.name,
            state: group.state,
            reason: group.reason.clone(),
            size: group.size,
            min_size: group.rules.min_size.min(group.size),
            kept: self.count(number, Verdict::Kept),
            masked: self.count(number, Verdict::Masked),
            dropped: self.count(number, Verdict::Dropped),
            scoring: self.members(number, &VOTING).filter(|rollout| rollout.unscored_at.is_some()).count() as u32,
            late: self.count(number, Verdict::Late),
            batch: group.batch.filter(|batch| self.batches.contains_key(batch)),
            opened_at: group.opened_at,
            deadline_at: group.deadline_at,
            decided_at: group.decided_at,
        }
    }

    pub(super) fn batch_view(&self, number: BatchNumber) -> BatchView {
        let batch = &self.batches[&number];
        BatchView {
            batch: number,
            policy: batch.policy,
            state: batch.state,
            reason: batch.reason.clone(),
            consumer: batch.consumer,
            epoch: batch.epoch,
            expires_at: batch.expires_at,
            attempt: batch.attempt,
            step: batch.step,
            groups: batch.cut.groups,
            rollouts: batch.cut.rollouts,
            samples: batch.cut.samples,
            tokens: batch.cut.tokens,
            version_current: batch.cut.version_current,
            trained_versions: batch.cut.trained_versions,
            created_at: batch.created_at,
        }
    }
}
