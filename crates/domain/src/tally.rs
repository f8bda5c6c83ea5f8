//! Tallies: counts of each policy, updated in the transactions that change what they count, so that metrics never have
//! to count rows.
//!
//! Separate from [`states`](super::states), because some tallies do not count states: bytes, rewards, what rules
//! dropped, and events. Tallies of events never fall, so the difference of two readings is what happened in between.

use std::{cmp::Ordering, collections::BTreeMap};

use super::states::{BatchState, GroupState, RolloutState, SessionState};
use crate::clock::Timestamp;

/// The name, beside the states of rollouts, of the tally of rollouts whose tombstones were deleted.
const FORGOTTEN: &str = "forgotten";

/// The name, among decisions, of the tally of groups that became ready.
const READY: &str = "ready";

/// The name, beside that of acked batches, of the tally of their rollouts.
const ROLLOUTS: &str = "rollouts";

/// One count of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tally {
    /// Rollouts that were received and were not duplicates. The amount is their tokens.
    Received,
    /// Rollouts that were masked at their arrival.
    Masked,
    /// Rollouts that arrived after the decision of their group. [`RolloutState::Late`] has only those with a row.
    LateTotal,
    /// Payload bytes of rollouts that wait to be trained.
    LiveBytes,
    /// Rollouts that room is reserved for.
    Reserved,
    /// Rewards received: their number and their sum.
    Reward,
    /// Rollouts whose producer sent no version.
    AssumedVersion,
    Rollouts(RolloutState),
    /// Rollouts whose tombstones were deleted.
    Forgotten,
    Groups(GroupState),
    Batches(BatchState),
    /// Sessions in a state that record rollouts of the policy.
    Sessions(SessionState),
    /// Rollouts that a rule dropped and groups that a rule discarded. The amount is the rollouts concerned.
    Dropped(String),
    /// Groups that a rule discarded. The amount is their kept and masked rollouts.
    Discarded(String),
    /// Groups that became ready by their decision. The amount is their rollouts.
    DecidedReady,
    /// Groups that a claim found over the staleness bound. The amount is their rollouts.
    Stale,
    /// What happened to leases.
    Leases(LeaseEvent),
    /// Leases granted, and the seconds that their consumers had waited.
    Waited,
    /// Batches acked. The amount is their tokens.
    Acked,
    /// Rollouts of acked batches.
    AckedRollouts,
}

/// What happens to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeaseEvent {
    /// A new batch was delivered.
    Granted,
    /// A batch that came back was delivered again.
    Redelivered,
    /// The lease was not extended in time.
    Expired,
    /// The consumer gave the batch back.
    Nacked,
    /// A resume ended the lease.
    Revoked,
}

impl LeaseEvent {
    /// All events.
    pub const ALL: [Self; 5] = [Self::Granted, Self::Redelivered, Self::Expired, Self::Nacked, Self::Revoked];

    /// The name in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Redelivered => "redelivered",
            Self::Expired => "expired",
            Self::Nacked => "nacked",
            Self::Revoked => "revoked",
        }
    }
}

impl Tally {
    /// The family and, in a family of several tallies, the name within it.
    fn parts(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::Received => ("received", None),
            Self::Masked => ("masked", None),
            Self::LateTotal => ("late_total", None),
            Self::LiveBytes => ("live_bytes", None),
            Self::Reserved => ("reserved", None),
            Self::Reward => ("reward", None),
            Self::AssumedVersion => ("assumed_version", None),
            Self::Rollouts(state) => ("rollout", Some(state.as_str())),
            Self::Forgotten => ("rollout", Some(FORGOTTEN)),
            Self::Groups(state) => ("group", Some(state.as_str())),
            Self::Batches(state) => ("batch", Some(state.as_str())),
            Self::Sessions(state) => ("session", Some(state.as_str())),
            Self::Dropped(rule) => ("dropped", Some(rule)),
            Self::Discarded(rule) => ("discarded", Some(rule)),
            Self::DecidedReady => ("decided", Some(READY)),
            Self::Stale => ("stale", None),
            Self::Leases(event) => ("lease", Some(event.as_str())),
            Self::Waited => ("waited", None),
            Self::Acked => ("acked", None),
            Self::AckedRollouts => ("acked", Some(ROLLOUTS)),
        }
    }

    /// The name in the database.
    #[must_use]
    pub fn name(&self) -> String {
        match self.parts() {
            (name, None) => name.to_owned(),
            (family, Some(one)) => format!("{family}.{one}"),
        }
    }

    /// The tally with this name; none if only another version knows the name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name.split_once('.') {
            None => match name {
                "received" => Some(Self::Received),
                "masked" => Some(Self::Masked),
                "late_total" => Some(Self::LateTotal),
                "stale" => Some(Self::Stale),
                "waited" => Some(Self::Waited),
                "acked" => Some(Self::Acked),
                "live_bytes" => Some(Self::LiveBytes),
                "reserved" => Some(Self::Reserved),
                "reward" => Some(Self::Reward),
                "assumed_version" => Some(Self::AssumedVersion),
                _ => None,
            },
            Some(("rollout", FORGOTTEN)) => Some(Self::Forgotten),
            Some(("rollout", state)) => RolloutState::parse(state).map(Self::Rollouts),
            Some(("group", state)) => GroupState::parse(state).map(Self::Groups),
            Some(("batch", state)) => BatchState::parse(state).map(Self::Batches),
            Some(("session", state)) => SessionState::parse(state).map(Self::Sessions),
            Some(("dropped", rule)) => Some(Self::Dropped(rule.to_owned())),
            Some(("discarded", rule)) => Some(Self::Discarded(rule.to_owned())),
            Some(("decided", READY)) => Some(Self::DecidedReady),
            Some(("lease", event)) => {
                LeaseEvent::ALL.into_iter().find(|known| known.as_str() == event).map(Self::Leases)
            }
            Some(("acked", ROLLOUTS)) => Some(Self::AckedRollouts),
            Some(_) => None,
        }
    }
}

