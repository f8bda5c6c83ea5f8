//! The policy term: the ratio to the old policy, and the loss per token for each objective.

use tch::{Kind, Tensor};

use super::{LOG_RATIO_MAX, Objective, ObjectiveConfig, sum_by_row};
use crate::microbatch::FlatTokens;

/// Policy loss per token `[N]`, before corrections and weights.
pub(super) struct Term {
    /// Differentiable.
    pub(super) loss: Tensor,
    /// 1 where the clipped value was used, 0 elsewhere; `None` for objectives that do not clip.
    pub(super) clipped: Option<Tensor>,
}

/// `r = exp(logp - logp_old)`, `[N]`. With GSPO (Zheng et al. 2025) every token gets the geometric mean over its
/// sequence.
pub(super) fn ratio(config: &ObjectiveConfig, tokens: &FlatTokens, logp: &Tensor, logp_old: &Tensor) -> Tensor {
    let log_ratio = logp - logp_old;
    let log_ratio = if config.objective == Objective::Gspo {
        let mean = sum_by_row(tokens, &log_ratio) / sum_by_row(tokens, &log_ratio.detach().ones_like());
        mean.index_select(0, &tokens.row)
    } else {
        log_ratio
    };
    log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
}

/// Computes the loss per token.
pub(super) fn term(config: &ObjectiveConfig, logp: &Tensor, ratio: &Tensor, advantage: &Tensor) -> Term {
    match config.objective {
        Objective::Sft => Term { loss: -logp, clipped: None },
        Objective::Cispo => truncated(config, logp, &ratio.detach(), advantage),
        Objective::Grpo | Objective::Ppo | Objective::ReinforcePlusPlus | Objective::Gspo => {
            clipped(config, ratio, advantage)
        }
        // Williams 1992.
        Objective::Reinforce => Term { loss: -logp * advantage, clipped: None },
    }
}

/// PPO's clipped surrogate (Schulman et al. 2017), with the dual clip of Ye et al. 2020 if `clip_c` is set.
fn clipped(config: &ObjectiveConfig, ratio: &Tensor, advantage: &Tensor) -> Term {
    let direct = -ratio * advantage;
    let bounded = -bound(config, ratio) * advantage;
    let clipped = bounded.detach().greater_tensor(&direct.detach()).to_kind(Kind::Float);
    let loss = direct.maximum(&bounded);
    let loss = match config.clip_c {
        Some(clip_c) => loss.minimum(&(advantage * -clip_c)).where_self(&advantage.less(0.0), &loss),
        None => loss,
    };
    Term { loss, clipped: Some(clipped) }
}

/// CISPO (`MiniMax` 2025): the clipped ratio weights the gradient of logp and is itself detached.
fn truncated(config: &ObjectiveConfig, logp: &Tensor, ratio: &Tensor, advantage: &Tensor) -> Term {
    let bounded = bound(config, ratio);
    let clipped = bounded.ne_tensor(ratio).to_kind(Kind::Float);
    Term { loss: -bounded * advantage * logp, clipped: Some(clipped) }
}

fn bound(config: &ObjectiveConfig, ratio: &Tensor) -> Tensor {
    ratio.clamp(1.0 - config.eps_low, 1.0 + config.eps_high())
}
