//! The inference server over real sockets, with tiny models of random weights.

mod chat;
mod control;
mod follow;
mod generate;
mod limits;
mod publishing;
mod sessions;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use forebay_trainer::{
    checkpoint::{self, Storage, WriteOptions},
    config::{ComputeConfig, DeviceConfig},
    model::{ComputeKind, Decoder, ModelConfig},
    serve::{Dialect, Limits, ModelSource, ServeConfig, Server, WeightSource},
    service::Credentials,
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use crate::support::http;

/// Longest sequence of the models here. Answers of this length take seconds, so what is done after the first token is
/// done in the middle of an answer.
const CONTEXT: usize = 16_384;

/// Longer than any call takes, so that a call that hangs is a failure.
const PATIENCE: Duration = Duration::from_mins(2);

/// Differences of log-probabilities that rounding explains.
const TOLERANCE: f64 = 1e-4;

/// Writes a checkpoint of random weights, for a model of 64 tokens without an end token.
fn checkpoint(folder: &Path, name: &str, seed: u64) -> PathBuf {
    checkpoint_of(folder, name, seed, &json!({}))
}

/// The same with other keys in its configuration.
fn checkpoint_of(folder: &Path, name: &str, seed: u64, changes: &Value) -> PathBuf {
    let mut config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "torch_dtype": "float32",
    });
    for (key, value) in changes.as_object().expect("changes are an object") {
        config[key] = value.clone();
    }
    let config = config.to_string();
    let decoder = Decoder::random(
        ModelConfig::parse(&config).expect("the configuration is valid"),
        Device::Cpu,
        ComputeKind::Float32,
        seed,
    );
    let source = tempfile::tempdir().expect("a temporary folder can be made");
    std::fs::write(source.path().join("config.json"), config).expect("the folder can be written to");
    // A safetensors file without tensors: the length of the header, and the header.
    std::fs::write(source.path().join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").expect("as before");
    let path = folder.join(name);
    let options = WriteOptions { storage: Storage::Float32, ..WriteOptions::default() };
    checkpoint::write(decoder.parameters(), source.path(), &path, &options).expect("the folder can be written to");
    path
}

fn decoder(folder: &Path) -> Decoder {
    Decoder::load(folder, Device::Cpu, ComputeKind::Float32).expect("it was just written")
}

/// Log-probabilities of every token of `tokens` after the first, from one forward pass of the trainer's model.
fn trainer_logprobs(decoder: &Decoder, tokens: &[i64], temperature: f64) -> Vec<f64> {
    let hidden = tch::no_grad(|| decoder.hidden(&Tensor::from_slice(tokens).unsqueeze(0)));
    let logits = tch::no_grad(|| decoder.logits(&hidden)).squeeze_dim(0) / temperature;
    let logprobs = logits.log_softmax(-1, Kind::Float);
    (1..tokens.len()).map(|at| logprobs.double_value(&[at as i64 - 1, tokens[at]])).collect()
}

/// A server with its models.
struct Engine {
    url: String,
    http: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Engine {
    /// Serves one model, which is called `tiny`, with label `1`.
    async fn start(folder: &Path) -> Self {
        Self::with(config(&[("tiny", folder)])).await
    }

    async fn with(config: ServeConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let server = Server::open(config, listener).await.expect("the models can be loaded");
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            server.run(async { drop(stopped.await) }).await.expect("the server ends when it is told to");
        });
        Self { url, http: http(), stop: Some(stop), task }
    }

    async fn send(&self, path: &str, body: &Value) -> reqwest::Response {
        let request = self.http.post(format!("{}{path}", self.url)).body(body.to_string());
        request.timeout(PATIENCE).send().await.expect("the server answers in time")
    }

    /// Makes a call that may fail.
    async fn call(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let response = self.send(path, body).await;
        let (status, text) = (response.status(), response.text().await.expect("the answer is whole"));
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("{status} is not JSON: {text}")))
    }

    /// Makes a call that must succeed.
    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.call(path, &body).await;
        assert_eq!(status, StatusCode::OK, "{path} {body}: {answer}");
        answer
    }

    async fn get(&self, path: &str) -> Value {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.expect("the server answers");
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        serde_json::from_str(&answer.text().await.expect("the answer is whole")).expect("it is JSON")
    }

    /// Begins a call, and returns what waits for its answer.
    fn begin(&self, path: &'static str, body: Value) -> JoinHandle<Value> {
        let (url, http) = (self.url.clone(), self.http.clone());
        tokio::spawn(async move {
            let sent = http.post(format!("{url}{path}")).body(body.to_string()).timeout(PATIENCE).send();
            let text = sent.await.expect("the server answers").text().await.expect("the answer is whole");
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("it is not JSON: {text}"))
        })
    }

    async fn stream(&self, path: &str, mut body: Value) -> Events {
        body["stream"] = true.into();
        let response = self.send(path, &body).await;
        assert_eq!(response.status(), StatusCode::OK);
        Events { response, text: String::new() }
    }

    /// Waits until the server's counts are as expected. Fails after a deadline that only a server that hangs exceeds.
    async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        let looking = async {
            while !holds(&self.get("/server_info").await) {
                tokio::task::yield_now().await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_mins(1), looking).await;
        assert!(in_time.is_ok(), "never: {what}");
    }

    async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        (&mut self.task).await.expect("the server ends");
    }
}

