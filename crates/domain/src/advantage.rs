//! Advantages: how much better a rollout did than its group. Each rollout counts once, however many segments it has.

use forebay_wire::Advantage;

/// Added to the standard deviation, as in slime, so that equal rewards give 0 instead of a division by 0.
const STD_EPSILON: f64 = 1e-6;

/// Advantages of the rollouts of one group that count in the baseline, in the order of `rewards`.
///
/// - `grpo`: (R - mean) / (s + 1e-6), where s is the unbiased standard deviation (Shao et al. 2024); a single rollout
///   gets 0.
/// - `grpo_mean`: R - mean (Dr. GRPO, Liu et al. 2025).
/// - `rloo`: R - mean of the others (Ahmadian et al. 2024); a single rollout gets 0.
/// - `reward`: R. `none`: 0.
///
/// Each fits a 32-bit float. If sums of extreme rewards overflow, an advantage that is not a number becomes 0.
#[must_use]
pub fn advantages(estimator: Advantage, rewards: &[f64]) -> Vec<f64> {
    let fit = |advantage: f64| {
        // Adding 0 turns -0 into 0, as `Facts::reward` does.
        if advantage.is_nan() { 0.0 } else { advantage.clamp(f32::MIN.into(), f32::MAX.into()) + 0.0 }
    };
    estimate(estimator, rewards).into_iter().map(fit).collect()
}

fn estimate(estimator: Advantage, rewards: &[f64]) -> Vec<f64> {
    let voters = rewards.len() as f64;
    let sum: f64 = rewards.iter().sum();
    let mean = sum / voters;
    let alone = rewards.len() < 2;
    match estimator {
        Advantage::None => vec![0.0; rewards.len()],
        Advantage::Reward => rewards.to_vec(),
        Advantage::Grpo | Advantage::Rloo if alone => vec![0.0; rewards.len()],
        Advantage::GrpoMean => rewards.iter().map(|reward| reward - mean).collect(),
        Advantage::Rloo => rewards.iter().map(|reward| reward - (sum - reward) / (voters - 1.0)).collect(),
        Advantage::Grpo => {
            let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
            let std = (squares / (voters - 1.0)).sqrt();
            rewards.iter().map(|reward| (reward - mean) / (std + STD_EPSILON)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(estimator: Advantage, rewards: &[f64], expected: &[f64]) {
        let found = advantages(estimator, rewards);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{estimator:?}: {found} is not {expected}");
        }
    }

    #[test]
    fn worked_numbers_hold() {
        let rewards = [1.0, 0.0, 0.0, 0.5];
        close(Advantage::Grpo, &rewards, &[1.305_579_7, -0.783_347_8, -0.783_347_8, 0.261_115_9]);
        close(Advantage::GrpoMean, &rewards, &[0.625, -0.375, -0.375, 0.125]);
        close(Advantage::Rloo, &rewards, &[0.833_333_3, -0.5, -0.5, 0.166_666_7]);
        close(Advantage::Reward, &rewards, &rewards);
        close(Advantage::None, &rewards, &[0.0; 4]);
        close(Advantage::Grpo, &[1.0, 0.0], &[0.707_105_8, -0.707_105_8]);
    }

    #[test]
    fn absurd_rewards_give_finite_advantages() {
        for estimator in [Advantage::Grpo, Advantage::GrpoMean, Advantage::Rloo, Advantage::Reward] {
            let found = advantages(estimator, &[f64::MAX, f64::MAX, f64::MIN]);
            assert!(found.iter().all(|advantage| (*advantage as f32).is_finite()), "{estimator:?}: {found:?}");
        }
    }

    #[test]
    fn a_single_voter_has_nobody_to_compare_with() {
        for estimator in [Advantage::Grpo, Advantage::GrpoMean, Advantage::Rloo] {
            close(estimator, &[0.7], &[0.0]);
        }
        close(Advantage::Grpo, &[], &[]);
    }
}
