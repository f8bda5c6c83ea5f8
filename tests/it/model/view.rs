//! What can be observed of a buffer, in the model's own types.
//!
//! This is separate from both sides, so that neither defines what is compared. The reference and the real buffer each
//! answer a [`Call`] with an [`Answer`] and return a [`Ledger`], and `==` finds the differences. Batches and leases are
//! numbered in the order of their creation, because their ids are random.

mod sessions;

use std::{collections::BTreeMap, sync::Arc};

use forebay_wire::{
    BatchOrder, BatchState, GroupState, LossWeighting, Retries, RolloutState, SessionState, Status, Verdict,
    VersionSpan,
};

pub(crate) use self::sessions::{
    Aborting, AgentCall, Ended, Ending, Finishing, InFlightNumber, KeyPick, Opening, Recorded, SessionNumber,
    SessionPolicyView, SessionView, TurnView,
};

/// A policy, by its index among the policies of a run.
pub(crate) type PolicyNumber = usize;

/// A batch, by its index among all batches that were cut.
pub(crate) type BatchNumber = usize;

/// A lease, by its index among all leases that were granted.
pub(crate) type LeaseNumber = usize;

/// The id of a group: chosen by its producer, or that of a rollout without a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GroupName {
    Named(usize),
    Alone(usize),
}

/// The environment of a group; the first of them is that of groups without a label.
pub(crate) type Label = usize;

/// The labels of environments.
pub(crate) const LABELS: [&str; 3] = ["", "x", "y"];

/// The environment of a group follows from its name.
pub(crate) fn label(group: GroupName) -> Label {
    match group {
        GroupName::Named(number) => number % LABELS.len(),
        GroupName::Alone(_) => 0,
    }
}

/// Rules of a policy, as far as the model covers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) size: u32,
    pub(crate) min_size: u32,
    pub(crate) timeout_s: i64,
    /// A dropped rollout uses up its place.
    pub(crate) shrink: bool,
    /// Aborted rollouts are dropped, truncated ones masked, groups with equal rewards discarded.
    pub(crate) filters: bool,
    /// Seconds that a rollout may wait for the scores [`SCORES`]; none if it needs none.
    pub(crate) scored_s: Option<i64>,
    pub(crate) batch_groups: usize,
    pub(crate) max_tokens: Option<u64>,
    pub(crate) order: BatchOrder,
    /// Weight and percents of the minimum share, of environments by their labels.
    pub(crate) environments: BTreeMap<Label, (i64, i64)>,
    pub(crate) ttl_s: i64,
    pub(crate) max_deliveries: u32,
    pub(crate) max_resumes: u32,
    pub(crate) staleness: Option<i64>,
    /// Seconds for which batches wait for rollouts that the next version would make too old; none if groups are dropped.
    pub(crate) wait_s: Option<i64>,
    /// Number of rollouts at which no further group is opened.
    pub(crate) backlog: Option<usize>,
    /// An ack settles the batch, because the trainer never saves.
    pub(crate) settled_by_ack: bool,
    /// Whether repeated calls of sessions are trained.
    pub(crate) retries: Retries,
    /// The most attempts of a session.
    pub(crate) max_attempts: u32,
    pub(crate) weighting: LossWeighting,
    pub(crate) trained_s: i64,
    pub(crate) settled_s: i64,
    pub(crate) dropped_s: i64,
    pub(crate) tombstone_s: i64,
}

/// Name of the filter that drops aborted rollouts.
pub(crate) const DROPS_ABORTED: &str = "infra-abort";
/// Name of the filter that masks truncated rollouts.
pub(crate) const MASKS_TRUNCATED: &str = "cut-short";
/// Name of the filter that discards groups whose rewards are all the same.
pub(crate) const DISCARDS_EQUAL: &str = "zero-variance";

/// Name of the filter that drops rollouts by the first of [`SCORES`], where these are needed.
pub(crate) const DROPS_POOR: &str = "poor";
/// The scores that rules need.
pub(crate) const SCORES: [&str; 2] = ["judge", "tests"];

