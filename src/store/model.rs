//! What crosses the store's trait: requests and rows in the terms of the domain.

use std::{collections::BTreeMap, sync::Arc};

use forebay_client::wire::{BatchState, GroupState, RolloutState, Verdict};

use crate::{
    buffer::{
        admission::{Backlog, Room},
        doubt::Warning,
        finalize::{Cause, GroupOutcome, GroupSnapshot},
        ids::{
            AdmissionId, BatchId, BatchPk, ConsumerName, Epoch, GroupId, GroupPk, LeaseToken, PolicyName, PolicyPk,
            RequestId, RolloutId, RolloutPk, Run, Step, Version,
        },
        ingest::{GroupFill, NewRollout, RolloutDecision},
        judging::Question,
        payload::Payload,
        refusal::Refusal,
        rules::Rules,
        seal::SEAL_BYTES,
        staleness::TrainedSpan,
        weights::BatchWeights,
    },
    clock::Timestamp,
};

/// Decisions that are taken under the lock of a group: pure functions of what they are given.
pub trait Decide: Send + Sync + 'static {
    /// Whether the policy takes another group, beside its backlog and what the bundle at hand has added to that so far.
    fn admits(&self, policy: &PolicyName, rules: &Rules, backlog: Backlog, bundle: Backlog) -> Result<(), Refusal>;
    /// Whether the policy's rules accept the rollout at all.
    fn check(&self, rules: &Rules, new: &NewRollout, room: Room) -> Result<(), Refusal>;
    /// What a rollout is yet to be judged by, which no transaction does.
    fn question(&self, rules: &Arc<Rules>, new: &NewRollout, room: Room, current: Version) -> Option<Question>;
    /// The verdict on a rollout that is judged.
    fn rollout(
        &self,
        rules: &Rules,
        new: &NewRollout,
        room: Room,
        current: Version,
        group: GroupFill,
    ) -> Option<RolloutDecision>;
    /// What its producer should know about a rollout that is accepted.
    fn warnings(&self, new: &NewRollout, decision: &RolloutDecision, current: Version) -> Vec<Warning>;
    /// What becomes of a group.
    fn group(&self, rules: &Rules, group: &GroupSnapshot, cause: Cause, now: Timestamp) -> GroupOutcome;
}

/// Asks for room.
#[derive(Clone, Debug)]
pub struct Admit {
    /// Policy.
    pub policy: PolicyName,
    /// Rollouts.
    pub rollouts: u32,
    /// Identity if room is reserved.
    pub admission_id: AdmissionId,
    /// When it was asked.
    pub now: Timestamp,
}

/// Bundles to ingest in one transaction, each all or nothing on its own.
#[derive(Clone)]
pub struct Ingest {
    /// Rollouts posted together.
    pub bundles: Arc<Vec<Vec<NewRollout>>>,
    /// The decisions.
    pub decide: Arc<dyn Decide>,
    /// When they arrived.
    pub now: Timestamp,
}

impl Ingest {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bundles.iter().flatten().map(|new| new.payload.body.len()).sum()
    }
}

/// What became of one bundle.
pub type BundleOutcome = Result<Vec<Ingested>, Refusal>;

/// What became of one rollout.
#[derive(Clone, Debug)]
pub struct Ingested {
    /// Its policy.
    pub policy: PolicyName,
    /// Its identity.
    pub rollout_id: RolloutId,
    /// Its group.
    pub group_id: GroupId,
    /// The verdict, now or when it was first posted.
    pub decision: RolloutDecision,
    /// What its producer should know.
    pub warnings: Vec<Warning>,
    /// It was already stored.
    pub duplicate: bool,
    /// The group after the post.
    pub fill: GroupFill,
    /// This post decided the group.
    pub decided: Option<GroupState>,
    /// Why this post discarded the group.
    pub discarded: Option<String>,
    /// Group filters that could not be evaluated in this decision.
    pub failed_group_filters: Vec<String>,
}

/// A policy's row.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Key of the row.
    pub policy_pk: PolicyPk,
    /// Name.
    pub name: PolicyName,
    /// Rules of groups opened from now on, and of what happens next to all of them.
    pub rules: Arc<Rules>,
    /// Key of the row of the rules.
    pub rules_pk: i64,
    /// Fresh starts.
    pub run: Run,
    /// Lineage of the weights.
    pub epoch: Epoch,
    /// Current weight version.
    pub version: Version,
    /// Step at which it was published.
    pub version_step: Option<Step>,
    /// Where its weights are.
    pub version_uri: Option<String>,
    /// Last acked step.
    pub acked_step: Option<Step>,
    /// Last settled step.
    pub checkpoint_step: Option<Step>,
    /// The run has acked: the ledger knows which steps there are.
    pub steps_known: bool,
    /// A restore began the epoch, and no trainer has resumed since.
    pub restored: bool,
}

