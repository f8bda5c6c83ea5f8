//! The accept loop, the background tasks, and the graceful shutdown.
//!
//! It runs its own accept loop over hyper, because the one of axum sets no timer, and without a timer a connection that
//! never finishes its headers is never closed.

mod smuggling;

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use forebay_agents::{Agents, upstreams::Upstreams};
use forebay_api::{
    Api,
    agent_urls::AgentUrls,
    http::{body::BodyLimits, guard::Access},
    routes::tokenizers::Tokenizers,
};
use forebay_facades::FacadeConfig;
use forebay_service::{Buffer, engines::Engines, keyring::Keyring};
use forebay_telemetry::metrics::Metrics;
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

use crate::tls::Tls;

/// The most bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// The most headers of a request.
const HEADERS_MAX: usize = 64;

/// Pause after a failed accept. Without it, a process that is out of file descriptors would retry in a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Timeout of a TLS handshake: enough for a few round trips on a slow network.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits of connections and of the shutdown.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// The most connections at the same time. Further ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// Timeout for receiving a request's head.
    pub header_timeout: Duration,
    /// Timeout for a client that reads nothing of its response.
    pub stall_timeout: Duration,
    /// Time from the signal to stop to the begin of the shutdown. `/readyz` fails and everything else goes on.
    pub drain: Duration,
    /// Time that requests have to finish after the shutdown has begun.
    pub shutdown_timeout: Duration,
}

/// The store failed in a way that only a restart can recover from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the database failed, the log says why; restart the service to read the state on disk")]
pub struct Broken;

/// The listener of agents, which is ready to run.
pub struct AgentServer {
    /// Where agents connect.
    pub listener: TcpListener,
    /// What answers their calls.
    pub agents: Agents,
    /// The engines, which are probed while the service runs.
    pub upstreams: Upstreams,
    /// The addresses that producers are told.
    pub urls: AgentUrls,
}

/// The listener of a facade, which is ready to run.
pub struct FacadeServer {
    /// Where its clients connect.
    pub listener: TcpListener,
    /// The bound address.
    pub address: SocketAddr,
    /// What it speaks.
    pub config: FacadeConfig,
}

/// A service that is ready to run.
pub struct Server {
    listener: TcpListener,
    api: Api,
    buffer: Buffer,
    keyring: Arc<Keyring>,
    tls: Option<Arc<Tls>>,
    agents: Option<AgentServer>,
    facades: Vec<FacadeServer>,
    metrics: Arc<Metrics>,
    limits: ServerLimits,
}

impl Server {
    /// Creates a service on a bound listener. It fails if the listener has no local address.
    pub fn new(
        listener: TcpListener,
        buffer: Buffer,
        metrics: Arc<Metrics>,
        bodies: BodyLimits,
        limits: ServerLimits,
        access: Access,
    ) -> io::Result<Self> {
        let keyring = Arc::clone(&access.keyring);
        let api = Api::new(buffer.clone(), Arc::clone(&metrics), bodies, access, listener.local_addr()?);
        Ok(Self { listener, api, buffer, keyring, tls: None, agents: None, facades: Vec::new(), metrics, limits })
    }

    /// The same service, with TLS if given.
    #[must_use]
    pub fn with_tls(self, tls: Option<Arc<Tls>>) -> Self {
        Self { tls, ..self }
    }

    /// The same service, with a listener for agents if given. Without it, no session can be opened.
    #[must_use]
    pub fn with_agents(self, agents: Option<AgentServer>) -> Self {
        let sessions = agents.as_ref().map(|agents| {
            let engines: Arc<dyn Engines> = Arc::new(agents.upstreams.clone());
            (engines, agents.urls.clone())
        });
        Self { api: self.api.with_sessions(sessions), agents, ..self }
    }

    /// The same service, with the tokenizers of policies.
    #[must_use]
    pub fn with_tokenizers(self, tokenizers: Tokenizers) -> Self {
        Self { api: self.api.with_tokenizers(tokenizers), ..self }
    }

    /// The same service, with listeners for the clients of other rollout buffers.
    #[must_use]
    pub fn with_facades(self, facades: Vec<FacadeServer>) -> Self {
        Self { facades, ..self }
    }

    /// Serves until `shutdown` completes, then stops gracefully: `/readyz` fails, so that balancers send no more requests;
    /// after the time to drain waiting requests are answered, running requests finish, and the store is closed.
    ///
    /// If the store is broken, it stops the same way and returns an error, because only a restart can find out what is
    /// on disk.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Broken> {
        let background = self.start_background();
        let router = forebay_api::router(self.api.clone());
        let connections = GracefulShutdown::new();
        let calls = async {
            match &self.agents {
                Some(agents) => {
                    let router = forebay_agents::listener::router(agents.agents.clone());
                    self.accept(&agents.listener, router, &connections, Tls::acceptor_of_agents).await
                }
                None => std::future::pending().await,
            }
        };
        let facades = async {
            futures::future::join_all(self.facades.iter().map(|facade| {
                let router = forebay_facades::router(&self.api, &facade.config, facade.address);
                self.accept(&facade.listener, router, &connections, Tls::acceptor)
            }))
            .await;
            // There are no facades.
            std::future::pending().await
        };
        let stop = async {
            shutdown.await;
            self.api.fail_readiness();
            if !self.limits.drain.is_zero() {
                tracing::info!(seconds = self.limits.drain.as_secs(), "draining: only /readyz fails");
                tokio::time::sleep(self.limits.drain).await;
            }
        };
        let outcome = tokio::select! {
            biased;
            () = stop => Ok(()),
            () = self.buffer.broken() => Err(Broken),
            never = self.accept(&self.listener, router, &connections, Tls::acceptor) => match never {},
            never = calls => match never {},
            never = facades => never,
        };
        drop((self.listener, self.facades));
        let agents = self.agents.map(|agents| agents.agents);

