//! What recording costs: the time that a session adds to a call of its engine, the time of a call that is answered from
//! the record of an earlier attempt, the bytes that a turn takes on disk, and the time of a finish.
//!
//! Service, engine and agents are processes and tasks of one machine. The engine answers after a pause, with ids that
//! continue the conversation; it is asked directly and through sessions in turn. `make bench NAME=sessions` prints
//! tables; nothing is asserted.

#[path = "common/process.rs"]
mod process;

use std::{
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use axum::{Router, body::Bytes, response::IntoResponse as _, routing::post};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use self::process::Service;

/// Sessions in parallel.
const SESSIONS: usize = 64;

/// Turns of each session in a round.
const TURNS: usize = 12;

const ROUNDS: usize = 3;

/// How long the engine takes for an answer.
const THINK: Duration = Duration::from_millis(500);

/// Ids of the first prompt, of an answer, and of what a turn adds between two answers.
const FIRST: usize = 2_000;
const SAMPLED: usize = 200;
const BETWEEN: usize = 400;

/// Turns of the long session.
const LONG: usize = 200;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    forebay_client::install_tls_provider();
    let folder = tempfile::tempdir()?;
    let engine = engine(THINK).await?;
    let fast = self::engine(Duration::ZERO).await?;
    let mut out = std::io::stdout();

    let service = Service::with_engine(folder.path(), "calls", &engine).await?;
    let (mut direct, mut recorded, mut resumed) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut agents = Agent::open_all(&service, round).await?;
        direct.push(calls(&service, Some(&engine), &agents).await?);
        recorded.push(calls(&service, None, &agents).await?);
        for agent in &mut agents {
            *agent = agent.resumed(&service).await?;
        }
        resumed.push(calls(&service, None, &agents).await?);
    }
    drop(service);
    let [direct, recorded, resumed] = [direct, recorded, resumed].map(|rounds| Percentiles::of(&rounds));
    writeln!(out, "{SESSIONS} sessions, an engine that takes {} ms; milliseconds of a call", THINK.as_millis())?;
    writeln!(out, "| | p50 | p99 |\n|---|---|---|")?;
    writeln!(out, "| the engine itself | {:.1} | {:.1} |", direct.p50, direct.p99)?;
    writeln!(out, "| through a session | {:.1} | {:.1} |", recorded.p50, recorded.p99)?;
    writeln!(out, "| added | {:.1} | {:.1} |", recorded.p50 - direct.p50, recorded.p99 - direct.p99)?;
    writeln!(out, "| again, in a session that was resumed | {:.1} | {:.1} |\n", resumed.p50, resumed.p99)?;

    let service = Service::with_engine(folder.path(), "long", &fast).await?;
    let agent = Agent::open(&service, "long").await?;
    writeln!(out, "one session of {LONG} turns\n| turns | stored bytes of a turn |\n|---|---|")?;
    let mut before = 0;
    for turn in 0..LONG {
        agent.call(&service.http, None, turn).await?;
        if (turn + 1).is_multiple_of(LONG / 4) {
            let session: Value = service.get(&format!("/sessions/{}", agent.id)).await?;
            let bytes = session["bytes"].as_u64().context("a session has bytes")?;
            writeln!(out, "| {} to {} | {} |", turn + 2 - LONG / 4, turn + 1, (bytes - before) / (LONG as u64 / 4))?;
            before = bytes;
        }
    }
    let started = Instant::now();
    let ended = service.post(&format!("/sessions/{}/finish", agent.id), json!({"reward": 1.0})).await?;
    writeln!(out, "\nits finish: {:.0} ms, {}", started.elapsed().as_secs_f64() * 1e3, ended["assembly"])?;
    Ok(())
}

/// Milliseconds, medians over the rounds.
struct Percentiles {
    p50: f64,
    p99: f64,
}

impl Percentiles {
    fn of(rounds: &[Vec<f64>]) -> Self {
        let percentile = |share: f64| -> f64 {
            let at = rounds.iter().map(|round| {
                let mut sorted = round.clone();
                sorted.sort_by(f64::total_cmp);
                sorted[((sorted.len() - 1) as f64 * share) as usize]
            });
            let mut at: Vec<f64> = at.collect();
            at.sort_by(f64::total_cmp);
            at[at.len() / 2]
        };
        Self { p50: percentile(0.5), p99: percentile(0.99) }
    }
}

