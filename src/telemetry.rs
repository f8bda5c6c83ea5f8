//! The log: structured, to standard error, so that standard output stays for what a command prints.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::{config::LogFormat, panics};

/// Starts the log; `RUST_LOG` sets what it says, `info` otherwise.
pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    // Colours are for people: a file or a pipe gets plain text.
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let started = match format {
        LogFormat::Text => log.with_target(false).try_init(),
        // The list of spans holds the current one.
        LogFormat::Json => log.json().flatten_event(true).with_current_span(false).try_init(),
    };
    panics::log();
    if let Err(error) = started {
        // Only a second start in one process, as in tests, comes here: the first log goes on.
        tracing::debug!(error = %error, "the log is already started");
    }
}
