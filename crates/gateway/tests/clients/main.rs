//! Real agents, each in its own process, through recorded sessions: `make outside NAME=clients`.
//!
//! Each client repairs a file and runs a test, in a folder of its own. A fake engine replays what its model should
//! say; the service records the calls, once in the mode `observe` and once in the mode `exact`, there also with an
//! engine whose answers arrive in pieces. Then each trained token is compared with the context that it was sampled
//! in. At last it is killed in each of its calls and started again.
//!
//! Arguments are names of clients, and `--record` to write what they sent to `recordings`, which `make test` sends
//! again. With `--slow` each client meets an engine that needs minutes for an answer and nothing else:
//! `make outside NAME=clients CLIENTS="--slow codex"`. The name `openhands_group` stands for a whole group of
//! OpenHands that is trained: `make outside NAME=openhands`.

mod catalogue;
mod group;
mod process;
mod recorder;
mod service;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use forebay_fake_engine::{Received, tokenizer::decode};
use forebay_wire::{SessionAssembly, SessionOpened, SessionResume};
use serde_json::{Value, json};
use tempfile::TempDir;

use catalogue::{CLIENTS, Client, FILES, Step, TASK_KEY, scripts};
use process::Installed;
use recorder::{Exchange, Recorder};
use service::{Mode, Service};

/// What happens to a client on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// Nothing.
    Smooth,
    /// Another one of it does the same at the same time in the same session.
    Twice,
    /// The connection of its first call is cut before the answer.
    Cut,
    /// It is killed while its first call waits for the engine. Its session is resumed, and it is killed while its second
    /// call waits, and so on.
    Killed,
    /// The engine needs [`SLOW`] for its first answer.
    Slow,
}

/// Longer than the five minutes after which programs give up a stream without events.
const SLOW: Duration = Duration::from_secs(330);

/// Where a client works.
struct Place {
    task: PathBuf,
    home: TempDir,
    _folder: TempDir,
}

/// A client that was run in both modes.
struct Pair {
    observe: Run,
    exact: Run,
}

/// Whether the engine was asked for an answer about the task, in messages or in ids.
fn asks_about_the_task(request: &Received) -> bool {
    match request.path.as_str() {
        "/v1/chat/completions" => request.text.contains(TASK_KEY),
        "/inference/v1/generate" => {
            let ids: Vec<i32> = serde_json::from_value(request.json()["token_ids"].clone()).unwrap_or_default();
            decode(&ids).contains(TASK_KEY)
        }
        _ => false,
    }
}

/// A run of a client.
struct Run {
    thinks: bool,
    mode: Mode,
    steps: Vec<Step>,
    exchanges: Vec<Exchange>,
    /// How often the engine was asked about the task.
    asked: usize,
    /// How often it was killed.
    kills: usize,
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
    let has = |name: &str| options.iter().any(|option| option == name);
    let records = has("--record");
    let mut table = vec![row(COLUMNS), row(["---"; COLUMNS.len()])];
    let mut failures = Vec::new();
    for client in CLIENTS.iter().filter(|client| only.is_empty() || only.iter().any(|name| name == client.name)) {
        let installed = match process::install(client).await {
            Ok(installed) => installed,
            Err(why) => {
                say(&format!("{}: SKIPPED, because {why:#}", client.name));
                continue;
            }
        };
        if has("--slow") {
            match run_slowly(client, &installed).await {
                Ok(calls) => say(&format!("{} {}: {calls} calls, none given up", client.name, installed.version)),
                Err(error) => failures.push(format!("{}: {error:#}", client.name)),
            }
            continue;
        }
        let mut runs = Vec::new();
        for thinks in [false, true] {
            match run_in_both_modes(client, &installed, thinks).await {
                Ok(pair) => runs.push(pair),
                Err(error) => {
                    let failure = format!("{}, reasoning {thinks}: {error:#}", client.name);
                    say(&failure);
                    failures.push(failure);
                }
            }
        }
        if let [plain, thinking] = &runs[..] {
            table.push(row_of(client, &installed, plain, thinking));
            say(table.last().map_or("", String::as_str));
        }
        if runs.iter().any(|pair| pair.observe.refers_to_answers()) {
            continue;
        }
        let written = if records { record(client, &installed, &runs).await } else { compare(client, &runs) };
        if let Err(error) = written {
            failures.push(format!("{}: {error:#}", client.name));
        }
    }
    if !has("--slow") {
        say(&format!("\n{}", table.join("\n")));
    }
    ensure!(failures.is_empty(), "clients failed:\n{}", failures.join("\n"));
    Ok(())
}

