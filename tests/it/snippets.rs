//! The code blocks of the documents, run as they are printed. Every block is run unless [`NOT_RUN`] names it.
//!
//! Shell and Python blocks run in a temporary folder against a service that the test starts as `make run` would. A
//! block that starts a service itself has its own folder and port. TOML blocks are parsed as configurations. Only the
//! port in a block is replaced, by [`Session::with_port`]. Blocks without a language are usage, output and drawings.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use forebay::config::Config;
use forebay_fake_engine::{EngineKind, FakeEngine};
use serde_json::{Value, json};

use crate::support::process::Service;

/// The port that documents name.
const PORT: &str = "8080";

/// The ports of facades that documents name.
const FACADE_PORTS: [&str; 2] = ["8889", "8000"];

/// The first port for which no privilege is needed.
const FIRST_PORT: u16 = 1_024;

/// The first port that systems give by default.
const FIRST_GIVEN_PORT: u16 = 32_768;

/// Blocks that are not run: their document, their beginning, and the reason.
const NOT_RUN: &[(&str, &str, &str)] = &[
    ("README.md", "cargo build ", "builds a release; `demo` runs the demo, and the test starts the service"),
    ("README.md", "import forebay, openai, uuid", "needs an engine; `python/tests/test_agents_document.py` has one"),
    ("README.md", "import forebay\nsaved =", "trains without end; the same test ends it"),
    ("README.md", "make test ", "this test is a part of it"),
    ("CONTRIBUTING.md", "make endure ", "runs for hours"),
    ("docs/operations.md", "cargo build ", "builds a release; the test runs the binary that it is built with"),
    (
        "docs/performance.md",
        "forebay bench ",
        "minutes of load, also on peers that are not here; `bench` runs these commands",
    ),
    (
        "docs/connect.md",
        "",
        "needs an inference engine and agents; a test below runs its first blocks, `make outside NAME=clients` the snippets, and \
         `make outside NAME=openhands` the section of groups",
    ),
    ("docs/start.md", "", "needs the Python package; `python/tests/test_start.py` runs all of it"),
    ("docs/trainers.md", "make demo ", "trains for minutes and needs libtorch"),
];

/// Documents of the Python package, whose blocks `python/tests/test_documents.py` runs, and the recipes, whose programs need
/// an engine, so that `python/tests/test_recipes.py` runs them.
const OF_PYTHON: [&str; 2] = ["docs/python", "docs/recipes/"];

/// A block of code in a document.
#[derive(Debug)]
struct Block {
    document: String,
    /// Line of its opening fence, counted from 1.
    line: usize,
    language: String,
    text: String,
}

