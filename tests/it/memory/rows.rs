//! Batches of long conversations with many segments, read in every format: the columns of a rollout are held in memory
//! once.

use forebay_wire::ARROW_STREAM;
use serde_json::{Value, json};

use crate::support::{endure, process::Service, rollout, text, with};

const FORMS: [&str; 3] = ["application/x-ndjson", "application/json", ARROW_STREAM];

/// Memory besides the batch, in debug builds: threads, pages of the database, and what the allocator keeps.
const SLACK_BYTES: u64 = 96 << 20;

/// A rollout with this many bytes of messages and this many segments of a few tokens.
fn conversation(rollout_id: &str, message_bytes: usize, segments: usize) -> Value {
    let segment = json!({"tokens": [1, 2, 3], "loss_mask": [1, 1], "logprobs": [-0.5, -0.25]});
    let messages = json!([{"role": "user", "content": "x".repeat(message_bytes)}]);
    with(rollout(rollout_id, 1.0), json!({"segments": vec![segment; segments], "messages": messages}))
}

async fn call(service: &Service, path: &str, method: reqwest::Method, body: Value) -> Value {
    let request = crate::support::http().request(method, format!("{}{path}", service.url)).json(&body);
    let answer = request.send().await.expect("the service answers");
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
    answer.json().await.expect("JSON")
}

/// Reads samples, discards them, and returns the number of their bytes.
async fn drain(url: String, form: &'static str) -> usize {
    let request = crate::support::http().get(url).header("accept", form);
    let mut answer = request.send().await.expect("the service answers");
    assert_eq!(answer.status(), 200);
    let mut bytes = 0;
    while let Some(chunk) = answer.chunk().await.expect("the stream ends well") {
        bytes += chunk.len();
    }
    bytes
}

/// The growth of the process, as text and in bytes.
fn grown(service: &Service, before: u64) -> (String, u64) {
    let bytes = service.peak_bytes() - before;
    (format!("resident {} MiB before, {} MiB more at most", before >> 20, bytes >> 20), bytes)
}

async fn start(folder: &tempfile::TempDir) -> Service {
    Service::start(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_conversation_of_thousands_of_segments_is_read_in_every_form() {
    const MESSAGE_BYTES: usize = 1 << 20;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = start(&folder).await;
    call(&service, "/trajectories", reqwest::Method::POST, conversation("long", MESSAGE_BYTES, 2_200)).await;
    let batch = call(&service, "/batches", reqwest::Method::POST, json!({})).await;
    let before = service.peak_bytes();
    for form in FORMS {
        let bytes = drain(format!("{}{}", service.url, text(&batch["samples_url"])), form).await;
        assert!((MESSAGE_BYTES..8 << 20).contains(&bytes), "{bytes} bytes as {form}");
    }
    let outcome = grown(&service, before);
    endure::report("bytes of messages in a rollout of 2,200 segments, read in three forms", MESSAGE_BYTES, &outcome.0);
    assert!(outcome.1 < SLACK_BYTES, "{}", outcome.0);
    let path = format!("/batches/{}", text(&batch["batch_id"]));
    let batch: Value = crate::support::http()
        .get(format!("{}{path}", service.url))
        .send()
        .await
        .expect("the service answers")
        .json()
        .await
        .expect("JSON");
    assert_eq!((&batch["state"], &batch["samples"]), (&json!("leased"), &json!(2_200)));
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_readers_of_a_batch_of_conversations_stay_within_a_bound() {
    const ROLLOUTS: usize = 32;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = start(&folder).await;
    call(&service, "/policies/default", reqwest::Method::PUT, json!({"batch": {"groups": ROLLOUTS}})).await;
    for index in 0..ROLLOUTS {
        call(&service, "/trajectories", reqwest::Method::POST, conversation(&format!("r{index}"), 200_000, 60)).await;
    }
    let batch = call(&service, "/batches", reqwest::Method::POST, json!({})).await;
    let url = format!("{}{}", service.url, text(&batch["samples_url"]));
    let before = service.peak_bytes();
    for form in FORMS {
        let sizes = futures::future::join_all((0..4).map(|_| drain(url.clone(), form))).await;
        assert!(sizes.iter().all(|&bytes| (ROLLOUTS * 200_000..16 << 20).contains(&bytes)), "{sizes:?} as {form}");
    }
    let outcome = grown(&service, before);
    endure::report("readers at once of 32 x 60 segments with 200 KB of messages, in three forms", 4, &outcome.0);
    assert!(outcome.1 < SLACK_BYTES, "{}", outcome.0);
    service.kill().await;
}
