//! Checkpoints between two starts of a trainer: an error names the damaged file, partial folders are removed, and
//! continuing from an older checkpoint leaves no gap.

use std::path::{Path, PathBuf};

use forebay_trainer::{
    checkpoint::{WriteOptions, write},
    config::{DeviceConfig, TrainConfig},
    learner::LearnerError,
    model::{ComputeKind, Decoder, LoadError, ModelConfig},
    state::StateError,
    train::TrainError,
};
use serde_json::{Value, json};
use tch::Device;

use crate::support::{TestService, record, run, tiny_model};

const PAIRS: &str = "[policy_defaults]\ngroup = { size = 2 }\nretention = { settled_s = 86400 }";

fn config(service: &TestService, output: PathBuf, steps: i64) -> TrainConfig {
    let mut config = TrainConfig::new(tiny_model(), output);
    config.server.clone_from(&service.url);
    config.steps = steps;
    config.device = DeviceConfig::Cpu;
    config.checkpoint.every = 2;
    config.patience_s = 30;
    config
}

fn step(output: &Path, step: u64) -> PathBuf {
    output.join(format!("checkpoints/step-{step:08}"))
}

fn flip_a_bit(path: &Path) {
    let mut bytes = std::fs::read(path).expect("it is there");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(path, bytes).expect("it can be written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_checkpoint_is_named_and_the_one_before_goes_on_without_a_gap() {
    for file in ["model/model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let service = TestService::start(PAIRS).await;
        record(&service.client, 6, 2).await;
        let folder = tempfile::tempdir().expect("a folder");
        let output = folder.path().join("run");
        run(config(&service, output.clone(), 4)).await.expect("it trains");
        flip_a_bit(&step(&output, 4).join(file));
        let ended = run(config(&service, output.clone(), 6)).await;
        let Err(TrainError::State(StateError::Damaged { path, way_back, .. })) = ended else { panic!("{ended:?}") };
        assert_eq!(path, step(&output, 4).join(file));
        assert!(way_back.contains("The checkpoint of step 2 is whole"), "{way_back}");

        std::fs::rename(step(&output, 4), folder.path().join("damaged")).expect("it can be moved");
        run(config(&service, output.clone(), 6)).await.expect("step 2 is no lineage gap");
        let batches = service.client.batches("default", &[]).await.expect("it answers").batches;
        let steps: Vec<Option<i64>> = batches.iter().map(|batch| batch.step).collect();
        assert_eq!(steps, (1..=6).map(Some).collect::<Vec<_>>());
        let status = service.client.policy("default").await.expect("it answers").expect("it exists");
        assert_eq!(status.checkpoint_step, Some(4), "the oldest that is kept is settled");
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_optimizer_whose_saved_state_is_not_finite_is_refused() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 4, 2).await;
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("run");
    run(config(&service, output.clone(), 2)).await.expect("it trains");
    let saved = step(&output, 2);
    let moments = saved.join("optimizer.safetensors");
    let mut bytes = std::fs::read(&moments).expect("it is there");
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&[0xff; 4]);
    std::fs::write(&moments, bytes).expect("it can be written");
    // The checkpoint has no digests, so the check of digests cannot find this damage.
    let about = saved.join("trainer.json");
    let mut told: Value = serde_json::from_slice(&std::fs::read(&about).expect("it is there")).expect("it is JSON");
    told["digests"] = json!({});
    std::fs::write(&about, told.to_string()).expect("it can be written");
    let ended = run(config(&service, output, 4)).await;
    let Err(TrainError::Learner(LearnerError::NotFinite { path, .. })) = ended else { panic!("{ended:?}") };
    assert_eq!(path, saved);
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!(status.version_step, Some(2), "nothing of it is published");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_killed_trainers_left_half_written_is_removed() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 2, 2).await;
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("run");
    let leftovers = [output.join("checkpoints/.partial-a"), output.join("published/.checkpoint-b")];
    for leftover in &leftovers {
        std::fs::create_dir_all(leftover.join("model")).expect("a folder can be made");
        std::fs::write(leftover.join("model/model.safetensors"), b"half").expect("it can be written");
    }
    run(config(&service, output, 2)).await.expect("it trains");
    assert!(leftovers.iter().all(|leftover| !leftover.exists()));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reference_with_another_vocabulary_is_refused() {
    let service = TestService::start(PAIRS).await;
    let folder = tempfile::tempdir().expect("a folder");
    let json = std::fs::read_to_string(tiny_model().join("config.json")).expect("it is there");
    let mut other: Value = serde_json::from_str(&json).expect("it is JSON");
    other["vocab_size"] = 65.into();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).expect("a folder can be made");
    std::fs::write(source.join("config.json"), other.to_string()).expect("it can be written");
    std::fs::copy(tiny_model().join("model.safetensors"), source.join("model.safetensors")).expect("it can be copied");
    let shape = ModelConfig::parse(&other.to_string()).expect("it is supported");
    let decoder = Decoder::random(shape, Device::Cpu, ComputeKind::Float32, 1);
    let target = folder.path().join("other");
    write(decoder.parameters(), &source, &target, &WriteOptions::default()).expect("written");

    for role in ["reference", "teacher"] {
        let mut config = config(&service, folder.path().join("run"), 1);
        if role == "reference" {
            config.reference = Some(target.clone());
            config.objective.kl_loss_coef = 0.1;
        } else {
            config.teacher = Some(target.clone());
            config.objective.opd_coef = 0.1;
        }
        let ended = run(config).await;
        let Err(TrainError::Learner(LearnerError::Vocabulary { role: found, .. })) = ended else { panic!("{ended:?}") };
        assert_eq!(found, role);
    }
    service.stop().await;
}

#[test]
fn a_name_of_the_hub_is_told_apart_from_a_folder() {
    let load = |name: &str| Decoder::load(Path::new(name), Device::Cpu, ComputeKind::Float32);
    let error = load("Qwen/Qwen3-0.6B").expect_err("there is no such folder");
    assert!(matches!(error, LoadError::Absent { .. }));
    assert!(error.to_string().contains("hf download Qwen/Qwen3-0.6B"), "{error}");
    let error = load("/models/absent").expect_err("there is no such folder");
    assert!(!error.to_string().contains("hf download"), "{error}");
}
