//! Writes record batches as an Arrow stream, and makes record batches of samples.

use std::sync::{Arc, LazyLock};

use arrow_array::{
    ArrayRef, Float32Array, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_buffer::Buffer;
use arrow_ipc::writer::StreamEncoder;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_domain::samples::page::{Block, Lengths};
use forebay_exports::arrays::{item, joined_lists, spans, spans_type};
use forebay_wire::{MediaSpan, Sample};
use serde_json::value::RawValue;

/// Parts of at least this length are sent without copying them.
const FRAME_BYTES: usize = 64 << 10;

/// Writes record batches as one Arrow stream.
pub(crate) struct Encoder {
    schema: SchemaRef,
    stream: StreamEncoder,
}

fn stream(schema: &Schema) -> StreamEncoder {
    StreamEncoder::try_new(schema).expect("the schema has only types that streams can have")
}

impl Encoder {
    /// A stream of record batches with these columns.
    pub(crate) fn new(schema: SchemaRef) -> Self {
        Self { stream: stream(&schema), schema }
    }

    /// Writes a record batch. The first call also writes the schema.
    pub(crate) fn batch(&mut self, batch: &RecordBatch) -> Result<Vec<Bytes>, ArrowError> {
        self.stream.encode(batch).map(frames)
    }

    /// Writes the end of the stream, which marks it as complete.
    pub(crate) fn end(&mut self) -> Result<Vec<Bytes>, ArrowError> {
        std::mem::replace(&mut self.stream, stream(&self.schema)).finish().map(frames)
    }
}

/// Makes a record batch of samples. The columns of numbers are not copied.
pub(crate) fn samples(block: Block) -> Result<RecordBatch, ArrowError> {
    // Offsets of texts and lists have 31 bits. The limits on bodies keep a block far below that. This check prevents a
    // panic while the arrays are built.
    let Block { rows, columns } = &block;
    let texts = rows.iter().map(|row| text_bytes(&row.sample)).sum();
    let longest = columns.tokens.len().max(columns.loss_mask.len()).max(texts);
    if i32::try_from(longest).is_err() {
        let detail =
            format!("columns of {longest} numbers or bytes do not fit in one record batch; read them as NDJSON");
        return Err(ArrowError::InvalidArgumentError(detail));
    }
    RecordBatch::try_new(samples_schema(), arrays(block))
}

/// Where media stand in a row, as JSON.
fn media(row: &Sample) -> Option<String> {
    (!row.media.is_empty()).then(|| serde_json::to_string(&row.media).ok()).flatten()
}

/// The bytes of the texts of a row, without those that are the same for all rows.
fn text_bytes(row: &Sample) -> usize {
    let json = [&row.messages, &row.metadata].into_iter().flatten().map(|text| text.get().len()).sum::<usize>();
    let texts = [&row.kind, &row.environment].into_iter().flatten().map(String::len).sum::<usize>();
    // Beside the label of a medium, of which a character takes up to six bytes, are a digest and two numbers.
    let media = row.media.iter().map(|MediaSpan(.., kind)| 6 * kind.len() + 128).sum::<usize>();
    row.rollout_id.len() + row.group_id.len() + texts + json + media
}

/// Passes large parts on without copying them, and joins the small parts between them.
fn frames(parts: Vec<Buffer>) -> Vec<Bytes> {
    let mut frames = Vec::new();
    let mut between = Vec::new();
    for part in parts {
        if part.len() < FRAME_BYTES {
            between.extend_from_slice(&part);
            continue;
        }
        if !between.is_empty() {
            frames.push(std::mem::take(&mut between).into());
        }
        frames.push(Bytes::from_owner(part));
    }
    frames.push(between.into());
    frames
}

/// The columns of samples.
pub(crate) fn samples_schema() -> SchemaRef {
    static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| Arc::new(schema()));
    Arc::clone(&SCHEMA)
}

