//! The trainer's configuration: one TOML file; the most common keys are also flags.
//!
//! Every key is shown and explained in `configs/trainer.toml`, which a test parses.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use tch::Device;

use crate::{
    engine::EngineConfig,
    loss::{Objective, ObjectiveConfig},
    model::ComputeKind,
    optimizer::{OptimizerConfig, Schedule},
    service::{Credentials, Patience},
};

/// Everything that can be configured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The service.
    #[serde(default = "default_server")]
    pub server: String,
    /// How the trainer authenticates itself.
    #[serde(default)]
    pub credentials: Credentials,
    /// Policy to train.
    #[serde(default = "default_policy")]
    pub policy: String,
    /// Name of this trainer in leases.
    #[serde(default = "default_consumer")]
    pub consumer: String,
    /// Seconds for which a call is repeated while the service does not answer it.
    #[serde(default = "default_patience_s")]
    pub patience_s: u64,
    /// Seconds without a byte after which a call to the service counts as not answered.
    #[serde(default = "default_silence_s")]
    pub silence_s: u64,
    /// Hugging Face checkpoint to start from.
    pub model: PathBuf,
    /// Folder of checkpoints, published versions and metrics.
    pub output: PathBuf,
    /// Total number of optimizer steps.
    #[serde(default = "default_steps")]
    pub steps: i64,
    /// Device of the tensors.
    #[serde(default)]
    pub device: DeviceConfig,
    /// Type in which layers compute; weights and optimizer are always float32.
    #[serde(default)]
    pub compute: ComputeConfig,
    /// Batches.
    #[serde(default)]
    pub data: DataConfig,
    /// Memory limits of a step.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// The objective.
    #[serde(default)]
    pub objective: ObjectiveConfig,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// The learning rate schedule.
    #[serde(default)]
    pub schedule: Schedule,
    /// The critic, for the objective `ppo` with values.
    #[serde(default)]
    pub critic: Option<CriticConfig>,
    /// Frozen model that the policy is kept close to.
    #[serde(default)]
    pub reference: Option<PathBuf>,
    /// Frozen model whose log-probabilities replace a teacher's where rows have none.
    #[serde(default)]
    pub teacher: Option<PathBuf>,
    /// Saving.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Publishing.
    #[serde(default)]
    pub publish: PublishConfig,
    /// Address of `/metrics`; none when absent.
    #[serde(default)]
    pub metrics_listen: Option<SocketAddr>,
    /// Further outputs of the steps' metrics.
    #[serde(default)]
    pub report: ReportConfig,
}

/// Outputs of the steps' metrics besides `metrics.jsonl` and `/metrics`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReportConfig {
    /// Write event files for `TensorBoard` to `tensorboard/` in the output folder.
    pub tensorboard: bool,
    /// Write a run of this project in the offline format of Weights & Biases to `wandb/` in the output folder.
    pub wandb_project: Option<String>,
}

/// Device of the tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceConfig {
    /// The first GPU, or the CPU if there is no GPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first GPU.
    Cuda,
}

/// Type in which layers compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ComputeConfig {
    /// bfloat16 on a GPU, float32 on a CPU.
    #[default]
    Auto,
    /// float32.
    Float32,
    /// bfloat16.
    Bfloat16,
}

/// Batches.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Number of batches of one optimizer step.
    pub batches_per_step: usize,
    /// Number of batches that are leased in addition to those in training.
    pub ahead: usize,
    /// Seconds of a lease; it is extended three times within this time.
    pub lease_ttl_s: u64,
    /// Longest trained sequence in tokens; the `max_position_embeddings` of the models limit it too.
    pub tokens_max: Option<usize>,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { batches_per_step: 1, ahead: 1, lease_ttl_s: 120, tokens_max: None }
    }
}

/// Memory limits of a step.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// Tokens of one microbatch, including padding; a longer sequence is a microbatch of its own.
    pub microbatch_tokens: usize,
    /// Maximum number of logits that exist at once; the head works in chunks of this many.
    pub logits: i64,
    /// Keep only the inputs of layers and recompute the activations for the gradients.
    pub recompute_layers: bool,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { microbatch_tokens: 16_384, logits: 1 << 27, recompute_layers: false }
    }
}

/// A model of the same shape with a scalar head.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CriticConfig {
    /// Checkpoint to start from; the policy's if absent.
    #[serde(default)]
    pub model: Option<PathBuf>,
    /// Its optimizer.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Its schedule.
    #[serde(default)]
    pub schedule: Schedule,
}

/// Saving.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; the last step is always saved.
    pub every: i64,
    /// Number of the newest checkpoints that are kept.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 10, keep: 2 }
    }
}

/// Publishing.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PublishConfig {
    /// Steps between versions.
    pub every: i64,
    /// Number of the newest versions that are kept on disk.
    pub keep: usize,
    /// Seconds that a version waits for engines before the service is informed.
    pub engine_wait_s: u64,
    /// Inference engines that load each version.
    pub engine: Vec<EngineConfig>,
}

impl Default for PublishConfig {
    fn default() -> Self {
        Self { every: 1, keep: 4, engine_wait_s: 60, engine: Vec::new() }
    }
}

fn default_server() -> String {
    "http://127.0.0.1:8080".to_owned()
}

fn default_policy() -> String {
    "default".to_owned()
}

fn default_consumer() -> String {
    "trainer-0".to_owned()
}

fn default_patience_s() -> u64 {
    3_600
}

fn default_silence_s() -> u64 {
    120
}

