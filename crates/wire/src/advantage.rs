//! The estimator of advantages: a name, or an object where it has parameters.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        self, MapAccess, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

use super::object::Components;

/// How much better a rollout did than others, and by which of its rewards. Each rollout counts once.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum Advantage {
    /// An estimator without parameters.
    Named(AdvantageName),
    /// By reward component.
    Gdpo(Gdpo),
    /// By turn, from the rewards of turns.
    TurnReturn(TurnReturn),
    /// By turn, from the rewards of turns that began in the same state.
    Gigpo(Gigpo),
}

/// Advantage estimator over the rewards R of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AdvantageName {
    /// (R - mean) / (unbiased standard deviation + 1e-6).
    #[default]
    Grpo,
    /// R - mean (Dr. GRPO).
    GrpoMean,
    /// R - mean of the others.
    Rloo,
    /// R.
    Reward,
    /// 0, because the trainer computes its own advantages from the reward.
    None,
    /// Those that the producer sent for each token, in `advantages` of the segments.
    Posted,
}

/// The weighted sum of an advantage for each reward component, which is that of `grpo` over the rollouts of the group that
/// have the component (GDPO, arXiv 2601.05242). A rollout without a component has 0 for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Gdpo {
    /// The kind.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: GdpoKind,
    /// The weights of the components, by their names in `reward_components`: 1 to 64, each 0.000001 to 1,000,000 or the
    /// negative of that.
    #[serde(deserialize_with = "weights")]
    pub components: BTreeMap<String, f64>,
    /// Over which rollouts the sums are whitened.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(default = "batch"))]
    pub whiten: Whiten,
}

/// The kind of an advantage by reward component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum GdpoKind {
    /// By reward component.
    #[default]
    Gdpo,
}

/// Over which rollouts advantages A are whitened: (A - mean) / (unbiased standard deviation + 1e-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Whiten {
    /// Over those of the batch that count in a baseline. Samples have the whitened advantages; a rollout's own entry has
    /// the advantage in its group.
    #[default]
    Batch,
    /// They are not whitened.
    None,
}

/// An advantage for each turn t: (G - mean) / (unbiased standard deviation + 1e-6) over all turns of the group, where G, the
/// return of the turn, is the sum over u >= t of gamma^(u-t) times the reward of turn u. A turn without a reward has 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TurnReturn {
    /// The kind.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: TurnReturnKind,
    /// What a reward counts one turn earlier, 0 to 1.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(default = 1.0, minimum = 0, maximum = 1))]
    pub gamma: f64,
    /// Whether the reward of the rollout is added to that of its last turn.
    #[serde(default = "yes")]
    #[cfg_attr(feature = "openapi", schema(default = true))]
    pub outcome: bool,
}

/// The kind of an advantage by the returns of turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TurnReturnKind {
    /// By the returns of turns.
    #[default]
    TurnReturn,
}

/// An advantage for each turn: `A_E + omega * A_S` (`GiGPO`, arXiv 2505.10978). `A_E` is the reward of the rollout compared
/// with those of its group. `A_S` is the return of the turn, as in `turn_return` with `outcome`, compared with those of the
/// turns of the group that began in the same state: 0 without a `state_key`, or for a state in which one turn began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Gigpo {
    /// The kind.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: GigpoKind,
    /// What a reward counts one turn earlier, 0 to 1.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(default = 1.0, minimum = 0, maximum = 1))]
    pub gamma: f64,
    /// The weight of `A_S`, 0 to 1,000,000.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(default = 1.0, minimum = 0, maximum = 1_000_000))]
    pub omega: f64,
    /// How values x are compared.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(default = "std"))]
    pub norm: Norm,
}

/// The kind of an advantage by the states of turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum GigpoKind {
    /// By the states of turns.
    #[default]
    Gigpo,
}

/// How values x are compared with each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Norm {
    /// (x - mean) / (unbiased standard deviation + 1e-6).
    #[default]
    Std,
    /// x - mean.
    None,
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

impl Default for Advantage {
    fn default() -> Self {
        Self::Named(AdvantageName::default())
    }
}

/// Finds the fields that a kind has. The struct is then read without its `kind`, which has only one value.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Parameters {
    Gdpo(Gdpo),
    TurnReturn(TurnReturn),
    Gigpo(Gigpo),
}

impl<'de> Deserialize<'de> for Advantage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AdvantageVisitor;

        impl<'de> Visitor<'de> for AdvantageVisitor {
            type Value = Advantage;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an estimator, or an object with its `kind`")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Advantage, E> {
                AdvantageName::deserialize(StrDeserializer::new(name)).map(Advantage::Named)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Advantage, A::Error> {
                Ok(match Parameters::deserialize(MapAccessDeserializer::new(map))? {
                    Parameters::Gdpo(gdpo) => Advantage::Gdpo(gdpo),
                    Parameters::TurnReturn(turn_return) => Advantage::TurnReturn(turn_return),
                    Parameters::Gigpo(gigpo) => Advantage::Gigpo(gigpo),
                })
            }
        }
        deserializer.deserialize_any(AdvantageVisitor)
    }
}

fn weights<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    Components::deserialize(deserializer).map(|Components(weights)| weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_with_parameters_is_an_object_and_the_others_are_names() {
        let read = |text: &str| serde_json::from_str::<Advantage>(text).map_err(|error| error.to_string());
        for text in [
            r#""grpo_mean""#,
            r#"{"kind":"gdpo","components":{"acc":1.0,"fmt":-0.5},"whiten":"none"}"#,
            r#"{"kind":"turn_return","gamma":0.9,"outcome":false}"#,
            r#"{"kind":"gigpo","gamma":1.0,"omega":0.5,"norm":"none"}"#,
        ] {
            let written = read(text).map(|advantage| serde_json::to_string(&advantage).expect("it is plain data"));
            assert_eq!(written.as_deref(), Ok(text));
        }
        let gdpo = Gdpo { kind: GdpoKind::Gdpo, components: [("acc".to_owned(), 2.0)].into(), whiten: Whiten::Batch };
        assert_eq!(read(r#"{"components":{"acc":2},"kind":"gdpo"}"#), Ok(Advantage::Gdpo(gdpo)));
        let defaults = TurnReturn { kind: TurnReturnKind::TurnReturn, gamma: 1.0, outcome: true };
        assert_eq!(read(r#"{"kind":"turn_return"}"#), Ok(Advantage::TurnReturn(defaults)));
        let defaults = Gigpo { kind: GigpoKind::Gigpo, gamma: 1.0, omega: 1.0, norm: Norm::Std };
        assert_eq!(read(r#"{"kind":"gigpo"}"#), Ok(Advantage::Gigpo(defaults)));
        for (text, why) in [
            ("1", "the name of an estimator, or an object with its `kind`"),
            (r#""gdpo""#, "unknown variant `gdpo`, expected one of `grpo`"),
            (r#"{"components":{}}"#, "missing field `kind`"),
            (r#"{"kind":"gdpo"}"#, "missing field `components`"),
            (r#"{"kind":"grpo"}"#, "unknown variant `grpo`"),
            (r#"{"kind":"gdpo","components":{"a":1,"a":2}}"#, "duplicate field `a`"),
            (r#"{"kind":"gdpo","components":{},"gamma":1}"#, "unknown field `gamma`"),
            (r#"{"kind":"turn_return","omega":1}"#, "unknown field `omega`"),
            (r#"{"kind":"gigpo","norm":"mean"}"#, "unknown variant `mean`"),
        ] {
            let found = read(text).expect_err(text);
            assert!(found.contains(why), "{text}: {found}");
        }
    }
}
