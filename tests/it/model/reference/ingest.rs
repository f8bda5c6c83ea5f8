//! Posts and groups: verdicts, places, and the decision of a group.

use std::collections::BTreeSet;

use forebay_wire::{GroupState, RolloutState, Status, Verdict, VersionSpan};

use super::{Group, Outcome, Reference, Rollout, VOTING};
use crate::model::view::{
    Answer, Body, DISCARD_REASON, DISCARDS_EQUAL, DROPS_ABORTED, DROPS_POOR, GroupName, MASKS_TRUNCATED, PolicyNumber,
    Post, Receipt, Refused, Rules,
};

/// States of rollouts that the backlog counts.
const UNTRAINED: [RolloutState; 5] =
    [RolloutState::Scoring, RolloutState::Open, RolloutState::Ready, RolloutState::Leased, RolloutState::Returned];

/// The room of a rollout.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// Reserved when its session was opened, so its group is opened even if the backlog is full.
    Reserved,
    Unreserved,
}

/// What there is before a bundle, and the policies whose training waits for a group of it.
pub(super) type Before<'b> = (&'b Reference, &'b BTreeSet<PolicyNumber>);

/// Why a group is decided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    Complete,
    PlacesUsed,
    Exhausted,
    TimedOut,
}

impl Reference {
    /// A bundle is stored whole or not at all.
    pub(super) fn post(&mut self, bundle: &[Post]) -> Outcome {
        let mut after = self.clone();
        let mut receipts = Vec::with_capacity(bundle.len());
        let lacked = self.lacked(bundle);
        for (index, post) in bundle.iter().enumerate() {
            receipts.push(after.post_one((self, &lacked), index, post, Room::Unreserved)?);
        }
        *self = after;
        Ok(Answer::Receipts(receipts))
    }

    /// The first rollout of a group that does not exist opens it and fixes its size.
    ///
    /// Not specified: the order in which a bundle opens its groups. Here it is the order of their first rollouts.
    fn open_group(&mut self, (before, lacked): Before<'_>, post: &Post, room: Room) -> Result<usize, Refused> {
        let (policy, name) = (post.policy, post.group());
        let rules = self.policies[policy].rules.clone();
        let times = if lacked.contains(&policy) { 2 } else { 1 };
        let is_full = |most| before.backlog(policy) + self.added_to_backlog(before, policy) >= times * most;
        if room == Room::Unreserved && rules.backlog.is_some_and(is_full) {
            return Err(Refused::BacklogFull);
        }
        let group = Group {
            policy,
            run: self.policies[policy].run,
            name,
            size: post.group_size.unwrap_or(rules.size),
            state: GroupState::Open,
            reason: None,
            opened_at: self.now,
            deadline_at: Some(self.now + rules.timeout_s),
            decided_at: None,
            place: 0,
            delivered: false,
            failed_deliveries: 0,
            resumes: 0,
            batch: None,
            purge_at: None,
            purged_at: None,
            forget_at: None,
            rules,
        };
        let number = self.openings;
        self.groups.insert(number, group);
        self.openings += 1;
        Ok(number)
    }

    /// Rollouts that are not yet trained.
    pub(super) fn backlog(&self, policy: PolicyNumber) -> usize {
        UNTRAINED.iter().map(|state| self.in_ledger(policy, *state)).sum()
    }

    /// What a bundle adds to the backlog, by state: if it completes a group, the whole group counts as added.
    fn added_to_backlog(&self, before: &Self, policy: PolicyNumber) -> usize {
        let added = |state| self.in_ledger(policy, state).saturating_sub(before.in_ledger(policy, state));
        UNTRAINED.iter().map(|state| added(*state)).sum()
    }

    pub(super) fn in_ledger(&self, policy: PolicyNumber, state: RolloutState) -> usize {
        let of_policy = self.rollouts.values().filter(|rollout| rollout.policy == policy);
        of_policy.filter(|rollout| self.rollout_state(rollout) == state).count()
    }

