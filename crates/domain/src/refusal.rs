//! Refusals of the buffer, in the terms of the domain. `api::problem` maps them to HTTP.

use forebay_wire::Violation;

use super::{
    blobs::{UNUSED_BYTES_MAX, UNUSED_MAX},
    evaluation::EvaluationRequest,
    ids::{Epoch, PolicyName, Step, Version},
    states::{GroupState, SessionState, Verdict},
};
use crate::admission::room::NoRoom;

/// Why a request cannot be granted. Nothing changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The request contradicts the contract or the policy's rules.
    #[error("the request is invalid")]
    Invalid(Vec<Violation>),
    /// The segments that the turns of a trajectory would be assembled into are more than the budget has left.
    #[error("the byte budget is used up and nothing was changed; retry after a pause")]
    NoMemory,
    /// The policy does not exist, and it may not be created on demand.
    #[error("policy `{0}` does not exist")]
    UnknownPolicy(PolicyName),
    /// The rollout or group does not exist in the current run of its policy.
    #[error("{what} `{id}` does not exist in the current run of policy `{policy}`")]
    UnknownInPolicy {
        /// `rollout` or `group`.
        what: &'static str,
        /// The id that was named.
        id: String,
        /// The policy that was searched.
        policy: PolicyName,
    },
    /// Nothing that the caller may see has the id.
    #[error(
        "`{0}` names no rollout, group, batch or session of a current run that you may see: it was never posted here, or it was \
         forgotten `retention.tombstone_s` after its payload was deleted; which of these cannot be told"
    )]
    UnknownId(String),
    /// The batch or key does not exist.
    #[error("{0} does not exist")]
    Unknown(&'static str),
    /// The id exists with different content, and the first rollout stays.
    #[error(
        "rollout `{rollout_id}` is already stored with different content, and the first stays; a new pass over the data \
         needs new `rollout_id`s and new `group_id`s"
    )]
    RolloutConflict {
        /// The id that was named.
        rollout_id: String,
        /// The index of the rollout in the bundle.
        index: usize,
        /// The verdict of the stored rollout.
        verdict: Verdict,
    },
    /// The scorer has given the score already, with another value.
    #[error(
        "scorer `{scorer}` has given rollout `{rollout_id}` the score `{name}` already, as {value}: send `\"replace\": true` to \
         change it, or name another `scorer`"
    )]
    ScoreConflict {
        rollout_id: String,
        /// The index of the score in the request.
        index: usize,
        name: String,
        scorer: String,
        /// What is stored.
        value: f64,
    },
    /// No rules make work of a score with this name, and none is left of earlier ones.
    #[error("policy `{policy}` has no work for the score `{name}`: `scores.work` of its rules {}", names(known))]
    UnknownWork { name: String, policy: PolicyName, known: Vec<String> },
    /// The filters must be evaluated on rollouts whose scores kept changing.
    #[error("the scores of the rollouts, or the version of their policy, kept changing while filters were evaluated")]
    ScoresChanged,
    /// The filters must be evaluated on rollouts of the bundle, which no transaction does; see
    /// [`evaluation`](super::evaluation).
    #[error("the rules or the version of the policy kept changing while the filters of the bundle were evaluated")]
    NotEvaluated(Vec<EvaluationRequest>),
    /// The size of a group is fixed by its first rollout.
    #[error("group `{group_id}` has size {size}, fixed by its first rollout")]
    GroupSizeConflict {
        group_id: String,
        /// The index of the rollout in the bundle.
        index: usize,
        /// The size of the group.
        size: u32,
    },
    /// The policy holds as much untrained work as its backlog allows.
    #[error("policy `{0}` has {most}", most = if .0.is_evaluations() {
        "as many rollouts that evaluate it under way as `admissions.eval` allows"
    } else {
        "as much untrained work as its backlog allows"
    })]
    BacklogFull(PolicyName),
    /// One bundle holds more than the policy's whole backlog.
    #[error(
        "the bundle alone has more rollouts or bytes than the backlog of policy `{0}` may have: post its groups one by one"
    )]
    BundleOverBacklog(PolicyName),
    /// The lease expired, was revoked, or was never granted.
    #[error("{0}")]
    LeaseLost(LostLease),
    /// Another step has acked the batch.
    #[error("the batch is already acked by step {0}")]
    AlreadyAcked(Step),
    /// The step is at or below the last checkpoint.
    #[error(
        "step {step} is settled: the last checkpoint is step {checkpoint}. Number steps on from the saved ones, or begin a \
         new run with POST /policies/{{policy}}/reset"
    )]
    StepSettled {
        /// The step of the request.
        step: Step,
        /// The last settled step.
        checkpoint: Step,
    },
    /// The step is above every step that the lineage has acked.
    #[error("{}", unknown_step(*.step, *.last))]
    StepUnknown {
        /// The step of the request.
        step: Step,
        /// The last acked or settled step; none since a resume from nothing.
        last: Option<Step>,
    },
    /// The caller's epoch is older than the policy's: a resume, reset or restore has begun another.
    #[error("epoch {named} is superseded: the current one is {current}")]
    Superseded {
        /// Epoch of the caller.
        named: Epoch,
        /// Epoch of the policy.
        current: Epoch,
    },
    /// The resume is below a settled or purged step, so data would be skipped.
    #[error("{0}")]
    LineageGap(String),
    /// The version is not above the current one.
    #[error("version {0} is current: publish a greater version, or repeat the current one unchanged")]
    VersionConflict(Version),
    /// The group is not in a state that the call can change.
    #[error("the group is {0:?}")]
    GroupDecided(GroupState),
    /// The batch is not in a state that the call can change.
    #[error("the batch is {0}")]
    BatchState(&'static str),
    /// The payloads are purged.
    #[error("the payloads of this batch are purged")]
    Purged,
    /// The payload of one rollout is not stored.
    #[error(
        "the payload of rollout `{rollout_id}` is not stored: how long such payloads are kept is set by {rule} of its policy"
    )]
    ContentPurged {
        /// The id that was named.
        rollout_id: String,
        /// The settings of the policy.
        rule: &'static str,
    },
    /// The payload or the row of one rollout does not match its digest or seal. Nothing was changed.
    #[error("the stored data of rollout `{rollout_id}` is damaged; its group is quarantined when a trainer reads it")]
    DamagedContent {
        /// The id that was named.
        rollout_id: String,
    },
    /// A stored payload does not match its digest; its group is quarantined.
    #[error("a stored payload is damaged; its group is quarantined")]
    Damaged,
    /// The maximum number of keys is not revoked. The service keeps them in memory.
    #[error("{0} keys are not revoked, which is the most that the service allows: revoke an unused key")]
    TooManyKeys(u32),
    /// The configured maximum number of policies exists.
    #[error("{0} policies exist, which is the most that `limits.policies` of the configuration allows")]
    TooManyPolicies(u32),
    /// A team has as many policies as its quota allows.
    #[error(
        "{max} policies match `{policies}`, which is the most that a quota of this service allows: use one of them, or \
         ask the operator of the service"
    )]
    PoliciesOverQuota {
        /// The policies of the team.
        policies: String,
        max: u32,
    },
    /// The backlogs of a team's policies would be larger than its quota.
    #[error(
        "policies that match `{policies}` may have {max} bytes of backlog together by a quota of this service, and the \
         others have {others}: `backlog.max_bytes` may be at most {rest} here", rest = .max.saturating_sub(*.others)
    )]
    BacklogOverQuota {
        /// The policies of the team.
        policies: String,
        max: u64,
        /// What the other policies have.
        others: u64,
    },
    /// The first key would lock out the caller that creates it.
    #[error(
        "the first key must have role `admin` and policies `*`: from then on every call needs a key, and no \
         other key could create the next one"
    )]
    FirstKey,
    /// The session has ended, or is being finished, so nothing more is recorded.
    #[error("the session is {0}")]
    SessionEnded(SessionState),
    /// Another attempt of the session has begun, so what belongs to an earlier one changes nothing.
    #[error("attempt {attempt} of the session has begun, so attempt {of} is over")]
    AttemptSuperseded {
        attempt: u32,
        /// The attempt that the request belongs to.
        of: u32,
    },
    /// The session has had as many attempts as it may have.
    #[error(
        "the session has had {0} attempts, which is the most that it may have (the rule `sessions.max_attempts` at its          opening): finish or abort it"
    )]
    NoAttemptsLeft(u32),
    /// A policy of the session was reset since the session was opened.
    #[error("policy `{0}` was reset since the session was opened, so its rollouts belong to no run")]
    SessionReset(PolicyName),
    /// Calls were recorded while the session was assembled.
    #[error("calls of the session kept being recorded while it was assembled")]
    SessionChanged,
    /// A session with the same rollout was opened by another request.
    #[error("a session of rollout `{0}` was opened by a request with other content")]
    SessionConflict(String),
    /// The session was ended by another request.
    #[error("the session is {0}, by a request with other content")]
    EndConflict(SessionState),
    /// No call of the session is in a segment, and its answers are not all empty.
    #[error(
        "the session has no calls whose answers arrived at the agent: check that the agent uses the session's address, or end the session \
         with status `failed` or `aborted`"
    )]
    NoTurns,
    /// The teacher of a policy did not score the segments of a session.
    #[error("the teacher `{teacher}` of policy `{policy}` cannot score segments now, and nothing was changed: {why}")]
    TeacherFailed {
        policy: PolicyName,
        /// The name of the upstream.
        teacher: String,
        why: String,
    },
    /// A rule gives the policy no room for another rollout.
    #[error("policy `{0}` has no room for another rollout: {reason}", reason = .1.reason())]
    NoRoom(PolicyName, NoRoom),
    /// The session has as much as it may hold.
    #[error("the session has the most {what} that it may have ({bound})", what = .0, bound = bound_of(.0))]
    SessionFull(&'static str),
    /// The session has as many calls in flight as it may have at once.
    #[error(
        "the session has {0} calls in flight, which is the most that it may have at once (`sessions.max_in_flight`)"
    )]
    SessionBusy(u32),
    /// The session has the maximum number of keys.
    #[error("the session has {0} keys, which is the most that a session may have")]
    TooManySessionKeys(u32),
    /// No session has the key.
    #[error("no session has this key")]
    UnknownSessionKey,
    /// The session stands for no model with this name.
    #[error("the session has no model `{0}`")]
    UnknownModel(String),
    /// Uploads that no rollout has named are as many as there may be.
    #[error(
        "there is no room for more uploads that no rollout has named: all of them may have {UNUSED_BYTES_MAX} bytes and be \
         {UNUSED_MAX}; post the rollouts that name them, those that stay without one are deleted a day after they came"
    )]
    TooManyUploads,
    /// The caller's permission ended while the request waited.
    #[error("the key was revoked, or has expired, while the request waited")]
    PermissionEnded,
    /// The maximum number of requests already waits.
    #[error("{max} requests already wait for {awaited}, which is the most that may wait at once")]
    TooManyWaiters {
        /// `a batch` or `a version`.
        awaited: &'static str,
        /// The maximum.
        max: usize,
    },
    /// The maximum number of requests with the caller's key already waits.
    #[error("{max} requests with this key already wait for {awaited}, which is the most for one key")]
    TooManyWaitersOfKey {
        /// `a batch` or `a version`.
        awaited: &'static str,
        /// The maximum.
        max: usize,
    },
}

