//! The same group of rollouts as a JSON body and as an Arrow stream.

mod json;

use std::sync::Arc;

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, Float64Array, ListArray, PrimitiveArray, RecordBatch, StringArray, UInt32Array,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Field, Schema};
use forebay_wire::{Segment, Trajectory};

pub(crate) use self::json::{ROLLOUTS, TOKENS, json};

/// The columns of the JSON body, for the Arrow stream.
pub(crate) fn arrow(rollouts: &[Trajectory]) -> Result<Vec<u8>, ArrowError> {
    let segments = || rollouts.iter().flat_map(|rollout| &rollout.segments);
    let texts = |of: fn(&Trajectory) -> Option<&str>| Arc::new(rollouts.iter().map(of).collect::<StringArray>());
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("rollout_id", texts(|rollout| rollout.rollout_id.as_deref())),
        ("group_id", texts(|rollout| rollout.group_id.as_deref())),
        ("group_size", Arc::new(rollouts.iter().map(|rollout| rollout.group_size).collect::<UInt32Array>())),
        ("status", texts(|rollout| Some(rollout.status.as_str()))),
        ("reward", Arc::new(rollouts.iter().map(|rollout| rollout.reward).collect::<Float64Array>())),
        ("tokens", lists::<Int32Type>(segments().map(|segment: &Segment| &segment.tokens[..]))),
        ("loss_mask", lists::<UInt8Type>(segments().map(|segment| &segment.loss_mask[..]))),
        ("logprobs", lists::<Float32Type>(segments().map(|segment| segment.logprobs.as_deref().unwrap_or_default()))),
    ];
    let fields = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), false));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns.into_iter().map(|(_, array)| array).collect())?;
    let mut writer = StreamWriter::try_new(Vec::new(), &schema)?;
    writer.write(&batch)?;
    writer.into_inner()
}

fn lists<'a, T: ArrowPrimitiveType>(lists: impl Iterator<Item = &'a [T::Native]>) -> ArrayRef {
    let lists: Vec<&[T::Native]> = lists.collect();
    let lengths = OffsetBuffer::from_lengths(lists.iter().map(|list| list.len()));
    let values = PrimitiveArray::<T>::new(lists.concat().into(), None);
    let item = Arc::new(Field::new_list_field(T::DATA_TYPE, false));
    Arc::new(ListArray::new(item, lengths, Arc::new(values), None))
}
