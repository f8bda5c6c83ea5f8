//! One trajectory of a million tokens, posted and delivered verbatim in both formats, with memory of a small multiple
//! of its size.

use std::sync::Arc;

use arrow_array::{
    ArrowPrimitiveType, Float64Array, ListArray, RecordBatch,
    cast::AsArray as _,
    types::{Float32Type, Int32Type, UInt8Type},
};
use arrow_ipc::reader::StreamReader;
use forebay_domain::{
    ingest::new_rollout::NewRollout,
    surrogates::LoneSurrogates,
    trajectory::{Trajectory, TrajectoryLimits},
};
use forebay_wire::{self as wire, ARROW_STREAM, Sample, Segment};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use crate::{
    arrow::{stream, texts},
    support::{endure, process::Service, text},
};

const TOKENS: usize = 1_000_000;

/// Memory besides the multiple of the trajectory: pages of the database, new threads, and what the allocator keeps for
/// each thread that freed memory.
const SLACK_BYTES: u64 = 24 << 20;

/// A rollout in which all tokens but the first are response tokens.
fn trajectory(rollout_id: &str) -> wire::Trajectory {
    let mut random = StdRng::seed_from_u64(endure::seed());
    let segment = Segment {
        tokens: (0..TOKENS).map(|_| random.random_range(0..128_000)).collect(),
        loss_mask: (1..TOKENS).map(|_| u8::from(random.random_bool(0.8))).collect(),
        logprobs: Some((1..TOKENS).map(|_| random.random_range(-20.0..0.0)).collect()),
        ..Segment::default()
    };
    wire::Trajectory {
        rollout_id: Some(rollout_id.to_owned()),
        reward: Some(1.0),
        segments: vec![segment],
        ..wire::Trajectory::default()
    }
}

fn packed_bytes(sent: wire::Trajectory) -> u64 {
    let limits = TrajectoryLimits {
        tokens_max: TOKENS,
        segments_max: 1,
        metadata_bytes_max: 0,
        lone_surrogates: LoneSurrogates::Replace,
    };
    let parsed = Trajectory::parse(sent, &limits).expect("it is valid");
    NewRollout::pack(parsed).payload_bytes() as u64
}

fn as_arrow(sent: &wire::Trajectory) -> Vec<u8> {
    let segment = &sent.segments[0];
    stream(&[vec![
        ("rollout_id", texts([sent.rollout_id.clone()])),
        ("status", texts([Some("completed".to_owned())])),
        ("reward", Arc::new(Float64Array::from(vec![sent.reward]))),
        ("tokens", list::<Int32Type>(&segment.tokens)),
        ("loss_mask", list::<UInt8Type>(&segment.loss_mask)),
        ("logprobs", list::<Float32Type>(segment.logprobs.as_deref().unwrap_or_default())),
    ]])
}

fn list<T: ArrowPrimitiveType>(numbers: &[T::Native]) -> Arc<ListArray> {
    let numbers = numbers.iter().copied().map(Some);
    Arc::new(ListArray::from_iter_primitive::<T, _, _>([Some(numbers)]))
}

fn numbers<T: ArrowPrimitiveType>(batch: &RecordBatch, column: &str) -> Vec<T::Native> {
    let column = batch.column_by_name(column).expect("the column is there").as_list::<i32>();
    column.value(0).as_primitive::<T>().values().to_vec()
}

async fn post(service: &Service, media: &str, body: Vec<u8>) {
    let request = crate::support::http().post(format!("{}/trajectories", service.url));
    let response = request.header("content-type", media).body(body).send().await.expect("the service answers");
    assert_eq!(response.status(), 201);
}

/// The path of the next batch's samples.
async fn lease(service: &Service) -> String {
    let request = crate::support::http().post(format!("{}/batches", service.url)).json(&json!({}));
    let batch: Value =
        request.send().await.expect("the service answers").json().await.expect("the batch is ready at once");
    format!("{}{}", service.url, text(&batch["samples_url"]))
}

async fn samples(url: &str, media: &str) -> Vec<u8> {
    let response = crate::support::http().get(url).header("accept", media).send().await.expect("the service answers");
    assert_eq!((response.status().as_u16(), text_of(&response)), (200, media));
    response.bytes().await.expect("the stream ends well").into()
}

fn text_of(response: &reqwest::Response) -> &str {
    response.headers()["content-type"].to_str().expect("the media type is text")
}

/// The segment of the only row, read as NDJSON.
async fn as_ndjson(url: &str) -> Segment {
    let body = samples(url, "application/x-ndjson").await;
    let row: Sample = serde_json::from_slice(&body).expect("one line, which is a row");
    Segment {
        tokens: row.tokens.expect("the rollout has tokens"),
        loss_mask: row.loss_mask.expect("and a mask"),
        logprobs: row.logprobs,
        ..Segment::default()
    }
}

/// The segment of the only row, read as Arrow.
async fn as_columns(url: &str) -> Segment {
    let body = samples(url, ARROW_STREAM).await;
    let batches = StreamReader::try_new(body.as_slice(), None).expect("a stream begins with its schema");
    let batches: Vec<RecordBatch> = batches.collect::<Result<_, _>>().expect("the stream is whole");
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 1);
    Segment {
        tokens: numbers::<Int32Type>(&batches[0], "tokens"),
        loss_mask: numbers::<UInt8Type>(&batches[0], "loss_mask"),
        logprobs: Some(numbers::<Float32Type>(&batches[0], "logprobs")),
        ..Segment::default()
    }
}

/// Compares all numbers, and prints only the first difference.
#[track_caller]
fn check_same(sent: &Segment, found: &Segment) {
    let bits = |segment: &Segment| -> Vec<u32> {
        segment.logprobs.iter().flatten().map(|logprob| logprob.to_bits()).collect()
    };
    assert!(sent.tokens == found.tokens, "tokens differ");
    assert!(sent.loss_mask == found.loss_mask, "masks differ");
    assert!(bits(sent) == bits(found), "log-probabilities differ");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trajectory_of_a_million_tokens_is_verbatim_and_takes_little_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = Service::start(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
    let sent = trajectory("json");
    let body = serde_json::to_vec(&sent).expect("a trajectory is JSON");
    let own_bytes = body.len() as u64 + packed_bytes(sent.clone());

    let before = service.peak_bytes();
    post(&service, "application/json", body).await;
    let stored = service.peak_bytes() - before;
    let batch = lease(&service).await;
    check_same(&sent.segments[0], &as_ndjson(&batch).await);
    let grown = service.peak_bytes() - before;
    check_same(&sent.segments[0], &as_columns(&batch).await);

    let sent = trajectory("arrow");
    post(&service, ARROW_STREAM, as_arrow(&sent)).await;
    let batch = lease(&service).await;
    check_same(&sent.segments[0], &as_ndjson(&batch).await);
    check_same(&sent.segments[0], &as_columns(&batch).await);

    let ratio = |bytes: u64| bytes as f64 / own_bytes as f64;
    let outcome = format!(
        "{own_bytes} bytes as JSON and packed; memory grew by {:.2} times that to store it, {:.2} times when it was read",
        ratio(stored),
        ratio(grown)
    );
    endure::report("one trajectory, tokens", TOKENS, &outcome);
    assert!(grown < 3 * own_bytes + SLACK_BYTES, "{outcome}");
    service.kill().await;
}
