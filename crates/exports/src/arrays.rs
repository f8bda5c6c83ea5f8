//! Arrow arrays of lists, for every table with a row per segment.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, Float64Array, Int64Array, ListArray, PrimitiveArray, StringArray, StructArray,
};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Fields};
use forebay_wire::{TurnSpan, VersionSpan};

/// The field of the items of a list.
#[must_use]
pub fn item(of: DataType) -> Arc<Field> {
    Arc::new(Field::new_list_field(of, false))
}

/// The type of a column of version spans.
#[must_use]
pub fn spans_type() -> DataType {
    DataType::List(item(DataType::Struct(span_fields())))
}

fn span_fields() -> Fields {
    ["version", "start", "length"].map(|name| Field::new(name, DataType::Int64, false)).into_iter().collect()
}

/// The type of a column of turns.
#[must_use]
pub fn turns_type() -> DataType {
    DataType::List(item(DataType::Struct(turn_fields())))
}

fn turn_fields() -> Fields {
    Fields::from(vec![
        Field::new("start", DataType::Int64, false),
        Field::new("length", DataType::Int64, false),
        Field::new("reward", DataType::Float64, true),
        Field::new("state_key", DataType::Utf8, true),
    ])
}

/// A column of lists of numbers.
pub fn lists<'a, T: ArrowPrimitiveType>(lists: impl Iterator<Item = Option<&'a [T::Native]>> + Clone) -> ArrayRef {
    let mut values = Vec::with_capacity(lists.clone().flatten().map(<[_]>::len).sum());
    for list in lists.clone().flatten() {
        values.extend_from_slice(list);
    }
    joined_lists::<T>(values, lists.map(|list| list.map(<[_]>::len)))
}

/// A column of lists of numbers, from the numbers of all lists, one list after the other, and the lengths of the lists.
/// The numbers are not copied.
///
/// # Panics
///
/// If the lengths add up to more than the number of numbers, or to more than an offset of 31 bits can count.
pub fn joined_lists<T: ArrowPrimitiveType>(
    values: Vec<T::Native>,
    lengths: impl Iterator<Item = Option<usize>> + Clone,
) -> ArrayRef {
    let values = PrimitiveArray::<T>::new(ScalarBuffer::from(values), None);
    let offsets = OffsetBuffer::from_lengths(lengths.clone().map(Option::unwrap_or_default));
    let present = lengths.map(|length| length.is_some()).collect();
    Arc::new(ListArray::new(item(T::DATA_TYPE), offsets, Arc::new(values), Some(present)))
}

/// A column of version spans.
pub fn spans<'a>(rows: impl Iterator<Item = Option<&'a [VersionSpan]>> + Clone) -> ArrayRef {
    let all: Vec<VersionSpan> = rows.clone().flatten().flatten().copied().collect();
    let column =
        |part: fn(&VersionSpan) -> i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(all.iter().map(part))) };
    let columns = vec![column(|span| span.0), column(|span| span.1), column(|span| span.2)];
    structs(span_fields(), columns, rows)
}

/// A column of turns.
pub fn turns<'a>(rows: impl Iterator<Item = Option<&'a [TurnSpan]>> + Clone) -> ArrayRef {
    let all = || rows.clone().flatten().flatten();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(all().map(|turn| turn.start))),
        Arc::new(Int64Array::from_iter_values(all().map(|turn| turn.length))),
        Arc::new(all().map(|turn| turn.reward).collect::<Float64Array>()),
        Arc::new(all().map(|turn| turn.state_key.as_deref()).collect::<StringArray>()),
    ];
    structs(turn_fields(), columns, rows)
}

/// A column of lists of structs. `columns` are the fields of the structs of all lists.
fn structs<'a, T: 'a>(
    fields: Fields,
    columns: Vec<ArrayRef>,
    lists: impl Iterator<Item = Option<&'a [T]>> + Clone,
) -> ArrayRef {
    let lengths = OffsetBuffer::from_lengths(lists.clone().map(|list| list.map_or(0, <[_]>::len)));
    let present = lists.map(|list| list.is_some()).collect();
    let of = item(DataType::Struct(fields.clone()));
    Arc::new(ListArray::new(of, lengths, Arc::new(StructArray::new(fields, columns, None)), Some(present)))
}
