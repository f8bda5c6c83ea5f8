//! Reads a TOML table into a type and names every wrong value in it, not only the first.
//!
//! Deserialization with serde stops at the first error. This module removes the invalid value, so that its default
//! takes its place, and reads the table again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use forebay_api::codecs::explain::explain_toml;
use forebay_wire::Violation;
use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::{Table, Value};

/// The most errors reported for one table. A file with more is probably not a configuration of Forebay.
const ERRORS_MAX: usize = 100;

/// Reads a table whose keys all have defaults. Errors are added to `violations`, with pointers below `at`.
pub(super) fn read<T: DeserializeOwned + Default>(at: &str, table: Table, violations: &mut Vec<Violation>) -> T {
    let mut reading = Reading { root: Value::Table(table), removed: BTreeSet::new(), lists: BTreeMap::new() };
    for _ in 0..ERRORS_MAX {
        let error = match serde_path_to_error::deserialize::<_, T>(reading.root.clone()) {
            Ok(value) => return value,
            Err(error) => error,
        };
        let message = error.inner().message().to_owned();
        let mut path: Vec<Step> = error.path().iter().filter_map(Step::of).collect();
        let missing = named_field(&message, "missing field `");
        if let Some(field) = named_field(&message, "unknown field `").filter(|&field| !ends_with(&path, field)) {
            path.push(Step::Key(field.to_owned()));
        }
        let pointer = reading.pointer(&path) + &missing.map(|field| format!("/{field}")).unwrap_or_default();
        // A field that is missing because it was removed here has been reported already.
        if !reading.removed.contains(&pointer) {
            violations.push(Violation { pointer: format!("{at}{pointer}"), detail: explain_toml(&message) });
        }
        if !reading.remove(&path) {
            break;
        }
    }
    T::default()
}

/// The tables of an array at the top of the file, each with its pointer.
pub(super) fn tables(key: &str, sent: Option<Value>, violations: &mut Vec<Violation>) -> Vec<(String, Table)> {
    let values = match sent {
        None => return Vec::new(),
        Some(Value::Array(values)) => values,
        Some(_) => {
            let detail = format!("must be an array of tables: write [[{key}]]");
            violations.push(Violation { pointer: format!("/{key}"), detail });
            return Vec::new();
        }
    };
    let table = |(index, value): (usize, Value)| {
        let at = format!("/{key}/{index}");
        if let Value::Table(table) = value {
            return Some((at, table));
        }
        violations.push(Violation { pointer: at, detail: "must be a table".to_owned() });
        None
    };
    values.into_iter().enumerate().filter_map(table).collect()
}

/// A step from a table or a list to one of its values.
#[derive(Clone)]
enum Step {
    Key(String),
    Index(usize),
}

impl Step {
    fn of(segment: &Segment) -> Option<Self> {
        match segment {
            Segment::Map { key } => Some(Self::Key(key.clone())),
            Segment::Seq { index } => Some(Self::Index(*index)),
            Segment::Enum { .. } | Segment::Unknown => None,
        }
    }
}

struct Reading {
    root: Value,
    /// Pointers, in the file, to the values that were removed.
    removed: BTreeSet<String>,
    /// For each list that lost items: the original indices of the remaining items. The key is the list's pointer.
    lists: BTreeMap<String, Vec<usize>>,
}

impl Reading {
    /// The pointer, in the file, to the value at a path.
    fn pointer(&self, path: &[Step]) -> String {
        let mut pointer = String::new();
        for step in path {
            match step {
                Step::Key(key) => {
                    let _ = write!(pointer, "/{}", key.replace('~', "~0").replace('/', "~1"));
                }
                Step::Index(index) => {
                    let places = self.lists.get(&pointer);
                    let place = places.and_then(|places| places.get(*index)).unwrap_or(index);
                    let _ = write!(pointer, "/{place}");
                }
            }
        }
        pointer
    }

    /// Removes the value at a path. Returns false if there is nothing to remove.
    fn remove(&mut self, path: &[Step]) -> bool {
        let Some((last, parents)) = path.split_last() else { return false };
        let (pointer, at) = (self.pointer(path), self.pointer(parents));
        let parent = parents.iter().try_fold(&mut self.root, |value, step| match step {
            Step::Key(key) => value.get_mut(key.as_str()),
            Step::Index(index) => value.get_mut(*index),
        });
        let is_removed = match (parent, last) {
            (Some(Value::Table(table)), Step::Key(key)) => table.remove(key).is_some(),
            (Some(Value::Array(items)), Step::Index(index)) if *index < items.len() => {
                let places = self.lists.entry(at).or_insert_with(|| (0..items.len()).collect());
                places.remove(*index);
                items.remove(*index);
                true
            }
            _ => false,
        };
        self.removed.insert(pointer);
        is_removed
    }
}

fn named_field<'m>(message: &'m str, prefix: &str) -> Option<&'m str> {
    message.strip_prefix(prefix)?.split('`').next()
}

fn ends_with(path: &[Step], field: &str) -> bool {
    matches!(path.last(), Some(Step::Key(key)) if key == field)
}
