//! The variables of filters: one table for each scope, which defines everything about each variable.
//!
//! The check of names, the values in an evaluation, the typical record of the trial evaluation, the cost of reading a
//! variable, and the tables of `docs/filters.md` all come from these tables.
//!
//! An expression asks for variables one by one, so that no value is converted needlessly: most rules read one or two
//! numbers, and metadata can be large.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt::Write as _,
    sync::OnceLock,
};

use cel::{
    Context, Value,
    common::{
        types::{CelDouble, CelInt, CelNull, CelString},
        value::{CowVal, Val},
    },
    context::VariableResolver,
};
use forebay_wire::{FilterScope, FilterVariable};

use super::facts::{GroupFacts, RolloutFacts};

pub(super) struct Variable<G> {
    /// Its name in expressions.
    pub(super) name: &'static str,
    /// The type of its value.
    pub(super) holds: Type,
    /// A value that many records have, as JSON. New expressions are tried on it.
    typical: &'static str,
    /// What it means, for the documentation.
    meaning: &'static str,
    /// Whether its value changes when a version is published.
    is_of_version: bool,
    /// Its value for a record; none where the value cannot be converted, so that the evaluation fails.
    value: G,
}

/// The type of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    /// A string that is always there.
    Text,
    /// A label of a client, if the record has it.
    Label,
    /// A whole number.
    Int,
    /// A number.
    Double,
    /// A number, if the record has it.
    NullableDouble,
    /// The numbers of a group's rollouts.
    Rewards,
    /// Numbers by name.
    Components,
    /// [`STATISTICS`] by the names of components.
    Statistics,
    /// JSON of the client, if the record has it.
    Metadata,
}

type RolloutGetter = for<'v> fn(&'v RolloutValues<'v>) -> Option<CowVal<'v, 'v>>;
type GroupGetter = for<'v> fn(&'v GroupValues<'v>) -> Option<CowVal<'v, 'v>>;

/// The variables of scope `rollout`.
static ROLLOUT: [Variable<RolloutGetter>; 15] = [
    rollout("status", Type::Text, "\"completed\"", "`completed`, `truncated`, `aborted` or `failed`", |rollout| {
        Some(text(rollout.facts.status))
    }),
    rollout("reward", Type::NullableDouble, "0.5", "the reward of the rollout", |rollout| {
        Some(or_null(rollout.facts.reward.map(double)))
    }),
    rollout("reward_components", Type::Components, "{\"component\": 0.5}", "named parts of the reward", |rollout| {
        Some(CowVal::Borrowed(rollout.reward_components()))
    }),
    rollout(
        "scores",
        Type::Components,
        "{\"component\": 0.5}",
        "scores of all scorers, with both of the above",
        |rollout| Some(CowVal::Borrowed(rollout.scores())),
    ),
    rollout("environment", Type::Label, "\"environment\"", "the label of the environment", |rollout| {
        Some(or_null(rollout.facts.environment.map(text)))
    }),
    rollout(
        "policy_version",
        Type::Int,
        "3",
        "the oldest version of the weights that generated a trained token",
        |rollout| Some(int(rollout.facts.policy_version)),
    )
    .of_version(),
    rollout("version_current", Type::Int, "4", "the version of the weights when the rollout is judged", |rollout| {
        Some(int(rollout.facts.version_current))
    })
    .of_version(),
    rollout("staleness", Type::Int, "1", "how many versions the rollout is behind, at least 0", |rollout| {
        Some(int(rollout.facts.staleness))
    })
    .of_version(),
    rollout("segments", Type::Int, "2", "number of segments", |rollout| Some(int(rollout.facts.segments))),
    rollout("tokens", Type::Int, "4096", "tokens of all segments, prompts included", |rollout| {
        Some(int(rollout.facts.tokens))
    }),
    rollout("response_tokens", Type::Int, "2048", "tokens after the prompts", |rollout| {
        Some(int(rollout.facts.response_tokens))
    }),
    rollout("trained_tokens", Type::Int, "1024", "tokens whose `loss_mask` is 1", |rollout| {
        Some(int(rollout.facts.trained_tokens))
    }),
    rollout("max_segment_tokens", Type::Int, "3072", "tokens of the longest segment", |rollout| {
        Some(int(rollout.facts.max_segment_tokens))
    }),
    rollout("temperature", Type::Double, "1.0", "temperature of the sampling", |rollout| {
        Some(double(rollout.facts.temperature))
    }),
    rollout("metadata", Type::Metadata, "{}", "the metadata as posted", |rollout| {
        Some(CowVal::Borrowed(rollout.metadata()?))
    }),
];

