//! The reference: the behaviour of the buffer, written as simply as possible.
//!
//! The reference is the oracle that the buffer is compared with, so it is separate in every respect: no SQL, no async,
//! no shared code except the names of states on the wire, and no optimisation. It follows the contract: `docs/api.md`,
//! and `docs/semantics.md` up to staleness. Where the contract leaves a choice, a comment that starts with "Not
//! specified:" says what was chosen.
//!
//! There is one file per stage: [`ingest`], [`batches`], [`lineage`], [`retention`], [`scores`], [`sessions`] and [`ending`];
//! [`work`] belongs to scores and [`shares`] to batches; [`ledger`] returns what can be observed. Only [`assembling`] is code of the service: the oracle of its tests.

mod assembling;
mod batches;
mod ending;
mod ingest;
mod ledger;
mod lineage;
mod retention;
mod room;
mod scores;
mod sessions;
mod shares;
mod work;

use std::collections::BTreeMap;

use forebay_domain::assemble::{breaks::Break, retries::DropReason};
use forebay_wire::{BatchState, GroupState, LossWeighting, Verdict};

use super::view::{
    Answer, BatchNumber, Body, Call, GroupName, InFlightNumber, LeaseNumber, PolicyNumber, Refused, Rules,
    SessionNumber,
};

pub(crate) use self::{
    assembling::multiple,
    batches::LOSS_CONSTANT,
    ending::reason,
    sessions::{IN_FLIGHT_MAX, InFlight, SEGMENTS_MAX, Session, Stored, TOKENS_MAX},
    work::{Grant, Work},
};

/// A refusal must change nothing, so a call that changes something before it is certain to succeed works on a copy.
type Outcome = Result<Answer, Refused>;

/// The whole buffer.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// Seconds since the start.
    pub(crate) now: i64,
    pub(crate) policies: Vec<Policy>,
    /// In the order of arrival.
    pub(crate) rollouts: BTreeMap<usize, Rollout>,
    /// In the order in which they were opened.
    pub(crate) groups: BTreeMap<usize, Group>,
    /// In the order in which they were cut.
    pub(crate) batches: BTreeMap<BatchNumber, Batch>,
    /// In the order in which they were opened.
    pub(crate) sessions: BTreeMap<SessionNumber, Session>,
    /// Calls that have begun and have not ended.
    pub(crate) in_flight: BTreeMap<InFlightNumber, InFlight>,
    /// Calls that are not yet marked in the store, by session and number: whether they were delivered.
    delivered: BTreeMap<(SessionNumber, u32), bool>,
    /// Numbers are never used twice, even after their objects are forgotten.
    arrivals: usize,
    openings: usize,
    readies: usize,
    pub(crate) cuts: usize,
    pub(crate) grants: usize,
    pub(crate) opened: usize,
    begun: usize,
    /// Work for scorers, in the order in which it was made.
    work: Vec<Work>,
    /// Every lease of work, in order.
    pub(crate) grants_of_work: Vec<Grant>,
}

