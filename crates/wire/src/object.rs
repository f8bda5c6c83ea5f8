//! Readers for JSON objects that refuse arrays, and for optional fields that may be `null`.
//!
//! A derived deserializer also accepts an array in place of an object and assigns its elements to the fields in order.
//! That form is not documented, and a field that is added later would change the meaning of such an array.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    marker::PhantomData,
};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::Number;

/// A value that can be read only from a JSON object.
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

/// Reads a field that must be an object.
pub(super) fn one<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Object::deserialize(deserializer).map(|Object(value)| value)
}

/// Reads a field that must be an array of objects.
pub(super) fn many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let objects = Vec::<Object<T>>::deserialize(deserializer)?;
    // The layout is the same, so the compiler reuses the allocation.
    Ok(objects.into_iter().map(|Object(value)| value).collect())
}

/// Reads a field that takes its default when it is absent or `null`.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a field that must be an object or `null`.
pub(super) fn one_or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    let object = Option::<Object<T>>::deserialize(deserializer)?;
    Ok(object.map(|Object(value)| value).unwrap_or_default())
}

/// Reads a field that must be an array of objects or `null`.
pub(super) fn many_or_none<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let objects = Option::<Vec<Object<T>>>::deserialize(deserializer)?.unwrap_or_default();
    // The layout is the same, so the compiler reuses the allocation.
    Ok(objects.into_iter().map(|Object(value)| value).collect())
}

/// Reads an object of named numbers and refuses duplicate names. A reader that keeps the last of two values would
/// silently drop the other one.
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
                let mut components: BTreeMap<String, f64> = BTreeMap::new();
                while let Some((name, Number(value))) = map.next_entry()? {
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

/// Reads an object of named objects, or `null`, and refuses duplicate names.
pub(super) fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, T>, D::Error> {
    Ok(Option::<NamedObjects<T>>::deserialize(deserializer)?.map(|NamedObjects(named)| named).unwrap_or_default())
}

/// Reads an object of named objects and refuses duplicate names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedObjects<T>(pub BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NamedObjects<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamedVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for NamedVisitor<T> {
            type Value = BTreeMap<String, T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of objects")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut named = BTreeMap::new();
                while let Some((name, Object(value))) = map.next_entry::<String, Object<T>>()? {
                    match named.entry(name) {
                        Entry::Vacant(place) => drop(place.insert(value)),
                        Entry::Occupied(place) => {
                            return Err(de::Error::custom(format_args!("duplicate field `{}`", place.key())));
                        }
                    }
                }
                Ok(named)
            }
        }
        deserializer.deserialize_map(NamedVisitor(PhantomData)).map(Self)
    }
}

/// Reads an object of named numbers, or `null`.
pub(super) fn components<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let components = Option::<Components>::deserialize(deserializer)?;
    Ok(components.map(|Components(components)| components).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::Object;
    use crate::{AckRequest, PolicyRules, Trajectory};

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
