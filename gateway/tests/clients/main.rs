//! Real agents, each in its own process, through recorded sessions: `make test-clients`.
//!
//! Each client repairs a file and runs a test, in a folder of its own. A fake engine replays what its model should say;
//! the service records the calls. Then each trained token is compared with the context that it was sampled in. Arguments
//! are names of clients, and `--record` to write what they sent to `recordings`, which `make test` sends again. The name
//! `openhands_group` stands for a whole group of OpenHands that is trained: `make test-openhands`.

mod catalogue;
mod group;
mod process;
mod recorder;
mod service;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use catalogue::{CLIENTS, Client, FILES, Step, TASK_KEY, TITLE_KEY, title};
use forebay_client::wire::SessionAssembly;
use process::Installed;
use recorder::{Exchange, Recorder};
use serde_json::{Value, json};
use service::Service;

/// A run of a client.
struct Run {
    thinks: bool,
    steps: Vec<Step>,
    exchanges: Vec<Exchange>,
    assembly: SessionAssembly,
    /// The folder of the task and the home of the client, which recordings do not contain.
    folders: [String; 2],
    session: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (options, only): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with('-'));
    if only.iter().any(|name| name == group::NAME) {
        say(&group::run().await?);
        return Ok(());
    }
    let records = options.iter().any(|option| option == "--record");
    let mut table = vec![row(["client", "version", "reasoning", "dialect", "calls", "segments", "breaks", "retries"])];
    let mut failures = Vec::new();
    for client in CLIENTS.iter().filter(|client| only.is_empty() || only.iter().any(|name| name == client.name)) {
        let installed = match process::install(client).await {
            Ok(installed) => installed,
            Err(why) => {
                say(&format!("{}: SKIPPED, because {why:#}", client.name));
                continue;
            }
        };
        let mut runs = Vec::new();
        for thinks in [false, true] {
            match run(client, &installed, thinks).await {
                Ok(run) => {
                    table.push(run.row(client, &installed));
                    say(table.last().map_or("", String::as_str));
                    runs.push(run);
                }
                Err(error) => {
                    let failure = format!("{}, reasoning {thinks}: {error:#}", client.name);
                    say(&failure);
                    failures.push(failure);
                }
            }
        }
        let written = if records { record(client, &installed, &runs).await } else { compare(client, &runs) };
        if let Err(error) = written {
            failures.push(format!("{}: {error:#}", client.name));
        }
    }
    say(&format!("\n{}", table.join("\n")));
    ensure!(failures.is_empty(), "clients failed:\n{}", failures.join("\n"));
    Ok(())
}

/// Writes the files of the task.
fn prepare(folder: &Path) -> anyhow::Result<PathBuf> {
    let task = folder.canonicalize()?;
    for (name, text) in FILES {
        std::fs::write(task.join(name), text)?;
    }
    Ok(task)
}

/// Runs a client through a session, and checks what is trained.
async fn run(client: &Client, installed: &Installed, thinks: bool) -> anyhow::Result<Run> {
    let [data, folder, home] = [tempfile::tempdir()?, tempfile::tempdir()?, tempfile::tempdir()?];
    let service = Service::start(data.path()).await?;
    let task = prepare(folder.path())?;
    let steps = client.steps(&task, thinks);
    service.engine.script(TASK_KEY, steps.iter().map(Step::answer));
    service.engine.script(TITLE_KEY, title().iter().map(Step::answer));
    let session = service.open(json!({"rollout_id": client.name})).await?;
    let url = if client.is_anthropic { &session.base_urls.anthropic } else { &session.base_urls.openai };
    let (host, path) = url.split_once("/sessions/").context("the base URL has a session")?;
    let recorder = Recorder::start(host).await?;
    let url = format!("{}/sessions/{path}", recorder.url);
    process::run(client, installed, &url, &session.key, &task, home.path()).await?;
    check_task(&task).await?;
    let mut exchanges = recorder.exchanges();
    // A client may end before its last call, for example for a title, is answered.
    exchanges.retain(|exchange| exchange.status.is_some());
    let assembly = service.finish(&session.session_id, 1.0).await?;
    let trained = service.check_batch().await?;
    ensure!(trained as u64 == assembly.trained_tokens, "{trained} tokens are trained, and {assembly:?}");
    let sampled = service.engine.log().calls().count();
    ensure!(sampled as u64 >= assembly.calls, "the engine was called {sampled} times, and {assembly:?}");
    for exchange in &exchanges {
        let is_success = exchange.status.is_some_and(|status| status.is_success());
        ensure!(is_success, "{} {} was {:?}", exchange.method, exchange.path, exchange.status);
    }
    let folders = [task.display().to_string(), home.path().display().to_string()];
    Ok(Run { thinks, steps, exchanges, assembly, folders, session: session.session_id })
}

