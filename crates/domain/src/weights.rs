//! Loss weights: fixed when a batch is cut, so that a trainer's sum is the same for every split into microbatches.
//!
//! `loss = sum_i loss_weight_i * sum_t mask_it * l_it`, over the samples i of a batch and their response tokens t.

use forebay_wire::LossWeighting;

/// The normalisation of one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchWeights {
    /// The mean that the loss is.
    pub weighting: LossWeighting,
    /// L of `constant`; not used by the other weightings.
    pub constant: f64,
    /// P: groups of the batch.
    pub groups: u64,
    /// G: kept and masked rollouts of the batch.
    pub rollouts: u64,
    /// N: sum over rollouts of max(1, samples with a trained token).
    pub samples: u64,
    /// Sum of the masks of the whole batch.
    pub trained_tokens: u64,
}

/// The numbers of one rollout that weights depend on, with the mask as delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutMask {
    /// M of the rollout: trained tokens over its samples.
    pub trained_tokens: u64,
    /// Samples with a trained token.
    pub trained_samples: u64,
    /// M of its group: trained tokens over its rollouts.
    pub group_tokens: u64,
}

impl BatchWeights {
    /// Weight of every trained token of a sample with `sample_tokens` trained tokens.
    ///
    /// - `rollout_mean`: 1 / (G max(1, M of the rollout)) (slime).
    /// - `turn_mean`: 1 / (G T max(1, M of the sample)), T = max(1, trained samples of the rollout).
    /// - `sample_mean`: 1 / (N max(1, M of the sample)) (GRPO as first published).
    /// - `token_mean`: 1 / max(1, M of the batch) (DAPO).
    /// - `prompt_mean`: 1 / (P max(1, M of the group)).
    /// - `constant`: 1 / (G L) (Dr. GRPO).
    #[must_use]
    pub fn of_sample(&self, rollout: RolloutMask, sample_tokens: u64) -> f64 {
        let at_least_one = |count: u64| count.max(1) as f64;
        let rollouts = at_least_one(self.rollouts);
        let divisor = match self.weighting {
            LossWeighting::RolloutMean => rollouts * at_least_one(rollout.trained_tokens),
            LossWeighting::TurnMean => rollouts * at_least_one(rollout.trained_samples) * at_least_one(sample_tokens),
            LossWeighting::SampleMean => at_least_one(self.samples) * at_least_one(sample_tokens),
            LossWeighting::TokenMean => at_least_one(self.trained_tokens),
            LossWeighting::PromptMean => at_least_one(self.groups) * at_least_one(rollout.group_tokens),
            LossWeighting::Constant => rollouts * self.constant,
        };
        1.0 / divisor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loss of a batch with the given per-token losses by rollout and sample, where every token is trained. The
    /// groups have so many rollouts.
    fn loss(weighting: LossWeighting, groups: &[usize], rollouts: &[&[&[f64]]]) -> f64 {
        let tokens_of = |samples: &[&[f64]]| samples.iter().map(|sample| sample.len() as u64).sum::<u64>();
        let weights = BatchWeights {
            weighting,
            constant: 10.0,
            groups: groups.len() as u64,
            rollouts: rollouts.len() as u64,
            samples: rollouts.iter().map(|samples| samples.len() as u64).sum(),
            trained_tokens: rollouts.iter().map(|samples| tokens_of(samples)).sum(),
        };
        let (mut loss, mut rest) = (0.0, rollouts);
        for &size in groups {
            let group;
            (group, rest) = rest.split_at(size);
            let group_tokens = group.iter().map(|samples| tokens_of(samples)).sum();
            for samples in group {
                let (trained_tokens, trained_samples) = (tokens_of(samples), samples.len() as u64);
                let mask = RolloutMask { trained_tokens, trained_samples, group_tokens };
                for sample in *samples {
                    loss += weights.of_sample(mask, sample.len() as u64) * sample.iter().sum::<f64>();
                }
            }
        }
        assert!(rest.is_empty());
        loss
    }

    #[test]
    fn worked_numbers_with_equal_lengths_hold() {
        let batch: &[&[&[f64]]] = &[&[&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], &[7.0, 8.0, 9.0]], &[&[10.0, 11.0, 12.0]]];
        for (weighting, expected) in [
            (LossWeighting::RolloutMean, 8.0),
            (LossWeighting::TurnMean, 8.0),
            (LossWeighting::SampleMean, 6.5),
            (LossWeighting::TokenMean, 6.5),
            (LossWeighting::PromptMean, 6.5),
        ] {
            assert!((loss(weighting, &[2], batch) - expected).abs() < 1e-9, "{weighting:?}");
        }
    }

    #[test]
    fn worked_numbers_with_unequal_lengths_hold() {
        let batch: &[&[&[f64]]] = &[&[&[1.0], &[2.0, 3.0, 4.0]], &[&[5.0, 6.0]]];
        for (weighting, expected) in [
            (LossWeighting::RolloutMean, 4.0),
            (LossWeighting::TurnMean, 3.75),
            (LossWeighting::SampleMean, 9.5 / 3.0),
            (LossWeighting::TokenMean, 3.5),
            (LossWeighting::PromptMean, 3.5),
            (LossWeighting::Constant, 1.05),
        ] {
            assert!((loss(weighting, &[2], batch) - expected).abs() < 1e-9, "{weighting:?}");
        }
    }

    #[test]
    fn worked_numbers_of_two_groups_hold() {
        let batch: &[&[&[f64]]] = &[&[&[1.0], &[2.0, 3.0, 4.0]], &[&[5.0, 6.0]], &[&[7.0]]];
        for (weighting, expected) in
            [(LossWeighting::RolloutMean, 5.0), (LossWeighting::TokenMean, 4.0), (LossWeighting::PromptMean, 5.25)]
        {
            assert!((loss(weighting, &[2, 1], batch) - expected).abs() < 1e-9, "{weighting:?}");
        }
    }
}