/// What `components` of scope `group` has for each reward component.
pub(super) const STATISTICS: [&str; 5] = ["mean", "std", "min", "max", "count"];

/// The variables of scope `group`.
static GROUP: [Variable<GroupGetter>; 12] = [
    group("size", Type::Int, "4", "places of the group", |group| Some(int(group.facts.size))),
    group("kept", Type::Int, "3", "rollouts that are trained", |group| Some(int(group.facts.kept))),
    group("masked", Type::Int, "1", "rollouts that count in the baseline and are not trained", |group| {
        Some(int(group.facts.masked))
    }),
    group("rewards", Type::Rewards, "[0.0, 0.5, 1.0]", "rewards of the rollouts that count in the baseline", |group| {
        Some(CowVal::Borrowed(group.rewards()))
    }),
    group("reward_mean", Type::NullableDouble, "0.5", "the mean of `rewards`", |group| {
        Some(group.statistic(|of| of.mean))
    }),
    group(
        "reward_std",
        Type::NullableDouble,
        "0.408",
        "the standard deviation of `rewards` as a population (divisor n)",
        |group| Some(group.statistic(|of| of.std)),
    ),
    group("reward_min", Type::NullableDouble, "0.0", "the least of `rewards`", |group| {
        Some(group.statistic(|of| of.min))
    }),
    group("reward_max", Type::NullableDouble, "1.0", "the greatest of `rewards`", |group| {
        Some(group.statistic(|of| of.max))
    }),
    group(
        "components",
        Type::Statistics,
        "{\"component\": {\"mean\": 0.5, \"std\": 0.408, \"min\": 0.0, \"max\": 1.0, \"count\": 3}}",
        "mean, std, min, max and count of each reward component, over the voting rollouts that have it",
        |group| Some(CowVal::Borrowed(group.components())),
    ),
    group("tokens", Type::Int, "16384", "tokens of all rollouts", |group| Some(int(group.facts.tokens))),
    group("environment", Type::Label, "\"environment\"", "the label of the group's first rollout", |group| {
        Some(or_null(group.facts.environment.map(text)))
    }),
    group("age_s", Type::Double, "60.0", "seconds since the group was opened", |group| Some(double(group.facts.age_s))),
];

const fn rollout(
    name: &'static str,
    holds: Type,
    typical: &'static str,
    meaning: &'static str,
    value: RolloutGetter,
) -> Variable<RolloutGetter> {
    Variable { name, holds, typical, meaning, is_of_version: false, value }
}

const fn group(
    name: &'static str,
    holds: Type,
    typical: &'static str,
    meaning: &'static str,
    value: GroupGetter,
) -> Variable<GroupGetter> {
    Variable { name, holds, typical, meaning, is_of_version: false, value }
}

impl Variable<RolloutGetter> {
    const fn of_version(self) -> Self {
        Self { is_of_version: true, ..self }
    }
}

impl<G> Variable<G> {
    fn typical(&self) -> Value {
        from_json(serde_json::from_str(self.typical).expect("the tables give JSON"))
    }

    fn on_wire(&self, scope: FilterScope) -> FilterVariable {
        FilterVariable {
            scope,
            name: self.name.to_owned(),
            kind: self.holds.describe().to_owned(),
            meaning: self.meaning.to_owned(),
            typical: self.typical.to_owned(),
        }
    }

