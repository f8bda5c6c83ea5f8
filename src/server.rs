//! The accept loop, the background tasks, and the graceful stop.
//!
//! Its own loop over hyper: axum's installs no timer, and without one a connection that never finishes its headers is
//! never closed.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use crate::{
    api::{self, Api, BodyLimits},
    buffer::Buffer,
    metrics::Metrics,
};

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Headers of a request.
const HEADERS_MAX: usize = 64;

/// Pause after a failed accept: out of file descriptors, accepting fails at once and would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bounds of connections and of the stop.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Connections at once; more wait in the kernel's backlog.
    pub connections_max: usize,
    /// Time that a request's head may take to arrive.
    pub header_timeout: Duration,
    /// Time that requests have to finish once the service stops.
    pub shutdown_timeout: Duration,
}

/// The store failed in a way that only a new start can find its way out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a write to the database failed: what was acknowledged is on disk, and a new start recovers it")]
pub struct Broken;

/// A service that is ready to run.
pub struct Server {
    listener: TcpListener,
    api: Api,
    buffer: Buffer,
    limits: ServerLimits,
}

impl Server {
    /// A service on a bound listener.
    #[must_use]
    pub fn new(
        listener: TcpListener,
        buffer: Buffer,
        metrics: Arc<Metrics>,
        bodies: BodyLimits,
        limits: ServerLimits,
    ) -> Self {
        Self { listener, api: Api::new(buffer.clone(), metrics, bodies), buffer, limits }
    }

    /// Serves until `shutdown`, then stops gracefully: readiness off, waiters answered, requests finished, store closed.
    ///
    /// Stops the same way, with an error, when the store is broken: what is on disk is known to the next start alone.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Broken> {
        let sweeper = {
            let buffer = self.buffer.clone();
            tokio::spawn(async move { buffer.run_sweeper().await })
        };
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
        sweeper.abort();
        self.buffer.store().close().await;
        tracing::info!(elapsed_ms = started.elapsed().as_millis() as u64, "stopped");
        outcome
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
                let slot = Arc::clone(&slots).acquire_owned().await;
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
            let service = TowerToHyperService::new(router.clone());
            let connection: hyper::server::conn::http1::Connection<TokioIo<TcpStream>, _> =
                http.serve_connection(TokioIo::new(stream), service);
            let connection = connections.watch(connection);
            tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(error = %error, "a connection ended early");
                }
                drop(slot);
            });
        }
    }
}

async fn pause_after(error: &io::Error) {
    if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        return;
    }
    tracing::error!(error = %error, "accepting a connection failed");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}
