//! Operations on sessions. Prompts are built from the calls that a session has, so that calls often continue, repeat or
//! contradict each other.

use std::collections::BTreeMap;

use forebay_wire::{GroupState, SessionState, Status, VersionSpan};

use super::{GROUPS, ROLLOUTS, groups_in};
use crate::model::{
    reference::{Reference, Session, Stored},
    view::{
        Aborting, AgentCall, Body, Call, Ending, Finishing, GroupName, InFlightNumber, KeyPick, Opening, PolicyNumber,
        Post, Segment, SessionNumber,
    },
};

/// Ids of the prompt that most conversations begin with: more than a break must share.
const SYSTEM: std::ops::Range<i32> = 100..166;

#[derive(Clone, Debug)]
pub(crate) enum SessionOperation {
    Open(OpeningPlan),
    /// The request of a known session again.
    Reopen {
        session: SessionPick,
        changed: bool,
    },
    /// `wrong` names another attempt than the one that is under way; none names no attempt.
    Resume {
        session: SessionPick,
        wrong: Option<bool>,
    },
    AgentCall {
        session: SessionPick,
        key: KeyPlan,
        plan: CallPlan,
    },
    BeginCall {
        session: SessionPick,
        key: KeyPlan,
    },
    EndCall {
        nth: usize,
        plan: Option<CallPlan>,
    },
    Finish(Vec<(SessionPick, FinishPlan)>),
    /// The request that ended a session again.
    EndAgain(SessionPick),
    Abort {
        session: SessionPick,
        reason: usize,
        keep: bool,
    },
    Turns(SessionPick),
    /// Another rollout takes the id of an open session, or opens its group with another size.
    Post {
        session: SessionPick,
        sized: bool,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct OpeningPlan {
    pub(super) policies: Vec<PolicyNumber>,
    /// A rollout that may be known; otherwise one that is not.
    pub(super) rollout: Option<usize>,
    pub(super) group: SessionGroup,
    pub(super) group_size: Option<u32>,
    pub(super) execution: Option<usize>,
    pub(super) idle_s: i64,
    pub(super) ttl_s: i64,
    pub(super) max_calls: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum SessionGroup {
    /// None if the rules permit it.
    Alone,
    /// The first open group, or one that is not known.
    Open,
    Any(usize),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionPick {
    pub(super) state: Option<SessionState>,
    /// The newest is the first. If no session is in the state, the newest of all.
    pub(super) nth: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyPlan {
    Own(usize),
    Other(usize),
    Forged,
}

#[derive(Clone, Debug)]
pub(crate) struct CallPlan {
    /// Which policy of the session.
    pub(super) policy: ModelPick,
    pub(super) agent: Option<usize>,
    pub(super) prompt: PromptPlan,
    pub(super) ids: Vec<i32>,
    /// Number of versions behind the current one, of the first and of the other ids.
    pub(super) versions: (i64, i64),
    pub(super) stopped: bool,
    pub(super) body: u8,
    pub(super) retries: u32,
    pub(super) delivered: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ModelPick {
    Policy(usize),
    Foreign,
    Frozen,
}

/// How a prompt relates to the calls of the session.
#[derive(Clone, Debug)]
pub(crate) enum PromptPlan {
    New {
        long: bool,
        ids: Vec<i32>,
    },
    /// A call, without as many of its last ids, and then these ids.
    Extend {
        nth: usize,
        without: usize,
        tail: Vec<i32>,
    },
    Same {
        nth: usize,
    },
    /// A call with one id replaced, and then one more.
    Drift {
        nth: usize,
        place: usize,
        id: i32,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct FinishPlan {
    pub(super) reward: Option<u8>,
    pub(super) rewards: BTreeMap<PolicyNumber, u8>,
    pub(super) status: Option<Status>,
}

impl SessionOperation {
    pub(super) fn resolve(&self, now: &Reference) -> Call {
        match self.clone() {
            Self::Open(plan) => Call::OpenSession(plan.resolve(now)),
            Self::Reopen { session, changed } => {
                match session.resolve(now).and_then(|number| now.sessions.get(&number)) {
                    Some(known) => {
                        let idle_s = known.opening.idle_s + i64::from(changed);
                        Call::OpenSession(Opening { idle_s, ..known.opening.clone() })
                    }
                    None => Call::Turns { session: None },
                }
            }
            Self::Resume { session, wrong } => {
                let session = session.resolve(now);
                let attempt = session.and_then(|number| now.sessions.get(&number)).map_or(1, |known| known.attempt);
                Call::ResumeSession { session, after: wrong.map(|wrong| attempt + u32::from(wrong)) }
            }
            Self::AgentCall { session, key, plan } => {
                let session = session.resolve(now);
                Call::Record { session, key: key.resolve(now), sent: plan.resolve(now, session) }
            }
            Self::BeginCall { session, key } => Call::Begin { session: session.resolve(now), key: key.resolve(now) },
            Self::EndCall { nth, plan } => {
                let calls: Vec<InFlightNumber> = now.in_flight.keys().copied().collect();
                let Some(&call) = calls.get(nth % calls.len().max(1)) else {
                    return Call::Begin { session: now.opened.checked_sub(1), key: KeyPick::Own(0) };
                };
                let session = now.in_flight[&call].session;
                Call::Answered { call, sent: plan.map(|plan| plan.resolve(now, Some(session))) }
            }
            Self::Finish(plans) => finish(now, plans),
            Self::EndAgain(session) => end_again(now, session),
            Self::Abort { session, reason, keep } => {
                Call::Abort(Aborting { session: session.resolve(now), reason, keep })
            }
            Self::Turns(session) => Call::Turns { session: session.resolve(now) },
            Self::Post { session, sized } => post(now, session, sized),
        }
    }
}

/// A session is named once in a request.
fn finish(now: &Reference, plans: Vec<(SessionPick, FinishPlan)>) -> Call {
    let mut finishes: Vec<Finishing> = Vec::new();
    for (pick, FinishPlan { reward, rewards, status }) in plans {
        let session = pick.resolve(now);
        if finishes.iter().all(|finish| finish.session != session) {
            finishes.push(Finishing { session, reward, rewards, status });
        }
    }
    Call::Finish(finishes)
}

fn end_again(now: &Reference, pick: SessionPick) -> Call {
    let session = pick.resolve(now);
    match session.and_then(|number| now.sessions.get(&number)?.end.clone()) {
        Some(Ending::Finish(finish)) => Call::Finish(vec![finish]),
        Some(Ending::Abort(abort)) => Call::Abort(abort),
        Some(Ending::Expire { .. }) | None => Call::Abort(Aborting { session, reason: 0, keep: false }),
    }
}

fn post(now: &Reference, pick: SessionPick, sized: bool) -> Call {
    let segment = Segment { kind: None, tokens: vec![1; 3], mask: vec![1, 1], logprobs: None, versions: None };
    let known = pick.resolve(now).and_then(|number| now.sessions.get(&number));
    let post = move |known: &Session| Post {
        policy: known.opening.policies[0],
        rollout: if sized { ROLLOUTS / 2 } else { known.opening.rollout },
        group: known.opening.group,
        group_size: known.opening.group.filter(|_| sized).map(|_| 3),
        body: Body {
            status: Status::Completed,
            reward: Some(1),
            version: None,
            segments: [segment].into(),
            execution: None,
        },
    };
    Call::Post(known.map(post).into_iter().collect())
}

impl OpeningPlan {
    fn resolve(self, now: &Reference) -> Opening {
        let policy = self.policies[0];
        let is_free = |name: &usize| {
            now.rollout_named(policy, *name).is_none()
                && now.sessions.values().all(|session| session.opening.rollout != *name)
        };
        let rollout = self.rollout.or_else(|| (0..ROLLOUTS).rev().find(is_free)).unwrap_or(0);
        let named = |group: &GroupName| if let GroupName::Named(name) = group { Some(*name) } else { None };
        let open = || groups_in(now, policy, Some(GroupState::Open)).iter().find_map(named);
        let live =
            || now.sessions.values().filter(|session| session.is_live()).find_map(|session| session.opening.group);
        let unused = || (0..GROUPS).find(|name| now.group_named(policy, GroupName::Named(*name)).is_none());
        let group = match self.group {
            SessionGroup::Alone => None,
            SessionGroup::Open => Some(open().or_else(live).or_else(unused).unwrap_or(0)),
            SessionGroup::Any(name) => Some(name),
        };
        Opening {
            policies: self.policies,
            rollout,
            group,
            group_size: self.group_size.filter(|_| group.is_some()),
            execution: self.execution,
            idle_s: self.idle_s,
            ttl_s: self.ttl_s,
            max_calls: self.max_calls,
        }
    }
}

impl SessionPick {
    fn resolve(self, now: &Reference) -> Option<SessionNumber> {
        let Some(state) = self.state else { return now.opened.checked_sub(1 + self.nth) };
        let in_state = now.sessions.iter().rev().filter(|(_, session)| session.state == state);
        let found: Vec<SessionNumber> = in_state.map(|(number, _)| *number).collect();
        found.get(self.nth % found.len().max(1)).copied().or(now.opened.checked_sub(1))
    }
}

impl KeyPlan {
    fn resolve(self, now: &Reference) -> KeyPick {
        match self {
            Self::Own(nth) => KeyPick::Own(nth),
            Self::Other(nth) if now.opened > 0 => KeyPick::Of(nth % now.opened),
            Self::Other(_) | Self::Forged => KeyPick::Forged,
        }
    }
}

impl CallPlan {
    fn resolve(self, now: &Reference, session: Option<SessionNumber>) -> AgentCall {
        let known = session.and_then(|number| now.sessions.get(&number));
        let policies = known.map_or(&[0][..], |known| &known.opening.policies);
        let policy = match self.policy {
            ModelPick::Policy(nth) => Some(policies[nth % policies.len()]),
            ModelPick::Foreign => Some((0..super::POLICIES).find(|policy| !policies.contains(policy)).unwrap_or(0)),
            ModelPick::Frozen => None,
        };
        let calls = known.map_or(&[][..], |known| &known.calls);
        let current = now.policies[policy.unwrap_or(0)].version;
        let version = |behind: i64| (current - behind).max(0);
        let length = self.ids.len() as i64;
        let versions = match length {
            0 => Vec::new(),
            1 => vec![VersionSpan(version(self.versions.0), 0, 1)],
            _ => {
                vec![VersionSpan(version(self.versions.0), 0, 1), VersionSpan(version(self.versions.1), 1, length - 1)]
            }
        };
        // No other call of the session has these log-probabilities.
        let logprobs = (0..length).map(|place| 8 * (calls.len() as i64 + 1) + place).collect();
        AgentCall {
            policy,
            agent: self.agent,
            prompt: self.prompt.resolve(calls),
            ids: self.ids,
            logprobs,
            versions,
            stopped: self.stopped,
            body: self.body,
            retries: self.retries,
            delivered: self.delivered,
        }
    }
}

impl PromptPlan {
    fn resolve(self, calls: &[Stored]) -> Vec<i32> {
        let nth = |nth: usize| calls.iter().rev().nth(nth % calls.len().max(1));
        let full = |call: &Stored| [&call.sent.prompt[..], &call.sent.ids].concat();
        let new = |long: bool, ids: Vec<i32>| if long { SYSTEM.chain(ids).collect() } else { ids };
        match self {
            Self::New { long, ids } => new(long, ids),
            Self::Extend { nth: call, without, tail } => match nth(call) {
                Some(call) => {
                    let full = full(call);
                    [&full[..full.len().saturating_sub(without).max(1)], &tail].concat()
                }
                None => new(true, vec![1]),
            },
            Self::Same { nth: call } => nth(call).map_or_else(|| new(true, vec![1]), |call| call.sent.prompt.clone()),
            Self::Drift { nth: call, place, id } => match nth(call) {
                Some(call) => {
                    let mut full = full(call);
                    let place = full.len() - 1 - place % full.len();
                    full[place] = id;
                    full.push(1);
                    full
                }
                None => new(false, vec![id]),
            },
        }
    }
}
