//! Groups as Arrow streams, in Forebay's protocol.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, Float64Array, Int32Array, ListArray, PrimitiveArray, RecordBatch, StringArray,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Field, Schema};

use crate::{
    template::{NAME, Template},
    workload::{Content, Group, Segment},
};

/// A body with the rollouts of a group: one row per segment.
pub(super) fn template(group: &Group, policy: &str) -> Template {
    let stream = write(group, policy).expect("columns of one length can be written to memory");
    let mut template = Template::of_bytes(&stream);
    group.rollouts.iter().for_each(|rollout| template.count(rollout));
    template
}

fn write(group: &Group, policy: &str) -> Result<Vec<u8>, ArrowError> {
    let mut rows: Vec<(usize, f64, usize, &Segment)> = Vec::new();
    for (index, rollout) in group.rollouts.iter().enumerate() {
        let Content::Tokens(segments) = &rollout.content else { continue };
        rows.extend(segments.iter().enumerate().map(|(place, segment)| (index, rollout.reward, place, segment)));
    }
    let texts = |text: &dyn Fn(usize) -> String| -> ArrayRef {
        Arc::new(rows.iter().map(|row| Some(text(row.0))).collect::<StringArray>())
    };
    let size = i32::try_from(group.rollouts.len()).map_err(|error| ArrowError::ExternalError(Box::new(error)))?;
    let segments = || rows.iter().map(|row| row.3);
    let mut columns = vec![
        ("policy", texts(&|_| policy.to_owned())),
        ("rollout_id", texts(&|index| format!("{NAME}-{index}"))),
        ("group_id", texts(&|_| NAME.to_owned())),
        ("group_size", Arc::new(Int32Array::from(vec![size; rows.len()])) as ArrayRef),
        ("status", texts(&|_| "completed".to_owned())),
        ("reward", Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.1)))),
        ("segment", Arc::new(Int32Array::from_iter_values(rows.iter().map(|row| row.2 as i32)))),
        ("tokens", lists::<Int32Type>(segments().map(|segment| segment.tokens.iter().map(|&id| id as i32).collect()))),
        (
            "loss_mask",
            lists::<UInt8Type>(segments().map(|segment| segment.loss_mask.iter().map(|&bit| bit.into()).collect())),
        ),
    ];
    if segments().all(|segment| segment.logprobs.is_some()) {
        let logprobs = segments().map(|segment| segment.logprobs.clone().unwrap_or_default());
        columns.push(("logprobs", lists::<Float32Type>(logprobs)));
    }
    let fields = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), false));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    let batch = RecordBatch::try_new(Arc::clone(&schema), arrays)?;
    let mut writer = StreamWriter::try_new(Vec::new(), &schema)?;
    writer.write(&batch)?;
    writer.into_inner()
}

fn lists<T: ArrowPrimitiveType>(lists: impl Iterator<Item = Vec<T::Native>>) -> ArrayRef {
    let lists: Vec<Vec<T::Native>> = lists.collect();
    let lengths = OffsetBuffer::from_lengths(lists.iter().map(Vec::len));
    let values = PrimitiveArray::<T>::new(lists.concat().into(), None);
    let item = Arc::new(Field::new_list_field(T::DATA_TYPE, false));
    Arc::new(ListArray::new(item, lengths, Arc::new(values), None))
}
