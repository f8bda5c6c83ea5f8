//! The filters of a policy: CEL expressions that drop or mask rollouts and discard groups.
//!
//! They are separate from the stages that apply them because an expression is somebody else's
//! program. The `cel` crate parses and interprets it, but checks no names, no types and no cost.
//! So whatever can be known when the rules are written is refused by [`Filters::compile`]: first
//! what `check` sees in the shape of an expression, then what `rehearse` sees when evaluating
//! it. What still goes wrong for one record is no match, and reported in its [`Judgement`]. So is what would cost more
//! than a record's filters may, by the bound in `cost`, which is known before anything is evaluated.

mod check;
mod cost;
mod facts;
mod rehearse;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use cel::context::VariableResolver;
use cel::extractors::This;
use cel::{Context, ExecutionError, Program, Value};
use forebay_client::wire::{FilterAction, FilterRule, FilterScope};
use regex::Regex;
use serde_json::value::RawValue;

use self::check::Patterns;
use self::cost::{Amounts, ROLLOUT_STEPS_MAX};
use self::facts::{GroupVariables, RolloutVariables, scope_of};

pub use self::facts::{GroupFacts, RolloutFacts};
use super::trajectory::GROUP_SIZE_MAX;

/// Every rollout is asked every filter until one matches: their number is a cost of each post.
const RULES_MAX: usize = 64;
/// Names become labels of metrics and reasons in the ledger.
const NAME_BYTES_MAX: usize = 64;
/// What a parsed expression takes for each byte of its source, about.
const BYTES_PER_SOURCE_BYTE: usize = 64;
/// The variables that change when a version is published.
const VERSION_NAMES: [&str; 3] = ["policy_version", "version_current", "staleness"];
/// Reasons that the service itself writes into the ledger; a filter's name must not forge them.
const BUILT_IN_REASONS: [&str; 9] =
    ["no-reward", "group-decided", "incomplete", "exhausted", "all-masked", "reset", "stale", "quarantined", "by-hand"];

/// The compiled filters of one policy, in the order of its rules.
///
/// Compiling costs milliseconds, judging about a microsecond: share one behind an `Arc`.
pub struct Filters {
    environment: Context<'static, 'static>,
    rollout: Vec<Filter>,
    group: Vec<Filter>,
    /// Bytes that each pattern takes.
    patterns: HashMap<String, usize>,
    asks_for_versions: bool,
    bytes_held: usize,
}

/// One thing that is wrong with a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterViolation {
    /// The rule's place in the array.
    pub index: usize,
    /// The field of the rule: `name`, `when` or `action`.
    pub field: &'static str,
    /// What is wrong, with line and column where the fault has a place in the expression.
    pub message: String,
}

/// What the filters of a scope say about one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement<'f> {
    /// The first filter that matched, if any did.
    pub matched: Option<Match<'f>>,
    /// The names of the filters before it that could not be evaluated on this record.
    pub failed: Vec<&'f str>,
    /// Those of them that were not evaluated, because that might have cost more than it may.
    pub over_budget: Vec<&'f str>,
}

/// A filter that matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match<'f> {
    /// The filter's name, which becomes the reason in the ledger.
    pub name: &'f str,
    /// What becomes of the record.
    pub action: FilterAction,
}

impl Filters {
    /// Compiles `rules`, or returns everything that is wrong with them, in their order.
    pub fn compile(rules: &[FilterRule]) -> Result<Self, Vec<FilterViolation>> {
        if rules.len() > RULES_MAX {
            let message = format!("at most {RULES_MAX} filters, not {}", rules.len());
            return Err(vec![FilterViolation::new(RULES_MAX, "name", message)]);
        }
        let mut violations = check_names(rules);
        let (filters, faults) = Self::parse(rules, Patterns::bounded());
        violations.extend(faults);
        violations.extend(filters.check_costs());
        // What costs too much is not tried.
        let bounded = |steps_max: u64| move |filter: &&Filter| filter.usual_steps <= steps_max;
        let rollout = filters.rollout.iter().filter(bounded(ROLLOUT_STEPS_MAX));
        let group = filters.group.iter().filter(bounded(cost::USUAL.group_steps_max()));
        for filter in rollout.chain(group) {
            let rule = &rules[filter.index];
            if let Err(message) = rehearse::rehearse(rule.scope, &filter.program, &filters.environment) {
                violations.push(FilterViolation::new(filter.index, "when", message));
            }
        }
        violations.sort_by_key(|violation| violation.index);
        if violations.is_empty() { Ok(filters) } else { Err(violations) }
    }

