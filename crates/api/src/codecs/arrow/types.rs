//! The columns that a stream may have, their allowed types, and names of types for error messages.
//!
//! It is separate because the Rust implementation of Arrow has its own names for types, while users know the names of
//! Python.

use arrow_schema::{DataType, Fields};

/// The supported columns, with their types as the documentation names them.
pub(super) const COLUMNS: &[(&str, &str)] = &[
    ("policy", "utf8"),
    ("rollout_id", "utf8"),
    ("group_id", "utf8"),
    ("group_size", "int32, uint32 or int64"),
    ("environment", "utf8"),
    ("execution_id", "utf8"),
    ("policy_version", "int64 or int32"),
    ("admission_id", "utf8"),
    ("status", "utf8"),
    ("purpose", "utf8"),
    ("suite", "utf8"),
    ("task", "utf8"),
    ("reward", "float64, float32, int64, int32 or bool"),
    ("reward_components", "utf8 that holds JSON"),
    ("temperature", "float32 or float64"),
    ("top_p", "float32 or float64"),
    ("top_k", "int32 or int64"),
    ("segment", "int32 or int64"),
    ("kind", "utf8"),
    ("tokens", "a list of int32, int64 or uint32"),
    ("response_length", "int32, uint32 or int64"),
    ("loss_mask", "a list of uint8, int8, int32, int64, float32 or float64"),
    ("logprobs", "a list of float32 or float64"),
    ("teacher_logprobs", "a list of float32 or float64"),
    ("values", "a list of float32 or float64"),
    ("advantages", "a list of float32 or float64"),
    ("versions", "list<struct<version: int64, start: int64, length: int64>>"),
    ("turns", "list<struct<start: int64, length: int64, reward: float64, state_key: utf8>>"),
    ("columns", "utf8 that holds JSON"),
    ("media", "utf8 that holds JSON"),
    ("messages", "utf8 that holds JSON"),
    ("metadata", "utf8 that holds JSON"),
];

/// Whether a column may have this type.
pub(super) fn takes(name: &str, found: &DataType) -> bool {
    use DataType::{Boolean, Float32, Float64, Int8, Int32, Int64, UInt8, UInt32};
    let is_list_of = |items: &[DataType]| matches!(found, DataType::List(field) | DataType::LargeList(field) if items.contains(field.data_type()));
    match name {
        "group_size" | "response_length" => matches!(found, Int32 | UInt32 | Int64),
        "policy_version" | "segment" | "top_k" => matches!(found, Int32 | Int64),
        "reward" => matches!(found, Float64 | Float32 | Int64 | Int32 | Boolean),
        "temperature" | "top_p" => matches!(found, Float32 | Float64),
        "tokens" => is_list_of(&[Int32, Int64, UInt32]),
        "loss_mask" => is_list_of(&[UInt8, Int8, Int32, Int64, Float32, Float64]),
        "logprobs" | "teacher_logprobs" | "values" | "advantages" => is_list_of(&[Float32, Float64]),
        "versions" => matches!(found, DataType::List(field) | DataType::LargeList(field) if is_span(field.data_type())),
        "turns" => matches!(found, DataType::List(field) | DataType::LargeList(field) if is_turn(field.data_type())),
        _ => matches!(found, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View),
    }
}

/// The name of a type, in the style of [`COLUMNS`].
pub(super) fn name_of(found: &DataType) -> String {
    let name = match found {
        DataType::Null => "null",
        DataType::Boolean => "bool",
        DataType::Int8 => "int8",
        DataType::Int16 => "int16",
        DataType::Int32 => "int32",
        DataType::Int64 => "int64",
        DataType::UInt8 => "uint8",
        DataType::UInt16 => "uint16",
        DataType::UInt32 => "uint32",
        DataType::UInt64 => "uint64",
        DataType::Float16 => "float16",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        DataType::Utf8 => "utf8",
        DataType::LargeUtf8 => "large_utf8",
        DataType::Utf8View => "utf8_view",
        DataType::Binary => "binary",
        DataType::LargeBinary => "large_binary",
        DataType::BinaryView => "binary_view",
        DataType::List(item) => return format!("list<{}>", name_of(item.data_type())),
        DataType::LargeList(item) => return format!("large_list<{}>", name_of(item.data_type())),
        DataType::FixedSizeList(item, _) => return format!("fixed_size_list<{}>", name_of(item.data_type())),
        DataType::Struct(fields) => return format!("struct<{}>", names_of(fields)),
        DataType::Dictionary(_, values) => return format!("dictionary<{}>", name_of(values)),
        _ => "another type",
    };
    name.to_owned()
}

fn names_of(fields: &Fields) -> String {
    let names: Vec<String> =
        fields.iter().map(|field| format!("{}: {}", field.name(), name_of(field.data_type()))).collect();
    names.join(", ")
}

fn is_span(found: &DataType) -> bool {
    let DataType::Struct(fields) = found else { return false };
    let names = ["version", "start", "length"];
    fields.len() == names.len()
        && fields.iter().zip(names).all(|(field, name)| field.name() == name && *field.data_type() == DataType::Int64)
}

/// A turn needs a start and a length. A reward and a state may be missing, or be null in all rows.
fn is_turn(found: &DataType) -> bool {
    use DataType::{Float64, Int64, LargeUtf8, Null, Utf8};
    let DataType::Struct(fields) = found else { return false };
    let takes = |name: &str, of: &DataType| match name {
        "start" | "length" => *of == Int64,
        "reward" => matches!(of, Float64 | Null),
        "state_key" => matches!(of, Utf8 | LargeUtf8 | Null),
        _ => false,
    };
    let has = |name: &str| fields.iter().filter(|field| field.name() == name).count();
    fields.iter().all(|field| takes(field.name(), field.data_type()) && has(field.name()) == 1)
        && has("start") + has("length") == 2
}
