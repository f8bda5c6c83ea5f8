//! Two replicas on one Postgres serve the same reads.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{count, item, read, read_as, uids, write, write_group};
use crate::{
    facades::Facade,
    support::{Backend, TestApp},
};

const CONFIG: &str = "[facades]\nslime = \"127.0.0.1:0\"";

/// Two replicas, whose groups are of two.
async fn replicas() -> (TestApp, TestApp) {
    let first = TestApp::start_with(Backend::Postgres, CONFIG).await;
    first.rules("default", json!({"require": [], "group": {"size": 2}, "settle": "ack"})).await;
    let second = first.replica().await;
    (first, second)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_at_one_replica_is_acked_by_the_next_read_at_the_other() {
    let (first, mut second) = replicas().await;
    for epoch in 1..=3 {
        // Each item of a group is written at another replica.
        write(&first, &item("task", &format!("{epoch}-0"), 1.0)).await;
        write(&second, &item("task", &format!("{epoch}-1"), 0.0)).await;
    }
    assert_eq!(read(&first).await, ["1-0", "1-1"], "one generation of an instance");
    assert_eq!((count(&first, "leased").await, count(&first, "checkpointed").await), (json!(2), json!(0)));
    assert_eq!(read(&second).await, ["2-0", "2-1"]);
    assert_eq!((count(&first, "leased").await, count(&first, "checkpointed").await), (json!(2), json!(2)));
    // A trainer that starts at one replica gets again what it has read at the other.
    Facade::of(&first, "slime").post("/start_rollout", &json!({})).await.expect(200);
    assert_eq!(count(&first, "leased").await, json!(0));
    assert_eq!(read(&first).await, ["2-0", "2-1"]);
    assert_eq!(read(&second).await, ["3-0", "3-1"]);
    assert_eq!(read(&first).await, [""; 0]);
    assert_eq!(count(&second, "checkpointed").await, json!(6));
    let steps = [first.story("1-0").await, first.story("2-0").await, first.story("3-0").await];
    assert_eq!(steps.map(|story| story["step"].clone()), [json!(0), json!(1), json!(2)]);
    second.stop().await;
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_reads_at_two_replicas_lose_and_repeat_nothing() {
    const GROUPS: usize = 40;
    let (first, mut second) = replicas().await;
    let app = |index: usize| if index.is_multiple_of(2) { &first } else { &second };
    let names: Vec<String> = (0..GROUPS).map(|index| format!("g{index}")).collect();
    let writes = names.iter().enumerate().map(|(index, name)| write_group(app(index), name));
    futures::future::join_all(writes).await;
    let mut read: BTreeMap<String, usize> = BTreeMap::new();
    let mut is_done = false;
    while !is_done {
        // Two consumers read at both replicas at once.
        let reads = (0..4).map(|index| {
            let consumer = if index < 2 { "/c/x" } else { "/c/y" };
            read_as(app(index), consumer, json!({"max_groups": 3}))
        });
        let reads: Vec<Value> = futures::future::join_all(reads).await;
        is_done = reads.iter().all(|read| uids(read).is_empty());
        for uid in reads.iter().flat_map(uids) {
            *read.entry(uid).or_default() += 1;
        }
    }
    let expected = names.iter().flat_map(|name| [(format!("{name}-0"), 1), (format!("{name}-1"), 1)]);
    assert_eq!(read, expected.collect());
    assert_eq!(count(&first, "checkpointed").await, json!(2 * GROUPS));
    second.stop().await;
    first.finish().await;
}
