//! The output of a trainer: its log, event files, a dry run, averaged weights.

use std::path::Path;

use forebay_trainer::model::{ComputeKind, Decoder};
use serde_json::Value;
use tch::Device;

use crate::support::{TestService, record, tiny_model, train_to_the_end, trainer};

const PAIRS: &str = "[policy_defaults]\ngroup = { size = 2 }";

fn write_config(folder: &Path, server: &str, extra: &str) -> String {
    let config = format!(
        r#"
        server = "{server}"
        model = "{}"
        output = "{}"
        steps = 2
        device = "cpu"
        schedule = {{ peak = 1e-3 }}
        {extra}
        "#,
        tiny_model().display(),
        folder.join("run").display()
    );
    let path = folder.join("trainer.toml");
    std::fs::write(&path, config).expect("a temporary file can be written");
    path.display().to_string()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_loads_everything_and_leases_nothing() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 3, 2).await;
    let folder = folder();
    let config = write_config(folder.path(), &service.url, "objective = { old_logprobs = \"rollout\" }");
    let output = trainer(&["train", "--config", &config, "--dry-run"])
        .stdout(std::process::Stdio::piped())
        .output()
        .await
        .expect("the binary starts");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for line in
        ["start      step 0", "train      2 more steps", "every trained row needs logprobs", "3 of 1 ready groups"]
    {
        assert!(told.contains(line), "`{line}` is not in\n{told}");
    }
    assert!(told.contains("warning    objective.old_logprobs"), "{told}");
    assert!(!folder.path().join("run").exists(), "nothing is written");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!((status.epoch, status.version, status.batches.values().sum::<i64>()), (0, 0, 0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirected_log_has_no_colours() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 2, 2).await;
    let folder = folder();
    let config = write_config(folder.path(), &service.url, "");
    let output = trainer(&["train", "--config", &config]).env("RUST_LOG", "info").output().await.expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("published") && !told.contains('\u{1b}'), "{told}");
    service.stop().await;
}

#[tokio::test]
async fn a_service_that_is_not_there_is_named_with_the_cause() {
    let folder = folder();
    // Nothing listens on this port, because its listener was dropped at once.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free").local_addr().expect("it has one");
    let url = format!("http://{gone}");
    let config = write_config(folder.path(), &url, "patience_s = 1");
    let output = trainer(&["train", "--config", &config]).output().await.expect("the binary starts");
    let told = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert!(!output.status.success());
    let last = told.lines().last().expect("it says why");
    assert!(last.contains(&format!("gave up on `resume` at {url}")) && last.contains("connection refused"), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_files_and_averaged_weights_are_written_where_they_are_asked_for() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 2, 2).await;
    let folder = folder();
    let extra = "report = { tensorboard = true }\noptimizer = { ema_decay = 0.9 }";
    train_to_the_end(&["train", "--config", &write_config(folder.path(), &service.url, extra)]).await;
    let run = folder.path().join("run");
    let events: Vec<_> = std::fs::read_dir(run.join("tensorboard")).expect("it is there").collect();
    let [Ok(events)] = events.as_slice() else { panic!("one file: {events:?}") };
    let bytes = std::fs::read(events.path()).expect("it can be read");
    for tag in ["loss", "gradient_norm", "staleness_mean"] {
        let count = bytes.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count();
        assert!(count >= 2, "{tag} is told of each step");
    }
    let checkpoint = run.join("checkpoints/step-00000002");
    let load = |name: &str| {
        Decoder::load(&checkpoint.join(name), Device::Cpu, ComputeKind::Float32).expect("it is a whole checkpoint")
    };
    let (average, model) = (load("average"), load("model"));
    let name = "model.norm.weight";
    let tensor = |decoder: &Decoder| decoder.parameters().get(name).expect("every model has it").detach();
    let distance = (tensor(&average) - tensor(&model)).abs().max().double_value(&[]);
    assert!(distance > 1e-4, "the average is behind the weights by {distance}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gradient_norms_are_reported_for_each_model() {
    let service = TestService::start(PAIRS).await;
    record(&service.client, 2, 2).await;
    let folder = folder();
    let extra = "objective = { objective = \"ppo\" }\ncritic = {}";
    train_to_the_end(&["train", "--config", &write_config(folder.path(), &service.url, extra)]).await;
    let lines = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).expect("steps were reported");
    for line in lines.lines() {
        let report: Value = serde_json::from_str(line).expect("it is JSON");
        let norm = |name: &str| report[name].as_f64().expect("a number");
        let (policy, critic) = (norm("policy_gradient_norm"), norm("critic_gradient_norm"));
        assert!(policy > 0.0 && critic > 0.0);
        assert!((policy.hypot(critic) - norm("gradient_norm")).abs() < 1e-9);
    }
    service.stop().await;
}
