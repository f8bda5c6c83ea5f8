//! Stage 0, admission: how much work is accepted, before it starts ([`Admit`]) and when it is posted ([`Gates`]).
//!
//! Separate from [`ingest`](crate::ingest), which decides about rollouts that were accepted.
//!
//! Room is reserved under the lock of the policy's row, so that no more rollouts are started than will be fresh when a
//! trainer reaches them. [`room`] decides from what the store reads: groups that have begun are completed, so that the
//! room never fills with rollouts that cannot become a batch. Finished rollouts are bounded in two places: by the byte
//! budget while their body is read (503), and by the policy's backlog after they are parsed (429, never for an open
//! group or one that training waits for).

pub mod refused;
pub mod room;

use std::{collections::BTreeSet, sync::Mutex};

use forebay_wire::{AdmissionRequest, BacklogRules, Purpose, Violation};

use self::room::{BACKLOGS_MAX, NoRoom};
use crate::{
    clock::Timestamp,
    ids::{AdmissionId, GroupId, PolicyName, Version, check_name},
    refusal::Refusal,
    rules::Rules,
    trajectory::GROUP_SIZE_MAX,
};

/// A request for room.
#[derive(Clone, Debug)]
pub struct Admit {
    /// What is asked for.
    pub request: RoomRequest,
    /// The id of the admission, if room is reserved.
    pub admission_id: AdmissionId,
    /// The time of the request.
    pub now: Timestamp,
}

/// The most rollouts of one admission.
pub const ADMISSION_ROLLOUTS_MAX: u32 = 65_536;

/// A policy that was full takes new groups again when a tenth of its backlog is free. Without this margin, every ack
/// would let one group in and the next group would be refused.
const FREE_TO_REOPEN: u64 = 10;

/// Work of a policy that is not yet trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Kept and masked rollouts in groups that are open, ready, leased or returned.
    pub rollouts: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// Rollouts that room is reserved for.
    pub reserved: u64,
}

impl Backlog {
    /// Whether the backlog is below its bounds, so that another group may be opened.
    #[must_use]
    pub fn is_below(&self, bounds: &BacklogRules) -> bool {
        self.is_below_times(1, bounds)
    }

    /// Whether the backlog is so far below its bounds that no gate is closed.
    #[must_use]
    pub fn is_far_below(&self, bounds: &BacklogRules) -> bool {
        self.rollouts < bounds.max_ready_rollouts - bounds.max_ready_rollouts / FREE_TO_REOPEN
            && self.bytes < bounds.max_bytes - bounds.max_bytes / FREE_TO_REOPEN
    }

    fn is_below_times(&self, times: u64, bounds: &BacklogRules) -> bool {
        self.rollouts < bounds.max_ready_rollouts.saturating_mul(times)
            && self.bytes < bounds.max_bytes.saturating_mul(times)
    }
}

impl std::ops::Add for Backlog {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            rollouts: self.rollouts + other.rollouts,
            bytes: self.bytes + other.bytes,
            reserved: self.reserved + other.reserved,
        }
    }
}

/// A request for room for rollouts that are about to start.
#[derive(Clone, Debug)]
pub struct RoomRequest {
    /// Their policy.
    pub policy: PolicyName,
    /// The number of rollouts.
    pub rollouts: u32,
    /// The group of all of them, if it is known.
    pub group_id: Option<GroupId>,
    /// The size of the group, if it is not that of the rules.
    pub group_size: Option<u32>,
    /// Their environment, if it is known.
    pub environment: Option<String>,
}

