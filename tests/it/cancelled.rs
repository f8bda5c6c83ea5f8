//! Clients that disconnect at any moment: no transaction stays open, no wake-up is lost, and no batch is lost.
//!
//! The moments are random; `FOREBAY_SEED` sets the seed.

use std::{collections::BTreeMap, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use sqlx::{Connection as _, Row as _};

use crate::support::{Backend, TestApp, endure, eventually, group, on_both_stores, rollout, text, with};

/// Number of requests that one test aborts.
const ABORTED: usize = 2_000;

/// Number of concurrent requests.
const CONCURRENT: usize = 50;

/// The longest life of a request in the first round. It doubles after each round in which no post was answered.
const LONGEST_LIFE: Duration = Duration::from_millis(200);

/// Number of decades below the longest life over which lives are distributed: some requests end before they are read,
/// others after they are answered.
const LIFE_DECADES: f64 = 3.3;

/// Number of scrapes after which a waiter counts as waiting and not as being answered.
const SCRAPES: usize = 40;

/// The poll interval is so long that waiters find work only when they are woken.
const NEVER_POLL: &str = "[limits]\nwaiter_poll_interval_ms = 3600000";

fn seeded() -> StdRng {
    StdRng::seed_from_u64(endure::seed())
}

/// What a client knows when it disconnects.
#[derive(Default)]
struct Seen {
    /// Rollouts that were acknowledged.
    stored: Vec<String>,
    /// Batches that were leased.
    leased: Vec<Value>,
}

/// One request of a random kind.
fn any_request(app: &TestApp, random: &mut StdRng, index: usize, leased: &Value) -> reqwest::RequestBuilder {
    let post = |path: &str, body: Value| app.http.post(format!("{}{path}", app.url)).json(&body);
    let batch = text(&leased["batch_id"]);
    let get = |path: &str| app.http.get(format!("{}{path}", app.url));
    match random.random_range(0..12) {
        0..4 => post("/trajectories", group(&format!("g{index}"), &[1.0, 0.0])),
        4 => post("/trajectories", with(rollout(&format!("s{index}"), 1.0), json!({"policy": "single"}))),
        5 => {
            let lines: Vec<String> = (0..3)
                .map(|line| with(rollout(&format!("b{index}-{line}"), 1.0), json!({"policy": "single"})).to_string())
                .collect();
            let bulk = app.http.post(format!("{}/trajectories", app.url)).body(lines.join("\n"));
            bulk.header("content-type", "application/x-ndjson")
        }
        6 => post("/batches", json!({"wait_ms": 60_000, "policy": "single"})),
        7 => post("/batches", json!({"wait_ms": 60_000})),
        8 => post(&format!("/batches/{batch}/extend"), json!({"lease": leased["lease"], "ttl_s": 60})),
        9 => post(&format!("/batches/{batch}/ack"), json!({"lease": leased["lease"], "step": 1})),
        10 => get(text(&leased["samples_url"])),
        _ => get("/policies/default?wait_version_above=1000&wait_ms=60000"),
    }
}

/// Runs requests and drops each after a random time.
async fn abort_many(app: &TestApp, random: &mut StdRng, leased: &Value) -> Seen {
    let mut seen = Seen::default();
    let mut longest = LONGEST_LIFE;
    for start in (0..ABORTED).step_by(CONCURRENT) {
        let requests = (start..start + CONCURRENT).map(|index| {
            let life = longest.mul_f64(10_f64.powf(-random.random_range(0.0..LIFE_DECADES)));
            let request = any_request(app, random, index, leased);
            async move { tokio::time::timeout(life, read(request)).await.ok().flatten() }
        });
        let stored_before = seen.stored.len();
        for answer in futures::future::join_all(requests).await.into_iter().flatten() {
            for receipt in answer.as_array().unwrap_or(&vec![answer.clone()]) {
                if let Some(id) = receipt.get("rollout_id").and_then(Value::as_str) {
                    seen.stored.push(format!("{}/{id}", text(&receipt["policy"])));
                }
            }
            if answer.get("lease").is_some_and(Value::is_string) {
                seen.leased.push(answer);
            }
        }
        if seen.stored.len() == stored_before {
            // The machine is so busy that no request is answered within the longest life.
            longest *= 2;
        }
        database_comes_to_rest(app).await;
    }
    seen
}

/// Returns the answer of a request, if it arrives complete and reports that something was done.
async fn read(request: reqwest::RequestBuilder) -> Option<Value> {
    let response = request.send().await.ok()?;
    let (status, body) = (response.status(), response.bytes().await.ok()?);
    assert!(status.as_u16() < 500, "{status}: {}", String::from_utf8_lossy(&body));
    if !status.is_success() {
        return None;
    }
    serde_json::from_slice(&body).ok()
}

async fn idle(app: &TestApp) {
    eventually("an idle service", || async {
        let metrics = app.metrics().await;
        let shows = |line: &str| metrics.lines().any(|found| found == line);
        shows("forebay_body_bytes_in_flight 0") && shows("forebay_requests_in_flight 1") && shows("forebay_waiters 0")
    })
    .await;
}

/// Checks that aborted requests left nothing open in the database. The check uses its own connection, because using one
/// of the service's connections would end an open transaction on it.
async fn database_comes_to_rest(app: &TestApp) {
    if app.database.starts_with("sqlite") {
        let mut connection = sqlx::SqliteConnection::connect(&app.database).await.expect("the file opens");
        let connection = tokio::sync::Mutex::new(&mut connection);
        eventually("a log that nobody holds", || async {
            // The log can be truncated only if no reader holds a snapshot and no writer a lock.
            let mut connection = connection.lock().await;
            let row = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut **connection).await;
            row.is_ok_and(|row| row.get::<i64, _>(0) == 0)
        })
        .await;
        return;
    }
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let left = "SELECT
            (SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'forebay' AND xact_start IS NOT NULL)
            + (SELECT count(*) FROM pg_locks
            JOIN pg_stat_activity USING (pid)
            WHERE datname = current_database() AND application_name = 'forebay')";
    let connection = tokio::sync::Mutex::new(&mut connection);
    eventually("an end of all transactions and locks", || async {
        let mut connection = connection.lock().await;
        sqlx::query_scalar::<_, i64>(left).fetch_one(&mut **connection).await.expect("the catalog answers") == 0
    })
    .await;
}

