//! Bodies that are announced and do not come, or stop coming: they keep nobody else from being served.

use forebay_fake_engine::Answer;
use forebay_wire::Role;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Raw, post_head, unharmed};
use crate::support::{Backend, TestApp, eventually, rollout, text};

/// A session and what its agent calls.
struct Session {
    id: String,
    key: String,
    address: String,
}

impl Session {
    async fn open(app: &TestApp, key: Option<&str>) -> Self {
        let session = match key {
            Some(key) => app.post_as(key, "/sessions", json!({})).await,
            None => app.post("/sessions", json!({})).await,
        };
        let session = session.expect(201);
        Self {
            id: text(&session["session_id"]).to_owned(),
            key: text(&session["key"]).to_owned(),
            address: app.agents.to_string(),
        }
    }

    fn head(&self) -> String {
        let path = format!("/sessions/{}/v1/chat/completions", self.id);
        format!("{}authorization: Bearer {}\r\n", post_head(&path), self.key)
    }

    /// A call whose body has this length.
    async fn calls(&self, length: usize) -> Raw {
        self.calls_with("", length).await
    }

    /// The same with more headers.
    async fn calls_with(&self, headers: &str, length: usize) -> Raw {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hello."}]});
        let body = body.to_string();
        let body = format!("{body}{}", " ".repeat(length.saturating_sub(body.len())));
        let mut raw = Raw::to(&self.address).await;
        raw.send(format!("{}{headers}content-length: {}\r\n\r\n{body}", self.head(), body.len())).await;
        raw
    }
}

/// Begins a body and sends only this many of its bytes.
async fn begin(address: &str, head: &str, announced: usize, sent: usize) -> Raw {
    let mut raw = Raw::to(address).await;
    raw.send(format!("{head}content-length: {announced}\r\n\r\n{}", " ".repeat(sent))).await;
    raw
}

fn gauge(metrics: &str, name: &str) -> usize {
    let value = metrics.lines().find_map(|line| line.strip_prefix(&format!("forebay_{name}_bytes_in_flight ")));
    value.expect("the service counts bytes").parse().expect("a gauge is a number")
}

/// Whether the budgets of posts and of calls are whole.
fn is_whole(metrics: &str) -> bool {
    gauge(metrics, "body") == 0 && gauge(metrics, "agent_call") == 0
}