    fn documentation(&self) -> String {
        format!("| `{}` | {} | {} | `{}` |\n", self.name, self.holds.describe(), self.meaning, self.typical)
    }
}

impl Type {
    fn describe(self) -> &'static str {
        match self {
            Self::Text => "string",
            Self::Label => "string or null",
            Self::Int => "int",
            Self::Double => "double",
            Self::NullableDouble => "double or null",
            Self::Rewards => "list of doubles",
            Self::Components => "map of doubles",
            Self::Statistics => "map of maps",
            Self::Metadata => "map or null",
        }
    }

    /// Whether it is a collection whose entries are small, and can be read alone.
    pub(super) fn is_of_numbers(self) -> bool {
        matches!(self, Self::Rewards | Self::Components | Self::Statistics)
    }
}

/// The names of a scope, in the order of the documentation.
pub(super) fn names(scope: FilterScope) -> Vec<&'static str> {
    match scope {
        FilterScope::Rollout => ROLLOUT.iter().map(|variable| variable.name).collect(),
        FilterScope::Group => GROUP.iter().map(|variable| variable.name).collect(),
    }
}

/// All variables as clients see them, in the order of the documentation.
pub(super) fn on_wire() -> Vec<FilterVariable> {
    let rollout = ROLLOUT.iter().map(|variable| variable.on_wire(FilterScope::Rollout));
    rollout.chain(GROUP.iter().map(|variable| variable.on_wire(FilterScope::Group))).collect()
}

/// The type of a variable. A name that both scopes have has the same type in both.
pub(super) fn type_of(name: &str) -> Option<Type> {
    let rollout = ROLLOUT.iter().map(|variable| (variable.name, variable.holds));
    let mut all = rollout.chain(GROUP.iter().map(|variable| (variable.name, variable.holds)));
    all.find_map(|(known, holds)| (known == name).then_some(holds))
}

/// The variables of scope `rollout` that change when a version is published.
pub(super) fn names_of_versions() -> impl Iterator<Item = &'static str> {
    ROLLOUT.iter().filter(|variable| variable.is_of_version).map(|variable| variable.name)
}

/// The tables of `docs/filters.md`.
#[must_use]
pub fn documentation() -> String {
    let mut text = String::new();
    let mut table = |scope: &str, rows: Vec<String>| {
        let _ = writeln!(
            text,
            "| scope `{scope}` | type | meaning | typical value |\n|---|---|---|---|\n{}",
            rows.concat()
        );
    };
    table("rollout", ROLLOUT.iter().map(Variable::documentation).collect());
    table("group", GROUP.iter().map(Variable::documentation).collect());
    text
}

/// A scope in which the variables of one record have values.
pub(super) fn scope_of<'a>(environment: &'a Context<'a, 'a>, variables: &'a dyn VariableResolver) -> Context<'a, 'a> {
    let mut scope = environment.new_inner_scope();
    scope.set_variable_resolver(variables);
    scope
}

/// The typical record of a scope. No value is absent from it, because a rule that cannot be evaluated without a reward
/// is still valid.
pub(super) struct TypicalValues(HashMap<&'static str, Box<dyn Val>>);

impl TypicalValues {
    /// The record whose collections by component have these names.
    pub(super) fn new(scope: FilterScope, names: &HashSet<String>) -> Self {
        let value = |holds: Type, typical: Value| match (holds, typical) {
            (Type::Components | Type::Statistics, Value::Map(entries)) => {
                let entry = entries.map.values().next().expect("a typical collection has an entry");
                boxed(names.iter().map(|name| (name.clone(), entry.clone())).collect::<HashMap<_, _>>())
            }
            (_, typical) => boxed(typical),
        };
        Self(match scope {
            FilterScope::Rollout => ROLLOUT.iter().map(|of| (of.name, value(of.holds, of.typical()))).collect(),
            FilterScope::Group => GROUP.iter().map(|of| (of.name, value(of.holds, of.typical()))).collect(),
        })
    }
}

impl VariableResolver for TypicalValues {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        self.0.get(variable).map(|value| CowVal::Borrowed(value.as_ref()))
    }
}

