//! Converts rows of the service's `/samples` to training rows. The next stage is [`crate::microbatch`].
//!
//! This is separate because it is the only place that handles unchecked data. A [`Row`] is checked once and contains
//! per-token columns only at its trained tokens, so values that a producer wrote at masked tokens cannot reach a loss.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;

use forebay_client::wire::{Sample, VersionSpan};

/// Range of log-probabilities that a model can have computed: above 0 only by rounding, and no placeholder for "never
/// sampled", whose importance ratio would be meaningless.
const LOGPROBS: RangeInclusive<f32> = -1_000.0..=0.01;

/// The rows of one batch with trained tokens, and statistics over all of its rows.
#[derive(Debug)]
pub struct Rows {
    trained: Vec<Row>,
    statistics: BatchStatistics,
}

/// One sequence, which is one segment, with at least one trained token.
///
/// Per-token columns cover the K response tokens with mask 1, in order. [`Row::positions`] contains their positions in
/// the response.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    index: usize,
    rollout_id: RolloutId,
    group_id: GroupId,
    segment: i32,
    inputs: Vec<i64>,
    prompt_length: usize,
    response_length: usize,
    positions: Vec<i64>,
    targets: Vec<i64>,
    logprobs: Option<Vec<f32>>,
    teacher_logprobs: Option<Vec<f32>>,
    values: Option<Vec<f32>>,
    temperature: f32,
    /// Whether `top_p` or `top_k` excluded tokens.
    is_top_sampled: bool,
    reward: Option<f64>,
    advantages: Vec<f32>,
    loss_weight: f64,
    policy_version: Option<i64>,
    versions: Vec<VersionSpan>,
}

/// Id of a rollout within its policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RolloutId(String);

/// Id of a group of rollouts within its policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(String);

/// Requirements for rows that are trained on.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Size of the model's vocabulary.
    pub vocabulary: usize,
    /// Longest trained sequence, prompt and response, in tokens.
    pub tokens_max: usize,
    /// Columns that the objective reads.
    pub needs: Needs,
}

/// Columns that every trained row must have, each with the setting that reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Behaviour log-probabilities.
    pub logprobs: Option<&'static str>,
    /// Teacher log-probabilities.
    pub teacher_logprobs: Option<&'static str>,
    /// The reward of the rollout.
    pub reward: Option<&'static str>,
}

/// Statistics of all rows of a batch, trained or not. A rollout counts once, however many rows it has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchStatistics {
    /// Number of rollouts.
    pub rollouts: usize,
    /// Number of rollouts with a trained token.
    pub rollouts_trained: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of rows without tokens, which count only in the rewards.
    pub rows_without_tokens: usize,
    /// Number of prompt and response tokens.
    pub tokens: usize,
    /// Number of tokens with mask 1.
    pub tokens_trained: usize,
    /// Number of trained rows without behaviour log-probabilities; their ratio is 1.
    pub rows_without_logprobs: usize,
    /// Number of trained rows that were not sampled from the full vocabulary. Their log-probabilities belong to another
    /// distribution than the model's, so every ratio is biased.
    pub rows_top_sampled: usize,
    /// Mean reward of the rollouts that have one.
    pub reward_mean: Option<f64>,
    /// Mean reward of the rollouts that have one and a trained token.
    pub reward_trained_mean: Option<f64>,
    /// Mean over trained rollouts of the current version minus the version of the rollout.
    pub staleness_mean: Option<f64>,
    /// Largest staleness of a trained rollout.
    pub staleness_max: Option<i64>,
}

/// The errors of all rows that cannot be trained on.
#[derive(Debug, thiserror::Error)]
#[error("{} rows of the batch are malformed, first: {}", .violations.len(), .violations.first().map(ToString::to_string).unwrap_or_default())]
pub struct RowsError {
    /// The errors, in the order of the rows; never empty.
    pub violations: Vec<RowViolation>,
}

