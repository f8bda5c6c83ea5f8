//! Advantages per token for the objectives that need the whole batch first: REINFORCE++ and PPO.
//!
//! This is separate from [`crate::loss`] because it reads whole sequences and whole batches, runs once before the first
//! microbatch, and is never differentiated, except for the critic's loss at the end.
//! [`crate::microbatch::Microbatch::flatten`] converts columns over the trained tokens of a row to the flat layout.

use tch::{Kind, Tensor};

/// Added to the variance before the square root, as in slime.
const VARIANCE_EPSILON: f64 = 1e-8;

/// The rewards of one sequence. Columns cover its K trained tokens.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Reward of the rollout; it is assigned to the last trained token.
    pub reward: f64,
    /// Positions in the response, ascending, counting masked tokens.
    pub positions: &'a [i64],
    /// k1 = `logp_old` - `logp_ref`; `None` if rewards have no penalty.
    pub kl: Option<&'a [f32]>,
    /// `logp_old` - `logp_teacher` of on-policy distillation; `None` without distillation.
    pub gap: Option<&'a [f32]>,
}

/// How rewards are distributed over tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Discounting {
    /// Penalty per nat of k1.
    pub kl_coef: f64,
    /// Discount per step.
    pub gamma: f64,
    /// Decay of the advantage estimate per step; used only by PPO.
    pub lambda: f64,
    /// On-policy distillation, per nat of the difference to the teacher.
    pub opd_coef: f64,
}

/// The critic's results for one sequence: both of length K.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Advantages before whitening.
    pub advantages: Vec<f64>,
    /// Targets of the critic: advantages + values.
    pub returns: Vec<f64>,
}

/// Sums of a critic's loss over one microbatch.
#[derive(Debug)]
pub struct ValueLoss {
    /// Weighted sum over tokens; differentiable.
    pub loss: Tensor,
    /// Tokens at which the clipped error was the larger one, detached.
    pub clipped: Tensor,
}

/// Advantages of REINFORCE++ (Hu 2025): discounted returns of -`kl_coef` k1 + reward, minus the teacher's term,
/// whitened over the whole batch. The order of these operations is that of slime's `compute_advantages_and_returns`.
#[must_use]
pub fn reinforce_plus_plus(batch: &[Sequence], discounting: Discounting) -> Vec<Vec<f64>> {
    let mut advantages: Vec<Vec<f64>> =
        batch.iter().map(|sequence| discounted_returns(sequence, discounting)).collect();
    distill(&mut advantages, batch, discounting.opd_coef);
    whiten(&mut advantages);
    advantages
}

/// Subtracts `opd_coef * (logp_old - logp_teacher)` from the advantages before whitening. The returns that a critic
/// learns are not changed.
pub fn distill(advantages: &mut [Vec<f64>], batch: &[Sequence], opd_coef: f64) {
    for (advantages, sequence) in advantages.iter_mut().zip(batch) {
        for (advantage, &gap) in advantages.iter_mut().zip(sequence.gap.unwrap_or_default()) {
            *advantage -= opd_coef * f64::from(gap);
        }
    }
}

/// Returns of REINFORCE++ before whitening: `G_t = r_t + gamma G_{t+1}` over the response.
///
/// Masked tokens have no reward, but each is a step of the discount.
#[must_use]
pub fn discounted_returns(sequence: &Sequence, discounting: Discounting) -> Vec<f64> {
    let mut returns = token_rewards(sequence, discounting.kl_coef);
    for k in (1..returns.len()).rev() {
        let steps = sequence.positions[k] - sequence.positions[k - 1];
        returns[k - 1] += discounting.gamma.powi(steps as i32) * returns[k];
    }
    returns
}

