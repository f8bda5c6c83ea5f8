//! The filters of a policy: CEL expressions that drop or mask rollouts and discard groups.
//!
//! They are separate from the stages that apply them because an expression is somebody else's
//! program. The `cel` crate parses and interprets it, but checks no names, no types and no cost.
//! So whatever can be known when the rules are written is refused by [`Filters::compile`]: first
//! what `check` sees in the shape of an expression, then what `rehearse` sees when evaluating
//! it. What still goes wrong for one record is no match, and reported in its [`Judgement`].

mod check;
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

use self::facts::{GroupVariables, RolloutVariables, scope_of};

pub use self::facts::{GroupFacts, RolloutFacts};

/// Every rollout is asked every filter until one matches: their number is a cost of each post.
const RULES_MAX: usize = 64;
/// Names become labels of metrics and reasons in the ledger.
const NAME_BYTES_MAX: usize = 64;
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
        let mut regexes = HashMap::new();
        let mut filters = Vec::with_capacity(rules.len());
        for (index, rule) in rules.iter().enumerate() {
            match check::parse(rule, &mut regexes) {
                Ok(program) => filters.push((index, rule, program)),
                Err(messages) => {
                    violations.extend(messages.into_iter().map(|message| FilterViolation::new(index, "when", message)));
                }
            }
        }
        let environment = environment(regexes);
        for (index, rule, program) in &filters {
            if let Err(message) = rehearse::rehearse(rule.scope, program, &environment) {
                violations.push(FilterViolation::new(*index, "when", message));
            }
        }
        if !violations.is_empty() {
            violations.sort_by_key(|violation| violation.index);
            return Err(violations);
        }
        let (rollout, group): (Vec<_>, Vec<_>) =
            filters.into_iter().partition(|(_, rule, _)| rule.scope == FilterScope::Rollout);
        Ok(Self {
            environment,
            rollout: rollout.into_iter().map(Filter::from_parts).collect(),
            group: group.into_iter().map(Filter::from_parts).collect(),
        })
    }

    /// Asks the filters of scope `rollout`, in order; the first match wins.
    #[must_use]
    pub fn judge_rollout(&self, facts: &RolloutFacts<'_>) -> Judgement<'_> {
        self.judge(&self.rollout, &RolloutVariables::new(facts))
    }

    /// Asks the filters of scope `group`, in order; the first match wins.
    #[must_use]
    pub fn judge_group(&self, facts: &GroupFacts<'_>) -> Judgement<'_> {
        self.judge(&self.group, &GroupVariables::new(facts))
    }

    fn judge<'f>(&self, filters: &'f [Filter], variables: &dyn VariableResolver) -> Judgement<'f> {
        let scope = scope_of(&self.environment, variables);
        let mut failed = Vec::new();
        for filter in filters {
            match filter.program.execute(&scope) {
                Ok(Value::Bool(false)) => {}
                Ok(Value::Bool(true)) => {
                    let matched = Some(Match { name: &filter.name, action: filter.action });
                    return Judgement { matched, failed };
                }
                Ok(_) | Err(_) => failed.push(filter.name.as_str()),
            }
        }
        Judgement { matched: None, failed }
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
    name: String,
    action: FilterAction,
    program: Program,
}

impl Filter {
    fn from_parts((_, rule, program): (usize, &FilterRule, Program)) -> Self {
        Self { name: rule.name.clone(), action: rule.action, program }
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
