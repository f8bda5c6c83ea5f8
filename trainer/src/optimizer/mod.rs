//! The last stage: clips gradients by their global norm, applies `AdamW` with a learning rate schedule, and averages
//! the weights.
//!
//! This is separate from libtorch's own optimizers for two reasons: their state cannot be read or written by name,
//! which a checkpoint needs, and a step with a gradient that is not finite must change nothing.

mod schedule;
mod step;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor, no_grad};

pub use schedule::{Decay, Schedule};

/// Added to the norm by which gradients are divided, as in `PyTorch`.
const NORM_EPSILON: f64 = 1e-6;

/// Hyperparameters of `AdamW` (Loshchilov & Hutter 2019).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices; vectors (norms, biases) never decay.
    pub weight_decay: f64,
    /// Largest global norm of the gradient; 0 disables clipping.
    pub clip_norm: f64,
    /// Decay per step of the averaged weights; 0 disables the average.
    pub ema_decay: f64,
}

/// `AdamW` over named parameters.
#[derive(Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    steps: i64,
    slots: BTreeMap<String, Slot>,
}

/// The result of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Global norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Whether it was clipped.
    pub clipped: bool,
}

/// State of one parameter, for a checkpoint. Its tensors share memory with the optimizer.
#[derive(Debug)]
pub struct ParameterState {
    /// Mean of gradients.
    pub mean: Tensor,
    /// Mean of squared gradients.
    pub square: Tensor,
    /// Averaged weights, if an average is kept.
    pub average: Option<Tensor>,
}

/// Why the optimizer refused a call.
#[derive(Debug, thiserror::Error)]
pub enum OptimizerError {
    /// A hyperparameter is out of range.
    #[error("{field} is {value}, must be {range}")]
    Config {
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The permitted range.
        range: &'static str,
    },
    /// Small updates are lost in 16-bit weights, which need a 32-bit master copy.
    #[error("parameter {name} is {kind:?}, must be Float or Double")]
    Kind {
        /// The parameter.
        name: String,
        /// Its kind.
        kind: Kind,
    },
    /// Two parameters share a name.
    #[error("parameter {0} is named twice")]
    Duplicate(String),
    /// The step was skipped: parameters and moments are unchanged. The gradients still have to be cleared.
    #[error("the gradient's norm is {norm}")]
    NonFinite {
        /// The norm.
        norm: f64,
    },
    /// No parameter has a gradient.
    #[error("no parameter has a gradient")]
    NoGradient,
    /// A saved state does not match the parameters.
    #[error("state of parameter {name}: {reason}")]
    State {
        /// The parameter.
        name: String,
        /// The difference.
        reason: &'static str,
    },
}

#[derive(Debug)]
struct Slot {
    parameter: Tensor,
    mean: Tensor,
    square: Tensor,
    average: Option<Tensor>,
    weight_decay: f64,
}

impl Default for OptimizerConfig {
    /// Betas 0.9 and 0.98, eps 1e-8, weight decay 0.1, norm 1, no average: the values of slime's recipes.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.1, clip_norm: 1.0, ema_decay: 0.0 }
    }
}

impl OptimizerConfig {
    /// Refuses values outside their ranges.
    pub fn validate(&self) -> Result<(), OptimizerError> {
        let decay = 0.0..1.0;
        let positive = |value: f64| value.is_finite() && value >= 0.0;
        let checks = [
            ("beta1", self.beta1, decay.contains(&self.beta1), "in [0, 1)"),
            ("beta2", self.beta2, decay.contains(&self.beta2), "in [0, 1)"),
            ("eps", self.eps, positive(self.eps) && self.eps > 0.0, "finite and above 0"),
            ("weight_decay", self.weight_decay, positive(self.weight_decay), "finite and at least 0"),
            ("clip_norm", self.clip_norm, positive(self.clip_norm), "finite and at least 0"),
            ("ema_decay", self.ema_decay, decay.contains(&self.ema_decay), "in [0, 1)"),
        ];
        match checks.into_iter().find(|&(_, _, valid, _)| !valid) {
            Some((field, value, _, range)) => Err(OptimizerError::Config { field, value, range }),
            None => Ok(()),
        }
    }
}