/// The content of a rollout, without its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Body {
    pub(crate) status: Status,
    /// In halves, so that the reward compares exactly.
    pub(crate) reward: Option<u8>,
    /// The version that the rollout declares.
    pub(crate) version: Option<i64>,
    pub(crate) segments: Arc<[Segment]>,
    pub(crate) execution: Option<usize>,
}

/// A segment of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) kind: Option<String>,
    pub(crate) tokens: Vec<i32>,
    pub(crate) mask: Vec<u8>,
    /// In multiples of -1/128, which floats hold exactly.
    pub(crate) logprobs: Option<Vec<i64>>,
    pub(crate) versions: Option<Vec<VersionSpan>>,
}

/// A trajectory as it is posted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Post {
    pub(crate) policy: PolicyNumber,
    pub(crate) rollout: usize,
    pub(crate) group: Option<usize>,
    pub(crate) group_size: Option<u32>,
    pub(crate) body: Body,
}

impl Post {
    pub(crate) fn group(&self) -> GroupName {
        self.group.map_or(GroupName::Alone(self.rollout), GroupName::Named)
    }
}

/// A score of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Score {
    pub(crate) policy: PolicyNumber,
    pub(crate) rollout: usize,
    /// Which of [`SCORES`].
    pub(crate) name: usize,
    /// In halves; none if the holder of the lease failed.
    pub(crate) value: Option<u8>,
    pub(crate) replace: bool,
    pub(crate) lease: ScoreLease,
}

/// The lease of work that a score settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoreLease {
    /// It comes without one.
    None,
    Granted(usize),
    NeverGranted,
}

/// The one of [`SCORES`] that is leased for whole groups.
pub(crate) const PER_GROUP: usize = 1;

/// How often work is leased before it is exhausted.
pub(crate) const ATTEMPTS_MAX: u32 = 2;

/// Seconds of a lease of work.
pub(crate) const WORK_TTL_S: i64 = 30;

/// Leased work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkView {
    /// The number of its lease among all leases of work.
    pub(crate) lease: usize,
    pub(crate) attempt: u32,
    /// Which of [`SCORES`].
    pub(crate) name: usize,
    pub(crate) group: GroupName,
    /// Rollouts, each with the number of scores that it lacks.
    pub(crate) rollouts: Vec<(usize, usize)>,
}

/// The identity of a caller under a lease. `None` stands for an id that was never created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) batch: Option<BatchNumber>,
    pub(crate) lease: Option<LeaseNumber>,
    pub(crate) epoch: Option<i64>,
}

/// A call of the buffer, or an event that affects it.
///
/// Further features become variants here: staleness `mask`, admissions. Keys belong to a layer above the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Post(Vec<Post>),
    /// All or none.
    Score(Vec<Score>),
    LeaseWork {
        policy: PolicyNumber,
        /// Which of [`SCORES`].
        names: Vec<usize>,
        max: usize,
        request: Option<usize>,
    },
    ExtendWork {
        policy: PolicyNumber,
        leases: Vec<usize>,
    },
    RetryWork {
        policy: PolicyNumber,
        name: usize,
    },
    Close {
        policy: PolicyNumber,
        group: GroupName,
    },
    Discard {
        policy: PolicyNumber,
        group: GroupName,
    },
    Claim {
        policy: PolicyNumber,
        consumer: usize,
        request: Option<usize>,
        partial: bool,
        epoch: Option<i64>,
    },
    Extend {
        holder: Holder,
        ttl_s: i64,
    },
    Ack {
        holder: Holder,
        step: i64,
    },
    Nack {
        holder: Holder,
        groups: Vec<GroupName>,
    },
    Readmit {
        batch: Option<BatchNumber>,
    },
    Publish {
        policy: PolicyNumber,
        version: i64,
        step: Option<i64>,
        uri: Option<usize>,
        epoch: Option<i64>,
    },
    Checkpoint {
        policy: PolicyNumber,
        step: i64,
        force: bool,
        epoch: Option<i64>,
    },
    Resume {
        policy: PolicyNumber,
        step: Option<i64>,
        force: bool,
        epoch: Option<i64>,
    },
    Reset {
        policy: PolicyNumber,
        epoch: Option<i64>,
    },
    PutPolicy {
        policy: PolicyNumber,
        rules: Rules,
    },
    Advance {
        seconds: i64,
    },
    /// The clock of the database, or of the machine whose process owns the database, steps; time itself does not.
    Step {
        hours: i64,
    },
    Sweep,
    Restart,
    OpenSession(Opening),
    /// The agent of a session is started again, after this attempt if one is named.
    ResumeSession {
        session: Option<SessionNumber>,
        after: Option<u32>,
    },
    /// A call of an agent, from its beginning to the delivery of its answer.
    Record {
        session: Option<SessionNumber>,
        key: KeyPick,
        sent: AgentCall,
    },
    /// A call of an agent begins, and is in flight until it ends.
    Begin {
        session: Option<SessionNumber>,
        key: KeyPick,
    },
    /// The engine answered a call in flight, or the agent is gone.
    Answered {
        call: InFlightNumber,
        sent: Option<AgentCall>,
    },
    Finish(Vec<Finishing>),
    Abort(Aborting),
    Turns {
        session: Option<SessionNumber>,
    },
}

