//! Consumers that wait for a batch: every replica knows them, and since when.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Backend, TestApp, eventually, on_both_stores, rollout};

async fn waiting(app: &TestApp) -> Value {
    app.get("/policies/default").await.expect(200)["waiting"].clone()
}

async fn asking(app: &TestApp) -> Value {
    waiting(app).await["asking"].clone()
}

/// A request for a batch that runs beside the test.
fn ask(app: &TestApp, body: &Value) -> tokio::task::JoinHandle<(u16, Value)> {
    let request = app.http.post(format!("{}/batches", app.url)).json(body);
    tokio::spawn(async move {
        let answer = request.send().await.expect("the server answers");
        let status = answer.status().as_u16();
        (status, answer.json().await.unwrap_or_default())
    })
}

/// Waits until a consumer is shown as waiting. The clock of the service moves meanwhile, as it does in life.
async fn is_asking(app: &TestApp, consumers: usize) -> Value {
    eventually("a consumer that waits", || async {
        app.pass_s(2.0).await;
        asking(app).await.as_array().map(Vec::len) == Some(consumers)
    })
    .await;
    asking(app).await
}

on_both_stores! {
    async fn a_consumer_that_waits_is_shown_until_it_gets_a_batch(app: TestApp) {
        assert_eq!((asking(app).await, waiting(app).await["holding"].clone()), (json!([]), json!([])));
        let request = ask(app, &json!({"consumer": "trainer-0", "wait_ms": 60000}));
        let shown = is_asking(app, 1).await;
        assert_eq!(shown[0]["consumer"], "trainer-0");
        let since = shown[0]["since"].clone();
        app.clock.advance_s(5.0);
        assert_eq!(asking(app).await[0]["since"], since, "it still waits");
        app.accept(rollout("a", 1.0)).await;
        let (status, batch) = request.await.expect("it does not panic");
        assert_eq!(status, 201);
        assert_eq!(asking(app).await, json!([]));
        let holding = waiting(app).await["holding"].clone();
        assert_eq!(holding, json!([{
            "batch_id": batch["batch_id"], "consumer": "trainer-0", "since": holding[0]["since"],
            "expires_at": batch["expires_at"], "attempt": 1,
        }]));
        // What was noted in memory does not come back with the next write.
        app.pass_s(2.0).await;
        app.pass_s(2.0).await;
        assert_eq!(asking(app).await, json!([]));
        app.ack(&batch, 1).await.expect(200);
        assert_eq!(waiting(app).await["holding"], json!([]));
    }

    async fn a_wait_spans_requests_that_found_nothing(app: TestApp) {
        app.post("/batches", json!({"consumer": "polls"})).await.expect(204);
        for _ in 0..4 {
            app.clock.advance_s(5.0);
            app.post("/batches", json!({"consumer": "polls"})).await.expect(204);
        }
        app.pass_s(0.0).await;
        let shown = is_asking(app, 1).await;
        assert_eq!(shown[0]["since"], "2026-01-01T00:00:00.000000Z");
        let now = app.buffer.now().as_micros();
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease_with(json!({"consumer": "polls"})).await;
        assert_eq!(batch["waited_ms"], (now - 1_767_225_600_000_000) / 1_000);
        // A consumer that pauses for long has stopped waiting.
        app.post("/batches", json!({"consumer": "polls"})).await.expect(204);
        app.clock.advance_s(11.0);
        assert_eq!(asking(app).await, json!([]));
        app.accept(rollout("b", 1.0)).await;
        let batch = app.lease_with(json!({"consumer": "polls"})).await;
        assert_eq!(batch["waited_ms"], 0);
    }

    async fn a_consumer_whose_client_has_gone_is_not_shown(app: TestApp) {
        let request = ask(app, &json!({"wait_ms": 60000}));
        let shown = is_asking(app, 1).await;
        assert_eq!(shown[0]["consumer"], Value::Null);
        request.abort();
        is_asking(app, 0).await;
    }

    async fn at_most_eight_are_shown_the_longest_waiting_first(app: TestApp) {
        for number in 0..10 {
            app.post("/batches", json!({"consumer": format!("t{number}")})).await.expect(204);
            app.clock.advance_s(0.5);
        }
        let shown = is_asking(app, 8).await;
        assert_eq!((&shown[0]["consumer"], &shown[7]["consumer"]), (&json!("t0"), &json!("t7")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_waits_at_one_replica_is_shown_at_another() {
    let app = TestApp::start(Backend::Postgres).await;
    let other = app.replica().await;
    let request = ask(&app, &json!({"consumer": "trainer-0", "wait_ms": 60000}));
    // The sweeper writes it by itself, within 3 s of the service's time.
    eventually("the request waits", || async { app.metrics().await.contains("forebay_waiters 1") }).await;
    app.clock.advance_s(2.0);
    let shown = async || asking(&other).await.as_array().map(Vec::len) == Some(1);
    eventually("it is shown at the other replica", || async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        shown().await
    })
    .await;
    assert_eq!(asking(&other).await[0]["consumer"], "trainer-0");
    // The other replica gives it a batch, and the wait is over everywhere.
    other.accept(rollout("a", 1.0)).await;
    let (status, batch) = request.await.expect("it does not panic");
    assert_eq!((status, &batch["waited_ms"]), (201, &json!(2000)));
    assert_eq!((asking(&app).await, asking(&other).await), (json!([]), json!([])));
    other.finish().await;
    app.finish().await;
}
