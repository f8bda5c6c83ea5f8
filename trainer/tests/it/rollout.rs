//! The rollout worker against a service in this process, with models that `init` made.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use forebay_client::{
    Client,
    wire::{AckRequest, BatchDescriptor, BatchRequest, Sample, VersionRequest},
};
use forebay_fake_engine::{
    FakeEngine,
    tokenizer::{self, IM_END},
};
use forebay_trainer::{
    model::{ComputeKind, Decoder},
    rollout::{
        Family, InitArgs, InitError, RolloutError, Tally, Tokenizer, Worker, WorkerConfig, init,
        task::{Outcome, Problem, Reply, Task, TaskName, Turn},
    },
    service::{Credentials, Patience, Service},
};
use tch::{Device, Kind, Tensor};
use tokio::{runtime::Handle, task::JoinHandle};

use crate::support::TestService;

const GROUP_SIZE: u32 = 4;

/// A batch is one group; tokens, log-probabilities and versions are required.
const POLICIES: &str = r#"
    [policy_defaults]
    require = ["tokens", "logprobs", "policy_version"]
    group = { size = 4 }
    settle = "ack"
    staleness = { action = "drop" }
    backlog = { max_ready_rollouts = 64 }
"#;

fn init_args(folder: &Path, task: TaskName, seed: u64) -> InitArgs {
    InitArgs {
        folder: folder.to_owned(),
        task,
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
        seed,
    }
}

/// Creates a new model in `folder`. Returns its path and the URI under which it is published.
fn model(folder: &Path, name: &str, task: TaskName, seed: u64) -> (PathBuf, String) {
    let path = folder.join(name);
    init(&init_args(&path, task, seed)).expect("the folder can be written to");
    let uri = format!("file://{}", path.display());
    (path, uri)
}

async fn publish(client: &Client, version: i64, uri: &str) {
    let request = VersionRequest { version, step: Some(version), uri: Some(uri.to_owned()), epoch: None, force: None };
    client.publish("default", &request).await.expect("the version is new");
}

fn config(task: TaskName, rollouts_max: Option<u64>) -> WorkerConfig {
    WorkerConfig {
        task: task.task(),
        worker: "worker".to_owned(),
        session: "1".to_owned(),
        seed: 5,
        group_size: None,
        groups_per_round: 2,
        temperature: 0.7,
        turn_tokens_max: None,
        rollouts_max,
        device: Device::Cpu,
        compute: ComputeKind::Float32,
    }
}

/// A worker that plays in a thread of its own, as the command `rollout` does.
struct Playing {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Tally, RolloutError>>,
}

impl Playing {
    fn start(service: &TestService, config: WorkerConfig) -> Self {
        let (runtime, stop) = (Handle::current(), Arc::new(AtomicBool::new(false)));
        let service = Service::new(&service.url, "default", "worker", &Credentials::default(), Patience::ENDLESS)
            .expect("the URL is valid");
        let stopped = Arc::clone(&stop);
        let play = move || Worker::new(&runtime, service, config).run(&|| stopped.load(Ordering::SeqCst));
        Self { stop, thread: tokio::task::spawn_blocking(play) }
    }

    async fn end(self) -> Result<Tally, RolloutError> {
        self.thread.await.expect("the worker does not panic")
    }

    async fn stop(self) -> Tally {
        self.stop.store(true, Ordering::SeqCst);
        self.end().await.expect("the worker stops without an error")
    }
}

/// Plays until the configured number of rollouts is reached.
async fn play(service: &TestService, config: WorkerConfig) -> Tally {
    Playing::start(service, config).end().await.expect("the worker ends without an error")
}

/// Leases the next batch and reads its rows. Fails if there is no batch.
async fn lease(client: &Client) -> (BatchDescriptor, Vec<Sample>) {
    let request = BatchRequest { wait_ms: Some(30_000), ..BatchRequest::default() };
    let batch = client.lease(&request).await.expect("the service answers").expect("a group becomes ready");
    let rows = client.samples(&batch.batch_id, &[]).await.expect("the rows arrive");
    (batch, rows)
}

async fn ack(client: &Client, batch: &BatchDescriptor, step: i64) {
    let lease = batch.lease.clone().expect("the batch is leased");
    let request = AckRequest { lease, step, epoch: None };
    client.ack(&batch.batch_id, &request).await.expect("the lease is alive");
}