/// The reason in every manual discard.
pub(crate) const DISCARD_REASON: &str = "not wanted";
/// The reason in every nack.
pub(crate) const NACK_REASON: &str = "bad data";

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    Receipts(Vec<Receipt>),
    /// Whether each score counts, and what became of its rollout.
    Scored(Vec<(bool, Receipt)>),
    Work {
        held: bool,
        items: Vec<WorkView>,
    },
    /// Whether each lease is held.
    Extended(Vec<bool>),
    Retried(u64),
    Group(GroupView),
    NoBatch,
    Leased {
        held: bool,
        lease: LeaseNumber,
        batch: BatchView,
        rows: Vec<Row>,
    },
    Batch(BatchView),
    Published {
        new: bool,
    },
    Settled {
        last: i64,
        batches: u64,
    },
    Resumed {
        epoch: i64,
        version: i64,
        returned: u64,
        quarantined: u64,
        undeliverable: u64,
    },
    Reset {
        run: i64,
        epoch: i64,
        discarded: u64,
    },
    Opened {
        session: SessionNumber,
        duplicate: bool,
        expires_at: i64,
    },
    Attempt {
        attempt: u32,
    },
    Begun {
        call: InFlightNumber,
    },
    /// What became of a call, and whether it was cancelled before its end.
    Call {
        recorded: Result<Recorded, Refused>,
        cancelled: bool,
    },
    Ended(Vec<Ended>),
    Turns(Vec<TurnView>),
    Refused(Refused),
}

/// Why a call is refused. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Invalid(String),
    Unknown,
    RolloutConflict {
        index: usize,
        verdict: Verdict,
    },
    GroupSizeConflict {
        index: usize,
        size: u32,
    },
    ScoreConflict,
    BacklogFull,
    LeaseLost,
    AlreadyAcked(i64),
    StepSettled {
        checkpoint: i64,
    },
    StepUnknown {
        last: Option<i64>,
    },
    Superseded,
    LineageGap,
    VersionConflict(i64),
    GroupDecided(GroupState),
    BatchState,
    SessionEnded(SessionState),
    EndConflict(SessionState),
    SessionConflict,
    AttemptOver,
    NoAttemptsLeft,
    SessionReset(String),
    SessionFull(&'static str),
    SessionBusy,
    UnknownSessionKey,
    UnknownModel,
    NoTurns,
    NoRoom,
    /// A refusal that the model does not expect.
    Other(String),
}

/// The receipt of one rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<String>,
    pub(crate) duplicate: bool,
    /// How many scores it lacks.
    pub(crate) scoring: usize,
    pub(crate) group: GroupName,
    pub(crate) state: GroupState,
    pub(crate) arrived: u32,
    pub(crate) size: u32,
}

