//! Exported rollouts as Arrow record batches, one row per segment, and back: the form in which services send them.
//!
//! A record batch has whole rollouts. Messages, metadata and components of the reward are JSON as they were posted.

use std::sync::{Arc, LazyLock};

use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, BooleanArray, Float32Array, Float64Array, Int32Array, Int64Array, RecordBatch,
    StringArray,
    cast::AsArray as _,
    new_null_array,
    types::{Float32Type, Float64Type, Int32Type, Int64Type, UInt8Type},
};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use forebay_wire::{
    ExportCounts, ExportResult, ExportedRollout, MediaSpan, Purpose, Sampling, Segment, Trajectory, TurnSpan,
    VersionSpan,
};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::{
    arrays::{self, item, spans_type, turns_type},
    row::{self, Row},
};

/// The columns of a record batch.
#[must_use]
pub fn schema() -> SchemaRef {
    static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
        let list = |of: DataType| DataType::List(item(of));
        let field = Field::new;
        Arc::new(Schema::new(vec![
            field("messages", DataType::Utf8, true),
            field("reward", DataType::Float64, true),
            field("reward_components", DataType::Utf8, false),
            field("advantage", DataType::Float64, true),
            field("verdict", DataType::Utf8, false),
            field("reason", DataType::Utf8, true),
            field("state", DataType::Utf8, false),
            field("status", DataType::Utf8, false),
            field("environment", DataType::Utf8, true),
            field("policy", DataType::Utf8, false),
            field("run", DataType::Int64, false),
            field("policy_version", DataType::Int64, false),
            field("policy_version_assumed", DataType::Boolean, false),
            field("step", DataType::Int64, true),
            field("group_id", DataType::Utf8, false),
            field("group_size", DataType::Int64, true),
            field("rollout_id", DataType::Utf8, false),
            field("execution_id", DataType::Utf8, true),
            field("suite", DataType::Utf8, true),
            field("task", DataType::Utf8, true),
            field("segment", DataType::Int32, false),
            field("segments", DataType::Int32, false),
            field("kind", DataType::Utf8, true),
            field("tokens", list(DataType::Int32), true),
            field("response_length", DataType::Int32, false),
            field("loss_mask", list(DataType::UInt8), true),
            field("logprobs", list(DataType::Float32), true),
            field("teacher_logprobs", list(DataType::Float32), true),
            field("values", list(DataType::Float32), true),
            field("advantages", list(DataType::Float32), true),
            field("versions", spans_type(), true),
            field("turns", turns_type(), true),
            field("columns", DataType::Utf8, true),
            field("media", DataType::Utf8, true),
            field("temperature", DataType::Float32, false),
            field("top_p", DataType::Float32, false),
            field("top_k", DataType::Int32, false),
            field("metadata", DataType::Utf8, true),
            field("received_at", DataType::Utf8, false),
        ]))
    });
    Arc::clone(&SCHEMA)
}

/// The numbers of rollouts that an export has and has not, as a record batch of one row. Services send it in a stream of
/// its own after that of the rollouts, which marks the export as complete.
pub fn summary(counts: ExportCounts) -> Result<RecordBatch, ArrowError> {
    let ExportCounts { rollouts, filtered, unevaluated, purged, damaged } = counts;
    let numbers = [rollouts, filtered, unevaluated, purged, damaged];
    let columns = numbers.map(|number| Arc::new(Int64Array::from(vec![number as i64])) as ArrayRef);
    RecordBatch::try_new(summary_schema(), columns.to_vec())
}

/// The columns of a summary.
#[must_use]
pub fn summary_schema() -> SchemaRef {
    let fields = SUMMARY.map(|name| Field::new(name, DataType::Int64, false));
    Arc::new(Schema::new(fields.to_vec()))
}

const SUMMARY: [&str; 5] = ["rollouts", "filtered", "unevaluated", "purged", "damaged"];

/// The numbers of a summary; none if the record batch is not one.
#[must_use]
pub fn counts(summary: &RecordBatch) -> Option<ExportCounts> {
    let number = |name| {
        let column = summary.column_by_name(name)?.as_primitive_opt::<Int64Type>()?;
        (column.len() == 1 && column.is_valid(0)).then(|| column.value(0).cast_unsigned())
    };
    let [rollouts, filtered, unevaluated, purged, damaged] = SUMMARY.map(number);
    Some(ExportCounts {
        rollouts: rollouts?,
        filtered: filtered?,
        unevaluated: unevaluated?,
        purged: purged?,
        damaged: damaged?,
    })
}

