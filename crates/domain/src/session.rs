//! Sessions: the calls of an agent to an inference engine are recorded, and become its rollouts when the session ends.
//!
//! They are beside the other stages: opening a session is an [`admission`](crate::admission), its end is an
//! [`ingest`](crate::ingest) of trajectories that [`assemble`](crate::assemble) makes of the calls. A session ends in the
//! transaction that ingests its rollouts, so its end is part of [`Ingest`](crate::ingest::Ingest).

pub mod notes;
pub mod paths;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use bytes::Bytes;
use forebay_wire::{Purpose, Requirement, Sampling, SessionAssembly};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use self::notes::SessionNotes;
use super::trajectory::VIOLATIONS_MAX;
use crate::{
    clock::Timestamp,
    formats::{call::CallColumns, canonical::ContentDigest},
    ids::{AdmissionId, CallPk, PolicyName, RolloutId, Run, SessionId, SessionPk, Version},
    ingest::{Ingested, new_rollout::NewRollout},
    pages::Cursor,
    quotas::Quotas,
    refusal::Refusal,
    rules::Rules,
    states::SessionState,
};

/// A session to open.
#[derive(Clone)]
pub struct NewSession {
    /// The id of the session, if it is new.
    pub session_id: SessionId,
    /// The hash of a new key.
    pub key: SessionKeyHash,
    /// Digest of what the producer asked for.
    pub content: ContentDigest,
    /// What it records.
    pub spec: Arc<SessionSpec>,
    /// A rollout without segments for each policy, in the order of their names. It is checked like the rollout at the
    /// end of the session.
    pub probes: Arc<Vec<NewRollout>>,
    /// The admission of each of these rollouts, if room is reserved.
    pub admissions: Vec<AdmissionId>,
    /// The most calls.
    pub max_calls: u32,
    /// Seconds without a call after which it expires.
    pub idle_s: u64,
    /// When it expires at the latest.
    pub expires_at: Timestamp,
    /// What bounds the open sessions of teams.
    pub quotas: Arc<Quotas>,
    /// The time of the request.
    pub now: Timestamp,
}

/// A session that was opened, now or before.
#[derive(Clone, Debug)]
pub struct OpenedSession {
    pub session_id: SessionId,
    /// When it expires at the latest.
    pub expires_at: Timestamp,
    /// Whether it was opened before.
    pub duplicate: bool,
    /// The attempt that the key belongs to.
    pub attempt: u32,
    /// The most attempts.
    pub max_attempts: u32,
}

/// A new attempt of a session: its agent is started again.
#[derive(Clone, Copy, Debug)]
pub struct ResumeSession {
    pub session_id: SessionId,
    /// The hash of the key of the new attempt.
    pub key: SessionKeyHash,
    /// The attempt that it must follow, if the caller says so.
    pub after: Option<u32>,
    /// The time of the request.
    pub now: Timestamp,
}

/// A session as stored.
#[derive(Clone, Debug)]
pub struct Session {
    /// Its row.
    pub session_pk: SessionPk,
    pub session_id: SessionId,
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    /// What it was opened with.
    pub spec: Arc<SessionSpec>,
    /// The policies whose rollouts it records, in the order of their names.
    pub policies: Vec<SessionPolicy>,
    /// The most calls.
    pub max_calls: u32,
    /// Recorded calls.
    pub calls: u32,
    /// Stored bytes of these calls.
    pub bytes: u64,
    /// The most segments that the calls can have.
    pub segments: u64,
    /// The most tokens that these segments can have.
    pub tokens: u64,
    /// Whether a call was refused because a bound was reached.
    pub is_full: bool,
    /// The attempt that is under way, or was the last one, from 1.
    pub attempt: u32,
    /// The most attempts.
    pub max_attempts: u32,
    /// What happened to its calls, also to those that were refused.
    pub notes: SessionNotes,
    /// When it was opened.
    pub opened_at: Timestamp,
    /// When its last recorded call ended.
    pub last_call_at: Option<Timestamp>,
    /// When it expires at the latest.
    pub expires_at: Timestamp,
    /// When it is parked or expires, unless a call is recorded; none once it has ended.
    pub due_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Digest of the request that ended it.
    pub end: Option<ContentDigest>,
    /// The answer to that request.
    pub outcome: Option<SessionOutcome>,
}

