//! `forebay bench`: the posted rollouts that it reports are stored.
//!
//! The load comes from the library of `forebay-bench`, in the process of the test. The tests in `crates/bench/tests/it` cover
//! the program itself and its requests to other services.

use std::path::{Path, PathBuf};

use clap::Parser as _;
use forebay_bench::BenchArgs;
use serde_json::Value;
use tokio::process::Command;

use crate::support::{Backend, TestApp, on_both_stores};

/// Runs the command, which must succeed, and returns its JSON report.
async fn report(arguments: &[&str]) -> Value {
    let printed = run(&[arguments, &["--json", "-"]].concat()).await.expect("it ends well");
    serde_json::from_slice(&printed).expect("what it prints is the document and nothing else")
}

/// Runs the command with these arguments and returns its output.
pub(crate) async fn run(arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    let args = BenchArgs::try_parse_from([&["forebay-bench"][..], arguments].concat())?;
    let mut printed = Vec::new();
    forebay_bench::run(args, &mut printed).await?;
    Ok(printed)
}

on_both_stores! {
    async fn the_ledger_has_what_the_load_generator_says_it_posted(app: TestApp) {
        let load = ["--bodies", "12", "--connections", "3", "--group-size", "4", "--tokens", "40", "--segments", "2"];
        let report = report(&[&["--url", &app.url], &load[..]].concat()).await;
        assert_eq!(report["posted"]["bodies"], 12);
        assert_eq!(report["latency_ms"]["count"], 12);
        let stats = app.get("/stats").await.expect(200);
        let policy = &stats["policies"]["bench"];
        assert_eq!((&policy["received"], &report["posted"]["rollouts"]), (&48.into(), &48.into()));
        assert_eq!((&policy["groups"]["ready"], &policy["conserved"]), (&12.into(), &true.into()));
        let tokens = app.post("/batches", serde_json::json!({"policy": "bench", "wait_ms": 0, "partial": true})).await;
        assert_eq!(tokens.expect(201)["tokens"], report["posted"]["tokens"]);
    }

    async fn trainers_take_what_is_posted(app: TestApp) {
        let load = ["--bodies", "12", "--connections", "2", "--group-size", "2", "--tokens", "40"];
        let trainers = ["--trainers", "2", "--batch-groups", "3"];
        let report = report(&[&["--url", &app.url], &load[..], &trainers].concat()).await;
        let delivered = &report["delivered"];
        assert_eq!(delivered["total"]["batches"], 4);
        assert_eq!(delivered["total"]["rollouts"], report["posted"]["rollouts"]);
        assert_eq!(delivered["total"]["tokens"], report["posted"]["tokens"]);
        assert_eq!(delivered["ack_ms"]["count"], 4);
        assert!(delivered["total"]["bytes"].as_u64() > Some(0));
        let stats = app.get("/stats").await.expect(200);
        assert_eq!(stats["policies"]["bench"]["rollouts"]["checkpointed"], 24);
    }

    async fn arrow_goes_both_ways(app: TestApp) {
        let load = ["--format", "arrow", "--bodies", "6", "--group-size", "2", "--tokens", "40", "--segments", "2"];
        let trainers = ["--trainers", "1", "--batch-groups", "2"];
        let report = report(&[&["--url", &app.url], &load[..], &trainers].concat()).await;
        assert_eq!((&report["posted"]["bodies"], &report["posted"]["rollouts"]), (&6.into(), &12.into()));
        assert_eq!(report["delivered"]["total"]["tokens"], report["posted"]["tokens"]);
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["bench"]["rollouts"]["checkpointed"], 12);
    }

    async fn a_waiting_trainer_is_timed(app: TestApp) {
        let report = report(&["--url", &app.url, "--wake", "--bodies", "3", "--group-size", "2", "--tokens", "40"]).await;
        assert_eq!(report["wake"]["after_post_ms"]["count"], 3);
        assert_eq!(report["wake"]["after_answer_ms"]["count"], 3);
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["bench"]["batches"]["checkpointed"], 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_and_single_rollouts_are_posted_too() {
    let app = TestApp::start(Backend::Sqlite).await;
    let load = ["--bodies", "8", "--connections", "1", "--group-size", "2", "--per-body", "rollout", "--text", "30"];
    let report = report(&[&["--url", &app.url], &load[..]].concat()).await;
    assert_eq!((&report["posted"]["rollouts"], &report["unit"]), (&8.into(), &"words".into()));
    assert_eq!(app.get("/stats").await.expect(200)["policies"]["bench"]["groups"]["ready"], 4);
    app.finish().await;
}

#[tokio::test]
async fn the_command_starts_the_program_beside_it_or_in_path() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder can be made");
    let [beside, in_path] = ["beside", "in-path"].map(|name| folder.path().join(name));
    for place in [&beside, &in_path] {
        std::fs::create_dir(place).expect("the folder is empty");
    }
    // The built binary may have the real program beside it, so the test uses a link in another folder. A copy could
    // still be open for writing when it is started.
    let forebay = beside.join("forebay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_forebay"), &forebay).expect("it is on the same file system");
    let bench = async || {
        let mut command = Command::new(&forebay);
        command.args(["bench", "-c", "echo \"$0\"; exit 3"]).env("PATH", &in_path);
        command.output().await.expect("the binary starts")
    };
    let missing = bench().await;
    let why = String::from_utf8_lossy(&missing.stderr);
    assert!(missing.status.code() == Some(1) && why.contains("cargo build --release -p forebay-bench"), "{why}");

    // A shell script replaces the load generator and prints the name by which it was started.
    for (place, name) in [(&in_path, PathBuf::from("forebay-bench")), (&beside, beside.join("forebay-bench"))] {
        std::os::unix::fs::symlink("/bin/sh", place.join("forebay-bench")).expect("the folder can be written");
        let output = bench().await;
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!((Path::new(printed.trim_end()), output.status.code()), (&*name, Some(3)));
    }
}
