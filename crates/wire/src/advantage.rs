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
        for text in [r#""grpo_mean""#, r#"{"kind":"gdpo","components":{"acc":1.0,"fmt":-0.5},"whiten":"none"}"#] {
            let written = read(text).map(|advantage| serde_json::to_string(&advantage).expect("it is plain data"));
            assert_eq!(written.as_deref(), Ok(text));
        }
        let gdpo = Gdpo { kind: GdpoKind::Gdpo, components: [("acc".to_owned(), 2.0)].into(), whiten: Whiten::Batch };
        assert_eq!(read(r#"{"components":{"acc":2},"kind":"gdpo"}"#), Ok(Advantage::Gdpo(gdpo)));
        for (text, why) in [
            ("1", "the name of an estimator, or an object with its `kind`"),
            (r#""gdpo""#, "unknown variant `gdpo`, expected one of `grpo`"),
            (r#"{"components":{}}"#, "missing field `kind`"),
            (r#"{"kind":"gdpo"}"#, "missing field `components`"),
            (r#"{"kind":"grpo"}"#, "unknown variant `grpo`"),
            (r#"{"kind":"gdpo","components":{"a":1,"a":2}}"#, "duplicate field `a`"),
            (r#"{"kind":"gdpo","components":{},"gamma":1}"#, "unknown field `gamma`"),
        ] {
            let found = read(text).expect_err(text);
            assert!(found.contains(why), "{text}: {found}");
        }
    }
}
