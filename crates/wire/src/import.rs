//! Imports: what became of the documents of a source.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{BulkLine, Verdict, Violation};

/// The most refusals that a report lists. `refused` counts all of them.
pub const IMPORT_REFUSALS_MAX: usize = 100;

/// What became of the documents of one source.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImportReport {
    /// The file; absent if the source was a body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Name of the format.
    pub format: String,
    /// Number of documents that were read.
    pub documents: u64,
    /// Number of rollouts in them, without those of refused documents.
    pub rollouts: u64,
    /// Number of rollouts that were stored now.
    pub stored: u64,
    /// Number of rollouts that had been stored before and are the same.
    pub duplicates: u64,
    /// The rollouts that were stored now, by verdict.
    pub verdicts: ImportVerdicts,
    /// The rollouts that were stored now and are not kept, by reason.
    #[serde(default)]
    pub reasons: BTreeMap<String, u64>,
    /// What was left out of documents that were not refused, by a stable name.
    #[serde(default)]
    pub notes: BTreeMap<String, u64>,
    /// Number of documents that could not be read, and of rollouts that the service did not store.
    pub refused: u64,
    /// What was wrong, at most 100 entries.
    #[serde(default)]
    pub refusals: Vec<ImportRefusal>,
}

/// Numbers of rollouts by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImportVerdicts {
    /// Number of kept rollouts.
    pub kept: u64,
    /// Number of masked rollouts.
    pub masked: u64,
    /// Number of dropped rollouts.
    pub dropped: u64,
    /// Number of rollouts whose group was already decided.
    pub late: u64,
}

/// Why a document or a rollout was refused.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImportRefusal {
    /// Line on which the document begins, counted from 1.
    pub line: u64,
    /// Id of the rollout, if the document could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout_id: Option<String>,
    /// `invalid-document` if the document could not be read, otherwise the type of the problem with which the service
    /// refused the rollout, e.g. `rollout-conflict`.
    #[serde(rename = "type")]
    pub kind: String,
    /// JSON pointer (RFC 6901): into the document if it could not be read, otherwise into the trajectory that was made of
    /// it.
    pub pointer: String,
    /// Description of the error.
    pub detail: String,
}

impl ImportReport {
    /// A report about nothing yet.
    #[must_use]
    pub fn new(format: &str) -> Self {
        Self { format: format.to_owned(), ..Self::default() }
    }

    /// Counts a document that could not be read.
    pub fn refuse_document(&mut self, line: u64, violations: Vec<Violation>) {
        self.documents += 1;
        self.refused += 1;
        for Violation { pointer, detail } in violations {
            let kind = "invalid-document".to_owned();
            self.list(ImportRefusal { line, rollout_id: None, kind, pointer, detail });
        }
    }

    /// Counts a document that was read.
    pub fn read_document<'n>(&mut self, rollouts: usize, notes: impl IntoIterator<Item = (&'n str, u64)>) {
        self.documents += 1;
        self.rollouts += rollouts as u64;
        for (note, times) in notes {
            *self.notes.entry(note.to_owned()).or_default() += times;
        }
    }

    /// Counts the answer to a rollout. `line` is that of its document.
    pub fn answered(&mut self, line: u64, rollout_id: Option<&str>, answer: BulkLine) {
        let Some(receipt) = answer.receipt else {
            self.refused += 1;
            let problem = answer.problem.unwrap_or_default();
            let refusal = |pointer, detail| ImportRefusal {
                line,
                rollout_id: rollout_id.map(str::to_owned),
                kind: problem.kind.clone(),
                pointer,
                detail,
            };
            let detail = problem.detail.clone().unwrap_or_else(|| problem.title.clone());
            if problem.errors.is_empty() {
                self.list(refusal(String::new(), detail));
            }
            for Violation { pointer, detail } in problem.errors.clone() {
                self.list(refusal(pointer, detail));
            }
            return;
        };
        if receipt.duplicate {
            self.duplicates += 1;
            return;
        }
        self.stored += 1;
        *match receipt.verdict {
            Verdict::Kept => &mut self.verdicts.kept,
            Verdict::Masked => &mut self.verdicts.masked,
            Verdict::Dropped => &mut self.verdicts.dropped,
            Verdict::Late => &mut self.verdicts.late,
        } += 1;
        if let Some(reason) = receipt.reason {
            *self.reasons.entry(reason).or_default() += 1;
        }
    }

    fn list(&mut self, refusal: ImportRefusal) {
        if self.refusals.len() < IMPORT_REFUSALS_MAX {
            self.refusals.push(refusal);
        }
    }
}
