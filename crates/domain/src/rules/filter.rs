//! The filters of a policy: CEL expressions that drop or mask rollouts and discard groups.
//!
//! They are separate from the stages that apply them because an expression is a program of the user. The `cel` crate
//! parses and interprets it, but checks no names, no types and no cost. [`Filters::compile`] therefore refuses every
//! fault that can be known when the rules are written: first the faults that `check` finds in the shape of an
//! expression, then those that `trial_evaluation` finds by evaluating it. If an evaluation on a record fails later, the
//! filter does not match, and the record's [`Evaluation`] reports it. The same holds for a filter that could cost more
//! than the filters of one record may; the bound in `cost` is known before anything is evaluated.

pub mod check;
pub mod cost;
pub mod facts;
pub mod names;
pub mod reward;
#[cfg(test)]
mod tests;
pub mod trial_evaluation;
pub mod variables;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt,
    sync::Arc,
};

use cel::{Context, ExecutionError, Program, Value, context::VariableResolver, extractors::This};
use forebay_wire::{FilterAction, FilterRule, FilterScope};
use regex::Regex;
use serde_json::value::RawValue;

use self::{
    check::Patterns,
    cost::{Amounts, ROLLOUT_STEPS_MAX},
    facts::{GroupFacts, RolloutFacts},
    variables::{GroupValues, RolloutValues, scope_of},
};
use crate::{reasons, trajectory::GROUP_SIZE_MAX};

/// Every filter is evaluated on every rollout until one matches, so their number is a cost of each post.
const RULES_MAX: usize = 64;
/// Names become labels of metrics and reasons in the ledger, so they are short.
const NAME_BYTES_MAX: usize = 64;
/// The most bytes of a message about a failed evaluation, which may quote values.
const MESSAGE_BYTES_MAX: usize = 256;
/// Bytes of memory that a parsed expression takes for each byte of its source, approximately.
const BYTES_PER_SOURCE_BYTE: usize = 64;

/// The compiled filters of one policy, in the order of its rules.
///
/// Compiling takes milliseconds, evaluating about a microsecond: share one instance behind an `Arc`.
pub struct Filters {
    environment: Context<'static, 'static>,
    rollout: Vec<Filter>,
    group: Vec<Filter>,
    /// The bytes that each compiled pattern takes.
    patterns: HashMap<String, usize>,
    asks_for_versions: bool,
    components: BTreeSet<String>,
    bytes_held: usize,
}

/// One fault of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterViolation {
    /// The rule's index in the array.
    pub index: usize,
    /// The field of the rule: `name`, `when` or `action`.
    pub field: &'static str,
    /// What is wrong, with line and column where the fault has a place in the expression.
    pub message: String,
}

/// The result of the filters of a scope on one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluation<'f> {
    /// The first filter that matched, if any did.
    pub matched: Option<Match<'f>>,
    /// The names of the filters before it that could not be evaluated on this record.
    pub failed: Vec<&'f str>,
    /// The names among `failed` that were not evaluated, because that could have exceeded the budget of steps.
    pub over_budget: Vec<&'f str>,
}

/// A filter that matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match<'f> {
    /// The filter's name, which becomes the reason in the ledger.
    pub name: &'f str,
    /// What happens to the record.
    pub action: FilterAction,
}

