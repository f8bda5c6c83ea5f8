//! The arithmetic of one `AdamW` step. It is separate because it is optimised for memory traffic.

use tch::{Device, Tensor};

use super::{OptimizerConfig, Slot};

/// Elements of a block for each thread of a CPU, so that the tensors of a step stay in its cache between the passes.
const BLOCK_ELEMENTS: i64 = 1 << 16;

/// Scalars of one step, with t its number from 1:
///
/// - m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2
/// - w = w (1 - lr decay) - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
pub(super) struct Update {
    /// Factor of the gradient; below 1 if its norm was clipped.
    scale: Option<f64>,
    /// 1 - b1.
    mean_rate: f64,
    /// 1 - b2.
    square_rate: f64,
    learning_rate: f64,
    /// -lr sqrt(1 - b2^t) / (1 - b1^t).
    step: f64,
    /// eps sqrt(1 - b2^t). The root of the unbiased v plus eps is divided by this common factor, which saves a pass.
    eps: f64,
}

impl Update {
    pub(super) fn new(config: &OptimizerConfig, steps: i64, learning_rate: f64, scale: Option<f64>) -> Self {
        let unbiased = |beta: f64| 1.0 - beta.powf(steps as f64);
        let root = unbiased(config.beta2).sqrt();
        Self {
            scale,
            mean_rate: 1.0 - config.beta1,
            square_rate: 1.0 - config.beta2,
            learning_rate,
            step: -learning_rate * root / unbiased(config.beta1),
            eps: config.eps * root,
        }
    }

    fn apply(&self, block: &mut Block, weight_decay: f64) {
        let Block { parameter, gradient, mean, square } = block;
        if let Some(scale) = self.scale {
            let _ = gradient.g_mul_scalar_(scale);
        }
        let _ = mean.lerp_(gradient, self.mean_rate);
        let _ = square.lerp_(&gradient.square(), self.square_rate);
        let mut denominator = square.sqrt();
        let _ = denominator.g_add_scalar_(self.eps);
        if weight_decay > 0.0 {
            let _ = parameter.g_mul_scalar_(1.0 - self.learning_rate * weight_decay);
        }
        let _ = parameter.addcdiv_(&(&*mean * self.step), &denominator);
    }
}

/// Views of the same elements.
struct Block {
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
}

impl Slot {
    pub(super) fn step(&mut self, update: &Update, ema_decay: f64) {
        let gradient = self.parameter.grad();
        if gradient.defined() {
            let parameter = self.parameter.detach();
            let mut whole =
                Block { parameter, gradient, mean: self.mean.shallow_clone(), square: self.square.shallow_clone() };
            match whole.flat() {
                Some(flat) => flat.each(|block| update.apply(block, self.weight_decay)),
                None => update.apply(&mut whole, self.weight_decay),
            }
        }
        if let Some(average) = &mut self.average {
            let _ = average.lerp_(&self.parameter.detach(), 1.0 - ema_decay);
        }
    }
}

impl Block {
    /// One-dimensional views, used on a CPU. A GPU is faster with fewer and larger kernels.
    fn flat(&self) -> Option<Self> {
        let tensors = [&self.parameter, &self.gradient, &self.mean, &self.square];
        let fits = |tensor: &&Tensor| tensor.device() == Device::Cpu && tensor.is_contiguous();
        tensors.iter().all(fits).then(|| Self {
            parameter: self.parameter.view(-1),
            gradient: self.gradient.view(-1),
            mean: self.mean.view(-1),
            square: self.square.view(-1),
        })
    }

    fn each(&self, mut apply: impl FnMut(&mut Self)) {
        let total = self.parameter.numel() as i64;
        let block = BLOCK_ELEMENTS * i64::from(tch::get_num_threads().max(1));
        for start in (0..total).step_by(block as usize) {
            let length = block.min(total - start);
            apply(&mut Self {
                parameter: self.parameter.narrow(0, start, length),
                gradient: self.gradient.narrow(0, start, length),
                mean: self.mean.narrow(0, start, length),
                square: self.square.narrow(0, start, length),
            });
        }
    }
}
