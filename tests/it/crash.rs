//! `kill -9` of the real binary during concurrent posts: what was acknowledged is there, and nothing is torn.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};

use crate::support::{fresh_database, member, process::Service, text, with};

const CYCLES: usize = 6;
const GROUPS_PER_CYCLE: usize = 60;
const GROUP_SIZE: usize = 3;

/// What producers know: which rollouts they were told are stored.
type Acknowledged = Arc<Mutex<BTreeSet<String>>>;

fn count(acknowledged: &Acknowledged) -> usize {
    acknowledged.lock().expect("no producer panics").len()
}

/// Posts members of many groups, in pairs and alone, until the service is gone.
async fn produce(http: reqwest::Client, url: String, cycle: usize, lane: usize, acknowledged: Acknowledged) {
    for group in 0..GROUPS_PER_CYCLE {
        let name = format!("c{cycle}g{group}");
        let size = json!({"group_size": GROUP_SIZE});
        let bodies = if lane == 0 {
            vec![Value::Array((0..2).map(|index| with(member(&name, index, index as f64), size.clone())).collect())]
        } else {
            vec![with(member(&name, 2, 2.0), size.clone())]
        };
        for body in bodies {
            let Ok(response) = http.post(format!("{url}/trajectories")).json(&body).send().await else { return };
            assert!(response.status().is_success(), "{}", response.status());
            // Only a whole answer tells the producer anything.
            let Ok(receipts) = response.json::<Value>().await else { return };
            let mut acknowledged = acknowledged.lock().expect("no producer panics");
            let receipts = receipts.as_array().cloned().unwrap_or_else(|| vec![receipts]);
            acknowledged.extend(receipts.iter().map(|receipt| text(&receipt["rollout_id"]).to_owned()));
        }
    }
}

async fn survive(database: &str) {
    let http = reqwest::Client::new();
    let acknowledged = Acknowledged::default();
    for cycle in 0..CYCLES {
        let service = Service::start(database).await;
        let lanes = (0..2).map(|lane| {
            tokio::spawn(produce(http.clone(), service.url.clone(), cycle, lane, Arc::clone(&acknowledged)))
        });
        let lanes: Vec<_> = lanes.collect();
        // The moment moves on with the cycles; what it hits is up to the machine.
        let before = count(&acknowledged);
        crate::support::eventually("some posts", || async { count(&acknowledged) >= before + 3 + 11 * cycle }).await;
        service.kill().await;
        for lane in lanes {
            lane.await.expect("a producer only stops");
        }
    }
    let service = Service::start(database).await;
    let acknowledged = acknowledged.lock().expect("no producer panics").clone();
    check(&http, &service.url, &acknowledged).await;
    service.kill().await;
}

async fn check(http: &reqwest::Client, url: &str, acknowledged: &BTreeSet<String>) {
    assert!(acknowledged.len() > CYCLES, "the service was killed before it stored anything");
    for rollout_id in acknowledged {
        let url = format!("{url}/trajectories?rollout_id={rollout_id}");
        let response = http.get(url).send().await.expect("the service answers");
        assert_eq!(response.status(), 200, "{rollout_id} was acknowledged and is lost");
    }
    // Every complete group is delivered once, whole; a bundle is there whole or not at all.
    let mut delivered: BTreeMap<String, Vec<String>> = BTreeMap::new();
    loop {
        let batch = http.post(format!("{url}/batches")).json(&json!({})).send().await.expect("the service answers");
        if batch.status() == 204 {
            break;
        }
        let batch: Value = batch.json().await.expect("a descriptor");
        let rows = http.get(format!("{url}{}", text(&batch["samples_url"]))).send().await.expect("the service answers");
        for row in rows.text().await.expect("the stream ends well").lines() {
            let row: Value = serde_json::from_str(row).expect("every line is a row");
            let group = delivered.entry(text(&row["group_id"]).to_owned()).or_default();
            group.push(text(&row["rollout_id"]).to_owned());
        }
    }
    for (group, rollouts) in &delivered {
        let expected: BTreeSet<String> = (0..GROUP_SIZE).map(|index| format!("{group}-{index}")).collect();
        let found: BTreeSet<String> = rollouts.iter().cloned().collect();
        assert_eq!((rollouts.len(), found), (GROUP_SIZE, expected), "{group} is torn or delivered twice");
    }
    for rollout_id in acknowledged {
        let (group, _) = rollout_id.rsplit_once('-').expect("ids are group-index");
        let whole = (0..GROUP_SIZE).all(|index| acknowledged.contains(&format!("{group}-{index}")));
        assert!(!whole || delivered.contains_key(group), "{group} was acknowledged whole and is not delivered");
        let pair = [format!("{group}-0"), format!("{group}-1")].map(|id| acknowledged.contains(&id));
        assert_eq!(pair[0], pair[1], "a bundle of {group} is torn");
    }
    let stats: Value =
        http.get(format!("{url}/stats")).send().await.expect("the service answers").json().await.expect("JSON");
    assert_eq!(stats["conserved"], true, "{stats}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_kill_9_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    survive(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_kill_9_on_postgres() {
    survive(&fresh_database().await).await;
}
