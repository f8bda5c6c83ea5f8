//! The changes that one transaction makes to tallies, which are counts. [`Tally`] defines what they count, and
//! `ops::tallies` writes the changes.
//!
//! On Postgres, a transaction appends its changes to a table of their own. Four times a second a replica adds the
//! committed changes to the tallies and deletes them. If each post updated the tally row instead, each update would
//! leave a dead version of the row, and a long transaction, such as that of `pg_dump`, keeps dead versions, which every
//! lease and post that reads the tally would have to skip. The view `tally_now` is the tallies plus the changes that
//! are not yet added, so a count is always exact.

use std::collections::BTreeMap;

use forebay_domain::{
    clock::Timestamp,
    ids::PolicyPk,
    states::{self, BatchState, GroupMove, GroupState, RolloutState},
    tally::{LeaseEvent, Tally},
};

use crate::error::StoreError;

/// Bound of a reward in the mean, so that a single extreme reward cannot overflow the sum.
const REWARD_TALLY_MAX: f64 = 1e15;

/// Groups in the same state, with their totals.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountedGroups {
    pub(super) state: GroupState,
    /// The state of the batch that they are part of, or become part of.
    pub(super) batch: Option<BatchState>,
    /// The number of groups.
    pub(super) groups: i64,
    /// The number of their kept and masked rollouts.
    pub(super) rollouts: i64,
    /// Those of them that lack scores.
    pub(super) scoring: i64,
    /// The payload bytes of these rollouts.
    pub(super) bytes: i64,
}

/// The change of one tally.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    pub(super) value: i64,
    pub(super) amount: f64,
    pub(super) latest_us: i64,
}

/// A count of the last hour, ordered by its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Recent {
    /// Rollouts that a rule dropped and groups that a rule discarded.
    Dropped(String),
    /// Groups that a claim found over the staleness bound.
    Stale,
}

impl Recent {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Dropped(rule) => format!("dropped.{rule}"),
            Self::Stale => "stale".to_owned(),
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        match name.strip_prefix("dropped.") {
            Some(rule) => Some(Self::Dropped(rule.to_owned())),
            None => (name == "stale").then_some(Self::Stale),
        }
    }
}

/// The changes that one transaction makes to tallies.
#[derive(Clone, Debug, Default)]
pub(super) struct TallyDelta {
    pub(super) totals: BTreeMap<(PolicyPk, Tally), Change>,
    pub(super) recent: BTreeMap<(PolicyPk, i64, Recent), i64>,
}

impl TallyDelta {
    /// Adds to a count.
    pub(super) fn add(&mut self, policy: PolicyPk, tally: Tally, value: i64) {
        if value != 0 {
            self.totals.entry((policy, tally)).or_default().value += value;
        }
    }

    /// The change of a count in this transaction so far, which statements do not see yet.
    pub(super) fn pending(&self, policy: PolicyPk, tally: Tally) -> i64 {
        self.totals.get(&(policy, tally)).map_or(0, |change| change.value)
    }

    /// Adds rollouts to a state.
    pub(super) fn rollouts(&mut self, policy: PolicyPk, state: RolloutState, value: i64) {
        self.add(policy, Tally::Rollouts(state), value);
    }

    /// Adds groups to a state.
    pub(super) fn groups(&mut self, policy: PolicyPk, state: GroupState, value: i64) {
        self.add(policy, Tally::Groups(state), value);
    }

    /// Adds batches to a state.
    pub(super) fn batches(&mut self, policy: PolicyPk, state: BatchState, value: i64) {
        self.add(policy, Tally::Batches(state), value);
    }

    /// Moves groups to another state, and their rollouts and live bytes with them.
    pub(super) fn move_groups(
        &mut self,
        policy: PolicyPk,
        moved: CountedGroups,
        by: GroupMove,
    ) -> Result<(), StoreError> {
        let CountedGroups { state, batch, groups, rollouts, scoring, bytes } = moved;
        let not_allowed = || StoreError::Corrupt(format!("groups are `{state}` before {by:?}"));
        let to = state.after(by).ok_or_else(not_allowed)?;
        let before = states::members_state(state, batch).ok_or_else(not_allowed)?;
        let after = states::members_state(to, batch).ok_or_else(not_allowed)?;
        self.groups(policy, state, -groups);
        self.groups(policy, to, groups);
        self.rollouts(policy, RolloutState::Scoring, -scoring);
        self.rollouts(policy, before, scoring - rollouts);
        self.rollouts(policy, after, rollouts);
        self.add(policy, Tally::LiveBytes, bytes * (i64::from(after.is_live()) - i64::from(before.is_live())));
        Ok(())
    }

    /// Counts events with an amount, and notes their time.
    pub(super) fn happened(&mut self, policy: PolicyPk, tally: Tally, value: i64, amount: f64, now: Timestamp) {
        let total = self.totals.entry((policy, tally)).or_default();
        total.value += value;
        total.amount += amount;
        total.latest_us = total.latest_us.max(now.as_micros());
    }

    /// Counts a rollout that a rule dropped.
    pub(super) fn dropped(&mut self, policy: PolicyPk, reason: &str, now: Timestamp) {
        self.happened(policy, Tally::Dropped(reason.to_owned()), 1, 1.0, now);
        self.recent(policy, Recent::Dropped(reason.to_owned()), 1, now);
    }

    /// Counts groups that a rule discarded, and their kept and masked rollouts.
    pub(super) fn discarded(&mut self, policy: PolicyPk, reason: &str, groups: i64, rollouts: i64, now: Timestamp) {
        self.happened(policy, Tally::Dropped(reason.to_owned()), groups, rollouts as f64, now);
        self.happened(policy, Tally::Discarded(reason.to_owned()), groups, rollouts as f64, now);
        self.recent(policy, Recent::Dropped(reason.to_owned()), groups, now);
    }

    /// Counts what happened to a lease.
    pub(super) fn lease(&mut self, policy: PolicyPk, event: LeaseEvent, now: Timestamp) {
        self.happened(policy, Tally::Leases(event), 1, 0.0, now);
    }

    /// Adds to a count of the last hour.
    pub(super) fn recent(&mut self, policy: PolicyPk, what: Recent, value: i64, now: Timestamp) {
        *self.recent.entry((policy, minute(now), what)).or_default() += value;
    }

    /// Counts a rollout at its arrival.
    pub(super) fn received(&mut self, policy: PolicyPk, tokens: u64, reward: Option<f64>, now: Timestamp) {
        self.happened(policy, Tally::Received, 1, tokens as f64, now);
        self.rewarded(policy, reward);
    }

    /// Counts the reward of a rollout, if it has one: at its arrival, or with its last score.
    pub(super) fn rewarded(&mut self, policy: PolicyPk, reward: Option<f64>) {
        if let Some(reward) = reward {
            let rewards = self.totals.entry((policy, Tally::Reward)).or_default();
            rewards.value += 1;
            rewards.amount += reward.clamp(-REWARD_TALLY_MAX, REWARD_TALLY_MAX);
        }
    }

    /// Adds all changes of another delta.
    pub(super) fn merge(&mut self, other: Self) {
        for (key, change) in other.totals {
            let total = self.totals.entry(key).or_default();
            total.value += change.value;
            total.amount += change.amount;
            total.latest_us = total.latest_us.max(change.latest_us);
        }
        for (key, value) in other.recent {
            *self.recent.entry(key).or_default() += value;
        }
    }
}

/// The minute of a time, as `recent` counts minutes.
pub(super) fn minute(time: Timestamp) -> i64 {
    time.as_micros().div_euclid(60_000_000)
}