/// The setting that bounds what a session holds.
fn bound_of(what: &str) -> &'static str {
    match what {
        "calls" => "`max_calls`, or fewer in a large group whose turns are compared",
        "bytes" => "`sessions.max_session_bytes`",
        "segments" => "`limits.trajectory_segments`",
        _ => "`limits.trajectory_tokens`",
    }
}

fn names(known: &[String]) -> String {
    if known.is_empty() { "is empty".to_owned() } else { format!("has {}", known.join(", ")) }
}

fn unknown_step(step: Step, last: Option<Step>) -> String {
    let last = match last {
        Some(last) => format!("the last acked step is {last}"),
        None => "no step was acked since the policy was resumed from nothing".to_owned(),
    };
    format!("step {step} is not known: {last}; if the trainer's step is right, repeat the call with `\"force\": true`")
}

/// Why a lease is lost. The text must not reveal anything about the token of the current lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostLease {
    /// It expired before the call.
    #[error("the lease has expired: the batch will be delivered again, so discard what was computed from it")]
    Expired,
    /// The batch is leased with another token.
    #[error("the batch is leased with another token: it was leased again, or this token was never that of its lease")]
    OtherToken,
    /// The batch is not leased, and the policy was resumed after it was.
    #[error("a resume has ended the lease: epoch {0} has begun since the batch was leased")]
    Resumed(Epoch),
    /// The batch is not leased, because the lease expired or its holder ended it.
    #[error("the lease has expired or was ended by its holder: the batch is not leased")]
    Ended,
    /// No work has this lease.
    #[error(
        "the lease of this work has ended, because it expired, was used, or the score came from elsewhere: nothing was stored, \
         and work that still lacks the score is given to the next scorer that asks"
    )]
    OfWork,
}

impl Refusal {
    /// A single violation.
    #[must_use]
    pub fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Invalid(vec![Violation { pointer: pointer.into(), detail: detail.into() }])
    }
}
