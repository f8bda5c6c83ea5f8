//! Rotary position embedding: the frequencies of each scaling, and the rotation.
//!
//! Frequencies are computed in float32, in the order of operations that checkpoints were trained with. At position
//! 100,000, a difference of one unit in the last place of a frequency rotates a head by a noticeable angle.

use std::f64::consts::TAU;

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::config::{ConfigError, Keys, ModelConfig, unsupported};

/// How the frequencies are changed to extend a model to more positions.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// The frequencies are not changed.
    None,
    /// All frequencies are divided by the factor.
    Linear {
        /// Factor of the extension in positions.
        factor: f64,
    },
    /// Low frequencies are divided, high ones kept, and those between are interpolated, as in Llama 3.1.
    Llama3 {
        /// Factor of the extension in positions.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / this` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / this` are kept.
        high_freq_factor: f64,
        /// The longest sequence before the extension, in tokens.
        original_max_position_embeddings: f64,
    },
    /// Frequencies are interpolated by dimension, with sharper attention (`YaRN`, arXiv 2309.00071).
    Yarn {
        /// Factor of the extension in positions.
        factor: f64,
        /// Factor of the rotated queries and keys.
        attention_factor: f64,
        /// Dimensions that rotate more often than this over the original length are kept.
        beta_fast: f64,
        /// Dimensions that rotate less often than this over the original length are scaled.
        beta_slow: f64,
        /// The longest sequence before the extension, in tokens.
        original_max_position_embeddings: f64,
        /// Whether the bounds are rounded outwards to whole dimensions.
        truncate: bool,
    },
}

impl RopeScaling {
    pub(super) fn parse(keys: &mut Keys, max_position_embeddings: i64) -> Result<Self, ConfigError> {
        let kind: Option<String> = keys.optional("rope_type")?;
        // Old files use the key `type`, and some files have both keys.
        let old_kind: Option<String> = keys.optional("type")?;
        match kind.or(old_kind).as_deref() {
            None | Some("default") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: required(keys, "factor")? }),
            Some("llama3") => Ok(Self::Llama3 {
                factor: required(keys, "factor")?,
                low_freq_factor: required(keys, "low_freq_factor")?,
                high_freq_factor: required(keys, "high_freq_factor")?,
                original_max_position_embeddings: required(keys, "original_max_position_embeddings")?,
            }),
            Some("yarn") => Self::parse_yarn(keys, max_position_embeddings),
            Some(other) => Err(unsupported(
                &keys.name("rope_type"),
                &Value::from(other),
                "supported are default, linear, llama3 and yarn",
            )),
        }
    }

    fn parse_yarn(keys: &mut Keys, max_position_embeddings: i64) -> Result<Self, ConfigError> {
        let factor = required(keys, "factor")?;
        let given: Option<f64> = keys.optional("attention_factor")?;
        let scale: f64 = keys.optional("mscale")?.unwrap_or(0.0);
        let scale_all: f64 = keys.optional("mscale_all_dim")?.unwrap_or(0.0);
        let computed = if scale > 0.0 && scale_all > 0.0 {
            yarn_attention(factor, scale) / yarn_attention(factor, scale_all)
        } else {
            yarn_attention(factor, 1.0)
        };
        Ok(Self::Yarn {
            factor,
            attention_factor: given.unwrap_or(computed),
            beta_fast: keys.optional("beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.optional("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: keys
                .optional("original_max_position_embeddings")?
                .unwrap_or(max_position_embeddings as f64),
            truncate: keys.optional("truncate")?.unwrap_or(true),
        })
    }
}

fn required(keys: &mut Keys, key: &str) -> Result<f64, ConfigError> {
    match keys.optional(key)? {
        Some(number) if number > 0.0 => Ok(number),
        Some(number) => Err(unsupported(&keys.name(key), &Value::from(number), "it must be positive")),
        None => Err(unsupported(&keys.name(key), &Value::Null, "this rope_type needs it")),
    }
}

/// The paper's temperature, as a factor of both queries and keys: 0.1 ln s + 1.
fn yarn_attention(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// The frequencies of one model, on its device.
#[derive(Debug)]
pub(super) struct Rope {
    /// `[head_dim / 2]` float32, radians per position.
    frequencies: Tensor,
    attention_factor: f64,
}

impl Rope {
    pub(super) fn new(config: &ModelConfig, device: Device) -> Self {
        let _guard = tch::no_grad_guard();
        let head_dim = config.head_dim;
        let exponents = Tensor::arange_start_step(0, head_dim, 2, (Kind::Float, Device::Cpu)) / head_dim as f64;
        let plain = Tensor::pow_scalar(config.rope_theta, &exponents).reciprocal();
        let (frequencies, attention_factor) = match config.rope_scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain / factor, 1.0),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = &plain * (original_max_position_embeddings / TAU);
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (blend(&plain, factor, &kept), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                truncate,
            } => {
                // The dimension that rotates this often over the original length.
                let dimension = |turns: f64| {
                    let scale = (original_max_position_embeddings / (turns * TAU)).ln();
                    head_dim as f64 * scale / (2.0 * config.rope_theta.ln())
                };
                let kept = 1.0 - yarn_ramp(head_dim, dimension(beta_fast), dimension(beta_slow), truncate);
                (blend(&plain, factor, &kept), attention_factor)
            }
        };
        Self { frequencies: frequencies.to_device(device), attention_factor }
    }

    /// The rotation at `positions` (`[B or 1, S]` i64), for heads of kind `kind`.
    pub(super) fn rotation(&self, positions: &Tensor, kind: Kind) -> Rotation {
        let _guard = tch::no_grad_guard();
        // [B, 1, S, head_dim / 2], which broadcasts over heads.
        let angles = positions.to_kind(Kind::Float).unsqueeze(1).unsqueeze(-1) * &self.frequencies;
        let angles = Tensor::cat(&[&angles, &angles], -1);
        Rotation {
            cos: (angles.cos() * self.attention_factor).to_kind(kind),
            sin: (angles.sin() * self.attention_factor).to_kind(kind),
        }
    }
}

/// Keeps the share `kept` of each frequency and divides the rest by `factor`.
fn blend(plain: &Tensor, factor: f64, kept: &Tensor) -> Tensor {
    plain * kept + plain / factor * (1.0 - kept)
}

/// 0 for the dimensions below `low`, 1 for those above `high`, a line in between; section
/// 3.2 of the paper.
fn yarn_ramp(head_dim: i64, mut low: f64, mut high: f64, truncate: bool) -> Tensor {
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min(head_dim as f64 - 1.0);
    // Equal bounds give a step function.
    let width = if (high - low).abs() < f64::EPSILON { 0.001 } else { high - low };
    let dimensions = Tensor::arange(head_dim / 2, (Kind::Float, Device::Cpu));
    ((dimensions - low) / width).clamp(0.0, 1.0)
}

/// The cosines and sines of some positions, `[B or 1, 1, S, head_dim]`.
#[derive(Debug)]
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// Rotates `heads` (`[B, heads, S, head_dim]`); dimension i rotates together with i + `head_dim` / 2.
    pub(super) fn apply(&self, heads: &Tensor) -> Tensor {
        let halves = heads.chunk(2, -1);
        let turned = Tensor::cat(&[&halves[1].neg(), &halves[0]], -1);
        heads * &self.cos + turned * &self.sin
    }
}
