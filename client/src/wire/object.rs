//! Objects that are written as objects.
//!
//! A derived reader also takes an array for an object, its fields by their places. Nobody documents that, and a field
//! that is added later would change what such an array means.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
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
