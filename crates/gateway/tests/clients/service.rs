//! The service as a process, with a fake engine behind it.

use std::{fmt::Write as _, path::Path, process::Stdio};

use anyhow::{Context as _, bail};
use forebay_client::{
    Client,
    wire::{FinishRequest, Sample, SessionAssembly, SessionOpened, SessionRequest},
};
use forebay_fake_engine::{EngineKind, FakeEngine, model};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::process;

/// The longest context of the engine. The prompts of some agents have a hundred thousand characters, most of which are
/// tokens here.
const CONTEXT_TOKENS: usize = 1 << 20;

/// Who renders the prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The engine.
    Observe,
    /// The service. The engine, SGLang, compares the ids with the messages beside them.
    Exact,
    /// The same with vLLM, which lets answers be sent while they are sampled.
    Pieces,
}

/// The running service. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) engine: FakeEngine,
    pub(crate) url: String,
    pub(crate) client: Client,
    _process: Child,
}

impl Service {
    /// Starts it with its database in this folder.
    pub(crate) async fn start(folder: &Path, mode: Mode) -> anyhow::Result<Self> {
        let (kind, name) = match mode {
            Mode::Observe | Mode::Exact => (EngineKind::Sglang, "sglang"),
            Mode::Pieces => (EngineKind::Vllm, "vllm"),
        };
        let engine = FakeEngine::start(kind).await;
        engine.switch(|switches| switches.context_tokens = CONTEXT_TOKENS);
        let config = folder.join("forebay.toml");
        let mut text = format!(
            "[sessions]\nlisten = \"127.0.0.1:0\"\n\n[[upstream]]\nname = \"fake\"\nkind = \"{name}\"\nurls = [\"{}\"]\n",
            engine.url()
        );
        if mode != Mode::Observe {
            FakeEngine::write_model(folder)?;
            let tokenizer = folder.join("tokenizer.json");
            writeln!(text, "mode = \"exact\"\ncontext_tokens = {CONTEXT_TOKENS}")?;
            writeln!(text, "tokenizer = \"{}\"", tokenizer.display())?;
            text += "family = { stops = [\"<|im_end|>\"], close = \"<|im_end|>\" }\n";
        }
        std::fs::write(&config, text)?;
        let built = process::repository().join("target/debug/forebay");
        let mut command = Command::new(std::env::var_os("FOREBAY_PROGRAM").unwrap_or_else(|| built.into()));
        let database = format!("sqlite:{}", folder.join("forebay.db").display());
        command.args(["--listen", "127.0.0.1:0", "--database", &database, "--log", "json", "--config"]).arg(&config);
        let mut process = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().context("the service starts")?;
        let mut lines = BufReader::new(process.stderr.take().context("its log is a pipe")?).lines();
        while let Some(line) = lines.next_line().await? {
            let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if event["message"] != "serving" {
                continue;
            }
            let address = event["listen"].as_str().context("the address is text")?;
            let url = format!("http://{address}");
            let client = Client::new(&url)?;
            // A full pipe would block the service.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok(Self { engine, url, client, _process: process });
        }
        bail!("the service ends with {}", process.wait().await?)
    }

    /// Opens a session.
    pub(crate) async fn open(&self, request: serde_json::Value) -> anyhow::Result<SessionOpened> {
        let request: SessionRequest = serde_json::from_value(request)?;
        Ok(self.client.open_session(&request).await?)
    }

    /// Ends a session with a reward, and returns what became of its calls.
    pub(crate) async fn finish(&self, session: &str, reward: f64) -> anyhow::Result<SessionAssembly> {
        let request: FinishRequest = serde_json::from_value(json!({"reward": reward}))?;
        let ended = self.client.finish_session(session, &request).await?;
        Ok(ended.assembly)
    }

    /// Leases the next batch, and checks each trained token against the context that it was sampled in. Returns the
    /// number of trained tokens.
    pub(crate) async fn check_batch(&self) -> anyhow::Result<usize> {
        let request = serde_json::from_value(json!({"policy": "default", "wait_ms": 10000}))?;
        let batch = self.client.lease(&request).await?.context("there is no batch")?;
        let mut trained = 0;
        for row in self.client.samples(&batch.batch_id, &[]).await? {
            trained += check_row(&row)?;
        }
        Ok(trained)
    }
}

fn check_row(row: &Sample) -> anyhow::Result<usize> {
    let (tokens, mask, logprobs) = (row.tokens.as_deref(), row.loss_mask.as_deref(), row.logprobs.as_deref());
    let (Some(tokens), Some(mask), Some(logprobs)) = (tokens, mask, logprobs) else { bail!("a row is empty") };
    let (prompt, response) = tokens.split_at(tokens.len() - mask.len());
    let mut context = model::Context::new(prompt);
    let mut trained = 0;
    for ((&token, &mask), &logprob) in response.iter().zip(mask).zip(logprobs) {
        if mask == 1 {
            let expected = context.logprob(token, 1.0);
            if (logprob - expected).abs() > 1e-5 {
                bail!("a trained token has the log-probability {logprob} instead of {expected}");
            }
            trained += 1;
        }
        context = context.with(token);
    }
    Ok(trained)
}
