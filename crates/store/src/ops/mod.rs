//! The operations, one file per stage. Each is a value that runs inside one transaction.
//!
//! Every change of state is one guarded `UPDATE ... WHERE state = ...`, which must change exactly the rows that it
//! names, and updates the tallies in the same transaction.

pub mod admission;
mod batch;
pub mod blobs;
mod bounded_scan;
pub mod claim;
pub mod clock;
pub mod consumers;
pub mod epochs;
pub mod evals;
pub mod executions;
pub mod facades;
pub mod gauges;
pub mod group;
pub mod history;
pub mod ingest;
pub mod journal;
pub mod keys;
pub mod lease;
pub mod lineage;
pub mod looking;
pub mod places;
pub mod policy;
mod quotas;
mod reads;
pub mod relocate;
pub mod samples;
pub mod scores;
pub mod session;
pub mod steps;
pub mod sweep;
pub(crate) mod tallies;
pub mod unused_rules;

use forebay_domain::{
    ids::Version,
    ingest::decide::GroupFill,
    samples::SealedRow,
    staleness::{TrainedSpan, TrainedVersions},
    states::{self, BatchState, GroupState, RolloutState},
};
use serde::de::DeserializeOwned;

use super::sql::{Row, Tx};
use crate::error::StoreError;

/// The state of the kept and masked rollouts of a group.
fn members_state(group: GroupState, batch: Option<BatchState>) -> Result<RolloutState, StoreError> {
    states::members_state(group, batch).ok_or_else(|| {
        let batch = batch.map_or("no batch", BatchState::as_str);
        StoreError::Corrupt(format!("a group is `{group}` beside a batch that is `{batch}`"))
    })
}

/// The name of a unit variant of the policy's rules, on the wire and in SQL.
fn name_of(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => unreachable!("unit variants serialize to their names, not to {other:?}"),
    }
}

/// The names of filters in a column, separated by commas. Names contain no commas.
fn names(column: Option<String>) -> Vec<String> {
    column.map(|names| names.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

/// Places and rollouts of a group, in the columns that several statements select.
fn fill(row: &mut Row, state: &str) -> Result<GroupFill, StoreError> {
    Ok(GroupFill {
        state: row.get(state)?,
        size: row.get("size")?,
        kept: row.get("kept")?,
        masked: row.get("masked")?,
        dropped: row.get("dropped")?,
        scoring: row.get("scoring")?,
    })
}

/// The places that are left in an open group, from the columns of [`fill`] and its rules.
async fn places_left(tx: &mut Tx<'_>, row: &mut Row) -> Result<u32, StoreError> {
    let group = fill(row, "state")?;
    // Only a group that waits for scores can be open and full, and depends on its rules.
    if group.scoring == 0 {
        return Ok(group.size.saturating_sub(group.arrived()));
    }
    let rules = tx.rules(row.get("rules_pk")?).await?;
    Ok(group.places_left(rules.group.on_drop))
}

/// The part of a rollout's row that belongs to its payload.
fn read_sealed(row: &mut Row, group_id: String) -> Result<SealedRow, StoreError> {
    Ok(SealedRow {
        rollout_pk: row.get("rollout_pk")?,
        group_id,
        rollout_id: row.get("rollout_id")?,
        verdict: row.get("verdict")?,
        reward: row.get("reward")?,
        policy_version: row.get("policy_version")?,
        segments: row.get("segments")?,
        tokens: row.get("tokens")?,
        unpacked_bytes: row.get("unpacked_bytes")?,
        made_bytes: 0,
        trained_spans: trained_spans(row)?,
        seal: row.get("seal")?,
    })
}

/// Trained tokens by version, if they were recorded.
fn trained_spans(row: &mut Row) -> Result<Option<Vec<TrainedSpan>>, StoreError> {
    read_json(row, "trained_spans")
}

/// A column with JSON, which may be null.
fn read_json<T: DeserializeOwned>(row: &mut Row, column: &str) -> Result<Option<T>, StoreError> {
    let Some(text) = row.get::<Option<String>>(column)? else { return Ok(None) };
    let value = serde_json::from_str(&text);
    value.map(Some).map_err(|error| StoreError::Corrupt(format!("column `{column}`: {error}")))
}

/// The versions of trained tokens, in two columns that are null together.
fn trained_versions(row: &mut Row) -> Result<Option<TrainedVersions>, StoreError> {
    let (oldest, newest): (Option<Version>, Option<Version>) = (row.get("version_min")?, row.get("version_max")?);
    Ok(oldest.zip(newest).map(|(oldest, newest)| TrainedVersions { oldest, newest }))
}
