//! Batches and leases: what a claim returns, what the holder may do, and what happens when the lease ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use forebay_wire::{BatchOrder, BatchState, GroupState, LossWeighting, Verdict};

use super::{Batch, Cut, Outcome, Policy, Reference, Rollout, VOTING};
use crate::model::view::{
    Answer, BatchNumber, GroupName, Holder, LeaseNumber, NACK_REASON, PolicyNumber, Refused, Row, Segment, millionths,
};

/// Divisor of the `constant` loss weighting in all rules of the model.
pub(crate) const LOSS_CONSTANT: f64 = 10.0;

/// Reason of a batch that had too many failed deliveries.
const DELIVERIES_USED_UP: &str = "max-deliveries";

/// Reason of a batch whose leases were ended by resumes too often.
const RESUMES_USED_UP: &str = "max-resumes";

impl Reference {
    /// Returns the batch that the request holds, a returned batch, or a new one.
    pub(super) fn claim(
        &mut self,
        policy: PolicyNumber,
        consumer: usize,
        request: Option<usize>,
        partial: bool,
        epoch: Option<i64>,
    ) -> Outcome {
        self.check_epoch(policy, epoch)?;
        // A lease is lost when it expires, even before the sweep.
        self.expire_leases(policy);
        let expires_at = Some(self.now + self.policies[policy].rules.ttl_s);
        if let Some(batch) = self.held(policy, consumer, request) {
            self.batch_mut(batch).expires_at = expires_at;
            return Ok(self.leased(batch, true));
        }
        let returned = self.next_returned(policy);
        let Some(batch) = returned.or_else(|| self.cut(policy, consumer, partial)) else { return Ok(Answer::NoBatch) };
        let (lease, epoch) = (self.grants, self.policies[policy].epoch);
        self.grants += 1;
        let granted = self.batch_mut(batch);
        granted.state = BatchState::Leased;
        granted.reason = None;
        granted.leases.push(lease);
        granted.lease_over = false;
        (granted.consumer, granted.request, granted.epoch) = (consumer, request, epoch);
        granted.expires_at = expires_at;
        granted.attempt += 1;
        Ok(self.leased(batch, false))
    }

    fn leased(&self, batch: BatchNumber, held: bool) -> Answer {
        let lease = self.last_lease(batch).expect("it was leased just now");
        Answer::Leased { held, lease, batch: self.batch_view(batch), rows: self.rows(batch) }
    }

    pub(crate) fn last_lease(&self, batch: BatchNumber) -> Option<LeaseNumber> {
        self.batches[&batch].leases.last().copied()
    }

    pub(super) fn in_state(&self, policy: PolicyNumber, state: BatchState) -> impl Iterator<Item = BatchNumber> {
        let run = self.policies[policy].run;
        let found = move |batch: &Batch| batch.policy == policy && batch.run == run && batch.state == state;
        self.batches.iter().filter(move |(_, batch)| found(batch)).map(|(number, _)| *number)
    }

    /// The live lease of the same request. A request is identified within its policy and consumer.
    pub(crate) fn held(&self, policy: PolicyNumber, consumer: usize, request: Option<usize>) -> Option<BatchNumber> {
        request?;
        let same = |number: &BatchNumber| {
            let batch = &self.batches[number];
            batch.consumer == consumer && batch.request == request && self.is_live(batch)
        };
        self.in_state(policy, BatchState::Leased).find(same)
    }

    /// First in the order of the step at which they were last acked, then the others in the order of their cut.
    pub(crate) fn next_returned(&self, policy: PolicyNumber) -> Option<BatchNumber> {
        self.in_state(policy, BatchState::Returned).min_by_key(|number| {
            let step = self.batches[number].step;
            (step.is_none(), step, *number)
        })
    }