impl Session {
    /// The execution that its rollouts belong to; none if it was opened without one and has not ended.
    #[must_use]
    pub fn execution_id(&self) -> Option<&str> {
        let of_receipt = || self.outcome.as_ref()?.receipts.first().map(|receipt| receipt.execution_id.as_str());
        self.spec.execution_id.as_deref().or_else(of_receipt)
    }

    /// The number of versions after which the first of its rollouts is too old; none without a bound, and once it has
    /// ended.
    #[must_use]
    pub fn stale_after(&self) -> Option<i64> {
        let policies = self.policies.iter().filter(|_| self.state.is_live());
        policies.filter_map(|policy| policy.stale_after).min()
    }
}

/// A policy whose rollout a session records.
#[derive(Clone, Debug)]
pub struct SessionPolicy {
    pub policy: PolicyName,
    /// Run in which the session was opened.
    pub run: Run,
    pub current_run: Run,
    /// The version that was current when the session was opened.
    pub version: Version,
    pub current_version: Version,
    /// The number of versions after which its rollout is too old; 0 if it is too old now. None without a bound, and after a
    /// reset.
    pub stale_after: Option<i64>,
    /// The size of the group, which the session was opened with.
    pub group_size: u32,
    /// The admission that reserves room.
    pub admission_id: AdmissionId,
    /// Recorded calls.
    pub calls: u32,
    /// Ids that were sampled in these calls.
    pub sampled: u64,
    /// Special tokens in the texts of these calls.
    pub special_tokens: u64,
    /// Warnings about these calls, each once.
    pub warnings: Vec<String>,
}

/// What became of an ended session, as its row keeps it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionOutcome {
    /// The receipts of its trajectories, in the order of the policies' names.
    pub receipts: Vec<forebay_wire::Receipt>,
    /// What became of its calls.
    pub assembly: SessionAssembly,
}

/// Which sessions to list.
#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    /// Only sessions that record rollouts of this policy.
    pub policy: PolicyName,
    /// Only the session of this rollout in the current run.
    pub rollout_id: Option<RolloutId>,
    /// Only sessions in this state.
    pub state: Option<SessionState>,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries of a page.
    pub limit: u32,
}

#[derive(Clone, Debug)]
pub struct RecordCall {
    pub session_pk: SessionPk,
    /// The attempt that made it.
    pub attempt: u32,
    /// The policy whose rollout it belongs to.
    pub policy: PolicyName,
    /// What the row has besides its columns.
    pub head: CallHead,
    /// The earlier call that begins with the same ids as the prompt.
    pub parent: Option<u32>,
    /// The number of these ids.
    pub shared: usize,
    /// The ids of the whole prompt.
    pub prompt: usize,
    /// The number of sampled ids.
    pub sampled: usize,
    /// The oldest version that sampled some of them.
    pub oldest_version: Option<Version>,
    /// Special tokens in its texts.
    pub special_tokens: u64,
    /// What to tell the producer about it.
    pub warnings: Vec<String>,
    /// Packed columns.
    pub body: Vec<u8>,
    /// BLAKE3 hash of `body`.
    pub digest: [u8; 32],
    /// Packed text of the request.
    pub request: Vec<u8>,
    /// Packed text of the response.
    pub response: Vec<u8>,
    /// By how much the call can increase the segments of the session.
    pub segments: u64,
    /// By how much it can increase the tokens of the segments.
    pub tokens: u64,
    pub bounds: SessionBounds,
    /// The time of the record.
    pub now: Timestamp,
}

impl RecordCall {
    /// The number of stored bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.body.len() + self.response.len() + self.request.len()
    }
}

