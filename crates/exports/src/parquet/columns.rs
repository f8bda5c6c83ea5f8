//! The columns of a file, made of those of a record batch: messages and tools get a shape that trainers read, and the
//! other columns stay as they are.

use std::{collections::HashMap, sync::Arc};

use arrow_array::{Array, ArrayRef, ListArray, RecordBatch, StringArray, StructArray, cast::AsArray as _};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Fields, Schema};
use serde_json::value::RawValue;

use crate::{
    batch,
    conversation::{Conversation, Message},
    row,
};

/// The name of the elements of lists that Parquet's specification recommends.
pub(crate) const ELEMENT: &str = "element";

/// The key under which a field names its Arrow extension type.
const EXTENSION: &str = "ARROW:extension:name";

/// The column of a record batch that files do not have.
const NOT_IN_FILES: &str = "policy_version_assumed";

/// The fields of a row.
pub(super) fn schema() -> Schema {
    let mut fields = Vec::new();
    for field in batch::schema().fields() {
        match field.name().as_str() {
            NOT_IN_FILES => {}
            "messages" => fields
                .extend([Field::new("messages", messages_type(), true), Field::new("tools", DataType::Utf8, true)]),
            name => fields.push(Field::new(name, in_files(field.data_type()), field.is_nullable())),
        }
    }
    Schema::new(fields)
}

/// The type of a column in files, where the items of lists have another name.
fn in_files(of: &DataType) -> DataType {
    match of {
        DataType::List(item) => DataType::List(element(item.data_type().clone())),
        other => other.clone(),
    }
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

fn element(of: DataType) -> Arc<Field> {
    Arc::new(Field::new(ELEMENT, of, false))
}

/// The messages of each row of a record batch, if it has some.
pub(super) fn conversations(batch: &RecordBatch) -> Vec<Option<Conversation>> {
    let posted = batch.column_by_name("messages").expect("it is a column").as_string::<i32>();
    posted.iter().map(|json| json.map(Conversation::read)).collect()
}

/// Converts the columns of a record batch to those of the schema. `conversations` are the messages of its rows.
pub(super) fn of(batch: &RecordBatch, conversations: &[Option<Vec<Message>>]) -> Vec<ArrayRef> {
    let mut columns = Vec::new();
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        match field.name().as_str() {
            NOT_IN_FILES => {}
            "messages" => columns.extend([messages(conversations), tools(batch)]),
            _ => columns.push(renamed(column)),
        }
    }
    columns
}

/// The tools in the metadata, which is on the first row of each rollout.
fn tools(batch: &RecordBatch) -> ArrayRef {
    let metadata = batch.column_by_name("metadata").expect("it is a column").as_string::<i32>();
    Arc::new(metadata.iter().map(|json| row::tools(json?).map(RawValue::get)).collect::<StringArray>())
}

/// The same column with the name that items of lists have in files.
fn renamed(column: &ArrayRef) -> ArrayRef {
    let DataType::List(item) = column.data_type() else { return Arc::clone(column) };
    let lists = column.as_list::<i32>();
    let (offsets, values) = (lists.offsets().clone(), Arc::clone(lists.values()));
    Arc::new(ListArray::new(element(item.data_type().clone()), offsets, values, lists.nulls().cloned()))
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