/// Writes the rules of a policy.
#[derive(Clone, Debug)]
pub struct WriteRules {
    /// Policy.
    pub policy: PolicyName,
    /// Its rules.
    pub rules: Arc<Rules>,
    /// What is done to a policy that exists.
    pub existing: ExistingPolicy,
    /// A policy is created only where fewer than this many exist; none where the operator names it.
    pub policies_max: Option<u32>,
    /// Now.
    pub now: Timestamp,
}

/// What writing rules does to a policy that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingPolicy {
    /// It keeps its rules.
    Keep,
    /// Its rules are replaced.
    Replace,
    /// Its rules are replaced if they are those of this row.
    ReplaceOnly(i64),
}

/// What came of writing rules.
#[derive(Clone, Debug)]
pub enum RulesWritten {
    /// The policy is new.
    Created,
    /// The policy existed, with these rules.
    Existed(Arc<Rules>),
    /// The policy has other rules than those that were to be replaced; nothing changed.
    Outdated,
}

/// Asks for a batch.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Policy.
    pub policy: PolicyName,
    /// Who asks.
    pub consumer: Option<ConsumerName>,
    /// Makes the claim repeatable.
    pub request_id: Option<RequestId>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// Take what is there.
    pub partial: bool,
    /// Identity if a batch is cut.
    pub batch_id: BatchId,
    /// Token if a lease is granted.
    pub lease: LeaseToken,
    /// When it was asked.
    pub now: Timestamp,
}

/// Answer to a claim, and what it found on the way.
#[derive(Clone, Debug)]
pub struct ClaimAnswer {
    /// What is given.
    pub claimed: Claimed,
    /// Leases of the policy that were past their end.
    pub expired: u64,
    /// Ready groups that were over the staleness bound.
    pub stale: u64,
}

/// What a claim is given.
#[derive(Clone, Debug)]
pub enum Claimed {
    /// The same request holds this batch already; its ttl is renewed.
    Held(Box<Batch>),
    /// A batch that is new or came back.
    Granted(Box<Batch>),
    /// Nothing to give yet.
    Nothing,
}

/// A batch's row.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Key of the row.
    pub batch_pk: BatchPk,
    /// Identity.
    pub batch_id: BatchId,
    /// Policy.
    pub policy: PolicyName,
    /// Key of the policy.
    pub policy_pk: PolicyPk,
    /// State.
    pub state: BatchState,
    /// Why it was given back or quarantined.
    pub reason: Option<String>,
    /// Token of the last lease.
    pub lease: Option<LeaseToken>,
    /// Consumer of the last lease.
    pub consumer: String,
    /// Epoch of the last lease.
    pub epoch: Epoch,
    /// End of the lease.
    pub expires_at: Option<Timestamp>,
    /// Number of the last delivery.
    pub attempt: u32,
    /// Deliveries that expired or were given back.
    pub failed_deliveries: u32,
    /// Leases that a resume ended.
    pub resumes: u32,
    /// Step that consumed it.
    pub step: Option<Step>,
    /// Whole groups.
    pub groups: u32,
    /// Kept and masked rollouts.
    pub rollouts: u32,
    /// Rows of its samples.
    pub samples: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// The normalisation of its loss.
    pub weights: BatchWeights,
    /// The policy's version at the cut.
    pub version_current: Version,
    /// Oldest and newest version of a trained token.
    pub trained_versions: Option<(Version, Version)>,
    /// Numbers for the trainer's log, JSON.
    pub metrics: BTreeMap<String, f64>,
    /// Payload bytes.
    pub live_bytes: i64,
    /// When it was cut.
    pub created_at: Timestamp,
}

/// A look at the clock that replicas share.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockReading {
    /// The database's clock; none where the database belongs to one process.
    pub database: Option<Timestamp>,
    /// What is added to it.
    pub offset_us: i64,
    /// A time that the service has reached; none before the first mark.
    pub latest: Option<Timestamp>,
    /// Number of the last question of a starting replica.
    pub asked: i64,
    /// Number of the last question that a running replica has answered.
    pub answered: i64,
}

