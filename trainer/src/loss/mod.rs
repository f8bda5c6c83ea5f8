//! Objectives over the flat trained tokens of a microbatch.
//!
//! The loss of a step is `sum_i loss_weight_i * sum_t m_it * l_it`. The weights contain the normalisation, so losses,
//! gradients and statistics of microbatches add up to those of the batch for every split into whole rows. This is
//! arithmetic on `[N]` vectors and separate from the model, so that every formula is tested on numbers. The previous
//! stage is [`crate::head`], or [`crate::returns`] if advantages need the whole batch; the next is
//! [`crate::optimizer`].

mod config;
mod correction;
mod penalty;
mod policy;
mod statistics;

use tch::{Kind, Tensor};

use crate::microbatch::FlatTokens;

pub use config::{
    ConfigError, Correction, Decoupled, KlEstimator, Mis, MisLevel, MisOutside, Objective, ObjectiveConfig,
    OldLogprobs, Tis,
};
pub use correction::Corrected;
pub use statistics::{LossStatistics, StepStatistics};

/// Bound of log-ratios before they are exponentiated. Above it, a 32-bit gradient would be infinite or NaN.
const LOG_RATIO_MAX: f64 = 20.0;

/// The inputs of an objective; every tensor is `[N]` over the trained tokens, and all are on one device.
#[derive(Clone, Copy, Debug)]
pub struct LossInputs<'a> {
    /// Columns of the microbatch.
    pub tokens: &'a FlatTokens,
    /// Log-probabilities under the trained weights. `evaluate` needs a leaf that requires gradients; `differentiate`
    /// makes one.
    pub logp: &'a Tensor,
    /// Entropies; a leaf that requires gradients if `entropy_coef` is not 0.
    pub entropy: Option<&'a Tensor>,
    /// The source of `logp_old`.
    pub logp_old: OldPolicy<'a>,
    /// Log-probabilities under a frozen reference.
    pub logp_reference: Option<&'a Tensor>,
    /// Log-probabilities under a frozen teacher; the rows' own are used if this is `None`.
    pub logp_teacher: Option<&'a Tensor>,
    /// Advantages per token that replace the rows' own, including the part that distillation subtracts.
    pub advantages: Option<&'a Tensor>,
}

/// The policy in the denominator of the ratio.
#[derive(Clone, Copy, Debug)]
pub enum OldPolicy<'a> {
    /// The policy that sampled: the rows' `logprobs`, and detach(logp) for a row without them.
    Rollout,
    /// The trained weights, which are unchanged since the start of the step if a batch has one step: detach(logp).
    Current,
    /// Log-probabilities that were computed before, `[N]`: under the weights at the start of the step, or the rows' own
    /// where these are used and there are some.
    Recomputed(&'a Tensor),
}

/// Loss of a microbatch.
#[derive(Debug)]
pub struct Loss {
    /// Weighted sum over tokens, a scalar; differentiable.
    pub total: Tensor,
    /// Detached sums that are added over microbatches.
    pub statistics: LossStatistics,
}

/// Loss of a microbatch with its gradients, detached.
#[derive(Debug)]
pub struct LossGradients {
    /// dL/dlogp `[N]`.
    pub logp: Tensor,
    /// dL/dH `[N]` if entropy is a term of the loss.
    pub entropy: Option<Tensor>,
    /// Detached sums that are added over microbatches.
    pub statistics: LossStatistics,
}

/// A column that the objective needs and the microbatch lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LossError {
    /// Rows without behaviour log-probabilities.
    #[error("{0} needs logprobs on every row")]
    Logprobs(&'static str),
    /// Neither the rows nor a model have teacher log-probabilities.
    #[error("opd_coef needs teacher_logprobs on every row or a frozen teacher")]
    Teacher,
    /// No reference was given.
    #[error("kl_loss_coef needs a frozen reference")]
    Reference,
    /// Entropies were not computed.
    #[error("entropy_coef needs entropies")]
    Entropy,
    /// `logp_old` is the rollout's, so there is nothing to correct.
    #[error("an off-policy correction needs recomputed old_logprobs")]
    Correction,
}

