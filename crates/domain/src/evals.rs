//! Evaluation: rollouts that are never trained, as results of suites, and what they say about each version.
//!
//! The store keeps the rollouts that evaluate a policy as a policy of their own ([`PolicyName::evaluations`]), with rules
//! that follow from those of the policy ([`rules`]). Everything that stores, scores, shows and exports rollouts works on them
//! as on others, and whatever trains or counts for training never meets them.

use std::collections::BTreeMap;

use forebay_wire::{
    self as wire, Advantage, AdvantageName, EvalDifference, FilterAction, FilterRule, FilterScope, GroupRules, OnDrop,
    PassAt, PolicyRules, Purpose, StalenessRules, SuiteRequest, Violation,
};

use crate::{
    clock::Timestamp,
    ids::{PolicyName, RolloutId, Version, check_name},
    reasons,
};

/// The most suites of a policy.
pub const SUITES_MAX: usize = 256;

/// The most tasks of a suite. At a version, further tasks do not count.
pub const TASKS_MAX: u32 = 65_536;

/// The most rollouts of each task that a suite may want.
pub const REPEATS_MAX: u32 = 256;

/// The versions of a suite whose results are kept.
pub const VERSIONS_MAX: i64 = 1_000;

/// The most results of tasks that one answer is computed from, unless it is about one version.
pub const RESULTS_MAX: u64 = 100_000;

/// The most rollouts of a task at a version that are listed.
pub const ROLLOUTS_SHOWN: usize = 16;

/// The largest reward that a sum of rewards takes, so that no sum overflows, which Postgres refuses.
const REWARD_MAX: f64 = 1e290;

/// Standard errors to each side of an estimate that make an interval of 95%.
const Z: f64 = 1.96;

/// The task that a rollout evaluates its policy on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluates {
    pub suite: String,
    pub task: String,
}

impl Evaluates {
    /// Of a rollout with these fields; none if it is to be trained. Pushes what is wrong, with pointers that begin with `at`.
    pub fn parse(
        (purpose, suite, task): (Purpose, Option<&str>, Option<&str>),
        rollout_id: &str,
        mut refuse: impl FnMut(&str, String),
    ) -> Option<Self> {
        if purpose == Purpose::Train {
            for (pointer, given) in [("/suite", suite), ("/task", task)] {
                if given.is_some() {
                    refuse(pointer, "is only for rollouts with `\"purpose\": \"eval\"`".to_owned());
                }
            }
            return None;
        }
        let Some(suite) = suite else {
            refuse("/suite", "is needed with `\"purpose\": \"eval\"`".to_owned());
            return None;
        };
        if let Err(error) = PolicyName::parse(suite) {
            refuse("/suite", error.to_string());
        }
        if let Some(Err(detail)) = task.map(check_name) {
            refuse("/task", detail);
        }
        Some(Self { suite: suite.to_owned(), task: task.unwrap_or(rollout_id).to_owned() })
    }
}

/// The rules for the rollouts that evaluate a policy with these rules. Each is alone, is asked for a reward and nothing else,
/// and is decided as soon as it has its scores. A filter takes it out of what could be trained, so no version of the service
/// makes a batch of it.
#[must_use]
pub fn rules(trained: &PolicyRules) -> PolicyRules {
    let mut rules = trained.clone();
    rules.require = Vec::new();
    rules.group = GroupRules { size: 1, min_size: None, on_drop: OnDrop::Shrink, ..trained.group.clone() };
    rules.batch = wire::BatchRules::default();
    rules.advantage = Advantage::Named(AdvantageName::None);
    rules.loss_weighting = wire::LossWeighting::default();
    rules.loss_constant = None;
    rules.staleness = StalenessRules::default();
    rules.backlog.max_ready_rollouts = trained.admissions.eval;
    rules.retention.dropped_s = trained.retention.evaluated_s;
    rules.sessions.teacher = None;
    rules.columns.values_mut().for_each(|rule| rule.required = false);
    // What a whole group is leased for is leased for each rollout, which is a group of its own.
    rules.filter = vec![FilterRule {
        name: reasons::EVALUATED.to_owned(),
        scope: FilterScope::Group,
        when: "true".to_owned(),
        action: FilterAction::Drop,
    }];
    rules
}