/// All sessions at once, through the service or directly to the engine. Returns the milliseconds of each call.
async fn calls(service: &Service, engine: Option<&str>, agents: &[Agent]) -> anyhow::Result<Vec<f64>> {
    let mut tasks = Vec::new();
    for (index, agent) in agents.iter().cloned().enumerate() {
        let (http, engine) = (service.http.clone(), engine.map(str::to_owned));
        tasks.push(tokio::spawn(async move {
            // Agents do not start at the same instant.
            tokio::time::sleep(THINK * index as u32 / SESSIONS as u32).await;
            let mut times = Vec::new();
            for turn in 0..TURNS {
                let started = Instant::now();
                agent.call(&http, engine.as_deref(), turn).await?;
                times.push(started.elapsed().as_secs_f64() * 1e3);
            }
            anyhow::Ok(times)
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await??);
    }
    Ok(all)
}

#[derive(Clone)]
struct Agent {
    id: String,
    key: String,
    url: String,
}

impl Agent {
    async fn open_all(service: &Service, round: usize) -> anyhow::Result<Vec<Self>> {
        let mut agents = Vec::new();
        for index in 0..SESSIONS {
            agents.push(Self::open(service, &format!("{round}-{index}")).await?);
        }
        Ok(agents)
    }

    async fn open(service: &Service, rollout: &str) -> anyhow::Result<Self> {
        Self::of(&service.post("/sessions", json!({"rollout_id": rollout})).await?)
    }

    /// The agent of the next attempt.
    async fn resumed(&self, service: &Service) -> anyhow::Result<Self> {
        Self::of(&service.post(&format!("/sessions/{}/resume", self.id), json!({})).await?)
    }

    fn of(session: &Value) -> anyhow::Result<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned).context("the answer is complete");
        Ok(Self {
            id: text(&session["session_id"])?,
            key: text(&session["key"])?,
            url: text(&session["base_urls"]["openai"])?,
        })
    }

    /// One call with the conversation so far.
    async fn call(&self, http: &reqwest::Client, engine: Option<&str>, turn: usize) -> anyhow::Result<()> {
        let mut messages = vec![json!({"role": "user", "content": "x".repeat(FIRST * 4)})];
        for _ in 0..turn {
            messages.push(json!({"role": "assistant", "content": "y".repeat(SAMPLED * 4)}));
            messages.push(json!({"role": "user", "content": "z".repeat(BETWEEN * 4)}));
        }
        let url = engine.map_or_else(|| self.url.clone(), |engine| format!("{engine}/v1"));
        let request = http.post(format!("{url}/chat/completions")).bearer_auth(&self.key);
        let response = request.json(&json!({"model": "m", "messages": messages})).send().await?;
        let status = response.status();
        let body = response.text().await?;
        anyhow::ensure!(status.is_success(), "{status}: {body}");
        Ok(())
    }
}

/// The service as a process of its own.
impl Service {
    async fn with_engine(folder: &Path, name: &str, engine: &str) -> anyhow::Result<Self> {
        let listen = "[sessions]\nlisten = \"127.0.0.1:0\"\n[[upstream]]\nname = \"bench\"\nkind = \"vllm\"\n";
        Self::start(folder, name, &format!("{listen}urls = [\"{engine}\"]\n")).await
    }

    async fn post(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let response = self.http.post(format!("{}{path}", self.url)).json(&body).send().await?;
        Ok(response.error_for_status()?.json().await?)
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        Ok(self.http.get(format!("{}{path}", self.url)).send().await?.error_for_status()?.json().await?)
    }
}

/// An engine that answers every conversation with ids that continue it.
async fn engine(think: Duration) -> anyhow::Result<String> {
    let answer = move |body: Bytes| async move {
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        let messages = asked["messages"].as_array().map_or(1, Vec::len);
        let prompt = FIRST + messages / 2 * (SAMPLED + BETWEEN);
        let sampled = asked["max_tokens"].as_u64().map_or(SAMPLED, |bound| bound as usize);
        let ids = |from: usize, count: usize| -> Vec<usize> {
            (from..from + count).map(|place| place * 7_919 % 100_003).collect()
        };
        let content: Vec<Value> = (0..sampled).map(|_| json!({"token": "y", "logprob": -0.512_345})).collect();
        tokio::time::sleep(think).await;
        axum::Json(json!({
            "id": "bench",
            "object": "chat.completion",
            "prompt_token_ids": ids(0, prompt),
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "y".repeat(SAMPLED * 4)},
                "finish_reason": "stop",
                "token_ids": ids(prompt, sampled),
                "logprobs": {"content": content},
            }],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled},
        }))
        .into_response()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let router = Router::new().route("/v1/chat/completions", post(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(url)
}