    /// A rollout of a bundle; `before` does not know it yet.
    pub(super) fn post_one(
        &mut self,
        before: Before<'_>,
        index: usize,
        post: &Post,
        room: Room,
    ) -> Result<Receipt, Refused> {
        // The identity check comes first.
        if let Some(known) = self.rollout_named(post.policy, post.rollout) {
            let same = known.body == post.body && self.groups[&known.group].name == post.group();
            let verdict = known.verdict;
            return if same { Ok(self.receipt(known, true)) } else { Err(Refused::RolloutConflict { index, verdict }) };
        }
        let number = match self.group_named(post.policy, post.group()) {
            Some(number) => number,
            None => self.open_group(before, post, room)?,
        };
        let group = &self.groups[&number];
        if post.group_size.is_some_and(|size| size != group.size) {
            return Err(Refused::GroupSizeConflict { index, size: group.size });
        }
        if post.group.is_none() && group.rules.size > 1 {
            return Err(Refused::Invalid(format!("/{index}/group_id")));
        }
        let (verdict, reason) = if group.state != GroupState::Open {
            (Verdict::Late, Some("group-decided"))
        } else if self.filled(number).is_some() {
            (Verdict::Late, Some("group-full"))
        } else {
            judge(&group.rules, &post.body, None)
        };
        let waits = group.rules.scored_s.filter(|_| verdict == Verdict::Kept);
        let current = self.policies[post.policy].version;
        let rollout = Rollout {
            policy: post.policy,
            run: group.run,
            name: post.rollout,
            group: number,
            verdict,
            reason: reason.map(str::to_owned),
            version: version(&post.body, current),
            version_assumed: post.body.version.is_none() && spans(&post.body).next().is_none(),
            trained_versions: trained_versions(&post.body, current).filter(|_| verdict == Verdict::Kept),
            advantage: None,
            received_at: self.now,
            unscored_at: waits.map(|scored_s| self.now + scored_s),
            scores: [None; 2],
            scores_after: [None; 2],
            score_leases: [None; 2],
            score_leases_after: [None; 2],
            body: post.body.clone(),
        };
        let unscored_at = rollout.unscored_at;
        let arrival = self.arrivals;
        self.rollouts.insert(arrival, rollout);
        self.arrivals += 1;
        self.policies[post.policy].received += 1;
        let group = self.group_mut(number);
        group.deadline_at = group.deadline_at.map(|deadline| unscored_at.map_or(deadline, |at| at.max(deadline)));
        if verdict == Verdict::Dropped {
            self.count_dropped(post.policy, reason.expect("drops have a reason"));
        }
        if verdict != Verdict::Late
            && let Some(cause) = self.cause_to_decide(number)
        {
            self.decide(number, cause);
        }
        Ok(self.receipt(&self.rollouts[&arrival], false))
    }

    pub(super) fn receipt(&self, rollout: &Rollout, duplicate: bool) -> Receipt {
        let group = &self.groups[&rollout.group];
        Receipt {
            verdict: rollout.verdict,
            reason: rollout.reason.clone(),
            duplicate,
            scoring: rollout.unscored_at.map_or(0, |_| rollout.scores.iter().filter(|score| score.is_none()).count()),
            group: group.name,
            state: group.state,
            arrived: self.arrived(rollout.group),
            size: group.size,
        }
    }

    /// Whether a group must be decided: not while one of its rollouts lacks a score.
    pub(super) fn cause_to_decide(&self, number: usize) -> Option<Cause> {
        let lacks = |rollout: &Rollout| rollout.group == number && rollout.unscored_at.is_some();
        if self.rollouts.values().any(lacks) { None } else { self.filled(number) }
    }

    /// Whether a group takes no more rollouts.
    pub(super) fn filled(&self, number: usize) -> Option<Cause> {
        let group = &self.groups[&number];
        let arrived = self.arrived(number);
        let posts = arrived + self.count(number, Verdict::Dropped);
        if arrived >= group.size {
            Some(Cause::Complete)
        } else if group.rules.shrink && posts >= group.size {
            Some(Cause::PlacesUsed)
        } else if !group.rules.shrink && posts >= 4 * group.size {
            Some(Cause::Exhausted)
        } else {
            None
        }
    }

    /// Decides an open group: `min_size`, then all masked, then the group filters, then ready.
    pub(super) fn decide(&mut self, number: usize, cause: Cause) {
        let group = &self.groups[&number];
        let members: Vec<&Rollout> = self.members(number, &VOTING).collect();
        let rewards: BTreeSet<u8> = members.iter().filter_map(|rollout| rollout.body.reward).collect();
        let min_size = group.rules.min_size.min(group.size);
        let reason = if (members.len() as u32) < min_size {
            Some(if cause == Cause::Exhausted { "exhausted" } else { "incomplete" })
        } else if members.iter().all(|rollout| rollout.verdict == Verdict::Masked) {
            Some("all-masked")
        } else if group.rules.filters && rewards.len() == 1 {
            Some(DISCARDS_EQUAL)
        } else {
            None
        };
        if let Some(reason) = reason {
            self.discard_for(number, reason, reason);
            return;
        }
        self.set_advantages(number);
        self.readies += 1;
        let (place, now) = (self.readies, self.now);
        let group = self.group_mut(number);
        (group.state, group.place, group.decided_at, group.deadline_at) = (GroupState::Ready, place, Some(now), None);
    }