impl Place {
    /// Makes everything as it was, as a new sandbox does. Prompts name the folders, so they stay the same.
    fn restore(&self) -> anyhow::Result<()> {
        for folder in [&self.task, self.home.path()] {
            std::fs::remove_dir_all(folder)?;
            std::fs::create_dir(folder)?;
        }
        write_task(&self.task)
    }

    /// Writes the files of the task into a new folder.
    fn new() -> anyhow::Result<Self> {
        let [folder, home] = [tempfile::tempdir()?, tempfile::tempdir()?];
        let task = folder.path().canonicalize()?;
        write_task(&task)?;
        Ok(Self { task, home, _folder: folder })
    }
}

fn write_task(folder: &Path) -> anyhow::Result<()> {
    for (name, text) in FILES {
        std::fs::write(folder.join(name), text)?;
    }
    Ok(())
}

async fn run_in_both_modes(client: &Client, installed: &Installed, thinks: bool) -> anyhow::Result<Pair> {
    let observe = run(client, installed, thinks, Mode::Observe, Course::Smooth).await.context("observe")?;
    let exact = run(client, installed, thinks, Mode::Exact, Course::Smooth).await.context("exact")?;
    let calls = [observe.assembly.calls, exact.assembly.calls];
    ensure!(
        calls[0] == calls[1],
        "there are {} calls in the mode observe, and {} in the mode exact",
        calls[0],
        calls[1]
    );
    if thinks {
        let pieces = run(client, installed, thinks, Mode::Pieces, Course::Smooth).await.context("pieces")?;
        let counts = |run: &Run| [run.assembly.calls, run.assembly.segments, run.assembly.trained_tokens];
        ensure!(counts(&pieces) == counts(&exact), "in pieces {:?} instead of {:?}", pieces.assembly, exact.assembly);
        for &course in client.courses {
            check_course(client, installed, course, &exact).await.with_context(|| format!("{course:?}"))?;
        }
        // The fake SGLang compares the ids with the messages beside them, in which tools say something new each time.
        for smooth in [&observe, &pieces] {
            kill(client, installed, smooth).await.with_context(|| format!("killed, {:?}", smooth.mode))?;
        }
    }
    Ok(Pair { observe, exact })
}

/// Runs a client whose first answer takes minutes. It makes the calls that it makes otherwise, so it has not given up.
async fn run_slowly(client: &Client, installed: &Installed) -> anyhow::Result<u64> {
    let mut calls = 0;
    for mode in [Mode::Observe, Mode::Exact, Mode::Pieces] {
        let smooth = run(client, installed, true, mode, Course::Smooth).await?;
        let slow = run(client, installed, true, mode, Course::Slow).await?;
        let counts = |run: &Run| (run.assembly.calls, run.asked);
        ensure!(counts(&slow) == counts(&smooth), "{:?} calls instead of {:?}", counts(&slow), counts(&smooth));
        calls += slow.assembly.calls;
    }
    Ok(calls)
}

/// Runs a client in another course, in the mode exact. What is trained is what is trained of as many smooth runs.
async fn check_course(client: &Client, installed: &Installed, course: Course, smooth: &Run) -> anyhow::Result<()> {
    let run = run(client, installed, true, Mode::Exact, course).await?;
    let workers = if course == Course::Twice { 2 } else { 1 };
    let counts = |assembly: &SessionAssembly| [assembly.calls, assembly.trained_tokens];
    let expected = counts(&smooth.assembly).map(|count| workers * count);
    let mut found = counts(&run.assembly);
    if !client.counts_repeats {
        // The call goes on without its client for a while. Nothing tells that the next call repeats it.
        found[0] -= run.assembly.dropped.undelivered;
    }
    ensure!(found == expected, "{:?} instead of {expected:?}", run.assembly);
    Ok(())
}

/// Runs a client that is killed in each of its calls. As many tokens are trained as of a smooth run, and the engine is
/// asked at most once more for each kill.
async fn kill(client: &Client, installed: &Installed, smooth: &Run) -> anyhow::Result<()> {
    let killed = run(client, installed, smooth.thinks, smooth.mode, Course::Killed).await?;
    // In the mode observe the engine reads what the tools say this time, so another segment may begin.
    let counts = |run: &Run| {
        let Run { mode, assembly, .. } = run;
        [assembly.calls, assembly.trained_tokens, if *mode == Mode::Observe { 0 } else { assembly.segments }]
    };
    ensure!(counts(&killed) == counts(smooth), "{:?} instead of {:?}", killed.assembly, smooth.assembly);
    say(&format!(
        "{}, {:?}: killed {} times, the engine was asked {} times, and {} times without kills",
        client.name, smooth.mode, killed.kills, killed.asked, smooth.asked
    ));
    ensure!(killed.kills >= smooth.asked, "it was killed too rarely");
    ensure!(killed.asked <= smooth.asked + killed.kills, "it was asked too often");
    Ok(())
}