/// Waits until the condition holds. Fails after a deadline that only a worker that hangs exceeds.
async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let patience = async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_mins(1), patience).await.is_ok(), "never: {what}");
}

async fn received(client: &Client) -> i64 {
    client.policy("default").await.expect("it answers").expect("it exists").rollouts.values().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_groups_become_ready() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    publish(&service.client, 1, &model(folder.path(), "v1", TaskName::Arithmetic, 1).1).await;
    let tally = play(&service, config(TaskName::Arithmetic, Some(16))).await;
    assert_eq!((tally.rollouts, tally.posted.groups, tally.posted.rollouts), (16, 4, 16));
    assert_eq!((tally.posted.duplicates, tally.posted.refused, tally.posted.abandoned), (0, 0, 0));
    for _ in 0..4 {
        let (_, rows) = lease(&service.client).await;
        assert_eq!(rows.len(), GROUP_SIZE as usize);
        for row in &rows {
            assert_eq!(row.group_id, rows[0].group_id);
            assert_eq!(row.environment.as_deref(), Some("arithmetic"));
            assert!(row.reward.is_some_and(|reward| (0.0..=1.0).contains(&reward)));
            assert!((row.temperature - 0.7).abs() < 1e-6);
        }
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_are_those_of_a_forward_pass_and_tools_are_masked() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    let (path, uri) = model(folder.path(), "v1", TaskName::Arithmetic, 2);
    publish(&service.client, 1, &uri).await;
    let chatty = WorkerConfig { task: Box::new(Chatty), ..config(TaskName::Arithmetic, Some(16)) };
    assert_eq!(play(&service, chatty).await.posted.rollouts, 16);
    let decoder = Decoder::load(&path, Device::Cpu, ComputeKind::Float32).expect("it was just written");
    let tokenizer = Tokenizer::load(&path).expect("it was just written");
    for _ in 0..4 {
        let (_, rows) = lease(&service.client).await;
        for row in &rows {
            check_row(row, &decoder);
            assert_eq!(tool_said(row, &tokenizer), "+1=+2=");
        }
    }
    service.stop().await;
}

/// A task whose tool answers the first two turns, whatever they contain.
#[derive(Debug)]
struct Chatty;

impl Task for Chatty {
    fn name(&self) -> &'static str {
        "chatty"
    }

    fn alphabet(&self) -> &'static str {
        "0123456789+="
    }

    fn turn_tokens(&self) -> usize {
        3
    }

    fn pose(&self, _seed: u64, _number: u64) -> Box<dyn Problem> {
        Box::new(Self)
    }
}

impl Problem for Chatty {
    fn prompt(&self) -> String {
        "1=".to_owned()
    }

    fn reply(&self, turns: &[Turn]) -> Reply {
        match turns.len() {
            turn @ ..3 => Reply::Tool(format!("+{turn}=")),
            _ => Reply::End(Outcome { reward: 1.0, components: BTreeMap::new() }),
        }
    }
}

/// The masked tokens of a row, as text.
fn tool_said(row: &Sample, tokenizer: &Tokenizer) -> String {
    let (tokens, mask) = (row.tokens.as_ref().expect("sent"), row.loss_mask.as_ref().expect("sent"));
    let response = tokens[tokens.len() - mask.len()..].iter().zip(mask);
    let masked: Vec<i64> = response.filter(|&(_, &mask)| mask == 0).map(|(&token, _)| i64::from(token)).collect();
    tokenizer.decode(&masked)
}

