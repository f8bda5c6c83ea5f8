//! The arguments with which a command finds a running service, and errors with advice.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow};
use clap::Args;
use forebay_client::{Client, ClientError, ClientOptions, RetryPolicy, SILENCE_TIMEOUT, wire::ApiKey};

/// Where the service is, and the key for it.
#[derive(Args)]
#[command(next_help_heading = "Service")]
pub(crate) struct ServiceArgs {
    /// URL of the running service
    #[arg(long, env = "FOREBAY_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) url: String,
    /// Key for the service; set the variable rather than the option, which `ps` shows
    #[arg(long, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    key: Option<ApiKey>,
    /// Certificate (PEM) to trust instead of the system's: the service's own, or that of the authority that signed it
    #[arg(long, env = "FOREBAY_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate and private key (PEM), for a service that requires client certificates
    #[arg(long, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
}

impl ServiceArgs {
    /// A client that repeats calls which are safe to repeat.
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        self.client_that_waits(SILENCE_TIMEOUT)
    }

    /// The same, with how long a connection may be silent before it counts as broken.
    pub(crate) fn client_that_waits(&self, silence_timeout: Duration) -> anyhow::Result<Client> {
        let read = |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let options = ClientOptions {
            key: self.key.clone(),
            ca_pem: self.ca.as_ref().map(read).transpose()?,
            identity_pem: self.identity.as_ref().map(read).transpose()?,
            silence_timeout,
        };
        Ok(Client::with_options(&self.url, &options)?.with_retry(RetryPolicy::default()))
    }

    /// Adds advice to an error if the solution is known.
    pub(crate) fn failed(&self, error: ClientError) -> anyhow::Error {
        let url = &self.url;
        match error {
            ClientError::Transport(error) if error.is_connection_refused() => {
                anyhow!("nothing listens at {url}: start it with `forebay serve`, or name another service with --url")
            }
            ClientError::Certificate(why) => anyhow!("{url}: {why} (--ca FILE, or FOREBAY_CA)"),
            error => error.into(),
        }
    }
}