/// Runs a client through a session, and checks what is trained.
async fn run(client: &Client, installed: &Installed, thinks: bool, mode: Mode, course: Course) -> anyhow::Result<Run> {
    let data = tempfile::tempdir()?;
    let service = Service::start(data.path(), mode).await?;
    let place = Place::new()?;
    let steps = client.steps(&place.task, thinks);
    for (key, answers) in scripts(client, &steps) {
        service.engine.script(&key, answers.iter().map(Step::answer));
    }
    service.client.put_policy("default", &serde_json::from_value(json!({"sessions": {"max_attempts": 100}}))?).await?;
    let session = service.open(json!({"rollout_id": client.name})).await?;
    let url = if client.is_anthropic { &session.base_urls.anthropic } else { &session.base_urls.openai };
    let (host, path) = url.split_once("/sessions/").context("the base URL has a session")?;
    let recorder = Recorder::start(host).await?;
    let url = format!("{}/sessions/{path}", recorder.url);
    let start = |place: &Place, key: &str| process::start(client, installed, &url, key, &place.task, place.home.path());
    let play = async |place: &Place| {
        start(place, &session.key)?.end().await?;
        check_task(&place.task).await
    };
    let stall = |is_on: bool| service.engine.switch(|switches| switches.stall = is_on);
    let (mut kills, mut of_dead) = (0, 0);
    match course {
        Course::Smooth => play(&place).await?,
        Course::Twice => {
            let other = Place::new()?;
            stall(true);
            let meet = async {
                service.engine.wait(|log| log.stalled == 2).await;
                stall(false);
                Ok(())
            };
            tokio::try_join!(play(&place), play(&other), meet)?;
        }
        Course::Cut => {
            stall(true);
            let cut = async {
                service.engine.wait(|log| log.stalled == 1).await;
                recorder.cut().await;
                stall(false);
                Ok(())
            };
            tokio::try_join!(play(&place), cut)?;
        }
        Course::Killed => {
            (kills, of_dead) = survive(&service, &recorder, &place, &session, start).await?;
            check_task(&place.task).await?;
        }
        Course::Slow => {
            stall(true);
            let think = async {
                service.engine.wait(|log| log.stalled > 0).await;
                tokio::time::sleep(SLOW).await;
                stall(false);
                Ok(())
            };
            tokio::try_join!(play(&place), think)?;
        }
    }
    // A call of a dead client may be refused.
    let mut exchanges = recorder.exchanges().split_off(of_dead);
    // A client may end before its last call, for example for a title, is answered.
    exchanges.retain(|exchange| exchange.status.is_some());
    let assembly = service.finish(&session.session_id, 1.0).await?;
    let trained = service.check_batch().await?;
    ensure!(trained as u64 == assembly.trained_tokens, "{trained} tokens are trained, and {assembly:?}");
    let log = service.engine.log();
    let with_ids = log.calls().filter(|call| call.json()["input_ids"].is_array()).count();
    let sampled = match mode {
        Mode::Observe => log.calls().count() - with_ids,
        Mode::Exact => with_ids,
        Mode::Pieces => log.at("/inference/v1/generate").count(),
    };
    ensure!(sampled as u64 >= assembly.calls, "the engine was called {sampled} times, and {assembly:?}");
    for exchange in &exchanges {
        let is_success = exchange.status.is_some_and(|status| status.is_success());
        ensure!(is_success, "{} {} was {:?}", exchange.method, exchange.path, exchange.status);
    }
    let folders = [place.task.display().to_string(), place.home.path().display().to_string()];
    // Probes of the engine have other texts.
    let asked = log.received.iter().filter(|request| asks_about_the_task(request)).count();
    Ok(Run { thinks, mode, steps, exchanges, asked, kills, assembly, folders, session: session.session_id })
}

