//! The trainer's configuration: one TOML file, the most used keys also as flags.
//!
//! Every key is shown and explained in `configs/trainer.toml`, which a test parses.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tch::Device;

use crate::{
    engine::EngineConfig,
    loss::{Objective, ObjectiveConfig},
    model::ComputeKind,
    optimizer::{OptimizerConfig, Schedule},
    service::Credentials,
};

/// Everything that can be configured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The service.
    #[serde(default = "default_server")]
    pub server: String,
    /// How the trainer proves who it is.
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
    /// Hugging Face checkpoint to start from.
    pub model: PathBuf,
    /// Folder of checkpoints, published versions and metrics.
    pub output: PathBuf,
    /// Optimizer steps in all.
    #[serde(default = "default_steps")]
    pub steps: i64,
    /// Where tensors live.
    #[serde(default)]
    pub device: DeviceConfig,
    /// Type that layers compute in; weights and optimizer are float32 always.
    #[serde(default)]
    pub compute: ComputeConfig,
    /// Batches.
    #[serde(default)]
    pub data: DataConfig,
    /// Memory of a step.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// What is learned.
    #[serde(default)]
    pub objective: ObjectiveConfig,
    /// How it is learned.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Learning rate over the steps.
    #[serde(default)]
    pub schedule: Schedule,
    /// The critic, for the objective `ppo` with values.
    #[serde(default)]
    pub critic: Option<CriticConfig>,
    /// Frozen model that the policy is kept close to.
    #[serde(default)]
    pub reference: Option<PathBuf>,
    /// Frozen model that is imitated where rows have no teacher's log-probabilities.
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
    /// Where else steps are told.
    #[serde(default)]
    pub report: ReportConfig,
}

/// Where steps are told beside `metrics.jsonl` and `/metrics`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReportConfig {
    /// Write event files for `TensorBoard` to `tensorboard/` in the output folder.
    pub tensorboard: bool,
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceConfig {
    /// The first GPU, or the CPU without one.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The first GPU.
    Cuda,
}

/// Type that layers compute in.
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
    /// Batches of one optimizer step.
    pub batches_per_step: usize,
    /// Batches leased ahead of those in training.
    pub ahead: usize,
    /// Seconds of a lease; it is extended three times in each.
    pub lease_ttl_s: u64,
    /// Longest trained sequence in tokens; the models' `max_position_embeddings` bounds it as well.
    pub tokens_max: Option<usize>,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { batches_per_step: 1, ahead: 1, lease_ttl_s: 120, tokens_max: None }
    }
}

/// Memory of a step.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// Tokens of one microbatch, padding included; a longer sequence goes alone.
    pub microbatch_tokens: usize,
    /// Logits that exist at once; the head works in chunks of this many.
    pub logits: i64,
    /// Keep only the inputs of layers and compute the rest again for the gradients.
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
    /// Checkpoint to start from; the policy's when absent.
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
    /// Newest checkpoints that are kept.
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
    /// Newest versions that are kept on disk.
    pub keep: usize,
    /// Seconds that a version waits for engines before agents hear of it.
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
        /// Why.
        source: std::io::Error,
    },
    /// It is not a configuration.
    #[error("{} is not a trainer's configuration", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: toml::de::Error,
    },
    /// A value is out of its range, or two contradict each other.
    #[error("`{field}` {problem}")]
    Invalid {
        /// The key.
        field: String,
        /// What is wrong.
        problem: String,
    },
}

impl ConfigError {
    /// A key that another one needs.
    #[must_use]
    pub fn missing(field: &str, why: &str) -> Self {
        invalid(field, format!("is missing: {why}"))
    }
}

impl TrainConfig {
    /// The defaults around what has none: the checkpoint to start from and the folder of results.
    #[must_use]
    pub fn new(model: PathBuf, output: PathBuf) -> Self {
        Self {
            server: default_server(),
            credentials: Credentials::default(),
            policy: default_policy(),
            consumer: default_consumer(),
            patience_s: default_patience_s(),
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

    /// Checks what the types do not say.
    pub fn check(&self) -> Result<(), ConfigError> {
        let positive = [
            ("steps", self.steps),
            ("patience_s", self.patience_s as i64),
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

    /// Where tensors live on this machine.
    pub fn device(&self) -> Result<Device, ConfigError> {
        match self.device {
            DeviceConfig::Cpu => Ok(Device::Cpu),
            DeviceConfig::Auto => Ok(Device::cuda_if_available()),
            DeviceConfig::Cuda if tch::Cuda::is_available() => Ok(Device::Cuda(0)),
            DeviceConfig::Cuda => Err(invalid("device", "is `cuda`, but libtorch finds no GPU here")),
        }
    }

    /// Type that layers compute in on `device`.
    #[must_use]
    pub fn compute(&self, device: Device) -> ComputeKind {
        match self.compute {
            ComputeConfig::Auto if device.is_cuda() => ComputeKind::Bfloat16,
            ComputeConfig::Bfloat16 => ComputeKind::Bfloat16,
            ComputeConfig::Auto | ComputeConfig::Float32 => ComputeKind::Float32,
        }
    }
}

fn in_table(table: &str, error: &dyn std::error::Error) -> ConfigError {
    invalid(table, format!("is not usable: {error}"))
}

fn invalid(field: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { field: field.to_owned(), problem: problem.into() }
}