    /// Compiles rules that were accepted before, perhaps by a version that allowed more.
    pub fn compile_stored(rules: &[FilterRule]) -> Result<Self, Vec<FilterViolation>> {
        let (filters, faults) = Self::parse(rules, Patterns::unbounded());
        if faults.is_empty() { Ok(filters) } else { Err(faults) }
    }

    fn parse(rules: &[FilterRule], mut patterns: Patterns) -> (Self, Vec<FilterViolation>) {
        let mut faults = Vec::new();
        let (mut rollout, mut group) = (Vec::new(), Vec::new());
        for (index, rule) in rules.iter().enumerate() {
            match check::parse(rule, &mut patterns) {
                Ok(program) => {
                    let of_scope = if rule.scope == FilterScope::Rollout { &mut rollout } else { &mut group };
                    of_scope.push(Filter::new(index, rule, program, &patterns));
                }
                Err(messages) => {
                    faults.extend(messages.into_iter().map(|message| FilterViolation::new(index, "when", message)));
                }
            }
        }
        let asks_for = |filter: &Filter, name| filter.program.references().has_variable(name);
        let filters = Self {
            asks_for_versions: rollout.iter().any(|filter| VERSION_NAMES.iter().any(|name| asks_for(filter, *name))),
            bytes_held: patterns.bytes_held()
                + rules.iter().map(|rule| rule.when.len() * BYTES_PER_SOURCE_BYTE).sum::<usize>(),
            patterns: patterns.bytes,
            environment: environment(patterns.regexes),
            rollout,
            group,
        };
        (filters, faults)
    }

    /// Filters that would cost too much on records that are usual, or on any group.
    fn check_costs(&self) -> Vec<FilterViolation> {
        let check = |filters: &[Filter], amounts: Amounts, steps_max: u64| {
            let mut steps = 0_u64;
            filters.iter().find_map(|filter| {
                steps = steps.saturating_add(cost::steps(filter.program.expression(), amounts, &self.patterns));
                let message = format!("may take {steps} steps with the filters before it, more than {steps_max}");
                (steps > steps_max).then(|| FilterViolation::new(filter.index, "when", message))
            })
        };
        // Costs and bounds grow in proportion to the rewards, so what holds at both ends holds between them.
        let of_group = |rewards| {
            let amounts = Amounts::of_rewards(rewards);
            check(&self.group, amounts, amounts.group_steps_max())
        };
        let group = [1, u64::from(GROUP_SIZE_MAX)].into_iter().find_map(of_group);
        check(&self.rollout, cost::USUAL, ROLLOUT_STEPS_MAX).into_iter().chain(group).collect()
    }

    /// Whether there are filters of scope `rollout`.
    #[must_use]
    pub fn judge_rollouts(&self) -> bool {
        !self.rollout.is_empty()
    }

    /// Whether what filters of scope `rollout` say depends on the versions of the rollout and of the policy.
    #[must_use]
    pub fn ask_for_versions(&self) -> bool {
        self.asks_for_versions
    }

    /// Steps that filters of scope `rollout` take at most on a rollout that is usual.
    #[must_use]
    pub fn usual_rollout_steps(&self) -> u64 {
        self.rollout.iter().map(|filter| filter.usual_steps).fold(0, u64::saturating_add)
    }

