//! The program `forebay-bench`: its requests to other services have their formats, and its results are right.
//!
//! `tests/it/bench.rs` of the service tests the load on a Forebay service.

mod peers;

use std::{path::Path, process::Output};

use serde_json::Value;
use tokio::process::Command;

use self::peers::{Peer, atropos, slime};

async fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-bench"));
    command.args(arguments).env_remove("FOREBAY_URL").env_remove("FOREBAY_KEY");
    command.output().await.expect("the binary starts")
}

/// Runs the program, which must succeed, and returns its JSON document.
async fn report(arguments: &[&str]) -> Value {
    let output = bench(&[arguments, &["--json", "-"]].concat()).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is the document and nothing else")
}

/// Runs the program, which must fail, and returns its error.
async fn complaint(arguments: &[&str]) -> String {
    let output = bench(arguments).await;
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_counted_and_repeated() {
    let peer = Peer::start(atropos::router()).await;
    peer.refuse(&[503, 429]);
    let report = report(&["--protocol", "atropos", "--url", &peer.url, "--bodies", "4", "--tokens", "20"]).await;
    assert_eq!((&report["refused"]["503"], &report["refused"]["429"]), (&1.into(), &1.into()));
    assert_eq!((&report["posted"]["bodies"], peer.count()), (&4.into(), 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_refusals_end_the_run_and_are_shown() {
    let peer = Peer::start(atropos::router()).await;
    peer.refuse(&[422]);
    let why = complaint(&["--protocol", "atropos", "--url", &peer.url, "--bodies", "4", "--tokens", "20"]).await;
    assert!(why.contains("/scored_data was answered 422") && why.contains("not today"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slime_gets_items_and_gives_them_back() {
    for content in [&["--tokens", "20", "--segments", "2"][..], &["--text", "12"]] {
        let peer = Peer::start(slime::router()).await;
        let load = ["--protocol", "slime", "--url", &peer.url, "--bodies", "8", "--group-size", "2", "--trainers", "1"];
        let report = report(&[&load, content].concat()).await;
        assert_eq!((&report["posted"]["bodies"], &report["posted"]["rollouts"]), (&8.into(), &8.into()));
        assert_eq!(peer.wrong(), Vec::<String>::new());
        assert_eq!((peer.count(), peer.left()), (8, 0));
        assert!(report["delivered"]["total"]["batches"].as_u64() > Some(0), "{report}");
        assert_eq!(report["delivered"]["ack_ms"], Value::Null);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn atropos_gets_groups_and_gives_batches() {
    let peer = Peer::start(atropos::router()).await;
    let load = ["--protocol", "atropos", "--url", &peer.url, "--bodies", "8", "--group-size", "2", "--tokens", "20"];
    let report = report(&[&load[..], &["--trainers", "1", "--batch-groups", "4"]].concat()).await;
    assert_eq!(peer.wrong(), Vec::<String>::new());
    assert_eq!((&report["posted"]["rollouts"], peer.count(), peer.left()), (&16.into(), 8, 0));
    assert_eq!(report["delivered"]["total"]["batches"], 2);
    assert_eq!(report["delivered"]["total"]["rollouts"], 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lengths_are_log_normal_and_repeatable() {
    let lengths = async |sigma: &str, seed: &str| {
        let shape = ["--drain-only", "--bodies", "1", "--tokens", "1000", "--sigma", sigma, "--seed", seed];
        report(&shape).await["bodies"]["rollout_tokens"].clone()
    };
    let drawn = lengths("0.5", "7").await;
    let of = |name: &str| drawn[name].as_f64().expect("a number");
    // The expected values for 512 draws: the median; the mean, exp(sigma^2 / 2) times the median; and the 99th
    // percentile, exp(2.326 sigma) times the median.
    assert!((900.0..1_100.0).contains(&of("p50")), "{drawn}");
    assert!((1_030.0..1_240.0).contains(&of("mean")), "{drawn}");
    assert!((2_500.0..4_200.0).contains(&of("p99")), "{drawn}");
    assert_eq!(lengths("0.5", "7").await, drawn);
    assert_ne!(lengths("0.5", "8").await, drawn);
    let equal = lengths("0", "7").await;
    assert_eq!((&equal["mean"], &equal["max"]), (&1_000.into(), &1_000.into()));
}

#[tokio::test]
async fn an_open_loop_posts_when_bodies_are_due_and_not_before() {
    let report = report(&["--drain-only", "--rate", "50", "--bodies", "6", "--tokens", "20"]).await;
    assert_eq!((&report["posted"]["bodies"], &report["rate"]), (&6.into(), &50.0.into()));
    // The sixth body is due five fiftieths of a second after the first.
    assert!(report["seconds"].as_f64() >= Some(0.1), "{report}");
}

#[tokio::test]
async fn the_table_and_the_document_come_from_one_run() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = folder.path().join("bench.json");
    let output = bench(&["--drain-only", "--bodies", "5", "--tokens", "50", "--json", path(&file)]).await;
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("a handler that only drains") && table.contains("bodies/s"), "{table}");
    let document = std::fs::read(&file).expect("the file was written");
    let document: Value = serde_json::from_slice(&document).expect("it is JSON");
    assert_eq!((&document["posted"]["bodies"], &document["url"]), (&5.into(), &Value::Null));
    assert!(document["generator"].as_str().expect("text").starts_with("forebay "));
}

#[tokio::test]
async fn where_nothing_listens_it_says_so_and_what_to_do() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
    drop(listener);
    for (protocol, advice) in [("forebay", "`forebay serve`"), ("slime", "--url"), ("atropos", "--url")] {
        let why = complaint(&["--url", &url, "--protocol", protocol, "--bodies", "1", "--tokens", "10"]).await;
        assert_eq!(why.lines().count(), 1, "{why}");
        assert!(why.contains(&format!("nothing listens at {url}")) && why.contains(advice), "{why}");
    }
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused_before_anything_is_sent() {
    let refused = async |arguments: &[&str], named: &str| {
        let why = complaint(arguments).await;
        assert!(why.contains(named), "{why}");
    };
    refused(&["--policy", "default"], "must begin with `bench`").await;
    refused(&["--connections", "0"], "--trainers").await;
    refused(&["--protocol", "atropos", "--text", "10"], "--text").await;
    refused(&["--protocol", "slime", "--wake"], "--wake").await;
    refused(&["--sigma", "NaN"], "must be a number").await;
}

fn path(file: &Path) -> &str {
    file.to_str().expect("text")
}
