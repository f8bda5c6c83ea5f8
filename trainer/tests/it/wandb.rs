//! Runs in the offline format of Weights & Biases, read back by its own Python package.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use forebay_trainer::{
    config::{DeviceConfig, TrainConfig},
    report::{Reporter, RunDescription, StepReport},
    train::train,
};
use serde_json::{Value, json};

use crate::support::{TestService, record, tiny_model};

fn output_of(command: &mut Command) -> String {
    let output = command.output().expect("it can be run");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The interpreter of an environment that has wandb.
fn python() -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository");
    output_of(Command::new(repository.join("scripts/python-env")).arg("wandb"))
}

/// The only run in a folder, whose name has the form that `wandb sync` looks for.
fn only_run(folder: &Path) -> PathBuf {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("it is there").map(|entry| entry.expect("it can be listed").path()).collect();
    let [run] = entries.as_slice() else { panic!("one run: {entries:?}") };
    let name = run.file_name().expect("it has a name").to_string_lossy().into_owned();
    let parts: Vec<&str> = name.split('-').collect();
    let ["offline", "run", date, id] = parts[..] else { panic!("{name}") };
    assert_eq!((date.len(), date.as_bytes()[8], id.len()), (15, b'_', 8), "{name}");
    run.join(format!("run-{id}.wandb"))
}

/// The records that the package `wandb` reads from a file.
fn read(file: &Path) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/read_wandb.py");
    let lines = output_of(Command::new(python()).arg(script).arg(file));
    lines.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect()
}

/// The rows of the records of a kind, by their items' names.
fn rows(records: &[Value], kind: &str, items: &str) -> Vec<Value> {
    let found = records.iter().filter(|record| record["kind"] == kind);
    found.map(|record| row(&record[kind][items])).collect()
}

fn row(items: &Value) -> Value {
    let items = items.as_array().expect("a list of items").iter().map(|item| {
        let json = item["value_json"].as_str().expect("text");
        (item["key"].as_str().expect("text").to_owned(), serde_json::from_str(json).expect("it is JSON"))
    });
    Value::Object(items.collect())
}

/// The numbers of the reports as rows.
fn expected(lines: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(lines).expect("steps were reported");
    let row = |line: &str| {
        let report: serde_json::Map<String, Value> = serde_json::from_str(line).expect("it is JSON");
        let numbers = report.into_iter().filter(|(_, value)| value.is_number());
        Value::Object(
            numbers
                .map(|(name, value)| if name == "step" { ("_step".to_owned(), value) } else { (name, value) })
                .collect(),
        )
    };
    text.lines().map(row).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wandb_reads_each_step_of_a_run_once_although_one_was_made_twice() {
    let service =
        TestService::start("[policy_defaults]\ngroup = { size = 2 }\nretention = { settled_s = 86400 }").await;
    record(&service.client, 4, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let output = folder.path().join("sums");
    let mut config = TrainConfig::new(tiny_model(), output.clone());
    config.server.clone_from(&service.url);
    config.device = DeviceConfig::Cpu;
    config.checkpoint.every = 2;
    config.report.wandb_project = Some("counting".to_owned());
    for steps in [3, 4] {
        config.steps = steps;
        let config = config.clone();
        let ended = tokio::task::spawn_blocking(move || train(&config, false, &|| false)).await;
        ended.expect("the trainer does not panic").expect("it trains");
        if steps == 3 {
            let file = only_run(&output.join("wandb"));
            std::fs::write(file.with_extension("wandb.synced"), "").expect("it can be written");
            // The third step's checkpoint is removed, as if the trainer had been killed before it was saved.
            std::fs::remove_dir_all(output.join("checkpoints/step-00000003")).expect("it was saved");
        }
    }
    let file = only_run(&output.join("wandb"));
    assert!(!file.with_extension("wandb.synced").exists(), "what was uploaded is not all that there is");
    let records = read(&file);
    let history = rows(&records, "history", "item");
    assert_eq!(history, expected(&output.join("metrics.jsonl")));
    assert_eq!(
        history.iter().map(|row| row["_step"].as_i64()).collect::<Vec<_>>(),
        (1..=4).map(Some).collect::<Vec<_>>()
    );
    assert_eq!(rows(&records, "summary", "update"), history, "the summary is the last row");

    let run = &records[0]["run"];
    assert_eq!((&run["project"], &run["display_name"]), (&json!("counting"), &json!("sums")));
    let name = file.file_stem().expect("it has a name").to_string_lossy().into_owned();
    assert_eq!(format!("run-{}", run["run_id"].as_str().expect("text")), name);
    let configured = row(&run["config"]["update"]);
    assert_eq!((&configured["steps"], &configured["objective"]["objective"]), (&json!(4), &json!("grpo")));
    assert_eq!(records.last().map(|record| &record["kind"]), Some(&json!("exit")), "the run ended well");
    service.stop().await;
}

#[test]
fn wandb_reads_records_that_cross_the_ends_of_blocks() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let lines = folder.path().join("metrics.jsonl");
    let mut reporter = Reporter::new(400);
    reporter.write_lines(&lines, 0).expect("it can be written");
    // Records have many lengths, and one is longer than two blocks.
    let config = json!({"notes": "n".repeat(70_000)});
    let description = RunDescription { project: "p".to_owned(), name: "n".to_owned(), config: config.clone() };
    reporter.write_run(&folder.path().join("wandb"), &description, &lines).expect("it can be written");
    for step in 1..=400 {
        let report = StepReport { step, seconds: (step as f64).sqrt(), ..StepReport::default() };
        reporter.step(&report).expect("it can be written");
    }
    let records = read(&only_run(&folder.path().join("wandb")));
    assert_eq!(row(&records[0]["run"]["config"]["update"]), config);
    assert_eq!(rows(&records, "history", "item"), expected(&lines));
    assert!(records.iter().all(|record| record["kind"] != "exit"), "a run that goes on has no end");
}
