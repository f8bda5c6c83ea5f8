//! Models that follow a policy: they load what its trainer publishes, in the middle of answers.

use std::path::Path;

use forebay_client::{Client, wire::VersionRequest};
use forebay_trainer::{
    config::DeviceConfig,
    config::TrainConfig,
    serve::{ModelSource, ServeConfig, WeightSource},
    train::train,
};
use reqwest::StatusCode;
use serde_json::json;

use super::{CONTEXT, Engine, check_logprobs, checkpoint, checkpoint_of, config, decoder};
use crate::support::{TestService, record};

const POLICIES: &str = "[[policy]]\nname = \"solver\"\n[[policy]]\nname = \"writer\"\n";

/// Serves the policies of a service, and a frozen model `judge`.
fn following(service: &TestService, policies: &[&str], judge: &Path) -> ServeConfig {
    let mut config = config(&[("judge", judge)]);
    for policy in policies.iter().rev() {
        let weights = WeightSource::Policy { policy: (*policy).to_owned(), url: service.url.clone() };
        config.models.insert(0, ModelSource { name: (*policy).to_owned(), weights });
    }
    config
}

async fn publish(client: &Client, policy: &str, version: i64, folder: &Path) {
    let uri = Some(format!("file://{}", folder.display()));
    let request = VersionRequest { version, step: Some(version), uri, epoch: None, force: None };
    client.publish(policy, &request).await.expect("the version is new");
}

/// Waits until a model draws with a version.
async fn until_version(engine: &Engine, model: &str, version: &str) {
    let looking = async {
        let ask = || engine.http.get(format!("{}/models/{model}/model_info", engine.url)).send();
        let expected = format!("\"weight_version\":\"{version}\"");
        while !ask().await.expect("the server answers").text().await.expect("it is whole").contains(&expected) {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(super::PATIENCE, looking).await.is_ok(), "{model} never has version {version}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn published_versions_are_loaded_in_the_middle_of_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let paths: Vec<_> = (1..=3).map(|seed| checkpoint(folder.path(), &format!("v{seed}"), seed)).collect();
    let service = TestService::start(POLICIES).await;
    let engine = Engine::with(following(&service, &["solver", "writer"], &paths[0])).await;
    // Before the first version there is nothing to draw with.
    let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}});
    let refused = engine.send("/generate", &body).await;
    assert_eq!(
        (refused.status(), &refused.headers()["retry-after"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"5".parse().expect("a value"))
    );
    assert!(refused.text().await.expect("it is whole").contains("model_not_ready"));
    let health =
        async |path: &str| engine.http.get(format!("{}{path}", engine.url)).send().await.expect("it answers").status();
    assert_eq!(health("/health").await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(health("/models/judge/health").await, StatusCode::OK);

    publish(&service.client, "solver", 1, &paths[0]).await;
    publish(&service.client, "writer", 7, &paths[1]).await;
    until_version(&engine, "solver", "1").await;
    until_version(&engine, "writer", "7").await;
    assert_eq!(health("/health").await, StatusCode::OK);

    let long = json!({
        "input_ids": [3, 1, 4], "return_logprob": true, "model": "solver", "sampling_params": {"max_new_tokens": CONTEXT},
    });
    let mut stream = engine.stream("/generate", long).await;
    for (version, path) in [(2, &paths[1]), (3, &paths[2])] {
        publish(&service.client, "solver", version, path).await;
        let label = version.to_string();
        while stream.next().await.expect("the answer is long")["meta_info"]["weight_version"] != label {}
    }
    engine.post("/abort_request", json!({"abort_all": true})).await;
    let answer = stream.last().await;
    let decoders: Vec<_> = paths.iter().map(|path| decoder(path)).collect();
    let weights = [("1", &decoders[0]), ("2", &decoders[1]), ("3", &decoders[2])];
    assert_eq!(answer["meta_info"]["weight_versions"].as_array().expect("a list").len(), 3);
    check_logprobs(&answer, &[3, 1, 4], 1.0, &weights);
    // The other models have kept theirs.
    for (model, version, weights) in [("writer", "7", &decoders[1]), ("judge", "1", &decoders[0])] {
        let body = json!({
            "input_ids": [2], "model": model, "return_logprob": true, "sampling_params": {"max_new_tokens": 4},
        });
        check_logprobs(&engine.post("/generate", body).await, &[2], 1.0, &[(version, weights)]);
    }
    // Nobody else changes the weights of a model that follows a policy.
    let body = json!({"model_path": paths[0], "weight_version": "9"});
    let (status, answer) = engine.call("/models/solver/update_weights_from_disk", &body).await;
    assert_eq!((status, &answer["success"]), (StatusCode::BAD_REQUEST, &json!(false)));
    engine.stop().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_cannot_be_loaded_is_passed_over_for_the_next() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let first = checkpoint(folder.path(), "v1", 1);
    let other = checkpoint_of(folder.path(), "other", 2, &json!({"num_hidden_layers": 1}));
    let service = TestService::start(POLICIES).await;
    publish(&service.client, "solver", 1, &folder.path().join("pruned")).await;
    let engine = Engine::with(following(&service, &["solver"], &first)).await;
    publish(&service.client, "solver", 2, &first).await;
    until_version(&engine, "solver", "2").await;
    publish(&service.client, "solver", 3, &other).await;
    publish(&service.client, "solver", 4, &checkpoint(folder.path(), "v4", 4)).await;
    until_version(&engine, "solver", "4").await;
    engine.stop().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn what_a_trainer_publishes_is_served() {
    const STEPS: i64 = 3;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let base = checkpoint(folder.path(), "base", 1);
    let service = TestService::start("[policy_defaults]\ngroup = { size = 2 }").await;
    let engine = Engine::with(following(&service, &["default"], &base)).await;
    record(&service.client, STEPS as u64, 2).await;
    let mut training = TrainConfig::new(base, folder.path().join("run"));
    training.server.clone_from(&service.url);
    training.steps = STEPS;
    training.device = DeviceConfig::Cpu;
    training.schedule.peak = 1e-2;
    tokio::task::spawn_blocking(move || train(&training, false, &|| false))
        .await
        .expect("the trainer does not panic")
        .expect("it trains to the end");
    let status = service.client.policy("default").await.expect("it answers").expect("it exists");
    let newest = status.version.to_string();
    until_version(&engine, "default", &newest).await;
    let uri = status.version_uri.expect("the version has a folder");
    let weights = decoder(Path::new(uri.strip_prefix("file://").expect("it is a folder")));
    let body = json!({"input_ids": [1, 2], "return_logprob": true, "sampling_params": {"max_new_tokens": 10}});
    check_logprobs(&engine.post("/generate", body).await, &[1, 2], 1.0, &[(&newest, &weights)]);
    engine.stop().await;
    service.stop().await;
}