/// Generalised advantage estimates (Schulman et al. 2016) at the trained tokens of one sequence.
///
/// `values` `[K]` were read before each of them. Masked tokens are not steps: the value after a trained token is the
/// value before the next trained one, and 0 after the last.
#[must_use]
pub fn generalized_advantages(sequence: &Sequence, values: &[f32], discounting: Discounting) -> Estimate {
    let Discounting { kl_coef, gamma, lambda, .. } = discounting;
    let mut advantages = token_rewards(sequence, kl_coef);
    let (mut next_value, mut next_advantage) = (0.0, 0.0);
    for (advantage, &value) in advantages.iter_mut().zip(values).rev() {
        let value = f64::from(value);
        let delta = *advantage + gamma * next_value - value;
        *advantage = delta + gamma * lambda * next_advantage;
        (next_value, next_advantage) = (value, *advantage);
    }
    let returns = advantages.iter().zip(values).map(|(advantage, &value)| advantage + f64::from(value)).collect();
    Estimate { advantages, returns }
}

/// (A - mean) / sqrt(unbiased variance + 1e-8) over every token of the batch; a single token becomes 0.
pub fn whiten(advantages: &mut [Vec<f64>]) {
    let count = advantages.iter().map(Vec::len).sum::<usize>() as f64;
    let mean = advantages.iter().flatten().sum::<f64>() / count;
    let squares: f64 = advantages.iter().flatten().map(|advantage| (advantage - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0).max(1.0) + VARIANCE_EPSILON).sqrt();
    for advantage in advantages.iter_mut().flatten() {
        *advantage = (*advantage - mean) / deviation;
    }
}

/// Loss of a critic (PPO, Schulman et al. 2017), all `[N]`: weighted max of (V - ret)^2 and the same with V kept
/// within `clip` of `values_old`.
#[must_use]
pub fn value_loss(
    values: &Tensor,
    values_old: &Tensor,
    returns: &Tensor,
    loss_weight: &Tensor,
    clip: f64,
) -> ValueLoss {
    let direct = (values - returns).square();
    let kept = values_old + (values - values_old).clamp(-clip, clip);
    let clipped = (kept - returns).square();
    ValueLoss {
        loss: (direct.maximum(&clipped) * loss_weight).sum(None::<Kind>),
        clipped: clipped.greater_tensor(&direct).detach().sum(Kind::Double),
    }
}

