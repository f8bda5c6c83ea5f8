//! The accept loop, the background tasks, and the graceful stop.
//!
//! Its own loop over hyper: axum's installs no timer, and without one a connection that never finishes its headers is
//! never closed.

mod heads;

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use crate::{
    access::keyring::Keyring,
    api::{self, Access, Api, BodyLimits},
    buffer::Buffer,
    metrics::Metrics,
    tls::Tls,
};

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Headers of a request.
const HEADERS_MAX: usize = 64;

/// Pause after a failed accept: out of file descriptors, accepting fails at once and would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that a TLS handshake may take: a few round trips, also on a slow line.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Bounds of connections and of the stop.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Connections at once; more wait in the kernel's backlog.
    pub connections_max: usize,
    /// Time that a request's head may take to arrive.
    pub header_timeout: Duration,
    /// Time that a client may take not a byte of its answer.
    pub stall_timeout: Duration,
    /// Time that requests have to finish once the service stops.
    pub shutdown_timeout: Duration,
}

/// The store failed in a way that only a new start can find its way out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the database failed, for the reason in the log: a new start reads what is on disk")]
pub struct Broken;

/// A service that is ready to run.
pub struct Server {
    listener: TcpListener,
    api: Api,
    buffer: Buffer,
    keyring: Arc<Keyring>,
    tls: Option<Arc<Tls>>,
    limits: ServerLimits,
}

impl Server {
    /// A service on a bound listener, which fails where that has no address.
    pub fn new(
        listener: TcpListener,
        buffer: Buffer,
        metrics: Arc<Metrics>,
        bodies: BodyLimits,
        limits: ServerLimits,
        access: Access,
    ) -> io::Result<Self> {
        let keyring = Arc::clone(&access.keyring);
        let api = Api::new(buffer.clone(), metrics, bodies, access, listener.local_addr()?);
        Ok(Self { listener, api, buffer, keyring, tls: None, limits })
    }

    /// The same service, encrypted.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<Tls>>) -> Self {
        Self { tls, ..self }
    }

    /// Serves until `shutdown`, then stops gracefully: readiness off, waiters answered, requests finished, store closed.
    ///
    /// Stops the same way, with an error, when the store is broken: what is on disk is known to the next start alone.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Broken> {
        let background = self.start_background();
        let router = api::router(self.api.clone());
        let connections = GracefulShutdown::new();
        let stop = async {
            tokio::select! {
                () = shutdown => Ok(()),
                () = self.buffer.broken() => Err(Broken),
            }
        };
        let outcome = self.accept(router, &connections, stop).await;
        drop(self.listener);

        tracing::info!("stopping: no new connections, requests finish");
        let started = Instant::now();
        self.api.drain();
        if tokio::time::timeout(self.limits.shutdown_timeout, connections.shutdown()).await.is_err() {
            tracing::warn!("some requests did not finish in time and are dropped");
        }
        background.iter().for_each(tokio::task::JoinHandle::abort);
        // A broken store has nothing more to say, and is not waited for.
        if outcome.is_ok()
            && tokio::time::timeout(self.limits.shutdown_timeout, close(&self.keyring, &self.buffer)).await.is_err()
        {
            tracing::warn!("the store did not close in time; the next start reads its log");
        }
        tracing::info!(elapsed_ms = started.elapsed().as_millis() as u64, "stopped");
        outcome
    }

    /// What time and other replicas do, beside the requests.
    fn start_background(&self) -> Vec<tokio::task::JoinHandle<()>> {
        let (buffer, upkeep, replica) = (self.buffer.clone(), self.buffer.clone(), self.buffer.clone());
        let (clock, keyring) = (self.buffer.clone(), Arc::clone(&self.keyring));
        let mut tasks = vec![
            tokio::spawn(async move { buffer.run_sweeper().await }),
            tokio::spawn(async move { upkeep.run_upkeep().await }),
            tokio::spawn(async move { replica.run_replicas().await }),
            tokio::spawn(async move { clock.run_clock().await }),
            tokio::spawn(async move { keyring.run().await }),
        ];
        tasks.extend(self.tls.clone().map(|tls| tokio::spawn(tls.run())));
        tasks
    }

    /// Accepts connections until `stop`, and answers what that says.
    async fn accept<T>(&self, router: Router, connections: &GracefulShutdown, stop: impl Future<Output = T>) -> T {
        let slots = Arc::new(Semaphore::new(self.limits.connections_max));
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_headers(HEADERS_MAX)
            .max_buf_size(HEAD_BYTES_MAX)
            .half_close(false);
        tokio::pin!(stop);
        loop {
            // A slot first: whoever has none waits in the kernel's backlog, not in our memory.
            let next = async {
                let slot = Arc::clone(&slots).acquire_owned().await.expect("nobody closes the semaphore");
                (slot, self.listener.accept().await)
            };
            let (slot, accepted) = tokio::select! {
                biased;
                reason = &mut stop => return reason,
                next = next => next,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    pause_after(&error).await;
                    continue;
                }
            };
            // Answers are written whole: waiting to fill a packet only delays them.
            let _ = stream.set_nodelay(true);
            let mut stream = TimeoutStream::new(stream);
            // Nothing is written to who waits for a batch, so this only ends those who do not read.
            stream.set_write_timeout(Some(self.limits.stall_timeout));
            let stream = Box::pin(stream);
            let connection =
                Connection { http: http.clone(), router: router.clone(), watcher: connections.watcher(), slot };
            match &self.tls {
                None => tokio::spawn(connection.serve(stream)),
                // The handshake is the connection's own: one that dawdles holds up nobody else.
                Some(tls) => tokio::spawn(connection.serve_encrypted(tls.acceptor(), stream)),
            };
        }
    }
}

/// Writes what is only in memory, and closes the store.
async fn close(keyring: &Keyring, buffer: &Buffer) {
    if let Err(error) = keyring.write_uses().await {
        tracing::warn!(error = %error, "when keys were last used could not be written");
    }
    if let Err(error) = buffer.stop_clock().await {
        tracing::warn!(error = %error, "the time that was reached could not be written");
    }
    buffer.store().close().await;
}

/// A connection that was accepted.
struct Connection {
    http: hyper::server::conn::http1::Builder,
    router: Router,
    watcher: Watcher,
    slot: OwnedSemaphorePermit,
}

impl Connection {
    async fn serve_encrypted(
        self,
        acceptor: TlsAcceptor,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) {
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(error = %error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let Self { http, router, watcher, slot } = self;
        let (stream, service) = heads::watch(stream, TowerToHyperService::new(router));
        if let Err(error) = watcher.watch(http.serve_connection(TokioIo::new(stream), service)).await {
            tracing::debug!(error = %error, "a connection ended early");
        }
        drop(slot);
    }
}

async fn pause_after(error: &io::Error) {
    if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        return;
    }
    tracing::error!(error = %error, "accepting a connection failed");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}
