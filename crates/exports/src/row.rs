//! One row per segment: the rows of the Parquet and NDJSON formats.

use std::{collections::BTreeMap, str::FromStr};

use forebay_wire::{
    ColumnUpload, ExportedRollout, MediaSpan, RolloutState, Segment, Status, TurnSpan, Verdict, VersionSpan,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What a row must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// Messages, which only the first row of a rollout has.
    Messages,
    /// Token ids.
    Tokens,
}

impl FromStr for Requirement {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "messages" => Ok(Self::Messages),
            "tokens" => Ok(Self::Tokens),
            _ => Err("must be messages or tokens".to_owned()),
        }
    }
}

/// A row. The names and the order of its fields are those of the columns.
#[derive(Serialize)]
pub(crate) struct Row<'a> {
    pub(crate) messages: Option<&'a RawValue>,
    pub(crate) tools: Option<&'a RawValue>,
    pub(crate) reward: Option<f64>,
    pub(crate) reward_components: &'a BTreeMap<String, f64>,
    pub(crate) advantage: Option<f64>,
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<&'a str>,
    pub(crate) state: RolloutState,
    pub(crate) status: Status,
    pub(crate) environment: Option<&'a str>,
    pub(crate) policy: &'a str,
    pub(crate) run: i64,
    pub(crate) policy_version: i64,
    #[serde(skip)]
    pub(crate) policy_version_assumed: bool,
    pub(crate) step: Option<i64>,
    pub(crate) group_id: &'a str,
    pub(crate) group_size: Option<u32>,
    pub(crate) rollout_id: &'a str,
    pub(crate) execution_id: Option<&'a str>,
    pub(crate) suite: Option<&'a str>,
    pub(crate) task: Option<&'a str>,
    pub(crate) segment: i32,
    pub(crate) segments: i32,
    pub(crate) kind: Option<&'a str>,
    pub(crate) tokens: Option<&'a [i32]>,
    pub(crate) response_length: i32,
    pub(crate) loss_mask: Option<&'a [u8]>,
    pub(crate) logprobs: Option<&'a [f32]>,
    pub(crate) teacher_logprobs: Option<&'a [f32]>,
    pub(crate) values: Option<&'a [f32]>,
    pub(crate) advantages: Option<&'a [f32]>,
    pub(crate) versions: Option<&'a [VersionSpan]>,
    pub(crate) turns: Option<&'a [TurnSpan]>,
    pub(crate) columns: Option<&'a BTreeMap<String, ColumnUpload>>,
    pub(crate) media: Option<&'a [MediaSpan]>,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) top_k: i32,
    pub(crate) metadata: Option<&'a RawValue>,
    pub(crate) received_at: &'a str,
}

/// The rows of rollouts. A rollout without segments has one row without tokens.
pub(crate) fn rows(rollouts: &[ExportedRollout]) -> Vec<Row<'_>> {
    let rows = rollouts.iter().flat_map(|rollout| {
        let segments = &rollout.trajectory.segments;
        (0..segments.len().max(1)).map(|index| row(rollout, segments.get(index), index))
    });
    rows.collect()
}

fn row<'a>(rollout: &'a ExportedRollout, segment: Option<&'a Segment>, index: usize) -> Row<'a> {
    let ExportedRollout { trajectory, result } = rollout;
    // Messages and metadata belong to the rollout. Repeated in every row, they would be most of the file, and a
    // conversation would be trained as often as its rollout has segments.
    let is_first = index == 0;
    Row {
        messages: trajectory.messages.as_deref().filter(|_| is_first),
        tools: trajectory.metadata.as_deref().filter(|_| is_first).and_then(|metadata| tools(metadata.get())),
        reward: trajectory.reward,
        reward_components: &trajectory.reward_components,
        advantage: result.advantage,
        verdict: result.verdict,
        reason: result.reason.as_deref(),
        state: result.state,
        status: trajectory.status,
        environment: trajectory.environment.as_deref(),
        policy: trajectory.policy.as_deref().unwrap_or("default"),
        run: result.run,
        policy_version: result.policy_version,
        policy_version_assumed: result.policy_version_assumed,
        step: result.step,
        group_id: trajectory.group_id.as_deref().unwrap_or_default(),
        group_size: trajectory.group_size,
        rollout_id: trajectory.rollout_id.as_deref().unwrap_or_default(),
        execution_id: trajectory.execution_id.as_deref(),
        suite: trajectory.suite.as_deref(),
        task: trajectory.task.as_deref(),
        segment: index as i32,
        segments: trajectory.segments.len().max(1) as i32,
        kind: segment.and_then(|segment| segment.kind.as_deref()),
        tokens: segment.map(|segment| segment.tokens.as_slice()),
        response_length: segment.map_or(0, |segment| segment.loss_mask.len() as i32),
        loss_mask: segment.map(|segment| segment.loss_mask.as_slice()),
        logprobs: segment.and_then(|segment| segment.logprobs.as_deref()),
        teacher_logprobs: segment.and_then(|segment| segment.teacher_logprobs.as_deref()),
        values: segment.and_then(|segment| segment.values.as_deref()),
        advantages: segment.and_then(|segment| segment.advantages.as_deref()),
        versions: segment.and_then(|segment| segment.versions.as_deref()),
        turns: segment.and_then(|segment| segment.turns.as_deref()),
        columns: segment.map(|segment| &segment.columns).filter(|columns| !columns.is_empty()),
        media: segment.map(|segment| segment.media.as_slice()).filter(|media| !media.is_empty()),
        temperature: trajectory.sampling.temperature,
        top_p: trajectory.sampling.top_p,
        top_k: trajectory.sampling.top_k,
        metadata: trajectory.metadata.as_deref().filter(|_| is_first),
        received_at: &result.received_at,
    }
}

/// The tools that the model had, if the producer put them into the metadata.
pub(crate) fn tools(metadata: &str) -> Option<&RawValue> {
    #[derive(Deserialize)]
    struct Metadata<'a> {
        #[serde(borrow)]
        tools: Option<&'a RawValue>,
    }
    if !metadata.contains("\"tools\"") {
        return None;
    }
    let metadata: Metadata<'_> = serde_json::from_str(metadata).ok()?;
    metadata.tools.filter(|tools| tools.get().starts_with('['))
}