fn check_row(row: &Sample, decoder: &Decoder) {
    let tokens: Vec<i64> = row.tokens.iter().flatten().map(|&token| i64::from(token)).collect();
    let (mask, logprobs) = (row.loss_mask.as_ref().expect("sent"), row.logprobs.as_ref().expect("sent"));
    let prompt = tokens.len() - mask.len();
    let states = decoder.hidden(&Tensor::from_slice(&tokens).unsqueeze(0));
    let logits = decoder.logits(&states).squeeze_dim(0) / f64::from(row.temperature);
    let expected = logits.log_softmax(-1, Kind::Float);
    for (place, (&mask, &logprob)) in mask.iter().zip(logprobs).enumerate() {
        let at = prompt + place;
        let expected = expected.double_value(&[at as i64 - 1, tokens[at]]);
        if mask == 1 {
            assert!((expected - f64::from(logprob)).abs() < 1e-4, "{expected} at {place} of {row:?}");
        } else {
            assert_eq!(logprob.to_bits(), 0.0_f32.to_bits());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_waits_for_the_first_version_and_follows_the_next() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    let client = service.client.clone();
    let (_, first) = model(folder.path(), "v1", TaskName::Arithmetic, 1);
    let (path, second) = model(folder.path(), "v2", TaskName::Arithmetic, 2);
    let playing = Playing::start(&service, config(TaskName::Arithmetic, None));
    publish(&client, 1, &first).await;
    let mut step = 0;
    let mut next = async || {
        step += 1;
        let (batch, rows) = lease(&client).await;
        ack(&client, &batch, step).await;
        rows
    };
    for row in next().await {
        assert_eq!((row.policy_version, spans(&row)), (Some(1), vec![(1, 0, i64::from(row.response_length))]));
    }
    publish(&client, 2, &second).await;
    let mut newer = next().await;
    while newer[0].policy_version != Some(2) {
        assert_eq!(newer[0].policy_version, Some(1), "no version was skipped or made up");
        newer = next().await;
    }
    // The second version's weights gave these tokens: the number alone would not prove it.
    let decoder = Decoder::load(&path, Device::Cpu, ComputeKind::Float32).expect("it was just written");
    for row in &newer {
        assert_eq!(spans(row), [(2, 0, i64::from(row.response_length))]);
        check_row(row, &decoder);
    }
    let tally = playing.stop().await;
    assert_eq!(tally.versions, 2);
    service.stop().await;
}

fn spans(row: &Sample) -> Vec<(i64, i64, i64)> {
    row.versions.iter().flatten().map(|span| (span.0, span.1, span.2)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_whose_folder_is_gone_is_looked_for_again() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    publish(&service.client, 1, &format!("file://{}", folder.path().join("pruned").display())).await;
    let playing = Playing::start(&service, config(TaskName::Arithmetic, Some(8)));
    publish(&service.client, 2, &model(folder.path(), "v2", TaskName::Arithmetic, 1).1).await;
    let tally = playing.end().await.expect("a folder that is gone is no error");
    assert_eq!((tally.rollouts, tally.versions), (8, 1));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_seed_plays_the_same_and_a_repeat_is_recognised() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    publish(&service.client, 1, &model(folder.path(), "v1", TaskName::Arithmetic, 1).1).await;
    let first = play(&service, config(TaskName::Arithmetic, Some(16))).await;
    assert_eq!(first.posted.duplicates, 0);
    // If any token or number differed, the service would answer with a conflict.
    let second = play(&service, config(TaskName::Arithmetic, Some(16))).await;
    assert_eq!((second.posted.rollouts, second.posted.duplicates), (16, 16));
    assert_eq!(received(&service.client).await, 16);
    let third = WorkerConfig { session: "2".to_owned(), seed: 6, ..config(TaskName::Arithmetic, Some(16)) };
    assert_eq!(play(&service, third).await.posted.duplicates, 0);
    assert_eq!(received(&service.client).await, 32);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_trainer_the_worker_fills_the_backlog_and_waits() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    publish(&service.client, 1, &model(folder.path(), "v1", TaskName::Arithmetic, 1).1).await;
    let playing = Playing::start(&service, config(TaskName::Arithmetic, None));
    until("the backlog is full", async || received(&service.client).await >= 64).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(received(&service.client).await, 64, "a full backlog takes no more");
    assert!(!playing.thread.is_finished(), "a full backlog does not end the worker");
    for step in 1..=4 {
        let (batch, _) = lease(&service.client).await;
        ack(&service.client, &batch, step).await;
    }
    until("room is used", async || received(&service.client).await >= 80).await;
    let tally = playing.stop().await;
    assert_eq!(tally.rollouts, tally.posted.rollouts + tally.posted.abandoned);
    assert_eq!(received(&service.client).await, tally.posted.rollouts as i64);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_of_another_task_ends_the_worker() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = TestService::start(POLICIES).await;
    publish(&service.client, 1, &model(folder.path(), "v1", TaskName::Arithmetic, 1).1).await;
    let error = Playing::start(&service, config(TaskName::Lookup, None)).end().await;
    assert!(matches!(error, Err(RolloutError::Tokenizer(_))), "{error:?}");
    service.stop().await;
}

#[test]
fn init_makes_the_same_checkpoint_again_and_replaces_none() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let weights = |name: &str, seed| {
        let (path, _) = model(folder.path(), name, TaskName::Lookup, seed);
        for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(path.join(file).is_file(), "{file} is there");
        }
        std::fs::read(path.join("model.safetensors")).expect("the weights are there")
    };
    let first = weights("a", 1);
    assert_eq!(first, weights("b", 1));
    assert_ne!(first, weights("c", 2));
    let again = init(&init_args(&folder.path().join("a"), TaskName::Lookup, 3));
    assert!(matches!(again, Err(InitError::Checkpoint(_))), "{again:?}");
    let odd = InitArgs { heads: 3, ..init_args(&folder.path().join("d"), TaskName::Lookup, 1) };
    assert!(matches!(init(&odd), Err(InitError::Heads { .. })));
}

#[test]
fn init_takes_the_tokenizer_of_a_folder() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let files = folder.path().join("files");
    std::fs::create_dir(&files).expect("the folder is empty");
    FakeEngine::write_model(&files).expect("the folder can be written to");
    let made = |name: &str| InitArgs {
        tokenizer: Some(files.clone()),
        positions: 4_096,
        ..init_args(&folder.path().join(name), TaskName::Arithmetic, 1)
    };
    let args = made("a");
    init(&args).expect("the folder has a tokenizer");
    let decoder = Decoder::load(&args.folder, Device::Cpu, ComputeKind::Float32).expect("it is supported");
    let config = decoder.config();
    assert_eq!(config.vocab_size, i64::from(tokenizer::VOCABULARY));
    assert_eq!((config.max_position_embeddings, config.end_tokens.as_slice()), (4_096, &[i64::from(IM_END)][..]));
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).expect("the file is there");
        assert_eq!(read(&args.folder), read(&files), "{file}");
    }

    let refusal = |name: &str| {
        let error = init(&made(name)).expect_err("the folder has no tokenizer that can be used").to_string();
        assert!(!folder.path().join(name).exists(), "nothing is made");
        error
    };
    std::fs::write(files.join("tokenizer_config.json"), r#"{"eos_token": "<eos>"}"#).expect("it can be written");
    assert!(refusal("b").contains("`eos_token`"));
    std::fs::write(files.join("tokenizer.json"), "{}").expect("it can be written");
    assert!(refusal("c").contains("tokenizer.json cannot be used"));
    std::fs::remove_file(files.join("tokenizer.json")).expect("it is there");
    assert!(refusal("d").contains("cannot copy"));
}

