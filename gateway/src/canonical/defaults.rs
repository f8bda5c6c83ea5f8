//! The values that tools take where a call leaves an argument out.
//!
//! Some agents write them into the calls that they send back. The JSON schema of a tool says which values these are, so
//! a call with such a value is the same call as one without it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::key::canonical_json;
use crate::request::Tool;

/// Bytes of names and values that the defaults of one request have. Those of further tools are not read.
const BYTES_MAX: usize = 16 << 10;

/// The defaults of a request's tools, by the name of the tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Defaults(BTreeMap<String, Shape>);

/// The defaults in a schema.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Shape {
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
        let (mut shapes, mut bytes) = (BTreeMap::new(), 0);
        for tool in tools {
            let definition: Value = serde_json::from_str(tool.definition.get()).unwrap_or_default();
            let Some(shape) = definition.pointer("/function/parameters").and_then(Shape::of) else { continue };
            bytes += tool.name.len() + shape.bytes();
            if bytes > BYTES_MAX {
                break;
            }
            shapes.insert(tool.name.clone(), shape);
        }
        Self(shapes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Leaves out what a call of the tool need not say.
    pub(super) fn remove_from(&self, tool: &str, arguments: &mut Value) {
        if let Some(shape) = self.0.get(tool) {
            shape.remove_from(arguments);
        }
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
        shape.default = schema.get("default").map(|default| {
            let mut default = default.clone();
            shape.remove_from(&mut default);
            canonical_json(&default)
        });
        (shape != Self::default()).then_some(shape)
    }

    fn bytes(&self) -> usize {
        let properties = self.properties.iter().map(|(name, shape)| name.len() + shape.bytes()).sum::<usize>();
        let items = self.items.as_ref().map_or(0, |items| items.bytes());
        self.default.as_ref().map_or(0, String::len) + properties + items
    }

    fn remove_from(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for (name, shape) in &self.properties {
                    let Some(field) = fields.get_mut(name) else { continue };
                    shape.remove_from(field);
                    if shape.default.as_ref().is_some_and(|default| *default == canonical_json(field)) {
                        fields.remove(name);
                    }
                }
            }
            Value::Array(values) => {
                let shape = self.items.iter();
                shape.for_each(|shape| values.iter_mut().for_each(|value| shape.remove_from(value)));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}