/// Runs the test of the task, which the client should have repaired.
async fn check_task(task: &Path) -> anyhow::Result<()> {
    let test = tokio::process::Command::new("python3").arg("test_calc.py").current_dir(task).output().await?;
    if !test.status.success() {
        bail!("the test of the task fails: {}", String::from_utf8_lossy(&test.stderr));
    }
    Ok(())
}

impl Run {
    fn row(&self, client: &Client, installed: &Installed) -> String {
        let dialect = |path: &str| match path.rsplit_once("/v1/").map_or("", |(_, path)| path) {
            path if path.starts_with("chat/completions") => Some("chat"),
            path if path.starts_with("responses") => Some("responses"),
            path if path.starts_with("messages/count_tokens") => None,
            path if path.starts_with("messages") => Some("messages"),
            _ => None,
        };
        let retried =
            |exchange: &&Exchange| exchange.headers.get("x-stainless-retry-count").is_some_and(|count| count != "0");
        row([
            client.name,
            &format!("{} {}", client.package, installed.version),
            if self.thinks { "yes" } else { "no" },
            self.exchanges.iter().find_map(|exchange| dialect(&exchange.path)).unwrap_or("none"),
            &self.assembly.calls.to_string(),
            &self.assembly.segments.to_string(),
            &self.assembly.breaks.to_string(),
            &self.exchanges.iter().filter(retried).count().to_string(),
        ])
    }

    /// What `recordings` should know of the run.
    fn counts(&self) -> Value {
        json!({
            "reasoning": self.thinks, "calls": self.assembly.calls, "segments": self.assembly.segments,
            "breaks": self.assembly.breaks,
        })
    }
}

fn row(cells: [&str; 8]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// Compares the counts with those of the recording.
fn compare(client: &Client, runs: &[Run]) -> anyhow::Result<()> {
    let path = process::folder().join("recordings").join(client.name).with_extension("json");
    let text = std::fs::read(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let recording: Value = serde_json::from_slice(&text)?;
    for run in runs {
        let recorded = recording["runs"].as_array().into_iter().flatten().map(|run| &run["counts"]);
        let counts = run.counts();
        let mut same = recorded.filter(|recorded| recorded["reasoning"] == run.thinks);
        let recorded = same.next().context("the recording does not have this run")?;
        ensure!(*recorded == counts, "counts were {recorded} and are {counts}: see why, then use --record");
    }
    Ok(())
}

/// Writes what a client sent. A Python program does it, because it keeps the order of fields.
async fn record(client: &Client, installed: &Installed, runs: &[Run]) -> anyhow::Result<()> {
    let scripts = |run: &Run| json!([{"key": TASK_KEY, "answers": run.steps}, {"key": TITLE_KEY, "answers": title()}]);
    let exchange = |exchange: &Exchange| {
        let headers = exchange.headers.iter();
        let headers: Vec<_> =
            headers.map(|(name, value)| (name.as_str(), value.to_str().unwrap_or_default())).collect();
        json!({
            "method": exchange.method.as_str(), "path": exchange.path, "headers": headers,
            "body": String::from_utf8_lossy(&exchange.body), "status": exchange.status.map(|status| status.as_u16()),
        })
    };
    let runs: Vec<Value> = runs
        .iter()
        .map(|run| {
            json!({
                "counts": run.counts(), "scripts": scripts(run), "folders": run.folders, "session": run.session,
                "requests": run.exchanges.iter().map(exchange).collect::<Vec<_>>(),
            })
        })
        .collect();
    let raw = json!({"client": client.name, "package": client.package, "version": installed.version, "runs": runs});
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(raw.to_string().as_bytes())?;
    let output = process::folder().join("recordings").join(client.name).with_extension("json");
    let mut python = tokio::process::Command::new("python3");
    python.arg(process::folder().join("record.py")).arg(file.path()).arg(output);
    ensure!(python.status().await?.success(), "the recording cannot be written");
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn say(line: &str) {
    println!("{line}");
}
