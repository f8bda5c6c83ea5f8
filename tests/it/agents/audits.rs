//! Audits: engines score a sample of recorded calls again, here all of them.

use std::time::Duration;

use forebay_fake_engine::{EngineKind, FakeEngine, LogprobFault};
use serde_json::{Value, json};

use super::{Agent, Dialect, metric, success};
use crate::support::{Backend, TestApp, eventually, process::Service, text};

const LISTEN: &str = "[sessions]\nlisten = \"127.0.0.1:0\"\naudit = 1.0\n";

/// A service that audits all calls of one engine, with more keys of `[sessions]`.
async fn start(kind: EngineKind, keys: &str) -> (TestApp, FakeEngine) {
    let engine = FakeEngine::start(kind).await;
    let app = TestApp::start_with(Backend::Sqlite, &format!("{LISTEN}{keys}\n{}", upstream(kind, &engine))).await;
    (app, engine)
}

fn upstream(kind: EngineKind, engine: &FakeEngine) -> String {
    let kind = match kind {
        EngineKind::Sglang => "sglang",
        EngineKind::Vllm => "vllm",
        EngineKind::Openai => "openai",
    };
    format!("[[upstream]]\nname = \"audited\"\nkind = \"{kind}\"\nurls = [\"{}\"]\n", engine.url())
}

/// Waits until so many calls have this outcome.
async fn wait_for(app: &TestApp, outcome: &str, count: f64) {
    let line = format!("forebay_upstream_audits_total{{outcome=\"{outcome}\",upstream=\"audited\"}}");
    eventually(outcome, || async { metric(app, &line).await == Some(count) }).await;
}

/// The sum of the differences of all calls.
async fn difference(app: &TestApp, of: &str) -> f64 {
    let line = format!("forebay_upstream_audit_difference_nats_sum{{of=\"{of}\",upstream=\"audited\"}}");
    metric(app, &line).await.expect("calls were compared")
}