    /// Cuts a new batch, if there are enough groups.
    fn cut(&mut self, policy: PolicyNumber, consumer: usize, partial: bool) -> Option<BatchNumber> {
        // Not specified: whether anything else happens while a rollout is waited for. Here nothing does.
        let was_paused = self.policies[policy].pause.is_some();
        if was_paused && self.pauses(policy, consumer) {
            return None;
        }
        self.take_out_stale(policy);
        let rules = self.policies[policy].rules.clone();
        let carried = self.policies[policy].carried.clone();
        let groups = if rules.environments.is_empty() {
            self.first_groups(policy, partial)?
        } else {
            self.take_turns(policy, partial)?
        };
        if !was_paused && self.pauses(policy, consumer) {
            self.policies[policy].carried = carried;
            return None;
        }
        let failed_deliveries = groups.iter().map(|group| self.groups[group].failed_deliveries).max().unwrap_or(0);
        let number = self.cuts;
        self.cuts += 1;
        let batch = Batch {
            policy,
            run: self.policies[policy].run,
            state: BatchState::Returned,
            reason: None,
            leases: Vec::new(),
            lease_over: true,
            consumer: 0,
            request: None,
            epoch: 0,
            expires_at: None,
            // The delivery count of groups from a split batch continues.
            attempt: failed_deliveries,
            failed_deliveries,
            resumes: groups.iter().map(|group| self.groups[group].resumes).max().unwrap_or(0),
            step: None,
            acked_at: None,
            created_at: self.now,
            cut: self.measure(policy, &groups, rules.weighting),
            carried: groups.clone(),
        };
        self.batches.insert(number, batch);
        for group in groups {
            let group = self.group_mut(group);
            (group.state, group.batch, group.delivered) = (GroupState::Batched, Some(number), true);
        }
        Some(number)
    }

    /// Exactly `groups` groups in the order of the rules. Fewer if the next group would exceed `max_tokens`; a group
    /// that exceeds it alone is a batch of its own. `partial` takes the groups that are ready.
    fn first_groups(&self, policy: PolicyNumber, partial: bool) -> Option<Vec<usize>> {
        let rules = &self.policies[policy].rules;
        let mut groups: Vec<usize> = Vec::new();
        let mut tokens = 0;
        let mut full = false;
        for group in self.ready(policy) {
            let more: u64 = self.members(group, &VOTING).map(|rollout| rollout.body.tokens()).sum();
            let too_much = rules.max_tokens.is_some_and(|most| tokens + more > most);
            if too_much && !groups.is_empty() {
                full = true;
                break;
            }
            groups.push(group);
            tokens += more;
            full = too_much || groups.len() == rules.batch_groups;
            if full {
                break;
            }
        }
        ((full || partial) && !groups.is_empty()).then_some(groups)
    }

    /// Notes whether a new batch waits for a rollout that would be too old for the one after it.
    fn pauses(&mut self, policy: PolicyNumber, consumer: usize) -> bool {
        let Policy { ref rules, mut pause, mut given_up, .. } = self.policies[policy];
        let (wait_s, now) = (rules.wait_s.unwrap_or(0), self.now);
        let is_paused = loop {
            let Some((oldest, newest)) = self.waits_for(policy, consumer, given_up) else { break false };
            match pause {
                Some((_, of)) if of < oldest => pause = None,
                Some((since, of)) if since + wait_s <= now => (pause, given_up) = (None, given_up.max(Some(of))),
                Some(_) => break true,
                None => {
                    pause = Some((now, newest));
                    break true;
                }
            }
        };
        // Another consumer, who holds other batches, may still wait for what does not concern this one.
        if !is_paused && let Some((since, of)) = pause {
            let is_over = since + wait_s <= now;
            let is_waited_for =
                self.first_chance(policy, given_up).is_some_and(|oldest| self.has_live(policy, oldest..=of));
            if is_waited_for && is_over {
                given_up = given_up.max(Some(of));
            }
            pause = pause.filter(|_| is_waited_for && !is_over);
        }
        (self.policies[policy].pause, self.policies[policy].given_up) = (pause, given_up);
        is_paused
    }

    /// The oldest version for whose rollouts batches wait, if they wait for any.
    fn first_chance(&self, policy: PolicyNumber, given_up: Option<i64>) -> Option<i64> {
        let Policy { rules, version, .. } = &self.policies[policy];
        let bound = rules.staleness.filter(|_| rules.wait_s.is_some())?;
        Some((version - bound).max(0).max(given_up.map_or(0, |given_up| given_up + 1)))
    }

