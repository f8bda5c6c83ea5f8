//! Divergence from a frozen reference model, as a term of the loss.

use tch::Tensor;

use super::KlEstimator;

/// Bound of `low_var_kl` in both directions.
const LOW_VAR_MAX: f64 = 10.0;

/// Schulman's estimators (2020) of KL(policy || reference) per token `[N]`, with `d = logp - logp_reference`; differentiable.
///
/// d is bounded below so that exp(-d) stays finite.
pub(super) fn kl(estimator: KlEstimator, logp: &Tensor, logp_reference: &Tensor) -> Tensor {
    let d = logp - logp_reference;
    match estimator {
        KlEstimator::K1 => d,
        KlEstimator::K2 => d.square() * 0.5,
        KlEstimator::K3 => k3(&d),
        KlEstimator::LowVarKl => k3(&d).clamp(-LOW_VAR_MAX, LOW_VAR_MAX),
    }
}

/// exp(-d) - 1 + d.
pub(super) fn k3(d: &Tensor) -> Tensor {
    let bounded = d.clamp_min(-super::LOG_RATIO_MAX);
    (-&bounded).expm1() + bounded
}
