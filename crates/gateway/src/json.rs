//! Reading JSON without changing it.
//!
//! What the gateway does not interpret is passed on with its text and the order of its keys, because a chat template
//! may print it into the prompt. So bodies are read as borrowed raw values, and only the fields that the gateway
//! interprets are decoded. Each value knows its path, so that an error can name the field.

use std::collections::BTreeSet;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor},
    ser::SerializeMap,
};
use serde_json::value::RawValue;

use crate::dialect::error::DialectError;

/// The longest name that is stored with a call.
const NAME_BYTES_MAX: usize = 256;

/// The most fields of an object whose fields are read, such as a message.
const FIELDS_MAX: usize = 256;

/// Fields of an object with the text of their values, in the order in which they were sent.
pub type Fields = Vec<(String, Box<RawValue>)>;

/// Makes a raw value of anything that can be serialized.
pub(crate) fn raw(value: &impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).expect("strings, numbers and maps with string keys are always JSON")
}

/// Serializes a value whose serialization cannot fail.
pub(crate) fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and maps with string keys are always JSON")
}

/// Whether a text is that of a JSON object.
pub(crate) fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && serde_json::from_str::<&RawValue>(text).is_ok()
}

/// Writes fields into a map that is being serialized.
pub(crate) fn write_fields<M: SerializeMap>(map: &mut M, fields: &Fields) -> Result<(), M::Error> {
    fields.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))
}

/// Makes an object of fields, in their order.
pub(crate) fn object_of(fields: &Fields) -> Box<RawValue> {
    struct InOrder<'a>(&'a Fields);
    impl Serialize for InOrder<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(Some(self.0.len()))?;
            write_fields(&mut map, self.0)?;
            map.end()
        }
    }
    raw(&InOrder(fields))
}

/// A value of a body, with the path that leads to it, such as `messages[2].content`.
#[derive(Clone)]
pub(crate) struct Item<'a> {
    path: String,
    raw: &'a RawValue,
}

impl<'a> Item<'a> {
    /// The whole body.
    pub(crate) fn body(body: &'a [u8]) -> Result<Self, DialectError> {
        match serde_json::from_slice(body) {
            Ok(raw) => Ok(Self { path: String::new(), raw }),
            Err(error) => Err(DialectError::invalid("body", format!("is not JSON: {error}"))),
        }
    }

    /// A field of the body that was taken as text.
    pub(crate) fn field(name: &str, raw: &'a RawValue) -> Self {
        Self { path: name.to_owned(), raw }
    }

    pub(crate) fn path(&self) -> &str {
        if self.path.is_empty() { "body" } else { &self.path }
    }

    pub(crate) fn invalid(&self, why: impl Into<String>) -> DialectError {
        DialectError::invalid(self.path(), why)
    }

    pub(crate) fn unsupported(&self, why: impl Into<String>) -> DialectError {
        DialectError::unsupported(self.path(), why)
    }

    /// The text of the value, as it was sent.
    pub(crate) fn verbatim(&self) -> &'a str {
        self.raw.get()
    }

    pub(crate) fn to_raw(&self) -> Box<RawValue> {
        self.raw.to_owned()
    }

    pub(crate) fn is_null(&self) -> bool {
        self.verbatim() == "null"
    }

    pub(crate) fn is_string(&self) -> bool {
        self.verbatim().starts_with('"')
    }

    pub(crate) fn is_array(&self) -> bool {
        self.verbatim().starts_with('[')
    }

    pub(crate) fn is_object(&self) -> bool {
        self.verbatim().starts_with('{')
    }

    pub(crate) fn string(&self) -> Result<String, DialectError> {
        // All that a text of JSON can have without being one of Rust.
        let halved = "contains half of a surrogate pair, which is no character";
        self.decode(if self.is_string() { halved } else { "must be a string" })
    }

    /// A name that is stored with each call.
    pub(crate) fn name(&self) -> Result<String, DialectError> {
        let name = self.string()?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            return Err(self.invalid(format!("must be 1 to {NAME_BYTES_MAX} bytes without control characters")));
        }
        Ok(name)
    }

    pub(crate) fn boolean(&self) -> Result<bool, DialectError> {
        self.decode("must be true or false")
    }

    /// A number of tokens: an integer of at least one.
    pub(crate) fn positive(&self) -> Result<u32, DialectError> {
        match self.decode("must be an integer from 1 to 4294967295")? {
            0 => Err(self.invalid("must be an integer from 1 to 4294967295")),
            count => Ok(count),
        }
    }

    pub(crate) fn number(&self) -> Result<f64, DialectError> {
        self.decode("must be a number")
    }

    /// Reads the elements of an array one after the other, and returns how many there are. No list of them is built.
    pub(crate) fn each(
        &self,
        mut read: impl FnMut(Item<'a>) -> Result<(), DialectError>,
    ) -> Result<usize, DialectError> {
        let (mut count, mut refused) = (0, None);
        let mut of_element = |raw: &'a RawValue| {
            let item = Item { path: format!("{}[{count}]", self.path), raw };
            count += 1;
            read(item).map_err(|error| refused = Some(error)).is_ok()
        };
        let read = Elements(&mut of_element).deserialize(&mut serde_json::Deserializer::from_str(self.verbatim()));
        match (read, refused) {
            (_, Some(error)) => Err(error),
            (Err(_), None) => Err(self.invalid("must be an array")),
            (Ok(()), None) => Ok(count),
        }
    }

    pub(crate) fn object(&self) -> Result<Object<'a>, DialectError> {
        if !self.is_object() {
            return Err(self.invalid("must be an object"));
        }
        let Entries(entries) =
            serde_json::from_str(self.verbatim()).map_err(|error| self.invalid(error.to_string()))?;
        if entries.len() > FIELDS_MAX {
            return Err(self.invalid(format!("has more than {FIELDS_MAX} fields")));
        }
        let mut names = BTreeSet::new();
        // The engine might take the other of the two values.
        if let Some((name, _)) = entries.iter().find(|(name, _)| !names.insert(name)) {
            return Err(self.invalid(format!("has the field {name:?} twice")));
        }
        Ok(Object { path: self.path.clone(), entries })
    }

    fn decode<T: DeserializeOwned>(&self, expected: &str) -> Result<T, DialectError> {
        serde_json::from_str(self.verbatim()).map_err(|_| self.invalid(expected))
    }
}

