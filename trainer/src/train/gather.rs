//! Collects the batches of one step and computes gradients that are safe to use.
//!
//! This is separate from the loop because most of it deals with data that cannot be trained on: rows without columns
//! that the objective reads, gradients that are not finite, and lost leases. Groups that are the cause are given back
//! by name. If many batches in a row fail, the cause is probably elsewhere, and the trainer stops before it has given
//! back all batches.

use std::time::Duration;

use super::{TrainError, Trainer};
use crate::{
    feed::{Delivery, Fed, Feed},
    learner::{Learner, StepOutcome},
    rows::{Rows, RowsError},
};

/// Number of consecutive batches whose gradients may contain NaN or infinity. After two of them the weights are
/// suspect.
const NOT_FINITE_MAX: u32 = 2;

/// Number of consecutive batches without any trainable group, after which a wrong model or objective is the probable
/// cause. A few producers that send wrong rows cause some such batches in a row, but seldom this many.
const MALFORMED_MAX: u32 = 8;

/// A leased batch whose rows can be trained on.
pub(super) struct Held {
    pub(super) delivery: Delivery,
    pub(super) rows: Rows,
}

/// The batches of a step, their rows together, and the gradients.
pub(super) struct Gathered {
    pub(super) held: Vec<Held>,
    pub(super) rows: Rows,
    pub(super) outcome: StepOutcome,
}

/// State that is kept from one step to the next.
#[derive(Default)]
pub(super) struct Gathering {
    held: Vec<Held>,
    /// Time without data since the last step.
    waited: Duration,
    /// Number of batches without finite gradients since the last batch with finite ones.
    not_finite: u32,
    /// Number of batches without a trainable group since the last batch that had one.
    malformed: u32,
}

impl Gathering {
    pub(super) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

/// Combines the rows of several batches into those of one step.
pub(super) fn merge(held: &[Held]) -> Rows {
    Rows::merge(&held.iter().map(|held| &held.rows).collect::<Vec<_>>())
}

impl Trainer<'_> {
    /// Returns the next batches whose gradients are finite, or `None` if the trainer is stopped before they are there.
    pub(super) fn gather(
        &mut self,
        gathering: &mut Gathering,
        feed: &mut Feed,
        learner: &mut Learner,
    ) -> Result<Option<Gathered>, TrainError> {
        loop {
            // Gradients of a batch whose lease is lost would be useless.
            for lost in gathering.held.extract_if(.., |held| held.delivery.is_lost()) {
                self.lost(&lost);
            }
            if gathering.held.len() < self.life.config.data.batches_per_step {
                let Some(Fed { delivery, waited }) = feed.next(self.life.runtime, self.life.stop)? else {
                    return Ok(None);
                };
                gathering.waited += waited;
                self.admit(gathering, delivery, learner)?;
                continue;
            }
            let rows = merge(&gathering.held);
            let outcome = learner.gradients(&rows)?;
            if outcome.is_finite() {
                gathering.not_finite = 0;
                return Ok(Some(Gathered { held: std::mem::take(&mut gathering.held), rows, outcome }));
            }
            self.refuse(gathering, learner)?;
        }
    }

    /// Keeps a batch that can be trained on, or gives its malformed groups back by name.
    fn admit(&mut self, gathering: &mut Gathering, delivery: Delivery, learner: &Learner) -> Result<(), TrainError> {
        match Rows::read(&delivery.rows, &learner.expected(), self.publisher.newest().version) {
            Ok(rows) => {
                gathering.malformed = 0;
                self.warn_of(&delivery, &rows);
                gathering.held.push(Held { delivery, rows });
                Ok(())
            }
            Err(error) => self.give_back(gathering, &delivery, &error),
        }
    }

    /// Warns about data that can be trained on but is probably not intended.
    fn warn_of(&self, delivery: &Delivery, rows: &Rows) {
        if !self.life.config.objective.reads_old_logprobs() {
            return;
        }
        let (statistics, batch_id) = (rows.statistics(), &delivery.batch.batch_id);
        if statistics.rows_without_logprobs > 0 {
            tracing::warn!(
                batch.id = batch_id,
                rows = statistics.rows_without_logprobs,
                "rows without logprobs are trained with a ratio of 1 to the weights of this step: stale rows are not \
                 corrected; let the policy `require` logprobs to refuse them"
            );
        }
        if statistics.rows_top_sampled > 0 {
            tracing::warn!(
                batch.id = batch_id,
                rows = statistics.rows_top_sampled,
                "rows were sampled with top_p below 1 or top_k: their logprobs are of another distribution than the \
                 model's, and every ratio is biased"
            );
        }
    }

    fn give_back(&self, gathering: &mut Gathering, delivery: &Delivery, error: &RowsError) -> Result<(), TrainError> {
        let groups = error.groups(&delivery.rows);
        let is_whole = groups.len() >= delivery.batch.groups as usize;
        gathering.malformed = if is_whole { gathering.malformed + 1 } else { 0 };
        let reason = error.to_string();
        if gathering.malformed >= MALFORMED_MAX {
            self.nack(delivery, &reason, None)?;
            return Err(stop(gathering.malformed, delivery, reason));
        }
        self.nack(delivery, &reason, Some(groups))
    }

    /// Gives back the batches whose gradients are not finite. The groups that cause this are named, unless all groups
    /// seem to.
    fn refuse(&mut self, gathering: &mut Gathering, learner: &mut Learner) -> Result<(), TrainError> {
        let is_alone = gathering.held.len() == 1;
        let mut whole = Vec::new();
        for held in std::mem::take(&mut gathering.held) {
            let culprits = learner.culprits(&held.rows)?;
            let names: Vec<String> = culprits.iter().map(|group| group.as_str().to_owned()).collect();
            if names.len() == held.rows.groups().len() || (names.is_empty() && is_alone) {
                let reason = "the gradients are not finite";
                self.nack(&held.delivery, reason, None)?;
                gathering.not_finite += 1;
                if gathering.not_finite >= NOT_FINITE_MAX {
                    return Err(stop(gathering.not_finite, &held.delivery, reason.to_owned()));
                }
            } else if names.is_empty() {
                whole.push(held);
            } else {
                let reason = format!("the gradients of group {} are not finite", names.join(", "));
                self.nack(&held.delivery, &reason, Some(names))?;
            }
        }
        if whole.len() == self.life.config.data.batches_per_step {
            // Each group is finite alone, but together they are not.
            let reason = "the gradients of the step are not finite";
            for held in &whole {
                self.nack(&held.delivery, reason, None)?;
            }
            return Err(stop(whole.len() as u32, &whole[0].delivery, reason.to_owned()));
        }
        gathering.held = whole;
        Ok(())
    }

    fn nack(&self, delivery: &Delivery, reason: &str, groups: Option<Vec<String>>) -> Result<(), TrainError> {
        tracing::error!(batch.id = delivery.batch.batch_id, reason, ?groups, "the batch is given back");
        self.reporter.given_back();
        self.wait(self.life.service.nack(&delivery.batch, reason, groups))
    }
}

fn stop(refused: u32, delivery: &Delivery, reason: String) -> TrainError {
    TrainError::Refused { refused, batch_id: delivery.batch.batch_id.clone(), reason }
}
