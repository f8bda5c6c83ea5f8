//! Evaluation: rollouts that are never trained, in suites of tasks, and what they say about each version.

use serde::{Deserialize, Serialize};

use super::Status;

/// What a rollout is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// It is trained.
    #[default]
    Train,
    /// It is a result of a suite, and never trained.
    Eval,
}

impl Purpose {
    /// Whether this is the purpose that is meant where none is named.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// When a suite is complete at a version. Omitted keys take their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SuiteRequest {
    /// How many tasks it has.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65536))]
    pub tasks: u32,
    /// How many rollouts of each task it wants, which is the largest k of pass@k.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 256, required = false, default = 1))]
    pub repeats: u32,
    /// The reward from which a rollout passes. It counts for rollouts that come later.
    #[serde(default = "whole")]
    #[cfg_attr(feature = "openapi", schema(required = false, default = 1.0))]
    pub threshold: f64,
}

fn one() -> u32 {
    1
}

fn whole() -> f64 {
    1.0
}

/// A suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SuiteInfo {
    /// Policy that is evaluated.
    pub policy: String,
    /// Name of the suite.
    pub suite: String,
    /// How many tasks it has; null if nobody has said.
    pub tasks: Option<u32>,
    /// How many rollouts of each task it wants.
    pub repeats: u32,
    /// The reward from which a rollout passes.
    pub threshold: f64,
}

/// What suites say about the versions of a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalList {
    /// Policy that is evaluated.
    pub policy: String,
    /// The suites, by name.
    pub suites: Vec<SuiteEvals>,
}

/// What a suite says about versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SuiteEvals {
    /// Name of the suite.
    pub suite: String,
    /// How many tasks it has; null if nobody has said.
    pub tasks: Option<u32>,
    /// How many rollouts of each task it wants.
    pub repeats: u32,
    /// The reward from which a rollout passes.
    pub threshold: f64,
    /// The versions, newest first.
    pub versions: Vec<EvalVersion>,
    /// Whether there are older versions: ask for those `before` the last one.
    pub more: bool,
}

/// What a suite says about a version. Tasks count alike, however many rollouts they have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalVersion {
    /// Weight version.
    pub version: i64,
    /// Optimizer step of the version, if it is known.
    pub step: Option<i64>,
    /// Whether as many tasks as the suite has have as many rollouts as it wants.
    pub complete: bool,
    /// Rollouts that count: they have a reward, and tokens of one version only.
    pub n: u64,
    /// Tasks with such a rollout.
    pub tasks: u64,
    /// Rollouts with a reward that do not count, because their tokens are of several versions.
    pub mixed_versions: u64,
    /// Mean of the mean rewards of tasks.
    pub mean: f64,
    /// Standard error of that mean: the unbiased standard deviation of the tasks' means, over the root of their number;
    /// null with fewer than two tasks.
    pub standard_error: Option<f64>,
    /// pass@k for each k from 1 to `repeats`, as far as tasks have k rollouts.
    pub pass_at: Vec<PassAt>,
    /// How it differs from the version before that has tasks in common with it.
    pub difference: Option<EvalDifference>,
    /// When its first rollout that counts was decided.
    pub first_at: String,
    /// When its last one was.
    pub last_at: String,
}

/// The probability that at least one of k rollouts of a task passes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PassAt {
    /// Number of rollouts.
    pub k: u32,
    /// Mean over tasks of `1 - C(n - c, k) / C(n, k)`, where c of the n rollouts of a task pass.
    pub estimate: f64,
    /// Tasks with at least k rollouts.
    pub tasks: u64,
    /// Bounds of the interval of 95% over tasks: the estimate, and 1.96 standard errors to both sides; null with fewer than
    /// two tasks.
    pub low: Option<f64>,
    /// The upper bound.
    pub high: Option<f64>,
}

/// The difference between two versions over the tasks that both have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalDifference {
    /// The version before.
    pub version: i64,
    /// Tasks that both have.
    pub tasks: u64,
    /// Mean of the differences of the tasks' mean rewards.
    pub mean: f64,
    /// Bounds of the interval of 95%: the mean, and 1.96 standard errors of it to both sides; null with fewer than two tasks.
    pub low: Option<f64>,
    /// The upper bound.
    pub high: Option<f64>,
    /// Tasks whose mean reward is higher than before.
    pub won: u64,
    /// Tasks whose mean reward is lower.
    pub lost: u64,
}

/// The tasks of a suite at a version, beside those of the version before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalTaskList {
    /// Policy that is evaluated.
    pub policy: String,
    /// Name of the suite.
    pub suite: String,
    /// Weight version.
    pub version: i64,
    /// The version that it is compared with; null if there is none before.
    pub before: Option<i64>,
    /// The tasks by name.
    pub tasks: Vec<EvalTask>,
    /// The name to send as `after` for the next page; null on the last one.
    pub next: Option<String>,
}

/// A task at two versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalTask {
    /// Name of the task.
    pub task: String,
    /// What its rollouts say; null if it has none.
    pub now: Option<EvalTaskResult>,
    /// What they said at the version before; null if it had none.
    pub before: Option<EvalTaskResult>,
}

/// What the rollouts of a task say at a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalTaskResult {
    /// Rollouts that count.
    pub n: u64,
    /// How many of them pass.
    pub passed: u64,
    /// Their mean reward.
    pub mean: f64,
    /// The first of its rollouts whose rows are still there, at most 16.
    pub rollouts: Vec<EvalRollout>,
}

/// A rollout of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalRollout {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Its reward; null if it has none, or waits for scores.
    #[serde(serialize_with = "super::finite::serialize")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub reward: Option<f64>,
    /// How its execution ended.
    pub status: Status,
}