/// When a suite is complete at a version.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    pub name: String,
    /// None if nobody has said.
    pub tasks: Option<u32>,
    pub repeats: u32,
    pub threshold: f64,
}

impl Suite {
    /// A suite of which nobody has said anything.
    #[must_use]
    pub fn unknown(name: String) -> Self {
        Self { name, tasks: None, repeats: 1, threshold: 1.0 }
    }

    /// Checks a suite; a refusal has every violation.
    pub fn parse(name: &str, sent: &SuiteRequest) -> Result<Self, Vec<Violation>> {
        let mut violations = Vec::new();
        let mut require = |holds: bool, pointer: &str, detail: String| {
            if !holds {
                violations.push(Violation { pointer: pointer.to_owned(), detail });
            }
        };
        require(PolicyName::parse(name).is_ok(), "suite", "must match [A-Za-z0-9._-]{1,128}".to_owned());
        require((1..=TASKS_MAX).contains(&sent.tasks), "/tasks", format!("must be 1 to {TASKS_MAX}"));
        require((1..=REPEATS_MAX).contains(&sent.repeats), "/repeats", format!("must be 1 to {REPEATS_MAX}"));
        require(sent.threshold.is_finite(), "/threshold", "must be finite".to_owned());
        let SuiteRequest { tasks, repeats, threshold } = *sent;
        if violations.is_empty() {
            Ok(Self { name: name.to_owned(), tasks: Some(tasks), repeats, threshold })
        } else {
            Err(violations)
        }
    }
}

/// Writes a suite.
#[derive(Clone, Debug)]
pub struct PutSuite {
    pub policy: PolicyName,
    pub suite: Suite,
    pub now: Timestamp,
}

/// Looks up what suites say about versions.
#[derive(Clone, Debug)]
pub struct FindEvals {
    pub policy: PolicyName,
    /// One suite, or all.
    pub suite: Option<String>,
    /// Only versions below this one.
    pub before: Option<Version>,
    /// The most versions of each suite.
    pub limit: u32,
}

/// A suite with the results of its newest versions, and of the version before each.
#[derive(Clone, Debug)]
pub struct FoundSuite {
    pub suite: Suite,
    /// Newest first. If `more`, the last one is there to be compared with.
    pub versions: Vec<FoundVersion>,
    /// Whether there are older ones than those that were asked for.
    pub more: bool,
}

/// A version at which a suite has results.
#[derive(Clone, Debug)]
pub struct FoundVersion {
    pub version: Version,
    pub step: Option<i64>,
    pub mixed: u64,
    pub first_at: Timestamp,
    pub last_at: Timestamp,
    pub tasks: BTreeMap<String, TaskResult>,
}

/// What the rollouts of a task say at a version.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TaskResult {
    pub rollouts: u64,
    pub passed: u64,
    pub reward_sum: f64,
}

impl TaskResult {
    /// Adds a rollout.
    pub fn add(&mut self, passes: bool, reward: f64) {
        self.rollouts += 1;
        self.passed += u64::from(passes);
        self.reward_sum += reward.clamp(-REWARD_MAX, REWARD_MAX);
    }

    #[must_use]
    pub fn mean(&self) -> f64 {
        self.reward_sum / (self.rollouts.max(1)) as f64
    }
}

/// Whether a suite is complete at a version.
#[derive(Clone, Debug)]
pub struct IsComplete {
    pub policy: PolicyName,
    pub suite: String,
    pub version: Version,
}

/// Looks up the tasks of a suite at a version.
#[derive(Clone, Debug)]
pub struct FindTasks {
    pub policy: PolicyName,
    pub suite: String,
    /// The newest one if absent.
    pub version: Option<Version>,
    pub after: String,
    pub limit: u32,
}

/// The tasks of a suite at a version, beside those of the version before.
#[derive(Clone, Debug)]
pub struct FoundTasks {
    pub version: Version,
    pub before: Option<Version>,
    pub tasks: Vec<FoundTask>,
    pub more: bool,
}

