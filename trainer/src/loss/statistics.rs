//! Statistics of a step's loss: sums on the device, added over microbatches and read once at the end.

use serde::Serialize;
use tch::{Device, Kind, Tensor, no_grad};

use super::{Corrected, penalty};
use crate::microbatch::Sampled;

/// Columns that are summed over tokens. Each is divided by its own number of tokens.
const COLUMNS: usize = 8;

/// The column that skips the tokens of rows without behaviour log-probabilities.
const KL_ROLLOUT: usize = 2;

/// Sums over the tokens of some microbatches.
#[derive(Debug)]
pub struct LossStatistics {
    /// The loss, and then the columns: `[1 + COLUMNS]`, f64.
    sums: Tensor,
    counts: [i64; COLUMNS],
    /// A scalar, f64.
    ratio_max: Tensor,
}

/// Statistics of a step. All except the loss are unweighted means over the trained tokens that have them; `None` if no
/// token has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepStatistics {
    /// Weighted sum over tokens.
    pub loss: f64,
    /// Number of tokens with mask 1.
    pub trained_tokens: i64,
    /// Mean advantage.
    pub advantage_mean: Option<f64>,
    /// Share of tokens for which the clipped value was used.
    pub clip_fraction: Option<f64>,
    /// k3 estimate of KL(rollout || policy) in nats, sampled by the rollout: `exp(d) - 1 - d` with `d = logp -
    /// logp_rollout`.
    pub kl_rollout: Option<f64>,
    /// KL to the reference in nats, with the estimator of the loss.
    pub kl_reference: Option<f64>,
    /// Entropy in nats.
    pub entropy: Option<f64>,
    /// Mean ratio to the old policy.
    pub ratio_mean: Option<f64>,
    /// Largest ratio to the old policy.
    pub ratio_max: Option<f64>,
    /// Mean factor of the off-policy correction.
    pub correction_mean: Option<f64>,
    /// Share of tokens whose factor was set to 0 by the correction's rules.
    pub correction_zeroed: Option<f64>,
}

/// The values of one microbatch.
pub(super) struct Observed<'a> {
    pub(super) total: &'a Tensor,
    pub(super) logp: &'a Tensor,
    pub(super) logp_rollout: Option<&'a Tensor>,
    pub(super) sampled: Option<&'a Sampled>,
    pub(super) entropy: Option<&'a Tensor>,
    pub(super) advantage: &'a Tensor,
    pub(super) ratio: &'a Tensor,
    pub(super) clipped: Option<&'a Tensor>,
    pub(super) kl_reference: Option<&'a Tensor>,
    pub(super) corrected: Option<&'a Corrected>,
}

impl LossStatistics {
    pub(super) fn of(observed: &Observed) -> Self {
        no_grad(|| {
            let kl_rollout = observed.logp_rollout.map(|rollout| {
                let kl = penalty::k3(&(rollout - observed.logp));
                observed.sampled.map_or_else(|| kl.shallow_clone(), |sampled| &kl * sampled.mask.to_kind(kl.kind()))
            });
            let columns: [Option<&Tensor>; COLUMNS] = [
                Some(observed.advantage),
                observed.clipped,
                kl_rollout.as_ref(),
                observed.kl_reference,
                observed.entropy,
                Some(observed.ratio),
                observed.corrected.map(|corrected| &corrected.weight),
                observed.corrected.map(|corrected| &corrected.zeroed),
            ];
            let nothing = || Tensor::zeros([], (Kind::Double, observed.logp.device()));
            let mut sums = vec![observed.total.to_kind(Kind::Double)];
            sums.extend(columns.map(|column| column.map_or_else(nothing, |column| column.sum(Kind::Double))));
            let mut counts = columns.map(|column| column.map_or(0, |column| column.numel() as i64));
            if let Some(sampled) = observed.sampled {
                counts[KL_ROLLOUT] = sampled.count;
            }
            Self {
                sums: Tensor::stack(&sums, 0).detach(),
                counts,
                ratio_max: observed.ratio.max().to_kind(Kind::Double).detach(),
            }
        })
    }

    /// Sums of no microbatch, on the device of the microbatches that will be added.
    #[must_use]
    pub fn empty(device: Device) -> Self {
        Self {
            sums: Tensor::zeros([1 + COLUMNS as i64], (Kind::Double, device)),
            counts: [0; COLUMNS],
            ratio_max: Tensor::zeros([], (Kind::Double, device)),
        }
    }

    /// Adds the sums of another microbatch of the same step.
    #[must_use]
    pub fn add(&self, other: &Self) -> Self {
        Self {
            sums: &self.sums + &other.sums,
            counts: std::array::from_fn(|column| self.counts[column] + other.counts[column]),
            ratio_max: self.ratio_max.maximum(&other.ratio_max),
        }
    }

    /// Copies the sums from the device and divides them.
    #[must_use]
    pub fn finish(&self) -> StepStatistics {
        let sum = |column: usize| self.sums.double_value(&[column as i64]);
        let mean = |column: usize| (self.counts[column] > 0).then(|| sum(column + 1) / self.counts[column] as f64);
        StepStatistics {
            loss: sum(0),
            trained_tokens: self.counts[0],
            advantage_mean: mean(0),
            clip_fraction: mean(1),
            kl_rollout: mean(KL_ROLLOUT),
            kl_reference: mean(3),
            entropy: mean(4),
            ratio_mean: mean(5),
            ratio_max: (self.counts[5] > 0).then(|| self.ratio_max.double_value(&[])),
            correction_mean: mean(6),
            correction_zeroed: mean(7),
        }
    }
}