impl Filters {
    /// Compiles `rules`, or returns all their faults, in their order.
    pub fn compile(rules: &[FilterRule]) -> Result<Self, Vec<FilterViolation>> {
        if rules.len() > RULES_MAX {
            let message = format!("at most {RULES_MAX} filters, not {}", rules.len());
            return Err(vec![FilterViolation::new(RULES_MAX, "name", message)]);
        }
        let mut violations = check_names(rules);
        let (filters, faults) = Self::parse(rules, Patterns::bounded());
        violations.extend(faults);
        violations.extend(filters.check_costs());
        // Expressions that cost too much are not tried.
        let bounded = |steps_max: u64| move |filter: &&Filter| filter.usual_steps <= steps_max;
        let rollout = filters.rollout.iter().filter(bounded(ROLLOUT_STEPS_MAX));
        let group = filters.group.iter().filter(bounded(cost::TYPICAL.group_steps_max()));
        for filter in rollout.chain(group) {
            let rule = &rules[filter.index];
            if let Err(message) = trial_evaluation::evaluate(
                rule.scope,
                &filter.program,
                trial_evaluation::Place::Condition,
                &filters.environment,
            ) {
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
            asks_for_versions: rollout
                .iter()
                .any(|filter| variables::names_of_versions().any(|name| asks_for(filter, name))),
            components: group.iter().flat_map(|filter| check::components_named(filter.program.expression())).collect(),
            bytes_held: patterns.bytes_held()
                + rules.iter().map(|rule| rule.when.len() * BYTES_PER_SOURCE_BYTE).sum::<usize>(),
            patterns: patterns.bytes,
            environment: environment(patterns.regexes),
            rollout,
            group,
        };
        (filters, faults)
    }

    /// Finds filters that would cost too much on typical records, or on any group.
    fn check_costs(&self) -> Vec<FilterViolation> {
        let check = |filters: &[Filter], amounts: Amounts, steps_max: u64| {
            let mut steps = 0_u64;
            filters.iter().find_map(|filter| {
                steps = steps.saturating_add(cost::steps(filter.program.expression(), amounts, &self.patterns));
                let message = format!("may take {steps} steps with the filters before it, more than {steps_max}");
                (steps > steps_max).then(|| FilterViolation::new(filter.index, "when", message))
            })
        };
        // Costs and bounds both grow in proportion to the number of rewards, so a bound that holds at both ends holds
        // between them.
        let of_group = |rewards| {
            let amounts = Amounts::of_rewards(rewards);
            check(&self.group, amounts, amounts.group_steps_max())
        };
        let group = [1, u64::from(GROUP_SIZE_MAX)].into_iter().find_map(of_group);
        check(&self.rollout, cost::TYPICAL, ROLLOUT_STEPS_MAX).into_iter().chain(group).collect()
    }

    /// Whether there are filters of scope `rollout`.
    #[must_use]
    pub fn have_rollout_filters(&self) -> bool {
        !self.rollout.is_empty()
    }

    /// Whether the result of filters of scope `rollout` depends on the versions of the rollout and of the policy.
    #[must_use]
    pub fn depend_on_versions(&self) -> bool {
        self.asks_for_versions
    }

    /// Whether a filter of scope `rollout` names one of these variables.
    #[must_use]
    pub fn rollout_filters_name(&self, variables: &[&str]) -> bool {
        self.rollout.iter().any(|filter| {
            let references = filter.program.references();
            variables.iter().any(|variable| references.has_variable(variable))
        })
    }

    /// The reward components that filters of scope `group` ask for.
    #[must_use]
    pub fn components(&self) -> &BTreeSet<String> {
        &self.components
    }

    /// Whether the filter of scope `rollout` with this name names one of these variables.
    #[must_use]
    pub fn rollout_filter_names(&self, name: &str, variables: &[&str]) -> bool {
        let filter = self.rollout.iter().find(|filter| filter.name == name);
        let names = |filter: &Filter| {
            let references = filter.program.references();
            variables.iter().any(|variable| references.has_variable(variable))
        };
        filter.is_some_and(names)
    }

    /// Why a filter of scope `rollout` cannot be evaluated on a rollout on which it failed.
    #[must_use]
    pub fn why_rollout_failed(&self, name: &str, facts: &RolloutFacts<'_>) -> String {
        self.why_failed(&self.rollout, name, &RolloutValues::new(facts))
    }

    /// Why a filter of scope `group` cannot be evaluated on a group on which it failed.
    #[must_use]
    pub fn why_group_failed(&self, name: &str, facts: &GroupFacts<'_>) -> String {
        self.why_failed(&self.group, name, &GroupValues::new(facts))
    }

    fn why_failed(&self, filters: &[Filter], name: &str, variables: &dyn VariableResolver) -> String {
        let scope = scope_of(&self.environment, variables);
        let Some(filter) = filters.iter().find(|filter| filter.name == name) else { return String::new() };
        let mut message = match filter.program.execute(&scope) {
            Ok(Value::Bool(_)) => "it may take more steps than the filters of a record may take together".to_owned(),
            Ok(_) => "true or false is needed".to_owned(),
            Err(error) => trial_evaluation::describe(&error),
        };
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message
    }

    /// The most steps that filters of scope `rollout` take on a typical rollout.
    #[must_use]
    pub fn typical_rollout_steps(&self) -> u64 {
        self.rollout.iter().map(|filter| filter.usual_steps).fold(0, u64::saturating_add)
    }

    /// The bytes that the filters hold, approximately.
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        self.bytes_held
    }

