//! `kill -9` of the trainer between any two of its calls: the final weights are those of an undisturbed run.

use std::{collections::BTreeMap, path::Path};

use tch::Tensor;

use crate::support::{Gate, Killed, TestService, noise, record, tiny_model, train_to_the_end, trainer};

const STEPS: u64 = 40;
const GROUP_SIZE: u64 = 3;
const KILLS: u64 = 5;

const POLICIES: &str = r#"
    [policy_defaults]
    require = ["tokens", "logprobs"]
    group = { size = 3 }
    retention = { settled_s = 86400 }
"#;

fn write_config(folder: &Path, server: &str) -> String {
    let config = format!(
        r#"
        server = "{server}"
        model = "{}"
        output = "{}"
        steps = {STEPS}
        device = "cpu"
        checkpoint = {{ every = 4 }}
        publish = {{ every = 3 }}
        schedule = {{ peak = 1e-3 }}
        "#,
        tiny_model().display(),
        folder.join("run").display()
    );
    let path = folder.join("trainer.toml");
    std::fs::write(&path, config).expect("a temporary file can be written");
    path.display().to_string()
}

fn weights(folder: &Path) -> BTreeMap<String, Tensor> {
    let checkpoint = folder.join(format!("run/checkpoints/step-{STEPS:08}/model/model.safetensors"));
    Tensor::read_safetensors(checkpoint).expect("the last step is saved").into_iter().collect()
}

/// Losses by step. If a step was repeated, the last repetition counts.
fn losses(folder: &Path) -> Vec<f64> {
    let lines = std::fs::read_to_string(folder.join("run/metrics.jsonl")).expect("steps were reported");
    let mut losses = vec![f64::NAN; STEPS as usize];
    for line in lines.lines() {
        // A killed trainer may leave an incomplete line.
        let Ok(report) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let step = report["step"].as_u64().expect("steps are numbers") as usize;
        losses[step - 1] = report["loss"].as_f64().expect("losses are numbers");
    }
    losses
}

async fn survives(killed: Killed, seed: u64) {
    let (undisturbed, disturbed) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let service = TestService::start(POLICIES).await;
    record(&service.client, STEPS, GROUP_SIZE).await;
    let config = write_config(undisturbed.path(), &service.url);
    train_to_the_end(&["train", "--config", &config]).await;
    service.stop().await;

    let service = TestService::start(POLICIES).await;
    record(&service.client, STEPS, GROUP_SIZE).await;
    let gate = Gate::start(&service, killed).await;
    let config = write_config(disturbed.path(), &gate.url);
    for kill in 0..KILLS {
        let process = trainer(&["train", "--config", &config]).spawn().expect("the binary starts");
        // The kill points include the first calls after a start.
        let calls = (noise(seed * 100 + kill) * 60.0) as usize;
        assert!(gate.kill_after(calls, process).await, "the trainer ended before kill {kill}");
    }
    train_to_the_end(&["train", "--config", &config]).await;
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    service.stop().await;

    assert_eq!(status.version_step, Some(STEPS as i64), "the versions that follow were published again");
    let found = weights(disturbed.path());
    for (name, expected) in weights(undisturbed.path()) {
        let difference = (expected - &found[&name]).abs().max().double_value(&[]);
        assert!(difference <= 1e-6, "{name} differs by {difference}");
    }
    for (step, (expected, found)) in losses(undisturbed.path()).into_iter().zip(losses(disturbed.path())).enumerate() {
        assert!((expected - found).abs() <= 1e-6, "the loss of step {} is {found} instead of {expected}", step + 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_killed_before_its_calls_ends_with_the_weights_of_an_undisturbed_run() {
    survives(Killed::Before, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_killed_after_its_calls_ends_with_the_weights_of_an_undisturbed_run() {
    survives(Killed::After, 2).await;
}