impl AdamW {
    /// Creates an optimizer at step 0. Parameters must be leaves that require gradients, f32 or f64.
    pub fn new(
        config: OptimizerConfig,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Self, OptimizerError> {
        config.validate()?;
        let mut slots = BTreeMap::new();
        for (name, parameter) in parameters {
            if !matches!(parameter.kind(), Kind::Float | Kind::Double) {
                return Err(OptimizerError::Kind { name, kind: parameter.kind() });
            }
            if slots.insert(name.clone(), Slot::new(&config, parameter)).is_some() {
                return Err(OptimizerError::Duplicate(name));
            }
        }
        Ok(Self { config, steps: 0, slots })
    }

    /// Number of steps taken.
    #[must_use]
    pub fn steps(&self) -> i64 {
        self.steps
    }

    /// Clips the gradients and takes one step with `learning_rate`. Parameters without a gradient are not changed.
    ///
    /// Reads the norm from the device once. Clipped gradients are scaled in place.
    pub fn step(&mut self, learning_rate: f64) -> Result<StepOutcome, OptimizerError> {
        no_grad(|| {
            let gradient_norm = self.gradient_norm().ok_or(OptimizerError::NoGradient)?;
            if !gradient_norm.is_finite() {
                return Err(OptimizerError::NonFinite { norm: gradient_norm });
            }
            let scale = self.config.clip_norm / (gradient_norm + NORM_EPSILON);
            let clipped = self.config.clip_norm > 0.0 && scale < 1.0;
            self.steps += 1;
            let update = step::Update::new(&self.config, self.steps, learning_rate, clipped.then_some(scale));
            for slot in self.slots.values_mut() {
                slot.step(&update, self.config.ema_decay);
            }
            Ok(StepOutcome { gradient_norm, clipped })
        })
    }

    /// Global 2-norm of the gradients; `None` if no parameter has one.
    #[must_use]
    pub fn gradient_norm(&self) -> Option<f64> {
        let norms: Vec<Tensor> = self
            .slots
            .values()
            .map(|slot| slot.parameter.grad())
            .filter(Tensor::defined)
            .map(|gradient| gradient.norm().to_kind(Kind::Double))
            .collect();
        let first = norms.first()?.device();
        let norms: Vec<Tensor> = norms.iter().map(|norm| norm.to_device(first)).collect();
        Some(Tensor::stack(&norms, 0).norm().double_value(&[]))
    }

    /// Returns the name of a tensor with an element that is not finite, if there is one: a weight, a moment or an
    /// average.
    ///
    /// Reads only one number from the device if all elements are finite.
    #[must_use]
    pub fn not_finite(&self) -> Option<String> {
        no_grad(|| {
            let extremes: Vec<Tensor> =
                self.slots.values().flat_map(Slot::tensors).flat_map(|(_, tensor)| extremes(&tensor)).collect();
            let device = extremes.first()?.device();
            let extremes: Vec<Tensor> = extremes.iter().map(|extreme| extreme.to_device(device)).collect();
            if Tensor::stack(&extremes, 0).isfinite().all().int64_value(&[]) == 1 {
                return None;
            }
            let named = self.slots.iter().flat_map(|(name, slot)| slot.tensors().map(move |found| (name, found)));
            let is_bad = |tensor: &Tensor| tensor.isfinite().all().int64_value(&[]) == 0;
            named.into_iter().find(|(_, (_, tensor))| is_bad(tensor)).map(|(name, (what, _))| format!("{what} {name}"))
        })
    }

    /// Sets every gradient to 0.
    pub fn zero_grad(&mut self) {
        for slot in self.slots.values_mut() {
            slot.parameter.zero_grad();
        }
    }

    /// State of every parameter, in ascending order of names.
    pub fn state(&self) -> impl Iterator<Item = (&str, ParameterState)> {
        self.slots.iter().map(|(name, slot)| {
            let state = ParameterState {
                mean: slot.mean.shallow_clone(),
                square: slot.square.shallow_clone(),
                average: slot.average.as_ref().map(Tensor::shallow_clone),
            };
            (name.as_str(), state)
        })
    }

    /// Restores a saved state, bit for bit. Nothing changes unless the whole state matches the parameters.
    ///
    /// A saved average is ignored if no average is kept. An average that was not saved starts at the parameters.
    pub fn restore(&mut self, steps: i64, saved: &BTreeMap<String, ParameterState>) -> Result<(), OptimizerError> {
        if let Some(name) = saved.keys().find(|name| !self.slots.contains_key(*name)) {
            return Err(OptimizerError::State { name: name.clone(), reason: "the model has no such parameter" });
        }
        for (name, slot) in &self.slots {
            let reason = match saved.get(name) {
                Some(state) => slot.misfit(state),
                None => Some("it is missing"),
            };
            if let Some(reason) = reason {
                return Err(OptimizerError::State { name: name.clone(), reason });
            }
        }
        for (name, slot) in &mut self.slots {
            slot.restore(&saved[name]);
        }
        self.steps = steps;
        Ok(())
    }
}

impl Slot {
    fn new(config: &OptimizerConfig, parameter: Tensor) -> Self {
        let average = (config.ema_decay > 0.0).then(|| parameter.detach().copy());
        let weight_decay = if parameter.dim() < 2 { 0.0 } else { config.weight_decay };
        let zeros = parameter.detach().zeros_like();
        Self { mean: zeros.copy(), square: zeros, average, weight_decay, parameter }
    }

    /// Every tensor that a step changes, with its description.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, Tensor)> + '_ {
        let average = self.average.as_ref().map(|average| ("average of", average.shallow_clone()));
        [
            ("weight", self.parameter.detach()),
            ("mean of gradients of", self.mean.shallow_clone()),
            ("mean of squared gradients of", self.square.shallow_clone()),
        ]
        .into_iter()
        .chain(average)
    }

    fn misfit(&self, state: &ParameterState) -> Option<&'static str> {
        let tensors = [Some(&state.mean), Some(&state.square), state.average.as_ref()];
        let fits = |tensor: &Tensor| tensor.size() == self.parameter.size() && tensor.kind() == self.parameter.kind();
        if tensors.into_iter().flatten().all(fits) { None } else { Some("its shape or kind differs") }
    }

    fn restore(&mut self, state: &ParameterState) {
        self.mean.copy_(&state.mean);
        self.square.copy_(&state.square);
        if let Some(average) = &mut self.average {
            average.copy_(state.average.as_ref().unwrap_or(&self.parameter.detach()));
        }
    }
}

/// The largest and the smallest element. A NaN appears as both, and no copy is made.
fn extremes(tensor: &Tensor) -> [Tensor; 2] {
    [tensor.max(), tensor.min()].map(|extreme| extreme.to_kind(Kind::Double))
}

#[cfg(test)]
mod tests;
