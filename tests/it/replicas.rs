//! Replicas: two processes' worth of service on one Postgres behave as one.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{Backend, TestApp, group, member, rollout, text};

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
    // Bundles that share groups, named in opposite orders: locks taken in any other than one order would meet.
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
        crate::support::eventually("a waiter", || async { first.metrics().await.contains("forebay_waiters 1") }).await;
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
