//! The same group of rollouts as a JSON body and as an Arrow stream.

use std::{fmt::Write as _, sync::Arc};

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, Float64Array, ListArray, PrimitiveArray, RecordBatch, StringArray, UInt32Array,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Field, Schema};
use forebay_client::wire::{Segment, Trajectory};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// Number of rollouts in a body.
pub(crate) const ROLLOUTS: usize = 8;

/// Number of tokens in a rollout.
pub(crate) const TOKENS: usize = 2_000;

/// Ids are below this number: the size of a common vocabulary.
const VOCABULARY: u32 = 128_000;

/// Numbers as Python prints them: a float32 with the digits of a float64, and a space after each comma.
pub(crate) fn json() -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(1);
    let mut body = String::new();
    for rollout in 0..ROLLOUTS {
        let (mut tokens, mut mask, mut logprobs) = (String::from("1"), String::new(), String::new());
        for index in 1..TOKENS {
            let comma = if index == 1 { "" } else { ", " };
            let _ = write!(tokens, ", {}", random.random_range(0..VOCABULARY));
            let _ = write!(mask, "{comma}{}", u8::from(!random.random_bool(1.0 / 7.0)));
            let _ = write!(logprobs, "{comma}{}", f64::from(random.random_range(-2.5_f32..0.0)));
        }
        let separator = if rollout == 0 { '[' } else { ',' };
        let _ = write!(
            body,
            r#"{separator}{{"rollout_id": "g-{rollout}", "group_id": "g", "group_size": {ROLLOUTS}, "status": "completed", "reward": {}, "segments": [{{"tokens": [{tokens}], "loss_mask": [{mask}], "logprobs": [{logprobs}]}}]}}"#,
            rollout % 2
        );
    }
    body.push(']');
    body.into_bytes()
}

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