impl RoomRequest {
    /// Checks a request; a refusal has every violation.
    pub fn parse(policy: PolicyName, sent: AdmissionRequest) -> Result<Self, Refusal> {
        let mut violations = Vec::new();
        let mut refuse = |pointer: &str, detail: String| {
            violations.push(Violation { pointer: pointer.to_owned(), detail });
        };
        if !(1..=ADMISSION_ROLLOUTS_MAX).contains(&sent.rollouts) {
            refuse("/rollouts", format!("must be 1 to {ADMISSION_ROLLOUTS_MAX}"));
        }
        let group_id = sent.group_id.as_deref().map(GroupId::parse).transpose();
        if let Err(error) = &group_id {
            refuse("/group_id", error.to_string());
        }
        match sent.group_size {
            Some(size) if !(1..=GROUP_SIZE_MAX).contains(&size) => {
                refuse("/group_size", format!("must be 1 to {GROUP_SIZE_MAX}"));
            }
            Some(_) if sent.group_id.is_none() => {
                refuse("/group_size", "must be absent without `group_id`".to_owned());
            }
            _ => {}
        }
        if let Some(Err(detail)) = sent.environment.as_deref().map(check_name) {
            refuse("/environment", detail);
        }
        let mut policy = policy;
        if sent.purpose == Purpose::Eval {
            policy = policy.evaluations();
            if sent.group_id.is_some() || sent.group_size.is_some() {
                let detail = "must be absent with `\"purpose\": \"eval\"`: such rollouts are compared with no others";
                refuse("/group_id", detail.to_owned());
            }
            if let Some(Err(error)) = sent.suite.as_deref().map(PolicyName::parse) {
                refuse("/suite", error.to_string());
            }
        } else if sent.suite.is_some() || sent.task.is_some() {
            refuse("/purpose", "must be `eval` beside `suite` and `task`".to_owned());
        }
        let AdmissionRequest { rollouts, group_size, environment, .. } = sent;
        match group_id {
            Ok(group_id) if violations.is_empty() => Ok(Self { policy, rollouts, group_id, group_size, environment }),
            _ => Err(Refusal::Invalid(violations)),
        }
    }
}

/// Reserved room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The id that posts name to use the room.
    pub admission_id: AdmissionId,
    /// The number of rollouts, from 0 to the number asked for.
    pub granted: u32,
    /// Why nothing was granted.
    pub refused: Option<NoRoom>,
    /// The version of rollouts that are posted without one.
    pub version: Version,
    /// The time when unused room is given back.
    pub expires_at: Timestamp,
}

/// What an admission means for a rollout that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Room was reserved for the rollout while this version was current.
    Reserved(Version),
    /// The admission has expired, is used up, or belongs to another policy or run.
    Lapsed,
    /// The rollout names no admission.
    Unnamed,
}

impl Room {
    /// The version that the admission gives to the rollout.
    #[must_use]
    pub fn version(self) -> Option<Version> {
        if let Self::Reserved(version) = self { Some(version) } else { None }
    }
}

/// The policies that were full and whose backlogs are not yet far enough below their bounds. This only prevents rapid
/// changes between accepting and refusing, so every replica has its own, and a restart forgets it.
#[derive(Debug, Default)]
pub struct Gates(Mutex<BTreeSet<PolicyName>>);

impl Gates {
    /// Refuses another group if the policy is full, given its backlog and the part of the bundle that was accepted so
    /// far. If the next batch lacks a group of the bundle, the bundle is accepted beyond the bounds: the groups that fill
    /// the backlog cannot be leased without it, so the backlog would never become free.
    pub fn admit(
        &self,
        policy: &PolicyName,
        rules: &Rules,
        backlog: Backlog,
        bundle: Backlog,
        is_lacked: bool,
    ) -> Result<(), Refusal> {
        if !bundle.is_below(&rules.backlog) {
            return Err(Refusal::BundleOverBacklog(policy.clone()));
        }
        let with_bundle = backlog + bundle;
        let has_room = self.is_open(policy, rules, backlog) && with_bundle.is_below(&rules.backlog);
        if has_room || (is_lacked && with_bundle.is_below_times(BACKLOGS_MAX, &rules.backlog)) {
            return Ok(());
        }
        Err(Refusal::BacklogFull(policy.clone()))
    }