#[test]
fn init_takes_an_alphabet() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let made = |name: &str, alphabet: &str, chat: bool| InitArgs {
        alphabet: Some(alphabet.to_owned()),
        chat,
        ..init_args(&folder.path().join(name), TaskName::Arithmetic, 1)
    };
    for (name, chat, special) in [("task", false, 4), ("chat", true, 8)] {
        let args = made(name, "abc", chat);
        init(&args).expect("no character is there twice");
        let decoder = Decoder::load(&args.folder, Device::Cpu, ComputeKind::Float32).expect("it is supported");
        assert_eq!((decoder.config().vocab_size, decoder.config().end_tokens.as_slice()), (special + 3, &[2][..]));
        assert_eq!(Tokenizer::load(&args.folder).is_ok(), !chat, "a worker of `rollout` needs the form of its tasks");
    }
    let twice = init(&made("twice", "aba", true));
    assert!(matches!(twice, Err(InitError::Tokenizer(_))), "{twice:?}");
    assert!(!folder.path().join("twice").exists(), "nothing is made");
}

#[test]
fn every_family_can_be_made_and_loaded() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    for (name, family) in [("llama", Family::Llama), ("qwen2", Family::Qwen2), ("qwen3", Family::Qwen3)] {
        let path = folder.path().join(name);
        let args = InitArgs { family, ..init_args(&path, TaskName::Arithmetic, 1) };
        init(&args).expect("the folder can be written to");
        let decoder = Decoder::load(&path, Device::Cpu, ComputeKind::Float32).expect("it is supported");
        let has_norms = decoder.parameters().get("model.layers.0.self_attn.q_norm.weight").is_some();
        assert_eq!(has_norms, family == Family::Qwen3);
    }
}