/// An error in one field of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowViolation {
    /// Position of the row in the batch, from 0.
    pub row: usize,
    /// Rollout of the row.
    pub rollout_id: RolloutId,
    /// The field's name on the wire.
    pub field: &'static str,
    /// The expected value.
    pub reason: String,
}

impl RowsError {
    /// The groups of the malformed rows, each once, in ascending order.
    #[must_use]
    pub fn groups(&self, samples: &[Sample]) -> Vec<String> {
        let groups: BTreeSet<&String> = self
            .violations
            .iter()
            .filter_map(|violation| samples.get(violation.row))
            .map(|sample| &sample.group_id)
            .collect();
        groups.into_iter().cloned().collect()
    }
}

impl Rows {
    /// Checks and converts the rows of a batch. `version_current` is the policy's version against which staleness is
    /// measured.
    pub fn read(samples: &[Sample], expected: &Expected, version_current: i64) -> Result<Self, RowsError> {
        let mut violations = Vec::new();
        let mut trained = Vec::new();
        for (index, sample) in samples.iter().enumerate() {
            match Row::read(index, sample, expected) {
                Ok(row) => trained.extend(row),
                Err(found) => violations.extend(found),
            }
        }
        if !violations.is_empty() {
            return Err(RowsError { violations });
        }
        let statistics = BatchStatistics::of(samples, &trained, version_current);
        Ok(Self { trained, statistics })
    }

    /// Combines the rows of several batches into those of one step. Every batch has the same weight, so loss weights
    /// are divided by the number of batches.
    #[must_use]
    pub fn merge(batches: &[&Self]) -> Self {
        let share = 1.0 / batches.len().max(1) as f64;
        let trained: Vec<Row> = batches
            .iter()
            .flat_map(|batch| batch.trained.iter().cloned())
            .map(|row| Row { loss_weight: row.loss_weight * share, ..row })
            .collect();
        Self { trained, statistics: BatchStatistics::merge(batches) }
    }

    /// The trained rows of one group, with the statistics of the whole batch.
    #[must_use]
    pub fn of_group(&self, group: &GroupId) -> Self {
        let trained = self.trained.iter().filter(|row| row.group_id == *group).cloned().collect();
        Self { trained, statistics: self.statistics }
    }

    /// Groups with a trained row, each once, in ascending order.
    #[must_use]
    pub fn groups(&self) -> BTreeSet<&GroupId> {
        self.trained.iter().map(Row::group_id).collect()
    }

    /// Rows with at least one trained token, in the order of the batch.
    #[must_use]
    pub fn trained(&self) -> &[Row] {
        &self.trained
    }

    /// Statistics over all rows.
    #[must_use]
    pub fn statistics(&self) -> &BatchStatistics {
        &self.statistics
    }
}

impl Row {
    /// Returns `None` for a row without trained tokens.
    fn read(index: usize, sample: &Sample, expected: &Expected) -> Result<Option<Self>, Vec<RowViolation>> {
        let mut check = Check { row: index, sample, violations: Vec::new() };
        let shape = check.shape(expected.vocabulary);
        check.scalars();
        let (Some((tokens, mask)), true) = (shape, check.violations.is_empty()) else {
            return if check.violations.is_empty() { Ok(None) } else { Err(check.violations) };
        };
        let trained: Vec<usize> = (0..mask.len()).filter(|&t| mask[t] == 1).collect();
        let logprobs = check.logprobs("logprobs", sample.logprobs.as_deref(), mask.len(), &trained);
        let teacher_logprobs =
            check.logprobs("teacher_logprobs", sample.teacher_logprobs.as_deref(), mask.len(), &trained);
        let values = check.column("values", sample.values.as_deref(), mask.len(), &trained);
        let advantages = match sample.advantage {
            Some(advantage) => vec![advantage; trained.len()],
            None => check.column("advantages", sample.advantages.as_deref(), mask.len(), &trained).unwrap_or_default(),
        };
        if !trained.is_empty() {
            check.trainable(tokens.len(), expected);
        }
        if !check.violations.is_empty() {
            return Err(check.violations);
        }
        let Some(&last) = trained.last() else { return Ok(None) };
        let prompt_length = tokens.len() - mask.len();
        Ok(Some(Self {
            index,
            rollout_id: RolloutId(sample.rollout_id.clone()),
            group_id: GroupId(sample.group_id.clone()),
            segment: sample.segment,
            inputs: tokens[..prompt_length + last].iter().map(|&id| i64::from(id)).collect(),
            prompt_length,
            response_length: mask.len(),
            positions: trained.iter().map(|&t| t as i64).collect(),
            targets: trained.iter().map(|&t| i64::from(tokens[prompt_length + t])).collect(),
            logprobs,
            teacher_logprobs,
            values,
            temperature: sample.temperature,
            is_top_sampled: sample.top_p < 1.0 || sample.top_k > 0,
            reward: sample.reward,
            advantages,
            loss_weight: sample.loss_weight,
            policy_version: sample.policy_version,
            versions: sample.versions.clone().unwrap_or_default(),
        }))
    }