/// A task at two versions.
#[derive(Clone, Debug)]
pub struct FoundTask {
    pub task: String,
    pub now: Option<(TaskResult, Vec<wire::EvalRollout>)>,
    pub before: Option<(TaskResult, Vec<wire::EvalRollout>)>,
}

/// Which of the rollouts with these ids evaluate the policy, instead of being trained.
#[derive(Clone, Debug)]
pub struct FindEvaluating {
    pub policy: PolicyName,
    pub rollouts: Vec<RolloutId>,
}

/// The mean of numbers, and its standard error; none with fewer than two.
#[must_use]
pub fn mean_and_error(values: &[f64]) -> (f64, Option<f64>) {
    let count = values.len() as f64;
    // Divided first, because a sum of finite values may be infinite.
    let mean = values.iter().map(|value| value / count).sum::<f64>();
    if values.len() < 2 {
        return (mean, None);
    }
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, Some((squares / (count - 1.0) / count).sqrt()).filter(|error| error.is_finite()))
}

fn interval(mean: f64, error: Option<f64>) -> (Option<f64>, Option<f64>) {
    (error.map(|error| mean - Z * error), error.map(|error| mean + Z * error))
}

/// The unbiased estimates of pass@1, pass@2, ... up to pass@n from n rollouts of which c pass: `1 - C(n - c, k) / C(n, k)` for
/// pass@k (arXiv 2107.03374). Each follows from the one before, because the quotient is the product of
/// `(n - c - j) / (n - j)` for j from 0 to k - 1.
pub fn pass_at(n: u64, c: u64) -> impl Iterator<Item = f64> {
    (0..n).scan(1.0, move |none_passes, j| {
        *none_passes *= n.saturating_sub(c).saturating_sub(j) as f64 / (n - j) as f64;
        Some(1.0 - *none_passes)
    })
}

impl FoundVersion {
    /// Whether the suite is complete at this version.
    #[must_use]
    pub fn is_complete(&self, suite: &Suite) -> bool {
        let done = self.tasks.values().filter(|task| task.rollouts >= u64::from(suite.repeats)).count();
        suite.tasks.is_some_and(|tasks| done >= tasks as usize)
    }

    /// The mean of the tasks' means, and its standard error.
    #[must_use]
    pub fn mean(&self) -> (f64, Option<f64>) {
        mean_and_error(&self.tasks.values().map(TaskResult::mean).collect::<Vec<_>>())
    }

    /// pass@k for each k that a task has enough rollouts for, up to what the suite wants.
    #[must_use]
    pub fn pass_at(&self, suite: &Suite) -> Vec<PassAt> {
        let mut of_tasks: Vec<_> = self.tasks.values().map(|task| pass_at(task.rollouts, task.passed)).collect();
        let mut of = |k: u32| {
            let estimates: Vec<f64> = of_tasks.iter_mut().filter_map(Iterator::next).collect();
            let (estimate, error) = mean_and_error(&estimates);
            // No probability is beyond these bounds, whatever the approximation says.
            let (low, high) = interval(estimate, error);
            let (low, high) = (low.map(|low| low.max(0.0)), high.map(|high| high.min(1.0)));
            (!estimates.is_empty()).then_some(PassAt { k, estimate, tasks: estimates.len() as u64, low, high })
        };
        (1..=suite.repeats).map_while(&mut of).collect()
    }

