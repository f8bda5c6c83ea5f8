//! Every objective on batches of the service: training with it improves the metric that it optimizes.

use std::path::Path;

use forebay_client::wire::Trajectory;
use forebay_trainer::{config::TrainConfig, train::train};
use serde_json::Value;

use crate::support::{TestService, recorded, tiny_model};

const STEPS: usize = 12;

const POLICIES: &str = r#"
    [policy_defaults]
    require = ["tokens", "logprobs", "teacher_logprobs"]
    group = { size = 4 }
    batch = { groups = 2 }
"#;

/// The same two groups repeatedly, under new ids.
async fn post_the_same(service: &TestService) {
    for step in 0..STEPS {
        for group in 0..2 {
            let member = |member| {
                let same = recorded(group, member);
                let name = |id: Option<String>| id.map(|id| format!("{id}.{step}"));
                Trajectory { rollout_id: name(same.rollout_id.clone()), group_id: name(same.group_id.clone()), ..same }
            };
            let bundle: Vec<Trajectory> = (0..4).map(member).collect();
            service.client.post_bundle(&bundle).await.expect("the bundle is accepted");
        }
    }
}

fn config(folder: &Path, server: &str, extra: &str) -> TrainConfig {
    let text = format!(
        r#"
        server = "{server}"
        model = "{model}"
        output = "{output}"
        steps = {STEPS}
        device = "cpu"
        schedule = {{ peak = 1e-3 }}
        optimizer = {{ weight_decay = 0.0 }}
        publish = {{ every = 100 }}
        {extra}
        "#,
        model = tiny_model().display(),
        output = folder.join("run").display(),
    );
    let path = folder.join("trainer.toml");
    std::fs::write(&path, text).expect("a temporary file can be written");
    TrainConfig::read(&path).expect("the configuration is valid")
}

/// The reports of a run, in order.
async fn run(extra: &str) -> Vec<Value> {
    let service = TestService::start(POLICIES).await;
    post_the_same(&service).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = config(folder.path(), &service.url, extra);
    tokio::task::spawn_blocking(move || train(&config, false, &|| false))
        .await
        .expect("the trainer does not panic")
        .expect("the trainer ends well");
    let stats = service.client.stats().await.expect("it answers");
    assert!(stats.conserved, "the books balance");
    service.stop().await;
    let lines = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).expect("steps were reported");
    let reports: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("every line is a report")).collect();
    assert_eq!(reports.len(), STEPS);
    reports
}

/// Checks that `field` is lower at the end than at the start by at least `margin`.
async fn lowers(field: &str, margin: f64, extra: &str) {
    let reports = run(extra).await;
    let values: Vec<f64> = reports.iter().map(|report| report[field].as_f64().expect("it is reported")).collect();
    let (first, last) = (values[0], values[values.len() - 1]);
    assert!(last < first - margin, "{extra}: {field} went {values:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpo_lowers_its_loss() {
    lowers("loss", 0.01, r#"objective = { objective = "grpo", clip_c = 3.0 }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gspo_lowers_its_loss() {
    lowers("loss", 0.01, r#"objective = { objective = "gspo" }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cispo_lowers_its_loss() {
    lowers("loss", 0.01, r#"objective = { objective = "cispo", eps_high = 4.0 }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reinforce_lowers_its_loss() {
    lowers("loss", 0.01, r#"objective = { objective = "reinforce" }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reinforce_plus_plus_lowers_its_loss() {
    let penalised = format!(
        r#"
        reference = "{}"
        objective = {{ objective = "reinforce_plus_plus", kl_coef = 0.01, eps_low = 0.5 }}
        "#,
        tiny_model().display()
    );
    lowers("loss", 0.01, &penalised).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ppo_lowers_the_loss_of_its_critic() {
    let critic = r#"
        objective = { objective = "ppo", lambda = 0.95, value_clip = 10.0 }
        critic = { schedule = { peak = 1e-2 }, optimizer = { weight_decay = 0.0 } }
    "#;
    lowers("value_loss", 0.1, critic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn distillation_moves_towards_the_teacher() {
    // The rows' teacher gives every token a higher probability than the policy does, so that all advantages are
    // positive.
    lowers("loss", 0.01, r#"objective = { objective = "reinforce", opd_coef = 1.0, old_logprobs = "rollout" }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sft_lowers_the_negative_log_likelihood() {
    lowers("loss", 0.1, r#"objective = { objective = "sft" }"#).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn divergence_from_the_reference_and_corrections_are_reported() {
    let reports = run(&format!(
        r#"
        reference = "{}"
        [objective]
        objective = "grpo"
        kl_loss_coef = 0.1
        correction = {{ kind = "tis" }}
        "#,
        tiny_model().display()
    ))
    .await;
    assert_eq!(reports[0]["kl_reference"], 0.0, "the first step is the reference itself");
    assert!(reports[STEPS - 1]["kl_reference"].as_f64().expect("a number") > 0.0);
    assert!(reports[0]["correction_mean"].as_f64().expect("a number") > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recomputing_layers_and_small_microbatches_change_no_loss() {
    let plain = run(r#"objective = { objective = "grpo" }"#).await;
    let frugal = run("memory = { microbatch_tokens = 16, logits = 64, recompute_layers = true }").await;
    for (plain, frugal) in plain.iter().zip(&frugal) {
        let (plain, frugal) = (plain["loss"].as_f64().expect("a number"), frugal["loss"].as_f64().expect("a number"));
        assert!((plain - frugal).abs() < 1e-5, "{plain} and {frugal}");
    }
}
