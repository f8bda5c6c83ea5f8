//! The facts about a record that the stages pass to filters: plain data, which [`variables`](super::variables) offers
//! to expressions.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

/// The facts for filters of scope `rollout`. An absent fact is `null` in an expression.
#[derive(Debug, Clone, Copy)]
pub struct RolloutFacts<'a> {
    /// `completed`, `truncated`, `aborted` or `failed`.
    pub status: &'a str,
    /// The reward of the whole rollout.
    pub reward: Option<f64>,
    /// The parts of the reward by name, as posted.
    pub reward_components: &'a BTreeMap<String, f64>,
    /// All scores that the rollout has.
    pub scores: &'a BTreeMap<String, f64>,
    /// The environment's label.
    pub environment: Option<&'a str>,
    /// The oldest version of the weights that generated a trained token.
    pub policy_version: i64,
    /// The version of the weights when the rollout is judged: at its arrival, or with its last score.
    pub version_current: i64,
    /// How many versions the rollout is behind, at least 0.
    pub staleness: i64,
    /// The number of segments.
    pub segments: i64,
    /// Tokens over all segments, prompts included.
    pub tokens: i64,
    /// Tokens after the prompts, over all segments.
    pub response_tokens: i64,
    /// Tokens whose loss mask is 1, over all segments.
    pub trained_tokens: i64,
    /// Tokens of the longest segment.
    pub max_segment_tokens: i64,
    /// The temperature of the sampling.
    pub temperature: f64,
    /// The producer's metadata; parsed only if a filter asks for it.
    pub metadata: Option<&'a RawValue>,
}

/// The facts for filters of scope `group`.
///
/// `reward_mean`, `reward_std` (of the population), `reward_min` and `reward_max` follow from
/// `rewards`, and are `null` when there are none.
#[derive(Debug, Clone, Copy)]
pub struct GroupFacts<'a> {
    /// The number of places of the group.
    pub size: i64,
    /// The number of rollouts that are trained.
    pub kept: i64,
    /// The number of rollouts that count in the baseline and are not trained.
    pub masked: i64,
    /// The rewards of the rollouts that count in the baseline.
    pub rewards: &'a [f64],
    /// Those reward components of the same rollouts that the rules read.
    pub components: &'a [&'a BTreeMap<String, f64>],
    /// Tokens over all rollouts.
    pub tokens: i64,
    /// The label of the environment that the rollouts share.
    pub environment: Option<&'a str>,
    /// Seconds since the group was opened.
    pub age_s: f64,
}
