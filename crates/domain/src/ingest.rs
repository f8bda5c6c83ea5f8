//! Stage 2, ingest: bundles of rollouts, each stored whole or not at all, and every group that they complete is decided.
//!
//! The store calls the functions of [`decide`] in its transaction, so the post that completes a group is answered after the
//! group is decided. The stage before is [`trajectory`](crate::trajectory), the next [`finalize`](crate::finalize).

pub mod decide;

use std::sync::Arc;

use forebay_wire::{self as wire, Assembly, Retries};

use self::decide::{GroupFill, RolloutDecision};
use crate::{
    admission::Gates,
    clock::Timestamp,
    evaluation::LatestEvaluation,
    formats::{canonical::ContentDigest, payload::Payload},
    ids::{AdmissionId, ExecutionId, GroupId, PolicyName, RolloutId},
    refusal::Refusal,
    session::EndSession,
    states::GroupState,
    trajectory::{Facts, Trajectory},
    warnings::Warning,
};

/// Bundles to ingest in one transaction, each all or nothing on its own.
#[derive(Clone)]
pub struct Ingest {
    /// Rollouts posted together.
    pub bundles: Arc<Vec<Bundle>>,
    /// The policies that this process has found full.
    pub gates: Arc<Gates>,
    /// The time of their arrival.
    pub now: Timestamp,
}

impl Ingest {
    /// The number of payload bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bundles.iter().flat_map(|bundle| bundle.iter()).map(NewRollout::payload_bytes).sum()
    }
}

/// Rollouts that are stored together, and the sessions that end with them.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    /// The rollouts.
    pub rollouts: Vec<NewRollout>,
    /// The sessions that recorded rollouts of the bundle.
    pub ends: Vec<EndSession>,
}

impl From<Vec<NewRollout>> for Bundle {
    fn from(rollouts: Vec<NewRollout>) -> Self {
        Self { rollouts, ends: Vec::new() }
    }
}

impl std::ops::Deref for Bundle {
    type Target = [NewRollout];

    fn deref(&self) -> &[NewRollout] {
        &self.rollouts
    }
}

/// The outcome of one bundle.
pub type BundleOutcome = Result<Vec<Ingested>, Refusal>;

/// The outcome of one rollout.
#[derive(Clone, Debug)]
pub struct Ingested {
    /// Its policy.
    pub policy: PolicyName,
    /// Its id.
    pub rollout_id: RolloutId,
    /// Its group.
    pub group_id: GroupId,
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    /// The verdict, from this post or from the first post of the rollout.
    pub decision: RolloutDecision,
    /// Warnings for its producer.
    pub warnings: Vec<Warning>,
    /// What became of its turns, if it was posted as turns.
    pub assembly: Option<Assembly>,
    /// Whether it was already stored.
    pub duplicate: bool,
    /// The group after the post.
    pub fill: GroupFill,
    /// The state of the group, if this post decided it.
    pub decided: Option<GroupState>,
    /// The reason, if this post discarded the group.
    pub discarded: Option<String>,
    /// Group filters that could not be evaluated in this decision.
    pub failed_group_filters: Vec<String>,
}

impl Ingested {
    /// The receipt for its producer.
    #[must_use]
    pub fn receipt(&self) -> wire::Receipt {
        wire::Receipt {
            policy: self.policy.to_string(),
            rollout_id: self.rollout_id.to_string(),
            group_id: self.group_id.to_string(),
            execution_id: self.execution_id.to_string(),
            verdict: self.decision.verdict.into(),
            warnings: self.warnings.iter().map(ToString::to_string).collect(),
            reason: self.decision.reason.clone(),
            duplicate: self.duplicate,
            group: wire::ReceiptGroup {
                state: self.fill.state.into(),
                arrived: self.fill.arrived(),
                size: self.fill.size,
            },
            assembly: self.assembly,
        }
    }
}

/// A valid trajectory, packed and ready to be stored.
#[derive(Clone, Debug)]
pub struct NewRollout {
    /// Policy that produced it.
    pub policy: PolicyName,
    /// Its identity.
    pub rollout_id: RolloutId,
    /// Its group, if its producer named one.
    pub group_id: Option<GroupId>,
    /// Size of the group, if its producer named one.
    pub group_size: Option<u32>,
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    /// The admission that it uses up, if its producer named one.
    pub admission_id: Option<AdmissionId>,
    /// Canonical content.
    pub content: ContentDigest,
    /// Whether it is refused if its group is decided. Otherwise it is then stored with the verdict `late`.
    pub only_open: bool,
    /// The latest result of its filters.
    pub evaluation: LatestEvaluation,
    form: Form,
    /// Its form by another rule about retries than the default, where it differs.
    others: Vec<(Retries, Form)>,
}

/// What is stored of a rollout. It depends on the rules whether repeated calls are part of it.
#[derive(Clone, Debug)]
pub struct Form {
    /// The facts that rules and the ledger use.
    pub facts: Facts,
    /// The bulk.
    pub payload: Payload,
    /// What became of its turns, if it was posted as turns.
    pub assembly: Option<wire::Assembly>,
}

/// What only the calls of a session say about its rollout.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    /// Whether the engine did not say the version of every trained token.
    pub version_assumed: bool,
    /// Whether all answers are empty, and the agent received one. Such a rollout has a reward, like a post of which all
    /// turns are empty.
    pub sampled_nothing: bool,
    /// If answers that the agent received are in no segment.
    pub delivered_dropped: Option<Warning>,
    /// What happened to calls, also to those that are not recorded.
    pub of_session: Vec<Warning>,
}

impl NewRollout {
    /// Packs a trajectory. This takes milliseconds for long ones, so async workers must not call it.
    #[must_use]
    pub fn pack(trajectory: Trajectory) -> Self {
        let payload = Payload::pack(&trajectory);
        Self {
            policy: trajectory.policy,
            rollout_id: trajectory.rollout_id,
            group_id: trajectory.group_id,
            group_size: trajectory.group_size,
            execution_id: trajectory.execution_id.unwrap_or_else(ExecutionId::mint),
            admission_id: trajectory.admission_id,
            content: trajectory.content,
            only_open: false,
            evaluation: LatestEvaluation::default(),
            form: Form { facts: trajectory.facts, payload, assembly: trajectory.assembly },
            others: trajectory.others.into_iter().map(|(rule, other)| (rule, Self::pack(other).form)).collect(),
        }
    }

    /// Adds what only the calls of a session say.
    pub fn mark(&mut self, marks: Marks) {
        let facts = &mut self.form.facts;
        facts.versions.spans_assumed |= marks.version_assumed;
        facts.sampled_nothing |= marks.sampled_nothing;
        facts.warnings.extend(marks.delivered_dropped.into_iter().chain(marks.of_session));
    }

    /// What is stored of it under rules with this setting.
    #[must_use]
    pub fn form(&self, retries: Retries) -> &Form {
        self.others.iter().find(|(of, _)| *of == retries).map_or(&self.form, |(_, form)| form)
    }

    /// Whether the rules decide about its form.
    #[must_use]
    pub fn depends_on_rules(&self) -> bool {
        !self.others.is_empty()
    }

    /// The bytes of its payload, in its largest form.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        let bytes = |form: &Form| form.payload.body.len();
        self.others.iter().map(|(_, form)| bytes(form)).fold(bytes(&self.form), usize::max)
    }

    /// The group it belongs to. A rollout without a group is a group of its own.
    #[must_use]
    pub fn group(&self) -> GroupId {
        self.group_id.clone().unwrap_or_else(|| GroupId::from(&self.rollout_id))
    }
}
