//! Objects that are written as objects, and optional fields that may be `null`.
//!
//! A derived reader also takes an array for an object, its fields by their places. Nobody documents that, and a field
//! that is added later would change what such an array means.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    marker::PhantomData,
};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};

/// A value that is read from an object alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ObjectVisitor(PhantomData)).map(Self)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

/// Reads a field that is an object.
pub(super) fn one<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Object::deserialize(deserializer).map(|Object(value)| value)
}

/// Reads a field that is an array of objects.
pub(super) fn many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let objects = Vec::<Object<T>>::deserialize(deserializer)?;
    // Same size, same layout: this moves nothing.
    Ok(objects.into_iter().map(|Object(value)| value).collect())
}

/// Reads a field whose absence and `null` mean its default.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a field that is an object or `null`.
pub(super) fn one_or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    let object = Option::<Object<T>>::deserialize(deserializer)?;
    Ok(object.map(|Object(value)| value).unwrap_or_default())
}

/// Reads a field that is an array of objects or `null`.
pub(super) fn many_or_none<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let objects = Option::<Vec<Object<T>>>::deserialize(deserializer)?.unwrap_or_default();
    // Same size, same layout: this moves nothing.
    Ok(objects.into_iter().map(|Object(value)| value).collect())
}

/// Numbers by name, read from an object that has every name once: a reader that keeps the last of two values would drop
/// the other one silently.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Components(pub BTreeMap<String, f64>);

impl<'de> Deserialize<'de> for Components {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ComponentsVisitor;

        impl<'de> Visitor<'de> for ComponentsVisitor {
            type Value = BTreeMap<String, f64>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut components = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, f64>()? {
                    match components.entry(name) {
                        Entry::Vacant(place) => drop(place.insert(value)),
                        Entry::Occupied(place) => {
                            return Err(de::Error::custom(format_args!("duplicate field `{}`", place.key())));
                        }
                    }
                }
                Ok(components)
            }
        }
        deserializer.deserialize_map(ComponentsVisitor).map(Self)
    }
}

/// Reads named numbers or `null`.
pub(super) fn components<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let components = Option::<Components>::deserialize(deserializer)?;
    Ok(components.map(|Components(components)| components).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::Object;
    use crate::wire::{AckRequest, PolicyRules, Trajectory};

    #[test]
    fn an_array_is_no_object() {
        assert!(serde_json::from_str::<Object<AckRequest>>(r#"{"lease":"k","step":1}"#).is_ok());
        assert!(serde_json::from_str::<Object<AckRequest>>(r#"["k",1]"#).is_err());
        for trajectory in [
            r#"{"status":"aborted","segments":[["final",[1,2],[1]]]}"#,
            r#"{"status":"aborted","sampling":[1.0,1.0,-1]}"#,
        ] {
            let error = serde_json::from_str::<Trajectory>(trajectory).expect_err("an array stands for an object");
            assert!(error.to_string().contains("expected an object"), "{error}");
        }
        for rules in ["{\"group\":[8]}", "{\"filter\":[[\"a\",\"rollout\",\"true\",\"drop\"]]}"] {
            assert!(serde_json::from_str::<PolicyRules>(rules).is_err(), "{rules}");
        }
    }
}
