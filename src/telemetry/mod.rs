//! The log. It is structured and goes to standard error, because commands print their results to standard output.
//!
//! [`requests`] adds the ids of requests to log lines that concern several requests.

mod requests;

use std::io::IsTerminal as _;

use serde::Deserialize;
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

#[cfg(test)]
pub(crate) use self::requests::RequestIdsLayer;
pub(crate) use self::requests::request_ids;
use crate::panics;

/// The format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line per event, for people.
    #[default]
    Text,
    /// One JSON object per line, for machines.
    Json,
}

/// Starts the log. `RUST_LOG` sets the filter; the default is `info`.
pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    // Colours are only used on a terminal. A file or a pipe gets plain text.
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let log = match format {
        LogFormat::Text => log.with_target(false).boxed(),
        // The current span is left out, because the list of spans already contains it.
        LogFormat::Json => log.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(log.with_filter(filter))
        .with(requests::RequestIdsLayer::filtered())
        .try_init();
    panics::log();
    if let Err(error) = started {
        // This happens only if one process starts the log twice, as tests do. The first log stays in use.
        tracing::debug!(error = %error, "the log is already started");
    }
}