    /// Position of the row in the batch as delivered, from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Rollout of the row.
    #[must_use]
    pub fn rollout_id(&self) -> &RolloutId {
        &self.rollout_id
    }

    /// Group of the row.
    #[must_use]
    pub fn group_id(&self) -> &GroupId {
        &self.group_id
    }

    /// Position of the segment in its rollout, from 0.
    #[must_use]
    pub fn segment(&self) -> i32 {
        self.segment
    }

    /// Token ids that a model must read to predict every trained token: all tokens before the last trained one. Causal
    /// attention does not use later tokens, so leaving them out saves work.
    #[must_use]
    pub fn inputs(&self) -> &[i64] {
        &self.inputs
    }

    /// Number of prompt tokens, at least 1.
    #[must_use]
    pub fn prompt_length(&self) -> usize {
        self.prompt_length
    }

    /// Number of response tokens, including masked ones.
    #[must_use]
    pub fn response_length(&self) -> usize {
        self.response_length
    }

    /// Number K of trained tokens, at least 1.
    #[must_use]
    pub fn trained_length(&self) -> usize {
        self.positions.len()
    }

    /// Response positions of the trained tokens, from 0, ascending.
    #[must_use]
    pub fn positions(&self) -> &[i64] {
        &self.positions
    }

    /// Ids of the trained tokens.
    #[must_use]
    pub fn targets(&self) -> &[i64] {
        &self.targets
    }

    /// Behaviour log-probabilities of the trained tokens.
    #[must_use]
    pub fn logprobs(&self) -> Option<&[f32]> {
        self.logprobs.as_deref()
    }

    /// Teacher log-probabilities of the trained tokens.
    #[must_use]
    pub fn teacher_logprobs(&self) -> Option<&[f32]> {
        self.teacher_logprobs.as_deref()
    }

    /// Critic values read before each trained token.
    #[must_use]
    pub fn values(&self) -> Option<&[f32]> {
        self.values.as_deref()
    }

    /// Divisor of the logits at sampling, above 0.
    #[must_use]
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Reward of the rollout.
    #[must_use]
    pub fn reward(&self) -> Option<f64> {
        self.reward
    }

    /// Advantages of the trained tokens. They are equal, unless each token was given its own.
    #[must_use]
    pub fn advantages(&self) -> &[f32] {
        &self.advantages
    }

    /// Weight of each trained token in the loss.
    #[must_use]
    pub fn loss_weight(&self) -> f64 {
        self.loss_weight
    }

    /// Weight version of the rollout: its oldest span with a trained token.
    #[must_use]
    pub fn policy_version(&self) -> Option<i64> {
        self.policy_version
    }

    /// Version spans over the response as the producer sent them; empty if it sent none.
    #[must_use]
    pub fn versions(&self) -> &[VersionSpan] {
        &self.versions
    }
}