    /// How it differs from an earlier version, over the tasks that both have; none without any.
    #[must_use]
    pub fn difference(&self, before: &Self) -> Option<EvalDifference> {
        let of_both = self.tasks.iter().filter_map(|(task, now)| Some(now.mean() - before.tasks.get(task)?.mean()));
        let differences: Vec<f64> = of_both.collect();
        if differences.is_empty() {
            return None;
        }
        let (mean, error) = mean_and_error(&differences);
        let (low, high) = interval(mean, error);
        let count = |is: fn(&f64) -> bool| differences.iter().filter(|difference| is(difference)).count() as u64;
        Some(EvalDifference {
            version: before.version.0,
            tasks: differences.len() as u64,
            mean,
            low,
            high,
            won: count(|difference| *difference > 0.0),
            lost: count(|difference| *difference < 0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    }

    #[test]
    fn pass_at_k_is_that_of_all_choices() {
        // Counted: of all ways to take k of n rollouts, those with a passing one.
        for n in 1..=8_u32 {
            for c in 0..=n {
                assert_eq!(pass_at(n.into(), c.into()).count(), n as usize);
                for (k, estimate) in (1..=n).zip(pass_at(n.into(), c.into())) {
                    let choices = (0..1_u32 << n).filter(|taken| taken.count_ones() == k);
                    let (mut all, mut passing) = (0_u32, 0_u32);
                    for taken in choices {
                        all += 1;
                        passing += u32::from(taken & ((1 << c) - 1) != 0);
                    }
                    close(estimate, f64::from(passing) / f64::from(all));
                }
            }
        }
    }

    fn version(number: i64, tasks: &[(&str, u64, u64, f64)]) -> FoundVersion {
        let result = |&(task, rollouts, passed, reward_sum): &(&str, u64, u64, f64)| {
            (task.to_owned(), TaskResult { rollouts, passed, reward_sum })
        };
        FoundVersion {
            version: Version(number),
            step: None,
            mixed: 0,
            first_at: Timestamp::from_micros(0),
            last_at: Timestamp::from_micros(0),
            tasks: tasks.iter().map(result).collect(),
        }
    }

    #[test]
    fn worked_numbers_of_a_suite_hold() {
        let suite = Suite { tasks: Some(2), repeats: 4, ..Suite::unknown("s".to_owned()) };
        let now = version(2, &[("a", 4, 1, 1.0), ("b", 4, 3, 3.0)]);
        let (mean, error) = now.mean();
        close(mean, 0.5);
        // The means are 0.25 and 0.75: s = 0.3535, over the root of 2.
        close(error.expect("two tasks"), 0.25);
        let passes = now.pass_at(&suite);
        let estimates: Vec<f64> = passes.iter().map(|pass| pass.estimate).collect();
        for (found, expected) in estimates.iter().zip([0.5, 0.75, 0.875, 1.0]) {
            close(*found, expected);
        }
        assert_eq!(estimates.len(), 4);
        close(passes[0].low.expect("two tasks"), 0.5 - 1.96 * 0.25);
        assert!(now.is_complete(&suite));
        assert!(!version(2, &[("a", 4, 1, 1.0), ("b", 3, 3, 3.0)]).is_complete(&suite));
        assert!(!now.is_complete(&Suite::unknown("s".to_owned())), "nobody has said how many tasks there are");
        // Of one more task, nothing can be compared.
        let before = version(1, &[("a", 4, 2, 2.0), ("b", 2, 0, 0.0), ("c", 1, 1, 1.0)]);
        let difference = now.difference(&before).expect("they have two tasks in common");
        assert_eq!((difference.version, difference.tasks, difference.won, difference.lost), (1, 2, 1, 1));
        close(difference.mean, (0.75 - 0.25) / 2.0);
        close(difference.high.expect("two tasks"), 0.25 + 1.96 * 0.5);
        assert_eq!(now.difference(&version(1, &[("d", 1, 1, 1.0)])), None);
        assert_eq!(version(1, &[("d", 1, 1, 1.0)]).mean(), (1.0, None));
    }

    #[test]
    fn rules_of_evaluations_ask_for_a_reward_alone() {
        let mut trained = PolicyRules::default();
        trained.group.size = 8;
        trained.admissions.eval = 7;
        trained.scores.required = vec!["judge".to_owned()];
        let derived = rules(&trained);
        crate::rules::Rules::stored(derived.clone()).expect("these rules can work");
        assert_eq!((derived.group.size, derived.backlog.max_ready_rollouts), (1, 7));
        assert_eq!(derived.scores, trained.scores);
        assert_eq!(rules(&derived).filter, derived.filter);
    }
}