fn schema() -> Schema {
    let list = |of: DataType| DataType::List(item(of));
    let field = Field::new;
    Schema::new(vec![
        field("rollout_id", DataType::Utf8, false),
        field("group_id", DataType::Utf8, false),
        field("segment", DataType::Int32, false),
        field("segments", DataType::Int32, false),
        field("kind", DataType::Utf8, true),
        field("environment", DataType::Utf8, true),
        field("verdict", DataType::Utf8, false),
        field("status", DataType::Utf8, false),
        field("tokens", list(DataType::Int32), true),
        field("response_length", DataType::Int32, false),
        field("loss_mask", list(DataType::UInt8), true),
        field("logprobs", list(DataType::Float32), true),
        field("teacher_logprobs", list(DataType::Float32), true),
        field("values", list(DataType::Float32), true),
        field("advantages", list(DataType::Float32), true),
        field("temperature", DataType::Float32, false),
        field("top_p", DataType::Float32, false),
        field("top_k", DataType::Int32, false),
        field("reward", DataType::Float64, true),
        field("advantage", DataType::Float32, true),
        field("loss_weight", DataType::Float64, false),
        field("policy_version", DataType::Int64, true),
        field("versions", spans_type(), true),
        field("media", DataType::Utf8, true),
        field("messages", DataType::Utf8, true),
        field("metadata", DataType::Utf8, true),
    ])
}

/// Converts rows to arrays in the order of the schema.
fn arrays(block: Block) -> Vec<ArrayRef> {
    let Block { rows, columns } = block;
    let samples = || rows.iter().map(|row| &row.sample);
    let lengths = |of: fn(&Lengths) -> Option<usize>| rows.iter().map(move |row| of(&row.lengths));
    let texts =
        |text: fn(&Sample) -> Option<&str>| -> ArrayRef { Arc::new(samples().map(text).collect::<StringArray>()) };
    let ints = |int: fn(&Sample) -> i32| -> ArrayRef { Arc::new(Int32Array::from_iter_values(samples().map(int))) };
    let floats =
        |float: fn(&Sample) -> f32| -> ArrayRef { Arc::new(Float32Array::from_iter_values(samples().map(float))) };
    vec![
        texts(|row| Some(&row.rollout_id)),
        texts(|row| Some(&row.group_id)),
        ints(|row| row.segment),
        ints(|row| row.segments),
        texts(|row| row.kind.as_deref()),
        texts(|row| row.environment.as_deref()),
        texts(|row| Some(row.verdict.as_str())),
        texts(|row| Some(row.status.as_str())),
        joined_lists::<Int32Type>(columns.tokens, lengths(|of| of.tokens)),
        ints(|row| row.response_length),
        joined_lists::<UInt8Type>(columns.loss_mask, lengths(|of| of.loss_mask)),
        joined_lists::<Float32Type>(columns.logprobs, lengths(|of| of.logprobs)),
        joined_lists::<Float32Type>(columns.teacher_logprobs, lengths(|of| of.teacher_logprobs)),
        joined_lists::<Float32Type>(columns.values, lengths(|of| of.values)),
        joined_lists::<Float32Type>(columns.advantages, lengths(|of| of.advantages)),
        floats(|row| row.temperature),
        floats(|row| row.top_p),
        ints(|row| row.top_k),
        Arc::new(samples().map(|row| row.reward).collect::<Float64Array>()),
        Arc::new(samples().map(|row| row.advantage).collect::<Float32Array>()),
        Arc::new(Float64Array::from_iter_values(samples().map(|row| row.loss_weight))),
        Arc::new(samples().map(|row| row.policy_version).collect::<Int64Array>()),
        spans(samples().map(|row| row.versions.as_deref())),
        Arc::new(samples().map(media).collect::<StringArray>()),
        texts(|row| row.messages.as_deref().map(RawValue::get)),
        texts(|row| row.metadata.as_deref().map(RawValue::get)),
    ]
}