/// What a producer or an operator can read about a call.
#[derive(Clone, Debug)]
pub struct CallHead {
    /// Who made it, if the agent says so.
    pub agent: Option<String>,
    /// The API that the agent used.
    pub dialect: String,
    /// Name of the model that the agent asked for.
    pub model: String,
    /// Why the engine stopped.
    pub finish_reason: String,
    /// Whether the last id is a stop token.
    pub stopped_on_token: bool,
    /// Digest of the request's body.
    pub body_digest: [u8; 32],
    /// How many times the client says that it has repeated the request.
    pub retry_count: u32,
    /// When it began.
    pub started_at: Timestamp,
}

/// How much a session may hold.
#[derive(Clone, Copy, Debug)]
pub struct SessionBounds {
    /// Stored bytes.
    pub bytes_max: u64,
    /// Segments of a trajectory.
    pub segments_max: u64,
    /// Tokens of a trajectory.
    pub tokens_max: u64,
}

/// A call that was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// Its row.
    pub call_pk: CallPk,
    /// Its number in the session, from 1.
    pub seq: u32,
}

/// Which session is in use.
#[derive(Clone, Copy, Debug)]
pub struct KeepSession {
    pub session_pk: SessionPk,
    /// The attempt that is at work.
    pub attempt: u32,
    /// Service time.
    pub now: Timestamp,
}

/// Which answer to find.
#[derive(Clone, Debug)]
pub struct FindAnswer {
    pub session_pk: SessionPk,
    /// Only calls are found that this attempt used.
    pub attempt: u32,
    /// The API that the agent uses.
    pub dialect: String,
    /// Digest of the request's body.
    pub body_digest: [u8; 32],
    /// How many times the client says that it has repeated the request. Only a call with a smaller number is found.
    pub retry_count: u32,
    /// The calls of the session whose answers this process is sending.
    pub sending: Vec<CallPk>,
}

/// A call of a later attempt that may be one that an earlier attempt has made. It is answered with what was recorded then,
/// once.
#[derive(Clone, Debug)]
pub struct ReplayCall {
    pub session_pk: SessionPk,
    pub attempt: u32,
    /// The numbers of the recorded calls that are equal to it.
    pub equal: Vec<u32>,
    /// The numbers of the calls that it may continue.
    pub before: Vec<u32>,
    /// What the recorded call becomes, so that its client can repeat it.
    pub dialect: String,
    /// Digest of the request's body.
    pub body_digest: [u8; 32],
    /// How many times the client says that it has repeated the request.
    pub retry_count: u32,
    /// Service time.
    pub now: Timestamp,
}

/// What an agent or its sandbox stores to go on from. A session keeps only the last one.
#[derive(Clone, Debug)]
pub struct SaveState {
    pub session_id: SessionId,
    /// The attempt that stores it, if the caller says so.
    pub attempt: Option<u32>,
    /// The number of the last call before it; that of the last recorded call if absent.
    pub call: Option<u32>,
    pub content: Bytes,
    /// The time of the request.
    pub now: Timestamp,
}

/// What an agent or its sandbox has stored to go on from.
#[derive(Clone, Debug)]
pub struct SavedState {
    /// The number of the last call before it; 0 before the first one.
    pub seq: u32,
    /// The attempt that stored it.
    pub attempt: u32,
    pub content: Vec<u8>,
}

/// The most bytes of a saved state.
pub const SAVED_STATE_BYTES_MAX: usize = 1 << 20;

/// A recorded answer.
#[derive(Clone, Debug)]
pub struct StoredAnswer {
    pub call: RecordedCall,
    /// Packed text of the response.
    pub response: Vec<u8>,
}

/// What a recorded call keeps of its request and response.
#[derive(Clone, Debug)]
pub struct CallTexts {
    /// Its number in the session, from 1.
    pub seq: u32,
    /// Packed text of the part of the request that is kept.
    pub request: Vec<u8>,
    /// Packed text of the response.
    pub response: Vec<u8>,
}

