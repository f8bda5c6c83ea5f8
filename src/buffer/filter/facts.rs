//! What filters can ask about a record, and how an expression comes to see it.
//!
//! The facts are plain data that the stages fill in. An expression sees them as variables, which
//! are converted one by one when it asks for them: most rules look at one or two numbers, and
//! metadata can be large.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use cel::common::types::{CelDouble, CelInt, CelNull, CelString};
use cel::common::value::{CowVal, Val};
use cel::context::VariableResolver;
use cel::{Context, Value};
use serde_json::value::RawValue;

/// What a filter of scope `rollout` can ask about. A fact that is absent is `null` to it.
#[derive(Debug, Clone, Copy)]
pub struct RolloutFacts<'a> {
    /// `completed`, `truncated`, `aborted` or `failed`.
    pub status: &'a str,
    /// The reward of the whole rollout.
    pub reward: Option<f64>,
    /// The parts of the reward by name, as posted.
    pub reward_components: &'a BTreeMap<String, f64>,
    /// The environment's label.
    pub environment: Option<&'a str>,
    /// The oldest version of the weights that generated a trained token.
    pub policy_version: i64,
    /// The version of the weights at arrival.
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

/// What a filter of scope `group` can ask about.
///
/// `reward_mean`, `reward_std` (of the population), `reward_min` and `reward_max` follow from
/// `rewards`, and are `null` when there are none.
#[derive(Debug, Clone, Copy)]
pub struct GroupFacts<'a> {
    /// The number of rollouts in the group, kept and masked.
    pub size: i64,
    /// The rollouts that train.
    pub kept: i64,
    /// The rollouts that vote in the baseline and train nothing.
    pub masked: i64,
    /// The rewards of the rollouts that vote.
    pub rewards: &'a [f64],
    /// Tokens over all rollouts.
    pub tokens: i64,
    /// The label of the environment that the rollouts share.
    pub environment: Option<&'a str>,
    /// Seconds since the group was opened.
    pub age_s: f64,
}

/// A scope in which the variables of one record have values.
pub(super) fn scope_of<'a>(environment: &'a Context<'a, 'a>, variables: &'a dyn VariableResolver) -> Context<'a, 'a> {
    let mut scope = environment.new_inner_scope();
    scope.set_variable_resolver(variables);
    scope
}

/// Looks the variables of scope `rollout` up when an expression asks for them, so that nothing is
/// converted in vain.
pub(super) struct RolloutVariables<'a> {
    facts: &'a RolloutFacts<'a>,
    reward_components: OnceLock<Box<dyn Val>>,
    metadata: OnceLock<Option<Box<dyn Val>>>,
}

impl<'a> RolloutVariables<'a> {
    /// The names that `resolve` knows.
    pub(super) const NAMES: [&'static str; 14] = [
        "status",
        "reward",
        "reward_components",
        "environment",
        "policy_version",
        "version_current",
        "staleness",
        "segments",
        "tokens",
        "response_tokens",
        "trained_tokens",
        "max_segment_tokens",
        "temperature",
        "metadata",
    ];

    pub(super) fn new(facts: &'a RolloutFacts<'a>) -> Self {
        Self { facts, reward_components: OnceLock::new(), metadata: OnceLock::new() }
    }

    fn reward_components(&self) -> &dyn Val {
        let convert = || boxed(self.facts.reward_components.clone().into_iter().collect::<HashMap<_, _>>());
        self.reward_components.get_or_init(convert).as_ref()
    }

    /// Metadata that is nested too deeply to convert has no value, so that the evaluation fails.
    fn metadata(&self) -> Option<&dyn Val> {
        let convert = || match self.facts.metadata {
            None => Some(boxed(Value::Null)),
            Some(text) => serde_json::from_str(text.get()).ok().map(|json| boxed(from_json(json))),
        };
        self.metadata.get_or_init(convert).as_deref()
    }
}

impl VariableResolver for RolloutVariables<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        let facts = self.facts;
        Some(match variable {
            "status" => text(facts.status),
            "reward" => or_null(facts.reward.map(double)),
            "reward_components" => CowVal::Borrowed(self.reward_components()),
            "environment" => or_null(facts.environment.map(text)),
            "policy_version" => int(facts.policy_version),
            "version_current" => int(facts.version_current),
            "staleness" => int(facts.staleness),
            "segments" => int(facts.segments),
            "tokens" => int(facts.tokens),
            "response_tokens" => int(facts.response_tokens),
            "trained_tokens" => int(facts.trained_tokens),
            "max_segment_tokens" => int(facts.max_segment_tokens),
            "temperature" => double(facts.temperature),
            "metadata" => CowVal::Borrowed(self.metadata()?),
            _ => return None,
        })
    }
}

