//! Spans in the log, and spans that are exported to a collector.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use axum::{body::Bytes, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse},
    common::v1::any_value,
    trace::v1::{Span as OtlpSpan, span::SpanKind},
};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;

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

/// A collector that keeps the spans that it receives.
struct Collector {
    endpoint: String,
    requests: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    async fn start() -> Self {
        let requests = Arc::<Mutex<Vec<ExportTraceServiceRequest>>>::default();
        let kept = Arc::clone(&requests);
        let take = async move |body: Bytes| {
            let request = ExportTraceServiceRequest::decode(body).expect("the body is OTLP");
            kept.lock().expect("no test panicked meanwhile").push(request);
            ExportTraceServiceResponse::default().encode_to_vec()
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let app = axum::Router::new().route("/v1/traces", post(take));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { endpoint, requests }
    }

    fn requests(&self) -> Vec<ExportTraceServiceRequest> {
        self.requests.lock().expect("no test panicked meanwhile").clone()
    }

    fn spans(&self) -> Vec<OtlpSpan> {
        let scopes = self.requests().into_iter().flat_map(|request| request.resource_spans);
        scopes.flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_are_exported_to_the_collector_that_the_environment_names() {
    let collector = Collector::start().await;
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.as_str())];
    let service = Service::start_with("sqlite::memory:", &[], &environment).await;
    let url = format!("{}/trajectories", service.url);
    let (trace, parent) = (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128, 0xb7ad_6b71_6920_3331_u64);
    let sent = crate::support::http().post(&url).header("traceparent", format!("00-{trace:032x}-{parent:016x}-01"));
    assert_eq!(sent.json(&rollout("a", 1.0)).send().await.expect("the service answers").status(), 201);
    let sent = crate::support::http().post(&url).json(&json!({"status": "odd"}));
    assert_eq!(sent.send().await.expect("the service answers").status(), 422);
    service.terminate().await;

    let spans = collector.spans();
    let posts: Vec<_> = spans.iter().filter(|span| span.name == "POST /trajectories").collect();
    let [accepted, refused] = posts.as_slice() else { panic!("two posts, not {posts:#?}") };
    assert_eq!(accepted.trace_id, trace.to_be_bytes(), "the trace of the caller goes on");
    assert_eq!(accepted.parent_span_id, parent.to_be_bytes());
    assert_eq!(accepted.kind, SpanKind::Server as i32);
    assert_eq!(number(accepted, "http.response.status_code"), Some(201));
    assert_eq!(number(refused, "http.response.status_code"), Some(422));
    assert_ne!(refused.trace_id, accepted.trace_id);
    assert!(refused.parent_span_id.is_empty(), "a request without a trace begins one");
    // One commit stores posts of several requests, so it is linked to them instead of being a child of one.
    let commits = spans.iter().filter(|span| span.name == "group_commit");
    let linked: Vec<_> = commits.flat_map(|commit| &commit.links).map(|link| &link.trace_id[..]).collect();
    assert_eq!(linked, [trace.to_be_bytes()]);

    let requests = collector.requests();
    let resource = requests[0].resource_spans[0].resource.as_ref().expect("the resource is named");
    let name = resource.attributes.iter().find(|attribute| attribute.key == "service.name");
    assert_eq!(name.and_then(|name| name.value.clone()).and_then(|name| name.value), Some(text_value("forebay")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_is_logged_and_harms_nothing() {
    // Nothing listens on a port that was just given back.
    let gone = TcpListener::bind("127.0.0.1:0").await.expect("a port is free").local_addr().expect("it is bound");
    let endpoint = format!("http://{gone}");
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str())];
    let service = Service::start_with("sqlite::memory:", &[], &environment).await;
    let sent = crate::support::http().post(format!("{}/trajectories", service.url)).json(&rollout("a", 1.0));
    assert_eq!(sent.send().await.expect("the service answers").status(), 201);
    let log = service.terminate().await;
    let warnings = log.iter().filter(|line| line.contains("spans cannot be exported")).count();
    assert_eq!(warnings, 1, "{log:#?}");
}

fn number(span: &OtlpSpan, key: &str) -> Option<i64> {
    let attribute = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match attribute.value.as_ref()?.value {
        Some(any_value::Value::IntValue(number)) => Some(number),
        _ => None,
    }
}

fn text_value(text: &str) -> any_value::Value {
    any_value::Value::StringValue(text.to_owned())
}