fn token_rewards(sequence: &Sequence, kl_coef: f64) -> Vec<f64> {
    let mut rewards: Vec<f64> = match sequence.kl {
        Some(kl) => kl.iter().map(|&k1| -kl_coef * f64::from(k1)).collect(),
        None => vec![0.0; sequence.positions.len()],
    };
    if let Some(last) = rewards.last_mut() {
        *last += sequence.reward;
    }
    rewards
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISCOUNTING: Discounting = Discounting { kl_coef: 0.1, gamma: 0.5, lambda: 0.8, opd_coef: 0.5 };

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{found} is not {expected}");
        }
    }

    #[test]
    fn masked_tokens_discount_and_earn_nothing() {
        // Rewards -0.1, -0.2, 1 - 0.4 at positions 0, 1, 3: G = [., -0.2 + 0.25 * 0.6, 0.6].
        let sequence = Sequence { reward: 1.0, positions: &[0, 1, 3], kl: Some(&[1.0, 2.0, 4.0]), gap: None };
        close(&discounted_returns(&sequence, DISCOUNTING), &[-0.125, -0.05, 0.6]);
        let plain = Sequence { kl: None, ..sequence };
        close(&discounted_returns(&plain, DISCOUNTING), &[0.125, 0.25, 1.0]);
    }

    #[test]
    fn whitening_spans_the_batch() {
        // Returns [0.5, 1] and [0]: mean 0.5, unbiased variance 0.25.
        let first = Sequence { reward: 1.0, positions: &[4, 5], kl: None, gap: None };
        let second = Sequence { reward: 0.0, positions: &[0], kl: None, gap: None };
        let found = reinforce_plus_plus(&[first, second], DISCOUNTING);
        close(&found[0], &[0.0, 0.999_999_98]);
        close(&found[1], &[-0.999_999_98]);
        let mut alone = vec![vec![3.0]];
        whiten(&mut alone);
        close(&alone[0], &[0.0]);
        whiten(&mut []);
    }

    #[test]
    fn distillation_comes_before_whitening() {
        // Returns [0.5, 1] and [0], less [0.5, 0] and [0.5]: [0, 1] and [-0.5], mean 1/6, unbiased variance 7/12.
        let first = Sequence { reward: 1.0, positions: &[4, 5], kl: None, gap: Some(&[1.0, 0.0]) };
        let second = Sequence { reward: 0.0, positions: &[0], kl: None, gap: Some(&[1.0]) };
        let found = reinforce_plus_plus(&[first, second], DISCOUNTING);
        let deviation = (7.0_f64 / 12.0 + VARIANCE_EPSILON).sqrt();
        close(&found[0], &[-1.0 / 6.0 / deviation, 5.0 / 6.0 / deviation]);
        close(&found[1], &[-2.0 / 3.0 / deviation]);
    }

    #[test]
    fn generalized_advantages_hold_by_hand() {
        // delta = [0.5 * 2 - 1, 0.5 * 4 - 2, 3 - 4] = [0, 0, -1]; A = [0.4^2 * -1, 0.4 * -1, -1].
        let sequence = Sequence { reward: 3.0, positions: &[0, 7, 9], kl: None, gap: None };
        let found = generalized_advantages(&sequence, &[1.0, 2.0, 4.0], DISCOUNTING);
        close(&found.advantages, &[-0.16, -0.4, -1.0]);
        close(&found.returns, &[0.84, 1.6, 3.0]);
    }

    #[test]
    fn generalized_advantages_of_examples_asymmetric_ppo_hold_by_hand() {
        // Two trained tokens with a masked one between them. delta = [0.5 - 0.4, 1 - 0.5]; A = [0.1 + lambda * 0.5, 0.5].
        let sequence = Sequence { reward: 1.0, positions: &[0, 2], kl: None, gap: None };
        for (lambda, first) in [(1.0, 0.6), (0.95, 0.575)] {
            let discounting = Discounting { kl_coef: 0.0, gamma: 1.0, lambda, opd_coef: 0.0 };
            let found = generalized_advantages(&sequence, &[0.4, 0.5], discounting);
            close(&found.advantages, &[first, 0.5]);
            close(&found.returns, &[first + 0.4, 1.0]);
        }
    }

    #[test]
    fn gaps_between_trained_tokens_do_not_reach_the_estimate() {
        let values = [0.3, 0.1];
        let near = Sequence { reward: 1.0, positions: &[0, 1], kl: None, gap: None };
        let far = Sequence { positions: &[0, 50], ..near };
        let estimate = |sequence| generalized_advantages(sequence, &values, DISCOUNTING);
        assert_eq!(estimate(&near), estimate(&far));
    }

    #[test]
    fn value_loss_takes_the_larger_error() {
        let values = Tensor::from_slice(&[1.0_f64, 1.0, 0.1]).set_requires_grad(true);
        let old = Tensor::from_slice(&[0.0_f64, 0.0, 0.0]);
        let returns = Tensor::from_slice(&[1.0_f64, 3.0, 1.0]);
        let weight = Tensor::from_slice(&[1.0_f64, 0.5, 2.0]);
        // Kept: 0.2, 0.2, 0.1. Errors: max(0, 0.64), max(4, 7.84), 0.81.
        let found = value_loss(&values, &old, &returns, &weight, 0.2);
        assert!((found.loss.double_value(&[]) - (0.64 + 3.92 + 1.62)).abs() < 1e-12);
        assert!((found.clipped.double_value(&[]) - 2.0).abs() < 1e-12);
        found.loss.backward();
        let gradient = Vec::<f64>::try_from(values.grad()).expect("it is a vector");
        close(&gradient, &[0.0, 0.0, -3.6]);
    }
}
