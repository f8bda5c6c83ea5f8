//! The log of steps: what the batches of each step of a trainer had in all, for people who look at it.
//!
//! Acks write the log, and it outlives the batches.

use crate::{
    clock::Timestamp,
    ids::{PolicyPk, Run},
    pages::Order,
};

/// Which page of steps to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadSteps {
    pub policy: PolicyPk,
    pub run: Run,
    /// Whether the page begins with the oldest or the newest step.
    pub order: Order,
    /// The last step of the page before.
    pub after: Option<StepCursor>,
    /// The most steps.
    pub limit: u32,
}

/// The place of a row. A step has a row for each epoch in which it was acked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCursor {
    pub step: i64,
    pub epoch: i64,
}

#[derive(Clone, Debug, Default)]
pub struct StepPage {
    pub steps: Vec<StepRow>,
    /// Where the next page begins, if there may be one.
    pub next: Option<StepCursor>,
}

/// A step in one epoch. Sums are of its batches.
#[derive(Clone, Debug)]
pub struct StepRow {
    pub step: i64,
    pub epoch: i64,
    /// When its last batch was acked.
    pub acked_at: Timestamp,
    pub batches: i64,
    pub groups: i64,
    /// Groups of several rewards that are all equal.
    pub flat_groups: i64,
    pub rollouts: i64,
    pub tokens: i64,
    pub trained_tokens: i64,
    /// Sum of the rewards that count in the baselines.
    pub reward_sum: f64,
    /// Their number.
    pub reward_count: i64,
    /// Mean of the rewards that arrived before the batches were cut.
    pub reward_all: Option<f64>,
    /// Sum of the staleness of the groups.
    pub stale_sum: i64,
    /// The most of it.
    pub stale_max: i64,
    /// How long the consumers had waited.
    pub waited_us: i64,
    /// How long they held the batches.
    pub held_us: i64,
    /// Deliveries.
    pub attempts: i64,
    /// Version when the batches were cut.
    pub version: i64,
    /// Whether a resume went back before the step.
    pub undone: bool,
}

/// Which steps to read together.
#[derive(Clone, Copy, Debug)]
pub struct ReadStepBuckets {
    pub policy: PolicyPk,
    pub run: Run,
    /// The first step.
    pub from: i64,
    /// The last step.
    pub to: i64,
    /// The number of steps in a bucket, at least 1.
    pub width: i64,
}

/// Buckets in order.
pub type StepBuckets = Vec<StepBucket>;

/// Several steps. What was undone is only counted.
#[derive(Clone, Debug)]
pub struct StepBucket {
    /// The first step that was acked.
    pub step_from: i64,
    /// The last one.
    pub step_to: i64,
    /// When the last batch was acked.
    pub acked_at: Timestamp,
    /// The number of steps.
    pub steps: i64,
    /// The number of steps that a resume went back before.
    pub undone: i64,
    /// The greatest staleness.
    pub staleness_max: Option<i64>,
    /// The most deliveries.
    pub attempts_max: Option<i64>,
    /// The newest version.
    pub version: Option<i64>,
    /// Mean reward of the trained rollouts.
    pub reward_trained: Option<Spread>,
    /// Mean reward of what arrived.
    pub reward_all: Option<Spread>,
    /// Mean staleness.
    pub staleness: Option<Spread>,
    pub tokens: Option<Spread>,
    pub groups: Option<Spread>,
    /// Groups without any difference in their rewards.
    pub flat_groups: Option<Spread>,
    /// Milliseconds for which the consumers had waited.
    pub waited_ms: Option<Spread>,
    /// Milliseconds for which they held the batches.
    pub held_ms: Option<Spread>,
}

/// A number of several steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub mean: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

/// The most buckets of an answer.
pub const BUCKETS_MAX: i64 = 1_000;

/// The newest steps of a policy that are kept, of all its runs.
pub const STEPS_MAX: i64 = 100_000;
