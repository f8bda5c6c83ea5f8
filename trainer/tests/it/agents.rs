//! What OpenHands sent, from sessions into a step: the way of its tokens until they are in a checkpoint.
//!
//! `make outside NAME=openhands` does the same with OpenHands itself and all programs as processes.

use std::path::{Path, PathBuf};

use forebay_client::wire::{FinishRequest, RolloutState, SessionRequest};
use forebay_fake_engine::{EngineKind, FakeEngine, recording::Recording, tokenizer};
use forebay_trainer::{
    config::TrainConfig,
    model::{ComputeKind, Decoder},
    rollout::{Family, InitArgs, init, task::TaskName},
};
use serde_json::{Value, json};
use tch::Device;

use crate::support::{TestService, http, run};

/// What the model writes in place of `a - b`. The reward is 1 where it is a sum.
const REPAIRS: [(&str, f64); 4] = [("a + b", 1.0), ("a * b", 0.0), ("b + a", 1.0), ("a - b - b", 0.0)];

const PROMPT_TOKENS_MAX: i64 = 1 << 16;

/// A session of OpenHands, as it was recorded.
struct Played {
    trained_tokens: u64,
    segments: u64,
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository")
}

/// A model of random weights with the vocabulary of the engine.
fn model(folder: &Path) -> PathBuf {
    let files = folder.join("files");
    std::fs::create_dir(&files).expect("the folder is empty");
    FakeEngine::write_model(&files).expect("the folder can be written to");
    let args = InitArgs {
        folder: folder.join("model"),
        task: TaskName::Arithmetic,
        tokenizer: Some(files),
        alphabet: None,
        chat: false,
        family: Family::Qwen3,
        hidden: 16,
        intermediate: None,
        layers: 1,
        heads: 2,
        positions: PROMPT_TOKENS_MAX,
        initializer_range: 0.1,
        seed: 1,
    };
    init(&args).expect("the model can be made");
    args.folder
}

/// Sends what OpenHands sent when its model repaired the file in this way, and finishes the session.
async fn play(service: &TestService, engine: &FakeEngine, place: usize) -> Played {
    let (repair, reward) = REPAIRS[place];
    let path = repository().join("tests/clients/recordings/openhands_agent.json");
    let text = std::fs::read_to_string(path).expect("there is a recording");
    let recording: Recording = serde_json::from_str(&text.replace("a + b", repair)).expect("it is a recording");
    // With reasoning, which OpenHands does not send back, the calls become several segments.
    let recorded = &recording.runs[place % recording.runs.len()];
    for script in &recorded.scripts {
        engine.script(&script.key, script.answers());
    }
    let request = json!({"rollout_id": format!("repair-{place}"), "group_id": "repair", "group_size": REPAIRS.len()});
    let request: SessionRequest = serde_json::from_value(request).expect("it is a request");
    let session = service.client.open_session(&request).await.expect("the session opens");
    let http = http();
    for (sent, body) in recorded.requests.iter().zip(recorded.bodies()) {
        let answer = sent.request(&http, &session.base_urls.anthropic, &session.key, body).send().await;
        assert_eq!(answer.expect("the listener answers").status().as_u16(), sent.status);
    }
    let finish = json!({"reward": reward, "reward_components": {"tests": reward}});
    let request: FinishRequest = serde_json::from_value(finish).expect("it is a request");
    let ended = service.client.finish_session(&session.session_id, &request).await.expect("the session ends");
    assert_eq!(ended.assembly.segments, recorded.counts.observe.segments);
    Played { trained_tokens: ended.assembly.trained_tokens, segments: ended.assembly.segments }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_agent_sent_becomes_a_step_and_the_ledger_says_which() {
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    engine.switch(|switches| switches.context_tokens = PROMPT_TOKENS_MAX as usize);
    let service = TestService::start(&format!(
        r#"
        sessions = {{ listen = "127.0.0.1:0" }}
        upstream = [{{ name = "fake", kind = "sglang", urls = ["{}"] }}]
        [policy_defaults]
        require = ["tokens", "logprobs"]
        group = {{ size = 4 }}
        batch = {{ groups = 1 }}
        "#,
        engine.url()
    ))
    .await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let model = model(folder.path());
    let mut played = Vec::new();
    for place in 0..REPAIRS.len() {
        played.push(play(&service, &engine, place).await);
    }
    assert!(played.iter().all(|played| played.trained_tokens > 0));

    let output = folder.path().join("run");
    let mut config = TrainConfig::new(model.clone(), output.clone());
    config.server.clone_from(&service.url);
    config.steps = 1;
    config.device = forebay_trainer::config::DeviceConfig::Cpu;
    run(config).await.expect("it trains");

    let mut tokens = 0;
    let mut batches = Vec::new();
    for (place, played) in played.iter().enumerate() {
        let story = service.client.story("default", &format!("repair-{place}")).await.expect("it answers");
        let story = story.expect("the rollout is in the ledger");
        assert_eq!((story.state, story.step), (RolloutState::Checkpointed, Some(1)), "{story:?}");
        assert_eq!((story.reward, u64::from(story.segments)), (Some(REPAIRS[place].1), played.segments));
        assert_eq!(story.advantage.is_some_and(|advantage| advantage > 0.0), REPAIRS[place].1 > 0.5, "{story:?}");
        tokens += story.tokens;
        batches.extend(story.batches);
    }
    batches.dedup();
    let line = std::fs::read_to_string(output.join("metrics.jsonl")).expect("the step is reported");
    let report: Value = serde_json::from_str(&line).expect("there is one line");
    assert_eq!(batches, [report["batch_id"].as_str().expect("a text")], "one batch has the whole group");
    assert_eq!((&report["tokens"], &report["rollouts"]), (&json!(tokens), &json!(REPAIRS.len())));
    let trained: u64 = played.iter().map(|played| played.trained_tokens).sum();
    assert_eq!(report["trained_tokens"], trained);
    let mean = REPAIRS.iter().map(|(_, reward)| reward).sum::<f64>() / REPAIRS.len() as f64;
    assert_eq!(report["components/tests/mean"].as_f64(), Some(mean), "{report}");

    let policy = service.client.policy("default").await.expect("it answers").expect("it exists");
    assert_eq!((policy.checkpoint_step, policy.version_step), (Some(1), Some(1)));
    let published = policy.version_uri.expect("the version is a folder");
    let published = PathBuf::from(published.strip_prefix("file://").expect("it is on this machine"));
    let saved = output.join("checkpoints/step-00000001/model");
    for folder in [saved, published] {
        let decoder = Decoder::load(&folder, Device::Cpu, ComputeKind::Float32).expect("the weights can be loaded");
        assert_eq!(decoder.config().vocab_size, i64::from(tokenizer::VOCABULARY));
        let before = Decoder::load(&model, Device::Cpu, ComputeKind::Float32).expect("it was just made");
        let moved = (decoder.head() - before.head()).abs().max().double_value(&[]);
        assert!(moved > 0.0, "{} has the weights of before", folder.display());
    }
    service.stop().await;
}