    /// The policies that were full when they were last asked.
    pub fn closed(&self) -> BTreeSet<PolicyName> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Whether a policy takes new groups.
    pub fn is_open(&self, policy: &PolicyName, rules: &Rules, backlog: Backlog) -> bool {
        let mut closed = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut bounds = rules.backlog.clone();
        if closed.contains(policy) {
            // With less than one batch there is nothing to lease, so no ack would ever reopen the policy.
            let one_batch = rules.batch_rollouts().min(bounds.max_ready_rollouts);
            bounds.max_ready_rollouts -=
                (bounds.max_ready_rollouts / FREE_TO_REOPEN).min(bounds.max_ready_rollouts - one_batch);
            bounds.max_bytes -= bounds.max_bytes / FREE_TO_REOPEN;
        }
        let open = backlog.is_below(&bounds);
        if open {
            closed.remove(policy);
        } else {
            closed.insert(policy.clone());
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use forebay_wire::{PolicyRules, StalenessAction};

    use super::{room::capacity, *};

    fn rules(staleness: Option<u32>) -> Rules {
        let mut rules = PolicyRules::default();
        (rules.group.size, rules.batch.groups, rules.staleness.max) = (8, 16, staleness);
        rules.backlog.max_ready_rollouts = 1_000;
        Rules::parse(rules).expect("these rules can work")
    }

    #[test]
    fn capacity_is_what_stays_fresh_less_what_is_there() {
        // (4 + 1) * 16 * 8 = 640.
        let backlog = Backlog { rollouts: 500, bytes: 0, reserved: 100 };
        assert_eq!(capacity(&rules(Some(4)), backlog, None, false), 40);
        assert_eq!(capacity(&rules(Some(4)), Backlog { rollouts: 700, ..backlog }, None, false), 0);
        // Without a staleness bound, only the backlog limits how much is started.
        assert_eq!(capacity(&rules(None), backlog, None, false), 400);
        assert_eq!(capacity(&rules(Some(100)), backlog, None, false), 400);
    }

    #[test]
    fn a_trained_batch_takes_room_until_its_version_is_published_where_nothing_may_be_lost() {
        let mut wire = PolicyRules::default();
        (wire.batch.groups, wire.staleness.max) = (16, Some(1));
        let room = |wire: &PolicyRules, is_version_due| {
            let rules = Rules::parse(wire.clone()).expect("these rules can work");
            capacity(&rules, Backlog::default(), None, is_version_due)
        };
        assert_eq!([room(&wire, false), room(&wire, true)], [32, 32]);
        wire.staleness.action = StalenessAction::Wait;
        assert_eq!([room(&wire, false), room(&wire, true)], [32, 16]);
        // A trainer that never publishes has room for a batch.
        wire.staleness.max = Some(0);
        assert_eq!([room(&wire, false), room(&wire, true)], [16, 16]);
    }

    #[test]
    fn a_gate_that_closed_opens_further_down() {
        let (gates, policy, rules) = (Gates::default(), PolicyName::default(), rules(None));
        let at = |rollouts| gates.is_open(&policy, &rules, Backlog { rollouts, ..Backlog::default() });
        assert_eq!([at(999), at(1_000), at(999), at(900), at(899), at(999)], [true, false, false, false, true, true]);
    }

    #[test]
    fn a_gate_is_open_while_there_is_less_than_one_batch() {
        let mut wire = PolicyRules::default();
        (wire.group.size, wire.batch.groups, wire.backlog.max_ready_rollouts) = (2, 10, 20);
        let rules = Rules::parse(wire).expect("these rules can work");
        let (gates, policy) = (Gates::default(), PolicyName::default());
        let at = |rollouts| gates.is_open(&policy, &rules, Backlog { rollouts, ..Backlog::default() });
        assert_eq!([at(20), at(19), at(18)], [false, true, true]);
    }

    #[test]
    fn the_smallest_backlog_opens_again() {
        let mut wire = PolicyRules::default();
        wire.backlog.max_ready_rollouts = 1;
        let rules = Rules::parse(wire).expect("these rules can work");
        let (gates, policy) = (Gates::default(), PolicyName::default());
        let at = |rollouts| gates.is_open(&policy, &rules, Backlog { rollouts, ..Backlog::default() });
        assert_eq!([at(0), at(1), at(0)], [true, false, true]);
    }
}
