//! The expression of the reward, which rules may compute from scores.
//!
//! Separate from the filters, because its value is a number. Everything else is as for a filter of scope `rollout`: the
//! variables, the functions, the checks and the bound of its cost.

use std::fmt;

use cel::{Context, Value};
use forebay_wire::{FilterAction, FilterRule, FilterScope};
use serde_json::value::RawValue;

use super::{
    BYTES_PER_SOURCE_BYTE, Filter,
    check::{self, Patterns},
    cost::{self, Amounts, ROLLOUT_STEPS_MAX},
    environment,
    facts::RolloutFacts,
    trial_evaluation::{self, Place},
    variables::{self, RolloutValues, scope_of},
};

/// The name of the expression in receipts and metrics, where it stands beside the names of filters.
pub const NAME: &str = "scores.reward";

/// The compiled expression of a reward.
pub struct RewardExpression {
    environment: Context<'static, 'static>,
    filter: Filter,
    patterns: Patterns,
    bytes_held: usize,
}

impl RewardExpression {
    /// Compiles an expression, or returns all its faults.
    pub fn compile(source: &str) -> Result<Self, Vec<String>> {
        let expression = Self::parse(source, Patterns::bounded())?;
        let steps = expression.filter.usual_steps;
        if steps > ROLLOUT_STEPS_MAX {
            return Err(vec![format!("may take {steps} steps, more than {ROLLOUT_STEPS_MAX}")]);
        }
        let (scope, program) = (FilterScope::Rollout, &expression.filter.program);
        trial_evaluation::evaluate(scope, program, Place::Number, &expression.environment)
            .map_err(|message| vec![message])?;
        Ok(expression)
    }

    /// Compiles an expression that was accepted before, perhaps by a version that allowed more.
    pub fn compile_stored(source: &str) -> Result<Self, Vec<String>> {
        Self::parse(source, Patterns::unbounded())
    }

    fn parse(source: &str, mut patterns: Patterns) -> Result<Self, Vec<String>> {
        // A filter that never decides anything.
        let rule = FilterRule {
            name: NAME.to_owned(),
            scope: FilterScope::Rollout,
            when: source.to_owned(),
            action: FilterAction::Mask,
        };
        let program = check::parse(&rule, &mut patterns)?;
        Ok(Self {
            environment: environment(patterns.regexes.clone()),
            filter: Filter::new(0, &rule, program, &patterns),
            bytes_held: patterns.bytes_held() + source.len() * BYTES_PER_SOURCE_BYTE,
            patterns,
        })
    }

    /// The reward of a rollout; none if the expression cannot be evaluated on it, or its value is not a finite number.
    #[must_use]
    pub fn value(&self, facts: &RolloutFacts<'_>) -> Option<f64> {
        let amounts = Amounts::of_rollout(facts.metadata.map(RawValue::get));
        if cost::steps(self.filter.program.expression(), amounts, &self.patterns.bytes) > ROLLOUT_STEPS_MAX {
            return None;
        }
        let values = RolloutValues::new(facts);
        let value = match self.filter.program.execute(&scope_of(&self.environment, &values)) {
            Ok(Value::Float(value)) => value,
            Ok(Value::Int(value)) => value as f64,
            Ok(Value::UInt(value)) => value as f64,
            Ok(_) | Err(_) => return None,
        };
        // Not every database keeps the sign of a zero.
        value.is_finite().then_some(value + 0.0)
    }

    /// Whether it names one of these variables.
    #[must_use]
    pub fn names(&self, variables: &[&str]) -> bool {
        let references = self.filter.program.references();
        variables.iter().any(|variable| references.has_variable(variable))
    }

    /// Whether its value depends on the versions of the rollout and of the policy.
    #[must_use]
    pub fn depends_on_versions(&self) -> bool {
        variables::names_of_versions().any(|name| self.names(&[name]))
    }

    /// The most steps that it takes on a typical rollout.
    #[must_use]
    pub fn typical_steps(&self) -> u64 {
        self.filter.usual_steps
    }

    /// The bytes that it holds, approximately.
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        self.bytes_held
    }
}

impl fmt::Debug for RewardExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardExpression").finish_non_exhaustive()
    }
}
