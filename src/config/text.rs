//! Parses the text of a file into a table, and reports all syntax errors and all numbers that TOML cannot hold at once.
//!
//! Deserialization with serde stops at the first such number and does not report errors in other values.

use forebay_wire::Violation;
use serde::Deserialize as _;
use toml::{
    Spanned, Table, Value,
    de::{DeTable, DeValue, Error, ValueDeserializer},
};

/// Parses a text. A number that is too large is left out and reported in `violations`.
pub(super) fn parse(text: &str, violations: &mut Vec<Violation>) -> Result<Table, Vec<Error>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() { Ok(table_of("", table.into_inner(), violations)) } else { Err(errors) }
}

fn table_of(at: &str, table: DeTable<'_>, violations: &mut Vec<Violation>) -> Table {
    let value = |(key, value): (Spanned<std::borrow::Cow<'_, str>>, Spanned<DeValue<'_>>)| {
        let key = key.into_inner().into_owned();
        let pointer = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
        let value = value_of(&pointer, value, violations)?;
        Some((key, value))
    };
    table.into_iter().filter_map(value).collect()
}

fn value_of(at: &str, value: Spanned<DeValue<'_>>, violations: &mut Vec<Violation>) -> Option<Value> {
    match value.get_ref() {
        DeValue::Table(_) | DeValue::Array(_) => {}
        _ => {
            let read = Value::deserialize(ValueDeserializer::from(value));
            return read.map_err(|_| violations.push(too_large(at))).ok();
        }
    }
    Some(match value.into_inner() {
        DeValue::Table(table) => Value::Table(table_of(at, table, violations)),
        DeValue::Array(items) => {
            let item = |(index, item)| value_of(&format!("{at}/{index}"), item, violations);
            Value::Array(items.into_iter().enumerate().filter_map(item).collect())
        }
        _ => return None,
    })
}

/// The error of a value that is well formed but cannot be held. Only numbers can be such values.
fn too_large(at: &str) -> Violation {
    Violation { pointer: at.to_owned(), detail: "the number is too large".to_owned() }
}