impl Block {
    fn place(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    fn is_of_python(&self) -> bool {
        OF_PYTHON.iter().any(|start| self.document.starts_with(start))
    }

    fn is_not_run(&self, (document, start, _): &(&str, &str, &str)) -> bool {
        self.document == *document && self.text.starts_with(start)
    }
}

pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every document: of the repository's root, of `docs` with its recipes, and of the other crates.
pub(crate) fn documents() -> Vec<String> {
    let folders = ["", "docs", "docs/recipes", "crates/client", "trainer", "fuzz", "configs", "scripts"];
    let mut documents: Vec<String> = folders
        .iter()
        .filter_map(|folder| Some((folder, fs::read_dir(repository().join(folder)).ok()?)))
        .flat_map(|(folder, entries)| {
            entries.filter_map(move |entry| {
                let name = entry.ok()?.file_name().into_string().ok()?;
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                Path::new(&path).extension().is_some_and(|extension| extension == "md").then_some(path)
            })
        })
        .collect();
    documents.sort();
    documents
}

/// The blocks of a document that name a language.
fn blocks(document: &str) -> Vec<Block> {
    let text = fs::read_to_string(repository().join(document)).expect("the document can be read");
    let mut blocks: Vec<Block> = Vec::new();
    let mut open: Option<Block> = None;
    for (line, number) in text.lines().zip(1..) {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(language), None) => {
                let (document, language) = (document.to_owned(), language.trim().to_owned());
                open = Some(Block { document, line: number, language, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{document}: a block does not end");
    blocks.retain(|block| !block.language.is_empty());
    blocks
}

/// The blocks of a document that are run.
fn run_blocks(document: &str) -> impl Iterator<Item = Block> {
    let is_run = |block: &Block| !block.is_of_python() && !NOT_RUN.iter().any(|entry| block.is_not_run(entry));
    blocks(document).into_iter().filter(is_run)
}

/// A folder in which blocks run one after the other, with a service on a port.
struct Session {
    folder: tempfile::TempDir,
    port: u16,
    facade_port: u16,
}

impl Session {
    fn new(port: u16) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let session = Self { folder, port, facade_port: unused_port() };
        fs::create_dir(session.path("bin")).expect("the folder is empty");
        fs::create_dir(session.path("work")).expect("the folder is empty");
        let curl = find("curl");
        // Records the status of each answer in addition to the output.
        session.command(
            "curl",
            &format!(
                "status=$('{curl}' --output ../answer --write-out '%{{http_code}}' \"$@\") || exit\n\
                 cat ../answer\nprintf '%s\\n' \"$status\" >> ../statuses",
            ),
        );
        // A person who types the commands gives the service time to start; a script has to wait for it.
        session.command(
            "forebay",
            &format!(
                "if [ \"$1\" != serve ] && [ -n \"${{FOREBAY_URL:-}}\" ]; then\n\
                 '{curl}' --silent --output ../ready --retry 60 --retry-delay 1 --retry-connrefused \"$FOREBAY_URL/readyz\"\n\
                 fi\nexec '{}' \"$@\"",
                env!("CARGO_BIN_EXE_forebay")
            ),
        );
        session
    }

    /// A session with a service that runs.
    fn on(service: &Service) -> Self {
        let port = service.url.rsplit(':').next().and_then(|port| port.parse().ok());
        Self::new(port.expect("a URL with a port"))
    }

    /// A session with a port on which nothing listens.
    fn unserved() -> Self {
        Self::new(unused_port())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Adds a command that takes precedence over the machine's.
    fn command(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("the folder can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is our file");
    }

    /// Replaces the ports by those of this session; this is the only difference from the printed text.
    fn with_port(&self, text: &str) -> String {
        let text = text.replace(&format!(":{PORT}"), &format!(":{}", self.port));
        FACADE_PORTS
            .iter()
            .fold(text, |text, port| text.replace(&format!(":{port}"), &format!(":{}", self.facade_port)))
    }

    fn run(&self, interpreter: &str, name: &str, text: &str) -> Output {
        let script = self.path(name);
        fs::write(&script, self.with_port(text)).expect("the folder can be written");
        let machine = std::env::var("PATH").expect("there is a path");
        Command::new(interpreter)
            .arg(&script)
            .current_dir(self.path("work"))
            .env("PATH", format!("{}:{machine}", self.path("bin").display()))
            .env("FOREBAY_LISTEN", format!("127.0.0.1:{}", self.port))
            .env_remove("FOREBAY_URL")
            .env_remove("FOREBAY_KEY")
            .env_remove("FOREBAY_DATABASE")
            .env_remove("FOREBAY_CONFIG")
            .output()
            .expect("the interpreter is there")
    }

    /// Runs a block of shell commands. All must succeed, and answers must have the status that a comment names, or a
    /// 2xx.
    fn shell(&self, block: &Block) {
        let _ = fs::remove_file(self.path("statuses"));
        // Processes that a block leaves running end with it.
        let prepared = format!("set -eu -o pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{}", block.text);
        let output = self.run("bash", "block.sh", &prepared);
        assert!(output.status.success(), "{}: {}", block.place(), told(&output));
        let statuses = fs::read_to_string(self.path("statuses")).unwrap_or_default();
        let statuses: Vec<&str> = statuses.lines().collect();
        let expected = expected_statuses(&block.text);
        let is_as_expected = |(found, expected): (&&str, &Option<String>)| match expected {
            Some(expected) => found == expected,
            None => found.starts_with('2'),
        };
        assert!(
            statuses.len() == expected.len() && statuses.iter().zip(&expected).all(is_as_expected),
            "{}: answered {statuses:?} instead of {expected:?}: {}",
            block.place(),
            told(&output)
        );
    }

    /// Runs a Python program and returns its output.
    fn python(&self, place: &str, text: &str) -> String {
        let output = self.run(&python(), "block.py", text);
        assert!(output.status.success(), "{place}: {}", told(&output));
        String::from_utf8(output.stdout).expect("it prints text")
    }
}

/// A port on which nothing listens. It is below those that the system gives to connections and to listeners that name no
/// port: until the block listens on it, other tests could get one of those.
fn unused_port() -> u16 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(FIRST_GIVEN_PORT);
    // On a system that gives nearly all ports, none is safe.
    let ports = FIRST_PORT..if first > 2 * FIRST_PORT { first } else { u16::MAX };
    let is_unused = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut candidates = std::iter::repeat_with(|| rand::random_range(ports.clone())).take(1_000);
    candidates.find(is_unused).expect("a port is unused")
}

/// For each call of curl, the status at the beginning of the comment after it.
fn expected_statuses(text: &str) -> Vec<Option<String>> {
    let calls = text.split("curl ").skip(1);
    let status = |call: &str| {
        let comments = call.lines().filter_map(|line| line.split_once("# "));
        let mut numbers =
            comments.map(|(_, comment)| comment.chars().take_while(char::is_ascii_digit).collect::<String>());
        numbers.find(|digits| digits.len() == 3)
    };
    calls.map(status).collect()
}

fn told(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}\n{err}", output.status)
}

fn find(command: &str) -> String {
    let found = Command::new("sh").args(["-c", &format!("command -v {command}")]).output().expect("there is a shell");
    assert!(found.status.success(), "the documents need {command}, which is not installed");
    String::from_utf8_lossy(&found.stdout).trim().to_owned()
}

/// The interpreter of the environment that has the packages of the snippets.
pub(crate) fn python() -> String {
    let made = Command::new(repository().join("scripts/python-env")).arg("snippets").output();
    let made = made.expect("scripts/python-env can be run");
    assert!(
        made.status.success(),
        "the Python environment of the snippets is missing; `./scripts/python-env snippets` makes it, and said: {}",
        String::from_utf8_lossy(&made.stderr)
    );
    String::from_utf8_lossy(&made.stdout).trim().to_owned()
}

async fn served() -> (Service, Session) {
    let service = Service::start("sqlite::memory:").await;
    let session = Session::on(&service);
    (service, session)
}

#[test]
fn every_block_names_a_language_that_can_be_run_and_every_exception_is_needed() {
    let all: Vec<Block> = documents().iter().flat_map(|document| blocks(document)).collect();
    for block in &all {
        // slime is configured in YAML. These blocks are settings and are not run. Those of JavaScript are compared with
        // the programs of `make outside NAME=clients`.
        let is_known = ["sh", "python", "toml"].contains(&block.language.as_str())
            || block.is_of_python() && block.language == "yaml"
            || block.document == "docs/connect.md" && block.language == "js"
            // The diagrams of states, which a test of the domain compares with the code.
            || block.document == "ARCHITECTURE.md" && block.language == "mermaid";
        assert!(is_known, "{}: `{}` is not run by this test", block.place(), block.language);
    }
    for entry in NOT_RUN {
        assert!(all.iter().any(|block| block.is_not_run(entry)), "no block begins with {entry:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_shell_and_python_run_as_printed() {
    for document in documents() {
        let (service, session) = served().await;
        for block in run_blocks(&document) {
            let serves_itself = block.text.contains("forebay serve");
            match block.language.as_str() {
                "sh" if serves_itself => Session::unserved().shell(&block),
                "sh" => session.shell(&block),
                "python" => drop(session.python(&block.place(), &block.text)),
                _ => {}
            }
        }
        service.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_the_guide_for_agents_runs_as_printed_with_the_configuration_before_it() {
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    let all = blocks("docs/connect.md");
    let first = |language: &str| all.iter().find(|block| block.language == language).expect("the guide has one");
    // Only addresses are replaced.
    let config = first("toml").text.replace("http://127.0.0.1:30000", engine.url()).replace(":8081", ":0");
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("forebay.toml");
    fs::write(&path, config).expect("the folder can be written");
    let path = path.to_str().expect("the path is text");
    let service = Service::start_with("sqlite::memory:", &["--config", path], &[]).await;
    let session = Session::on(&service);
    session.shell(first("sh"));
    let story = format!("{}/trajectories?policy=default&rollout_id=task7-0", service.url);
    let story = crate::support::http().get(story).send().await.expect("the service answers");
    let story: Value = story.json().await.expect("JSON");
    assert_eq!((&story["verdict"], &story["reward"], &story["segments"]), (&json!("kept"), &json!(1.0), &json!(1)));
    let log = engine.log();
    let called = log.calls().last().expect("the call is forwarded").json();
    assert_eq!(called["model"], "Qwen/Qwen3-8B");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_with_vllm_runs_as_printed_with_its_configuration_until_its_rollout_is_trained() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    FakeEngine::write_model(folder.path()).expect("the folder can be written");
    let config = fs::read_to_string(repository().join("configs/vllm.toml")).expect("it is text");
    // Only addresses, files and the tokens of the fake model are replaced.
    let config = config
        .replace("http://127.0.0.1:8000", engine.url())
        .replace(":8081", ":0")
        .replace("/models/Qwen3-8B", folder.path().to_str().expect("the path is text"))
        .replace("family = \"qwen\"", "family = { stops = [\"<|im_end|>\"], close = \"<|im_end|>\" }");
    let path = folder.path().join("vllm.toml");
    fs::write(&path, config).expect("the folder can be written");
    let path = path.to_str().expect("the path is text");
    let service = Service::start_with("sqlite::memory:", &["--config", path], &[]).await;
    let all = blocks("docs/connect.md");
    let block = all.iter().find(|block| block.language == "sh" && block.text.contains("batch.json"));
    Session::on(&service).shell(block.expect("the guide has a session with vLLM"));
    let story = format!("{}/trajectories?policy=default&rollout_id=first", service.url);
    let story = crate::support::http().get(story).send().await.expect("the service answers");
    let story: Value = story.json().await.expect("JSON");
    assert_eq!(
        (&story["state"], &story["step"], &story["segments"]),
        (&json!("trained"), &json!(1), &json!(1)),
        "{story}"
    );
    let log = engine.log();
    let asked = log.at("/inference/v1/generate").last().expect("the engine was sent ids").json();
    assert_eq!(asked["model"], "Qwen/Qwen3-8B");
    service.kill().await;
}

#[test]
fn blocks_of_toml_are_valid_configurations() {
    for block in documents().iter().flat_map(|document| run_blocks(document)).filter(|block| block.language == "toml") {
        let parsed = Config::parse(&block.text);
        assert!(parsed.is_ok(), "{}: {}", block.place(), parsed.expect_err("it is not valid"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_arrow_snippet_reads_every_row_of_many_pages_and_of_none() {
    const ROLLOUTS: i64 = 600;
    let (service, session) = served().await;
    let http = crate::support::http();
    let call = |method: reqwest::Method, path: &str, body: Value| {
        let request = http.request(method, format!("{}{path}", service.url)).json(&body);
        async { request.send().await.expect("the service answers").json::<Value>().await.expect("JSON") }
    };
    call(reqwest::Method::PUT, "/policies/default", json!({"batch": {"groups": ROLLOUTS}})).await;
    let rollouts: Vec<Value> = (0..ROLLOUTS)
        .map(|index| {
            let segments = json!([{"tokens": [index, 1_000], "loss_mask": [1]}]);
            json!({"rollout_id": format!("r{index:03}"), "reward": 1.0, "status": "completed", "segments": segments})
        })
        .collect();
    call(reqwest::Method::POST, "/trajectories", rollouts.into()).await;
    let batch = call(reqwest::Method::POST, "/batches", json!({})).await;
    let snippet = blocks("docs/trainers.md").into_iter().find(|block| block.text.contains("open_stream"));
    let snippet = snippet.expect("the guide for trainers shows how samples are read as Arrow");
    let program = format!("{}\nprint(len(tokens), int(tokens.sum()), int(lengths.sum()))\n", snippet.text);
    // If there are more shards than rollouts, the last ones are empty.
    for (shard, expected) in [
        ("", format!("{} {} {}\n", 2 * ROLLOUTS, ROLLOUTS * (ROLLOUTS - 1) / 2 + 1_000 * ROLLOUTS, 2 * ROLLOUTS)),
        ("?shard=1023&shards=1024", "0 0 0\n".to_owned()),
    ] {
        let url = format!("{}{shard}", crate::support::text(&batch["samples_url"]));
        fs::write(session.path("work/batch.json"), json!({"samples_url": url}).to_string()).expect("it can be written");
        assert_eq!(session.python(&snippet.place(), &program), expected, "{shard}");
    }
    service.kill().await;
}
