//! Adds up what a dry run found, and what to keep in mind about it.

use std::collections::BTreeMap;

use forebay_wire::{FilterScope, OnDrop};

use super::judge::{Comparison, JudgedGroup, Outcome};
use crate::{clock::Timestamp, looking::dry_run::PastGroup, states::Verdict};

/// The most rewards of an example.
const REWARDS_MAX: usize = 64;

/// The mean length of what trains has shifted if it moves by more than this part.
const SHIFT: f64 = 0.1;

/// What a dry run found.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, not a state machine")]
pub struct Report {
    /// Groups that were judged.
    pub groups: u64,
    /// Their rollouts.
    pub rollouts: u64,
    /// Groups that were read.
    pub examined: u64,
    /// The first and the last decision of the groups.
    pub decided: Option<(Timestamp, Timestamp)>,
    /// Bytes of the payloads that were read, unpacked.
    pub payload_bytes: u64,
    /// Whether no bound was reached.
    pub is_complete: bool,
    /// Whether the time of evaluating was used up.
    pub is_out_of_time: bool,
    /// As it was decided.
    pub as_decided: Column,
    /// By the filters that the policy has now.
    pub rules_now: Column,
    pub draft: Column,
    /// Groups that the draft decides differently from the filters that the policy has now.
    pub changed: u64,
    /// The newest of them.
    pub changes: Vec<Change>,
    /// Filters of the draft that could not be evaluated.
    pub failed: Vec<Failed>,
    /// Rollouts that the draft could not be tried on, by the reason.
    pub unjudged: BTreeMap<&'static str, u64>,
    examples_max: usize,
    depends_on_versions: bool,
    /// Groups that only the draft makes ready, and those among them without a difference of rewards.
    entering: (u64, u64),
    /// Whether agents would have sent other rollouts.
    is_refilled_otherwise: bool,
}

/// What becomes of groups and rollouts by some filters.
#[derive(Clone, Debug, Default)]
pub struct Column {
    /// Groups that become ready.
    pub ready: u64,
    /// Groups that are discarded, by the reason.
    pub discarded: BTreeMap<String, u64>,
    /// Groups that would still wait for rollouts.
    pub open: u64,
    /// Groups that cannot be judged.
    pub unjudged: u64,
    /// Kept rollouts.
    pub kept: u64,
    /// Masked rollouts, by the filter.
    pub masked: BTreeMap<String, u64>,
    /// Dropped rollouts, by the reason.
    pub dropped: BTreeMap<String, u64>,
    /// Late rollouts.
    pub late: u64,
    /// Rollouts of groups that cannot be judged.
    pub unjudged_rollouts: u64,
    /// Kept rollouts of ready groups, and their tokens.
    trained: (u64, u64),
}

/// A group that is decided differently.
#[derive(Clone, Debug)]
pub struct Change {
    pub group_id: String,
    /// How it was decided.
    pub was: Outcome,
    /// How the filters that the policy has now decide it.
    pub now: Outcome,
    /// How the draft decides it.
    pub would_be: Outcome,
    /// Rollouts that the draft keeps or masks.
    pub members: u64,
    /// The first of their rewards.
    pub rewards: Vec<f64>,
}

/// A filter that could not be evaluated on some records.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Its name.
    pub filter: String,
    pub scope: FilterScope,
    /// Records.
    pub count: u64,
    /// Why, for the newest.
    pub message: String,
    /// Group of the newest.
    pub group_id: String,
    /// The newest, if it is a rollout.
    pub rollout_id: Option<String>,
}

/// What to keep in mind about a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// A name that does not change.
    pub code: &'static str,
    /// A sentence.
    pub text: String,
}

impl Report {
    pub fn new(depends_on_versions: bool, examples_max: usize) -> Self {
        Self { is_complete: true, depends_on_versions, examples_max, ..Self::default() }
    }

