//! The log. It is structured and goes to standard error, because commands print their results to standard output.
//!
//! `otlp` exports spans to a collector, if one is configured. [`requests`](crate::requests) adds the ids of requests to
//! log lines that concern several of them.

use std::io::IsTerminal as _;

use serde::Deserialize;
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::{otlp, panics};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line per event, for people.
    #[default]
    Text,
    /// One JSON object per line, for machines.
    Json,
}

/// The running export of spans. Dropping it exports the spans that are left and blocks the thread meanwhile, at most five
/// seconds.
#[derive(Debug)]
#[must_use = "the last spans are exported when it is dropped"]
pub struct Telemetry {
    _export: Option<otlp::Export>,
}

/// Starts the log, and the export of spans if the environment names a collector. `RUST_LOG` sets the filter of the log;
/// the default is `info`.
pub fn start(format: LogFormat) -> Telemetry {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    // Colours are only used on a terminal. A file or a pipe gets plain text.
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let log = match format {
        LogFormat::Text => log.with_target(false).boxed(),
        // The current span is left out, because the list of spans already contains it.
        LogFormat::Json => log.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let export = otlp::Export::start();
    let exported = export.as_ref().ok().and_then(Option::as_ref);
    let started = tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .with(crate::requests::RequestIdsLayer::filtered())
        .with(exported.map(otlp::Export::layer))
        .try_init();
    panics::log();
    if let Err(error) = started {
        // This happens only if one process starts the log twice, as tests do. The first log stays in use.
        tracing::debug!(error = %error, "the log is already started");
    }
    let export = export.unwrap_or_else(|error| {
        tracing::error!(%error, "spans are not exported: the OTEL_EXPORTER_OTLP variables cannot be used");
        None
    });
    Telemetry { _export: export }
}
