//! Tests of the objectives: numbers computed by hand, finite differences, and splits of a batch.

mod additions;
mod corrections;
mod gradients;
mod objectives;

use tch::{Device, Kind, Tensor};

use super::*;

/// Flat columns of one or more rows in 64-bit floats; every loss weight is 1.
pub(super) struct Batch {
    tokens: FlatTokens,
    logp: Tensor,
    entropy: Option<Tensor>,
    logp_reference: Option<Tensor>,
    logp_old: Option<Tensor>,
}

impl Batch {
    /// `rows` holds `(logp, logp_rollout, advantage)` per token.
    pub(super) fn new(rows: &[&[(f64, f64, f64)]]) -> Self {
        let flat: Vec<(f64, f64, f64)> = rows.iter().flat_map(|row| row.iter().copied()).collect();
        let row = (0_i64..).zip(rows).flat_map(|(place, row)| std::iter::repeat_n(place, row.len()));
        let ones = vec![1.0_f64; flat.len()];
        let zeros = vec![0_i64; flat.len()];
        Self {
            tokens: FlatTokens {
                targets: Tensor::from_slice(&zeros),
                row: Tensor::from_slice(&row.collect::<Vec<_>>()),
                rows: rows.len() as i64,
                position: Tensor::from_slice(&zeros),
                logp_rollout: Some(column(flat.iter().map(|token| token.1))),
                sampled: None,
                logp_teacher: None,
                advantage: column(flat.iter().map(|token| token.2)),
                loss_weight: Tensor::from_slice(&ones),
                temperature: None,
            },
            logp: column(flat.iter().map(|token| token.0)).set_requires_grad(true),
            entropy: None,
            logp_reference: None,
            logp_old: None,
        }
    }

    /// One row whose ratios to the rollout are `ratios`.
    pub(super) fn with_ratios(ratios: &[f64], advantages: &[f64]) -> Self {
        let row: Vec<_> = ratios.iter().zip(advantages).map(|(r, &a)| (-1.0 + r.ln(), -1.0, a)).collect();
        Self::new(&[&row])
    }

    pub(super) fn inputs(&self) -> LossInputs<'_> {
        LossInputs {
            tokens: &self.tokens,
            logp: &self.logp,
            entropy: self.entropy.as_ref(),
            logp_old: self.logp_old.as_ref().map_or(OldPolicy::Rollout, OldPolicy::Recomputed),
            logp_reference: self.logp_reference.as_ref(),
            logp_teacher: None,
            advantages: None,
        }
    }

    /// Losses per token, each computed by putting all weight on that token.
    pub(super) fn per_token(&mut self, config: &ObjectiveConfig) -> Vec<f64> {
        let count = self.logp.size()[0];
        let weight = self.tokens.loss_weight.shallow_clone();
        let losses = (0..count).map(|token| {
            let alone = weight.zeros_like();
            let _ = alone.narrow(0, token, 1).fill_(1.0);
            self.tokens.loss_weight = alone;
            self.evaluate(config).total.double_value(&[])
        });
        let losses = losses.collect();
        self.tokens.loss_weight = weight;
        losses
    }

    pub(super) fn evaluate(&self, config: &ObjectiveConfig) -> Loss {
        config.validate().expect("the test's configuration is valid");
        evaluate(config, &self.inputs()).expect("the test's batch has every column")
    }

    /// dL/dlogp.
    pub(super) fn gradient(&self, config: &ObjectiveConfig) -> Vec<f64> {
        numbers(&differentiate(config, &self.inputs()).expect("the test's batch has every column").logp)
    }
}

pub(super) fn config(json: &str) -> ObjectiveConfig {
    serde_json::from_str(json).expect("the test's configuration parses")
}

pub(super) fn column(numbers: impl IntoIterator<Item = f64>) -> Tensor {
    Tensor::from_slice(&numbers.into_iter().collect::<Vec<f64>>())
}

pub(super) fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).to_device(Device::Cpu)).expect("it is a vector")
}

pub(super) fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{found} is not {expected}");
    }
}
