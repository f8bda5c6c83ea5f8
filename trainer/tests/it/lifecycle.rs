//! A trainer starts, takes over from another one, gives batches back, and stops.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::Request,
    http::{StatusCode, header},
    response::IntoResponse as _,
};
use forebay_client::wire::{BatchState, ResumeRequest, Trajectory};
use forebay_trainer::{
    config::{DeviceConfig, TrainConfig},
    service::ServiceError,
    train::{TrainError, train},
};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::support::{TestService, forward, record, recorded, tiny_model};

const POLICIES: &str = r"
    [policy_defaults]
    group = { size = 2 }
";

fn config(service: &TestService, output: PathBuf, steps: i64) -> TrainConfig {
    let mut config = TrainConfig::new(tiny_model(), output);
    config.server.clone_from(&service.url);
    config.steps = steps;
    config.device = DeviceConfig::Cpu;
    config
}

/// Trains on a thread of its own until `stop` is set.
fn start(config: TrainConfig, stop: &Arc<AtomicBool>) -> JoinHandle<Result<(), TrainError>> {
    let stop = Arc::clone(stop);
    tokio::task::spawn_blocking(move || train(&config, false, &|| stop.load(Ordering::Relaxed)))
}

async fn run(config: TrainConfig) -> Result<(), TrainError> {
    start(config, &Arc::default()).await.expect("the trainer does not panic")
}

fn steps_reported(output: &Path) -> usize {
    std::fs::read_to_string(output.join("metrics.jsonl")).map_or(0, |lines| lines.lines().count())
}

