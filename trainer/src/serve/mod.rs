//! `serve`: a small inference server for one CPU or GPU, with the interface of `SGLang`.
//!
//! The server is for tests, examples and single machines. Its model code is the trainer's, so the log-probabilities that
//! it reports are those that the trainer computes with the same weights. Read it in this order:
//!
//! - `routes` parses requests and writes answers, and `request` has the messages to the other modules.
//! - A `model` checks a request and accepts it within its `admission`. Some models `follow` a policy.
//! - The `runner` is the thread that lets each `sequence` draw. A `pass` is one run through the model, and `output` is
//!   what is collected.
//! - `text` is for checkpoints with a tokenizer.

mod args;
mod routes;

mod request;

mod admission;
mod follow;
mod model;

mod output;
mod pass;
mod runner;
mod sequence;

mod text;

pub use args::{FollowArgument, ModelArgument, ServeArgs};
pub use model::OpenError;
pub use text::TextError;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use axum::serve::ListenerExt as _;
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};

use self::{
    model::{Hosting, ServedModel, Slot},
    routes::App,
};
use crate::{
    config::{ComputeConfig, DeviceConfig},
    model::InferenceModel,
    service::{Credentials, Patience, Service, ServiceError},
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
    /// How the server authenticates itself to the services whose policies it follows.
    pub credentials: Credentials,
    /// Bounds of each model.
    pub limits: Limits,
    /// Device of the models.
    pub device: DeviceConfig,
    /// What they compute in.
    pub compute: ComputeConfig,
    /// Which engine's fields the answers of the chat endpoint have.
    pub dialect: Dialect,
    /// Key that clients must send; none if absent.
    pub api_key: Option<String>,
    /// Whether other machines may use the server without a key.
    pub insecure: bool,
}

/// Engines whose fields an answer of the chat endpoint can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// `SGLang`: ids in `prompt_token_ids` and `token_ids` of the choice, versions in `metadata`
    #[default]
    Sglang,
    /// `vLLM`: ids of the prompt at the top level, also in streams; reasoning in `reasoning`
    Vllm,
}

/// A model and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// Name in requests.
    pub name: String,
    /// Where its weights come from.
    pub weights: WeightSource,
}

/// Where the weights of a model come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// A checkpoint, which stays until a client loads another one.
    Folder {
        /// The checkpoint.
        folder: PathBuf,
        /// Label of the weights.
        version: String,
    },
    /// The versions that a trainer publishes.
    Policy {
        /// The policy.
        policy: String,
        /// URL of its service.
        url: String,
    },
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
    #[error("two models have the name `{0}`: name them with NAME=")]
    SameName(String),
    /// There is no model.
    #[error("there is nothing to serve: give the folder of a model, or --follow")]
    NoModel,
    /// A service cannot be called.
    #[error(transparent)]
    Service(#[from] ServiceError),
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
    /// Receives the name of a model whose thread has ended.
    ended: mpsc::UnboundedReceiver<String>,
    /// The tasks that follow policies. They end with the server.
    followers: JoinSet<()>,
}

impl Server {
    /// Loads the models. Returns when all of them can be used, except those that follow a policy: they can be used when
    /// their first version is loaded.
    pub async fn open(config: ServeConfig, listener: TcpListener) -> Result<Self, ServeError> {
        let address = listener.local_addr()?;
        if config.api_key.is_none() && !config.insecure && !address.ip().to_canonical().is_loopback() {
            return Err(ServeError::Reachable(address));
        }
        let (sender, ended) = mpsc::unbounded_channel();
        let device = config.device.find().ok_or(ServeError::NoGpu)?;
        let hosting = Hosting { limits: config.limits, device, compute: config.compute.kind(device), ended: sender };
        let mut followers = JoinSet::new();
        let mut slots: Vec<Arc<Slot>> = Vec::new();
        for source in config.models {
            if slots.iter().any(|slot| slot.name() == source.name) {
                return Err(ServeError::SameName(source.name));
            }
            let slot = match source.weights {
                WeightSource::Folder { folder, version } => {
                    let slot = Slot::new(source.name, None);
                    let (name, hosting) = (slot.name().to_owned(), hosting.clone());
                    let opening = move || ServedModel::open(&name, &folder, &version, &hosting);
                    slot.fill(tokio::task::spawn_blocking(opening).await.map_err(io::Error::other)??);
                    Arc::new(slot)
                }
                WeightSource::Policy { policy, url } => {
                    let service = Service::new(&url, &policy, "engine", &config.credentials, Patience::ENDLESS)?;
                    let slot = Arc::new(Slot::new(source.name, Some(policy)));
                    followers.spawn(follow::follow(service, Arc::clone(&slot), hosting.clone()));
                    slot
                }
            };
            slots.push(slot);
        }
        if slots.is_empty() {
            return Err(ServeError::NoModel);
        }
        Ok(Self { listener, app: App::new(&slots, config.dialect, config.api_key.as_deref()), ended, followers })
    }

    /// Answers requests until `stop` is ready. Requests in work are then ended as aborted.
    pub async fn run(mut self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), ServeError> {
        // A token must not wait for the next one to fill a packet.
        let listener = self.listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true);
        });
        let stopping = self.app.clone();
        let serving = axum::serve(listener, self.app.router()).with_graceful_shutdown(async move {
            stop.await;
            stopping.stop();
        });
        let outcome = tokio::select! {
            outcome = serving => Ok(outcome?),
            name = self.ended.recv() => Err(ServeError::Ended(name.unwrap_or_default())),
        };
        self.followers.shutdown().await;
        outcome
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
