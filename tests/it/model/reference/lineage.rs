//! Lineage: versions, checkpoints, resume and reset.

use forebay_wire::{BatchState, GroupState};

use super::{Outcome, Reference};
use crate::model::view::{Answer, BatchNumber, PolicyNumber, Refused};

/// Reason of a batch that no lineage can be trained on any more.
const LINEAGE_GAP: &str = "lineage-gap";

impl Reference {
    /// Greater than the current version, or an identical repeat of it.
    pub(super) fn publish(
        &mut self,
        number: PolicyNumber,
        version: i64,
        step: Option<i64>,
        uri: Option<usize>,
        epoch: Option<i64>,
    ) -> Outcome {
        self.check_epoch(number, epoch)?;
        let policy = &mut self.policies[number];
        if version > policy.version {
            // A version published without a step counts as published at the last acked one.
            let step = step.or(policy.acked_step);
            policy.versions.insert(version, (step, uri));
            (policy.version, policy.version_step, policy.version_uri) = (version, step, uri);
            return Ok(Answer::Published { new: true });
        }
        // Not specified: whether a repeat without a step is identical. Here it is, because absent fields are not
        // compared.
        let same_step = step.is_none() || step == policy.version_step;
        if version == policy.version && uri == policy.version_uri && same_step {
            Ok(Answer::Published { new: false })
        } else {
            Err(Refused::VersionConflict(policy.version))
        }
    }

    /// Settles what was acked at or before the step.
    pub(super) fn checkpoint(&mut self, policy: PolicyNumber, step: i64, force: bool, epoch: Option<i64>) -> Outcome {
        self.check_epoch(policy, epoch)?;
        self.check_known(policy, Some(step), force)?;
        let batches = self.settle(policy, step);
        let last = self.policies[policy].checkpoint_step.map_or(step, |last| last.max(step));
        self.policies[policy].checkpoint_step = Some(last);
        Ok(Answer::Settled { last, batches })
    }

    /// If the policy has acked, a step above the last acked one needs `force`.
    ///
    /// Not specified: the last acked step after a forced checkpoint above it, and after a resume without a step. Here
    /// the forced step counts, so that its trainer can resume from it, and after a resume without a step every step is
    /// above.
    fn check_known(&self, policy: PolicyNumber, step: Option<i64>, force: bool) -> Result<(), Refused> {
        let policy = &self.policies[policy];
        let last = policy.acked_step.max(policy.checkpoint_step);
        if policy.has_acked && !force && step > last { Err(Refused::StepUnknown { last }) } else { Ok(()) }
    }

    /// Whether a step is refused unless forced.
    pub(crate) fn is_unknown(&self, policy: PolicyNumber, step: Option<i64>) -> bool {
        self.check_known(policy, step, false).is_err()
    }

    /// Whether a forced resume of the run has given up a batch.
    pub(crate) fn gave_up(&self, policy: PolicyNumber) -> bool {
        let mut discarded = self.in_state(policy, BatchState::Discarded);
        discarded.any(|number| self.batches[&number].reason.as_deref() == Some(LINEAGE_GAP))
    }

    fn settle(&mut self, policy: PolicyNumber, step: i64) -> u64 {
        let rules = self.policies[policy].rules.clone();
        let acked = self.acked_in(policy, BatchState::Trained, |acked| acked <= step);
        for &number in &acked {
            self.batch_mut(number).state = BatchState::Checkpointed;
            self.schedule_purge(number, Some(self.now + rules.settled_s));
            // If the payloads were purged earlier, the tombstone was kept for this.
            self.let_tombstones_go(number, self.now + rules.tombstone_s);
        }
        acked.len() as u64
    }

    /// Batches of the run in a state with one of these steps.
    fn acked_in(&self, policy: PolicyNumber, state: BatchState, of: impl Fn(i64) -> bool) -> Vec<BatchNumber> {
        self.in_state(policy, state).filter(|number| self.batches[number].step.is_some_and(&of)).collect()
    }

    /// A trainer starts from its checkpoint of a step, or without a checkpoint.
    pub(super) fn resume(
        &mut self,
        policy: PolicyNumber,
        step: Option<i64>,
        force: bool,
        epoch: Option<i64>,
    ) -> Outcome {
        self.check_epoch(policy, epoch)?;
        self.check_known(policy, step, force)?;
        let by_ack = self.policies[policy].rules.settled_by_ack;
        let skips = step < self.policies[policy].checkpoint_step;
        if skips && !by_ack && !force {
            return Err(Refused::LineageGap);
        }
        let later = |acked: i64| step.is_none_or(|step| acked > step);
        let mut after = self.acked_in(policy, BatchState::Trained, later);
        if force && !by_ack {
            after.extend(self.acked_in(policy, BatchState::Checkpointed, later));
        }
        let purged = |number: &BatchNumber| {
            let held = self.held_by(*number);
            held.len() < self.batches[number].cut.groups
                || held.iter().any(|group| self.groups[group].purged_at.is_some())
        };
        let (gone, deliverable): (Vec<BatchNumber>, Vec<BatchNumber>) = after.into_iter().partition(purged);
        if !gone.is_empty() && !force {
            return Err(Refused::LineageGap);
        }
        // A lease is lost when it expires, even before the sweep: a lease that expired earlier has failed and is not
        // revoked.
        self.expire_leases(policy);
        if let Some(step) = step {
            self.settle(policy, step);
        }
        let revoked: Vec<BatchNumber> = self.in_state(policy, BatchState::Leased).collect();
        let (mut returned, mut quarantined) = (deliverable.len() as u64, 0);
        for number in revoked {
            let count = if self.revoke(number) { &mut returned } else { &mut quarantined };
            *count += 1;
        }
        for number in deliverable {
            self.bring_back(number);
        }
        let undeliverable = gone.len() as u64;
        for number in gone {
            self.abandon(number);
        }
        let version = self.rewind(policy, step);
        let policy = &mut self.policies[policy];
        policy.epoch += 1;
        (policy.acked_step, policy.checkpoint_step) = (step, step);
        Ok(Answer::Resumed { epoch: policy.epoch, version, returned, quarantined, undeliverable })
    }