#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) rules: Rules,
    pub(crate) run: i64,
    pub(crate) epoch: i64,
    pub(crate) version: i64,
    pub(crate) version_step: Option<i64>,
    pub(crate) version_uri: Option<usize>,
    /// Versions that the lineage remembers, with their steps and URIs.
    versions: BTreeMap<i64, (Option<i64>, Option<usize>)>,
    pub(crate) acked_step: Option<i64>,
    /// Whether the run has ever acked.
    has_acked: bool,
    pub(crate) checkpoint_step: Option<i64>,
    received: i64,
    forgotten: i64,
    /// Number of rollouts and groups that each rule has dropped.
    dropped: BTreeMap<String, i64>,
    /// What environments carry from batch to batch.
    carried: shares::Carried,
    /// Since when batches wait for rollouts, and the newest version of those.
    pause: Option<(i64, i64)>,
    /// Rollouts up to this version were waited for in vain.
    given_up: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Rollout {
    pub(crate) policy: PolicyNumber,
    pub(crate) run: i64,
    pub(crate) name: usize,
    pub(crate) body: Body,
    /// The number of its group.
    pub(crate) group: usize,
    pub(crate) verdict: Verdict,
    reason: Option<String>,
    version: i64,
    version_assumed: bool,
    /// Oldest and newest version of a trained token of the delivered mask.
    trained_versions: Option<(i64, i64)>,
    advantage: Option<f64>,
    received_at: i64,
    /// When it is dropped, while it lacks scores.
    pub(crate) unscored_at: Option<i64>,
    /// The scores that count, and those that came too late.
    pub(crate) scores: [Option<u8>; 2],
    scores_after: [Option<u8>; 2],
    /// The leases with which they were given.
    score_leases: [Option<usize>; 2],
    score_leases_after: [Option<usize>; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) policy: PolicyNumber,
    pub(crate) run: i64,
    pub(crate) name: GroupName,
    /// The rules of the policy when the group was opened.
    rules: Rules,
    pub(crate) size: u32,
    pub(crate) state: GroupState,
    reason: Option<String>,
    opened_at: i64,
    deadline_at: Option<i64>,
    decided_at: Option<i64>,
    /// Its position in the order of ready groups, which never changes.
    place: usize,
    /// Whether it was delivered once; its staleness is then not tested any more.
    pub(crate) delivered: bool,
    failed_deliveries: u32,
    resumes: u32,
    /// The last batch that it was cut into, unless it returned to the ready groups.
    pub(crate) batch: Option<BatchNumber>,
    purge_at: Option<i64>,
    purged_at: Option<i64>,
    forget_at: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) policy: PolicyNumber,
    run: i64,
    /// The groups as the batch was cut; forgotten groups are removed from the list.
    pub(crate) carried: Vec<usize>,
    pub(crate) state: BatchState,
    reason: Option<String>,
    /// Every lease of the batch, in order; the last is the current one.
    pub(crate) leases: Vec<LeaseNumber>,
    /// Whether the last lease was given back, revoked or lost.
    lease_over: bool,
    consumer: usize,
    request: Option<usize>,
    epoch: i64,
    expires_at: Option<i64>,
    attempt: u32,
    failed_deliveries: u32,
    /// Number of leases that resumes ended.
    resumes: u32,
    pub(crate) step: Option<i64>,
    acked_at: Option<i64>,
    created_at: i64,
    cut: Cut,
}

/// Values that are fixed when a batch is cut.
#[derive(Clone, Debug)]
struct Cut {
    groups: usize,
    rollouts: usize,
    samples: usize,
    tokens: u64,
    version_current: i64,
    trained_versions: Option<(i64, i64)>,
    weighting: LossWeighting,
    /// Sum over rollouts of max(1, samples with a trained token).
    trained_samples: u64,
    trained_tokens: u64,
}

impl Reference {
    pub(crate) fn new(rules: Vec<Rules>) -> Self {
        let policy = |rules| Policy {
            rules,
            run: 1,
            epoch: 0,
            version: 0,
            version_step: None,
            version_uri: None,
            versions: BTreeMap::new(),
            acked_step: None,
            has_acked: false,
            checkpoint_step: None,
            received: 0,
            forgotten: 0,
            dropped: BTreeMap::new(),
            carried: BTreeMap::new(),
            pause: None,
            given_up: None,
        };
        Self {
            now: 0,
            policies: rules.into_iter().map(policy).collect(),
            rollouts: BTreeMap::new(),
            groups: BTreeMap::new(),
            batches: BTreeMap::new(),
            sessions: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            delivered: BTreeMap::new(),
            arrivals: 0,
            openings: 0,
            readies: 0,
            cuts: 0,
            grants: 0,
            opened: 0,
            begun: 0,
            work: Vec::new(),
            grants_of_work: Vec::new(),
        }
    }

