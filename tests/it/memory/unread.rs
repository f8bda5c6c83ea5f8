//! Answers that clients do not read: the memory that a post holds counts against the budget of posts.

use std::io::Write as _;

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::support::{endure, http, process::Service};

const CONNECTIONS: usize = 8;

const LINES: usize = 16_384;

/// A budget slightly larger than the bodies of all connections.
const BUDGET_BYTES: usize = 64 << 20;

/// Memory besides the budget, in debug builds: work on a slice of each body, and what the allocator keeps.
const SLACK_BYTES: usize = 96 << 20;

/// A bulk body of invalid lines, each answered with kilobytes; the body compresses to some tens of kilobytes.
fn body() -> Vec<u8> {
    let line =
        json!({"status": "failed", "segments": [{"tokens": vec![-1; 100], "loss_mask": [2]}]}).to_string() + "\n";
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(line.repeat(LINES).as_bytes()).expect("memory compresses");
    encoder.finish().expect("memory compresses")
}

/// Number of bytes of posts that the service holds.
async fn held_bytes(service: &Service) -> usize {
    let metrics = http().get(format!("{}/metrics", service.url)).send().await.expect("the service answers");
    let metrics = metrics.text().await.expect("metrics are text");
    let value = metrics.lines().find_map(|line| line.strip_prefix("forebay_body_bytes_in_flight "));
    value.and_then(|value| value.parse().ok()).expect("the service counts the bytes of posts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_answers_that_nobody_reads_stay_within_the_budget() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    let limits = format!("[limits]\nbody_bytes = 16777216\nbody_timeout_s = 2\ninflight_bytes = {BUDGET_BYTES}");
    std::fs::write(&config, limits).expect("the file is written");
    let config = config.to_str().expect("the path is text");
    let service = Service::start_with("sqlite::memory:", &["--config", config], &[]).await;
    let body = body();
    assert!(body.len() < 64 << 10, "a small body: {}", body.len());
    let before = service.peak_bytes();
    let mut mute = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream =
            TcpStream::connect(service.url.trim_start_matches("http://")).await.expect("the kernel accepts");
        let head = "POST /trajectories HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n";
        let head = format!("{head}content-encoding: gzip\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.expect("the head is sent");
        stream.write_all(&body).await.expect("the body is sent");
        mute.push(stream);
    }
    for stream in &mut mute {
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.expect("the answer begins");
        assert!(matches!(&head, b"HTTP/1.1 200" | b"HTTP/1.1 503"), "{}", String::from_utf8_lossy(&head));
    }
    // After the time for reading is over, all bodies are stored to their ends and released.
    while held_bytes(&service).await > CONNECTIONS << 20 {
        tokio::task::yield_now().await;
    }
    let grown = service.peak_bytes() - before;
    let outcome = format!("{} bytes each of gzip; resident {} MiB more at most", body.len(), grown >> 20);
    endure::report("posts of 16,384 invalid lines whose answers nobody reads", CONNECTIONS, &outcome);
    assert!(grown < (BUDGET_BYTES + SLACK_BYTES) as u64, "{outcome}");
    service.kill().await;
}
