//! Ten readers who look at rollouts of a million tokens: two are unpacked at a time, and their bytes are counted until the
//! answers are written.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::{endure, eventually, http, process::Service, rollout, with};

const TOKENS: usize = 1_000_000;

const READERS: usize = 10;

/// How often each reader looks.
const LOOKS: usize = 3;

/// The default budget of samples.
const BUDGET_BYTES: usize = 256 << 20;

/// Bytes of a token and its columns, unpacked: the id, the mask and the log-probability.
const TOKEN_BYTES: usize = 9;

/// How often the bytes of a rollout are counted, and what is counted for an answer.
const COPIES: usize = 4;
const ANSWER_BYTES: usize = 4 << 20;

/// Other memory in debug builds: pages of the database, threads, and what the allocator keeps.
const FIXED_BYTES: u64 = 96 << 20;

/// Bytes of a message that fills the buffers of a connection, so that its answer stays in the service.
const MESSAGE_BYTES: usize = 24 << 20;

fn long(rollout_id: &str) -> Value {
    let noise = |index: usize| (index * 2_654_435_761) % 1_000_003;
    let tokens: Vec<usize> = (0..TOKENS).map(|index| noise(index) % 128_000).collect();
    let mask: Vec<u8> = (1..TOKENS).map(|index| u8::from(!noise(index).is_multiple_of(7))).collect();
    let logprobs: Vec<f64> = (1..TOKENS).map(|index| -(noise(index) as f64) / 400_000.0).collect();
    with(rollout(rollout_id, 1.0), json!({"segments": [{"tokens": tokens, "loss_mask": mask, "logprobs": logprobs}]}))
}

async fn post(service: &Service, body: &Value) {
    let sent = http().post(format!("{}/trajectories", service.url)).json(body).send().await;
    assert_eq!(sent.expect("the service answers").status(), 201);
}

async fn samples_bytes_in_flight(url: &str) -> usize {
    let metrics = http().get(format!("{url}/metrics")).send().await.expect("the service answers").text().await;
    let metrics = metrics.expect("metrics are text");
    let value = metrics.lines().find_map(|line| line.strip_prefix("forebay_samples_bytes_in_flight "));
    value.and_then(|value| value.parse().ok()).expect("the service counts the bytes of samples")
}

/// Looks at the end of a rollout, and checks that it is the end.
async fn look(url: String, rollout_id: String) -> usize {
    let from = TOKENS - 16_384;
    let url = format!("{url}/trajectories/content?rollout_id={rollout_id}&from={from}&limit=16384");
    let answer = http().get(url).send().await.expect("the service answers");
    assert_eq!(answer.status(), 200);
    let body = answer.bytes().await.expect("the answer is whole");
    let found: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(found["window"]["to"], TOKENS);
    assert_eq!(found["map"]["buckets"].as_u64().map(|parts| parts <= 512), Some(true));
    body.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_readers_of_a_million_tokens_stay_in_the_budget() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    let service = Service::start(&database).await;
    for name in ["a", "b"] {
        post(&service, &long(name)).await;
    }
    let message = json!([{"role": "tool", "content": "x".repeat(MESSAGE_BYTES)}]);
    post(&service, &with(rollout("message", 1.0), json!({"messages": message}))).await;
    // The peak of posting is not that of looking.
    assert!(service.stop().await.success());
    let service = Service::start(&database).await;
    let before = service.peak_bytes();

    let mut readers: JoinSet<usize> = JoinSet::new();
    for reader in 0..READERS {
        let (url, name) = (service.url.clone(), ["a", "b"][reader % 2].to_owned());
        readers.spawn(async move {
            let mut longest = 0;
            for _ in 0..LOOKS {
                longest = longest.max(look(url.clone(), name.clone()).await);
            }
            longest
        });
    }
    let is_done = Arc::new(AtomicBool::new(false));
    let watcher = {
        let (url, is_done) = (service.url.clone(), Arc::clone(&is_done));
        tokio::spawn(async move {
            let mut most = 0;
            while !is_done.load(Ordering::Acquire) {
                most = most.max(samples_bytes_in_flight(&url).await);
            }
            most
        })
    };
    let mut longest = 0;
    while let Some(read) = readers.join_next().await {
        longest = longest.max(read.expect("a reader does not panic"));
    }
    is_done.store(true, Ordering::Release);
    let most = watcher.await.expect("the watcher does not panic");
    let grown = service.peak_bytes() - before;
    let one = COPIES * TOKENS * (TOKEN_BYTES + 1) + ANSWER_BYTES;
    let outcome = format!(
        "resident {} MiB more at most, {} MiB of the budget of samples; the longest answer has {} KiB",
        grown >> 20,
        most >> 20,
        longest >> 10
    );
    endure::report("readers of a million tokens", READERS, &outcome);
    assert!(longest < 3 << 20, "{outcome}");
    assert!(most <= 2 * one + READERS * longest, "two at a time: {outcome}");
    assert!(most < BUDGET_BYTES && grown < (2 * one) as u64 + FIXED_BYTES, "{outcome}");

    // An answer that is not read is counted until its connection ends.
    eventually("an empty budget", || async { samples_bytes_in_flight(&service.url).await == 0 }).await;
    let url = format!("{}/trajectories/content?rollout_id=message&messages_limit=1", service.url);
    let unread = http().get(url).send().await.expect("the service answers");
    assert_eq!(unread.status(), 200);
    let held = samples_bytes_in_flight(&service.url).await;
    assert!(held >= MESSAGE_BYTES / 2, "{held} bytes are counted");
    drop(unread);
    eventually("an empty budget", || async { samples_bytes_in_flight(&service.url).await == 0 }).await;
    service.kill().await;
}