/// Tallies are ordered by their names. Replicas of all versions write them in this order, so that transactions do not
/// deadlock.
impl Ord for Tally {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl PartialOrd for Tally {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The tallies of one policy.
#[derive(Clone, Debug, Default)]
pub struct Tallies {
    /// The counts that were ever written.
    pub counts: BTreeMap<Tally, i64>,
    /// The amounts that are not 0.
    pub amounts: BTreeMap<Tally, f64>,
    /// When the tallies that note it counted last.
    pub latest: BTreeMap<Tally, Timestamp>,
}

impl Tallies {
    /// A count; 0 if it was never written.
    #[must_use]
    pub fn count(&self, tally: &Tally) -> i64 {
        self.counts.get(tally).copied().unwrap_or(0)
    }

    /// An amount; 0 if it was never written.
    #[must_use]
    pub fn amount(&self, tally: &Tally) -> f64 {
        self.amounts.get(tally).copied().unwrap_or(0.0)
    }

    /// When a tally counted last, if it notes that.
    #[must_use]
    pub fn latest(&self, tally: &Tally) -> Option<Timestamp> {
        self.latest.get(tally).copied()
    }

    /// When the last rollout was received.
    #[must_use]
    pub fn last_received_at(&self) -> Option<Timestamp> {
        self.latest(&Tally::Received)
    }

    /// Rollouts that were received and were not duplicates.
    #[must_use]
    pub fn received(&self) -> i64 {
        self.count(&Tally::Received)
    }

    /// Rollouts by the names of their states, with those whose tombstones were deleted.
    #[must_use]
    pub fn rollouts(&self) -> BTreeMap<String, i64> {
        self.family("rollout")
    }

    /// Groups by the names of their states.
    #[must_use]
    pub fn groups(&self) -> BTreeMap<String, i64> {
        self.family("group")
    }

    /// Batches by the names of their states.
    #[must_use]
    pub fn batches(&self) -> BTreeMap<String, i64> {
        self.family("batch")
    }

    /// Sessions by the names of their states.
    #[must_use]
    pub fn sessions(&self) -> BTreeMap<String, i64> {
        self.family("session")
    }

    /// The number of rollouts and groups that each rule dropped or discarded.
    #[must_use]
    pub fn dropped(&self) -> BTreeMap<String, i64> {
        self.family("dropped")
    }

    /// Rollouts received minus the sum over all states. It is 0, unless something was lost or counted twice.
    #[must_use]
    pub fn unconserved(&self) -> i64 {
        self.received() - self.rollouts().values().sum::<i64>()
    }

    fn family(&self, family: &str) -> BTreeMap<String, i64> {
        let of_family = |(tally, count): (&Tally, &i64)| match tally.parts() {
            (found, Some(one)) if found == family => Some((one.to_owned(), *count)),
            _ => None,
        };
        self.counts.iter().filter_map(of_family).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Tally> {
        let mut all = vec![
            Tally::Received,
            Tally::Masked,
            Tally::LateTotal,
            Tally::DecidedReady,
            Tally::Stale,
            Tally::Waited,
            Tally::Acked,
            Tally::AckedRollouts,
            Tally::LiveBytes,
            Tally::Reserved,
            Tally::Reward,
            Tally::AssumedVersion,
            Tally::Forgotten,
        ];
        all.extend(RolloutState::ALL.iter().map(|state| Tally::Rollouts(*state)));
        all.extend(GroupState::ALL.iter().map(|state| Tally::Groups(*state)));
        all.extend(BatchState::ALL.iter().map(|state| Tally::Batches(*state)));
        all.extend(SessionState::ALL.iter().map(|state| Tally::Sessions(*state)));
        all.extend(LeaseEvent::ALL.map(Tally::Leases));
        for rule in ["stale", "a.b", "by-hand"] {
            all.extend([Tally::Dropped(rule.to_owned()), Tally::Discarded(rule.to_owned())]);
        }
        all
    }

    #[test]
    fn every_tally_is_read_as_it_is_written() {
        for tally in all() {
            assert_eq!(Tally::parse(&tally.name()), Some(tally.clone()), "{tally:?}");
        }
        for unknown in ["", "rollout", "rollout.gone", "group.forgotten", "received.all", "lease.gone", "decided.stale"]
        {
            assert_eq!(Tally::parse(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn tallies_are_in_the_order_of_their_names() {
        let mut tallies = all();
        tallies.sort();
        let names: Vec<String> = tallies.iter().map(Tally::name).collect();
        assert!(names.is_sorted(), "{names:?}");
    }
}