/// The metrics of a service that has audited a call. Others audit none in tests, because an audit is a call of the engine.
pub(crate) async fn metrics() -> String {
    let (app, _engine) = start(EngineKind::Sglang, "").await;
    Agent::open(&app, json!({})).await.ask("Hello.").await;
    wait_for(&app, "equal", 1.0).await;
    let metrics = app.metrics().await;
    app.finish().await;
    metrics
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_right_engine_are_equal_at_every_temperature() {
    for (kind, raw_scores, temperatures) in [
        (EngineKind::Sglang, false, vec![1.0, 0.5]),
        (EngineKind::Sglang, true, vec![1.0]),
        // As vLLM does, whatever its --logprobs-mode is.
        (EngineKind::Vllm, true, vec![1.0, 0.5, 0.9, 1.5]),
    ] {
        let (app, engine) = start(kind, "").await;
        engine.switch(|switches| switches.raw_scores = raw_scores);
        for (place, temperature) in temperatures.into_iter().enumerate() {
            let agent = Agent::open(&app, json!({"sampling": {"temperature": temperature}})).await;
            agent.ask("Hello.").await;
            wait_for(&app, "equal", place as f64 + 1.0).await;
        }
        let worst = difference(&app, "worst").await;
        assert!(worst < 1e-4, "{kind:?}: {worst}");
        app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_probabilities_before_the_temperature_are_noticed_although_the_probe_said_otherwise() {
    for raw_scores in [true, false] {
        let (app, engine) = start(EngineKind::Vllm, "").await;
        engine.switch(|switches| switches.raw_scores = raw_scores);
        let agent = Agent::open(&app, json!({"sampling": {"temperature": 0.5}})).await;
        // The next probe is a minute away.
        engine.switch(|switches| switches.raw_logprobs = true);
        agent.ask("Raw.").await;
        wait_for(&app, "different", 1.0).await;
        assert!(difference(&app, "mean").await > 0.05);
        app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_probabilities_of_another_request_of_the_batch_are_noticed_and_warned_about_once() {
    let engine = FakeEngine::start(EngineKind::Vllm).await;
    engine.switch(|switches| {
        (switches.raw_scores, switches.logprob_fault) = (true, LogprobFault::Shifted);
    });
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("forebay.toml");
    let config = format!("{LISTEN}{}", upstream(EngineKind::Vllm, &engine));
    std::fs::write(&path, config).expect("the folder can be written");
    let arguments = ["--log", "json", "--config", path.to_str().expect("the path is text")];
    let service = Service::start_with("sqlite::memory:", &arguments, &[]).await;
    let http = crate::support::http();
    let open = http.post(format!("{}/sessions", service.url)).json(&json!({})).send().await;
    let session = open.expect("the service answers").json().await.expect("JSON");
    let agent = Agent { http: http.clone(), session };
    for call in 0..3 {
        agent.ask(&format!("Shifted {call}.")).await;
    }
    let different = "forebay_upstream_audits_total{outcome=\"different\",upstream=\"audited\"}";
    eventually("the audits", || async {
        let metrics = http.get(format!("{}/metrics", service.url)).send().await.expect("the service answers");
        metrics.text().await.expect("metrics are text").contains(&format!("{different} 3"))
    })
    .await;
    let log = service.terminate().await;
    let events = log.iter().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    let told = |event: &Value| text(&event["message"]).contains("log-probabilities are not those");
    let warnings: Vec<Value> = events.filter(told).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let mean = warnings[0]["audit.mean_nats"].as_f64().or(warnings[0]["audit"]["mean_nats"].as_f64());
    assert!(mean.is_some_and(|mean| (mean - 2.0).abs() < 1e-3), "{warnings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_cannot_be_compared_are_counted_with_the_reason() {
    let (app, engine) = start(EngineKind::Sglang, "audit_tokens = 100").await;
    let agent = Agent::open(&app, json!({})).await;
    let mut constrained = Dialect::Chat.body(&["JSON, please.".to_owned()], false);
    constrained["response_format"] = json!({"type": "json_object"});
    success(agent.call(Dialect::Chat, &constrained).await).await;
    wait_for(&app, "constrained", 1.0).await;

    let long = Dialect::Chat.body(&["Long.".to_owned()], false);
    engine.script("Long.", super::answers(&["a".repeat(200).as_str()]));
    success(agent.call(Dialect::Chat, &long).await).await;
    wait_for(&app, "too-long", 1.0).await;

    engine.switch(|switches| switches.version_change = Some((1, "1".to_owned())));
    agent.ask("Two versions.").await;
    wait_for(&app, "version", 1.0).await;
    engine.switch(|switches| switches.version_change = None);
    app.publish(1).await.expect(200);
    agent.ask("The engine has not loaded the version yet.").await;
    wait_for(&app, "version", 2.0).await;

    engine.switch(|switches| (switches.weight_version, switches.raw_scores) = ("1".to_owned(), true));
    Agent::open(&app, json!({"sampling": {"temperature": 0.5}})).await.ask("Scores of temperature 1.").await;
    wait_for(&app, "temperature", 1.0).await;
    assert_eq!(metric(&app, "forebay_upstream_audits_total{outcome=\"different\",upstream=\"audited\"}").await, None);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audits_that_wait_are_few_and_delay_neither_calls_nor_the_stop() {
    let (mut app, engine) = start(EngineKind::Vllm, "").await;
    let agent = Agent::open(&app, json!({})).await;
    engine.switch(|switches| switches.stall_scores = true);
    for call in 0..10 {
        agent.ask(&format!("Call {call}.")).await;
    }
    wait_for(&app, "dropped", 2.0).await;
    assert_eq!(engine.log().at("/v1/completions").count(), 1, "one at a time");
    let bytes = "forebay_agent_call_bytes_in_flight";
    assert!(metric(&app, bytes).await > Some(0.0), "the budget pays for them");
    engine.switch(|switches| switches.stall_scores = false);
    wait_for(&app, "equal", 8.0).await;
    eventually("the end of the audits", || async { metric(&app, bytes).await == Some(0.0) }).await;
    engine.switch(|switches| switches.stall_scores = true);
    agent.ask("The last one.").await;
    engine.wait(|log| log.at("/v1/completions").count() == 9 && log.stalled == 1).await;
    tokio::time::timeout(Duration::from_secs(20), app.stop()).await.expect("the stop does not wait for the audit");
    engine.wait(|log| log.stalled == 0).await;
}
