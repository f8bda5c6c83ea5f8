//! What `forebay serve` tells and hears around the service itself: the file with its address, and SIGHUP.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use forebay::{buffer::Buffer, store::StoreError, tls::Tls};
use tokio::signal::unix::Signal;

/// Policies that are counted: the start does not depend on how many there are.
const POLICIES_MAX: u32 = 1_000;

/// A file that holds the bound address for as long as the service runs.
pub(crate) struct PortFile(PathBuf);

impl PortFile {
    /// Writes the address whole or not at all: whoever sees the file can read it.
    pub(crate) fn write(path: PathBuf, address: SocketAddr) -> anyhow::Result<Self> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = Path::new(&partial);
        std::fs::write(partial, format!("{address}\n"))
            .and_then(|()| std::fs::rename(partial, &path))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for PortFile {
    fn drop(&mut self) {
        // Without a service at the address, the file would mislead. Gone already is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Reads certificates again whenever somebody hangs up, as `systemctl reload` and `logrotate` do.
pub(crate) async fn reload_at(mut hangups: Signal, tls: Option<Arc<Tls>>) {
    while hangups.recv().await.is_some() {
        let Some(tls) = tls.clone() else {
            tracing::info!("SIGHUP is ignored: there are no certificates to read again, and the log is no file");
            continue;
        };
        match tokio::task::spawn_blocking(move || tls.renew()).await {
            Ok(Ok(renewed)) => tracing::info!(renewed, "SIGHUP: the certificates were read again"),
            Ok(Err(error)) => {
                tracing::warn!(error = %error, "SIGHUP: the certificates are still those read before");
            }
            Err(error) => tracing::error!(error = %error, "SIGHUP: the certificates were not read"),
        }
    }
}

/// Policies of the database, up to a page of them.
pub(crate) async fn count_policies(buffer: &Buffer) -> Result<usize, StoreError> {
    Ok(buffer.store().policies(String::new(), POLICIES_MAX).await?.len())
}
