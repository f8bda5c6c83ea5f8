//! Sessions: the calls of an agent to an inference engine are recorded, and become its rollouts when the session ends.
//!
//! It is beside the other stages: opening a session is an [`admission`](super::admission), its end is an
//! [`ingest`](super::ingest) of trajectories that are assembled from the calls. The agent's requests and the engines
//! belong to another module; this one receives finished calls.
//!
//! - `open`: checks what ingest would refuse at the end, and reserves room.
//! - `record`: permits calls and stores them. `paths` finds what a prompt shares with earlier calls.
//! - `delivery`: whether agents received the answers.
//! - `recent`: what is kept in memory of the sessions that were active last.
//! - `in_flight`: the calls of this process that have not ended.
//! - `ending`: what a request wants of the end of a session.
//! - `end`: has the calls assembled and ingests the rollouts; the session ends in the same transaction.
//! - `rollouts`: assembles the calls. `breaks` finds out why prompts do not continue earlier calls.
//! - `teacher`: has a teacher score the segments between assembling and ingest.
//! - `calls`: the calls of a session as the assembler needs them.
//! - `texts`: the calls of a session with their requests and answers.

mod breaks;
mod calls;
mod delivery;
mod end;
mod ending;
mod in_flight;
mod notes;
mod open;
mod paths;
mod recent;
mod record;
mod rollouts;
mod teacher;
mod texts;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use forebay_wire::{Requirement, Sampling};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

pub(in crate::buffer) use self::{
    calls::turns,
    delivery::{Delivered, flush_delivered, mark_delivered},
    end::{abort, expire, finish},
    in_flight::InFlight,
    open::open,
    record::{PathCache, check_room, keep, note, path_cache, permit, record, replay, without_tokens},
    texts::{text, texts},
};
pub use self::{
    calls::{CallOutcome, Divergence, Turn},
    end::Ended,
    ending::{Abort, Finish},
    notes::SessionNotes,
    open::{OpenSession, Opened},
    recent::{KnownCalls, RecentSessions},
    record::{CallPermit, NewCall, Replayed},
    texts::{CallText, RecordedText, RecordedTexts, TextPage},
};
use super::trajectory::VIOLATIONS_MAX;
use crate::buffer::{ids::PolicyName, refusal::Refusal, rules::Rules};

/// The most keys of a session: enough for a producer that repeats its request, and a bounded number of rows.
pub const KEYS_MAX: u32 = 64;

/// The most model names of a session.
pub const MODELS_MAX: usize = 64;

/// The longest lifetime of a session: 30 days.
pub const TTL_S_MAX: u64 = 30 * 86_400;

/// The longest time that a finish waits for calls in flight.
pub const WAIT_MS_MAX: u64 = 600_000;

/// The model name that stands for all other names.
pub const ANY_MODEL: &str = "*";

/// The prefix of every key of a session. Secret scanners recognise keys by it.
const KEY_PREFIX: &str = "fbs_";

/// Bounds that an operator sets.
#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    /// The most calls of a session.
    pub calls_max: u32,
    /// The most stored bytes of the calls of a session.
    pub bytes_max: u64,
    /// The most calls of a session that are in flight at once.
    pub in_flight_max: u32,
    /// Seconds after which a session expires, if it names none.
    pub ttl_s: u64,
    /// Seconds without a call after which a session expires, if it names none.
    pub idle_s: u64,
}

/// What a session was opened with, as its row keeps it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionSpec {
    /// The policies that the model names of the agent stand for. Calls of a model without a policy are not recorded.
    pub models: BTreeMap<String, Option<String>>,
    /// Id of the rollout of each policy.
    pub rollout_id: String,
    /// Id of the group of each policy, if there is one.
    pub group_id: Option<String>,
    /// Label of the environment.
    pub environment: Option<String>,
    /// Id of the execution that its rollouts belong to, if its producer named one.
    pub execution_id: Option<String>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Free-form object.
    pub metadata: Option<Box<RawValue>>,
}

impl SessionSpec {
    /// The policy that a model name stands for; none if its calls are not recorded.
    pub fn policy(&self, model: &str) -> Result<Option<&str>, Refusal> {
        let found = self.models.get(model).or_else(|| self.models.get(ANY_MODEL));
        found.map(Option::as_deref).ok_or_else(|| Refusal::UnknownModel(model.to_owned()))
    }

    /// The id of the group of each policy.
    #[must_use]
    pub fn group(&self) -> &str {
        self.group_id.as_deref().unwrap_or(&self.rollout_id)
    }
}

/// The key of a session: 256 random bits. It permits calls of the session's agent and nothing else.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionKey(String);

impl SessionKey {
    /// A fresh key.
    #[must_use]
    pub fn mint() -> Self {
        let secret: [u8; 32] = rand::random();
        Self(format!("{KEY_PREFIX}{}", blake3::Hash::from_bytes(secret).to_hex()))
    }

    /// Whether a text has the form of a key. It says nothing about whether a session has this key.
    #[must_use]
    pub fn is_like(text: &str) -> bool {
        text.strip_prefix(KEY_PREFIX).is_some_and(|secret| blake3::Hash::from_hex(secret).is_ok())
    }

    /// Whether a text begins like a key of a session.
    #[must_use]
    pub fn has_prefix(text: &str) -> bool {
        text.starts_with(KEY_PREFIX)
    }

    /// The key, for the answer to the producer.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SessionKey {
    /// Hides the key: it is a secret and must never reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// The BLAKE3 hash of a key, by which the store finds the session. A caller cannot choose the hash of the key that it
/// presents, so the time of the lookup reveals nothing about the stored hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionKeyHash([u8; 32]);

impl SessionKeyHash {
    /// The hash of a key as a caller presents it.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self(*blake3::hash(key.as_bytes()).as_bytes())
    }

    /// The 32 bytes that the store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Refuses a policy that requires what recorded calls do not have.
pub fn check_rules(policy: &PolicyName, rules: &Rules) -> Result<(), Refusal> {
    let missing = rules.require.iter().find_map(|requirement| match requirement {
        Requirement::TeacherLogprobs if rules.sessions.teacher.is_none() => Some("teacher_logprobs"),
        Requirement::Values => Some("values"),
        Requirement::Tokens | Requirement::Logprobs | Requirement::PolicyVersion | Requirement::TeacherLogprobs => None,
    });
    missing.map_or(Ok(()), |name| {
        let mut detail = format!("policy `{policy}` requires `{name}`, which recorded calls do not have");
        if name == "teacher_logprobs" {
            detail.push_str("; a policy with the rule `sessions.teacher` can require it");
        }
        Err(Refusal::invalid("/models", detail))
    })
}

/// Removes the indexes that the pointers of violations begin with.
fn without_indexes(refusal: Refusal) -> Refusal {
    let Refusal::Invalid(violations) = refusal else { return refusal };
    let mut seen = BTreeSet::new();
    let mut kept = Vec::new();
    for mut violation in violations {
        let rest = violation.pointer.get(1..).and_then(|pointer| pointer.split_once('/'));
        violation.pointer = rest.map(|(_, rest)| format!("/{rest}")).unwrap_or_default();
        if seen.insert((violation.pointer.clone(), violation.detail.clone())) && kept.len() < VIOLATIONS_MAX {
            kept.push(violation);
        }
    }
    Refusal::Invalid(kept)
}
