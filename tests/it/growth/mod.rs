//! Growth: no statement that a request or a sweep runs gets slower as the ledger grows.
//!
//! A walk makes the real service run every statement named in `crates/store/src`. The texts come from the service's log, and
//! the plans from the database. The test also fails for a new statement that the walk does not run.

mod lists;
mod plans;
mod reads;
mod unserved;
mod walk;

use std::{collections::BTreeSet, path::Path};

use forebay_fake_engine::{EngineKind, FakeEngine};
use serde_json::Value;

use crate::support::{fresh_database, process::Service, with_agents, without_autovacuum};

/// Files whose statements no trainer or agent waits for: `forebay doctor` reads everything, there are few keys, the clock
/// has one row, there is one row for each segment file or object, and payloads are moved by their keys.
const NOT_WALKED_FILES: [&str; 8] = [
    "examine.rs",
    "places.rs",
    "keys.rs",
    "clock.rs",
    "sqlite/segments.rs",
    "writer/payloads.rs",
    "postgres/session.rs",
    "relocate.rs",
];

/// Statements that run while the store cannot write, on the few rows of `policy`, statements that run on only one of the
/// databases, and `release_work`, which runs when bytes are short and finds a lease as `extend_work` does.
const NOT_WALKED: [&str; 8] =
    ["touch", "reach_tables", "probe", "select_changed", "select_fold", "fold_tallies", "set_folded", "release_work"];

/// Statements that read more than they need, with the reason why this is acceptable.
const ALLOWED: [(&str, &str); 23] = [
    ("lock_live_groups", "a reset, once per run"),
    ("count_live_batches", "a reset, once per run"),
    ("discard_batches", "a reset, once per run"),
    ("select_admissions_of_policy", "a reset, once per run; admissions in flight only"),
    ("select_admissions_of_decided_groups", "admissions in flight, whose number the rules bound, if room is short"),
    ("select_live_admissions", "admissions in flight, whose number the rules bound, if slow rollouts are waited for"),
    ("select_reserved", "admissions in flight, whose number the rules bound, if room is short or a group is named"),
    ("select_missing", "open groups, whose number the backlog bounds, if room is short or a group is named"),
    ("sum_recent_tokens", "reads the newest 256 rollouts of a policy"),
    ("select_last_rollout", "reads one entry, the last of an index"),
    ("select_newest_metrics", "reads one entry, the last of a policy"),
    ("select_components", "sorts the components of the rollouts of one batch"),
    ("select_fullest", "sorts a sample of open groups of bounded size"),
    ("select_newest_group", "reads the newest 256 groups of a policy"),
    ("end_wait", "among the consumers that wait for batches of a policy"),
    ("end_granted_wait", "among the consumers that wait for batches of a policy"),
    ("select_asking", "sorts the consumers that wait for batches of a policy"),
    ("select_holding", "sorts the live leases of a run"),
    ("delete_entries", "reads the journal of a policy up to its bound"),
    ("delete_runs_of_steps", "once an hour; reads the log of a policy up to its bound"),
    ("delete_steps", "once an hour; reads the log of a policy up to its bound"),
    ("sum_never_named", "uploads that no rollout has named, whose number is bounded; once a second"),
    ("select_snapshots", "reads the history of a policy, which is thinned out"),
];

/// A statement and its name.
struct Walked {
    name: String,
    text: String,
}

/// The statements that the service runs on a database, each once.
async fn walked(database: &str) -> Vec<Walked> {
    let log = ("RUST_LOG", "info,sqlx::query=debug");
    let engine = FakeEngine::start(EngineKind::Sglang).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    // A quota that bounds nothing, so that its statements run.
    let quota = "[[quota]]\npolicies = ['*']\nmax_policies = 100000\nmax_backlog_bytes = 9000000000000000000\nmax_sessions = 100000\n";
    std::fs::write(&config, with_agents(quota, &engine)).expect("the folder can be written");
    let config = config.to_str().expect("the path is text");
    let service = Service::start_with(database, &["--log", "json", "--config", config], &[log]).await;
    if database.starts_with("postgres") {
        without_autovacuum(database).await;
    }
    walk::all(&service.url).await;
    let texts: BTreeSet<String> = service.terminate().await.iter().filter_map(|line| statement(line)).collect();
    let served = |text: String| names_of(&text).into_iter().map(move |name| Walked { name, text: text.clone() });
    let mut walked: Vec<Walked> = texts.into_iter().flat_map(served).collect();
    let unserved = unserved::walked(database).await;
    // The service may have run some of them too.
    walked.retain(|one| !unserved.iter().any(|other| other.text == one.text));
    walked.extend(unserved);
    walked
}

/// The names in a statement's first line: several if Postgres inserts rows of several tables together. The first line of
/// a migration is a sentence and not a name.
fn names_of(text: &str) -> Vec<String> {
    let line = text.strip_prefix("-- ").and_then(|text| text.lines().next()).unwrap_or_default();
    let is_name = |name: &&str| {
        !name.is_empty() && name.chars().all(|character| character.is_ascii_lowercase() || character == '_')
    };
    let names: Vec<&str> = line.split(" + ").collect();
    if names.iter().all(is_name) { names.into_iter().map(str::to_owned).collect() } else { Vec::new() }
}

/// The statement in a line of the log.
fn statement(line: &str) -> Option<String> {
    let event: Value = serde_json::from_str(line).ok()?;
    (event["target"] == "sqlx::query").then_some(())?;
    Some(event["db.statement"].as_str()?.trim().to_owned())
}

/// The names of all statements that the walk must run.
fn named() -> BTreeSet<String> {
    named_in(|path| !NOT_WALKED_FILES.iter().any(|file| path.ends_with(file)))
}

/// The names of the statements in some files of the store, read from its source.
fn named_in(is_read: impl Fn(&Path) -> bool) -> BTreeSet<String> {
    let first_line = regex::Regex::new(r#"(?m)(?:"|^\s*)-- ([a-z_]+)(?:\\n|"|$)"#).expect("the pattern is valid");
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/store/src")];
    let mut names = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the source is there") {
            let path = entry.expect("the source can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if is_read(&path) {
                let source = std::fs::read_to_string(path).expect("source is text");
                names.extend(first_line.captures_iter(&source).map(|found| found[1].to_owned()));
            }
        }
    }
    names
}

/// Fails on statements that the walk did not run, and on findings in the plans of the others.
fn check(walked: &[Walked], found: &[(String, String)]) {
    let ran: BTreeSet<&str> = walked.iter().map(|statement| statement.name.as_str()).collect();
    let named = named();
    let missing: Vec<&String> =
        named.iter().filter(|name| !ran.contains(name.as_str()) && !NOT_WALKED.contains(&name.as_str())).collect();
    assert!(missing.is_empty(), "statements that the walk does not come by: {missing:?}");
    let allowed = |name: &str| ALLOWED.iter().any(|(allowed, _)| *allowed == name);
    let growing: Vec<String> =
        found.iter().filter(|(name, _)| !allowed(name)).map(|(name, why)| format!("{name}: {why}")).collect();
    assert!(growing.is_empty(), "these get slower as the ledger grows:\n{}", growing.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_scans_the_ledger_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    let walked = walked(&database).await;
    check(&walked, &plans::sqlite(&database, &walked).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_scans_the_ledger_on_postgres() {
    let database = fresh_database().await;
    let walked = walked(&database).await;
    check(&walked, &plans::postgres(&database, &walked).await);
}