/// A row of the samples of a batch; fractions in millionths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) group: GroupName,
    pub(crate) rollout: usize,
    pub(crate) segment: usize,
    pub(crate) verdict: Verdict,
    pub(crate) content: Segment,
    pub(crate) reward: Option<i64>,
    pub(crate) advantage: i64,
    pub(crate) loss_weight: i64,
    pub(crate) policy_version: i64,
}

/// A batch as its descriptor shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchView {
    pub(crate) batch: BatchNumber,
    pub(crate) policy: PolicyNumber,
    pub(crate) state: BatchState,
    pub(crate) reason: Option<String>,
    pub(crate) consumer: usize,
    pub(crate) epoch: i64,
    pub(crate) expires_at: Option<i64>,
    pub(crate) attempt: u32,
    pub(crate) step: Option<i64>,
    pub(crate) groups: usize,
    pub(crate) rollouts: usize,
    pub(crate) samples: usize,
    pub(crate) tokens: u64,
    pub(crate) version_current: i64,
    pub(crate) trained_versions: Option<(i64, i64)>,
    pub(crate) created_at: i64,
}

/// A group as the ledger shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupView {
    pub(crate) run: i64,
    pub(crate) name: GroupName,
    pub(crate) state: GroupState,
    pub(crate) reason: Option<String>,
    pub(crate) size: u32,
    pub(crate) min_size: u32,
    pub(crate) kept: u32,
    pub(crate) masked: u32,
    pub(crate) dropped: u32,
    pub(crate) scoring: u32,
    pub(crate) late: u32,
    pub(crate) batch: Option<BatchNumber>,
    pub(crate) opened_at: i64,
    pub(crate) deadline_at: Option<i64>,
    pub(crate) decided_at: Option<i64>,
}

/// A rollout's story.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoryView {
    pub(crate) run: i64,
    pub(crate) rollout: usize,
    /// None if the service made the id.
    pub(crate) execution: Option<usize>,
    pub(crate) group: GroupName,
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<String>,
    pub(crate) state: RolloutState,
    pub(crate) group_reason: Option<String>,
    pub(crate) batches: Vec<BatchNumber>,
    pub(crate) step: Option<i64>,
    pub(crate) advantage: Option<i64>,
    pub(crate) policy_version: i64,
    pub(crate) version_assumed: bool,
    pub(crate) segments: usize,
    pub(crate) tokens: u64,
    pub(crate) received_at: i64,
    pub(crate) decided_at: Option<i64>,
    pub(crate) batched_at: Option<i64>,
    pub(crate) acked_at: Option<i64>,
    pub(crate) purged_at: Option<i64>,
}

/// A policy and all that its buffer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PolicyView {
    pub(crate) run: i64,
    pub(crate) epoch: i64,
    pub(crate) version: i64,
    pub(crate) version_step: Option<i64>,
    pub(crate) version_uri: Option<usize>,
    pub(crate) checkpoint_step: Option<i64>,
    /// Tallies that are not 0, by their names in `/stats`.
    pub(crate) tallies: BTreeMap<String, i64>,
    pub(crate) stories: Vec<StoryView>,
    /// Runs and names of the rollouts of each execution.
    pub(crate) executions: Vec<Vec<(i64, usize)>>,
    pub(crate) groups: BTreeMap<(i64, GroupName), GroupView>,
    pub(crate) batches: Vec<BatchView>,
    /// Sessions that record rollouts of the policy.
    pub(crate) sessions: Vec<SessionView>,
}

/// Everything that the ledger shows.
pub(crate) type Ledger = Vec<PolicyView>;

/// The name of a state on the wire.
pub(crate) fn name_of(state: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(state).expect("states are texts");
    value.as_str().expect("states are texts").to_owned()
}

/// A fraction in millionths, so that it compares by `==`.
pub(crate) fn millionths(fraction: f64) -> i64 {
    (fraction * 1e6).round() as i64
}
