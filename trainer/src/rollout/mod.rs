//! `rollout`: a small agent that generates trajectories for a policy, and `init`, which makes a model for it.
//!
//! Read it in this order: a [`task`] makes problems and computes rewards, a [`Tokenizer`] converts text to tokens and
//! back, an [`Agent`] plays problems with a model, and a [`Worker`] repeats this with the weights that a trainer
//! publishes, and posts the trajectories to a Forebay service. [`init`](init()) makes the first checkpoint.

pub mod task;

mod tokenizer;

mod agent;

mod follow;
mod post;
mod weights;
mod worker;

mod args;
mod init;
mod vocabulary;

pub use agent::{Agent, Played};
pub use args::{Family, InitArgs, RolloutArgs};
pub use init::{InitError, init};
pub use post::Posted;
pub use tokenizer::{Tokenizer, TokenizerError};
pub use vocabulary::VocabularyError;
pub use weights::WeightsError;
pub use worker::{Tally, Worker, WorkerConfig};

use crate::{
    config::ComputeConfig,
    generate::GenerateError,
    service::{Patience, Service, ServiceError},
};

/// Number of threads for calls to the service. One is enough, because calls mostly wait, and the model needs the cores.
const RUNTIME_THREADS: usize = 1;

/// Why a worker ended before it was told to stop.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The service refused a call.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The published weights exist but cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model's tokenizer cannot encode the task's text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A prompt or a setting does not fit the model.
    #[error("the model cannot generate")]
    Generate(#[from] GenerateError),
    /// The option `--device cuda` was given, but libtorch finds no GPU.
    #[error("libtorch finds no GPU on this machine")]
    NoGpu,
    /// The operating system refused to start threads.
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
}

/// Plays until `stop` returns true or the number of rollouts in `args` is reached.
pub fn rollout(args: &RolloutArgs, stop: &dyn Fn() -> bool) -> Result<Tally, RolloutError> {
    let device = args.device.find().ok_or(RolloutError::NoGpu)?;
    let compute = ComputeConfig::Auto.kind(device);
    if let Some(threads) = args.threads {
        tch::set_num_threads(threads);
    }
    let config = WorkerConfig {
        task: args.task.task(),
        worker: args.worker_id.clone(),
        // Every start needs new rollout ids: it may play other rollouts than the start before, and the service would
        // refuse them under the same ids.
        session: format!("{:08x}", rand::random::<u32>()),
        seed: args.seed.unwrap_or_else(rand::random),
        group_size: args.group_size,
        groups_per_round: args.groups,
        temperature: args.temperature,
        turn_tokens_max: args.max_new_tokens,
        rollouts_max: args.rollouts,
        device,
        compute,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .enable_all()
        .build()
        .map_err(RolloutError::Runtime)?;
    let service = Service::new(&args.server, &args.policy, &args.worker_id, &args.credentials, Patience::ENDLESS)?;
    tracing::info!(
        server = args.server,
        policy = args.policy,
        task = config.task.name(),
        worker = config.worker,
        session = config.session,
        seed = config.seed,
        "rollout worker starts",
    );
    let tally = Worker::new(runtime.handle(), service, config).run(stop)?;
    tracing::info!(
        rollouts = tally.rollouts,
        reward_mean = tally.reward / tally.rollouts.max(1) as f64,
        versions = tally.versions,
        refused = tally.posted.refused,
        abandoned = tally.posted.abandoned,
        "rollout worker ends",
    );
    Ok(tally)
}