    /// The versions for whose rollouts a new batch waits, the oldest and the newest, if such rollouts are under way.
    pub(crate) fn waits_for(&self, policy: PolicyNumber, consumer: usize, given_up: Option<i64>) -> Option<(i64, i64)> {
        let Policy { rules, version, acked_step, version_step, .. } = &self.policies[policy];
        let oldest = self.first_chance(policy, given_up)?;
        // The versions of batches that the trainer holds, and of one that it has trained, come before that of a new one.
        let held = self.in_state(policy, BatchState::Leased).filter(|number| {
            let batch = &self.batches[number];
            batch.consumer == consumer && self.is_live(batch)
        });
        let ahead = held.count() as i64 + i64::from(acked_step > version_step);
        let newest = (version - rules.staleness? + ahead).min(*version);
        self.has_live(policy, oldest..=newest).then_some((oldest, newest))
    }

    /// Whether a rollout of one of these versions is under way: of a session whose agent is at work, or that lacks scores. It
    /// is as old as the oldest of its group.
    fn has_live(&self, policy: PolicyNumber, versions: RangeInclusive<i64>) -> bool {
        let run = self.policies[policy].run;
        let mut oldest: BTreeMap<GroupName, i64> = BTreeMap::new();
        let mut live = BTreeSet::new();
        let mut add = |group: GroupName, version: i64| {
            oldest.entry(group).and_modify(|found| *found = (*found).min(version)).or_insert(version);
        };
        for rollout in self.rollouts.values().filter(|one| one.policy == policy && one.run == run) {
            let name = self.groups[&rollout.group].name;
            if let Some((version, _)) = rollout.trained_versions.filter(|_| rollout.verdict == Verdict::Kept) {
                add(name, version);
            }
            live.extend(rollout.unscored_at.map(|_| name));
        }
        for session in self.sessions.values().filter(|session| session.has_agent(self.now)) {
            for of in session.policies.iter().filter(|of| of.policy == policy && of.run == run) {
                add(session.group(), session.oldest_version(of));
                live.insert(session.group());
            }
        }
        let is_open = |name: &GroupName| {
            self.group_named(policy, *name).is_none_or(|group| self.groups[&group].state == GroupState::Open)
        };
        live.iter().any(|name| is_open(name) && oldest.get(name).is_some_and(|version| versions.contains(version)))
    }

    /// Ready groups in the order in which they became ready, or those of the highest version first, or of the lowest one.
    pub(crate) fn ready(&self, policy: PolicyNumber) -> Vec<usize> {
        let run = self.policies[policy].run;
        let found = self
            .groups
            .iter()
            .filter(|(_, group)| group.policy == policy && group.run == run && group.state == GroupState::Ready);
        let mut ready: Vec<usize> = found.map(|(number, _)| *number).collect();
        ready.sort_by_key(|number| self.groups[number].place);
        if self.policies[policy].rules.order == BatchOrder::Freshest {
            // The sort is stable. A group that trains nothing counts as fresh.
            ready.sort_by_key(|number| std::cmp::Reverse(self.oldest_trained(*number).unwrap_or(i64::MAX)));
        }
        if self.policies[policy].rules.wait_s.is_some() && self.policies[policy].rules.staleness.is_some() {
            ready.sort_by_key(|number| self.oldest_trained(*number).unwrap_or(i64::MAX));
        }
        ready
    }

    /// Number of versions that the oldest trained token of a group is behind.
    pub(crate) fn staleness(&self, group: usize) -> i64 {
        let current = self.policies[self.groups[&group].policy].version;
        self.oldest_trained(group).map_or(0, |oldest| (current - oldest).max(0))
    }

    fn oldest_trained(&self, group: usize) -> Option<i64> {
        let ranges = self.members(group, &VOTING).filter_map(|rollout| rollout.trained_versions);
        ranges.map(|range| range.0).min()
    }

