//! Exports: all rollouts of a run, read in pages.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    clock::Timestamp,
    evals::Evaluates,
    ids::{ExecutionId, GroupPk, PolicyPk, RolloutPk, Run, Step},
    rules::Rules,
    samples::SealedRow,
    scores::{self, Score},
    states::RolloutState,
};

/// Which rollouts to read next.
#[derive(Clone, Copy, Debug)]
pub struct ExportPage {
    pub policy_pk: PolicyPk,
    pub run: Run,
    /// Whether the policy is the evaluations of one.
    pub evaluates: bool,
    /// The last rollout of the export. Later ones are not read.
    pub last: RolloutPk,
    /// Where the page begins.
    pub from: ExportCursor,
}

/// A place between two rollouts of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportCursor {
    /// The group in which the page begins, or after which it begins if `after` is none.
    pub group: GroupPk,
    /// The rollout of this group after which the page begins.
    pub after: Option<RolloutPk>,
}

impl ExportCursor {
    /// The first page.
    pub const START: Self = Self { group: GroupPk(0), after: None };
}

/// Rollouts that were read, without payloads.
#[derive(Debug)]
pub struct ExportedPage {
    /// The rollouts in order. May be empty although more follow.
    pub members: Vec<ExportMember>,
    /// How many rollouts of groups whose payloads are purged were passed over.
    pub purged: u64,
    /// Where the next page begins; none after the last page.
    pub next: Option<ExportCursor>,
}

/// A rollout of an export, without its payload.
#[derive(Clone, Debug)]
pub struct ExportMember {
    pub row: SealedRow,
    /// The number of places of its group.
    pub group_size: u32,
    /// The execution that it belongs to.
    pub execution_id: ExecutionId,
    /// The reason of its verdict.
    pub reason: Option<String>,
    pub state: RolloutState,
    /// The step that consumed it.
    pub step: Option<Step>,
    pub advantage: Option<f64>,
    /// Whether its version was assumed.
    pub version_assumed: bool,
    /// The time of its arrival.
    pub received_at: Timestamp,
    /// The rules of its group.
    pub rules: Arc<Rules>,
    /// What it is a result of, if it evaluates its policy.
    pub evaluates: Option<Evaluates>,
    /// The scores that were given and that the decision about it counts.
    pub scores: Vec<Score>,
}

impl ExportMember {
    /// All of its scores, with those that its payload has.
    #[must_use]
    pub fn all_scores(&self, reward_components: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
        scores::of_row(&self.rules, reward_components, self.row.reward, &self.scores)
    }
}

impl AsRef<SealedRow> for ExportMember {
    fn as_ref(&self) -> &SealedRow {
        &self.row
    }
}