/// Leases every ready batch and counts how often each rollout was delivered.
async fn drain(app: &TestApp) -> BTreeMap<String, usize> {
    let mut delivered = BTreeMap::new();
    for policy in ["default", "single"] {
        loop {
            let answer = app.post("/batches", json!({"policy": policy})).await;
            if answer.status == 204 {
                break;
            }
            let batch = answer.expect(201);
            for row in app.samples(&batch).await {
                *delivered.entry(format!("{policy}/{}", text(&row["rollout_id"]))).or_default() += 1;
            }
        }
    }
    delivered
}

on_both_stores! {
    async fn requests_aborted_at_any_moment_leave_nothing_behind(app: TestApp) {
        let mut random = seeded();
        app.rules("single", json!({"lease": {"ttl_s": 60}})).await;
        app.rules("default", json!({"group": {"size": 2}, "lease": {"ttl_s": 60}})).await;
        app.accept(group("first", &[1.0, 0.0])).await;
        let first = app.lease().await;
        let seen = abort_many(app, &mut random, &first).await;
        assert!(seen.stored.len() > 50 && seen.stored.len() < 3 * ABORTED, "{} of {ABORTED}", seen.stored.len());
        idle(app).await;
        // A request that was sent and not answered may still be in progress in the store.
        app.accept(with(rollout("last", 1.0), json!({"policy": "single"}))).await;
        database_comes_to_rest(app).await;
        app.check_books().await;

        for id in &seen.stored {
            let (policy, rollout_id) = id.split_once('/').expect("ids are policy/rollout");
            app.get(&format!("/trajectories?policy={policy}&rollout_id={rollout_id}")).await.expect(200);
        }
        // Leases whose answers were lost expire, and their batches come back.
        app.pass_s(24.0 * 3_600.0).await;
        let delivered = drain(app).await;
        for (id, times) in &delivered {
            assert_eq!(*times, 1, "{id} was delivered more than once");
        }
        for id in seen.stored.iter().filter(|id| !id.starts_with("default/first")) {
            assert!(delivered.contains_key(id), "{id} was acknowledged and is not delivered");
        }
        // Every group is delivered whole: both of its rollouts or neither.
        for id in delivered.keys() {
            if let Some(group) = id.strip_prefix("default/").and_then(|id| id.strip_suffix("-0")) {
                assert!(delivered.contains_key(&format!("default/{group}-1")), "{group} is torn");
            }
        }
    }
}

