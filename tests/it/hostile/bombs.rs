//! Compressed bodies that expand to far more than was sent, or to nothing.

use std::io::Write as _;

use super::unharmed;
use crate::support::{Backend, TestApp, process::Service, rollout, text};

const JSON: (&str, &str) = ("content-type", "application/json");

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(body).expect("memory compresses");
    encoder.finish().expect("memory compresses")
}

fn zstd(body: &[u8]) -> Vec<u8> {
    zstd::encode_all(body, 19).expect("memory compresses")
}

/// Half a gigabyte of spaces as one zstd frame of a few kilobytes.
fn bomb() -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 19).expect("the level exists");
    let spaces = vec![b' '; 1 << 20];
    for _ in 0..512 {
        encoder.write_all(&spaces).expect("memory compresses");
    }
    encoder.finish().expect("memory compresses")
}

/// Bytes that hardly compress.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 7_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

async fn post(app: &TestApp, coding: &str, body: Vec<u8>) -> (u16, String) {
    let answer = app.post_raw("/trajectories", &[JSON, ("content-encoding", coding)], body).await;
    (answer.status.as_u16(), answer.json["type"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_are_refused_without_the_memory_that_they_ask_for() {
    let bomb = bomb();
    assert!(bomb.len() < 64 << 10, "a bomb is small: {}", bomb.len());
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[limits]\nbody_bytes = 8388608\ninflight_bytes = 33554432").expect("the file is written");
    let config = config.to_str().expect("the path is text");
    let service = Service::start_with("sqlite::memory:", &["--config", config], &[]).await;
    let http = crate::support::http();
    let url = format!("{}/trajectories", service.url);
    let before = service.peak_bytes();
    let posts = (0..64).map(|_| {
        let request = http.post(&url).header(JSON.0, JSON.1).header("content-encoding", "zstd").body(bomb.clone());
        async { request.send().await.expect("the service answers").status().as_u16() }
    });
    for status in futures::future::join_all(posts).await {
        assert!(matches!(status, 413 | 503), "{status}");
    }
    // The bound is the budget of 32 MiB, the same again for the decoders' windows, and what the allocator keeps per
    // thread. 64 bodies of 8 MiB that were not counted would be far above it.
    let grown = service.peak_bytes() - before;
    assert!(grown < 256 << 20, "{grown} bytes for 64 bombs of half a gigabyte");
    let metrics = http.get(format!("{}/metrics", service.url)).send().await.expect("the service answers");
    let metrics = metrics.text().await.expect("metrics are text");
    assert!(metrics.contains("forebay_body_bytes_in_flight 0\n"), "bytes are still paid for");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_may_not_expand_beyond_its_limits() {
    let app = TestApp::start_with(Backend::Sqlite, "[limits]\nbody_bytes = 1048576\ninflight_bytes = 8388608").await;
    let spaces = vec![b' '; 1 << 22];
    assert_eq!(post(&app, "zstd", zstd(&spaces)).await, (413, "too-large".to_owned()));
    assert_eq!(post(&app, "gzip", gzip(&spaces)).await, (413, "too-large".to_owned()));
    assert_eq!(post(&app, "zstd", bomb()).await, (413, "too-large".to_owned()));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bombs_compression_ratio_is_refused_even_below_the_body_limit() {
    let app = TestApp::start(Backend::Sqlite).await;
    // 32 MiB are below the body limit, but no real trajectory compresses to a thousandth.
    assert_eq!(post(&app, "zstd", zstd(&vec![b' '; 32 << 20])).await, (413, "too-large".to_owned()));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_too_large_is_refused_with_the_limit() {
    let app = TestApp::start(Backend::Sqlite).await;
    let sent = zstd(&vec![b' '; 32 << 20]);
    let headers = [JSON, ("content-encoding", "zstd")];
    let problem = app.post_raw("/trajectories", &headers, sent.clone()).await.refused(413, "too-large");
    let detail = text(&problem["detail"]);
    assert!(detail.contains(&format!("{} bytes as sent", sent.len())) && detail.contains("200 times"), "{detail}");
    assert!(!detail.contains("limits.body_bytes"), "{detail}");
    let large = zstd(&[vec![b' '; 1 << 20], noise(1 << 20)].concat().repeat(33));
    for (headers, body) in [(&headers[..], large), (&[JSON], vec![b' '; (64 << 20) + 1])] {
        let problem = app.post_raw("/trajectories", headers, body).await.refused(413, "too-large");
        let detail = text(&problem["detail"]);
        assert!(detail.contains("at most 67108864 bytes") && detail.contains("`limits.body_bytes`"), "{detail}");
    }
    let problem = app.post_raw("/batches", &[JSON], vec![b' '; 300_000]).await.refused(413, "too-large");
    assert!(text(&problem["detail"]).contains("this call may have at most 262144 bytes"), "{problem}");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_content_coding_is_accepted_only_once_and_complete() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = rollout("coded", 1.0).to_string().into_bytes();
    let malformed = (400, "malformed".to_owned());
    let untaken = (415, "unsupported-media-type".to_owned());
    // A body that is compressed twice is not JSON after one expansion.
    assert_eq!(post(&app, "gzip", gzip(&gzip(&body))).await, malformed);
    assert_eq!(post(&app, "zstd", zstd(&gzip(&body))).await, malformed);
    for list in ["gzip, gzip", "gzip, zstd", "gzip,identity", "deflate", "\u{7f}"] {
        let value = list.to_owned();
        if reqwest::header::HeaderValue::from_str(&value).is_ok() {
            assert_eq!(post(&app, list, gzip(&body)).await, untaken, "{list}");
        }
    }
    for (coding, whole) in [("gzip", gzip(&body)), ("zstd", zstd(&body))] {
        for cut in 0..whole.len() {
            assert_eq!(post(&app, coding, whole[..cut].to_vec()).await, malformed, "{coding} cut at {cut}");
        }
        let garbage = [whole.as_slice(), b"garbage"].concat();
        assert_eq!(post(&app, coding, garbage).await, malformed, "{coding} before garbage");
    }
    app.get("/trajectories?rollout_id=coded").await.refused(404, "not-found");
    // In both formats, two members make one body.
    let (first, second) = body.split_at(20);
    assert_eq!(post(&app, "gzip", [gzip(first), gzip(second)].concat()).await.0, 201);
    assert_eq!(post(&app, "zstd", [zstd(first), zstd(second)].concat()).await.0, 200);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_content_encoding_is_not_overlooked() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = gzip(rollout("coded", 1.0).to_string().as_bytes());
    for second in ["identity", "gzip"] {
        let headers = [JSON, ("content-encoding", "gzip"), ("content-encoding", second)];
        app.post_raw("/trajectories", &headers, body.clone()).await.refused(415, "unsupported-media-type");
    }
    let mut raw = super::Raw::connect(&app).await;
    let head = super::post_head("/trajectories");
    raw.send(format!("{head}content-length: 2\r\ncontent-encoding: ").as_bytes()).await;
    raw.send(b"\xff\xfe\r\n\r\n{}").await;
    assert_eq!(raw.answer().await.expect("an answer").status, 415);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_with_a_huge_window_is_refused_before_it_is_made() {
    let app = TestApp::start(Backend::Sqlite).await;
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("the level exists");
    // RFC 9659: windows over HTTP are limited to 8 MB.
    encoder.window_log(27).expect("the window exists");
    encoder.long_distance_matching(true).expect("the parameter exists");
    encoder.write_all(rollout("window", 1.0).to_string().as_bytes()).expect("memory compresses");
    let body = encoder.finish().expect("memory compresses");
    assert_eq!(post(&app, "zstd", body).await, (400, "malformed".to_owned()));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_empty_members_are_an_empty_body() {
    let app = TestApp::start(Backend::Sqlite).await;
    assert_eq!(post(&app, "gzip", gzip(b"").repeat(20_000)).await, (400, "malformed".to_owned()));
    assert_eq!(post(&app, "zstd", zstd(b"").repeat(20_000)).await, (400, "malformed".to_owned()));
    // Frames that decoders skip.
    assert_eq!(
        post(&app, "zstd", b"\x50\x2a\x4d\x18\x00\x00\x00\x00".repeat(20_000)).await,
        (400, "malformed".to_owned())
    );
    unharmed(app).await;
}
