//! The columns of rows, as Arrow arrays.

use std::{collections::HashMap, sync::Arc};

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, Float32Array, Float64Array, Int32Array, Int64Array, ListArray, PrimitiveArray,
    StringArray, StructArray,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Fields, Schema};
use forebay_client::wire::VersionSpan;
use serde_json::value::RawValue;

use crate::{
    conversation::{self, Message},
    row::Row,
};

/// The name of the elements of lists that Parquet's specification recommends.
pub(crate) const ELEMENT: &str = "element";

/// The key under which a field names its Arrow extension type.
const EXTENSION: &str = "ARROW:extension:name";

/// The fields of a row.
pub(super) fn schema() -> Schema {
    let list = |of: DataType| DataType::List(element(of));
    let field = Field::new;
    Schema::new(vec![
        field("messages", messages_type(), true),
        field("tools", DataType::Utf8, true),
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
        field("step", DataType::Int64, true),
        field("group_id", DataType::Utf8, false),
        field("group_size", DataType::Int64, true),
        field("rollout_id", DataType::Utf8, false),
        field("execution_id", DataType::Utf8, true),
        field("segment", DataType::Int32, false),
        field("segments", DataType::Int32, false),
        field("kind", DataType::Utf8, true),
        field("tokens", list(DataType::Int32), true),
        field("response_length", DataType::Int32, false),
        field("loss_mask", list(DataType::UInt8), true),
        field("logprobs", list(DataType::Float32), true),
        field("teacher_logprobs", list(DataType::Float32), true),
        field("values", list(DataType::Float32), true),
        field("versions", list(DataType::Struct(span_fields())), true),
        field("temperature", DataType::Float32, false),
        field("top_p", DataType::Float32, false),
        field("top_k", DataType::Int32, false),
        field("metadata", DataType::Utf8, true),
        field("received_at", DataType::Utf8, false),
    ])
}

/// The type of a column of conversations.
pub(crate) fn messages_type() -> DataType {
    DataType::List(element(DataType::Struct(message_fields())))
}

fn message_fields() -> Fields {
    // With this extension type, `datasets` gives chat templates the calls as objects. Other readers find a text.
    let json = HashMap::from([(EXTENSION.to_owned(), "arrow.json".to_owned())]);
    let text = |name: &str, nullable| Field::new(name, DataType::Utf8, nullable);
    Fields::from(vec![
        text("role", false),
        text("content", false),
        text("tool_calls", true).with_metadata(json),
        text("tool_call_id", true),
        text("name", true),
        text("reasoning_content", true),
    ])
}

fn span_fields() -> Fields {
    ["version", "start", "length"].map(|name| Field::new(name, DataType::Int64, false)).into_iter().collect()
}

fn element(of: DataType) -> Arc<Field> {
    Arc::new(Field::new(ELEMENT, of, false))
}

/// The columns of some rows.
pub(super) struct Columns {
    pub(super) arrays: Vec<ArrayRef>,
    /// Rows whose messages are no conversation.
    pub(super) not_messages: u64,
}

