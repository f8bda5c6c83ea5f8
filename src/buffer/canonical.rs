//! Canonical content: what makes two posts of one rollout the same.
//!
//! Separate from the stored form, because a retry may spell its JSON differently (whitespace, key order, aliases,
//! omitted defaults) and must still be recognised, while messages and metadata are stored as sent.

use std::{collections::BTreeMap, fmt};

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Nesting that free-form JSON may have, well under the parser's own limit of 128.
pub const JSON_DEPTH_MAX: usize = 64;

/// BLAKE3 hash of a trajectory's canonical content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ContentDigest([u8; 32]);

impl ContentDigest {
    /// The digest's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

/// Hashes values unambiguously: every field has a tag, every variable length goes first.
#[derive(Default)]
pub(super) struct Hasher(blake3::Hasher);

impl Hasher {
    pub(super) fn finish(&self) -> ContentDigest {
        ContentDigest(*self.0.finalize().as_bytes())
    }

    pub(super) fn tag(&mut self, tag: u8) {
        self.0.update(&[tag]);
    }

    pub(super) fn int(&mut self, value: i64) {
        self.0.update(&value.to_le_bytes());
    }

    pub(super) fn float(&mut self, value: f64) {
        self.0.update(&value.to_bits().to_le_bytes());
    }

    pub(super) fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        self.int(value.len() as i64);
        self.0.update(value);
    }

    pub(super) fn option<T>(&mut self, value: Option<T>, hash: impl FnOnce(&mut Self, T)) {
        self.tag(u8::from(value.is_some()));
        if let Some(value) = value {
            hash(self, value);
        }
    }

    fn json(&mut self, node: &Json) {
        match node {
            Json::Null => self.tag(0),
            Json::Bool(value) => {
                self.tag(1);
                self.tag(u8::from(*value));
            }
            Json::Int(value) => {
                self.tag(2);
                self.0.update(&value.to_le_bytes());
            }
            Json::Float(value) => {
                self.tag(3);
                self.float(*value);
            }
            Json::Text(value) => {
                self.tag(4);
                self.text(value);
            }
            Json::Array(items) => {
                self.tag(5);
                self.int(items.len() as i64);
                for item in items {
                    self.json(item);
                }
            }
            Json::Object(entries) => {
                self.tag(6);
                self.int(entries.len() as i64);
                for (key, value) in entries {
                    self.text(key);
                    self.json(value);
                }
            }
        }
    }
}

/// Free-form JSON that was checked: bounded depth, no duplicate keys, every number in range.
#[derive(Debug)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    /// Checks raw JSON; the error says what is wrong with it.
    pub(super) fn check(raw: &RawValue) -> Result<Self, String> {
        let mut deserializer = serde_json::Deserializer::from_str(raw.get());
        Seed { depth: 0 }.deserialize(&mut deserializer).map_err(|error| describe(&error))
    }

    pub(super) fn hash_into(&self, hasher: &mut Hasher) {
        hasher.json(self);
    }
}

/// The error without its position, which is relative to the fragment and would mislead.
fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

struct Seed {
    depth: usize,
}

impl Seed {
    fn deeper<E: de::Error>(&self) -> Result<Self, E> {
        if self.depth >= JSON_DEPTH_MAX {
            return Err(E::custom(format_args!("nested deeper than {JSON_DEPTH_MAX} levels")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Seed {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self.deeper()?)? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self.deeper()?)?;
            if entries.contains_key(&key) {
                return Err(de::Error::custom(format_args!("duplicate key `{key}`")));
            }
            entries.insert(key, value);
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str) -> ContentDigest {
        let raw = RawValue::from_string(text.to_owned()).expect("the test's JSON is well-formed");
        let mut hasher = Hasher::default();
        Json::check(&raw).expect("the test's JSON is acceptable").hash_into(&mut hasher);
        hasher.finish()
    }

    fn refusal(text: &str) -> String {
        let raw = RawValue::from_string(text.to_owned()).expect("the test's JSON is well-formed");
        Json::check(&raw).expect_err("the test's JSON is refused")
    }

    #[test]
    fn spelling_does_not_change_the_content() {
        assert_eq!(digest(r#"{"b": [1, 2.50], "a": "\u0061"}"#), digest(r#"{"a":"a","b":[1,25e-1]}"#));
    }

    #[test]
    fn different_values_have_different_content() {
        for other in [r#"{"a":[1,[2]]}"#, r#"{"a":[1],"b":2}"#, r#"{"a":["1",2]}"#, r#"{"a":[1.5,2]}"#] {
            assert_ne!(digest(r#"{"a":[1,2]}"#), digest(other), "{other}");
        }
    }

    #[test]
    fn duplicate_keys_are_named() {
        assert_eq!(refusal(r#"{"a":{"x":1,"x":2}}"#), "duplicate key `x`");
    }

    #[test]
    fn nesting_is_bounded() {
        let nest = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        digest(&nest(JSON_DEPTH_MAX));
        assert_eq!(refusal(&nest(JSON_DEPTH_MAX + 2)), "nested deeper than 64 levels");
    }
}
