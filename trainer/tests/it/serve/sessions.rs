//! Recorded sessions with this engine: the service forwards the calls of agents to it, and what is delivered for training
//! has the log-probabilities of the trainer.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Stdio,
};

use forebay_client::{
    Client,
    wire::{BatchRequest, Sample, VersionRequest},
};
use forebay_trainer::{
    model::Decoder,
    rollout::{Family, InitArgs, init, task::TaskName},
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{Engine, TOLERANCE, config, decoder, trainer_logprobs};
use crate::support::{TestService, http};

/// Makes a model of random weights with a chat template.
fn model(folder: &Path, version: i64) -> PathBuf {
    let path = folder.join(format!("v{version}"));
    let args = InitArgs {
        folder: path.clone(),
        task: TaskName::Lookup,
        tokenizer: None,
        alphabet: None,
        chat: false,
        family: Family::Llama,
        hidden: 16,
        intermediate: None,
        layers: 1,
        heads: 2,
        positions: 512,
        // With weights this large, models of different seeds behave differently.
        initializer_range: 0.5,
        seed: version as u64,
    };
    init(&args).expect("the model can be made");
    path
}

async fn publish(client: &Client, version: i64, folder: &Path) {
    let uri = Some(format!("file://{}", folder.display()));
    for policy in ["default", "talk"] {
        let request = VersionRequest { version, step: Some(version), uri: uri.clone(), epoch: None, force: None };
        client.publish(policy, &request).await.expect("the version is new");
    }
}

/// A service whose sessions call the engine.
async fn service(engine_url: &str) -> TestService {
    TestService::start(&format!(
        r#"
        sessions = {{ listen = "127.0.0.1:0" }}
        upstream = [{{ name = "tiny", kind = "sglang", urls = ["{engine_url}"] }}]
        [policy_defaults]
        require = ["tokens", "logprobs", "policy_version"]
        [[policy]]
        name = "default"
        group = {{ size = 4 }}
        [[policy]]
        name = "talk"
        "#
    ))
    .await
}

async fn rows(client: &Client, policy: &str) -> Vec<Sample> {
    let request = BatchRequest { policy: Some(policy.to_owned()), wait_ms: Some(60_000), ..BatchRequest::default() };
    let batch = client.lease(&request).await.expect("the service answers").expect("a group becomes ready");
    client.samples(&batch.batch_id, &[]).await.expect("the rows arrive")
}

/// Asserts that every trained token has the log-probability that the trainer computes with the weights of its span.
/// Returns the number of these tokens.
fn check_row(row: &Sample, weights: &[(i64, Decoder)]) -> usize {
    let tokens: Vec<i64> = row.tokens.iter().flatten().map(|&token| i64::from(token)).collect();
    let (mask, logprobs) = (row.loss_mask.as_ref().expect("sent"), row.logprobs.as_ref().expect("sent"));
    let prompt = tokens.len() - mask.len();
    let mut trained = 0;
    for span in row.versions.as_ref().expect("sessions record spans") {
        let named = weights.iter().find(|(version, _)| *version == span.0).expect("the version was published");
        let expected = trainer_logprobs(&named.1, &tokens, f64::from(row.temperature));
        for place in span.1 as usize..(span.1 + span.2) as usize {
            if mask[place] == 1 {
                let (expected, found) = (expected[prompt + place - 1], f64::from(logprobs[place]));
                assert!((expected - found).abs() < TOLERANCE, "{found} in place of {expected} at {place} of {row:?}");
                trained += 1;
            }
        }
    }
    assert_eq!(trained, mask.iter().map(|&mask| usize::from(mask)).sum::<usize>(), "every trained token is in a span");
    trained
}

/// Makes a call that must be answered with this status.
async fn post(url: &str, key: Option<&str>, body: &Value, status: StatusCode) -> Value {
    let mut request = http().post(url).header("content-type", "application/json").body(body.to_string());
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let answer = request.send().await.expect("the service answers");
    let (found, text) = (answer.status(), answer.text().await.expect("the answer is whole"));
    assert_eq!(found, status, "{url} {body}: {text}");
    serde_json::from_str(&text).expect("it is JSON")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is a text"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_log_probabilities_are_the_trainers_also_across_an_exchange_of_the_weights() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (first, second) = (model(folder.path(), 1), model(folder.path(), 2));
    let engine = Engine::with(config(&[("tiny", &first)])).await;
    let service = service(&engine.url).await;
    publish(&service.client, 1, &first).await;
    let sessions = format!("{}/sessions", service.url);
    let opened = post(&sessions, None, &json!({"policy": "talk"}), StatusCode::CREATED).await;
    let calls = format!("{}/chat/completions", text(&opened["base_urls"]["openai"]));

    let (mut messages, mut sampled) = (vec![json!({"role": "user", "content": "3>"})], 0);
    for turn in 0..6 {
        if turn == 3 {
            let weights = json!({"model_path": second, "weight_version": "2"});
            engine.post("/update_weights_from_disk", weights).await;
            publish(&service.client, 2, &second).await;
        }
        let body = json!({"model": "any", "messages": messages, "max_tokens": 20});
        let answer = post(&calls, Some(text(&opened["key"])), &body, StatusCode::OK).await;
        sampled += answer["usage"]["completion_tokens"].as_u64().expect("a number") as usize;
        let said = text(&answer["choices"][0]["message"]["content"]).to_owned();
        messages.extend([json!({"role": "assistant", "content": said}), json!({"role": "user", "content": ":8>"})]);
    }
    let finish = format!("{sessions}/{}/finish", text(&opened["session_id"]));
    post(&finish, None, &json!({"reward": 1.0}), StatusCode::OK).await;

    let weights = [(1, decoder(&first)), (2, decoder(&second))];
    let rows = rows(&service.client, "talk").await;
    assert_eq!(
        rows.iter().map(|row| check_row(row, &weights)).sum::<usize>(),
        sampled,
        "all sampled tokens are trained"
    );
    let versions: BTreeSet<i64> =
        rows.iter().flat_map(|row| row.versions.iter().flatten()).map(|span| span.0).collect();
    assert_eq!(versions, BTreeSet::from([1, 2]));
    service.stop().await;
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_of_the_examples_plays_whole_groups_in_sessions() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = model(folder.path(), 1);
    let engine = Engine::with(config(&[("tiny", &path)])).await;
    let service = service(&engine.url).await;
    publish(&service.client, 1, &path).await;
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository");
    let python = Command::new(repository.join("scripts/python-env")).arg("openai").output().await;
    let python = python.expect("scripts/python-env can be run");
    assert!(
        python.status.success(),
        "the Python environment of the agent is missing; `./scripts/python-env openai` makes it, and said: {}",
        String::from_utf8_lossy(&python.stderr)
    );
    let mut agent = Command::new(String::from_utf8_lossy(&python.stdout).trim())
        .arg(repository.join("examples/openai_agent.py"))
        .args(["--server", &service.url, "--task", "lookup"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("the agent can be started");

    let rows = rows(&service.client, "default").await;
    let rollouts: BTreeSet<&String> = rows.iter().map(|row| &row.rollout_id).collect();
    assert_eq!(rollouts.len(), 4, "a group is whole: {rows:?}");
    let weights = [(1, decoder(&path))];
    for row in &rows {
        assert!(check_row(row, &weights) > 0, "every rollout is trained: {row:?}");
        assert_eq!((row.environment.as_deref(), row.reward.is_some()), (Some("lookup"), true));
    }
    agent.kill().await.expect("the agent still plays");
    service.stop().await;
    engine.stop().await;
}