impl RolloutId {
    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl GroupId {
    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl BatchStatistics {
    fn of(samples: &[Sample], trained: &[Row], version_current: i64) -> Self {
        let rewards: BTreeMap<&str, Option<f64>> =
            samples.iter().map(|sample| (sample.rollout_id.as_str(), sample.reward)).collect();
        let learners: BTreeMap<&str, &Row> = trained.iter().map(|row| (row.rollout_id.as_str(), row)).collect();
        let staleness: Vec<i64> =
            learners.values().filter_map(|row| row.policy_version).map(|version| version_current - version).collect();
        let mean = |numbers: &[f64]| (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64);
        Self {
            rollouts: rewards.len(),
            rollouts_trained: learners.len(),
            rows: samples.len(),
            rows_without_tokens: samples.iter().filter(|sample| sample.tokens.is_none()).count(),
            tokens: samples.iter().filter_map(|sample| sample.tokens.as_ref()).map(Vec::len).sum(),
            tokens_trained: trained.iter().map(Row::trained_length).sum(),
            rows_without_logprobs: trained.iter().filter(|row| row.logprobs.is_none()).count(),
            rows_top_sampled: trained.iter().filter(|row| row.is_top_sampled).count(),
            reward_mean: mean(&rewards.values().copied().flatten().collect::<Vec<_>>()),
            reward_trained_mean: mean(&learners.values().filter_map(|row| row.reward).collect::<Vec<_>>()),
            staleness_mean: mean(&staleness.iter().map(|&versions| versions as f64).collect::<Vec<_>>()),
            staleness_max: staleness.into_iter().max(),
        }
    }
}

impl BatchStatistics {
    fn merge(batches: &[&Rows]) -> Self {
        let each = || batches.iter().map(|batch| &batch.statistics);
        let sum = |read: fn(&Self) -> usize| each().map(read).sum();
        let weighted = |read: fn(&Self) -> Option<f64>, weight: fn(&Self) -> usize| {
            let known: Vec<(f64, f64)> =
                each().filter_map(|batch| Some((read(batch)?, weight(batch) as f64))).collect();
            let total: f64 = known.iter().map(|(_, weight)| weight).sum();
            (total > 0.0).then(|| known.iter().map(|(value, weight)| value * weight).sum::<f64>() / total)
        };
        Self {
            rollouts: sum(|batch| batch.rollouts),
            rollouts_trained: sum(|batch| batch.rollouts_trained),
            rows: sum(|batch| batch.rows),
            rows_without_tokens: sum(|batch| batch.rows_without_tokens),
            tokens: sum(|batch| batch.tokens),
            tokens_trained: sum(|batch| batch.tokens_trained),
            rows_without_logprobs: sum(|batch| batch.rows_without_logprobs),
            rows_top_sampled: sum(|batch| batch.rows_top_sampled),
            reward_mean: weighted(|batch| batch.reward_mean, |batch| batch.rollouts),
            reward_trained_mean: weighted(|batch| batch.reward_trained_mean, |batch| batch.rollouts_trained),
            staleness_mean: weighted(|batch| batch.staleness_mean, |batch| batch.rollouts_trained),
            staleness_max: each().filter_map(|batch| batch.staleness_max).max(),
        }
    }
}

impl fmt::Display for RowViolation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, rollout_id, field, reason } = self;
        write!(formatter, "row {row} (rollout {}): {field} {reason}", rollout_id.as_str())
    }
}

/// Collects the errors of one row.
struct Check<'a> {
    row: usize,
    sample: &'a Sample,
    violations: Vec<RowViolation>,
}