impl ClockReading {
    /// Service time by the database's clock.
    #[must_use]
    pub fn time(&self) -> Option<Timestamp> {
        let database = self.database?;
        Some(Timestamp::from_micros(database.as_micros().saturating_add(self.offset_us)))
    }
}

/// Proof that a trainer speaks for a lease.
#[derive(Clone, Debug)]
pub struct LeaseProof {
    /// The batch.
    pub batch_id: BatchId,
    /// The token.
    pub lease: LeaseToken,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// When it spoke.
    pub now: Timestamp,
}

/// A rollout of a batch, without its payload.
#[derive(Clone, Debug)]
pub struct BatchMember {
    /// Key of the row.
    pub rollout_pk: RolloutPk,
    /// Its group.
    pub group_pk: GroupPk,
    /// Its group's id.
    pub group_id: String,
    /// Its id.
    pub rollout_id: String,
    /// Kept or masked.
    pub verdict: Verdict,
    /// Reward as sent.
    pub reward: Option<f64>,
    /// Advantage.
    pub advantage: f64,
    /// Its version.
    pub policy_version: Version,
    /// Segments.
    pub segments: u32,
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// Trained tokens.
    pub trained_tokens: u64,
    /// Bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// Tokens of versions below this one are delivered with mask 0.
    pub mask_below: Option<Version>,
    /// Trained tokens by version as sent; recorded where the policy masks.
    pub trained_spans: Option<Vec<TrainedSpan>>,
    /// Checksum of what its row says; none in rows of before there were any.
    pub seal: Option<[u8; SEAL_BYTES]>,
    /// Checksum of the advantages of its group.
    pub group_seal: Option<[u8; SEAL_BYTES]>,
}

/// A payload with the key of its rollout.
#[derive(Clone, Debug)]
pub struct StoredPayload {
    /// Key of the rollout.
    pub rollout_pk: RolloutPk,
    /// The bulk.
    pub payload: Payload,
}

/// A resume.
#[derive(Clone, Debug)]
pub struct Resume {
    /// Policy.
    pub policy: PolicyName,
    /// Last saved step.
    pub step: Option<Step>,
    /// Go below what is settled or purged, or above what is acked.
    pub force: bool,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// When it was asked.
    pub now: Timestamp,
}

/// Answer to a resume.
#[derive(Clone, Copy, Debug)]
pub struct Resumed {
    /// The new epoch.
    pub epoch: Epoch,
    /// The current version.
    pub version: Version,
    /// Batches that came back.
    pub returned: u64,
    /// Batches whose leases resumes have ended too often.
    pub quarantined: u64,
    /// Batches whose payloads are gone.
    pub undeliverable: u64,
    /// Groups of those among them that were not settled: discarded.
    pub abandoned_groups: u64,
    /// Leases that were past their end.
    pub expired: u64,
}

/// A new weight version.
#[derive(Clone, Debug)]
pub struct Publish {
    /// Policy.
    pub policy: PolicyName,
    /// The version.
    pub version: Version,
    /// Step after which the weights were taken.
    pub step: Option<Step>,
    /// Where they are.
    pub uri: Option<String>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// When it was published.
    pub now: Timestamp,
}

/// A rollout in the ledger.
#[derive(Clone, Debug)]
pub struct Story {
    /// Cursor.
    pub rollout_pk: RolloutPk,
    /// Policy.
    pub policy: PolicyName,
    /// Run.
    pub run: Run,
    /// Identity.
    pub rollout_id: String,
    /// Verdict.
    pub verdict: Verdict,
    /// Reason of the verdict.
    pub reason: Option<String>,
    /// Filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// Where it stands.
    pub state: RolloutState,
    /// Its group's id.
    pub group_id: String,
    /// Its group.
    pub group: GroupFill,
    /// Its group's reason.
    pub group_reason: Option<String>,
    /// Batches that carried it.
    pub batches: Vec<BatchId>,
    /// Step that consumed it.
    pub step: Option<Step>,
    /// Reward.
    pub reward: Option<f64>,
    /// Advantage.
    pub advantage: Option<f64>,
    /// Version.
    pub policy_version: Version,
    /// The producer sent none.
    pub version_assumed: bool,
    /// Segments.
    pub segments: u32,
    /// Tokens.
    pub tokens: u64,
    /// Arrival.
    pub received_at: Timestamp,
    /// Decision of the group.
    pub decided_at: Option<Timestamp>,
    /// Cut of the batch.
    pub batched_at: Option<Timestamp>,
    /// Ack of the batch.
    pub acked_at: Option<Timestamp>,
    /// Purge of the payload.
    pub purged_at: Option<Timestamp>,
}