/// Waiters disconnect around the moment at which a group becomes ready. One waiter stays and must get the group.
async fn the_waiter_that_stays_gets_the_batch(backend: Backend) {
    let app = TestApp::start_with(backend, NEVER_POLL).await;
    let mut random = seeded();
    app.rules("default", json!({"lease": {"ttl_s": 60, "max_deliveries": 1000}})).await;
    let lease = || {
        let request = app.http.post(format!("{}/batches", app.url)).json(&json!({"wait_ms": 60_000}));
        async move { request.send().await.expect("the server answers").json::<Value>().await.expect("a batch") }
    };
    for round in 0..60 {
        // The waiters that came first are woken first.
        let moments: Vec<u64> = (0..4).map(|_| random.random_range(0..15_000)).collect();
        let vanishing: Vec<_> = moments.iter().map(|_| tokio::spawn(lease())).collect();
        eventually("the first", || async { app.metrics().await.contains("forebay_waiters 4\n") }).await;
        let staying = tokio::spawn(lease());
        eventually("the last", || async { app.metrics().await.contains("forebay_waiters 5\n") }).await;
        let post = app.accept(rollout(&format!("r{round}"), 1.0));
        let vanish = futures::future::join_all(vanishing.into_iter().zip(moments).map(|(waiter, moment)| async move {
            tokio::time::sleep(Duration::from_micros(moment)).await;
            waiter.abort();
            waiter.await.ok()
        }));
        let (_, vanished) = tokio::join!(post, vanish);
        if let Some(batch) = vanished.into_iter().flatten().next() {
            // A waiter was answered before it could disconnect, so it holds the batch. The next group is for the waiter
            // that stays.
            app.ack(&batch, round + 1).await.expect(200);
            app.accept(rollout(&format!("r{round}-next"), 1.0)).await;
        }
        let mut staying = staying;
        let patience = Duration::from_mins(2);
        let batch = tokio::time::timeout(patience, async {
            tokio::select! {
                batch = &mut staying => batch,
                // The waiter that was woken disconnected between the claim of the batch and its answer.
                () = granted_to_nobody(&app) => {
                    app.pass_s(61.0).await;
                    staying.await
                }
            }
        });
        let batch = batch.await.expect("a wake-up was lost").expect("the waiter only waits");
        app.ack(&batch, round + 1).await.expect(200);
    }
    idle(&app).await;
    app.finish().await;
}

