//! What the buffer refuses to do, in the terms of the domain. How a refusal looks on the wire is `api::problem`'s.

use forebay_client::wire::{GroupState, Verdict, Violation};

use super::ids::{Epoch, PolicyName, Step, Version};
use super::judging::Question;
use crate::store::StoreError;

/// An answer other than success: a refusal of the domain, or a store that cannot answer.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// The request cannot be granted; nothing changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store failed; a retry of an idempotent request is safe.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a request cannot be granted. Nothing changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The request contradicts the contract or the policy's rules.
    #[error("the request is invalid")]
    Invalid(Vec<Violation>),
    /// No such policy, and it may not be created on demand.
    #[error("policy `{0}` does not exist")]
    UnknownPolicy(PolicyName),
    /// No such rollout or group in the current run of its policy.
    #[error("{what} `{id}` does not exist in the current run of policy `{policy}`")]
    UnknownInPolicy {
        /// `rollout` or `group`.
        what: &'static str,
        /// Identity in question.
        id: String,
        /// Where it was looked for.
        policy: PolicyName,
    },
    /// No such batch or key.
    #[error("{0} does not exist")]
    Unknown(&'static str),
    /// Same identity, different content: the first stays.
    #[error(
        "rollout `{rollout_id}` is already stored with different content, and the first stays; a new pass over the data \
         needs new `rollout_id`s and new `group_id`s"
    )]
    RolloutConflict {
        /// Identity in question.
        rollout_id: String,
        /// Place in the bundle.
        index: usize,
        /// Verdict of the stored one.
        verdict: Verdict,
    },
    /// Filters have to be asked about rollouts of the bundle, which no transaction does; see [`judging`](super::judging).
    #[error("rules or versions of the policy changed again and again while the bundle was judged by them")]
    Unjudged(Vec<Question>),
    /// The size of a group is fixed by its first rollout.
    #[error("group `{group_id}` has size {size}, fixed by its first rollout")]
    GroupSizeConflict {
        /// Group in question.
        group_id: String,
        /// Place in the bundle.
        index: usize,
        /// Size of the group.
        size: u32,
    },
    /// The policy holds as much untrained work as its backlog allows.
    #[error("policy `{0}` has as much untrained work as its backlog allows")]
    BacklogFull(PolicyName),
    /// One bundle holds more than the policy's whole backlog.
    #[error(
        "the bundle alone has more rollouts or bytes than the backlog of policy `{0}` may have: post its groups one by one"
    )]
    BundleOverBacklog(PolicyName),
    /// The lease expired, was revoked, or was never granted.
    #[error("{0}")]
    LeaseLost(LostLease),
    /// The batch is acked by another step.
    #[error("the batch is already acked by step {0}")]
    AlreadyAcked(Step),
    /// The step is at or below the last checkpoint.
    #[error("step {step} is settled: the last checkpoint is step {checkpoint}")]
    StepSettled {
        /// Step in question.
        step: Step,
        /// Last settled step.
        checkpoint: Step,
    },
    /// The step is above all that the lineage has acked.
    #[error("{}", unknown_step(*.step, *.last))]
    StepUnknown {
        /// Step in question.
        step: Step,
        /// Last acked or settled step; none since a resume from nothing.
        last: Option<Step>,
    },
    /// The caller speaks for a lineage that a resume has ended.
    #[error("epoch {named} is superseded: the current one is {current}")]
    Superseded {
        /// Epoch of the caller.
        named: Epoch,
        /// Epoch of the policy.
        current: Epoch,
    },
    /// A resume below what is settled or purged would skip data.
    #[error("{0}")]
    LineageGap(String),
    /// A version at or below the current one.
    #[error("version {0} is current: a new one is greater, or an identical repeat")]
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
    /// A stored payload does not match its digest; its group is quarantined.
    #[error("a stored payload is damaged; its group is quarantined")]
    Damaged,
    /// As many keys as the service keeps in memory are not revoked.
    #[error("as many keys are not revoked as may be, {0}: revoke one that is not used")]
    TooManyKeys(u32),
    /// As many policies as the service is configured for exist.
    #[error("as many policies exist as `limits.policies` of the configuration allows: {0}")]
    TooManyPolicies(u32),
    /// The first key would lock out who creates it.
    #[error(
        "the first key must have role `admin` and policies `*`: from then on every call needs a key, and none could \
         create the next one"
    )]
    FirstKey,
    /// What the caller was allowed to do when it came, it is not allowed any more.
    #[error("the key was revoked, or has expired, while the request waited")]
    PermissionEnded,
    /// As many requests as may wait for this already.
    #[error("as many requests wait for {awaited} as may at once: {max}")]
    TooManyWaiters {
        /// A batch or a version.
        awaited: &'static str,
        /// How many may wait.
        max: usize,
    },
    /// As many requests of the caller's key as may wait for this already.
    #[error("as many requests wait for {awaited} with this key as may at once with one key: {max}")]
    TooManyWaitersOfKey {
        /// A batch or a version.
        awaited: &'static str,
        /// How many may wait.
        max: usize,
    },
}

fn unknown_step(step: Step, last: Option<Step>) -> String {
    let last = match last {
        Some(last) => format!("the last acked step is {last}"),
        None => "no step was acked since the policy was resumed from nothing".to_owned(),
    };
    format!("step {step} is not known: {last}; if the trainer's step is right, repeat the call with `\"force\": true`")
}

/// Why a lease is lost. Says nothing about the token of the lease that is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostLease {
    /// Its time was over before the call.
    #[error("the lease has expired: the batch goes out again, and what was computed from it must be discarded")]
    Expired,
    /// The batch is leased, with another token.
    #[error(
        "the batch is leased with another token: it was leased again since, or the token was never that of its lease"
    )]
    OtherToken,
    /// The batch is not leased, and the policy was resumed since it was.
    #[error("a resume has ended the lease: epoch {0} has begun since the batch was leased")]
    Resumed(Epoch),
    /// The batch is not leased, because the lease expired or its holder ended it.
    #[error("the lease has expired or was ended by its holder: the batch is not leased")]
    Ended,
}

impl Refusal {
    /// A single violation.
    #[must_use]
    pub fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Invalid(vec![Violation { pointer: pointer.into(), detail: detail.into() }])
    }
}
