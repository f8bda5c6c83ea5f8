//! Off-policy corrections: detached weights of the policy term for the difference between the trainer's and the
//! sampler's log-probabilities.

use tch::{Kind, Tensor};

use super::{Correction, Decoupled, LOG_RATIO_MAX, Mis, MisLevel, MisOutside, Tis, sum_by_row};
use crate::microbatch::FlatTokens;

/// Factors of the policy term `[N]`, detached.
#[derive(Debug)]
pub struct Corrected {
    /// The factor.
    pub weight: Tensor,
    /// 1 where a rule set the factor to 0, 0 elsewhere.
    pub zeroed: Tensor,
}

/// Computes factors from `log_weight = logp_old - logp_rollout`, `[N]`: `w = exp(log_weight)`.
pub(super) fn correct(correction: &Correction, tokens: &FlatTokens, log_weight: &Tensor) -> Corrected {
    let log_weight = log_weight.detach();
    match correction {
        Correction::Tis(tis) => truncated(*tis, &log_weight),
        Correction::Decoupled(decoupled) => decouple(*decoupled, &log_weight),
        Correction::Mis(mis) => mask(*mis, tokens, &log_weight),
    }
}

/// Truncated importance sampling (Yao et al. 2025): w, clamped to bounds.
fn truncated(tis: Tis, log_weight: &Tensor) -> Corrected {
    let weight = weights(log_weight).clamp(tis.low, tis.high);
    Corrected { zeroed: weight.zeros_like(), weight }
}

/// The decoupled objective of `AReaL` (Fu et al. 2025): w, and 0 for tokens above the cap.
fn decouple(decoupled: Decoupled, log_weight: &Tensor) -> Corrected {
    let weight = weights(log_weight);
    let zeroed = weight.greater(decoupled.cap);
    zero(&weight, &zeroed)
}

/// Masked importance sampling (Liu et al. 2025): w of the token or its sequence, clipped to the bounds or 0 outside of
/// them, and 0 for a sequence with a token whose own w is below the veto.
fn mask(mis: Mis, tokens: &FlatTokens, log_weight: &Tensor) -> Corrected {
    let level = match mis.level {
        MisLevel::Token => log_weight.shallow_clone(),
        MisLevel::Product => sum_by_row(tokens, log_weight).index_select(0, &tokens.row),
        MisLevel::Geometric => {
            let mean = sum_by_row(tokens, log_weight) / sum_by_row(tokens, &log_weight.ones_like());
            mean.index_select(0, &tokens.row)
        }
    };
    let weight = weights(&level);
    let vetoed = log_weight.less(mis.veto.ln()).to_kind(log_weight.kind());
    let vetoed = sum_by_row(tokens, &vetoed).index_select(0, &tokens.row).greater(0.0);
    match mis.outside {
        MisOutside::Clip => zero(&weight.clamp(mis.low, mis.high), &vetoed),
        MisOutside::Zero => {
            let outside = weight.less(mis.low).logical_or(&weight.greater(mis.high));
            zero(&weight, &outside.logical_or(&vetoed))
        }
    }
}

fn weights(log_weight: &Tensor) -> Tensor {
    log_weight.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
}

fn zero(weight: &Tensor, zeroed: &Tensor) -> Corrected {
    Corrected { weight: weight.masked_fill(zeroed, 0.0), zeroed: zeroed.to_kind(Kind::Float) }
}
