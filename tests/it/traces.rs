//! Spans in the log: each span around a line is named once.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{process::Service, rollout, text};

/// The spans of a line of the log, after checks that hold for every line.
fn spans_of(line: &str) -> Vec<Value> {
    let line: Value = serde_json::from_str(line).expect("every line is JSON");
    assert!(line.get("span").is_none(), "the current span is the last of `spans`: {line}");
    let spans = line["spans"].as_array().cloned().unwrap_or_default();
    let names: BTreeSet<&str> = spans.iter().map(|span| text(&span["name"])).collect();
    assert_eq!(names.len(), spans.len(), "a span is named twice: {line}");
    spans
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_of_json_names_each_span_once() {
    let service = Service::start_with("sqlite::memory:", &["--log", "json"], &[("RUST_LOG", "forebay=debug")]).await;
    let sent = crate::support::http().post(format!("{}/trajectories", service.url)).json(&json!({"status": "odd"}));
    assert_eq!(sent.send().await.expect("the service answers").status(), 422);
    let sent = crate::support::http().post(format!("{}/trajectories", service.url)).json(&rollout("a", 1.0));
    assert_eq!(sent.send().await.expect("the service answers").status(), 201);
    let log = service.terminate().await;
    let requests = log.iter().filter(|line| spans_of(line).iter().any(|span| span["name"] == "request")).count();
    assert!(requests >= 2, "{log:#?}");
}
