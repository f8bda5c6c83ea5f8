//! The facade of Atropos when its process is killed.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::support::{CONFIG, scored, seeds, sequences};
use crate::{
    facades::start_process,
    support::{endure, eventually, fresh_database, process::Service},
};

/// Sequences of a group.
const GROUP_SIZE: usize = 2;

/// Sequences of a batch: two groups.
const BATCH_SIZE: usize = 4;

/// The most posts and reads of one life of the process.
const CALLS_PER_LIFE: usize = 40;

async fn start(database: &str, folder: &Path) -> (Service, String) {
    start_process(database, folder, "atropos", CONFIG).await
}

/// The answer to a call, or none if the process ended before all of it was sent.
async fn call(request: reqwest::RequestBuilder) -> Option<Value> {
    let answer = request.send().await.ok()?;
    let status = answer.status();
    let bytes = answer.bytes().await.ok()?;
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&bytes));
    // The number in the answer to a registration is larger than the JSON library can hold.
    Some(serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

async fn get(http: &reqwest::Client, url: &str, path: &str) -> Option<Value> {
    call(http.get(format!("{url}{path}"))).await
}

async fn post(http: &reqwest::Client, url: &str, path: &str, body: &Value) -> Option<Value> {
    call(http.post(format!("{url}{path}")).json(body)).await
}

async fn register(http: &reqwest::Client, url: &str) -> Option<Value> {
    let trainer = json!({
        "wandb_group": "g", "wandb_project": "p", "batch_size": BATCH_SIZE, "max_token_len": 512,
        "checkpoint_dir": "", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 1000,
    });
    post(http, url, "/register", &trainer).await
}

async fn batch(http: &reqwest::Client, url: &str) -> Option<Vec<i64>> {
    let answer = get(http, url, "/batch").await?;
    let groups = answer["batch"].as_array().cloned().unwrap_or_default();
    assert!(groups.is_empty() || sequences(&groups) == BATCH_SIZE, "{answer}");
    let found = seeds(&groups);
    for (group, seed) in groups.iter().zip(&found) {
        let sent = scored(usize::try_from(*seed).expect("seeds are not negative"), GROUP_SIZE);
        assert_eq!((&group["tokens"], &group["masks"]), (&sent["tokens"], &sent["masks"]), "group {seed} is as posted");
    }
    Some(found)
}

async fn a_run_goes_on_after_kills(database: &str) {
    let (folder, http) = (tempfile::tempdir().expect("a temporary folder can be made"), crate::support::http());
    let ours = json!({"max_token_length": 8, "desired_name": "math", "weight": 1, "group_size": 2});
    let (service, url) = start(database, folder.path()).await;
    register(&http, &url).await.expect("answered");
    assert_eq!(batch(&http, &url).await.expect("answered"), [0; 0]);
    let registered = post(&http, &url, "/register-env", &ours).await.expect("answered");
    assert_eq!(registered["env_id"], json!(0));
    post(&http, &url, "/scored_data", &scored(0, GROUP_SIZE)).await.expect("answered");
    service.kill().await;
    let (service, url) = start(database, folder.path()).await;
    assert_eq!(get(&http, &url, "/info").await.expect("answered"), json!({"batch_size": 4, "max_token_len": 512}));
    // The answer to the post may have been lost, so the environment repeats it.
    post(&http, &url, "/scored_data", &scored(0, GROUP_SIZE)).await.expect("answered");
    assert_eq!(get(&http, &url, "/status").await.expect("answered"), json!({"current_step": 0, "queue_size": 1}));
    for seed in 1..4 {
        post(&http, &url, "/scored_data", &scored(seed, GROUP_SIZE)).await.expect("answered");
    }
    assert_eq!(batch(&http, &url).await.expect("answered"), [0, 1]);
    service.kill().await;
    // The trainer ended as well. It registers, and gets again what it had not acked.
    let (service, url) = start(database, folder.path()).await;
    let registered = post(&http, &url, "/register-env", &ours).await.expect("answered");
    assert_eq!(registered["env_id"], json!(1), "the first environment is still registered");
    register(&http, &url).await.expect("answered");
    assert_eq!(batch(&http, &url).await.expect("answered"), [0, 1]);
    service.kill().await;
    // The trainer goes on, so its next read acks.
    let (service, url) = start(database, folder.path()).await;
    assert_eq!(batch(&http, &url).await.expect("answered"), [2, 3]);
    assert_eq!(get(&http, &url, "/status").await.expect("answered"), json!({"current_step": 2, "queue_size": 0}));
    assert_eq!(batch(&http, &url).await.expect("answered"), [0; 0]);
    register(&http, &url).await.expect("answered");
    assert_eq!(batch(&http, &url).await.expect("answered"), [0; 0], "everything was acked");
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_on_after_kills_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    a_run_goes_on_after_kills(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_on_after_kills_on_postgres() {
    a_run_goes_on_after_kills(&fresh_database().await).await;
}

/// What environments and the trainer know of a run.
#[derive(Default)]
struct Run {
    /// Groups that were posted and answered.
    acknowledged: BTreeSet<i64>,
    /// The groups of the batch that the trainer has read last.
    held: BTreeSet<i64>,
    /// Groups of earlier batches. They were acked, so they must not come again.
    done: BTreeSet<i64>,
    /// How many calls were answered.
    calls: usize,
    /// How many batches came again after a registration.
    repeated: usize,
}

impl Run {
    /// A batch arrives. Only the one that the trainer had not acked when it registered may come again, and whole.
    fn read(&mut self, groups: &[i64], has_registered: bool) {
        let found: BTreeSet<i64> = groups.iter().copied().collect();
        assert_eq!(found.len(), groups.len(), "a batch has a group twice: {groups:?}");
        let again: Vec<&i64> = found.intersection(&self.done).collect();
        assert!(again.is_empty(), "groups {again:?} come again after they were acked");
        if has_registered && found == self.held {
            self.repeated += usize::from(!found.is_empty());
            return;
        }
        assert!(found.is_disjoint(&self.held), "{found:?} has a part of {:?}", self.held);
        let acked = std::mem::replace(&mut self.held, found);
        self.done.extend(acked);
    }
}

type Shared = Arc<Mutex<Run>>;

fn calls(run: &Shared) -> usize {
    run.lock().expect("no client panics").calls
}

/// An environment, which posts a group again until the post is answered. Returns the group that was not answered.
async fn environment(http: reqwest::Client, url: String, run: Shared, mut seed: usize, lanes: usize) -> usize {
    while post(&http, &url, "/scored_data", &scored(seed, GROUP_SIZE)).await.is_some() {
        let mut run = run.lock().expect("no client panics");
        run.acknowledged.insert(i64::try_from(seed).expect("seeds are small"));
        run.calls += 1;
        seed += lanes;
    }
    seed
}

/// The trainer, which registers when it starts and reads until the process is gone, or until nothing is left.
async fn trainer(http: reqwest::Client, url: String, run: Shared, until_empty: bool) {
    if register(&http, &url).await.is_none() {
        return;
    }
    let mut has_registered = true;
    while let Some(groups) = batch(&http, &url).await {
        let mut run = run.lock().expect("no client panics");
        run.read(&groups, has_registered);
        run.calls += usize::from(!groups.is_empty());
        has_registered = false;
        if until_empty && groups.is_empty() {
            break;
        }
    }
}

async fn survive(database: &str, what: &str) {
    const LANES: usize = 2;
    let (folder, http) = (tempfile::tempdir().expect("a temporary folder can be made"), crate::support::http());
    let mut random = StdRng::seed_from_u64(endure::seed());
    let (run, kills) = (Shared::default(), endure::size(6, 100));
    // The group that each environment posts next.
    let mut next: Vec<usize> = (0..LANES).collect();
    for _ in 0..kills {
        let (service, url) = start(database, folder.path()).await;
        let environments: Vec<_> = (next.iter())
            .map(|&seed| tokio::spawn(environment(http.clone(), url.clone(), Arc::clone(&run), seed, LANES)))
            .collect();
        let trainer = tokio::spawn(trainer(http.clone(), url, Arc::clone(&run), false));
        // The moment is random, so the interrupted call differs between runs.
        let enough = calls(&run) + random.random_range(1..CALLS_PER_LIFE);
        eventually("some posts and reads", || async { calls(&run) >= enough }).await;
        service.kill().await;
        trainer.await.expect("the trainer only stops");
        let ended = futures::future::join_all(environments).await;
        next = ended.into_iter().map(|seed| seed.expect("an environment only stops")).collect();
    }
    let (service, url) = start(database, folder.path()).await;
    // The posts that were not answered are repeated, and another group fills the last batch.
    let mut last = next.clone();
    let posted: usize = next.iter().enumerate().map(|(lane, seed)| (seed - lane) / LANES + 1).sum();
    last.extend((!posted.is_multiple_of(BATCH_SIZE / GROUP_SIZE)).then_some(next[0] + LANES));
    for seed in last {
        post(&http, &url, "/scored_data", &scored(seed, GROUP_SIZE)).await.expect("answered");
        run.lock().expect("no client panics").acknowledged.insert(i64::try_from(seed).expect("seeds are small"));
    }
    trainer(http.clone(), url, Arc::clone(&run), true).await;
    let stats: Value = call(http.get(format!("{}/stats", service.url))).await.expect("answered");
    assert_eq!(stats["conserved"], true, "{stats}");
    assert!(service.stop().await.success());
    let run = run.lock().expect("no client panics");
    assert!(run.held.is_empty(), "the last read acks");
    assert_eq!(run.done, run.acknowledged, "acknowledged groups are read, and no others");
    let outcome = format!(
        "{} acknowledged groups: 0 lost, 0 after their ack; {} batches came again",
        run.done.len(),
        run.repeated
    );
    endure::report(&format!("kill -9 of a run of Atropos, {what}"), kills, &outcome);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_between_posts_and_batches_lose_and_repeat_nothing_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    survive(&format!("sqlite:{}", folder.path().join("forebay.db").display()), "SQLite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_between_posts_and_batches_lose_and_repeat_nothing_on_postgres() {
    survive(&fresh_database().await, "Postgres").await;
}
