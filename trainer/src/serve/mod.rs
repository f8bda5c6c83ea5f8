//! `serve`: a small inference server for one CPU or GPU, with the interface of `SGLang`.
//!
//! The server is for tests, examples and single machines. Its model code is the trainer's, so the log-probabilities that
//! it reports are those that the trainer computes with the same weights. Read it in this order: [`routes`] parse requests
//! and write answers, a [`model`] checks a request and accepts it within its [`admission`], the [`runner`] is the thread
//! that lets its [`sequence`]s draw, and a [`pass`] is one run through the model. [`request`] has the messages between
//! the two sides, and [`output`] what is collected from them.

mod args;

mod routes;

mod model;

mod admission;
mod output;
mod request;

mod runner;
mod sequence;

mod pass;

pub use args::{ModelArgument, ServeArgs};
pub use model::OpenError;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;

use self::routes::App;
use crate::{
    config::{ComputeConfig, DeviceConfig},
    model::InferenceModel,
};

/// Number of threads for HTTP. Models have threads of their own, and need the cores.
const RUNTIME_THREADS: usize = 2;

/// How often the stop flag is checked.
const LOOK: Duration = Duration::from_millis(200);

/// What is served, and how.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The models; the first one answers requests that name none.
    pub models: Vec<ModelSource>,
    /// Bounds of each model.
    pub limits: Limits,
    /// Device of the models.
    pub device: DeviceConfig,
    /// What they compute in.
    pub compute: ComputeConfig,
    /// Key that clients must send; none if absent.
    pub api_key: Option<String>,
    /// Whether other machines may use the server without a key.
    pub insecure: bool,
}

/// A model and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// Name in requests.
    pub name: String,
    /// Its checkpoint.
    pub folder: PathBuf,
    /// Label of its weights.
    pub version: String,
}

/// Bounds of a model.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Number of sequences that run at once.
    pub running: usize,
    /// Number of requests that wait for a place.
    pub queue: usize,
    /// Number of tokens, of prompts and of answers, that all accepted requests may reach together.
    pub tokens: usize,
    /// Bytes of the keys and values of running sequences.
    pub cache_bytes: usize,
    /// Longest sequence in tokens; the model's `max_position_embeddings` limits it too.
    pub context: Option<usize>,
    /// Number of prompt tokens that go through the model in one pass, beside the sequences that draw. More tokens read
    /// prompts faster, and let running sequences wait longer for their next token.
    pub piece_tokens: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { running: 64, queue: 256, tokens: 4 << 20, cache_bytes: 4 << 30, context: None, piece_tokens: 512 }
    }
}

impl Limits {
    /// Number of tokens that the caches of a model may hold.
    fn cache_tokens(&self, model: &InferenceModel) -> usize {
        self.cache_bytes / model.cache_bytes_per_token()
    }
}

/// Why the server could not start, or ended before it was told to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A model cannot be served.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Two models have one name.
    #[error("two models have the name `{0}`: give them as NAME=FOLDER")]
    SameName(String),
    /// The option `--device cuda` was given, but libtorch finds no GPU.
    #[error("libtorch finds no GPU on this machine")]
    NoGpu,
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// Anyone could use the models and change their weights.
    #[error("other machines can reach {0}: give --api-key, or --insecure if all of them may use the server")]
    Reachable(SocketAddr),
    /// The thread of a model ended, which is a bug or a lack of memory. Its message was printed.
    #[error("the thread of the model `{0}` ended")]
    Ended(String),
    /// The operating system refused to start threads, or HTTP failed.
    #[error("the server failed")]
    Io(#[from] std::io::Error),
}

/// A server whose models are loaded.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    app: App,
}

impl Server {
    /// Loads the models. Returns when all of them can be used.
    pub async fn open(config: ServeConfig, listener: TcpListener) -> Result<Self, ServeError> {
        let address = listener.local_addr()?;
        if config.api_key.is_none() && !config.insecure && !address.ip().to_canonical().is_loopback() {
            return Err(ServeError::Reachable(address));
        }
        let app = App::open(config).await?;
        Ok(Self { listener, app })
    }

    /// Answers requests until `stop` is ready. Requests in work are then ended as aborted.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), ServeError> {
        // A token must not wait for the next one to fill a packet.
        let listener = self.listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true);
        });
        let (app, stopping) = (self.app.clone(), self.app.clone());
        let serving = axum::serve(listener, self.app.router()).with_graceful_shutdown(async move {
            stop.await;
            stopping.stop();
        });
        tokio::select! {
            outcome = serving => Ok(outcome?),
            name = app.ended() => Err(ServeError::Ended(name)),
        }
    }
}

/// Serves until `stop` returns true.
pub fn serve(args: &ServeArgs, stop: &(dyn Fn() -> bool + Sync)) -> Result<(), ServeError> {
    if let Some(threads) = args.threads {
        tch::set_num_threads(threads);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(RUNTIME_THREADS).enable_all().build()?;
    runtime.block_on(async {
        let address = args.listen;
        let listener = TcpListener::bind(address).await.map_err(|source| ServeError::Listen { address, source })?;
        let server = Server::open(args.config(), listener).await?;
        let (stopped, is_stopped) = tokio::sync::oneshot::channel::<()>();
        let watching = async {
            while !stop() {
                tokio::time::sleep(LOOK).await;
            }
            drop(stopped);
            std::future::pending::<()>().await;
        };
        tracing::info!(address = %server.listener.local_addr()?, "serving");
        tokio::select! {
            outcome = server.run(async { drop(is_stopped.await) }) => outcome,
            () = watching => unreachable!("watching never ends"),
        }
    })
}