/// Which rollouts to list.
#[derive(Clone, Debug, Default)]
pub struct StoryFilter {
    /// Policy.
    pub policy: PolicyName,
    /// One rollout.
    pub rollout_id: Option<RolloutId>,
    /// Of one group.
    pub group_id: Option<GroupId>,
    /// With a verdict.
    pub verdict: Option<Verdict>,
    /// With a reason.
    pub reason: Option<String>,
    /// In a state.
    pub state: Option<RolloutState>,
    /// Consumed by a step.
    pub step: Option<Step>,
    /// After a cursor.
    pub after: i64,
    /// At most.
    pub limit: u32,
}

/// A group in the ledger.
#[derive(Clone, Debug)]
pub struct Group {
    /// Cursor.
    pub group_pk: GroupPk,
    /// Run.
    pub run: Run,
    /// Id.
    pub group_id: String,
    /// Places and rollouts.
    pub fill: GroupFill,
    /// Why it was discarded or quarantined.
    pub reason: Option<String>,
    /// Group filters that could not be evaluated.
    pub failed_filters: Vec<String>,
    /// Environment of its first rollout.
    pub environment: Option<String>,
    /// Rollouts that suffice.
    pub min_size: u32,
    /// Rollouts that came too late.
    pub late: u32,
    /// Its batch.
    pub batch_id: Option<BatchId>,
    /// First arrival.
    pub opened_at: Timestamp,
    /// When it is decided at the latest.
    pub deadline_at: Option<Timestamp>,
    /// When it was decided.
    pub decided_at: Option<Timestamp>,
}

/// Which groups to list.
#[derive(Clone, Debug, Default)]
pub struct GroupFilter {
    /// Policy.
    pub policy: PolicyName,
    /// One group.
    pub group_id: Option<GroupId>,
    /// In a state.
    pub state: Option<GroupState>,
    /// After a cursor.
    pub after: i64,
    /// At most.
    pub limit: u32,
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// Entries in the order of the list. A page of a filtered list may have none although others follow.
    pub entries: Vec<T>,
    /// Cursor of the next page, unless this is the last.
    pub next: Option<i64>,
}

/// Which keys to list.
#[derive(Clone, Copy, Debug)]
pub struct KeyFilter {
    /// Only those that are not revoked.
    pub live_only: bool,
    /// After a cursor.
    pub after: i64,
    /// At most.
    pub limit: u32,
}

/// Which batches to list.
#[derive(Clone, Debug, Default)]
pub struct BatchFilter {
    /// Policy.
    pub policy: PolicyName,
    /// In a state.
    pub state: Option<BatchState>,
    /// After a cursor.
    pub after: i64,
    /// At most.
    pub limit: u32,
}

/// A policy's tallies by name.
#[derive(Clone, Debug, Default)]
pub struct Tallies {
    /// Counts.
    pub values: BTreeMap<String, i64>,
    /// When the last rollout was received.
    pub last_received_at: Option<Timestamp>,
}

/// What a trainer is waiting for.
#[derive(Clone, Debug, Default)]
pub struct WaitingFor {
    /// The open groups that lack the fewest rollouts.
    pub fullest: Vec<(String, GroupFill)>,
    /// Drops and stale groups of the last hour, by name.
    pub recent: BTreeMap<String, i64>,
}

/// Leases that one sweep found past their end, by policy.
pub type Expired = Vec<(PolicyName, u64)>;

/// Counts by policy and the name of their tally.
pub type Counts = BTreeMap<String, BTreeMap<String, i64>>;

/// What reading every row found, all of it in one snapshot.
#[derive(Clone, Debug)]
pub struct Examination {
    /// What the tallies say.
    pub tallies: BTreeMap<PolicyName, Tallies>,
    /// What the rows say.
    pub counted: Counts,
    /// Rows that contradict others.
    pub contradictions: Vec<Contradiction>,
}

/// Rows that contradict others.
#[derive(Clone, Debug)]
pub struct Contradiction {
    /// What is wrong with them.
    pub what: &'static str,
    /// How many there are at least.
    pub at_least: i64,
    /// The first of them.
    pub named: Vec<String>,
}

/// The rules of some groups.
#[derive(Clone, Debug, Default)]
pub struct RulesOfGroups {
    /// Keys of the rules.
    pub rules: std::collections::BTreeSet<i64>,
    /// The last of the groups; none when there are no more.
    pub last: Option<GroupPk>,
}
