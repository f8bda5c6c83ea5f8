//! The whole loop: the service, a trainer that publishes to this engine, and an agent that asks the engine for tokens.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use forebay_client::{
    Client,
    wire::{Segment, Status, Trajectory, VersionSpan},
};
use forebay_trainer::{
    config::{DeviceConfig, TrainConfig},
    engine::{EngineConfig, EngineKind, Engines, PauseMode},
    serve::ServeConfig,
    train::train,
};
use reqwest::header::{self, HeaderMap, HeaderValue};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::{Engine, PATIENCE, check_logprobs, checkpoint, config, decoder};
use crate::support::TestService;

const POLICIES: &str = r#"
    [policy_defaults]
    require = ["tokens", "logprobs", "policy_version"]
    group = { size = 2 }
    batch = { groups = 2 }
    staleness = { max = 4, action = "drop" }
"#;

const STEPS: i64 = 4;

const PROMPT: [i64; 3] = [5, 6, 7];

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_trainer_publishes_to_the_engine_and_learns_from_what_it_draws() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let base = checkpoint(folder.path(), "base", 1);
    let service = TestService::start(POLICIES).await;
    let engine = Arc::new(Engine::with(config(&[("frozen", &base), ("policy", &base)])).await);
    // The trainer publishes its base as version 1.
    let mut training = TrainConfig::new(base.clone(), folder.path().join("run"));
    training.server.clone_from(&service.url);
    training.steps = STEPS;
    training.device = DeviceConfig::Cpu;
    training.schedule.peak = 1e-2;
    training.publish.keep = 100;
    let url = format!("{}/models/policy", engine.url);
    training.publish.engine =
        vec![EngineConfig { pause: PauseMode::Retract, ..EngineConfig::new(EngineKind::Sglang, url) }];
    let trainer = tokio::task::spawn_blocking(move || train(&training, false, &|| false));

    let has_ended = Arc::new(AtomicBool::new(false));
    let agent = tokio::spawn(play(Arc::clone(&engine), service.client.clone(), Arc::clone(&has_ended)));
    trainer.await.expect("the trainer does not panic").expect("it trains to the end");
    has_ended.store(true, Ordering::SeqCst);
    let answers = agent.await.expect("the agent does not panic");

    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!(status.version_step, Some(STEPS));
    let newest = status.version.to_string();
    assert_eq!(engine.get("/models/policy/model_info").await["weight_version"], newest);
    assert_eq!(engine.get("/models/frozen/model_info").await["weight_version"], "1");
    // Everything that the agent posted was drawn with the weights that it named.
    let folders: Vec<(String, _)> = std::fs::read_dir(folder.path().join("run/published"))
        .expect("versions were written")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter_map(|path| Some((version_of(&path)?.to_string(), decoder(&path))))
        .collect();
    let weights: Vec<_> = folders.iter().map(|(version, decoder)| (version.as_str(), decoder)).collect();
    let mut versions = std::collections::BTreeSet::new();
    for answer in &answers {
        check_logprobs(answer, &PROMPT, 1.0, &weights);
        versions.insert(answer["meta_info"]["weight_version"].to_string());
    }
    assert!(versions.len() > 1, "the engine's weights changed while the agent played: {versions:?}");
    Arc::into_inner(engine).expect("the agent has ended").stop().await;
    service.stop().await;
}

fn version_of(folder: &Path) -> Option<i64> {
    folder.file_name()?.to_str()?.strip_prefix('v')?.parse().ok()
}

/// Plays groups until the trainer has ended. Returns the answers of the engine. The reward is the share of even ids.
async fn play(engine: Arc<Engine>, client: Client, has_ended: Arc<AtomicBool>) -> Vec<Value> {
    let mut answers = Vec::new();
    for group in 0.. {
        if has_ended.load(Ordering::SeqCst) {
            break;
        }
        let mut bundle = Vec::new();
        while bundle.len() < 2 {
            let sampling = json!({"max_new_tokens": 12});
            let body = json!({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": true});
            let answer = engine.post("/models/policy/generate", body).await;
            // The trainer's pauses hold the request, and do not end it.
            assert_eq!(answer["meta_info"]["finish_reason"]["type"], "length");
            bundle.push(trajectory(&answer, group, bundle.len()));
            answers.push(answer);
        }
        // A full backlog is answered with an error that the client repeats; the trainer may end meanwhile.
        if client.post_bundle(&bundle).await.is_err() {
            break;
        }
    }
    answers
}

fn trajectory(answer: &Value, group: usize, member: usize) -> Trajectory {
    let ids = super::ids(answer);
    let meta = &answer["meta_info"];
    let logprobs =
        super::pairs(&meta["output_token_logprobs"]).into_iter().map(|pair| pair.0.expect("it is there") as f32);
    let number = |value: &Value| value.as_i64().expect("a number");
    let spans = meta["weight_versions"].as_array().expect("a list").iter().map(|span| {
        let version = span["version"].as_str().and_then(|version| version.parse().ok()).expect("a number");
        VersionSpan(version, number(&span["start"]), number(&span["end"]) - number(&span["start"]))
    });
    let even = ids.iter().filter(|id| *id % 2 == 0).count();
    Trajectory {
        rollout_id: Some(format!("g{group}-{member}")),
        group_id: Some(format!("g{group}")),
        status: Status::Completed,
        reward: Some(even as f64 / ids.len() as f64),
        segments: vec![Segment {
            tokens: PROMPT.iter().chain(&ids).map(|&id| id as i32).collect(),
            loss_mask: vec![1; ids.len()],
            logprobs: Some(logprobs.collect()),
            versions: Some(spans.collect()),
            ..Segment::default()
        }],
        ..Trajectory::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_publishes_to_an_engine_that_demands_a_key() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (base, next) = (checkpoint(folder.path(), "base", 1), checkpoint(folder.path(), "next", 2));
    let served = ServeConfig { api_key: Some("secret".to_owned()), ..config(&[("tiny", &base)]) };
    let mut engine = Engine::with(served).await;
    let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static("Bearer secret"))]);
    engine.http = reqwest::Client::builder().default_headers(headers).build().expect("the options are valid");
    let path = folder.path().join("key");
    for (key, loaded) in [("wrong\n", "1"), ("secret\n", "2")] {
        std::fs::write(&path, key).expect("the folder can be written to");
        let mut told = EngineConfig::new(EngineKind::Sglang, engine.url.clone());
        told.key_file = Some(path.clone());
        let engines = Engines::with_pause(&Handle::current(), vec![told], Duration::from_millis(1));
        let engines = engines.expect("the key can be read");
        // With the wrong key the load fails, which is waited for as well.
        engines.load(&next, 2, PATIENCE).await;
        assert_eq!(engine.get("/model_info").await["weight_version"], loaded, "{key:?}");
    }
    engine.stop().await;
}
