//! A rollout that is about to be stored: packed, with what its filters said last.

use std::{iter, sync::Arc};

use forebay_wire::{self as wire, Retries};

use crate::{
    evals::Evaluates,
    evaluation::LatestEvaluation,
    formats::{canonical::ContentDigest, payload::Payload},
    ids::{AdmissionId, BlobDigest, ExecutionId, GroupId, PolicyName, RolloutId},
    media::Inline,
    trajectory::{Facts, Trajectory},
    turn_calls::TurnCalls,
    warnings::Warning,
};

/// A valid trajectory, packed and ready to be stored.
#[derive(Clone, Debug)]
pub struct NewRollout {
    /// Policy that produced it, or the evaluations of that.
    pub policy: PolicyName,
    /// What it is a result of, if it evaluates the policy.
    pub evaluates: Option<Evaluates>,
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
    /// The media that its messages and segments name, which must be there when it is stored.
    pub media: Vec<BlobDigest>,
    /// Those of them that its messages had as data URLs. They are stored before it is.
    pub inline: Vec<Inline>,
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
    /// The calls that its turns are.
    pub turn_calls: Option<Arc<TurnCalls>>,
}

impl NewRollout {
    /// Packs a trajectory. This takes milliseconds for long ones, so async workers must not call it.
    #[must_use]
    pub fn pack(trajectory: Trajectory) -> Self {
        let payload = Payload::pack(&trajectory);
        Self {
            policy: trajectory.policy,
            evaluates: trajectory.evaluates,
            rollout_id: trajectory.rollout_id,
            group_id: trajectory.group_id,
            group_size: trajectory.group_size,
            execution_id: trajectory.execution_id.unwrap_or_else(ExecutionId::mint),
            admission_id: trajectory.admission_id,
            content: trajectory.content,
            media: trajectory.media,
            inline: trajectory.inline,
            only_open: false,
            evaluation: LatestEvaluation::default(),
            form: Form { facts: trajectory.facts, payload, assembly: trajectory.assembly },
            others: trajectory.others.into_iter().map(|(rule, other)| (rule, Self::pack(other).form)).collect(),
        }
    }

    /// Adds what only the calls of a session say.
    pub fn mark(&mut self, marks: Marks) {
        // An engine cannot fetch our addresses, so none was sent to it: what looks like one is what a model wrote.
        self.media.retain(|digest| self.inline.iter().any(|inline| inline.digest == *digest));
        let facts = &mut self.form.facts;
        facts.versions.spans_assumed |= marks.version_assumed;
        facts.sampled_nothing |= marks.sampled_nothing;
        facts.turn_calls = marks.turn_calls;
        facts.warnings.extend(marks.delivered_dropped.into_iter().chain(marks.of_session));
    }

    /// What is stored of it under rules with this setting.
    #[must_use]
    pub fn form(&self, retries: Retries) -> &Form {
        self.others.iter().find(|(of, _)| *of == retries).map_or(&self.form, |(_, form)| form)
    }

    /// The uploads that it names, in any form.
    pub fn named(&self) -> impl Iterator<Item = BlobDigest> {
        let forms = iter::once(&self.form).chain(self.others.iter().map(|(_, form)| form));
        let columns = forms.flat_map(|form| form.facts.shapes.iter()).flat_map(|segment| segment.columns.values());
        self.media.iter().copied().chain(columns.map(|column| column.digest))
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
