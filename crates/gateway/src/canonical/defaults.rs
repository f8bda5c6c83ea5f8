//! The values that tools take where a call leaves an argument out.
//!
//! Some agents write them into the calls that they send back. The JSON schema of a tool says which values these are, so
//! a call with such a value is the same call as one without it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::key::{canonical_json, values};
use crate::request::Tool;

/// Bytes of names and values that the defaults of one request have. Those of further tools are not read.
const BYTES_MAX: usize = 16 << 10;

/// The defaults of a request's tools, by the name of the tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Defaults(BTreeMap<String, Shape>);

/// The defaults in a schema.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Shape {
    /// The value that an absent one stands for, as canonical JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    properties: BTreeMap<String, Self>,
    #[serde(skip_serializing_if = "Option::is_none")]
    items: Option<Box<Self>>,
}

impl Defaults {
    pub(super) fn of(tools: &[Tool]) -> Self {
        let (mut shapes, mut bytes) = (BTreeMap::new(), BYTES_MAX);
        for tool in tools {
            let Some(definition) = values(tool.definition.get()) else { continue };
            let Some(shape) = definition.pointer("/function/parameters").and_then(Shape::of) else { continue };
            let left = bytes.checked_sub(tool.name.len() + shape.bytes());
            let Some(left) = left else { break };
            bytes = left;
            shapes.insert(tool.name.clone(), shape);
        }
        Self(shapes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The defaults of one tool.
    pub(super) fn of_tool(&self, tool: &str) -> Option<&Shape> {
        self.0.get(tool)
    }
}

impl Shape {
    /// `None` if the schema has no defaults.
    fn of(schema: &Value) -> Option<Self> {
        let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        let mut shape = Self {
            default: None,
            properties: properties.filter_map(|(name, schema)| Some((name.clone(), Self::of(schema)?))).collect(),
            items: schema.get("items").and_then(Self::of).map(Box::new),
        };
        shape.default = schema.get("default").map(|default| canonical_json(default, Some(&shape)));
        (shape != Self::default()).then_some(shape)
    }

    fn bytes(&self) -> usize {
        let properties = self.properties.iter().map(|(name, shape)| name.len() + shape.bytes()).sum::<usize>();
        let items = self.items.as_ref().map_or(0, |items| items.bytes());
        self.default.as_ref().map_or(0, String::len) + properties + items
    }

    /// The defaults in the field of an object.
    pub(super) fn property(&self, name: &str) -> Option<&Self> {
        self.properties.get(name)
    }

    /// The defaults in the elements of an array.
    pub(super) fn items(&self) -> Option<&Self> {
        self.items.as_deref()
    }

    /// Whether a field with this value, as canonical JSON without defaults, need not be there.
    pub(super) fn is_default(&self, value: &str) -> bool {
        self.default.as_deref() == Some(value)
    }
}
