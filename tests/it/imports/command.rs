//! `forebay import` as a process: reports, the exit status, and an import that is killed and run again.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::Path,
    process::{Output, Stdio},
};

use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::{counts, path, refusals};
use crate::support::{eventually, http, process::Service, text};

fn command(url: &str, arguments: &[&str], files: &[&Path]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for name in ["FOREBAY_KEY", "FOREBAY_CA", "FOREBAY_IDENTITY"] {
        command.env_remove(name);
    }
    command.env("FOREBAY_URL", url).arg("import").args(arguments).args(files);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn run(url: &str, arguments: &[&str], files: &[&Path]) -> Output {
    command(url, arguments, files).output().await.expect("the binary starts")
}

/// The reports of a command with `--json`.
fn reports(output: &Output) -> Vec<Value> {
    String::from_utf8_lossy(&output.stdout).lines().map(|line| line.parse().expect("a report is JSON")).collect()
}

async fn service(folder: &Path) -> Service {
    Service::start(&format!("sqlite:{}", folder.join("forebay.db").display())).await
}

async fn stats(url: &str) -> Value {
    let answer = http().get(format!("{url}/stats")).send().await.expect("the service answers");
    answer.json().await.expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_imported_with_a_report_each_and_refusals_are_an_error() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let service = service(folder.path()).await;
    let (good, bad) = (path("nemo-gym.jsonl"), path("atif-refused.jsonl"));
    let arguments = ["--format", "nemo-gym", "--group-size", "2"];
    let output = run(&service.url, &arguments, &[&good]).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("4 documents with 4 rollouts: 4 stored, 0 already there, 0 refused\n"), "{said}");
    assert!(output.stderr.is_empty(), "progress is for terminals: {output:?}");

    let packed = folder.path().join("again.jsonl.zst");
    fs::write(&packed, zstd::encode_all(&fs::read(&good).expect("it is there")[..], 1).expect("it compresses"))
        .expect("the folder can be written");
    let again = run(&service.url, &["--format", "nemo-gym", "--group-size", "2", "--json"], &[&good, &packed]).await;
    let found = reports(&again);
    assert_eq!(found.iter().map(counts).collect::<Vec<_>>(), [[4, 4, 0, 4, 0]; 2], "{again:?}");
    assert_eq!(text(&found[1]["file"]), packed.display().to_string());

    let refused = run(&service.url, &["--format", "nemo-gym", "--json"], &[&bad]).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("14 documents or rollouts were refused"), "{refused:?}");
    assert_eq!(refusals(&reports(&refused)[0])[0], (1, "invalid-document".to_owned(), "/response".to_owned()));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_arguments_and_a_missing_service_are_explained() {
    let file = path("chat.jsonl");
    let nobody = "http://127.0.0.1:9";
    for (arguments, said) in [
        (&["--format", "parquet"][..], "must be one of"),
        (&["--format", "chat", "--reward-at", "score"], "--reward-at: must be a JSON pointer"),
    ] {
        let output = run(nobody, arguments, &[&file]).await;
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains(said), "{output:?}");
    }
    let missing = run(nobody, &["--format", "chat"], &[Path::new("nothing.jsonl")]).await;
    assert!(String::from_utf8_lossy(&missing.stderr).contains("cannot open nothing.jsonl"), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_group_size_stops_the_command_before_any_file_is_stored() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let [good, rest, large] = ["good.jsonl", "rest.jsonl", "large.jsonl"].map(|name| folder.path().join(name));
    write_rollouts(&good, 4, 2, 2);
    write_rollouts(&large, 6, 3, 2);
    // The third rollouts of the groups whose first two are in the good file. Neither file has too many by itself.
    let lines = fs::read_to_string(&large).expect("it was written");
    let third: Vec<&str> = lines.lines().skip(2).step_by(3).collect();
    fs::write(&rest, third.join("\n")).expect("the folder can be written");
    let service = service(folder.path()).await;
    let arguments = ["--format", "nemo-gym", "--group-size", "2", "--json"];
    for files in [[good.as_path(), &large], [&good, &rest]] {
        let output = run(&service.url, &arguments, &files).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in ["the group 0 has 3 rollouts and the size 2", "--group-size 3", "--allow-late"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(output.stdout.is_empty() && ids(&service.url).await.is_empty(), "nothing is stored");
    }
    let late = [&arguments[..], &["--allow-late", "--prefix", "l/"]].concat();
    let reports = reports(&run(&service.url, &late, &[&large]).await);
    assert_eq!(reports[0]["verdicts"]["late"], 2, "{reports:?}");
    service.stop().await;
}

/// The number of rollouts of the import that is killed: several requests.
const ROLLOUTS: usize = 6_000;

/// A file of rollouts, `of_group` of each group, with as many sampled ids.
fn write_rollouts(file: &Path, rollouts: usize, of_group: usize, tokens: usize) {
    let mut text = String::new();
    for index in 0..rollouts {
        let (task, rollout) = (index / of_group, index % of_group);
        let ids: Vec<usize> = (0..tokens).map(|place| index + place).collect();
        let output = json!([{"type": "message", "role": "assistant", "content": "a", "prompt_token_ids": [1, 2],
            "generation_token_ids": ids, "generation_log_probs": vec![-0.5; ids.len()]}]);
        let record = json!({"_ng_task_index": task, "_ng_rollout_index": rollout, "reward": rollout,
            "responses_create_params": {"input": "q"}, "response": {"output": output}});
        let _ = writeln!(text, "{record}");
    }
    fs::write(file, text).expect("the folder can be written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_was_killed_is_completed_by_the_next_run_and_nothing_is_there_twice() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = folder.path().join("rollouts.jsonl");
    write_rollouts(&file, ROLLOUTS, 4, 200);
    let service = service(folder.path()).await;
    let arguments = ["--format", "nemo-gym", "--group-size", "4", "--json"];
    let received = || async { stats(&service.url).await["policies"]["default"]["received"].as_u64().unwrap_or(0) };
    let mut killed: Child = command(&service.url, &arguments, &[&file]).spawn().expect("the binary starts");
    eventually("some rollouts are stored", || async { received().await > 0 }).await;
    killed.kill().await.expect("the process can be killed");
    let before = received().await;
    assert!((1..ROLLOUTS as u64).contains(&before), "the import was killed in the middle, after {before}");

    let output = run(&service.url, &arguments, &[&file]).await;
    assert!(output.status.success(), "{output:?}");
    let report = &reports(&output)[0];
    let [documents, _, stored, duplicates, refused] = counts(report);
    assert_eq!((documents, stored + duplicates, refused), (ROLLOUTS as u64, ROLLOUTS as u64, 0));
    assert!(duplicates >= before, "{duplicates} of {before}");
    let stats = stats(&service.url).await;
    let policy = &stats["policies"]["default"];
    assert_eq!((&policy["received"], &policy["conserved"]), (&json!(ROLLOUTS), &json!(true)));
    assert_eq!(policy["groups"]["ready"], json!(ROLLOUTS / 4), "every group is complete: {policy}");
    assert_eq!(ids(&service.url).await.len(), ROLLOUTS, "each rollout is there once");
    service.stop().await;
}

/// Changes rules of the policy `default`.
async fn patch_rules(url: &str, rules: Value) {
    let patched = http().patch(format!("{url}/policies/default")).json(&rules).send().await;
    assert!(patched.expect("the service answers").status().is_success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_ends_if_there_is_no_room_and_the_next_run_continues() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = folder.path().join("rollouts.jsonl");
    write_rollouts(&file, 300, 1, 4);
    let service = service(folder.path()).await;
    patch_rules(&service.url, json!({"backlog": {"max_ready_rollouts": 1}})).await;
    let full = run(&service.url, &["--format", "nemo-gym", "--patience-s", "0", "--json"], &[&file]).await;
    let said = String::from_utf8_lossy(&full.stderr).into_owned();
    assert_eq!(full.status.code(), Some(1), "{said}");
    assert!(said.contains("run the same command again") && said.contains("had no room"), "{said}");
    let first = counts(&reports(&full)[0]);
    assert!((1..300).contains(&first[2]), "{first:?}");
    assert_eq!(first[4], 0, "what has no room is not refused: {first:?}");
    patch_rules(&service.url, json!({"backlog": null})).await;
    let again = run(&service.url, &["--format", "nemo-gym", "--json"], &[&file]).await;
    assert!(again.status.success(), "{again:?}");
    let [_, rollouts, stored, duplicates, _] = counts(&reports(&again)[0]);
    assert_eq!((rollouts, stored, duplicates), (300, 300 - first[2], first[2]));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_divided_until_the_service_takes_them() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (file, config) = (folder.path().join("rollouts.jsonl"), folder.path().join("forebay.toml"));
    write_rollouts(&file, 40, 1, 1_000);
    let mut large = fs::read_to_string(&file).expect("it was written");
    let long = "a".repeat(100_000);
    let _ = writeln!(
        large,
        "{}",
        json!({"_ng_task_index": "long", "_ng_rollout_index": 0, "reward": 1,
        "responses_create_params": {"input": long}, "response": {"output": []}})
    );
    fs::write(&file, large).expect("the folder can be written");
    fs::write(&config, "[limits]\nbody_bytes = 65_536\n").expect("the folder can be written");
    let database = format!("sqlite:{}", folder.path().join("forebay.db").display());
    let config = config.display().to_string();
    let service = Service::start_with(&database, &["--config", &config], &[]).await;
    let output = run(&service.url, &["--format", "nemo-gym", "--json"], &[&file]).await;
    let report = &reports(&output)[0];
    assert_eq!(counts(report), [41, 41, 40, 0, 1], "{output:?}");
    assert_eq!(refusals(report), [(41, "too-large".to_owned(), String::new())]);
    service.stop().await;
}

/// The ids of all rollouts.
async fn ids(url: &str) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    let mut after = "0".to_owned();
    loop {
        let page = http().get(format!("{url}/trajectories?limit=1000&after={after}")).send().await;
        let page: Value = page.expect("the service answers").json().await.expect("JSON");
        let rollouts = page["trajectories"].as_array().expect("a page has rollouts");
        ids.extend(rollouts.iter().map(|rollout| text(&rollout["rollout_id"]).to_owned()));
        match page["next"].as_str() {
            Some(next) => next.clone_into(&mut after),
            None => return ids,
        }
    }
}
