//! Limits on waiters: those that wait for one thing do not block those that wait for another, and one caller does not
//! block all others.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, eventually, on_both_stores, rollout, text};

/// A small number of places, so that a test can use all of them.
const FEW: &str = "[limits]\nwaiters = 4\nwaiters_per_key = 2\nwaiter_poll_interval_ms = 3_600_000";

/// Requests that wait in tasks of their own. They end with the test.
struct Crowd(Vec<tokio::task::JoinHandle<()>>);

impl Crowd {
    /// Starts this many requests that wait, with a key if there is one.
    fn of(app: &TestApp, size: usize, key: Option<&str>, method: &Method, path: &str, body: Option<&Value>) -> Self {
        let wait = || {
            let mut request = app.http.request(method.clone(), format!("{}{path}", app.url));
            if let Some(key) = key {
                request = request.bearer_auth(key);
            }
            if let Some(body) = body {
                request = request.json(body);
            }
            async move {
                let _ = request.send().await;
            }
        };
        Self((0..size).map(|_| tokio::spawn(wait())).collect())
    }

    /// Starts this many waits for a version of `default`.
    fn for_versions(app: &TestApp, size: usize, key: Option<&str>) -> Self {
        Self::of(app, size, key, &Method::GET, VERSION, None)
    }

    /// Starts this many waits for a batch of `default`.
    fn for_batches(app: &TestApp, size: usize, key: Option<&str>) -> Self {
        Self::of(app, size, key, &Method::POST, "/batches", Some(&json!({"wait_ms": 60_000})))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Waits for a version that is not published.
const VERSION: &str = "/policies/default?wait_version_above=0&wait_ms=60000";

async fn waiting(app: &TestApp, count: usize, key: Option<&str>) {
    let shown = format!("forebay_waiters {count}\n");
    eventually("all waiters", || async {
        let mut request = app.http.get(format!("{}/metrics", app.url));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let answer = request.send().await.expect("the server answers");
        answer.text().await.expect("metrics are text").contains(&shown)
    })
    .await;
}

async fn lease_as(app: &TestApp, key: &str, body: Value) -> Answer {
    app.post_as(key, "/batches", body).await
}

on_both_stores! {
    async fn waits_for_versions_do_not_block_waits_for_batches(app: TestApp) {
        app.reconfigure(FEW).await;
        let crowd = Crowd::for_versions(app, 4, None);
        waiting(app, 4, None).await;
        let problem = app.get(VERSION).await.refused(503, "too-many-waiters");
        assert_eq!(problem["detail"], "4 requests already wait for a version, which is the most that may wait at once");
        let lease = app.post("/batches", json!({"wait_ms": 60_000}));
        let posting = async {
            waiting(app, 5, None).await;
            app.accept(rollout("a", 1.0)).await;
        };
        let (batch, ()) = tokio::join!(lease, posting);
        batch.expect(201);
        drop(crowd);
    }

    async fn a_batch_that_waits_for_a_slow_rollout_is_granted_when_it_has_ended(app: TestApp) {
        app.rules("default", json!({"staleness": {"max": 1, "action": "wait"}})).await;
        let slow = app.post("/sessions", json!({"rollout_id": "slow"})).await.expect(201);
        app.publish(1).await.expect(200);
        app.accept(rollout("a", 1.0)).await;
        let lease = app.post("/batches", json!({"wait_ms": 60_000}));
        let ending = async {
            waiting(app, 1, None).await;
            // Nothing is posted that would wake the request.
            let abort = format!("/sessions/{}/abort", text(&slow["session_id"]));
            app.post(&abort, json!({"reason": "failed"})).await.expect(200);
        };
        let (batch, ()) = tokio::join!(lease, ending);
        batch.expect(201);
    }

    async fn a_request_that_need_not_wait_needs_no_place(app: TestApp) {
        app.reconfigure(FEW).await;
        // Waiters of another policy use all places of both kinds, but get none of the first policy's batches.
        app.rules("other", json!({})).await;
        let other = json!({"policy": "other", "wait_ms": 60_000});
        let trainers = Crowd::of(app, 4, None, &Method::POST, "/batches", Some(&other));
        let agents = Crowd::for_versions(app, 4, None);
        waiting(app, 8, None).await;
        app.post("/batches", json!({"wait_ms": 60_000})).await.refused(503, "too-many-waiters");
        app.post("/batches", json!({})).await.expect(204);
        app.get("/policies/default?wait_version_above=0").await.expect(204);
        app.accept(rollout("a", 1.0)).await;
        app.post("/batches", json!({"wait_ms": 60_000})).await.expect(201);
        app.get("/policies/default?wait_version_above=5&wait_ms=60000").await.expect(200);
        drop((trainers, agents));
    }

    async fn one_key_has_a_share_of_the_places(app: TestApp) {
        app.reconfigure(FEW).await;
        let admin = app.key(Role::Admin, &["*"]).await;
        let greedy = app.key(Role::Train, &["*"]).await;
        let modest = app.key(Role::Train, &["*"]).await;
        let crowd = Crowd::for_batches(app, 2, Some(&greedy));
        waiting(app, 2, Some(&admin)).await;
        let problem = lease_as(app, &greedy, json!({"wait_ms": 60_000})).await.refused(503, "too-many-waiters");
        assert!(text(&problem["detail"]).contains("for one key"), "{problem}");
        // The key's share of the other kind is separate, and requests that need not wait need no place.
        let versions = Crowd::for_versions(app, 2, Some(&greedy));
        waiting(app, 4, Some(&admin)).await;
        app.get_as(&greedy, VERSION).await.refused(503, "too-many-waiters");
        lease_as(app, &greedy, json!({})).await.expect(204);
        let lease = lease_as(app, &modest, json!({"wait_ms": 60_000}));
        let leaving = async {
            waiting(app, 5, Some(&admin)).await;
            // A waiter that disconnects releases its place.
            drop((crowd, versions));
            waiting(app, 1, Some(&admin)).await;
            app.post_as(&admin, "/trajectories", rollout("a", 1.0)).await.expect(201);
        };
        let (batch, ()) = tokio::join!(lease, leaving);
        batch.expect(201);
        let again = Crowd::for_batches(app, 2, Some(&greedy));
        waiting(app, 2, Some(&admin)).await;
        drop(again);
    }
}
