//! If a group cannot be trained, only this group is given back. If the trainer is at fault, no group is lost.

use std::path::{Path, PathBuf};

use forebay_client::wire::Trajectory;
use forebay_trainer::{
    config::{DeviceConfig, TrainConfig},
    learner::LearnerError,
    loss::{Correction, Objective, OldLogprobs, Tis},
    train::TrainError,
};
use serde_json::Value;

use crate::support::{TestService, recorded, run, tiny_model};

const PAIRS: &str = r"
    [policy_defaults]
    group = { size = 2 }
    batch = { groups = 2 }
";

fn config(service: &TestService, output: &Path, steps: i64) -> TrainConfig {
    let mut config = TrainConfig::new(tiny_model(), output.join("run"));
    config.server.clone_from(&service.url);
    config.steps = steps;
    config.device = DeviceConfig::Cpu;
    config.patience_s = 30;
    config
}

/// Posts groups of two. `change` may make their members untrainable.
async fn post(service: &TestService, groups: u64, change: impl Fn(u64, u64, &mut Trajectory)) {
    for group in 0..groups {
        let member = |member| {
            let mut trajectory = recorded(group, member);
            change(group, member, &mut trajectory);
            trajectory
        };
        service.client.post_bundle(&[member(0), member(1)]).await.expect("the bundle is accepted");
    }
}

async fn quarantined(service: &TestService) -> Vec<String> {
    let page = service.client.groups("default", &[("state", "quarantined")]).await.expect("it answers");
    page.groups.into_iter().map(|group| group.group_id).collect()
}

