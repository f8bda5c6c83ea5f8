//! A whole model: loading or making one, and running whole sequences through it.

use std::fs;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::layers::{Stack, attend_causally};
use super::parameters::{Initial, VALUE_HEAD};
use super::rope::{Rope, Rotation};
use super::{ConfigError, Head, ModelConfig, ParameterSpec, Parameters, layout};
use crate::checkpoint::{CheckpointError, Reader};
use crate::random::Random;

/// The kind of number that a model computes in. Parameters, their gradients, norms and
/// logits are float32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeKind {
    /// 32 bits, for CPUs and for comparison.
    Float32,
    /// 16 bits, for GPUs; parameters are rounded on their way into each product.
    Bfloat16,
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// `config.json` could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// `config.json` is not that of a supported model.
    #[error("{path} is not supported")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: ConfigError,
    },
    /// A weight is NaN or infinite: every batch would seem to be at fault.
    #[error("tensor `{name}` in {} holds numbers that are not finite: take another checkpoint", folder.display())]
    NotFinite {
        /// The checkpoint.
        folder: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The folder is not there.
    #[error("there is no folder {}{}", folder.display(), hub_hint(folder))]
    Absent {
        /// The folder.
        folder: PathBuf,
    },
    /// The weights are damaged or are not those of the model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// A decoder-only transformer with a head: logits for a policy, one value for a critic.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    parameters: Parameters,
    head: Head,
    compute: Kind,
    device: Device,
    rope: Rope,
    pub(super) stack: Stack,
}

impl Decoder {
    /// Loads the checkpoint in `folder` as a policy.
    pub fn load(folder: &Path, device: Device, compute: ComputeKind) -> Result<Self, LoadError> {
        Self::load_with(folder, device, compute, Head::Vocabulary)
    }

    /// Loads the checkpoint in `folder` as a critic. One of a policy starts with a head
    /// of zeros in place of its own.
    pub fn load_critic(folder: &Path, device: Device, compute: ComputeKind) -> Result<Self, LoadError> {
        Self::load_with(folder, device, compute, Head::Value)
    }

    /// Makes a policy of fresh weights: normal with a standard deviation of
    /// `initializer_range`, biases 0, norms 1. Equal seeds give equal weights.
    #[must_use]
    pub fn random(config: ModelConfig, device: Device, compute: ComputeKind, seed: u64) -> Self {
        let mut random = Random::new(seed, 0);
        let mut parameters = Parameters::default();
        for spec in layout(&config, Head::Vocabulary) {
            let tensor = initial(&spec, &config, &mut random).to_device(device);
            parameters.push(spec.name, &tensor);
        }
        Self::assemble(config, parameters, Head::Vocabulary, device, compute)
    }

    /// Makes a critic that starts from copies of this model's weights, with a head of
    /// zeros if this one has another.
    #[must_use]
    pub fn critic(&self) -> Self {
        let _guard = tch::no_grad_guard();
        let mut parameters = Parameters::default();
        for spec in layout(&self.config, Head::Value) {
            let tensor = match self.parameters.get(&spec.name) {
                Some(tensor) => tensor.detach().copy(),
                None => Tensor::zeros(&spec.shape, (Kind::Float, self.device)),
            };
            parameters.push(spec.name, &tensor);
        }
        Self::assemble(self.config.clone(), parameters, Head::Value, self.device, self.compute_kind())
    }

    /// The hyperparameters.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The trainable tensors, which the layers share.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Where the parameters are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// What it computes in.
    #[must_use]
    pub fn compute_kind(&self) -> ComputeKind {
        if self.compute == Kind::BFloat16 { ComputeKind::Bfloat16 } else { ComputeKind::Float32 }
    }

    /// The state of every token after the final norm: `[B, S]` i64 on the model's device
    /// to `[B, S, H]` of the compute kind.
    ///
    /// Rows are padded on the right with any valid token: no token sees what comes after
    /// it. States of padding mean nothing and must not enter a loss.
    pub fn hidden(&self, tokens: &Tensor) -> Tensor {
        let rotation = self.rotation_from_start(tokens);
        let embedded = self.stack.embed(tokens, self.compute);
        let last =
            self.stack.layers.iter().fold(embedded, |state, layer| layer.forward(&state, &rotation, attend_causally));
        self.stack.norm.forward(&last)
    }