/// Looks the variables of scope `group` up. The statistics are computed once, because a loop over
/// the rewards may ask for them in every round.
pub(super) struct GroupVariables<'a> {
    facts: &'a GroupFacts<'a>,
    rewards: OnceLock<Box<dyn Val>>,
    statistics: Option<Statistics>,
}

impl<'a> GroupVariables<'a> {
    /// The names that `resolve` knows.
    pub(super) const NAMES: [&'static str; 11] = [
        "size",
        "kept",
        "masked",
        "rewards",
        "reward_mean",
        "reward_std",
        "reward_min",
        "reward_max",
        "tokens",
        "environment",
        "age_s",
    ];

    pub(super) fn new(facts: &'a GroupFacts<'a>) -> Self {
        Self { facts, rewards: OnceLock::new(), statistics: Statistics::of(facts.rewards) }
    }

    fn rewards(&self) -> &dyn Val {
        self.rewards.get_or_init(|| boxed(self.facts.rewards.to_vec())).as_ref()
    }

    fn statistic(&self, pick: impl Fn(&Statistics) -> f64) -> CowVal<'_, '_> {
        or_null(self.statistics.as_ref().map(pick).map(double))
    }
}

impl VariableResolver for GroupVariables<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        let facts = self.facts;
        Some(match variable {
            "size" => int(facts.size),
            "kept" => int(facts.kept),
            "masked" => int(facts.masked),
            "rewards" => CowVal::Borrowed(self.rewards()),
            "reward_mean" => self.statistic(|statistics| statistics.mean),
            "reward_std" => self.statistic(|statistics| statistics.std),
            "reward_min" => self.statistic(|statistics| statistics.min),
            "reward_max" => self.statistic(|statistics| statistics.max),
            "tokens" => int(facts.tokens),
            "environment" => or_null(facts.environment.map(text)),
            "age_s" => double(facts.age_s),
            _ => return None,
        })
    }
}

struct Statistics {
    mean: f64,
    std: f64,
    min: f64,
    max: f64,
}

impl Statistics {
    /// `None` without rewards. The variance is taken in a second pass: from sums of squares, equal
    /// rewards would not have exactly none.
    fn of(rewards: &[f64]) -> Option<Self> {
        let count = rewards.len() as f64;
        let mean = rewards.iter().sum::<f64>() / count;
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        Some(Self {
            mean,
            std: (squares / count).sqrt(),
            min: rewards.iter().copied().reduce(f64::min)?,
            max: rewards.iter().copied().reduce(f64::max)?,
        })
    }
}

fn int<'b>(value: i64) -> CowVal<'b, 'b> {
    CowVal::owned(CelInt::from(value))
}

fn double<'b>(value: f64) -> CowVal<'b, 'b> {
    CowVal::owned(CelDouble::from(value))
}

fn text(value: &str) -> CowVal<'_, '_> {
    CowVal::owned(CelString::from(value))
}

fn or_null<'b>(value: Option<CowVal<'b, 'b>>) -> CowVal<'b, 'b> {
    value.unwrap_or_else(|| CowVal::owned(CelNull))
}

fn boxed(value: impl Into<Value>) -> Box<dyn Val> {
    value.into().try_into().expect("lists, maps and scalars are values that can be bound")
}

/// Whole numbers become `int`, as rules write them, unless only `uint` can hold them.
fn from_json(json: serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::Null,
        serde_json::Value::Bool(value) => Value::Bool(value),
        serde_json::Value::Number(number) => number
            .as_i64()
            .map(Value::Int)
            .or_else(|| number.as_u64().map(Value::UInt))
            .or_else(|| number.as_f64().map(Value::Float))
            .unwrap_or(Value::Null),
        serde_json::Value::String(value) => Value::from(value),
        serde_json::Value::Array(values) => Value::from(values.into_iter().map(from_json).collect::<Vec<_>>()),
        serde_json::Value::Object(entries) => {
            let entries = entries.into_iter();
            Value::from(entries.map(|(key, value)| (key, from_json(value))).collect::<HashMap<_, _>>())
        }
    }
}