    /// `grpo`: the distance from the mean of all voters in unbiased standard deviations; 0 for a single voter.
    fn set_advantages(&mut self, number: usize) {
        let votes: Vec<f64> = self.members(number, &VOTING).filter_map(|rollout| rollout.body.reward()).collect();
        let count = votes.len() as f64;
        let mean = votes.iter().sum::<f64>() / count;
        let deviation = (votes.iter().map(|vote| (vote - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt();
        for rollout in self.rollouts.values_mut() {
            if rollout.group == number && VOTING.contains(&rollout.verdict) {
                let advantage = match rollout.body.reward() {
                    Some(reward) if votes.len() > 1 => (reward - mean) / (deviation + 1e-6),
                    _ => 0.0,
                };
                rollout.advantage = Some(advantage);
            }
        }
    }

    /// Discards a group, which is counted under its rule.
    pub(super) fn discard_for(&mut self, number: usize, reason: &str, rule: &str) {
        let now = self.now;
        let group = self.group_mut(number);
        group.state = GroupState::Discarded;
        group.reason = Some(reason.to_owned());
        group.decided_at = group.decided_at.or(Some(now));
        group.deadline_at = None;
        group.purge_at = Some(now + group.rules.dropped_s);
        let policy = group.policy;
        for rollout in self.rollouts.values_mut().filter(|rollout| rollout.group == number) {
            if rollout.unscored_at.take().is_some() {
                rollout.withdraw_scores();
            }
        }
        self.count_dropped(policy, rule);
    }

    pub(super) fn count_dropped(&mut self, policy: PolicyNumber, rule: &str) {
        *self.policies[policy].dropped.entry(rule.to_owned()).or_default() += 1;
    }

    /// Finalizes now, as if timed out.
    pub(super) fn close(&mut self, policy: PolicyNumber, name: GroupName) -> Outcome {
        let number = self.group_named(policy, name).ok_or(Refused::Unknown)?;
        match self.groups[&number].state {
            GroupState::Open => {
                self.drop_unscored_of(number, i64::MAX);
                self.decide(number, Cause::TimedOut);
            }
            state => return Err(Refused::GroupDecided(state)),
        }
        Ok(Answer::Group(self.group_view(number)))
    }

    /// Discards a group that no live batch contains.
    pub(super) fn discard(&mut self, policy: PolicyNumber, name: GroupName) -> Outcome {
        let number = self.group_named(policy, name).ok_or(Refused::Unknown)?;
        match self.groups[&number].state {
            GroupState::Open | GroupState::Ready | GroupState::Quarantined => {
                self.discard_for(number, DISCARD_REASON, "by-hand");
            }
            state => return Err(Refused::GroupDecided(state)),
        }
        Ok(Answer::Group(self.group_view(number)))
    }
}

/// The filters in order, then the built-in rule about rewards. A rollout that waits for scores is kept until then, unless
/// a filter drops it whatever they will be; one that was aborted without a reward does not wait.
pub(super) fn judge(rules: &Rules, body: &Body, judged: Option<u8>) -> (Verdict, Option<&'static str>) {
    let waits = rules.scored_s.is_some() && judged.is_none();
    match body.status {
        Status::Aborted if rules.filters => (Verdict::Dropped, Some(DROPS_ABORTED)),
        Status::Aborted if waits && body.reward.is_none() => (Verdict::Dropped, Some("no-reward")),
        _ if waits => (Verdict::Kept, None),
        Status::Truncated if rules.filters => (Verdict::Masked, Some(MASKS_TRUNCATED)),
        _ if rules.filters && judged == Some(0) => (Verdict::Dropped, Some(DROPS_POOR)),
        _ if body.reward.is_none() => (Verdict::Dropped, Some("no-reward")),
        _ => (Verdict::Kept, None),
    }
}

/// Oldest and newest version of a trained token.
fn trained_versions(body: &Body, current: i64) -> Option<(i64, i64)> {
    let declared = body.version.unwrap_or(current);
    let mut trained = Vec::new();
    for segment in body.segments.iter() {
        for (place, _) in segment.mask.iter().enumerate().filter(|(_, bit)| **bit == 1) {
            let place = place as i64;
            let covers = |span: &&VersionSpan| (span.1..span.1 + span.2).contains(&place);
            let span = segment.versions.iter().flatten().find(covers);
            trained.push(span.map_or(declared, |span| span.0));
        }
    }
    Some((*trained.iter().min()?, *trained.iter().max()?))
}

fn spans(body: &Body) -> impl Iterator<Item = i64> {
    body.segments.iter().flat_map(|segment| segment.versions.iter().flatten()).map(|span| span.0)
}

/// The version of a rollout is its oldest trained one.
///
/// Not specified: the version of a rollout that trains nothing. Here it is the declared version, or the oldest span.
fn version(body: &Body, current: i64) -> i64 {
    let stated = body.version.or(spans(body).min()).unwrap_or(current);
    trained_versions(body, current).map_or(stated, |(oldest, _)| oldest)
}