    /// Evaluates the filters of scope `rollout`, in order; the first match wins.
    #[must_use]
    pub fn evaluate_rollout(&self, facts: &RolloutFacts<'_>) -> Evaluation<'_> {
        self.evaluate_first(self.rollout.len(), facts)
    }

    /// Evaluates the filters of scope `rollout` up to the first that reads the reward or scores. What they say holds
    /// whatever the scores will be.
    #[must_use]
    pub fn evaluate_before_scores(&self, facts: &RolloutFacts<'_>) -> Evaluation<'_> {
        let reads_scores = |filter: &Filter| {
            let references = filter.program.references();
            ["reward", "scores"].iter().any(|variable| references.has_variable(variable))
        };
        let count = self.rollout.iter().position(reads_scores).unwrap_or(self.rollout.len());
        self.evaluate_first(count, facts)
    }

    fn evaluate_first(&self, count: usize, facts: &RolloutFacts<'_>) -> Evaluation<'_> {
        let amounts = Amounts::of_rollout(facts.metadata.map(RawValue::get));
        self.evaluate(&self.rollout[..count], &RolloutValues::new(facts), amounts, ROLLOUT_STEPS_MAX)
    }

    /// Evaluates the filters of scope `group`, in order; the first match wins.
    #[must_use]
    pub fn evaluate_group(&self, facts: &GroupFacts<'_>) -> Evaluation<'_> {
        let amounts = Amounts::of_group(facts.rewards.len());
        self.evaluate(&self.group, &GroupValues::new(facts), amounts, amounts.group_steps_max())
    }

    fn evaluate<'f>(
        &self,
        filters: &'f [Filter],
        variables: &dyn VariableResolver,
        amounts: Amounts,
        steps_max: u64,
    ) -> Evaluation<'f> {
        let scope = scope_of(&self.environment, variables);
        let (mut failed, mut over_budget) = (Vec::new(), Vec::new());
        let mut steps_left = steps_max;
        for filter in filters {
            let steps = if amounts == cost::TYPICAL {
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
                    return Evaluation { matched, failed, over_budget };
                }
                Ok(_) | Err(_) => failed.push(filter.name.as_str()),
            }
        }
        Evaluation { matched: None, failed, over_budget }
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
    /// The rule's index in the array.
    index: usize,
    name: String,
    action: FilterAction,
    program: Program,
    /// The most steps that an evaluation takes on a typical record.
    usual_steps: u64,
}

impl Filter {
    fn new(index: usize, rule: &FilterRule, program: Program, patterns: &Patterns) -> Self {
        let usual_steps = cost::steps(program.expression(), cost::TYPICAL, &patterns.bytes);
        Self { index, name: rule.name.clone(), action: rule.action, program, usual_steps }
    }
}

/// Checks everything about the rules except their expressions.
fn check_names(rules: &[FilterRule]) -> Vec<FilterViolation> {
    let mut seen = HashSet::new();
    let mut violations = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let name = rule.name.as_str();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) || !name.bytes().all(plain) {
            let message = format!("must be 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . _ -");
            violations.push(FilterViolation::new(index, "name", message));
        } else if reasons::ALL.contains(&name) {
            // A filter of this name could not be told apart from the reason.
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