/// The values of one rollout. Values that take long to convert are converted at most once.
pub(super) struct RolloutValues<'a> {
    facts: &'a RolloutFacts<'a>,
    reward_components: OnceLock<Box<dyn Val>>,
    scores: OnceLock<Box<dyn Val>>,
    metadata: OnceLock<Option<Box<dyn Val>>>,
}

impl<'a> RolloutValues<'a> {
    pub(super) fn new(facts: &'a RolloutFacts<'a>) -> Self {
        Self { facts, reward_components: OnceLock::new(), scores: OnceLock::new(), metadata: OnceLock::new() }
    }

    fn reward_components(&self) -> &dyn Val {
        self.reward_components.get_or_init(|| by_name(self.facts.reward_components)).as_ref()
    }

    fn scores(&self) -> &dyn Val {
        self.scores.get_or_init(|| by_name(self.facts.scores)).as_ref()
    }

    /// Metadata that is nested too deeply to convert has no value.
    fn metadata(&self) -> Option<&dyn Val> {
        let convert = || match self.facts.metadata {
            None => Some(boxed(Value::Null)),
            Some(text) => serde_json::from_str(text.get()).ok().map(|json| boxed(from_json(json))),
        };
        self.metadata.get_or_init(convert).as_deref()
    }
}

impl VariableResolver for RolloutValues<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        ROLLOUT.iter().find(|known| known.name == variable).and_then(|known| (known.value)(self))
    }
}

/// The values of one group. The statistics are computed once, because a loop over the rewards may ask for them in every
/// round.
pub(super) struct GroupValues<'a> {
    facts: &'a GroupFacts<'a>,
    rewards: OnceLock<Box<dyn Val>>,
    statistics: Option<Statistics>,
    components: OnceLock<Box<dyn Val>>,
}

impl<'a> GroupValues<'a> {
    pub(super) fn new(facts: &'a GroupFacts<'a>) -> Self {
        let statistics = Statistics::of(facts.rewards);
        Self { facts, rewards: OnceLock::new(), statistics, components: OnceLock::new() }
    }

    fn rewards(&self) -> &dyn Val {
        self.rewards.get_or_init(|| boxed(self.facts.rewards.to_vec())).as_ref()
    }

    fn components(&self) -> &dyn Val {
        let convert = || {
            let mut values: HashMap<&str, Vec<f64>> = HashMap::new();
            for (name, value) in self.facts.components.iter().copied().flatten() {
                values.entry(name).or_default().push(*value);
            }
            let of_name = |(name, values): (&str, Vec<f64>)| {
                let of = Statistics::of(&values)?;
                let count = Value::Int(values.len() as i64);
                let numbers = [of.mean, of.std, of.min, of.max].map(Value::Float).into_iter().chain([count]);
                let entries: HashMap<_, _> = STATISTICS.iter().map(|name| (*name).to_owned()).zip(numbers).collect();
                Some((name.to_owned(), Value::from(entries)))
            };
            boxed(values.into_iter().filter_map(of_name).collect::<HashMap<_, _>>())
        };
        self.components.get_or_init(convert).as_ref()
    }

    fn statistic(&self, pick: impl Fn(&Statistics) -> f64) -> CowVal<'_, '_> {
        or_null(self.statistics.as_ref().map(pick).map(double))
    }
}

impl VariableResolver for GroupValues<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        GROUP.iter().find(|known| known.name == variable).and_then(|known| (known.value)(self))
    }
}

struct Statistics {
    mean: f64,
    std: f64,
    min: f64,
    max: f64,
}

impl Statistics {
    /// `None` without rewards. The variance is computed in a second pass, because the usual formula with sums of
    /// squares would not give exactly 0 for equal rewards.
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

fn by_name(numbers: &BTreeMap<String, f64>) -> Box<dyn Val> {
    boxed(numbers.clone().into_iter().collect::<HashMap<_, _>>())
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