impl<'a> Check<'a> {
    /// Returns tokens and mask if they match each other; `None` for a row without tokens.
    fn shape(&mut self, vocabulary: usize) -> Option<(&'a [i32], &'a [u8])> {
        let tokens = self.sample.tokens.as_deref()?;
        let Some(mask) = self.sample.loss_mask.as_deref() else {
            self.refuse("loss_mask", "is missing although the row has tokens");
            return None;
        };
        if usize::try_from(self.sample.response_length) != Ok(mask.len()) {
            let reason = format!("has {} entries, but response_length is {}", mask.len(), self.sample.response_length);
            self.refuse("loss_mask", reason);
        }
        // Nothing was sampled if the mask is empty.
        if mask.len() >= tokens.len() {
            let reason = format!(
                "has {} entries, of which {} are the response: the prompt needs at least one",
                tokens.len(),
                mask.len()
            );
            self.refuse("tokens", reason);
        }
        if mask.iter().any(|&entry| entry > 1) {
            self.refuse("loss_mask", "contains a value other than 0 and 1");
        }
        if let Some(id) = tokens.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= vocabulary)) {
            self.refuse("tokens", format!("contains id {id}, but the vocabulary has {vocabulary}"));
        }
        Some((tokens, mask))
    }

    fn scalars(&mut self) {
        let Sample { temperature, advantage, loss_weight, reward, .. } = *self.sample;
        if !(temperature.is_finite() && temperature > 0.0) {
            self.refuse("temperature", format!("is {temperature}, but must be finite and above 0"));
        }
        if let Some(advantage) = advantage.filter(|advantage| !advantage.is_finite()) {
            self.refuse("advantage", format!("is {advantage}, but must be finite"));
        }
        if !(loss_weight.is_finite() && loss_weight >= 0.0) {
            self.refuse("loss_weight", format!("is {loss_weight}, but must be finite and at least 0"));
        }
        if reward.is_some_and(|reward| !reward.is_finite()) {
            self.refuse("reward", "is not finite");
        }
    }

    /// Checks what the objective and the model need of a row with a trained token.
    fn trainable(&mut self, length: usize, expected: &Expected) {
        if length > expected.tokens_max {
            self.refuse("tokens", format!("has {length} entries, but at most {} can be trained", expected.tokens_max));
        }
        let Needs { logprobs, teacher_logprobs, reward } = expected.needs;
        let columns = [
            ("logprobs", logprobs, self.sample.logprobs.is_none()),
            ("teacher_logprobs", teacher_logprobs, self.sample.teacher_logprobs.is_none()),
            ("reward", reward, self.sample.reward.is_none()),
            ("advantages", Some("a row without an advantage"), {
                self.sample.advantage.is_none() && self.sample.advantages.is_none()
            }),
        ];
        for (field, reader, is_missing) in columns {
            if let Some(reader) = reader.filter(|_| is_missing) {
                self.refuse(field, format!("is missing, and {reader} reads it"));
            }
        }
    }

    /// Returns the entries of a column of log-probabilities at the trained tokens.
    fn logprobs(
        &mut self,
        field: &'static str,
        column: Option<&[f32]>,
        length: usize,
        trained: &[usize],
    ) -> Option<Vec<f32>> {
        let kept = self.column(field, column, length, trained)?;
        let outside = kept.iter().find(|entry| entry.is_finite() && !LOGPROBS.contains(*entry));
        if let Some(entry) = outside {
            let (low, high) = (LOGPROBS.start(), LOGPROBS.end());
            self.refuse(field, format!("is {entry} at a trained token, but must be between {low} and {high}"));
        }
        Some(kept)
    }

    /// Returns the entries of a per-token column at the trained tokens.
    fn column(
        &mut self,
        field: &'static str,
        column: Option<&[f32]>,
        length: usize,
        trained: &[usize],
    ) -> Option<Vec<f32>> {
        let column = column?;
        if column.len() != length {
            self.refuse(field, format!("has {} entries, but the response has {length}", column.len()));
            return None;
        }
        let kept: Vec<f32> = trained.iter().map(|&t| column[t]).collect();
        if kept.iter().any(|entry| !entry.is_finite()) {
            self.refuse(field, "is not finite at a trained token");
        }
        Some(kept)
    }

    fn refuse(&mut self, field: &'static str, reason: impl Into<String>) {
        let rollout_id = RolloutId(self.sample.rollout_id.clone());
        self.violations.push(RowViolation { row: self.row, rollout_id, field, reason: reason.into() });
    }
}

#[cfg(test)]
pub(crate) mod tests;
