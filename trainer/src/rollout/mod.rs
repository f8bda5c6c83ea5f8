//! `rollout`: a small agent that generates trajectories for a policy, and `init`, which makes a model for it.
//!
//! Read it in this order: a [`task`] poses problems and judges what the model says, a [`Tokenizer`] stands between
//! its text and the model's tokens, an [`Agent`] plays, and a [`Worker`] does so for ever against a Forebay service,
//! with the weights that a trainer publishes. [`init`](init()) makes the checkpoint that all of it starts from.

pub mod task;

mod tokenizer;

mod agent;

mod follow;
mod post;
mod weights;
mod worker;

mod args;
mod init;

pub use agent::{Agent, Played};
pub use args::{Family, InitArgs, RolloutArgs};
pub use init::{InitError, init};
pub use post::Posted;
pub use tokenizer::{Tokenizer, TokenizerError};
pub use weights::WeightsError;
pub use worker::{Tally, Worker, WorkerConfig};

use tch::Device;

use crate::{
    config::DeviceConfig,
    generate::GenerateError,
    model::ComputeKind,
    service::{Patience, Service, ServiceError},
};

/// Threads for calls to the service: they wait, and the model needs the cores.
const RUNTIME_THREADS: usize = 1;

/// Why a worker came to an end before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// The service refuses what the worker asks.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The published weights are there and cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model's tokenizer lacks what the task says.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model refuses a prompt or a setting.
    #[error("the model cannot play")]
    Generate(#[from] GenerateError),
    /// A GPU was asked for.
    #[error("libtorch finds no GPU here")]
    NoGpu,
    /// The system has no resources for the worker's threads.
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
}

/// Plays until `stop` says so, or for as many rollouts as `args` say.
pub fn rollout(args: &RolloutArgs, stop: &dyn Fn() -> bool) -> Result<Tally, RolloutError> {
    let (device, compute) = match args.device {
        DeviceConfig::Cuda if !tch::Cuda::is_available() => return Err(RolloutError::NoGpu),
        DeviceConfig::Cpu => (Device::Cpu, ComputeKind::Float32),
        DeviceConfig::Auto | DeviceConfig::Cuda => match Device::cuda_if_available() {
            Device::Cpu => (Device::Cpu, ComputeKind::Float32),
            gpu => (gpu, ComputeKind::Bfloat16),
        },
    };
    if let Some(threads) = args.threads {
        tch::set_num_threads(threads);
    }
    let config = WorkerConfig {
        task: args.task.task(),
        worker: args.worker_id.clone(),
        // A worker that is started again must not give its ids again: what it plays now may be something else.
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