/// Waits until the condition holds. Fails after a deadline, so that a hang is a failure.
async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let looking = async {
        while !holds().await {
            tokio::task::yield_now().await;
        }
    };
    let limit = std::time::Duration::from_mins(1);
    tokio::time::timeout(limit, looking).await.unwrap_or_else(|_| panic!("waited in vain for {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_cannot_be_trained_is_given_back_by_name_and_the_others_go_on() {
    let service = TestService::start(POLICIES).await;
    let mut foreign: Vec<Trajectory> = (0..2).map(|member| recorded(0, member)).collect();
    // This token is not in the model's vocabulary.
    foreign[1].segments[0].tokens[0] = 1_000;
    service.client.post_bundle(&foreign).await.expect("the service does not know the vocabulary");
    for group in 1..3 {
        let bundle: Vec<Trajectory> = (0..2).map(|member| recorded(group, member)).collect();
        service.client.post_bundle(&bundle).await.expect("the bundle is accepted");
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    run(config(&service, folder.path().join("run"), 2)).await.expect("two groups can be trained");
    let page = service.client.groups("default", &[("state", "quarantined")]).await.expect("it answers");
    let ids: Vec<&str> = page.groups.iter().map(|group| group.group_id.as_str()).collect();
    assert_eq!(ids, ["g0"]);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_stops_when_another_takes_over() {
    let service = TestService::start(POLICIES).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let trainer = start(config(&service, folder.path().join("run"), 10), &Arc::default());
    let version = || async { service.client.policy("default").await.expect("it answers").expect("it exists").version };
    eventually("the trainer's first version", || async { version().await == 1 }).await;
    service.client.resume("default", &ResumeRequest::default()).await.expect("another trainer resumes");
    // A ready group wakes the first trainer's long poll. Its call is then refused because its epoch has ended.
    record(&service.client, 1, 2).await;
    let ended = trainer.await.expect("the trainer does not panic");
    assert!(matches!(ended, Err(TrainError::Service(ServiceError::Superseded(_)))), "{ended:?}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_lost_its_checkpoints_says_so() {
    let service = TestService::start(POLICIES).await;
    record(&service.client, 2, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    run(config(&service, folder.path().join("run"), 2)).await.expect("it trains");
    let ended = run(config(&service, folder.path().join("another"), 3)).await;
    assert!(matches!(ended, Err(TrainError::Service(ServiceError::LineageGap { .. }))), "{ended:?}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_is_told_to_stop_saves_and_goes_on_later() {
    let service = TestService::start(POLICIES).await;
    record(&service.client, 3, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = folder.path().join("run");
    let stop = Arc::new(AtomicBool::new(false));
    let trainer = start(config(&service, output.clone(), 5), &stop);
    eventually("three steps", || async { steps_reported(&output) == 3 }).await;
    stop.store(true, Ordering::Relaxed);
    trainer.await.expect("the trainer does not panic").expect("it ends well");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!((status.checkpoint_step, status.version_step), (Some(3), Some(3)));
    for group in 3..5 {
        let bundle: Vec<Trajectory> = (0..2).map(|member| recorded(group, member)).collect();
        service.client.post_bundle(&bundle).await.expect("the bundle is accepted");
    }
    run(config(&service, output.clone(), 5)).await.expect("it goes on");
    assert_eq!(steps_reported(&output), 5);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_has_one_trainer_at_a_time() {
    let service = TestService::start(POLICIES).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = folder.path().join("run");
    let stop = Arc::new(AtomicBool::new(false));
    let first = start(config(&service, output.clone(), 1), &stop);
    eventually("the first one's metrics", || async { output.join("metrics.jsonl").exists() }).await;
    let second = run(config(&service, output.clone(), 1)).await;
    assert!(matches!(second, Err(TrainError::Locked(_))), "{second:?}");
    stop.store(true, Ordering::Relaxed);
    first.await.expect("the trainer does not panic").expect("it ends well");
    service.stop().await;
}

/// A proxy to a service that the test may replace by another one.
async fn switchable(target: &Arc<Mutex<String>>) -> String {
    let (target, http) = (Arc::clone(target), crate::support::http());
    let pass = move |request: Request| {
        let (target, http) = (target.lock().expect("nobody panics").clone(), http.clone());
        async move { forward(&http, &target, request).await }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(pass)).await });
    url
}

/// What replaces the service after three steps, while the trainer stays alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// A service on a copy of the database that was made before the first step.
    Copy,
    /// A service on an empty database.
    Empty,
}

async fn goes_on_when_the_service(becomes: Becomes) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (database, copy) = (folder.path().join("f.db"), folder.path().join("copy.db"));
    let url = format!("sqlite:{}", database.display());
    let service = TestService::start_on(&url, POLICIES).await;
    record(&service.client, 3, 2).await;
    forebay_store::backup(&url, &copy, None).expect("a copy can be made");
    let target = Arc::new(Mutex::new(service.url.clone()));
    let output = folder.path().join("run");
    let mut config = config(&service, output.clone(), 4);
    config.server = switchable(&target).await;
    config.checkpoint.every = 1;
    let trainer = start(config, &Arc::default());
    eventually("three steps", || async { steps_reported(&output) == 3 }).await;
    service.stop().await;
    let service = match becomes {
        Becomes::Copy => {
            let now = forebay_domain::clock::Clock::now(&forebay_domain::clock::AnchoredClock::new());
            let metrics = forebay_telemetry::metrics::Metrics::new();
            forebay_store::restore(&url, &copy, now, metrics.store()).await.expect("the copy can be restored");
            TestService::start_on(&url, POLICIES).await
        }
        Becomes::Empty => {
            let service = TestService::start(POLICIES).await;
            record(&service.client, 1, 2).await;
            service
        }
    };
    target.lock().expect("nobody panics").clone_from(&service.url);
    trainer.await.expect("the trainer does not panic").expect("it goes on and ends well");
    assert_eq!(steps_reported(&output), 4, "{becomes:?}");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!((status.version_step, status.restored), (Some(4), false), "{becomes:?}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_goes_on_from_its_checkpoint_when_the_service_is_restored_from_a_copy() {
    goes_on_when_the_service(Becomes::Copy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_goes_on_from_its_checkpoint_when_the_service_has_forgotten_everything() {
    goes_on_when_the_service(Becomes::Empty).await;
}

/// A proxy that answers the first lease's extension with `lease-lost`, and delivers its samples only when the lease has
/// ended. It counts the acks.
async fn lost_lease(service: &TestService, acks: &Arc<AtomicUsize>) -> String {
    let client = service.client.clone();
    let (target, http, acks) = (service.url.clone(), crate::support::http(), Arc::clone(acks));
    let is_over = Arc::new(AtomicBool::new(false));
    let pass = move |request: Request| {
        let (client, target, http) = (client.clone(), target.clone(), http.clone());
        let (acks, is_over) = (Arc::clone(&acks), Arc::clone(&is_over));
        async move {
            let path = request.uri().path().to_owned();
            if path.ends_with("/extend") && !is_over.load(Ordering::SeqCst) {
                let problem = json!({"type": "lease-lost", "title": "The lease is lost", "status": 409});
                let kind = [(header::CONTENT_TYPE, "application/problem+json")];
                return (StatusCode::CONFLICT, kind, problem.to_string()).into_response();
            }
            if path.ends_with("/ack") {
                acks.fetch_add(1, Ordering::SeqCst);
            }
            if let Some(batch) = path.strip_prefix("/batches/").and_then(|rest| rest.strip_suffix("/samples")) {
                eventually("the end of the first lease", || async {
                    let batch = client.batch(batch).await.expect("it answers").expect("it exists");
                    is_over.load(Ordering::SeqCst) || batch.state == BatchState::Returned
                })
                .await;
                is_over.store(true, Ordering::SeqCst);
            }
            forward(&http, &target, request).await
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(pass)).await });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_whose_lease_is_known_to_be_lost_is_neither_computed_nor_acked() {
    let service = TestService::start("[policy_defaults]\ngroup = { size = 2 }\nlease = { ttl_s = 2 }").await;
    record(&service.client, 1, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let acks = Arc::new(AtomicUsize::new(0));
    let mut config = config(&service, folder.path().join("run"), 1);
    config.server = lost_lease(&service, &acks).await;
    config.data.lease_ttl_s = 2;
    run(config).await.expect("it trains");
    assert_eq!(acks.load(Ordering::SeqCst), 1, "an ack follows gradients, and the first delivery has none");
    service.stop().await;
}

/// A proxy that never lets a lease be extended, and delivers the first samples only when their lease has ended.
async fn slow_path(service: &TestService) -> String {
    let client = service.client.clone();
    let (target, http) = (service.url.clone(), crate::support::http());
    let held = Arc::new(AtomicBool::new(false));
    let pass = move |request: Request| {
        let (client, target, http, held) = (client.clone(), target.clone(), http.clone(), Arc::clone(&held));
        async move {
            let path = request.uri().path().to_owned();
            if path.ends_with("/extend") {
                return StatusCode::SERVICE_UNAVAILABLE.into_response();
            }
            if let Some(batch) = path.strip_prefix("/batches/").and_then(|rest| rest.strip_suffix("/samples"))
                && !held.swap(true, Ordering::Relaxed)
            {
                eventually("the end of the lease", || async {
                    let batch = client.batch(batch).await.expect("it answers").expect("it exists");
                    batch.state == BatchState::Returned
                })
                .await;
            }
            forward(&http, &target, request).await
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(pass)).await });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gradients_of_a_lost_lease_are_discarded_and_the_batch_is_trained_when_it_comes_back() {
    let service = TestService::start("[policy_defaults]\ngroup = { size = 2 }\nlease = { ttl_s = 2 }").await;
    record(&service.client, 1, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut config = config(&service, folder.path().join("run"), 1);
    config.server = slow_path(&service).await;
    config.data.lease_ttl_s = 2;
    run(config).await.expect("it trains");
    assert_eq!(steps_reported(&folder.path().join("run")), 1);
    let page = service.client.batches("default", &[]).await.expect("it answers");
    let [batch] = page.batches.as_slice() else { panic!("one batch was cut: {:?}", page.batches) };
    assert!(batch.attempt >= 2, "the first delivery was lost");
    assert_eq!((batch.state, batch.step), (BatchState::Checkpointed, Some(1)), "a later one was trained");
    service.stop().await;
}