/// Makes a record batch of rollouts.
pub fn of(rollouts: &[ExportedRollout]) -> Result<RecordBatch, ArrowError> {
    let rows: Vec<Row<'_>> = row::rows(rollouts);
    // Offsets of texts and lists have 31 bits. This check prevents a panic while the arrays are built.
    let bytes = rows.iter().map(row_bytes).sum::<usize>();
    if i32::try_from(bytes).is_err() {
        let detail = format!("{bytes} bytes of rows do not fit into one record batch; export them as NDJSON");
        return Err(ArrowError::InvalidArgumentError(detail));
    }
    RecordBatch::try_new(schema(), columns(&rows))
}

/// The bytes of a row, without columns of fixed width.
fn row_bytes(row: &Row<'_>) -> usize {
    let floats = [row.logprobs, row.teacher_logprobs, row.values, row.advantages];
    let floats = floats.into_iter().flatten().map(<[_]>::len).sum::<usize>();
    let json = [row.messages, row.metadata].into_iter().flatten().map(|json| json.get().len()).sum::<usize>();
    let texts = [row.reason, row.environment, row.execution_id, row.suite, row.task, row.kind]
        .into_iter()
        .flatten()
        .map(str::len);
    let names = row.policy.len() + row.group_id.len() + row.rollout_id.len() + texts.sum::<usize>();
    let numbers = 4 * (row.tokens.map_or(0, <[_]>::len) + floats) + row.loss_mask.map_or(0, <[_]>::len);
    let keys = row.turns.into_iter().flatten().filter_map(|turn| turn.state_key.as_ref()).map(String::len);
    let spans = row.versions.map_or(0, size_of_val) + row.turns.map_or(0, size_of_val) + keys.sum::<usize>();
    // A character takes up to six in JSON; the rest are digests, numbers and names of fields.
    let labels = row.columns.into_iter().flatten().map(|(name, _)| name);
    let labels = labels.chain(row.media.into_iter().flatten().map(|MediaSpan(.., kind)| kind));
    let uploads = labels.map(|label| 6 * label.len() + 128).sum::<usize>();
    numbers + json + names + spans + uploads
}

