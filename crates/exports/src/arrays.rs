//! Arrow arrays of lists, for every table with a row per segment.

use std::sync::Arc;

use arrow_array::{ArrayRef, ArrowPrimitiveType, Int64Array, ListArray, PrimitiveArray, StructArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Fields};
use forebay_wire::VersionSpan;

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
    let structs = StructArray::new(span_fields(), columns, None);
    let lengths = OffsetBuffer::from_lengths(rows.clone().map(|spans| spans.map_or(0, <[_]>::len)));
    let present = rows.map(|spans| spans.is_some()).collect();
    Arc::new(ListArray::new(item(DataType::Struct(span_fields())), lengths, Arc::new(structs), Some(present)))
}
