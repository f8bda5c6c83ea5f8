//! Inference engines: calls are made in the right order, failed calls are repeated, no engine stays paused, and nothing
//! waits for an engine that has failed.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, http::StatusCode, http::Uri};
use forebay_trainer::{
    config::{DeviceConfig, TrainConfig},
    engine::{EngineConfig, EngineKind, Engines, PauseMode},
    train::train,
};
use serde_json::Value;
use tokio::{net::TcpListener, runtime::Handle};

use crate::support::{TestService, record, tiny_model};

/// Longer than any test runs.
const LONG: Duration = Duration::from_mins(2);

/// What a stand-in for an engine does instead of succeeding.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The engine answers with status 500.
    Fails,
    /// The engine answers that the weights do not fit its model.
    Refuses,
    /// The engine accepts the call and never answers.
    Hangs,
}

#[derive(Default)]
struct Calls {
    made: Vec<(String, Value)>,
    /// Path, number of calls that fail, and the fault.
    faults: Vec<(&'static str, usize, Fault)>,
    is_paused: bool,
    version: Option<i64>,
}

/// A server with the interface of `SGLang`, and with the faults that a test chooses.
struct StandIn {
    url: String,
    calls: Arc<Mutex<Calls>>,
}

impl StandIn {
    async fn start(faults: Vec<(&'static str, usize, Fault)>) -> Self {
        let calls = Arc::new(Mutex::new(Calls { faults, ..Calls::default() }));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}/", listener.local_addr().expect("a listener has an address"));
        let router = Router::new().fallback(answer).with_state(Arc::clone(&calls));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, calls }
    }

    fn config(&self, timeout_s: u64) -> EngineConfig {
        EngineConfig { timeout_s, ..EngineConfig::new(EngineKind::Sglang, self.url.clone()) }
    }

    fn engines(&self, timeout_s: u64) -> Engines {
        Engines::with_pause(&Handle::current(), vec![self.config(timeout_s)], Duration::from_millis(1))
            .expect("the engine has no key")
    }

    fn look<T>(&self, read: impl FnOnce(&Calls) -> T) -> T {
        read(&self.calls.lock().expect("no call panics"))
    }

    fn paths(&self) -> Vec<String> {
        self.look(|calls| calls.made.iter().map(|(path, _)| path.clone()).collect())
    }

    fn state(&self) -> (Option<i64>, bool) {
        self.look(|calls| (calls.version, calls.is_paused))
    }
}

