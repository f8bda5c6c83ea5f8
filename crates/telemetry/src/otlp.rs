//! Export of spans to an OpenTelemetry collector, as OTLP over HTTP.
//!
//! The standard variables configure it: without `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`
//! nothing is exported. The number of spans that wait for export is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`). When the
//! collector is away, spans are dropped and the service goes on.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use http::{HeaderMap, HeaderName};
use opentelemetry::{
    KeyValue, Value,
    propagation::{Extractor, TextMapPropagator as _},
    trace::{SpanKind, Status, TracerProvider as _},
};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    propagation::TraceContextPropagator,
    trace::{SdkTracerProvider, SpanData, SpanExporter},
};
use tracing::{Metadata, Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, filter::filter_fn, registry::LookupSpan};

/// The variables that switch the export on.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

/// The default of `OTEL_SERVICE_NAME`.
const SERVICE_NAME: &str = "forebay";

/// How long a stopping service waits for the collector to take the last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The span of a request, which is named differently for collectors.
const REQUEST: &str = "request";

/// A running export.
#[derive(Debug)]
pub(super) struct Export {
    provider: SdkTracerProvider,
}

impl Export {
    /// Starts the export if the environment names an endpoint.
    pub(super) fn start() -> Result<Option<Self>, ExporterBuildError> {
        if !ENDPOINTS.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty())) {
            return Ok(None);
        }
        forebay_client::install_tls_provider();
        let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().build()?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_batch_exporter(Conventional { exporter, failing: AtomicBool::new(false) })
            .build();
        Ok(Some(Self { provider }))
    }

    /// The layer that records the spans of this crate. Spans of libraries are not recorded: the exporter's own HTTP
    /// client would produce new spans with each export.
    pub(super) fn layer<S: Subscriber + for<'s> LookupSpan<'s>>(&self) -> impl Layer<S> + use<S> {
        let is_ours = |metadata: &Metadata<'_>| metadata.target().starts_with("forebay");
        let layer = tracing_opentelemetry::layer().with_tracer(self.provider.tracer(SERVICE_NAME));
        layer.with_location(false).with_threads(false).with_filter(filter_fn(is_ours))
    }
}

/// Exports the spans that are left. It blocks the thread until the collector answers, at most five seconds.
impl Drop for Export {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "the last spans were not exported");
        }
    }
}

/// What the environment says about this process.
fn resource() -> Resource {
    let detected = Resource::builder().build();
    let name = detected.get(&"service.name".into());
    if name.is_some_and(|name| !name.as_str().starts_with("unknown_service")) {
        return detected;
    }
    Resource::builder().with_service_name(SERVICE_NAME).build()
}

/// Makes the span of a request part of the trace that its `traceparent` header names.
pub fn continue_trace(span: &Span, headers: &HeaderMap) {
    if headers.contains_key("traceparent") {
        let parent = TraceContextPropagator::new().extract(&Headers(headers));
        // It fails if spans are not exported, and then no parent is needed.
        let _ = span.set_parent(parent);
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Exports requests under the names of OpenTelemetry's conventions for HTTP servers, and logs when the collector goes
/// away and comes back.
#[derive(Debug)]
struct Conventional {
    exporter: opentelemetry_otlp::SpanExporter,
    failing: AtomicBool,
}

impl SpanExporter for Conventional {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        for span in &mut batch {
            if span.name == REQUEST {
                follow_conventions(span);
            }
        }
        let outcome = self.exporter.export(batch).await;
        let failed_before = self.failing.swap(outcome.is_err(), Ordering::Relaxed);
        match &outcome {
            Err(error) if !failed_before => tracing::warn!(%error, "spans cannot be exported and are dropped"),
            Ok(()) if failed_before => tracing::info!("spans are exported again"),
            _ => {}
        }
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Names, kind, status and attributes of the span of a request as in
/// <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>.
fn follow_conventions(span: &mut SpanData) {
    for attribute in &mut span.attributes {
        let standard = match attribute.key.as_str() {
            "http.method" => "http.request.method",
            "http.status" => "http.response.status_code",
            _ => continue,
        };
        *attribute = KeyValue::new(standard, attribute.value.clone());
    }
    let value = |key| span.attributes.iter().find(|attribute| attribute.key.as_str() == key).map(|found| &found.value);
    if let (Some(method), Some(route)) = (value("http.request.method"), value("http.route")) {
        span.name = format!("{method} {route}").into();
    }
    // A refusal is a fault of the caller, and not an error of the server.
    if let Some(Value::I64(500..)) = value("http.response.status_code") {
        span.status = Status::error("");
    }
    span.span_kind = SpanKind::Server;
}