    /// Answers a call and changes its state as the buffer should.
    pub(crate) fn apply(&mut self, call: &Call) -> Answer {
        let outcome = match call {
            Call::Post(bundle) => self.post(bundle),
            Call::Score(scores) => self.score(scores),
            Call::LeaseWork { policy, names, max, request } => self.lease_work(*policy, names, *max, *request),
            Call::ExtendWork { policy, leases } => Ok(self.extend_work(*policy, leases)),
            Call::RetryWork { policy, name } => Ok(self.retry_work(*policy, *name)),
            Call::Close { policy, group } => self.close(*policy, *group),
            Call::Discard { policy, group } => self.discard(*policy, *group),
            Call::Claim { policy, consumer, request, partial, epoch } => {
                self.claim(*policy, *consumer, *request, *partial, *epoch)
            }
            Call::Extend { holder, ttl_s } => self.extend(*holder, *ttl_s),
            Call::Ack { holder, step } => self.ack(*holder, *step),
            Call::Nack { holder, groups } => self.nack(*holder, groups),
            Call::Readmit { batch } => self.readmit(*batch),
            Call::Publish { policy, version, step, uri, epoch } => self.publish(*policy, *version, *step, *uri, *epoch),
            Call::Checkpoint { policy, step, force, epoch } => self.checkpoint(*policy, *step, *force, *epoch),
            Call::Resume { policy, step, force, epoch } => self.resume(*policy, *step, *force, *epoch),
            Call::Reset { policy, epoch } => self.reset(*policy, *epoch),
            Call::PutPolicy { policy, rules } => {
                self.policies[*policy].rules = rules.clone();
                Ok(Answer::Done)
            }
            Call::Advance { seconds } => {
                self.now += seconds;
                Ok(Answer::Done)
            }
            Call::Sweep => {
                self.sweep();
                Ok(Answer::Done)
            }
            Call::Step { .. } => Ok(Answer::Done),
            Call::Restart => {
                self.forget_process();
                Ok(Answer::Done)
            }
            Call::OpenSession(opening) => self.open(opening),
            Call::ResumeSession { session, after } => self.resume_session(*session, *after),
            Call::Record { session, key, sent } => {
                self.begin(*session, *key).map(|call| self.end_call(call, Some(sent)))
            }
            Call::Begin { session, key } => self.begin(*session, *key).map(|call| Answer::Begun { call }),
            Call::Answered { call, sent } => Ok(self.end_call(*call, sent.as_ref())),
            Call::Finish(finishes) => self.finish(finishes),
            Call::Abort(abort) => self.abort(abort),
            Call::Turns { session } => self.turns(*session),
        };
        self.update_work();
        outcome.unwrap_or_else(Answer::Refused)
    }

    /// Refuses a caller whose epoch is not the current one.
    fn check_epoch(&self, policy: PolicyNumber, epoch: Option<i64>) -> Result<(), Refused> {
        match epoch {
            Some(epoch) if epoch != self.policies[policy].epoch => Err(Refused::Superseded),
            _ => Ok(()),
        }
    }

    /// The group with this name in the current run; ids of different runs are independent.
    pub(crate) fn group_named(&self, policy: PolicyNumber, name: GroupName) -> Option<usize> {
        let run = self.policies[policy].run;
        let found = |group: &Group| group.policy == policy && group.run == run && group.name == name;
        self.groups.iter().find(|(_, group)| found(group)).map(|(number, _)| *number)
    }

    /// The rollout with this name in the current run.
    pub(crate) fn rollout_named(&self, policy: PolicyNumber, name: usize) -> Option<&Rollout> {
        let run = self.policies[policy].run;
        self.rollouts.values().find(|rollout| rollout.policy == policy && rollout.run == run && rollout.name == name)
    }

    /// The rollouts of a group with one of these verdicts, in the order of arrival.
    fn members<'a>(&'a self, group: usize, verdicts: &'a [Verdict]) -> impl Iterator<Item = &'a Rollout> {
        self.rollouts.values().filter(move |rollout| rollout.group == group && verdicts.contains(&rollout.verdict))
    }

    fn count(&self, group: usize, verdict: Verdict) -> u32 {
        self.members(group, &[verdict]).count() as u32
    }

    /// Kept and masked rollouts of a group.
    pub(crate) fn arrived(&self, group: usize) -> u32 {
        self.count(group, Verdict::Kept) + self.count(group, Verdict::Masked)
    }

    fn group_mut(&mut self, group: usize) -> &mut Group {
        self.groups.get_mut(&group).expect("groups are referred to while they are there")
    }

    fn batch_mut(&mut self, batch: BatchNumber) -> &mut Batch {
        self.batches.get_mut(&batch).expect("batches are referred to while they are there")
    }

    /// The groups that a batch holds now.
    fn held_by(&self, batch: BatchNumber) -> Vec<usize> {
        let holds = |group: &Group| group.batch == Some(batch) && group.state == GroupState::Batched;
        self.groups.iter().filter(|(_, group)| holds(group)).map(|(number, _)| *number).collect()
    }
}

/// Verdicts of the rollouts that belong to a group.
const VOTING: [Verdict; 2] = [Verdict::Kept, Verdict::Masked];

impl Body {
    pub(crate) fn tokens(&self) -> u64 {
        self.segments.iter().map(|segment| segment.tokens.len() as u64).sum()
    }

    fn trained_tokens(&self) -> u64 {
        self.segments.iter().flat_map(|segment| &segment.mask).map(|&bit| u64::from(bit)).sum()
    }

    fn trained_samples(&self) -> u64 {
        self.segments.iter().filter(|segment| segment.mask.contains(&1)).count() as u64
    }

    fn reward(&self) -> Option<f64> {
        self.reward.map(|halves| f64::from(halves) / 2.0)
    }
}