async fn answer(State(calls): State<Arc<Mutex<Calls>>>, uri: Uri, body: Bytes) -> (StatusCode, String) {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let fault = {
        let mut calls = calls.lock().expect("no call panics");
        calls.made.push((uri.path().to_owned(), body.clone()));
        // An engine may be paused although its answer is lost.
        match uri.path() {
            "/pause_generation" => calls.is_paused = true,
            "/continue_generation" if calls.faults.iter().all(|(path, left, _)| *path != uri.path() || *left == 0) => {
                calls.is_paused = false;
            }
            _ => {}
        }
        let fault = calls.faults.iter_mut().find(|(path, left, _)| *path == uri.path() && *left > 0);
        let fault = fault.map(|(_, left, fault)| {
            *left -= 1;
            *fault
        });
        if let (None, Some(version)) = (fault, body["weight_version"].as_str()) {
            calls.version = version.parse().ok();
        }
        fault
    };
    match fault {
        None => (StatusCode::OK, r#"{"success": true, "message": "ok"}"#.to_owned()),
        Some(Fault::Fails) => (StatusCode::INTERNAL_SERVER_ERROR, String::new()),
        Some(Fault::Refuses) => (StatusCode::OK, r#"{"success": false, "message": "shapes differ"}"#.to_owned()),
        Some(Fault::Hangs) => std::future::pending().await,
    }
}

#[tokio::test]
async fn an_engine_is_paused_flushed_loaded_and_continued() {
    let engine = StandIn::start(Vec::new()).await;
    let engines = engine.engines(60);
    engines.load(Path::new("/runs/v000007"), 7, LONG).await;
    engines.settle(LONG).await;
    let expected = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"];
    assert_eq!(engine.paths(), expected);
    let weights = engine.look(|calls| calls.made[2].1.clone());
    assert_eq!(weights, serde_json::json!({"model_path": "/runs/v000007", "weight_version": "7"}));
    assert_eq!(engine.look(|calls| calls.made[0].1.clone()), serde_json::json!({"mode": "abort"}));
}

#[tokio::test]
async fn requests_that_keep_their_caches_are_paused_in_place_and_nothing_is_flushed() {
    let engine = StandIn::start(Vec::new()).await;
    let config = EngineConfig { pause: PauseMode::InPlace, ..engine.config(60) };
    let engines = Engines::with_pause(&Handle::current(), vec![config], Duration::from_millis(1));
    let engines = engines.expect("the engine has no key");
    engines.load(Path::new("/runs/v000007"), 7, LONG).await;
    engines.settle(LONG).await;
    assert_eq!(engine.paths(), ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]);
    assert_eq!(engine.look(|calls| calls.made[0].1.clone()), serde_json::json!({"mode": "in_place"}));
}

#[tokio::test]
async fn a_call_that_fails_is_made_again() {
    let engine = StandIn::start(vec![("/flush_cache", 2, Fault::Fails)]).await;
    engine.engines(60).load(Path::new("/runs/v000001"), 1, LONG).await;
    assert_eq!(engine.paths().iter().filter(|path| *path == "/flush_cache").count(), 3);
    assert_eq!(engine.state(), (Some(1), false));
}

#[tokio::test]
async fn an_engine_that_cannot_load_is_continued_with_its_old_weights() {
    let engine = StandIn::start(vec![("/update_weights_from_disk", 1, Fault::Refuses)]).await;
    let engines = engine.engines(60);
    engines.load(Path::new("/runs/v000001"), 1, LONG).await;
    engines.settle(LONG).await;
    assert_eq!(engine.state(), (None, false));
    assert_eq!(engine.paths().iter().filter(|path| *path == "/update_weights_from_disk").count(), 1);
    engines.load(Path::new("/runs/v000002"), 2, LONG).await;
    engines.settle(LONG).await;
    assert_eq!(engine.paths().last().map(String::as_str), Some("/continue_generation"));
}

#[tokio::test]
async fn an_engine_is_continued_until_it_answers() {
    let engine = StandIn::start(vec![("/continue_generation", 3, Fault::Fails)]).await;
    let engines = engine.engines(60);
    engines.load(Path::new("/runs/v000001"), 1, LONG).await;
    engines.settle(LONG).await;
    while engine.state().1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(engine.state(), (Some(1), false));
}

#[tokio::test]
async fn an_engine_that_hung_is_not_waited_for_and_catches_up() {
    // The engine hangs in the call that pauses it, and in the first attempt to continue it.
    let faults = vec![("/pause_generation", 1, Fault::Hangs), ("/continue_generation", 1, Fault::Hangs)];
    let engine = StandIn::start(faults).await;
    let engines = engine.engines(1);
    engines.load(Path::new("/runs/v000001"), 1, LONG).await;
    assert_eq!(engine.state(), (None, true), "it has neither the weights nor been continued");
    engines.load(Path::new("/runs/v000002"), 2, LONG).await;
    engines.load(Path::new("/runs/v000003"), 3, LONG).await;
    // The engine's task shares this test's thread, so it runs only if the test waits.
    assert_eq!(engine.state(), (None, true), "nobody waits for an engine whose last load failed");
    while engine.state() != (Some(3), false) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn training_goes_on_beside_engines_that_hang_fail_and_come_back() {
    const STEPS: i64 = 8;
    let service = TestService::start("[policy_defaults]\ngroup = { size = 2 }").await;
    record(&service.client, STEPS as u64, 2).await;
    let hanging =
        StandIn::start(vec![("/update_weights_from_disk", 1, Fault::Hangs), ("/continue_generation", 1, Fault::Hangs)])
            .await;
    let failing =
        StandIn::start(vec![("/pause_generation", 7, Fault::Fails), ("/continue_generation", 2, Fault::Fails)]).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let mut config = TrainConfig::new(tiny_model(), folder.path().join("run"));
    config.server.clone_from(&service.url);
    config.steps = STEPS;
    config.device = DeviceConfig::Cpu;
    config.publish.engine = vec![hanging.config(1), failing.config(1)];
    config.publish.engine_wait_s = 30;
    tokio::task::spawn_blocking(move || train(&config, false, &|| false))
        .await
        .expect("the trainer does not panic")
        .expect("no engine ends the trainer");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!(status.version_step, Some(STEPS));
    for engine in [&hanging, &failing] {
        let (version, is_paused) = engine.state();
        assert!(!is_paused, "no engine stays paused");
        assert!(version.is_some_and(|version| version <= status.version), "no engine is ahead of the service");
        let tried = engine.paths().iter().filter(|path| *path == "/pause_generation").count();
        assert!(tried as i64 <= STEPS + 20, "engines are not called without end");
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_is_not_held_up_by_an_engine_that_hangs() {
    let service = TestService::start("[policy_defaults]\ngroup = { size = 2 }").await;
    record(&service.client, 1, 2).await;
    let engine = StandIn::start(vec![("/pause_generation", usize::MAX, Fault::Hangs)]).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = folder.path().join("run");
    let mut config = TrainConfig::new(tiny_model(), output.clone());
    config.server.clone_from(&service.url);
    config.steps = 5;
    config.device = DeviceConfig::Cpu;
    config.publish.engine = vec![engine.config(3_600)];
    config.publish.engine_wait_s = 3_600;
    let has_trained =
        move || std::fs::read_to_string(output.join("metrics.jsonl")).is_ok_and(|text| text.ends_with('\n'));
    // The trainer ends after it is told to stop. Whether it ends with an error depends on what was in progress.
    let ended = tokio::task::spawn_blocking(move || train(&config, false, &has_trained)).await;
    drop(ended.expect("the trainer does not panic"));
    assert!(folder.path().join("run/checkpoints/step-00000001").exists(), "the step is saved");
    service.stop().await;
}