    pub fn add(&mut self, group: &PastGroup, found: Comparison) {
        let Comparison { as_decided, rules_now, draft } = found;
        self.groups += 1;
        self.rollouts += group.rollouts.len() as u64;
        let (first, last) = self.decided.unwrap_or((group.decided_at, group.decided_at));
        self.decided = Some((first.min(group.decided_at), last.max(group.decided_at)));
        self.as_decided.add(group, &as_decided);
        self.rules_now.add(group, &rules_now);
        self.draft.add(group, &draft);
        for reason in &draft.unjudged {
            *self.unjudged.entry(reason).or_default() += 1;
        }
        self.add_failures(group, &draft);
        let rewards: Vec<f64> = draft.members.iter().filter_map(|&place| group.rollouts[place].reward).collect();
        if draft.outcome == Outcome::Ready && rules_now.outcome != Outcome::Ready {
            self.entering.0 += 1;
            self.entering.1 += u64::from(is_flat(&rewards) && !group.rules.tokens_have_advantages());
        }
        let is_judged = !matches!(draft.outcome, Outcome::Unjudged(_));
        self.is_refilled_otherwise |=
            is_judged && group.rules.group.on_drop == OnDrop::Refill && drops_otherwise(&as_decided, &draft);
        if draft.outcome == rules_now.outcome {
            return;
        }
        self.changed += 1;
        if self.changes.len() < self.examples_max {
            self.changes.push(Change {
                group_id: group.group_id.clone(),
                was: as_decided.outcome,
                now: rules_now.outcome,
                would_be: draft.outcome,
                members: draft.members.len() as u64,
                rewards: rewards.into_iter().take(REWARDS_MAX).collect(),
            });
        }
    }

    fn add_failures(&mut self, group: &PastGroup, draft: &JudgedGroup) {
        for failure in &draft.failures {
            let known = self.failed.iter_mut().find(|of| (&of.filter, of.scope) == (&failure.filter, failure.scope));
            match known {
                Some(failed) => failed.count += 1,
                None => self.failed.push(Failed {
                    filter: failure.filter.clone(),
                    scope: failure.scope,
                    count: 1,
                    message: failure.message.clone(),
                    group_id: group.group_id.clone(),
                    rollout_id: failure.rollout.map(|place| group.rollouts[place].rollout_id.clone()),
                }),
            }
        }
    }

    /// What to keep in mind.
    #[must_use]
    pub fn notes(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        let mut note = |code, text| notes.push(Note { code, text });
        if let (entering, flat @ 1..) = self.entering {
            note(
                "flat-groups-enter",
                format!(
                    "{flat} of {entering} groups that become ready only by the draft have equal rewards: they would fill \
                     batches and train nothing"
                ),
            );
        }
        if let (Some(before), Some(after)) = (self.rules_now.mean_tokens(), self.draft.mean_tokens())
            && (after - before).abs() > SHIFT * before
        {
            note(
                "length-shift",
                format!(
                    "rollouts that train would have {after:.0} tokens on average, and have {before:.0} by the filters that \
                     the policy has now"
                ),
            );
        }
        if self.is_refilled_otherwise {
            note(
                "refill-not-simulated",
                "the draft drops other rollouts of groups with `on_drop = \"refill\"`: agents would have sent more or fewer \
                 rollouts, which is not simulated"
                    .to_owned(),
            );
        }
        if self.depends_on_versions {
            note(
                "versions-derived",
                "the draft asks for the version at the arrival of a rollout, which is derived from when versions were \
                 published; versions that a resume took back are not known"
                    .to_owned(),
            );
        }
        notes
    }
}

impl Column {
    fn add(&mut self, group: &PastGroup, judged: &JudgedGroup) {
        match &judged.outcome {
            Outcome::Ready => self.ready += 1,
            Outcome::Discarded(reason) => *self.discarded.entry(reason.clone()).or_default() += 1,
            Outcome::Open => self.open += 1,
            Outcome::Unjudged(_) => {
                self.unjudged += 1;
                self.unjudged_rollouts += group.rollouts.len() as u64;
            }
        }
        for (rollout, (verdict, reason)) in group.rollouts.iter().zip(&judged.verdicts) {
            let reason = || reason.clone().unwrap_or_default();
            match verdict {
                Verdict::Kept => self.kept += 1,
                Verdict::Masked => *self.masked.entry(reason()).or_default() += 1,
                Verdict::Dropped => *self.dropped.entry(reason()).or_default() += 1,
                Verdict::Late => self.late += 1,
            }
            if *verdict == Verdict::Kept && judged.outcome == Outcome::Ready {
                self.trained.0 += 1;
                self.trained.1 += rollout.tokens;
            }
        }
    }

    fn mean_tokens(&self) -> Option<f64> {
        let (rollouts, tokens) = self.trained;
        (rollouts > 0).then(|| tokens as f64 / rollouts as f64)
    }
}

/// Whether there are several rewards and all are equal.
#[expect(clippy::float_cmp, reason = "rewards are compared as they were posted")]
fn is_flat(rewards: &[f64]) -> bool {
    rewards.len() > 1 && rewards.iter().all(|reward| *reward == rewards[0])
}

/// Whether a rollout that took a place would be dropped, or the other way round.
fn drops_otherwise(before: &JudgedGroup, after: &JudgedGroup) -> bool {
    let both = before.verdicts.iter().zip(&after.verdicts);
    after.outcome == Outcome::Open || both.into_iter().any(|(one, other)| one.0.takes_place() != other.0.takes_place())
}