/// The fields of an object that nobody has taken yet.
pub(crate) struct Object<'a> {
    path: String,
    entries: Vec<(String, &'a RawValue)>,
}

impl<'a> Object<'a> {
    /// Takes a field. A field that is null counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Item<'a>> {
        let place = self.entries.iter().position(|(found, _)| found == name)?;
        let (_, raw) = self.entries.remove(place);
        let item = Item { path: self.path_of(name), raw };
        (!item.is_null()).then_some(item)
    }

    /// Takes a field that must be there, but may be null.
    pub(crate) fn require_or_null(&mut self, name: &str) -> Result<Option<Item<'a>>, DialectError> {
        if self.entries.iter().any(|(found, raw)| found == name && raw.get() == "null") {
            return Ok(None);
        }
        self.require(name).map(Some)
    }

    pub(crate) fn require(&mut self, name: &str) -> Result<Item<'a>, DialectError> {
        self.take(name).ok_or_else(|| DialectError::invalid(self.path_of(name), "is missing"))
    }

    pub(crate) fn take_string(&mut self, name: &str) -> Result<Option<String>, DialectError> {
        self.take(name).map(|item| item.string()).transpose()
    }

    pub(crate) fn take_boolean(&mut self, name: &str) -> Result<Option<bool>, DialectError> {
        self.take(name).map(|item| item.boolean()).transpose()
    }

    /// A field that stays. A field that is null counts as absent.
    pub(crate) fn find(&self, name: &str) -> Option<Item<'a>> {
        let (_, raw) = self.entries.iter().find(|(found, _)| found == name)?;
        let item = Item { path: self.path_of(name), raw };
        (!item.is_null()).then_some(item)
    }

    /// Takes the fields with these names, with their text. Fields that are null are dropped.
    pub(crate) fn take_fields(&mut self, names: impl Iterator<Item = &'static str>) -> Fields {
        names.filter_map(|name| Some((name.to_owned(), self.take(name)?.to_raw()))).collect()
    }

    /// Drops fields. It is for fields that are read by nobody and that the engine must not see.
    /// Returns whether there were any.
    pub(crate) fn discard(&mut self, names: &[&str]) -> bool {
        let before = self.entries.len();
        self.entries.retain(|(name, _)| !names.contains(&name.as_str()));
        self.entries.len() < before
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The fields that nobody has taken, with their text.
    pub(crate) fn rest(self) -> Fields {
        self.entries.into_iter().map(|(name, raw)| (name, raw.to_owned())).collect()
    }

    /// The same without a copy of the text.
    pub(crate) fn into_entries(self) -> Vec<(String, &'a RawValue)> {
        self.entries
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

/// Reads an array and hands over each element, until one is refused.
struct Elements<'r, 'a>(&'r mut dyn FnMut(&'a RawValue) -> bool);

impl<'a> DeserializeSeed<'a> for Elements<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'a> Visitor<'a> for Elements<'_, 'a> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(element) = seq.next_element()? {
            if !(self.0)(element) {
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

/// The entries of an object in their order, repeated names included. Of an object with too many, one entry more than
/// allowed is read.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    if entries.len() <= FIELDS_MAX {
                        entries.push(entry);
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(InOrder).map(Entries)
    }
}
