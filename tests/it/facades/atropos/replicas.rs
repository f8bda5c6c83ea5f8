//! Two replicas on one Postgres serve one run.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::support::{CONFIG, batch, get, post, scored, seeds, sequences};
use crate::support::{Backend, TestApp, with};

async fn register(app: &TestApp, batch_size: u32) {
    let trainer = json!({
        "wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 512, "checkpoint_dir": "",
        "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 1000,
    });
    let request = app.http.post(format!("{}/register", app.facades["atropos"])).json(&trainer);
    assert_eq!(request.send().await.expect("answered").status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_serve_one_run() {
    let first = TestApp::start_with(Backend::Postgres, CONFIG).await;
    let mut second = first.replica().await;
    register(&first, 4).await;
    assert_eq!(get(&second, "/batch").await, json!({"batch": null}));
    let environment = |name: &str| json!({"max_token_length": 8, "desired_name": name, "weight": 1, "group_size": 4});
    // Concurrent registrations get different ids.
    let registered = (0..8_u32).map(|index| {
        let app = if index.is_multiple_of(2) { &first } else { &second };
        post(app, "/register-env", environment("e"))
    });
    let registered = futures::future::join_all(registered).await;
    let ids: BTreeSet<i64> = registered.iter().filter_map(|answer| answer["env_id"].as_i64()).collect();
    let names: BTreeSet<String> = registered.iter().map(|answer| answer["wandb_name"].to_string()).collect();
    assert_eq!((ids, names.len()), ((0..8).collect(), 8));
    let odd = |seed: usize, size: usize| with(scored(seed, size), json!({"env_id": 0}));
    assert_eq!(post(&first, "/scored_data", odd(0, 3)).await["buffer_size"], json!(3));
    assert_eq!(post(&second, "/scored_data", odd(1, 1)).await["buffer_size"], json!(0));
    assert_eq!(seeds(&batch(&first).await), [0, 1]);
    assert!(batch(&second).await.is_empty(), "acked at the other replica");
    assert_eq!(get(&first, "/status").await, json!({"current_step": 1, "queue_size": 0}));
    // A retry at the other replica is recognised, because the first one may not have answered.
    post(&first, "/scored_data", odd(2, 4)).await;
    post(&second, "/scored_data", odd(2, 4)).await;
    assert_eq!(get(&first, "/status").await["queue_size"], json!(1));
    second.stop().await;
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_posts_and_reads_lose_and_repeat_nothing() {
    let first = TestApp::start_with(Backend::Postgres, CONFIG).await;
    let mut second = first.replica().await;
    register(&first, 8).await;
    let app = |index: usize| if index.is_multiple_of(2) { &first } else { &second };
    futures::future::join_all((0..64).map(|seed| post(app(seed), "/scored_data", scored(seed, 2)))).await;
    let mut read: Vec<Value> = Vec::new();
    while read.len() < 64 {
        // Reads of one consumer ack each other, but they never get the same batch.
        for batch in futures::future::join_all((0..4_usize).map(|index| batch(app(index)))).await {
            assert!(batch.is_empty() || sequences(&batch) == 8);
            read.extend(batch);
        }
    }
    let distinct: BTreeSet<i64> = seeds(&read).into_iter().collect();
    assert_eq!((read.len(), distinct.len()), (64, 64));
    second.stop().await;
    first.finish().await;
}