/// A recorded call.
#[derive(Clone, Debug)]
pub struct StoredCall {
    /// Its number in the session, from 1.
    pub seq: u32,
    /// The policy whose rollout it belongs to.
    pub policy: PolicyName,
    /// What the row has besides its columns.
    pub head: CallHead,
    /// The earlier call that begins with the same ids as the prompt.
    pub parent: Option<u32>,
    /// The number of these ids.
    pub shared: usize,
    /// The ids of the whole prompt.
    pub prompt: usize,
    /// Whether the agent received the answer.
    pub delivery: Delivery,
    /// The attempt in which an engine answered it.
    pub attempt: u32,
    /// The last attempt that used it: in which an engine answered it, or that was answered with the record.
    pub used_in: u32,
    /// When it ended.
    pub ended_at: Timestamp,
    pub columns: CallColumns,
}

/// Whether an agent received the answer of a call, as far as it is known. Each is stored as its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// The answer is being sent, or the process that sent it was killed before it stored what became of the answer.
    Unknown = 0,
    /// The agent's connection took the answer.
    Delivered = 1,
    /// The connection ended before it took the answer, or the session ended before.
    Lost = 2,
}

impl Delivery {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Unknown, Self::Delivered, Self::Lost];

    /// The number that is stored.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The value that a number stands for.
    #[must_use]
    pub fn of_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|delivery| delivery.code() == code)
    }
}

/// The end of a session, in the transaction that ingests its rollouts.
#[derive(Clone, Debug)]
pub struct EndSession {
    pub session_pk: SessionPk,
    /// The number of its calls. If more were recorded meanwhile, the end is refused.
    pub calls: u32,
    /// The attempt whose calls are trained. If another one has begun meanwhile, the end is refused.
    pub attempt: u32,
    /// The policies with the runs in which the session was opened. If one was reset meanwhile, the end is refused.
    pub runs: Vec<(PolicyName, Run)>,
    /// The state after it.
    pub state: SessionState,
    /// Why it was aborted or expired.
    pub reason: Option<String>,
    pub request: ContentDigest,
    /// The number of its rollouts in the bundle, which follow those of the session before.
    pub rollouts: usize,
    /// What became of its calls.
    pub assembly: SessionAssembly,
    /// The admissions that end with it.
    pub admissions: Vec<AdmissionId>,
}

impl EndSession {
    /// The outcome to store, with the results of its rollouts.
    #[must_use]
    pub fn outcome(&self, ingested: &[Ingested]) -> SessionOutcome {
        SessionOutcome { receipts: ingested.iter().map(Ingested::receipt).collect(), assembly: self.assembly }
    }
}

/// The most keys of an attempt: enough for a producer that repeats its request, and a bounded number of rows.
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
    /// What its rollouts are for.
    #[serde(default, skip_serializing_if = "Purpose::is_default")]
    pub purpose: Purpose,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suite: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
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
    let missing = rules.required().find_map(|requirement| match requirement {
        Requirement::TeacherLogprobs if rules.sessions.teacher.is_none() => Some("teacher_logprobs"),
        Requirement::Values => Some("values"),
        Requirement::Advantages => Some("advantages"),
        Requirement::Tokens | Requirement::Logprobs | Requirement::PolicyVersion | Requirement::TeacherLogprobs => None,
    });
    if let Some((name, _)) = rules.columns.iter().find(|(_, rule)| rule.required) {
        let detail = format!("policy `{policy}` requires the column `{name}`, which recorded calls do not have");
        return Err(Refusal::invalid("/models", detail));
    }
    missing.map_or(Ok(()), |name| {
        let mut detail = format!("policy `{policy}` requires `{name}`, which recorded calls do not have");
        if name == "teacher_logprobs" {
            detail.push_str("; a policy with the rule `sessions.teacher` can require it");
        }
        Err(Refusal::invalid("/models", detail))
    })
}

/// Removes the indexes that the pointers of violations begin with.
pub fn without_indexes(refusal: Refusal) -> Refusal {
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
