//! Learning rates as a pure function of the step, so that a resumed run needs only its step number.

use serde::{Deserialize, Serialize};

use super::OptimizerError;

/// Warm-up followed by a decay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Learning rate after the warm-up.
    pub peak: f64,
    /// Learning rate at the end and after it; not used by a constant schedule.
    pub floor: f64,
    /// Shape of the decay.
    pub decay: Decay,
    /// Steps of linear warm-up; step 0 has 1 / `warmup_steps` of the peak.
    pub warmup_steps: u64,
    /// Step at which the floor is reached, including the warm-up.
    pub total_steps: u64,
}

/// Shape of the decay from peak to floor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// No decay.
    #[default]
    Constant,
    /// A linear decay.
    Linear,
    /// Half a period of a cosine (Loshchilov & Hutter 2017).
    Cosine,
}

impl Default for Schedule {
    /// A constant rate of 1e-6.
    fn default() -> Self {
        Self { peak: 1e-6, floor: 0.0, decay: Decay::Constant, warmup_steps: 0, total_steps: 0 }
    }
}

impl Schedule {
    /// Refuses rates that are not finite or negative, and a decay that ends before it begins.
    pub fn validate(&self) -> Result<(), OptimizerError> {
        let refuse = |field, value, range| Err(OptimizerError::Config { field, value, range });
        if !(self.peak.is_finite() && self.peak >= 0.0) {
            return refuse("peak", self.peak, "finite and at least 0");
        }
        if !(0.0..=self.peak).contains(&self.floor) {
            return refuse("floor", self.floor, "between 0 and peak");
        }
        if self.decay != Decay::Constant && self.total_steps <= self.warmup_steps {
            return refuse("total_steps", self.total_steps as f64, "above warmup_steps");
        }
        Ok(())
    }

    /// Learning rate of step `step`, counted from 0.
    #[must_use]
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / length).min(1.0);
        let share = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.floor + (self.peak - self.floor) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay) -> Vec<f64> {
        let schedule = Schedule { peak: 1.0, floor: 0.2, decay, warmup_steps: 2, total_steps: 6 };
        schedule.validate().expect("it is valid");
        [0, 1, 2, 4, 6, 100].map(|step| schedule.learning_rate(step)).to_vec()
    }

    #[test]
    fn rates_hold_by_hand() {
        let close = |found: Vec<f64>, expected: [f64; 6]| {
            assert!(found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-12), "{found:?}");
        };
        close(rates(Decay::Constant), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
        close(rates(Decay::Linear), [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]);
        close(rates(Decay::Cosine), [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]);
        let quarter = Schedule { peak: 1.0, decay: Decay::Cosine, total_steps: 4, ..Schedule::default() };
        assert!((quarter.learning_rate(1) - 0.853_553_390_593).abs() < 1e-12);
    }

    #[test]
    fn a_decay_that_ends_before_it_begins_is_refused() {
        let schedule = Schedule { decay: Decay::Linear, warmup_steps: 5, total_steps: 5, ..Schedule::default() };
        let error = schedule.validate().expect_err("nothing is left for the decay");
        assert_eq!(error.to_string(), "total_steps is 5, must be above warmup_steps");
    }
}