/// Converts rows to arrays in the order of the schema.
pub(super) fn of(rows: &[Row<'_>]) -> Columns {
    let raw = |json: Option<&RawValue>| json.map(|json| json.get().to_owned());
    let texts = |text: &dyn Fn(&Row<'_>) -> Option<String>| -> ArrayRef {
        Arc::new(rows.iter().map(text).collect::<StringArray>())
    };
    let names = |name: &dyn for<'r> Fn(&'r Row<'_>) -> Option<&'r str>| -> ArrayRef {
        Arc::new(rows.iter().map(name).collect::<StringArray>())
    };
    let longs =
        |long: fn(&Row<'_>) -> Option<i64>| -> ArrayRef { Arc::new(rows.iter().map(long).collect::<Int64Array>()) };
    let ints = |int: fn(&Row<'_>) -> i32| -> ArrayRef { Arc::new(Int32Array::from_iter_values(rows.iter().map(int))) };
    let doubles = |double: fn(&Row<'_>) -> Option<f64>| -> ArrayRef {
        Arc::new(rows.iter().map(double).collect::<Float64Array>())
    };
    let floats =
        |float: fn(&Row<'_>) -> f32| -> ArrayRef { Arc::new(Float32Array::from_iter_values(rows.iter().map(float))) };
    let conversations: Vec<Option<Vec<Message>>> =
        rows.iter().map(|row| row.messages.and_then(conversation::messages)).collect();
    let not_messages = rows.iter().zip(&conversations).filter(|(row, found)| row.messages.is_some() && found.is_none());
    let components = |row: &Row<'_>| serde_json::to_string(row.reward_components).ok();
    Columns {
        not_messages: not_messages.count() as u64,
        arrays: vec![
            messages(&conversations),
            texts(&|row| raw(row.tools)),
            doubles(|row| row.reward),
            texts(&components),
            doubles(|row| row.advantage),
            names(&|row| Some(row.verdict.as_str())),
            names(&|row| row.reason),
            texts(&|row| name_of(&row.state)),
            names(&|row| Some(row.status.as_str())),
            names(&|row| row.environment),
            names(&|row| Some(row.policy)),
            longs(|row| Some(row.run)),
            longs(|row| Some(row.policy_version)),
            longs(|row| row.step),
            names(&|row| Some(row.group_id)),
            longs(|row| row.group_size.map(i64::from)),
            names(&|row| Some(row.rollout_id)),
            names(&|row| row.execution_id),
            ints(|row| row.segment),
            ints(|row| row.segments),
            names(&|row| row.kind),
            lists::<Int32Type>(rows, |row| row.tokens),
            ints(|row| row.response_length),
            lists::<UInt8Type>(rows, |row| row.loss_mask),
            lists::<Float32Type>(rows, |row| row.logprobs),
            lists::<Float32Type>(rows, |row| row.teacher_logprobs),
            lists::<Float32Type>(rows, |row| row.values),
            spans(rows),
            floats(|row| row.temperature),
            floats(|row| row.top_p),
            ints(|row| row.top_k),
            texts(&|row| raw(row.metadata)),
            names(&|row| Some(row.received_at)),
        ],
    }
}

/// The name of a unit variant.
fn name_of(value: &impl serde::Serialize) -> Option<String> {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => Some(name),
        _ => None,
    }
}

/// A column of conversations.
pub(crate) fn messages(conversations: &[Option<Vec<Message>>]) -> ArrayRef {
    let all: Vec<&Message> = conversations.iter().flatten().flatten().collect();
    let column = |text: &dyn for<'m> Fn(&'m Message) -> Option<&'m str>| -> ArrayRef {
        Arc::new(all.iter().map(|message| text(message)).collect::<StringArray>())
    };
    let columns = vec![
        column(&|message| Some(&message.role)),
        column(&|message| Some(&message.content)),
        column(&|message| message.tool_calls.as_deref()),
        column(&|message| message.tool_call_id.as_deref()),
        column(&|message| message.name.as_deref()),
        column(&|message| message.reasoning_content.as_deref()),
    ];
    let structs = StructArray::new(message_fields(), columns, None);
    let lengths = OffsetBuffer::from_lengths(conversations.iter().map(|one| one.as_ref().map_or(0, Vec::len)));
    let present = conversations.iter().map(Option::is_some).collect();
    Arc::new(ListArray::new(element(DataType::Struct(message_fields())), lengths, Arc::new(structs), Some(present)))
}

fn lists<T: ArrowPrimitiveType>(rows: &[Row<'_>], list: for<'r> fn(&Row<'r>) -> Option<&'r [T::Native]>) -> ArrayRef {
    let mut values = Vec::with_capacity(rows.iter().filter_map(list).map(<[_]>::len).sum());
    for list in rows.iter().filter_map(list) {
        values.extend_from_slice(list);
    }
    let values = PrimitiveArray::<T>::new(ScalarBuffer::from(values), None);
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| list(row).map_or(0, <[_]>::len)));
    let present = rows.iter().map(|row| list(row).is_some()).collect();
    Arc::new(ListArray::new(element(T::DATA_TYPE), lengths, Arc::new(values), Some(present)))
}

fn spans(rows: &[Row<'_>]) -> ArrayRef {
    let all: Vec<VersionSpan> = rows.iter().flat_map(|row| row.versions.into_iter().flatten().copied()).collect();
    let column =
        |part: fn(&VersionSpan) -> i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(all.iter().map(part))) };
    let columns = vec![column(|span| span.0), column(|span| span.1), column(|span| span.2)];
    let structs = StructArray::new(span_fields(), columns, None);
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| row.versions.map_or(0, <[_]>::len)));
    let present = rows.iter().map(|row| row.versions.is_some()).collect();
    Arc::new(ListArray::new(element(DataType::Struct(span_fields())), lengths, Arc::new(structs), Some(present)))
}