fn default_steps() -> i64 {
    1_000
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The text is not a configuration.
    #[error("{} is not a trainer's configuration", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The position and the cause.
        source: toml::de::Error,
    },
    /// A value is outside its range, or two values contradict each other.
    #[error("`{field}` {problem}")]
    Invalid {
        /// The key.
        field: String,
        /// The error.
        problem: String,
    },
}

impl ConfigError {
    /// A key is missing that another key needs.
    #[must_use]
    pub fn missing(field: &str, why: &str) -> Self {
        invalid(field, format!("is missing: {why}"))
    }
}

impl TrainConfig {
    /// All defaults; only the starting checkpoint and the output folder have none.
    #[must_use]
    pub fn new(model: PathBuf, output: PathBuf) -> Self {
        Self {
            server: default_server(),
            credentials: Credentials::default(),
            policy: default_policy(),
            consumer: default_consumer(),
            patience_s: default_patience_s(),
            silence_s: default_silence_s(),
            model,
            output,
            steps: default_steps(),
            device: DeviceConfig::default(),
            compute: ComputeConfig::default(),
            data: DataConfig::default(),
            memory: MemoryConfig::default(),
            objective: ObjectiveConfig::default(),
            optimizer: OptimizerConfig::default(),
            schedule: Schedule::default(),
            critic: None,
            reference: None,
            teacher: None,
            checkpoint: CheckpointConfig::default(),
            publish: PublishConfig::default(),
            metrics_listen: None,
            report: ReportConfig::default(),
        }
    }

    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let config: Self =
            toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what the types do not express.
    pub fn check(&self) -> Result<(), ConfigError> {
        let positive = [
            ("steps", self.steps),
            ("patience_s", self.patience_s as i64),
            ("silence_s", self.silence_s as i64),
            ("data.batches_per_step", self.data.batches_per_step as i64),
            ("data.lease_ttl_s", self.data.lease_ttl_s as i64),
            ("data.tokens_max", self.data.tokens_max.map_or(i64::MAX, |tokens| tokens as i64)),
            ("memory.microbatch_tokens", self.memory.microbatch_tokens as i64),
            ("memory.logits", self.memory.logits),
            ("checkpoint.every", self.checkpoint.every),
            ("checkpoint.keep", self.checkpoint.keep as i64),
            ("publish.every", self.publish.every),
            ("publish.keep", self.publish.keep as i64),
        ];
        for (field, value) in positive {
            if value < 1 {
                return Err(invalid(field, "must be 1 or more"));
            }
        }
        self.objective.validate().map_err(|error| in_table("objective", &error))?;
        self.optimizer.validate().map_err(|error| in_table("optimizer", &error))?;
        self.schedule.validate().map_err(|error| in_table("schedule", &error))?;
        if let Some(critic) = &self.critic {
            critic.optimizer.validate().map_err(|error| in_table("critic.optimizer", &error))?;
            critic.schedule.validate().map_err(|error| in_table("critic.schedule", &error))?;
        }
        if self.publish.engine.iter().any(|engine| engine.key_file.is_some() && engine.key_env.is_some()) {
            return Err(invalid("publish.engine", "has both `key_file` and `key_env`: leave one of them out"));
        }
        if self.objective.objective == Objective::Ppo && self.critic.is_none() {
            return Err(ConfigError::missing("critic", "the objective `ppo` reads its values"));
        }
        if self.objective.objective != Objective::Ppo && self.critic.is_some() {
            return Err(invalid("critic", "is given, but only the objective `ppo` trains one: leave the table out"));
        }
        if self.reference.is_none() && (self.objective.kl_loss_coef != 0.0 || self.objective.kl_coef != 0.0) {
            return Err(ConfigError::missing("reference", "the objective has a penalty on the divergence from it"));
        }
        Ok(())
    }

    /// How long calls to the service are repeated.
    #[must_use]
    pub fn patience(&self) -> Patience {
        Patience { call: Duration::from_secs(self.patience_s), silence: Duration::from_secs(self.silence_s) }
    }

    /// Device of the tensors on this machine.
    pub fn device(&self) -> Result<Device, ConfigError> {
        let gone = || invalid("device", "is `cuda`, but libtorch finds no GPU on this machine");
        self.device.find().ok_or_else(gone)
    }

    /// Type in which layers compute on `device`.
    #[must_use]
    pub fn compute(&self, device: Device) -> ComputeKind {
        self.compute.kind(device)
    }
}

impl DeviceConfig {
    /// The device on this machine; `None` if it has no GPU, and a GPU was asked for.
    #[must_use]
    pub fn find(self) -> Option<Device> {
        match self {
            Self::Cpu => Some(Device::Cpu),
            Self::Auto => Some(Device::cuda_if_available()),
            Self::Cuda => tch::Cuda::is_available().then_some(Device::Cuda(0)),
        }
    }
}

impl ComputeConfig {
    /// Type in which layers compute on `device`.
    #[must_use]
    pub fn kind(self, device: Device) -> ComputeKind {
        match self {
            Self::Auto if device.is_cuda() => ComputeKind::Bfloat16,
            Self::Bfloat16 => ComputeKind::Bfloat16,
            Self::Auto | Self::Float32 => ComputeKind::Float32,
        }
    }
}

fn in_table(table: &str, error: &dyn std::error::Error) -> ConfigError {
    invalid(table, format!("is not usable: {error}"))
}

fn invalid(field: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { field: field.to_owned(), problem: problem.into() }
}