fn address(url: &str) -> &str {
    url.trim_start_matches("http://")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_bodies_that_do_not_come_hold_nothing_and_end() {
    let app = TestApp::start_with(Backend::Sqlite, "[facades]\nslime = \"127.0.0.1:0\"").await;
    let (main, facade) = (address(&app.url), address(&app.facades["slime"]));
    let session = Session::open(&app, None).await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        for (address, path) in [(main, "/trajectories"), (main, "/imports/forebay"), (facade, "/buffer/write")] {
            silent.push((path, begin(address, &post_head(path), 64 << 20, 1).await));
        }
        silent.push(("call", begin(&session.address, &session.head(), 32 << 20, 1).await));
    }
    eventually("all first bytes", || async {
        let metrics = app.metrics().await;
        (gauge(&metrics, "body"), gauge(&metrics, "agent_call")) == (24 << 10, 8 << 10)
    })
    .await;
    app.accept(rollout("meanwhile", 1.0)).await;
    let other = Session::open(&app, None).await;
    assert_eq!(other.calls(100).await.answer().await.expect("an answer").status, 200);
    // They do not arrive at the least rate, which is long before the time of a whole body is over.
    for (path, raw) in &mut silent {
        let answer = raw.answer().await.expect("an answer");
        let body = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, if *path == "call" { 400 } else { 408 }, "{path}: {body}");
        assert!(body.contains("arrived too slowly"), "{path}: {body}");
    }
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_posts_of_one_key_leave_room_for_others_and_for_its_own_small_ones() {
    const BODY: usize = 1 << 20;
    let config = "[limits]\nbody_bytes = 1048576\ninflight_bytes = 5242880\n[facades]\nslime = \"127.0.0.1:0\"";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let (greedy, other) = (app.key(Role::Produce, &["*"]).await, app.key(Role::Produce, &["*"]).await);
    let (main, facade) = (address(&app.url), address(&app.facades["slime"]));
    let head = |key: &str, path: &str| format!("{}authorization: Bearer {key}\r\n", post_head(path));
    // Each of them lacks only its last byte.
    let mut unfinished = Vec::new();
    for (address, path) in [(main, "/trajectories"), (main, "/imports/forebay"), (facade, "/buffer/write")] {
        unfinished.push(begin(address, &head(&greedy, path), BODY, BODY - 1).await);
    }
    eventually("three bodies", || async { gauge(&app.metrics_as_admin().await, "body") == 3 * BODY }).await;
    // A fourth one has room in the budget, but not in the share of its key.
    let refused = begin(main, &head(&greedy, "/trajectories"), BODY, 0).await.answer().await.expect("an answer");
    assert_eq!((refused.status, refused.problem().as_str()), (503, "overloaded"), "its key has its share");
    let padded = |id: &str, bytes: usize| {
        let mut sent = rollout(id, 1.0);
        sent["metadata"] = json!({"padding": "x".repeat(bytes)});
        sent
    };
    app.post_as(&greedy, "/trajectories", padded("small", 1 << 10)).await.expect(201);
    app.post_as(&other, "/trajectories", padded("of another", 200 << 10)).await.expect(201);
    let mut large = Raw::to(main).await;
    let body = format!("{}{}", rollout("large of another", 1.0), " ".repeat(600 << 10));
    large.send(format!("{}content-length: {}\r\n\r\n{body}", head(&other, "/trajectories"), body.len())).await;
    assert_eq!(large.answer().await.expect("an answer").status, 201);
    unfinished.into_iter().for_each(Raw::reset);
    eventually("whole budgets", || async { is_whole(&app.metrics_as_admin().await) }).await;
    app.post_as(&greedy, "/trajectories", padded("afterwards", 1 << 10)).await.expect(201);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_that_finds_no_room_on_its_way_is_told_to_come_again() {
    const BODY: usize = 1 << 20;
    let app = TestApp::start_with(Backend::Sqlite, "[limits]\nbody_bytes = 1048576\ninflight_bytes = 2097152").await;
    let mut bodies = Vec::new();
    for _ in 0..4 {
        bodies.push(begin(address(&app.url), &post_head("/trajectories"), BODY, 1).await);
    }
    eventually("four bodies", || async { gauge(&app.metrics().await, "body") == 4 << 10 }).await;
    // All of them come on. Some yield, so that not all wait for room that the others have.
    let rest = format!("{}{}", rollout("one of them", 1.0), " ".repeat(BODY));
    let mut statuses = Vec::new();
    let sent = bodies.iter_mut().map(|raw| async {
        raw.send(&rest[..BODY - 1]).await;
        raw.answer().await.expect("an answer")
    });
    for answer in futures::future::join_all(sent).await {
        if answer.status == 503 {
            assert_eq!(answer.problem(), "overloaded");
        }
        statuses.push(answer.status);
    }
    assert!(statuses.iter().all(|status| [200, 201, 503].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&201), "{statuses:?}");
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_calls_of_one_session_leave_room_for_others_and_for_its_own_small_ones() {
    const BODY: usize = 1 << 20;
    let config = "[limits]\nbody_bytes = 1048576\n[sessions]\nlisten = \"127.0.0.1:0\"\ninflight_bytes = 4194304";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let (greedy, other) = (Session::open(&app, None).await, Session::open(&app, None).await);
    let mut unfinished = Vec::new();
    for _ in 0..3 {
        unfinished.push(begin(&greedy.address, &greedy.head(), BODY, BODY - 1).await);
    }
    eventually("three bodies", || async { gauge(&app.metrics().await, "agent_call") == 3 * BODY }).await;
    // A further one waits until the session has less.
    let mut waits = greedy.calls(BODY).await;
    for (session, length) in [(&greedy, 1 << 10), (&other, 1 << 10), (&other, 600 << 10)] {
        assert_eq!(session.calls(length).await.answer().await.expect("an answer").status, 200, "{length}");
    }
    unfinished.into_iter().for_each(Raw::reset);
    assert_eq!(waits.answer().await.expect("an answer").status, 200);
    drop(waits);
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_one_session_that_wait_for_a_place_are_bounded() {
    let config = "[sessions]\nlisten = \"127.0.0.1:0\"\nmax_in_flight = 2";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let session = Session::open(&app, None).await;
    app.engine.switch(|switches| switches.stall = true);
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        let mut raw = session.calls(100).await;
        calls.spawn(async move { raw.answer().await.expect("an answer") });
    }
    // Two have places and two wait. The others are refused while those four are not answered.
    for _ in 0..4 {
        let answer = calls.join_next().await.expect("four are refused").expect("the task goes on");
        let body: Value = serde_json::from_slice(&answer.body).expect("an error is JSON");
        assert_eq!((answer.status, &body["error"]["code"]), (503, &json!("busy")));
    }
    app.engine.switch(|switches| switches.stall = false);
    while let Some(answer) = calls.join_next().await {
        assert_eq!(answer.expect("the task goes on").status, 200);
    }
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_answer_takes_bytes_from_the_budget_and_is_not_lost_without_room() {
    let config = "[limits]\nbody_bytes = 1048576\n[sessions]\nlisten = \"127.0.0.1:0\"\ninflight_bytes = 1048576";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    // As JSON, each character has six bytes.
    let long = "\u{1}".repeat(6_000);
    app.engine.switch(|switches| switches.context_tokens = 10_000_000);
    app.engine.script("Hello.", [Answer::text(&long)]);
    let (greedy, session) = (Session::open(&app, None).await, Session::open(&app, None).await);
    let unfinished = begin(&greedy.address, &greedy.head(), 1_000 << 10, (1_000 << 10) - 1).await;
    eventually("the unfinished body", || async { gauge(&app.metrics().await, "agent_call") == 1_000 << 10 }).await;
    // The engine answers and the call is recorded, but the answer finds no room before its client gives up.
    let answer = session.calls_with("x-stainless-read-timeout: 6\r\n", 100).await.answer().await.expect("an answer");
    assert_eq!(answer.status, 503);
    unfinished.reset();
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    let again = session.calls_with("x-stainless-retry-count: 1\r\n", 100).await.answer().await.expect("an answer");
    let body: Value = serde_json::from_slice(&again.body).expect("an answer is JSON");
    assert_eq!((again.status, &body["choices"][0]["message"]["content"]), (200, &json!(long)));
    eventually("whole budgets", || async { is_whole(&app.metrics().await) }).await;
    unharmed(app).await;
}