    /// Groups over the staleness bound are never delivered for the first time.
    ///
    /// Not specified: whether groups that are not next in order are tested too. Here all are, whenever a new batch is
    /// cut.
    fn take_out_stale(&mut self, policy: PolicyNumber) {
        let rules = self.policies[policy].rules.clone();
        let Some(bound) = rules.staleness else { return };
        for number in self.ready(policy) {
            if !self.groups[&number].delivered && self.staleness(number) > bound {
                // Not specified: whether the retention of the group or of the policy applies. Here it is the policy's.
                let purge_at = Some(self.now + rules.dropped_s);
                let group = self.group_mut(number);
                (group.state, group.purge_at) = (GroupState::Stale, purge_at);
            }
        }
    }

    fn measure(&self, policy: PolicyNumber, groups: &[usize], weighting: LossWeighting) -> Cut {
        let rollouts: Vec<&Rollout> = groups.iter().flat_map(|group| self.members(*group, &VOTING)).collect();
        let kept: Vec<&&Rollout> = rollouts.iter().filter(|rollout| rollout.verdict == Verdict::Kept).collect();
        let ranges: Vec<(i64, i64)> = kept.iter().filter_map(|rollout| rollout.trained_versions).collect();
        let oldest = ranges.iter().map(|range| range.0).min();
        let newest = ranges.iter().map(|range| range.1).max();
        Cut {
            groups: groups.len(),
            rollouts: rollouts.len(),
            samples: rollouts.iter().map(|rollout| rollout.body.segments.len().max(1)).sum(),
            tokens: rollouts.iter().map(|rollout| rollout.body.tokens()).sum(),
            version_current: self.policies[policy].version,
            trained_versions: oldest.zip(newest),
            weighting,
            trained_samples: rollouts.iter().map(|rollout| rollout.delivered_samples().max(1)).sum(),
            trained_tokens: rollouts.iter().map(|rollout| rollout.delivered_tokens()).sum(),
        }
    }

    /// One row per segment: group place, arrival, segment.
    fn rows(&self, batch: BatchNumber) -> Vec<Row> {
        let batch = &self.batches[&batch];
        let mut rows = Vec::new();
        for group in &batch.carried {
            let of_group = self.members(*group, &VOTING).map(Rollout::delivered_tokens).sum();
            for rollout in self.members(*group, &VOTING) {
                // A rollout without segments is one row without tokens.
                let empty =
                    [Segment { kind: None, tokens: Vec::new(), mask: Vec::new(), logprobs: None, versions: None }];
                let segments = if rollout.body.segments.is_empty() { &empty[..] } else { &rollout.body.segments };
                for (segment, content) in segments.iter().enumerate() {
                    let mut content = content.clone();
                    if rollout.verdict != Verdict::Kept {
                        content.mask.fill(0);
                    }
                    let trained = content.mask.iter().map(|&bit| u64::from(bit)).sum();
                    rows.push(Row {
                        group: self.groups[group].name,
                        rollout: rollout.name,
                        segment,
                        verdict: rollout.verdict,
                        reward: rollout.body.reward().map(millionths),
                        // Delivered as the nearest 32-bit float.
                        advantage: millionths(f64::from(rollout.advantage.unwrap_or(0.0) as f32)),
                        loss_weight: millionths(batch.cut.loss_weight(rollout, trained, of_group)),
                        policy_version: rollout.version,
                        content,
                    });
                }
            }
        }
        rows
    }

    pub(crate) fn is_live(&self, batch: &Batch) -> bool {
        batch.state == BatchState::Leased && batch.expires_at.is_some_and(|end| end > self.now)
    }

    /// Finds the batch of a caller and checks its lease and epoch.
    fn batch_of(&self, holder: Holder) -> Result<BatchNumber, Refused> {
        holder.batch.filter(|number| self.batches.contains_key(number)).ok_or(Refused::Unknown)
    }

    fn speaks_for_last_lease(&self, holder: Holder, number: BatchNumber) -> bool {
        let batch = &self.batches[&number];
        holder.lease.is_some() && !batch.lease_over && batch.leases.last() == holder.lease.as_ref()
    }

    /// With a lost lease or a superseded epoch, nothing changes.
    fn check_lease(&self, holder: Holder, number: BatchNumber) -> Result<(), Refused> {
        let batch = &self.batches[&number];
        self.check_epoch(batch.policy, holder.epoch)?;
        if self.speaks_for_last_lease(holder, number) && self.is_live(batch) { Ok(()) } else { Err(Refused::LeaseLost) }
    }

