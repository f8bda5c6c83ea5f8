//! A JSON object as it was sent: its entries in their order, and their values as text.
//!
//! What clients wrote must come back with the same keys and numbers, and values of `serde_json` keep neither the order of
//! keys nor the text of numbers.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

/// The entries of an object. A key that is repeated has its last value, as in Python.
#[derive(Debug, Default)]
pub(crate) struct Object<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Object<'a> {
    /// Reads an object, or returns nothing if the text is no object.
    pub(crate) fn of(text: &'a str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The text of a value. None if it is absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.0.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.get()).filter(|text| *text != "null")
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(name, _)| name == key)
    }

    /// A value of a type. None if it is absent, null or of another type.
    pub(crate) fn read<T: Deserialize<'a>>(&self, key: &str) -> Option<T> {
        serde_json::from_str(self.get(key)?).ok()
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &'a str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.get()))
    }
}

impl<'a, 'de: 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
        let mut entries: Vec<(String, &RawValue)> = Vec::new();
        let mut places = std::collections::HashMap::new();
        while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
            if let Some(&place) = places.get(&key) {
                let entry: &mut (String, &RawValue) = &mut entries[place];
                entry.1 = value;
            } else {
                places.insert(key.clone(), entries.len());
                entries.push((key, value));
            }
        }
        Ok(Object(entries))
    }
}

/// Writes an object entry by entry.
pub(crate) struct ObjectWriter<'w> {
    text: &'w mut String,
    is_first: bool,
}

impl<'w> ObjectWriter<'w> {
    pub(crate) fn new(text: &'w mut String) -> Self {
        text.push('{');
        Self { text, is_first: true }
    }

    /// Writes a key. The caller writes the value to the returned text.
    pub(crate) fn key(&mut self, key: &str) -> &mut String {
        if !std::mem::take(&mut self.is_first) {
            self.text.push(',');
        }
        self.text.push_str(&serde_json::to_string(key).expect("a text is always JSON"));
        self.text.push(':');
        self.text
    }

    pub(crate) fn entry(&mut self, key: &str, value: &str) {
        self.key(key).push_str(value);
    }

    pub(crate) fn end(self) {
        self.text.push('}');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_keeps_the_order_of_its_keys_and_the_text_of_its_numbers() {
        let text = r#"{"z":1.50,"a":[1e3, {"b":2}],"n":null,"z":7.0,"\u00e9":"x"}"#;
        let object = Object::of(text).expect("it is an object");
        let mut written = String::new();
        let mut writer = ObjectWriter::new(&mut written);
        object.entries().for_each(|(key, value)| writer.entry(key, value));
        writer.end();
        assert_eq!(written, r#"{"z":7.0,"a":[1e3, {"b":2}],"n":null,"é":"x"}"#);
        assert_eq!((object.get("n"), object.has("n"), object.read::<f64>("z")), (None, true, Some(7.0)));
        assert!(Object::of("[1]").is_none() && Object::of("{").is_none());
    }
}
