//! `kill -9` of the real binary during concurrent posts: acknowledged data is complete, and nothing is stored in part.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use serde_json::{Value, json};

use crate::support::{endure, fresh_database, member, process::Service, text, with};

const GROUPS_PER_CYCLE: usize = 60;
const GROUP_SIZE: usize = 3;

/// Rollouts that the service has acknowledged to the producers.
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
            // Only a complete answer acknowledges a post.
            let Ok(receipts) = response.json::<Value>().await else { return };
            let mut acknowledged = acknowledged.lock().expect("no producer panics");
            let receipts = receipts.as_array().cloned().unwrap_or_else(|| vec![receipts]);
            acknowledged.extend(receipts.iter().map(|receipt| text(&receipt["rollout_id"]).to_owned()));
        }
    }
}

async fn survive(database: &str, what: &str) {
    let http = crate::support::http();
    let acknowledged = Acknowledged::default();
    let mut random = StdRng::seed_from_u64(endure::seed());
    let (cycles, mut starts_ms) = (endure::size(25, 500), Vec::new());
    for cycle in 0..cycles {
        let started = Instant::now();
        let service = Service::start(database).await;
        starts_ms.push(started.elapsed().as_millis());
        let lanes = (0..2).map(|lane| {
            tokio::spawn(produce(http.clone(), service.url.clone(), cycle, lane, Arc::clone(&acknowledged)))
        });
        let lanes: Vec<_> = lanes.collect();
        // The moment is random, so the interrupted operation differs between runs.
        let enough = count(&acknowledged) + random.random_range(1..GROUPS_PER_CYCLE);
        crate::support::eventually("some posts", || async { count(&acknowledged) >= enough }).await;
        service.kill().await;
        for lane in lanes {
            lane.await.expect("a producer only stops");
        }
    }
    let service = Service::start(database).await;
    let acknowledged = acknowledged.lock().expect("no producer panics").clone();
    check(&http, &service.url, &acknowledged, cycles).await;
    service.kill().await;
    starts_ms.sort_unstable();
    let (median, worst) = (starts_ms[cycles / 2], starts_ms[cycles - 1]);
    let outcome = format!(
        "{} acknowledged rollouts: 0 lost, 0 duplicated, 0 torn; restart median {median} ms, longest {worst} ms",
        acknowledged.len()
    );
    endure::report(&format!("kill -9 at random moments, {what}"), cycles, &outcome);
}

async fn check(http: &reqwest::Client, url: &str, acknowledged: &BTreeSet<String>, cycles: usize) {
    assert!(acknowledged.len() >= cycles, "the service was killed before it stored anything");
    for rollout_id in acknowledged {
        let url = format!("{url}/trajectories?rollout_id={rollout_id}");
        let response = http.get(url).send().await.expect("the service answers");
        assert_eq!(response.status(), 200, "{rollout_id} was acknowledged and is lost");
    }
    // Every complete group is delivered once and whole; a bundle is stored completely or not at all.
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
async fn acknowledged_data_survives_kill_9_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    survive(&format!("sqlite:{}", folder.path().join("forebay.db").display()), "SQLite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_data_survives_kill_9_on_postgres() {
    survive(&fresh_database().await, "Postgres").await;
}
