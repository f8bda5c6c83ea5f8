//! The facade of slime's rollout buffer when its process is killed.

use std::path::Path;

use serde_json::{Value, json};

use super::start_process;
use crate::support::{fresh_database, process::Service, text};

/// A configuration with groups of two.
const CONFIG: &str = "[facades]\nslime = \"127.0.0.1:0\"\n[policy_defaults]\nrequire = []\ngroup = { size = 2 }\n";

async fn start(database: &str, folder: &Path) -> (Service, String) {
    start_process(database, folder, "slime", CONFIG).await
}

async fn post(url: &str, path: &str, body: Value) -> Value {
    let sent = crate::support::http().post(format!("{url}{path}")).json(&body).send().await;
    let answer = sent.expect("the facade answers");
    assert_eq!(answer.status(), 200);
    answer.json().await.expect("it is JSON")
}

async fn uids(url: &str) -> Vec<String> {
    let read = post(url, "/get_rollout_data", json!({})).await;
    let items = read["data"]["data"].as_array().expect("a read has items");
    items.iter().map(|item| text(&item["uid"]).to_owned()).collect()
}

async fn nothing_is_lost_by_a_kill(database: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let item = |uid: &str| json!({"uid": uid, "instance_id": "a", "messages": [], "reward": 1, "extra_info": {}});
    let (service, url) = start(database, folder.path()).await;
    post(&url, "/buffer/write", item("1")).await;
    service.kill().await;
    let (service, url) = start(database, folder.path()).await;
    // The answer to the first write was lost, and its producer repeats it.
    post(&url, "/buffer/write", item("1")).await;
    post(&url, "/buffer/write", item("2")).await;
    assert_eq!(uids(&url).await, ["1", "2"]);
    service.kill().await;
    let (service, url) = start(database, folder.path()).await;
    assert_eq!(post(&url, "/start_rollout", json!({})).await, json!({"message": "Rollout started"}));
    assert_eq!(uids(&url).await, ["1", "2"], "the read was not acked");
    service.kill().await;
    let (service, url) = start(database, folder.path()).await;
    assert_eq!(uids(&url).await, [""; 0], "the trainer went on, and its read acked the one before");
    post(&url, "/start_rollout", json!({})).await;
    assert_eq!(uids(&url).await, [""; 0]);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_between_read_and_ack_loses_nothing_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    nothing_is_lost_by_a_kill(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_between_read_and_ack_loses_nothing_on_postgres() {
    nothing_is_lost_by_a_kill(&fresh_database().await).await;
}