    /// The weight of the head, float32: `[V, H]` for a policy, the embedding if they are
    /// tied, and `[1, H]` for a critic.
    pub fn head(&self) -> &Tensor {
        &self.stack.head
    }

    /// Logits of a policy: `[.., H]` to `[.., V]` float32.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        assert_eq!(self.head, Head::Vocabulary, "a critic has no logits");
        self.stack.apply_head(hidden)
    }

    /// Values of a critic: `[.., H]` to `[..]` float32.
    pub fn values(&self, hidden: &Tensor) -> Tensor {
        assert_eq!(self.head, Head::Value, "a policy has no values");
        self.stack.apply_head(hidden).squeeze_dim(-1)
    }

    pub(super) fn compute(&self) -> Kind {
        self.compute
    }

    /// The rotation of whole sequences, all from position 0.
    pub(super) fn rotation_from_start(&self, tokens: &Tensor) -> Rotation {
        let (_, length) = tokens.size2().expect("tokens are [rows, length]");
        self.rotation(&Tensor::arange(length, (Kind::Int64, self.device)).unsqueeze(0))
    }

    pub(super) fn into_rope(self) -> Rope {
        self.rope
    }

    pub(super) fn rotation(&self, positions: &Tensor) -> Rotation {
        self.rope.rotation(positions, self.compute)
    }

    fn load_with(folder: &Path, device: Device, compute: ComputeKind, head: Head) -> Result<Self, LoadError> {
        if !folder.is_dir() {
            return Err(LoadError::Absent { folder: folder.to_owned() });
        }
        let path = folder.join("config.json");
        let json = match fs::read_to_string(&path) {
            Ok(json) => json,
            Err(source) => return Err(LoadError::Read { path, source }),
        };
        let config = ModelConfig::parse(&json).map_err(|source| LoadError::Config { path, source })?;
        let reader = Reader::open(folder)?;
        let specs = layout(&config, head);
        reader.refuse_unexpected(&specs, config.tie_word_embeddings || head == Head::Value)?;
        let mut parameters = Parameters::default();
        for spec in specs {
            let tensor = if spec.name == VALUE_HEAD && !reader.contains(VALUE_HEAD) {
                Tensor::zeros(&spec.shape, (Kind::Float, device))
            } else {
                reader.read(&spec.name, &spec.shape)?.to_device(device)
            };
            if tensor.isfinite().all().int64_value(&[]) == 0 {
                return Err(LoadError::NotFinite { folder: folder.to_owned(), name: spec.name });
            }
            parameters.push(spec.name, &tensor);
        }
        Ok(Self::assemble(config, parameters, head, device, compute))
    }

    fn assemble(config: ModelConfig, parameters: Parameters, head: Head, device: Device, compute: ComputeKind) -> Self {
        let compute = match compute {
            ComputeKind::Float32 => Kind::Float,
            ComputeKind::Bfloat16 => Kind::BFloat16,
        };
        let rope = Rope::new(&config, device);
        let stack = Stack::new(&config, &parameters, head);
        Self { config, parameters, head, compute, device, rope, stack }
    }
}

/// A hint for a name of the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, which is easily given in place of a folder.
fn hub_hint(folder: &Path) -> String {
    let name = folder.to_string_lossy();
    let parts: Vec<&str> = name.split('/').collect();
    let is_name = |part: &&str| part.starts_with(|first: char| first.is_ascii_alphanumeric());
    if folder.is_relative() && parts.len() == 2 && parts.iter().all(is_name) {
        let local = parts[1];
        format!(
            ": only local folders are read. If {name} is a model of the Hugging Face Hub, download it with `hf download \
             {name} --local-dir models/{local}` and give models/{local}"
        )
    } else {
        String::new()
    }
}

fn initial(spec: &ParameterSpec, config: &ModelConfig, random: &mut Random) -> Tensor {
    match spec.initial {
        Initial::Normal => random.normal(&spec.shape) * config.initializer_range,
        Initial::Zeros => Tensor::zeros(&spec.shape, (Kind::Float, Device::Cpu)),
        Initial::Ones => Tensor::ones(&spec.shape, (Kind::Float, Device::Cpu)),
    }
}