    /// Bytes that they hold, about.
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        self.bytes_held
    }

    /// Asks the filters of scope `rollout`, in order; the first match wins.
    #[must_use]
    pub fn judge_rollout(&self, facts: &RolloutFacts<'_>) -> Judgement<'_> {
        let amounts = Amounts::of_rollout(facts.metadata.map(RawValue::get));
        self.judge(&self.rollout, &RolloutVariables::new(facts), amounts, ROLLOUT_STEPS_MAX)
    }

    /// Asks the filters of scope `group`, in order; the first match wins.
    #[must_use]
    pub fn judge_group(&self, facts: &GroupFacts<'_>) -> Judgement<'_> {
        let amounts = Amounts::of_group(facts.rewards.len());
        self.judge(&self.group, &GroupVariables::new(facts), amounts, amounts.group_steps_max())
    }

    fn judge<'f>(
        &self,
        filters: &'f [Filter],
        variables: &dyn VariableResolver,
        amounts: Amounts,
        steps_max: u64,
    ) -> Judgement<'f> {
        let scope = scope_of(&self.environment, variables);
        let (mut failed, mut over_budget) = (Vec::new(), Vec::new());
        let mut steps_left = steps_max;
        for filter in filters {
            let steps = if amounts == cost::USUAL {
                filter.usual_steps
            } else {
                cost::steps(filter.program.expression(), amounts, &self.patterns)
            };
            let Some(left) = steps_left.checked_sub(steps) else {
                failed.push(filter.name.as_str());
                over_budget.push(filter.name.as_str());
                continue;
            };
            steps_left = left;
            match filter.program.execute(&scope) {
                Ok(Value::Bool(false)) => {}
                Ok(Value::Bool(true)) => {
                    let matched = Some(Match { name: &filter.name, action: filter.action });
                    return Judgement { matched, failed, over_budget };
                }
                Ok(_) | Err(_) => failed.push(filter.name.as_str()),
            }
        }
        Judgement { matched: None, failed, over_budget }
    }
}

impl fmt::Debug for Filters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |filters: &[Filter]| -> Vec<String> { filters.iter().map(|filter| filter.name.clone()).collect() };
        f.debug_struct("Filters")
            .field("rollout", &names(&self.rollout))
            .field("group", &names(&self.group))
            .finish_non_exhaustive()
    }
}

impl FilterViolation {
    fn new(index: usize, field: &'static str, message: impl Into<String>) -> Self {
        Self { index, field, message: message.into() }
    }
}

struct Filter {
    /// The rule's place in the array.
    index: usize,
    name: String,
    action: FilterAction,
    program: Program,
    /// What evaluating it may take on a record that is usual.
    usual_steps: u64,
}

impl Filter {
    fn new(index: usize, rule: &FilterRule, program: Program, patterns: &Patterns) -> Self {
        let usual_steps = cost::steps(program.expression(), cost::USUAL, &patterns.bytes);
        Self { index, name: rule.name.clone(), action: rule.action, program, usual_steps }
    }
}

/// Everything about the rules but their expressions.
fn check_names(rules: &[FilterRule]) -> Vec<FilterViolation> {
    let mut seen = HashSet::new();
    let mut violations = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let name = rule.name.as_str();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) || !name.bytes().all(plain) {
            let message = format!("must be 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . _ -");
            violations.push(FilterViolation::new(index, "name", message));
        } else if BUILT_IN_REASONS.contains(&name) {
            let message = format!("`{name}` is a built-in reason; choose another name");
            violations.push(FilterViolation::new(index, "name", message));
        } else if !seen.insert(name) {
            let message = format!("`{name}` already names an earlier filter of this policy");
            violations.push(FilterViolation::new(index, "name", message));
        }
        if rule.scope == FilterScope::Group && rule.action != FilterAction::Drop {
            let message = "a filter of scope `group` can only drop";
            violations.push(FilterViolation::new(index, "action", message));
        }
    }
    violations
}

/// The functions that all evaluations share, prepared once because that takes 60 times as long as
/// evaluating an expression.
fn environment(regexes: HashMap<String, Regex>) -> Context<'static, 'static> {
    let mut environment = Context::default();
    // The crate's own `matches`, behind its feature `regex`, compiles the pattern on every call:
    // 45 microseconds for the simplest one, against half a microsecond for the evaluation.
    let matches = move |This(text): This<Arc<String>>, pattern: Arc<String>| match regexes.get(pattern.as_str()) {
        Some(regex) => Ok(regex.is_match(&text)),
        None => Err(ExecutionError::function_error("matches", "unknown pattern")),
    };
    environment
        .add_function("matches", matches)
        .and_then(|()| environment.add_function("min", cel::functions::min))
        .and_then(|()| environment.add_function("max", cel::functions::max))
        .expect("cel has no functions of these names without its feature `regex`");
    environment
}