/// Starts a client until it ends, and kills it in its n-th call when it was killed n - 1 times before. Returns the number of
/// kills, and how many exchanges are those of killed ones.
async fn survive(
    service: &Service,
    recorder: &Recorder,
    place: &Place,
    session: &SessionOpened,
    start: impl Fn(&Place, &str) -> anyhow::Result<process::Running>,
) -> anyhow::Result<(usize, usize)> {
    let stall = |is_on: bool| service.engine.switch(|switches| switches.stall = is_on);
    let (mut kills, mut of_dead, mut key) = (0, 0, session.key.clone());
    loop {
        recorder.open_for(kills);
        let mut running = start(place, &key)?;
        let waits = async {
            recorder.held().await;
            stall(true);
            recorder.open_for(usize::MAX);
            service.engine.wait(|log| log.stalled > 0).await;
        };
        let is_done = tokio::select! {
            ended = running.end() => ended.map(|()| true)?,
            () = waits => false,
        };
        if is_done {
            return Ok((kills, of_dead));
        }
        running.kill().await?;
        stall(false);
        service.engine.wait(|log| log.stalled == 0).await;
        kills += 1;
        place.restore()?;
        of_dead = recorder.exchanges().len();
        key = service.client.resume_session(&session.session_id, &SessionResume::default()).await?.key;
    }
}

/// Runs the test of the task, which the client should have repaired.
async fn check_task(task: &Path) -> anyhow::Result<()> {
    let test = tokio::process::Command::new("python3").arg("test_calc.py").current_dir(task).output().await?;
    if !test.status.success() {
        bail!("the test of the task fails: {}", String::from_utf8_lossy(&test.stderr));
    }
    Ok(())
}

const COLUMNS: [&str; 9] =
    ["client", "version", "dialect", "calls", "observe", "with reasoning", "exact", "with reasoning", "retries"];

/// A row of the table: segments in both modes, for a model that does not reason and for one that does.
fn row_of(client: &Client, installed: &Installed, plain: &Pair, thinking: &Pair) -> String {
    let dialect = |path: &str| match path.rsplit_once("/v1/").map_or("", |(_, path)| path) {
        path if path.starts_with("chat/completions") => Some("chat"),
        path if path.starts_with("responses") => Some("responses"),
        path if path.starts_with("messages/count_tokens") => None,
        path if path.starts_with("messages") => Some("messages"),
        _ => None,
    };
    let is_retry =
        |exchange: &&Exchange| exchange.headers.get("x-stainless-retry-count").is_some_and(|count| count != "0");
    let runs = [&plain.observe, &thinking.observe, &plain.exact, &thinking.exact];
    let retries: usize = runs.iter().map(|run| run.exchanges.iter().filter(is_retry).count()).sum();
    let segments = runs.map(|run| run.assembly.segments.to_string());
    row([
        client.name,
        &format!("{} {}", client.package, installed.version),
        plain.observe.exchanges.iter().find_map(|exchange| dialect(&exchange.path)).unwrap_or("none"),
        &plain.observe.assembly.calls.to_string(),
        &segments[0],
        &segments[1],
        &segments[2],
        &segments[3],
        &retries.to_string(),
    ])
}

impl Run {
    /// Whether the client names answers by ids that only its session knows, so that it has no recording.
    fn refers_to_answers(&self) -> bool {
        self.exchanges.iter().any(|exchange| String::from_utf8_lossy(&exchange.body).contains("\"item_reference\""))
    }
}

impl Pair {
    /// What `recordings` should know of the runs.
    fn counts(&self) -> Value {
        let made = |run: &Run| json!({"segments": run.assembly.segments, "breaks": run.assembly.breaks});
        json!({
            "reasoning": self.observe.thinks, "calls": self.observe.assembly.calls, "observe": made(&self.observe),
            "exact": made(&self.exact),
        })
    }
}

fn row(cells: [&str; COLUMNS.len()]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// Compares the counts with those of the recording.
fn compare(client: &Client, runs: &[Pair]) -> anyhow::Result<()> {
    let path = process::folder().join("recordings").join(client.name).with_extension("json");
    let text = std::fs::read(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let recording: Value = serde_json::from_slice(&text)?;
    for run in runs {
        let recorded = recording["runs"].as_array().into_iter().flatten().map(|run| &run["counts"]);
        let counts = run.counts();
        let mut same = recorded.filter(|recorded| recorded["reasoning"] == run.observe.thinks);
        let recorded = same.next().context("the recording does not have this run")?;
        ensure!(*recorded == counts, "counts were {recorded} and are {counts}: see why, then use --record");
    }
    Ok(())
}

/// Writes what a client sent in the mode `observe`. A Python program does it, because it keeps the order of fields.
async fn record(client: &Client, installed: &Installed, runs: &[Pair]) -> anyhow::Result<()> {
    let scripts = |run: &Run| -> Vec<Value> {
        let scripts = scripts(client, &run.steps).into_iter();
        scripts.map(|(key, answers)| json!({"key": key, "answers": answers})).collect()
    };
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
        .map(|pair| {
            let run = &pair.observe;
            json!({
                "counts": pair.counts(), "scripts": scripts(run), "folders": run.folders, "session": run.session,
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