    /// Discards what the abandoned lineage trained and what cannot be delivered again.
    ///
    /// Not specified: what happens to such a batch. Here it is discarded, so that no resume asks for it again and no
    /// checkpoint settles it. Settled batches stay settled.
    fn abandon(&mut self, number: BatchNumber) {
        if self.batches[&number].state != BatchState::Trained {
            return;
        }
        let policy = self.batches[&number].policy;
        let forget_at = self.now + self.policies[policy].rules.tombstone_s;
        for group in self.held_by(number) {
            let group = self.group_mut(group);
            (group.state, group.reason) = (GroupState::Discarded, Some(LINEAGE_GAP.to_owned()));
            group.forget_at = group.purged_at.map(|_| forget_at);
            *self.policies[policy].dropped.entry(LINEAGE_GAP.to_owned()).or_default() += 1;
        }
        let batch = self.batch_mut(number);
        (batch.state, batch.reason, batch.lease_over) = (BatchState::Discarded, Some(LINEAGE_GAP.to_owned()), true);
    }

    /// Returns to the newest version published with a step at or before this one; later versions are forgotten.
    ///
    /// Not specified: a version published before any ack has no step. Here it belongs to every lineage of the run.
    fn rewind(&mut self, policy: PolicyNumber, step: Option<i64>) -> i64 {
        let policy = &mut self.policies[policy];
        policy.versions.retain(|_, (published, _)| match (*published, step) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(published), Some(step)) => published <= step,
        });
        let newest = policy.versions.last_key_value().map(|(version, place)| (*version, *place));
        let (version, (step, uri)) = newest.unwrap_or((0, (None, None)));
        (policy.version, policy.version_step, policy.version_uri) = (version, step, uri);
        (policy.pause, policy.given_up) = (None, None);
        version
    }

    /// Starts a new run: live data is discarded, steps and versions start again, and the epoch continues to count.
    pub(super) fn reset(&mut self, number: PolicyNumber, epoch: Option<i64>) -> Outcome {
        self.check_epoch(number, epoch)?;
        let (run, dropped_s) = (self.policies[number].run, self.policies[number].rules.dropped_s);
        let live: Vec<usize> = self.groups.keys().copied().filter(|group| self.lives_in(*group, number, run)).collect();
        for &group in &live {
            self.discard_for(group, "reset", "reset");
            // Not specified: whether the retention of the group or of the policy applies. Here it is the policy's.
            let purge_at = Some(self.now + dropped_s);
            self.group_mut(group).purge_at = purge_at;
        }
        for state in [BatchState::Leased, BatchState::Returned, BatchState::Quarantined] {
            let batches: Vec<BatchNumber> = self.in_state(number, state).collect();
            for batch in batches {
                let batch = self.batch_mut(batch);
                (batch.state, batch.reason) = (BatchState::Discarded, Some("reset".to_owned()));
                (batch.lease_over, batch.expires_at) = (true, None);
            }
        }
        // No resume can ask for batches of the old run any more.
        let tombstone_s = self.policies[number].rules.tombstone_s;
        let trained: Vec<BatchNumber> = self.in_state(number, BatchState::Trained).collect();
        for batch in trained {
            self.let_tombstones_go(batch, self.now + tombstone_s);
        }
        self.give_back_all(number);
        let policy = &mut self.policies[number];
        policy.run += 1;
        policy.epoch += 1;
        (policy.version, policy.version_step, policy.version_uri) = (0, None, None);
        (policy.pause, policy.given_up) = (None, None);
        policy.versions.clear();
        (policy.acked_step, policy.checkpoint_step) = (None, None);
        policy.has_acked = false;
        policy.carried.clear();
        Ok(Answer::Reset { run: policy.run, epoch: policy.epoch, discarded: live.len() as u64 })
    }

    /// Whether a group is not yet trained and can still be trained.
    pub(crate) fn lives_in(&self, group: usize, policy: PolicyNumber, run: i64) -> bool {
        let group = &self.groups[&group];
        let lives = match group.state {
            GroupState::Open | GroupState::Ready | GroupState::Quarantined => true,
            GroupState::Stale | GroupState::Discarded => false,
            GroupState::Batched => {
                let batch = group.batch.expect("a batched group has a batch");
                !matches!(self.batches[&batch].state, BatchState::Trained | BatchState::Checkpointed)
            }
        };
        group.policy == policy && group.run == run && lives
    }
}