    pub(super) fn extend(&mut self, holder: Holder, ttl_s: i64) -> Outcome {
        let number = self.batch_of(holder)?;
        self.check_lease(holder, number)?;
        let expires_at = Some(self.now + ttl_s);
        self.batch_mut(number).expires_at = expires_at;
        Ok(Answer::Batch(self.batch_view(number)))
    }

    pub(super) fn ack(&mut self, holder: Holder, step: i64) -> Outcome {
        let number = self.batch_of(holder)?;
        let batch = &self.batches[&number];
        let acked = matches!(batch.state, BatchState::Trained | BatchState::Checkpointed);
        if acked && self.speaks_for_last_lease(holder, number) {
            // A repeat is recognised before anything else is checked.
            let before = batch.step.expect("an acked batch has a step");
            return if before == step {
                Ok(Answer::Batch(self.batch_view(number)))
            } else {
                Err(Refused::AlreadyAcked(before))
            };
        }
        self.check_lease(holder, number)?;
        let policy = &mut self.policies[batch.policy];
        if let Some(checkpoint) = policy.checkpoint_step
            && step <= checkpoint
        {
            return Err(Refused::StepSettled { checkpoint });
        }
        policy.acked_step = policy.acked_step.max(Some(step));
        policy.has_acked = true;
        let (state, kept_s) = if policy.rules.settled_by_ack {
            (BatchState::Checkpointed, policy.rules.settled_s)
        } else {
            (BatchState::Trained, policy.rules.trained_s)
        };
        let now = self.now;
        let batch = self.batch_mut(number);
        (batch.state, batch.step, batch.acked_at, batch.expires_at) = (state, Some(step), Some(now), None);
        self.schedule_purge(number, Some(now + kept_s));
        Ok(Answer::Batch(self.batch_view(number)))
    }

    pub(super) fn nack(&mut self, holder: Holder, groups: &[GroupName]) -> Outcome {
        let number = self.batch_of(holder)?;
        self.check_lease(holder, number)?;
        if groups.is_empty() {
            self.fail_delivery(number, Some(NACK_REASON));
            return Ok(Answer::Batch(self.batch_view(number)));
        }
        let held = self.held_by(number);
        for (index, name) in groups.iter().enumerate() {
            if !held.iter().any(|group| self.groups[group].name == *name) {
                return Err(Refused::Invalid(format!("/groups/{index}")));
            }
        }
        let batch = self.batch_mut(number);
        batch.state = BatchState::Split;
        batch.reason = Some(NACK_REASON.to_owned());
        (batch.lease_over, batch.expires_at) = (true, None);
        batch.failed_deliveries += 1;
        let (failed, resumes) = (batch.failed_deliveries, batch.resumes);
        let used_up = failed >= self.policies[self.batches[&number].policy].rules.max_deliveries;
        for group in held {
            let group = self.group_mut(group);
            (group.failed_deliveries, group.resumes) = (failed, resumes);
            if groups.contains(&group.name) {
                (group.state, group.reason) = (GroupState::Quarantined, Some(NACK_REASON.to_owned()));
            } else if used_up {
                // Not specified: the other groups return to their places, but deliveries are limited. Here the limit
                // takes precedence.
                (group.state, group.reason) = (GroupState::Quarantined, Some(DELIVERIES_USED_UP.to_owned()));
            } else {
                (group.state, group.batch) = (GroupState::Ready, None);
            }
        }
        Ok(Answer::Batch(self.batch_view(number)))
    }

    /// A failed delivery: the batch is returned, or quarantined after the last permitted one.
    fn fail_delivery(&mut self, number: BatchNumber, reason: Option<&str>) {
        let most = self.policies[self.batches[&number].policy].rules.max_deliveries;
        let batch = self.batch_mut(number);
        batch.failed_deliveries += 1;
        let used_up = batch.failed_deliveries >= most;
        batch.state = if used_up { BatchState::Quarantined } else { BatchState::Returned };
        batch.reason = reason.or(used_up.then_some(DELIVERIES_USED_UP)).map(str::to_owned);
        (batch.lease_over, batch.expires_at) = (true, None);
    }