/// The columns of rows, in the order of the schema.
fn columns(rows: &[Row<'_>]) -> Vec<ArrayRef> {
    let names = |name: &dyn for<'r> Fn(&'r Row<'_>) -> Option<&'r str>| -> ArrayRef {
        Arc::new(rows.iter().map(name).collect::<StringArray>())
    };
    let texts = |text: &dyn Fn(&Row<'_>) -> Option<String>| -> ArrayRef {
        Arc::new(rows.iter().map(text).collect::<StringArray>())
    };
    let longs =
        |long: fn(&Row<'_>) -> Option<i64>| -> ArrayRef { Arc::new(rows.iter().map(long).collect::<Int64Array>()) };
    let ints = |int: fn(&Row<'_>) -> i32| -> ArrayRef { Arc::new(Int32Array::from_iter_values(rows.iter().map(int))) };
    let doubles = |double: fn(&Row<'_>) -> Option<f64>| -> ArrayRef {
        Arc::new(rows.iter().map(double).collect::<Float64Array>())
    };
    let floats =
        |float: fn(&Row<'_>) -> f32| -> ArrayRef { Arc::new(Float32Array::from_iter_values(rows.iter().map(float))) };
    let assumed: Vec<bool> = rows.iter().map(|row| row.policy_version_assumed).collect();
    vec![
        names(&|row| row.messages.map(RawValue::get)),
        doubles(|row| row.reward),
        texts(&|row| serde_json::to_string(row.reward_components).ok()),
        doubles(|row| row.advantage),
        names(&|row| Some(row.verdict.as_str())),
        names(&|row| row.reason),
        texts(&|row| name_of(&row.state)),
        names(&|row| Some(row.status.as_str())),
        names(&|row| row.environment),
        names(&|row| Some(row.policy)),
        longs(|row| Some(row.run)),
        longs(|row| Some(row.policy_version)),
        Arc::new(BooleanArray::from(assumed)),
        longs(|row| row.step),
        names(&|row| Some(row.group_id)),
        longs(|row| row.group_size.map(i64::from)),
        names(&|row| Some(row.rollout_id)),
        names(&|row| row.execution_id),
        names(&|row| row.suite),
        names(&|row| row.task),
        ints(|row| row.segment),
        ints(|row| row.segments),
        names(&|row| row.kind),
        arrays::lists::<Int32Type>(rows.iter().map(|row| row.tokens)),
        ints(|row| row.response_length),
        arrays::lists::<UInt8Type>(rows.iter().map(|row| row.loss_mask)),
        arrays::lists::<Float32Type>(rows.iter().map(|row| row.logprobs)),
        arrays::lists::<Float32Type>(rows.iter().map(|row| row.teacher_logprobs)),
        arrays::lists::<Float32Type>(rows.iter().map(|row| row.values)),
        arrays::lists::<Float32Type>(rows.iter().map(|row| row.advantages)),
        arrays::spans(rows.iter().map(|row| row.versions)),
        arrays::turns(rows.iter().map(|row| row.turns)),
        texts(&|row| row.columns.and_then(|columns| serde_json::to_string(columns).ok())),
        texts(&|row| row.media.and_then(|media| serde_json::to_string(media).ok())),
        floats(|row| row.temperature),
        floats(|row| row.top_p),
        ints(|row| row.top_k),
        names(&|row| row.metadata.map(RawValue::get)),
        names(&|row| Some(row.received_at)),
    ]
}

/// The name of a unit variant.
fn name_of(value: &impl serde::Serialize) -> Option<String> {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => Some(name),
        _ => None,
    }
}

/// A record batch that was received, with exactly the columns of [`schema`]. A later version may send more of them.
pub fn conform(received: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let schema = schema();
    let column = |field: &Arc<Field>| {
        let column = received.column_by_name(field.name()).cloned();
        // An earlier version knows no evaluations and no uploads.
        let is_new = ["suite", "task", "columns", "media"].contains(&field.name().as_str());
        let column = column.or_else(|| is_new.then(|| new_null_array(field.data_type(), received.num_rows())));
        column.ok_or_else(|| ArrowError::SchemaError(format!("the column {} is missing", field.name())))
    };
    let columns = schema.fields().iter().map(column).collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(Arc::clone(&schema), columns)
}

/// The rollouts of a record batch that has the columns of [`schema`].
pub fn rollouts(batch: &RecordBatch) -> Result<Vec<ExportedRollout>, ArrowError> {
    let batch = Rows(batch);
    let mut rollouts: Vec<ExportedRollout> = Vec::new();
    for row in 0..batch.0.num_rows() {
        let segment = batch.segment(row)?;
        match (batch.number::<Int32Type>("segment", row), rollouts.last_mut()) {
            (0, _) => rollouts.push(batch.rollout(row, segment)?),
            (index, Some(rollout)) if index as usize == rollout.trajectory.segments.len() => {
                rollout.trajectory.segments.extend(segment);
            }
            _ => return Err(malformed("segment", "the rows of a rollout are not in order")),
        }
    }
    for rollout in &mut rollouts {
        // If every segment has spans, the version follows from them, and a version beside them would say nothing.
        let segments = &rollout.trajectory.segments;
        let is_spanned = !segments.is_empty() && segments.iter().all(|segment| segment.versions.is_some());
        rollout.trajectory.policy_version = (!is_spanned).then_some(rollout.result.policy_version);
    }
    Ok(rollouts)
}

fn malformed(column: &str, why: impl std::fmt::Display) -> ArrowError {
    ArrowError::ParseError(format!("column {column}: {why}"))
}

struct Rows<'b>(&'b RecordBatch);

impl Rows<'_> {
    fn column(&self, name: &str) -> &dyn Array {
        self.0.column_by_name(name).expect("the batch has the columns of the schema").as_ref()
    }

    fn cell(&self, name: &str, row: usize) -> Option<&dyn Array> {
        Some(self.column(name)).filter(|column| column.is_valid(row))
    }

    fn number<T: ArrowPrimitiveType>(&self, name: &str, row: usize) -> T::Native {
        self.column(name).as_primitive::<T>().value(row)
    }

    fn optional<T: ArrowPrimitiveType>(&self, name: &str, row: usize) -> Option<T::Native> {
        self.cell(name, row).map(|column| column.as_primitive::<T>().value(row))
    }

    fn text(&self, name: &str, row: usize) -> Option<String> {
        self.cell(name, row).map(|column| column.as_string::<i32>().value(row).to_owned())
    }

    fn json<T: DeserializeOwned>(&self, name: &str, row: usize) -> Result<Option<T>, ArrowError> {
        let text = self.cell(name, row).map(|column| column.as_string::<i32>().value(row));
        text.map(serde_json::from_str).transpose().map_err(|error| malformed(name, error))
    }

    fn named<T: DeserializeOwned>(&self, name: &str, row: usize) -> Result<T, ArrowError> {
        let text = serde_json::Value::from(self.column(name).as_string::<i32>().value(row));
        serde_json::from_value(text).map_err(|error| malformed(name, error))
    }

    fn list<T: ArrowPrimitiveType>(&self, name: &str, row: usize) -> Option<Vec<T::Native>> {
        self.cell(name, row).map(|column| column.as_list::<i32>().value(row).as_primitive::<T>().values().to_vec())
    }

    fn versions(&self, row: usize) -> Option<Vec<VersionSpan>> {
        let spans = self.cell("versions", row)?.as_list::<i32>().value(row);
        let parts = [0, 1, 2].map(|part| spans.as_struct().column(part).as_primitive::<Int64Type>().clone());
        let span = |index| VersionSpan(parts[0].value(index), parts[1].value(index), parts[2].value(index));
        Some((0..spans.len()).map(span).collect())
    }

    fn turns(&self, row: usize) -> Option<Vec<TurnSpan>> {
        let turns = self.cell("turns", row)?.as_list::<i32>().value(row);
        let [start, length, reward, state_key] = [0, 1, 2, 3].map(|field| Arc::clone(turns.as_struct().column(field)));
        let (start, length) = (start.as_primitive::<Int64Type>(), length.as_primitive::<Int64Type>());
        let (reward, state_key) = (reward.as_primitive::<Float64Type>(), state_key.as_string::<i32>());
        let turn = |index| TurnSpan {
            start: start.value(index),
            length: length.value(index),
            reward: reward.is_valid(index).then(|| reward.value(index)),
            state_key: state_key.is_valid(index).then(|| state_key.value(index).to_owned()),
        };
        Some((0..turns.len()).map(turn).collect())
    }

    /// The segment of a row; none if its rollout has no segments.
    fn segment(&self, row: usize) -> Result<Option<Segment>, ArrowError> {
        let Some(tokens) = self.list::<Int32Type>("tokens", row) else { return Ok(None) };
        Ok(Some(Segment {
            kind: self.text("kind", row),
            tokens,
            loss_mask: self.list::<UInt8Type>("loss_mask", row).unwrap_or_default(),
            response_length: None,
            logprobs: self.list::<Float32Type>("logprobs", row),
            teacher_logprobs: self.list::<Float32Type>("teacher_logprobs", row),
            values: self.list::<Float32Type>("values", row),
            advantages: self.list::<Float32Type>("advantages", row),
            versions: self.versions(row),
            turns: self.turns(row),
            columns: self.json("columns", row)?.unwrap_or_default(),
            media: self.json("media", row)?.unwrap_or_default(),
        }))
    }

    /// The rollout that begins with a row.
    fn rollout(&self, row: usize, segment: Option<Segment>) -> Result<ExportedRollout, ArrowError> {
        let group_size = self.optional::<Int64Type>("group_size", row).map(u32::try_from).transpose();
        Ok(ExportedRollout {
            trajectory: Trajectory {
                policy: self.text("policy", row),
                rollout_id: self.text("rollout_id", row),
                group_id: self.text("group_id", row),
                group_size: group_size.map_err(|error| malformed("group_size", error))?,
                environment: self.text("environment", row),
                execution_id: self.text("execution_id", row),
                status: self.named("status", row)?,
                reward: self.optional::<Float64Type>("reward", row),
                reward_components: self.json("reward_components", row)?.unwrap_or_default(),
                sampling: Sampling {
                    temperature: self.number::<Float32Type>("temperature", row),
                    top_p: self.number::<Float32Type>("top_p", row),
                    top_k: self.number::<Int32Type>("top_k", row),
                },
                segments: segment.into_iter().collect(),
                messages: self.json("messages", row)?,
                metadata: self.json("metadata", row)?,
                purpose: if self.text("suite", row).is_some() { Purpose::Eval } else { Purpose::Train },
                suite: self.text("suite", row),
                task: self.text("task", row),
                // An export has what became of these, in `result` and in the segments.
                policy_version: None,
                admission_id: None,
                turns: Vec::new(),
            },
            result: ExportResult {
                run: self.number::<Int64Type>("run", row),
                verdict: self.named("verdict", row)?,
                reason: self.text("reason", row),
                state: self.named("state", row)?,
                advantage: self.optional::<Float64Type>("advantage", row),
                step: self.optional::<Int64Type>("step", row),
                policy_version: self.number::<Int64Type>("policy_version", row),
                policy_version_assumed: self.column("policy_version_assumed").as_boolean().value(row),
                received_at: self.text("received_at", row).unwrap_or_default(),
            },
        })
    }
}
