//! The operations, one file per stage: each a value that runs inside one transaction.
//!
//! Every change of state is one guarded `UPDATE ... WHERE state = ...` that must touch exactly the rows it names, and
//! moves the tallies with it.

pub(super) mod admission;
mod batch;
pub(super) mod claim;
pub(super) mod clock;
pub(super) mod epochs;
pub(super) mod examine;
pub(super) mod group;
pub(super) mod ingest;

pub(super) mod keys;
pub(super) mod lease;
pub(super) mod ledger;
pub(super) mod lineage;
pub(super) mod policy;
pub(super) mod samples;
pub(super) mod sweep;
pub(super) mod upkeep;
mod walk;

use super::{StoreError, sql::Row};
use crate::buffer::{ingest::GroupFill, staleness::TrainedSpan};

/// The name of a unit variant on the wire and in SQL.
fn name_of(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => unreachable!("states and verdicts serialize to their names, not to {other:?}"),
    }
}

/// Names that a column holds, separated by commas: filters, whose names have none.
fn names(column: Option<String>) -> Vec<String> {
    column.map(|names| names.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

/// Places and posts of a group, as several statements select them.
fn fill(row: &mut Row, state: &str) -> Result<GroupFill, StoreError> {
    Ok(GroupFill {
        state: row.parse(state)?,
        size: row.get("size")?,
        kept: row.get("kept")?,
        masked: row.get("masked")?,
        dropped: row.get("dropped")?,
    })
}

/// Trained tokens by version, where they were recorded.
fn trained_spans(row: &mut Row) -> Result<Option<Vec<TrainedSpan>>, StoreError> {
    let Some(text) = row.get::<Option<String>>("trained_spans")? else { return Ok(None) };
    let spans = serde_json::from_str(&text);
    spans.map(Some).map_err(|error| StoreError::Corrupt(format!("column `trained_spans`: {error}")))
}

/// A pair of nullable columns that are null together.
fn pair<T: super::sql::FromCell>(row: &mut Row, first: &str, second: &str) -> Result<Option<(T, T)>, StoreError> {
    let (first, second): (Option<T>, Option<T>) = (row.get(first)?, row.get(second)?);
    Ok(first.zip(second))
}
