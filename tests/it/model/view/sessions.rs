//! Sessions: what is asked of them, and what can be observed.

use std::collections::BTreeMap;

use forebay_wire::{SessionAssembly, SessionState, Status, VersionSpan};

use super::{PolicyNumber, Receipt};

/// A session, by its index among all sessions that were opened.
pub(crate) type SessionNumber = usize;

/// A call that began by itself, by its index among all of these.
pub(crate) type InFlightNumber = usize;

/// A request for a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    /// In order.
    pub(crate) policies: Vec<PolicyNumber>,
    pub(crate) rollout: usize,
    pub(crate) group: Option<usize>,
    pub(crate) group_size: Option<u32>,
    pub(crate) execution: Option<usize>,
    pub(crate) idle_s: i64,
    pub(crate) ttl_s: i64,
    pub(crate) max_calls: u32,
}

/// The key that an agent presents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyPick {
    /// One of the keys of the session's attempt.
    Own(usize),
    /// A key of this session.
    Of(SessionNumber),
    Forged,
}

/// What an agent sends and the engine answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AgentCall {
    /// The policy of the model; none if its calls are only forwarded.
    pub(crate) policy: Option<PolicyNumber>,
    pub(crate) agent: Option<usize>,
    pub(crate) prompt: Vec<i32>,
    pub(crate) ids: Vec<i32>,
    /// In multiples of -1/128.
    pub(crate) logprobs: Vec<i64>,
    pub(crate) versions: Vec<VersionSpan>,
    pub(crate) stopped: bool,
    /// Number of the request's body.
    pub(crate) body: u8,
    /// How many times the client says that it has repeated the request.
    pub(crate) retries: u32,
    /// Whether the agent receives the answer.
    pub(crate) delivered: bool,
}

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    New {
        seq: u32,
    },
    /// The client repeated a request, and is answered as before.
    Replayed {
        seq: u32,
    },
    Forwarded,
    /// The agent was gone before the engine answered.
    Gone,
}

/// A request to finish a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finishing {
    pub(crate) session: Option<SessionNumber>,
    /// In halves.
    pub(crate) reward: Option<u8>,
    pub(crate) rewards: BTreeMap<PolicyNumber, u8>,
    pub(crate) status: Option<Status>,
}

/// A request to abort a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Aborting {
    pub(crate) session: Option<SessionNumber>,
    pub(crate) reason: usize,
    pub(crate) keep: bool,
}

/// How a session ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Finish(Finishing),
    Abort(Aborting),
    Expire { posts: bool },
}

/// The answer to the request that ended a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) session: SessionNumber,
    pub(crate) state: SessionState,
    pub(crate) reason: Option<String>,
    pub(crate) duplicate: bool,
    pub(crate) receipts: Vec<Receipt>,
    pub(crate) assembly: SessionAssembly,
}

/// A recorded call, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TurnView {
    pub(crate) seq: u32,
    pub(crate) outcome: &'static str,
    /// The nearest earlier call, and the number of ids that both begin with.
    pub(crate) divergence: Option<(u32, usize)>,
}

/// A session as producers read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionView {
    pub(crate) session: SessionNumber,
    pub(crate) rollout: usize,
    pub(crate) state: SessionState,
    pub(crate) reason: Option<String>,
    pub(crate) policies: Vec<SessionPolicyView>,
    pub(crate) calls: u32,
    /// The most segments and tokens that the calls can become.
    pub(crate) bounds: (u64, u64),
    pub(crate) full: bool,
    pub(crate) opened_at: i64,
    pub(crate) last_call_at: Option<i64>,
    pub(crate) expires_at: i64,
    pub(crate) due_at: Option<i64>,
    pub(crate) ended_at: Option<i64>,
    pub(crate) attempt: u32,
    pub(crate) max_attempts: u32,
    pub(crate) outcome: Option<(Vec<Receipt>, SessionAssembly)>,
}

/// A policy of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionPolicyView {
    pub(crate) policy: PolicyNumber,
    pub(crate) run: i64,
    pub(crate) version: i64,
    pub(crate) group_size: u32,
    pub(crate) calls: u32,
    pub(crate) sampled: u64,
}