/// Waiters disconnect before a group becomes ready. The batch goes to the waiter that stays, and never to one of them.
async fn the_waiters_that_left_get_nothing(backend: Backend) {
    let app = TestApp::start_with(backend, NEVER_POLL).await;
    let lease = || {
        let request = app.http.post(format!("{}/batches", app.url)).json(&json!({"wait_ms": 60_000}));
        tokio::spawn(async move { request.send().await.expect("the server answers").json::<Value>().await })
    };
    for round in 0..10 {
        // The waiters that came first are woken first.
        let leaving: Vec<_> = (0..4).map(|_| lease()).collect();
        eventually("the first", || async { app.metrics().await.contains("forebay_waiters 4\n") }).await;
        let mut staying = lease();
        eventually("the last", || async { app.metrics().await.contains("forebay_waiters 5\n") }).await;
        leaving.iter().for_each(tokio::task::JoinHandle::abort);
        eventually("the one that stays", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
        app.accept(rollout(&format!("r{round}"), 1.0)).await;
        let batch = tokio::select! {
            batch = &mut staying => batch.expect("the waiter only waits").expect("a batch"),
            () = granted_to_nobody(&app) => panic!("a batch was leased to a waiter that had left"),
        };
        app.ack(&batch, round + 1).await.expect(200);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_left_get_nothing_on_sqlite() {
    the_waiters_that_left_get_nothing(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_left_get_nothing_on_postgres() {
    the_waiters_that_left_get_nothing(Backend::Postgres).await;
}

/// Returns when no group is ready any more although the waiter still waits.
async fn granted_to_nobody(app: &TestApp) {
    let mut scrapes = 0;
    while scrapes < SCRAPES {
        let waits = app.metrics().await.contains("forebay_waiters 1\n");
        let policy = app.get("/policies/default").await.expect(200);
        let gone = policy["waiting"]["ready_groups"] == 0;
        scrapes = if waits && gone { scrapes + 1 } else { 0 };
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_disconnects_loses_no_batch_on_sqlite() {
    the_waiter_that_stays_gets_the_batch(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_disconnects_loses_no_batch_on_postgres() {
    the_waiter_that_stays_gets_the_batch(Backend::Postgres).await;
}

/// Producers disconnect around their commit; the waiting trainer must be woken all the same.
async fn a_vanished_post_wakes(backend: Backend) {
    let app = TestApp::start_with(backend, NEVER_POLL).await;
    let mut random = seeded();
    for round in 0..60 {
        let request = app.http.post(format!("{}/batches", app.url)).json(&json!({"wait_ms": 60_000}));
        let waiter =
            tokio::spawn(async move { request.send().await.expect("the server answers").json::<Value>().await });
        eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
        let id = format!("r{round}");
        let life = Duration::from_micros(random.random_range(500..8_000));
        let _ = tokio::time::timeout(life, app.post("/trajectories", rollout(&id, 1.0))).await;
        eventually("the post's end", || async { app.metrics().await.contains("forebay_body_bytes_in_flight 0\n") })
            .await;
        if app.get(&format!("/trajectories?rollout_id={id}")).await.status == 404 {
            // The producer disconnected before its post was read, so this post is for the waiter. A repeated post wakes
            // nobody.
            app.post("/trajectories", rollout(&id, 1.0)).await;
        }
        let batch = tokio::time::timeout(Duration::from_mins(2), waiter).await.expect("a wake-up was lost");
        let batch = batch.expect("the waiter only waits").expect("a batch");
        app.ack(&batch, round + 1).await.expect(200);
    }
    idle(&app).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_whose_client_disconnects_still_wakes_waiters_on_sqlite() {
    a_vanished_post_wakes(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_whose_client_disconnects_still_wakes_waiters_on_postgres() {
    a_vanished_post_wakes(Backend::Postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_waiter_passes_its_wake_up_to_the_next() {
    let app = TestApp::start_with(Backend::Sqlite, NEVER_POLL).await;
    let epoch = app.resume(None).await["epoch"].clone();
    let lease = |body: Value| {
        let request = app.http.post(format!("{}/batches", app.url)).json(&body);
        tokio::spawn(async move { request.send().await.expect("the server answers").status().as_u16() })
    };
    let zombie = lease(json!({"wait_ms": 60_000, "epoch": epoch}));
    eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
    // The new epoch is written directly to the store, so the superseded waiter is not woken by it.
    let superseded = "UPDATE policy SET epoch = epoch + 1";
    assert_eq!(app.tamper(superseded).await, 1);
    let trainer = lease(json!({"wait_ms": 60_000}));
    eventually("the next", || async { app.metrics().await.contains("forebay_waiters 2\n") }).await;
    app.accept(rollout("a", 1.0)).await;
    assert_eq!(zombie.await.expect("the task ends"), 409);
    let woken = tokio::time::timeout(Duration::from_mins(2), trainer).await.expect("a wake-up was lost");
    assert_eq!(woken.expect("the task ends"), 201);
    app.finish().await;
}