    /// Gives back the leases that are past their end.
    pub(super) fn expire_leases(&mut self, policy: PolicyNumber) {
        let leased: Vec<BatchNumber> = self.in_state(policy, BatchState::Leased).collect();
        for number in leased {
            if !self.is_live(&self.batches[&number]) {
                self.fail_delivery(number, None);
            }
        }
    }

    /// A quarantined batch or group is ready again, with its counts at zero.
    pub(super) fn readmit(&mut self, batch: Option<BatchNumber>) -> Outcome {
        let number = self.batch_of(Holder { batch, lease: None, epoch: None })?;
        let quarantined = |group: &super::Group| group.batch == Some(number) && group.state == GroupState::Quarantined;
        let groups: Vec<usize> =
            self.groups.iter().filter(|(_, group)| quarantined(group)).map(|(number, _)| *number).collect();
        match self.batches[&number].state {
            BatchState::Quarantined => {
                let batch = self.batch_mut(number);
                (batch.state, batch.reason) = (BatchState::Returned, None);
                (batch.failed_deliveries, batch.resumes) = (0, 0);
            }
            BatchState::Split if !groups.is_empty() => {
                for group in groups {
                    let group = self.group_mut(group);
                    (group.state, group.batch, group.reason) = (GroupState::Ready, None, None);
                    (group.failed_deliveries, group.resumes) = (0, 0);
                }
            }
            _ => return Err(Refused::BatchState),
        }
        Ok(Answer::Batch(self.batch_view(number)))
    }

    /// A resume ends a lease, which a batch survives `max_resumes` times. Returns whether the batch came back.
    pub(super) fn revoke(&mut self, number: BatchNumber) -> bool {
        let most = self.policies[self.batches[&number].policy].rules.max_resumes;
        let batch = self.batch_mut(number);
        batch.resumes += 1;
        (batch.lease_over, batch.expires_at) = (true, None);
        let used_up = most > 0 && batch.resumes >= most;
        batch.state = if used_up { BatchState::Quarantined } else { BatchState::Returned };
        batch.reason = used_up.then(|| RESUMES_USED_UP.to_owned());
        !used_up
    }

    /// A resume takes back an acked batch. This counts neither as a failed delivery nor towards `max_resumes`.
    pub(super) fn bring_back(&mut self, number: BatchNumber) {
        let batch = self.batch_mut(number);
        batch.state = BatchState::Returned;
        (batch.lease_over, batch.expires_at, batch.acked_at) = (true, None, None);
        self.schedule_purge(number, None);
    }
}

impl Rollout {
    /// Number of trained tokens of the delivered mask; a masked rollout trains nothing.
    fn delivered_tokens(&self) -> u64 {
        if self.verdict == Verdict::Kept { self.body.trained_tokens() } else { 0 }
    }

    fn delivered_samples(&self) -> u64 {
        if self.verdict == Verdict::Kept { self.body.trained_samples() } else { 0 }
    }
}

impl Cut {
    /// The table under "Loss weights" in `docs/semantics.md`.
    fn loss_weight(&self, rollout: &Rollout, sample_tokens: u64, group_tokens: u64) -> f64 {
        let (g, n) = (self.rollouts as f64, self.trained_samples as f64);
        let m_i = sample_tokens.max(1) as f64;
        let m_r = rollout.delivered_tokens().max(1) as f64;
        let t_r = rollout.delivered_samples().max(1) as f64;
        match self.weighting {
            LossWeighting::RolloutMean => 1.0 / (g * m_r),
            LossWeighting::TurnMean => 1.0 / (g * t_r * m_i),
            LossWeighting::SampleMean => 1.0 / (n * m_i),
            LossWeighting::TokenMean => 1.0 / self.trained_tokens.max(1) as f64,
            LossWeighting::PromptMean => 1.0 / (self.groups as f64 * group_tokens.max(1) as f64),
            LossWeighting::Constant => 1.0 / (g * LOSS_CONSTANT),
        }
    }
}