/// Computes the loss of a microbatch. `config` has been validated.
pub fn evaluate(config: &ObjectiveConfig, inputs: &LossInputs) -> Result<Loss, LossError> {
    let tokens = inputs.tokens;
    let logp_old = old_logprobs(inputs);
    let advantage = advantages(config, inputs, &logp_old)?;
    let ratio = policy::ratio(config, tokens, inputs.logp, &logp_old);
    let term = policy::term(config, inputs.logp, &ratio, &advantage);
    let corrected = match &config.correction {
        Some(correction) => Some(correct(correction, inputs, &logp_old)?),
        None => None,
    };
    let mut per_token = match &corrected {
        Some(corrected) => &term.loss * &corrected.weight,
        None => term.loss.shallow_clone(),
    };
    if config.entropy_coef != 0.0 {
        per_token -= inputs.entropy.ok_or(LossError::Entropy)? * config.entropy_coef;
    }
    let mut kl_reference = None;
    if config.kl_loss_coef != 0.0 {
        let reference = inputs.logp_reference.ok_or(LossError::Reference)?;
        let kl = penalty::kl(config.kl_loss_type, inputs.logp, &reference.detach());
        per_token += &kl * config.kl_loss_coef;
        kl_reference = Some(kl.detach());
    }
    let total = (per_token * &tokens.loss_weight).sum(None::<Kind>);
    let statistics = LossStatistics::of(&statistics::Observed {
        total: &total,
        logp: inputs.logp,
        logp_rollout: tokens.logp_rollout.as_ref(),
        sampled: tokens.sampled.as_ref(),
        entropy: inputs.entropy,
        advantage: &advantage,
        ratio: &ratio,
        clipped: term.clipped.as_ref(),
        kl_reference: kl_reference.as_ref(),
        corrected: corrected.as_ref(),
    });
    Ok(Loss { total, statistics })
}

/// Computes the gradients of a microbatch's loss with respect to its leaves: the arguments of
/// [`crate::head::HeadForward::backward`].
///
/// `logp` and `entropy` of the inputs need not require gradients here.
pub fn differentiate(config: &ObjectiveConfig, inputs: &LossInputs) -> Result<LossGradients, LossError> {
    let logp = inputs.logp.detach().set_requires_grad(true);
    let trains_entropy = config.entropy_coef != 0.0;
    let entropy = inputs.entropy.map(|entropy| entropy.detach().set_requires_grad(trains_entropy));
    let loss = evaluate(config, &LossInputs { logp: &logp, entropy: entropy.as_ref(), ..*inputs })?;
    let mut leaves = vec![&logp];
    leaves.extend(entropy.as_ref().filter(|_| trains_entropy));
    let mut gradients = Tensor::run_backward(&[&loss.total], &leaves, false, false).into_iter();
    Ok(LossGradients {
        logp: gradients.next().expect("there is one gradient for each leaf, and logp is a leaf"),
        entropy: gradients.next(),
        statistics: loss.statistics,
    })
}

/// `logp_old`, detached.
fn old_logprobs(inputs: &LossInputs) -> Tensor {
    let current = || inputs.logp.detach();
    match (inputs.logp_old, &inputs.tokens.logp_rollout, &inputs.tokens.sampled) {
        (OldPolicy::Current, _, _) | (OldPolicy::Rollout, None, _) => current(),
        (OldPolicy::Recomputed(logp_old), _, _) => logp_old.detach(),
        (OldPolicy::Rollout, Some(rollout), None) => rollout.detach(),
        (OldPolicy::Rollout, Some(rollout), Some(sampled)) => rollout.detach().where_self(&sampled.mask, &current()),
    }
}

/// Advantages per token. On-policy distillation subtracts `opd_coef * (logp_old - logp_teacher)` from the rows' own.
fn advantages(config: &ObjectiveConfig, inputs: &LossInputs, logp_old: &Tensor) -> Result<Tensor, LossError> {
    if let Some(prepared) = inputs.advantages {
        return Ok(prepared.detach());
    }
    let advantage = inputs.tokens.advantage.detach();
    if config.opd_coef == 0.0 {
        return Ok(advantage);
    }
    let teacher = inputs.logp_teacher.or(inputs.tokens.logp_teacher.as_ref()).ok_or(LossError::Teacher)?;
    Ok(advantage - (logp_old - teacher.detach()) * config.opd_coef)
}

fn correct(correction: &Correction, inputs: &LossInputs, logp_old: &Tensor) -> Result<Corrected, LossError> {
    let tokens = inputs.tokens;
    if matches!(inputs.logp_old, OldPolicy::Rollout) {
        return Err(LossError::Correction);
    }
    match &tokens.logp_rollout {
        Some(rollout) if tokens.sampled.is_none() => Ok(correction::correct(correction, tokens, &(logp_old - rollout))),
        _ => Err(LossError::Logprobs("correction")),
    }
}

/// Sums of an `[N]` column over the rows of a microbatch: `[B]`; differentiable.
fn sum_by_row(tokens: &FlatTokens, column: &Tensor) -> Tensor {
    Tensor::zeros([tokens.rows], (column.kind(), column.device())).index_add(0, &tokens.row, column)
}

#[cfg(test)]
mod tests;