fn reports(output: &Path) -> Vec<Value> {
    let lines = std::fs::read_to_string(output.join("run/metrics.jsonl")).expect("steps were reported");
    lines.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// Trains three groups in batches of two. `spoil` makes the first group untrainable, and only that group must be given
/// back.
async fn costs_its_group(change: impl Fn(&mut TrainConfig), spoil: impl Fn(&mut Trajectory), named: &str) {
    let service = TestService::start(PAIRS).await;
    post(&service, 5, |group, member, trajectory| {
        if (group, member) == (0, 1) {
            spoil(trajectory);
        }
    })
    .await;
    let folder = folder();
    let mut config = config(&service, folder.path(), 2);
    change(&mut config);
    run(config).await.expect("the other groups can be trained");
    assert_eq!(quarantined(&service).await, ["g0"], "{named}");
    let batches = service.client.batches("default", &[]).await.expect("it answers").batches;
    let reasons: Vec<String> = batches.into_iter().filter_map(|batch| batch.reason).collect();
    assert!(
        reasons.iter().any(|reason| reason.contains("row 1 (rollout r0-1)") && reason.contains(named)),
        "{reasons:?}"
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_without_logprobs_that_the_objective_must_have_costs_its_group() {
    let strict = |config: &mut TrainConfig| config.objective.old_logprobs = Some(OldLogprobs::Rollout);
    costs_its_group(strict, |trajectory| trajectory.segments[0].logprobs = None, "logprobs").await;
    let corrected = |config: &mut TrainConfig| config.objective.correction = Some(Correction::Tis(Tis::default()));
    costs_its_group(corrected, |trajectory| trajectory.segments[0].logprobs = None, "logprobs").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_without_a_teacher_costs_its_group() {
    let distilled = |config: &mut TrainConfig| config.objective.opd_coef = 0.5;
    costs_its_group(distilled, |trajectory| trajectory.segments[0].teacher_logprobs = None, "teacher_logprobs").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_beyond_the_bound_costs_its_group() {
    // All other rows have at most 15 tokens.
    let longer = |trajectory: &mut Trajectory| {
        trajectory.segments[0].tokens = [vec![1; 20], trajectory.segments[0].tokens.clone()].concat();
    };
    costs_its_group(|config| config.data.tokens_max = Some(20), longer, "at most 20 can be trained").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_beyond_the_models_positions_costs_its_group() {
    let json = std::fs::read_to_string(tiny_model().join("config.json")).expect("it is there");
    let config: Value = serde_json::from_str(&json).expect("it is JSON");
    let positions = config["max_position_embeddings"].as_u64().expect("a number") as usize;
    let longer = |trajectory: &mut Trajectory| {
        trajectory.segments[0].tokens = [vec![1; positions], trajectory.segments[0].tokens.clone()].concat();
    };
    costs_its_group(|_| {}, longer, &format!("at most {positions} can be trained")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_whose_gradients_are_not_finite_is_given_back_by_name() {
    let service = TestService::start(
        r#"
        [policy_defaults]
        group = { size = 2 }
        batch = { groups = 2 }
        advantage = "reward"
        "#,
    )
    .await;
    // This reward is finite, but its square is not.
    post(&service, 5, |group, _, trajectory| trajectory.reward = Some(if group == 1 { 3e38 } else { 1.0 })).await;
    let folder = folder();
    run(config(&service, folder.path(), 2)).await.expect("the other groups can be trained");
    assert_eq!(quarantined(&service).await, ["g1"]);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_fits_no_row_does_not_drain_the_buffer() {
    let service = TestService::start(PAIRS).await;
    post(&service, 40, |_, _, trajectory| trajectory.segments[0].tokens[0] = 1_000).await;
    let folder = folder();
    let ended = run(config(&service, folder.path(), 2)).await;
    assert!(matches!(ended, Err(TrainError::Refused { refused: 8, .. })), "{ended:?}");
    assert_eq!(
        quarantined(&service).await.len(),
        14,
        "seven batches of two groups, and the eighth is given back whole"
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_without_logprobs_are_counted_and_the_others_keep_theirs_on_any_microbatching() {
    let mut found = Vec::new();
    for microbatch_tokens in [16_384, 1, 20] {
        let service = TestService::start(PAIRS).await;
        post(&service, 2, |group, member, trajectory| {
            if (group, member) == (1, 0) {
                trajectory.segments[0].logprobs = None;
            }
        })
        .await;
        let folder = folder();
        let mut config = config(&service, folder.path(), 1);
        config.memory.microbatch_tokens = microbatch_tokens;
        run(config).await.expect("it trains");
        let report = reports(folder.path()).remove(0);
        assert_eq!(report["rows_without_logprobs"], 1);
        let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name} is a number"));
        assert!((number("ratio_mean") - 1.0).abs() > 1e-3, "the other rows have their ratios");
        found.push(["loss", "kl_rollout", "ratio_mean", "clip_fraction", "gradient_norm"].map(number));
        service.stop().await;
    }
    for other in &found[1..] {
        for (expected, found) in found[0].iter().zip(other) {
            assert!((expected - found).abs() <= 1e-5 * expected.abs().max(1e-2), "{expected} and {found}");
        }
    }
}

/// A copy of the small checkpoint with a weight that is not a number.
fn poisoned(folder: &Path) -> PathBuf {
    let target = folder.join("poisoned");
    std::fs::create_dir(&target).expect("a folder can be made");
    for entry in std::fs::read_dir(tiny_model()).expect("it is there") {
        let path = entry.expect("it can be listed").path();
        std::fs::copy(&path, target.join(path.file_name().expect("it has a name"))).expect("it can be copied");
    }
    let weights = target.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("it is there");
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&[0xff; 4]);
    std::fs::write(&weights, bytes).expect("it can be written");
    target
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_finite_is_refused_before_anything_is_leased_or_published() {
    let service = TestService::start(PAIRS).await;
    post(&service, 4, |_, _, _| {}).await;
    let folder = folder();
    let mut config = config(&service, folder.path(), 2);
    config.model = poisoned(folder.path());
    let ended = run(config).await;
    let Err(TrainError::Learner(LearnerError::Model { source, .. })) = ended else { panic!("{ended:?}") };
    assert!(source.to_string().contains("not finite"), "{source}");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!((status.version, status.version_uri, status.batches.values().sum::<i64>()), (0, None, 0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn training_that_diverges_stops_before_it_saves_or_publishes() {
    let service = TestService::start(PAIRS).await;
    post(&service, 8, |_, _, _| {}).await;
    let folder = folder();
    let mut config = config(&service, folder.path(), 4);
    config.schedule.peak = 1e39;
    config.checkpoint.every = 1;
    let ended = run(config).await;
    assert!(matches!(ended, Err(TrainError::Learner(LearnerError::Diverged { step: 1, .. }))), "{ended:?}");
    assert!(!folder.path().join("run/checkpoints/step-00000001").exists());
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert!(status.version_step.is_none_or(|step| step == 0), "no more than the first weights: {status:?}");
    assert_eq!(quarantined(&service).await.len(), 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_batches_in_a_row_without_finite_gradients_stop_the_trainer() {
    let service = TestService::start(PAIRS).await;
    post(&service, 40, |_, _, _| {}).await;
    let folder = folder();
    let mut config = config(&service, folder.path(), 20);
    // With this rate the weights are finite after the first step, but too large to compute with.
    config.schedule.peak = 1e30;
    let ended = run(config).await;
    assert!(matches!(ended, Err(TrainError::Refused { refused: 2, .. })), "{ended:?}");
    assert_eq!(quarantined(&service).await.len(), 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_batches_make_one_step_that_one_large_batch_would_make() {
    let mut found = Vec::new();
    for (groups, batches_per_step) in [(2, 1), (1, 2)] {
        let service = TestService::start(&PAIRS.replace("groups = 2", &format!("groups = {groups}"))).await;
        post(&service, 6, |_, _, _| {}).await;
        let folder = folder();
        let mut config = config(&service, folder.path(), 3);
        config.data.batches_per_step = batches_per_step;
        config.schedule.peak = 1e-3;
        run(config).await.expect("it trains");
        let batches = service.client.batches("default", &[]).await.expect("it answers").batches;
        let steps: Vec<Option<i64>> = batches.iter().map(|batch| batch.step).collect();
        let expected: Vec<_> = (1..=3).flat_map(|step| std::iter::repeat_n(Some(step), batches_per_step)).collect();
        assert_eq!(steps, expected, "each batch is acked with the step that consumed it");
        let losses: Vec<f64> =
            reports(folder.path()).iter().map(|report| report["loss"].as_f64().expect("a number")).collect();
        found.push(losses);
        service.stop().await;
    }
    for (large, small) in found[0].iter().zip(&found[1]) {
        assert!((large - small).abs() < 1e-6, "{large} and {small}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn distillation_is_whitened_with_the_returns() {
    let service =
        TestService::start(&PAIRS.replace("[policy_defaults]", "[policy_defaults]\nadvantage = \"none\"")).await;
    post(&service, 2, |_, _, _| {}).await;
    let folder = folder();
    let mut config = config(&service, folder.path(), 1);
    config.objective.objective = Objective::ReinforcePlusPlus;
    config.objective.opd_coef = 0.5;
    run(config).await.expect("it trains");
    let mean = reports(folder.path())[0]["advantage_mean"].as_f64().expect("a number");
    assert!(mean.abs() < 1e-5, "advantages that are whitened last have a mean of 0, not {mean}");
    service.stop().await;
}
