//! Replicas: several services on one Postgres behave as one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use futures::StreamExt as _;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{
    Answer, Backend, TestApp, eventually, fresh_database, group, member, process::Service, rollout, text, with,
};

async fn two() -> (TestApp, TestApp) {
    let first = TestApp::start(Backend::Postgres).await;
    let second = first.replica().await;
    (first, second)
}

async fn finish(first: TestApp, mut second: TestApp) {
    second.stop().await;
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_duplicates_across_replicas_are_stored_once() {
    let (first, second) = two().await;
    first.rules("default", json!({"group": {"size": 3}})).await;
    for round in 0..10 {
        let name = format!("g{round}");
        let posts = (0..8).map(|index| {
            let app = if index % 2 == 0 { &first } else { &second };
            app.post("/trajectories", member(&name, 0, 1.0))
        });
        let answers = futures::future::join_all(posts).await;
        let created = answers.iter().filter(|answer| answer.status == 201).count();
        let repeated = answers.iter().filter(|answer| answer.status == 200).count();
        assert_eq!((created, repeated), (1, 7));
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_filled_through_both_replicas_are_decided_once() {
    let (first, second) = two().await;
    first.rules("default", json!({"group": {"size": 4}})).await;
    // Bundles share groups and name them in opposite orders: if locks were not taken in one fixed order, they would
    // deadlock.
    let bundle = |index: usize, reverse: bool| {
        let mut members: Vec<Value> = (0..5).map(|group| member(&format!("g{group}"), index, index as f64)).collect();
        if reverse {
            members.reverse();
        }
        Value::Array(members)
    };
    let posts = (0..8).map(|index| {
        let app = if index % 2 == 0 { &first } else { &second };
        app.post("/trajectories", bundle(index, index % 2 == 0))
    });
    let answers = futures::future::join_all(posts).await;
    let receipts = answers.iter().flat_map(|answer| answer.json.as_array().expect("a bundle was accepted"));
    let kept = receipts.filter(|receipt| receipt["verdict"] == "kept").count();
    assert_eq!(kept, 20);
    let page = first.get("/groups").await.expect(200);
    for group in page["groups"].as_array().expect("a page") {
        assert_eq!((&group["state"], &group["kept"], &group["late"]), (&json!("ready"), &json!(4), &json!(4)));
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_that_share_groups_never_deadlock() {
    let (first, second) = two().await;
    first.rules("default", json!({"group": {"size": 100}})).await;
    // The groups are open already, because two replicas that open the same group at once conflict and retry.
    let groups: Vec<String> = (0..8).map(|group| format!("g{group}")).collect();
    first.accept(groups.iter().map(|group| member(group, 0, 1.0)).collect()).await;
    let posts = (1..41).map(|index| {
        let mut members: Vec<Value> = groups.iter().map(|group| member(group, index, 1.0)).collect();
        if index % 2 == 0 {
            members.reverse();
        }
        let app = if index % 4 < 2 { &first } else { &second };
        app.post("/trajectories", Value::Array(members))
    });
    for answer in futures::future::join_all(posts).await {
        answer.expect(201);
    }
    // A deadlock costs the database a second and one of the transactions, which is then retried.
    for app in [&first, &second] {
        assert!(app.metrics().await.contains("\nforebay_commit_failures_total 0\n"), "transactions were sacrificed");
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_exclusive_and_fenced_across_replicas() {
    let (first, second) = two().await;
    first.accept(Value::Array((0..20).map(|index| rollout(&format!("r{index}"), 1.0)).collect())).await;
    let leases = (0..30).map(|index| {
        let app = if index % 2 == 0 { &first } else { &second };
        app.post("/batches", json!({}))
    });
    let answers = futures::future::join_all(leases).await;
    let granted: Vec<Value> = answers.into_iter().filter(|a| a.status == 201).map(|a| a.json).collect();
    let groups: BTreeSet<String> = futures::future::join_all(granted.iter().map(|batch| second.group_ids(batch)))
        .await
        .concat()
        .into_iter()
        .collect();
    assert_eq!((granted.len(), groups.len()), (20, 20));
    second.resume(None).await;
    first.ack(&granted[0], 1).await.refused(409, "lease-lost");
    let again = first.lease().await;
    second.ack(&again, 1).await.expect(200);
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_waiting_at_one_replica_gets_what_the_other_received() {
    let (first, second) = two().await;
    let waiting = first.post("/batches", json!({"wait_ms": 60_000}));
    let posting = async {
        eventually("a waiter", || async { first.metrics().await.contains("forebay_waiters 1") }).await;
        second.accept(group("g", &[1.0, 0.0])).await;
    };
    let (answer, ()) = tokio::join!(waiting, posting);
    let batch = answer.expect(201);
    assert_eq!(text(&second.batch(&batch).await["state"]), "leased");
    let waiting = first.get("/policies/default?wait_version_above=0&wait_ms=60000");
    let (answer, published) = tokio::join!(waiting, second.publish(1));
    published.expect(200);
    assert_eq!(answer.expect(200)["version"], 1);
    finish(first, second).await;
}

/// Waiters find work only when they are woken.
const NEVER_POLL: &str = "[limits]\nwaiter_poll_interval_ms = 3600000";

/// Sessions that listen, as a query.
macro_rules! listening {
    ($selected:literal) => {
        concat!(
            "SELECT ",
            $selected,
            " FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN \"forebay\"'"
        )
    };
}

/// Two replicas whose waiters do not find anything by polling.
async fn two_that_never_look() -> (TestApp, TestApp) {
    let first = TestApp::start_with(Backend::Postgres, NEVER_POLL).await;
    let second = first.replica().await;
    (first, second)
}

/// The answer to a request that waits, if the event happens only after it has begun to wait.
async fn woken_by<T>(
    app: &TestApp,
    waiting: impl Future<Output = Answer>,
    happening: impl Future<Output = T>,
) -> Value {
    let happening = async {
        eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1") }).await;
        happening.await
    };
    let both = async { tokio::join!(waiting, happening).0 };
    let answer = tokio::time::timeout(Duration::from_secs(30), both).await;
    answer.expect("the waiter is woken long before").json
}

/// The next batch of a trainer that has polled once and found nothing before the event.
fn batch_after<'a, T>(
    app: &'a TestApp,
    happening: impl Future<Output = T> + 'a,
) -> futures::future::LocalBoxFuture<'a, Value> {
    Box::pin(async move {
        let before = commits(app).await;
        let waiting = app.post("/batches", json!({"wait_ms": 60_000}));
        let happening = async {
            eventually("a look", || async { commits(app).await > before }).await;
            happening.await
        };
        woken_by(app, waiting, happening).await
    })
}

/// Number of transactions of a replica that may have written.
async fn commits(app: &TestApp) -> u64 {
    let metrics = app.metrics().await;
    let count = metrics.lines().find_map(|line| line.strip_prefix("forebay_commit_seconds_count "));
    count.and_then(|count| count.parse().ok()).expect("commits are counted")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_one_replica_wake_trainers_at_the_others() {
    let (first, second) = two_that_never_look().await;
    for name in ["a", "b", "c"] {
        let batch = batch_after(&second, first.accept(group(name, &[1.0, 0.0]))).await;
        assert_eq!(first.group_ids(&batch).await, [name]);
        let path = format!("/batches/{}/nack", text(&batch["batch_id"]));
        let again = batch_after(&second, first.post(&path, json!({"lease": batch["lease"]}))).await;
        assert_eq!(again["batch_id"], batch["batch_id"]);
        second.ack(&again, 1).await.expect(200);
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_waiting_trainer_is_woken_by_groups_that_became_ready_together_elsewhere() {
    let (first, second) = two_that_never_look().await;
    let waiting = (0..6).map(|_| second.post("/batches", json!({"wait_ms": 60_000})));
    let posting = async {
        eventually("six waiters", || async { second.metrics().await.contains("forebay_waiters 6") }).await;
        first.accept(Value::Array((0..6).map(|index| rollout(&format!("r{index}"), 1.0)).collect())).await;
    };
    let all = async { tokio::join!(futures::future::join_all(waiting), posting) };
    let (answers, ()) = tokio::time::timeout(Duration::from_secs(30), all).await.expect("they are woken long before");
    let batches: BTreeSet<String> =
        answers.into_iter().map(|answer| text(&answer.expect(201)["batch_id"]).to_owned()).collect();
    assert_eq!(batches.len(), 6);
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_of_one_replica_wakes_scorers_at_the_others() {
    let (first, second) = two_that_never_look().await;
    let scores = json!({"required": ["judge"], "work": {"judge": {}}});
    first.rules("default", json!({"group": {"size": 1}, "scores": scores})).await;
    let waiting = || second.post("/scores/leases", json!({"names": ["judge"], "wait_ms": 60_000}));
    let item = woken_by(&second, waiting(), first.accept(rollout("a", 1.0))).await["items"][0].clone();
    let failed = json!({"rollout_id": "a", "name": "judge", "failed": "no", "lease": item["lease"]});
    let again = woken_by(&second, waiting(), first.post("/scores", failed)).await["items"][0].clone();
    assert_eq!(again["attempt"], 2);
    let score = json!({"rollout_id": "a", "name": "judge", "value": 1.0, "lease": again["lease"]});
    assert_eq!(first.post("/scores", score).await.expect(201)["group"]["state"], "ready");
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_of_one_replica_wake_agents_at_the_others() {
    let (first, second) = two_that_never_look().await;
    for version in 1..6 {
        let path = format!("/policies/default?wait_version_above={}&wait_ms=60000", version - 1);
        let policy = woken_by(&second, second.get(&path), first.publish(version)).await;
        assert_eq!(policy["version"], version);
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_from_other_programs_do_no_harm() {
    const STRANGE: &str = "
        SELECT pg_notify('forebay', payload)
        FROM (VALUES
            (''),
            ('batch'),
            ('{\"batch\": 1}'),
            (repeat('x', 7999)),
            (gen_random_uuid() || ' batch ..'),
            (gen_random_uuid() || ' batch no-such-policy'),
            (gen_random_uuid() || ' version default'),
            (gen_random_uuid() || ' step default')
        ) AS strange (payload)";
    let (first, second) = two_that_never_look().await;
    for name in ["a", "b"] {
        let happening = async {
            assert_eq!(second.tamper(STRANGE).await, 8);
            first.accept(group(name, &[1.0, 0.0])).await
        };
        let batch = batch_after(&second, happening).await;
        assert_eq!(first.group_ids(&batch).await, [name]);
    }
    finish(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_catches_up_after_lost_notifications() {
    let (first, second) = two_that_never_look().await;
    for name in ["a", "b"] {
        let happening = async {
            eventually("two who listen", || async { first.tamper(listening!("pid")).await == 2 }).await;
            first.tamper(listening!("pg_terminate_backend(pid)")).await;
            first.accept(group(name, &[1.0, 0.0])).await
        };
        let batch = batch_after(&second, happening).await;
        assert_eq!(first.group_ids(&batch).await, [name]);
    }
    finish(first, second).await;
}

const GROUPS: usize = 40;
const GROUP_SIZE: usize = 3;

/// Processes of the real binary. Each of them may answer any call.
struct Fleet {
    http: reqwest::Client,
    urls: Vec<String>,
}

impl Fleet {
    /// Calls one process, and then the others in turn while none answers.
    async fn call(&self, process: usize, method: Method, path: &str, body: &Value) -> (StatusCode, String) {
        for url in self.urls.iter().cycle().skip(process).take(2 * self.urls.len()) {
            let request = self.http.request(method.clone(), format!("{url}{path}")).json(body);
            let Ok(response) = request.send().await else { continue };
            let status = response.status();
            // An answer that breaks off is no answer.
            let Ok(text) = response.text().await else { continue };
            return (status, text);
        }
        panic!("no process answers {path}")
    }

    /// Two producers post the same rollout through different processes. Returns how often it was new.
    async fn produce(&self, group: usize, index: usize) -> usize {
        let body = with(member(&format!("g{group}"), index, index as f64), json!({"group_size": GROUP_SIZE}));
        let post = |process: usize| self.call(process, Method::POST, "/trajectories", &body);
        let ((first, one), (second, other)) = tokio::join!(post(group + index), post(group + index + 1));
        assert!(first.is_success() && second.is_success(), "{one} {other}");
        usize::from(first == StatusCode::CREATED) + usize::from(second == StatusCode::CREATED)
    }

    /// Trains until every group has been trained. Returns what this trainer got, by group.
    async fn train(&self, process: usize, trained: &AtomicUsize) -> BTreeMap<String, Vec<String>> {
        let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for step in 1.. {
            if trained.load(Ordering::Relaxed) >= GROUPS {
                break;
            }
            // The `request_id` makes it safe to repeat the request at another process.
            let request = json!({"consumer": format!("t{process}"), "request_id": step.to_string(), "wait_ms": 500});
            let (status, batch) = self.call(process, Method::POST, "/batches", &request).await;
            if status == StatusCode::NO_CONTENT {
                continue;
            }
            let batch: Value = serde_json::from_str(&batch).expect("a descriptor");
            let (_, rows) = self.call(process + 1, Method::GET, text(&batch["samples_url"]), &Value::Null).await;
            for row in rows.lines() {
                let row: Value = serde_json::from_str(row).expect("every line is a row");
                groups.entry(text(&row["group_id"]).to_owned()).or_default().push(text(&row["rollout_id"]).to_owned());
            }
            let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
            let ack = json!({"lease": batch["lease"], "step": step});
            let (status, answer) = self.call(process, Method::POST, &path, &ack).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            trained.fetch_add(1, Ordering::Relaxed);
        }
        groups
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_are_one_service_and_one_of_them_may_be_killed() {
    let database = fresh_database().await;
    let (first, second) = tokio::join!(Service::start(&database), Service::start(&database));
    let fleet = Fleet { http: crate::support::http(), urls: vec![first.url.clone(), second.url.clone()] };
    let trained = AtomicUsize::new(0);
    let producing = futures::stream::iter(0..GROUPS * GROUP_SIZE)
        .map(|rollout| fleet.produce(rollout / GROUP_SIZE, rollout % GROUP_SIZE))
        .buffer_unordered(4)
        .collect::<Vec<usize>>();
    let killing = async {
        eventually("a third of the steps", || async { trained.load(Ordering::Relaxed) >= GROUPS / 3 }).await;
        first.kill().await;
    };
    let (created, (), mut groups, others) =
        tokio::join!(producing, killing, fleet.train(0, &trained), fleet.train(1, &trained));
    // A creation whose answer was lost by the kill is answered as a repeat when it is posted again.
    assert!(created.iter().all(|&times| times <= 1), "a rollout was stored twice");
    assert!(created.iter().sum::<usize>() >= GROUPS * GROUP_SIZE - 8, "more answers were lost than calls were open");
    for (group, rollouts) in others {
        assert!(groups.insert(group.clone(), rollouts).is_none(), "{group} was trained twice");
    }
    assert_eq!(groups.len(), GROUPS);
    for (group, rollouts) in &groups {
        let expected: BTreeSet<String> = (0..GROUP_SIZE).map(|index| format!("{group}-{index}")).collect();
        assert_eq!(
            (rollouts.len(), rollouts.iter().cloned().collect()),
            (GROUP_SIZE, expected),
            "{group} is not whole"
        );
    }
    let (_, stats) = fleet.call(1, Method::GET, "/stats", &Value::Null).await;
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    assert_eq!(stats["conserved"], true, "{stats}");
    second.kill().await;
}