        tracing::info!("stopping: accepting no new connections, finishing running requests");
        let started = Instant::now();
        self.api.drain();
        agents.iter().for_each(Agents::drain);
        if tokio::time::timeout(self.limits.shutdown_timeout, connections.shutdown()).await.is_err() {
            tracing::warn!("some requests did not finish in time and are aborted");
        }
        background.iter().for_each(tokio::task::JoinHandle::abort);
        // A broken store is not closed, because it cannot write any more.
        if outcome.is_ok()
            && tokio::time::timeout(self.limits.shutdown_timeout, close(&self.keyring, &self.buffer)).await.is_err()
        {
            tracing::warn!("the store did not close in time; the next start recovers it from its write-ahead log");
        }
        tracing::info!(elapsed_ms = started.elapsed().as_millis() as u64, "stopped");
        outcome
    }

    /// Starts the periodic tasks that run beside the requests.
    fn start_background(&self) -> Vec<tokio::task::JoinHandle<()>> {
        let (buffer, rules_cleanup, replica) = (self.buffer.clone(), self.buffer.clone(), self.buffer.clone());
        let (clock, payloads, keyring) = (self.buffer.clone(), self.buffer.clone(), Arc::clone(&self.keyring));
        let mut tasks = vec![
            tokio::spawn(async move { buffer.run_sweeper().await }),
            tokio::spawn(async move { rules_cleanup.run_rules_cleanup().await }),
            tokio::spawn(async move { replica.run_replicas().await }),
            tokio::spawn(async move { clock.run_clock().await }),
            tokio::spawn(async move { payloads.run_payload_care().await }),
            tokio::spawn(async move { keyring.run().await }),
        ];
        tasks.extend(self.tls.clone().map(|tls| tokio::spawn(tls.run())));
        let upstreams = self.agents.as_ref().map(|agents| agents.upstreams.clone());
        tasks.extend(upstreams.map(|upstreams| tokio::spawn(upstreams.run(Arc::clone(&self.metrics)))));
        tasks
    }

    /// Accepts connections of a listener until the future is dropped.
    async fn accept(
        &self,
        listener: &TcpListener,
        router: Router,
        connections: &GracefulShutdown,
        acceptor: fn(&Tls) -> TlsAcceptor,
    ) -> Infallible {
        let slots = Arc::new(Semaphore::new(self.limits.connections_max));
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_headers(HEADERS_MAX)
            .max_buf_size(HEAD_BYTES_MAX)
            .half_close(false);
        loop {
            // A slot is taken before a connection is accepted, so that further connections wait in the kernel's backlog
            // and use no memory here.
            let slot = Arc::clone(&slots).acquire_owned().await.expect("the semaphore is never closed");
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    pause_after(&error).await;
                    continue;
                }
            };
            // Responses are written in large pieces. Nagle's algorithm would only delay the last one.
            let _ = stream.set_nodelay(true);
            let mut stream = TimeoutStream::new(stream);
            // The timeout applies only to clients that do not read. A long poll writes nothing while it waits, so it is
            // not affected.
            stream.set_write_timeout(Some(self.limits.stall_timeout));
            let stream = Box::pin(stream);
            let connection =
                Connection { http: http.clone(), router: router.clone(), watcher: connections.watcher(), slot };
            match &self.tls {
                None => tokio::spawn(connection.serve(stream)),
                // The handshake runs in the connection's own task, so that a slow one does not delay other connections.
                Some(tls) => tokio::spawn(connection.serve_encrypted(acceptor(tls), stream)),
            };
        }
    }
}

/// Writes data that is only in memory, and closes the store.
async fn close(keyring: &Keyring, buffer: &Buffer) {
    if let Err(error) = keyring.write_uses().await {
        tracing::warn!(error = %error, "writing the times when keys were last used failed");
    }
    if let Err(error) = buffer.flush_delivered().await {
        tracing::warn!(error = %error, "marking calls as delivered failed");
    }
    if let Err(error) = buffer.stop_clock().await {
        tracing::warn!(error = %error, "writing the current service time failed");
    }
    buffer.store().close().await;
}

/// An accepted connection.
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
        let (stream, service) = smuggling::watch(stream, TowerToHyperService::new(router));
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
