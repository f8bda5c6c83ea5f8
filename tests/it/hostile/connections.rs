//! Many connections: above the limit, idle, waiting, or closed.

use serde_json::json;

use super::{PATIENCE, Raw, impatient, impatient_with, post, unharmed};
use crate::support::{Backend, TestApp, eventually, rollout, text, with};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_cap_wait_until_others_end() {
    let app = impatient_with("[limits]\nheader_timeout_s = 1\nconnections = 4\nwaiters = 1").await;
    let mut idle = Vec::new();
    for _ in 0..4 {
        let mut raw = Raw::sending(&app, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        assert_eq!(raw.answer().await.expect("an answer").status, 200);
        idle.push(raw);
    }
    // The kernel accepts the connection, but the service does not read from it yet.
    let mut waiting = Raw::sending(&app, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    let mut byte = [0];
    let early = std::time::Duration::from_millis(100);
    assert!(tokio::time::timeout(early, waiting.0.peek(&mut byte)).await.is_err(), "answered beyond the cap");
    drop(idle.pop());
    assert_eq!(waiting.last_answer().await.status, 200);
    drop(idle);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_are_closed_so_that_they_cannot_use_up_the_cap() {
    let app = impatient_with("[limits]\nheader_timeout_s = 1\nconnections = 300\nwaiters = 2").await;
    let mut idle = Vec::new();
    for index in 0..600 {
        // Some clients never send anything, and others stay connected after an answer.
        idle.push(if index % 2 == 0 {
            Raw::connect(&app).await
        } else {
            Raw::sending(&app, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await
        });
    }
    app.accept(rollout("meanwhile", 1.0)).await;
    for raw in &mut idle {
        raw.rest().await;
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_are_answered_while_the_number_of_waiters_is_at_its_limit() {
    let app = TestApp::start_with(Backend::Sqlite, "[limits]\nconnections = 128\nwaiters = 32").await;
    app.accept(rollout("a", 1.0)).await;
    let batch = app.lease().await;
    let mut waiters = Vec::new();
    for _ in 0..32 {
        waiters.push(Raw::sending(&app, post("/batches", r#"{"wait_ms":60000}"#)).await);
    }
    eventually("all waiters", || async { app.metrics().await.contains("forebay_waiters 32\n") }).await;
    app.post("/batches", json!({"wait_ms": 60_000})).await.refused(503, "too-many-waiters");
    app.ack(&batch, 1).await.expect(200);
    waiters.into_iter().for_each(Raw::reset);
    unharmed(app).await;
}

/// The path of samples of 24 MB. They are larger than socket buffers, so the server still has the rest when the client
/// does not read.
async fn much_to_read(app: &TestApp) -> String {
    let messages = json!([{"role": "user", "content": "x".repeat(1 << 20)}]);
    let bundle: Vec<_> =
        (0..24).map(|index| with(rollout(&format!("r{index}"), 1.0), json!({"messages": messages}))).collect();
    app.rules("default", json!({"batch": {"groups": 24}})).await;
    app.accept(bundle.into()).await;
    text(&app.lease().await["samples_url"]).to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_loses_its_connection() {
    let app = impatient_with("[limits]\nstall_timeout_s = 1\nconnections = 4\nwaiters = 1").await;
    let path = much_to_read(&app).await;
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let mut raw = Raw::sending(&app, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await;
        assert_eq!(raw.answer().await.expect("a head").status, 200);
        stalled.push(raw);
    }
    // All connections are used by clients that do not read; this request waits until they are closed.
    let accepted = tokio::time::timeout(PATIENCE, app.accept(rollout("after", 1.0))).await;
    assert_eq!(accepted.expect("a place becomes free")["verdict"], "kept");
    drop(stalled);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_during_an_answer_leaves_nothing_held() {
    let app = impatient().await;
    let path = much_to_read(&app).await;
    let mut raw = Raw::sending(&app, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await;
    assert_eq!(raw.answer().await.expect("a head").status, 200);
    raw.reset();
    unharmed(app).await;
}