/// Serves models of these names and folders.
fn config(models: &[(&str, &Path)]) -> ServeConfig {
    let source = |&(name, folder): &(&str, &Path)| ModelSource {
        name: name.to_owned(),
        weights: WeightSource::Folder { folder: folder.to_owned(), version: "1".to_owned() },
    };
    ServeConfig {
        models: models.iter().map(source).collect(),
        credentials: Credentials::default(),
        limits: Limits::default(),
        device: DeviceConfig::Cpu,
        compute: ComputeConfig::Float32,
        dialect: Dialect::Sglang,
        api_key: None,
        insecure: false,
    }
}

/// The server-sent events of an answer.
struct Events {
    response: reqwest::Response,
    text: String,
}

impl Events {
    /// The next event, or `None` at the end, which must be marked.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                match event.trim_end().strip_prefix("data: ") {
                    Some("[DONE]") => {
                        assert_eq!((self.text.as_str(), self.response.chunk().await.ok().flatten()), ("", None));
                        return None;
                    }
                    Some(data) => return Some(serde_json::from_str(data).expect("events are JSON")),
                    // A comment.
                    None => continue,
                }
            }
            let chunk = self.response.chunk().await.expect("the stream is whole").expect("the stream has an end mark");
            self.text.push_str(std::str::from_utf8(&chunk).expect("characters are not split"));
        }
    }

    async fn last(mut self) -> Value {
        let mut last = None;
        while let Some(event) = self.next().await {
            last = Some(event);
        }
        last.expect("there is an event")
    }
}

/// Ids of an answer of `/generate`.
fn ids(answer: &Value) -> Vec<i64> {
    let ids = answer["output_ids"].as_array().expect("there are ids");
    ids.iter().map(|id| id.as_i64().expect("ids are integers")).collect()
}

/// Pairs of log-probability and id in a list of `meta_info`.
fn pairs(list: &Value) -> Vec<(Option<f64>, i64)> {
    let pairs = list.as_array().unwrap_or_else(|| panic!("{list} is a list"));
    pairs.iter().map(|pair| (pair[0].as_f64(), pair[1].as_i64().expect("ids are integers"))).collect()
}

/// Asserts that every token of an answer of `/generate` has the log-probability that the trainer computes with the
/// weights that the token's span names.
fn check_logprobs(answer: &Value, prompt: &[i64], temperature: f64, weights: &[(&str, &Decoder)]) {
    let (ids, meta) = (ids(answer), &answer["meta_info"]);
    let reported = pairs(&meta["output_token_logprobs"]);
    assert_eq!(reported.iter().map(|&(_, id)| id).collect::<Vec<_>>(), ids);
    let tokens: Vec<i64> = prompt.iter().chain(&ids).copied().collect();
    let mut covered = 0;
    for span in meta["weight_versions"].as_array().expect("there are spans") {
        let (start, end) = (span["start"].as_u64().expect("a number"), span["end"].as_u64().expect("a number"));
        assert_eq!(start, covered, "spans tile the tokens");
        assert!(end > start, "no span is empty");
        covered = end;
        let named = weights.iter().find(|(version, _)| span["version"] == *version);
        let expected = trainer_logprobs(named.expect("the version was loaded").1, &tokens, temperature);
        for at in start as usize..end as usize {
            let expected = expected[prompt.len() + at - 1];
            let found = reported[at].0.expect("every token has a log-probability");
            assert!((expected - found).abs() < TOLERANCE, "{found} in place of {expected} at {at} of {span}");
        }
    }
    assert_eq!(covered as usize, ids.len(), "spans tile the tokens");
    assert_eq!(meta["completion_tokens"], ids.len());
}

/// Prompts of different lengths.
fn prompts(count: usize) -> Vec<Vec<i64>> {
    (0..count).map(|row| (0..3 + row * 7 % 40).map(|at| ((row * 13 + at * at * 5) % 64) as i64).collect()).collect()
}
