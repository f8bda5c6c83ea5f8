//! The settings of an objective in the configuration of a run.

use serde::{Deserialize, Serialize};

use crate::returns::Discounting;
use crate::rows::Needs;

/// The objective and all its additional terms. Names and defaults are the usual ones in the literature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectiveConfig {
    /// The policy term.
    pub objective: Objective,
    /// Lower clip of the ratio, as a distance from 1.
    pub eps_low: f64,
    /// Upper clip of the ratio, as a distance from 1; `eps_low` if absent.
    pub eps_high: Option<f64>,
    /// Dual clip: bound of the loss divided by |A| for A < 0, above 1; disabled if absent.
    pub clip_c: Option<f64>,
    /// Denominator of the ratio. If absent: `recompute` with a correction, otherwise `rollout`, and for a row without
    /// `logprobs` the weights at the start of the step.
    pub old_logprobs: Option<OldLogprobs>,
    /// Off-policy correction of the policy term.
    pub correction: Option<Correction>,
    /// Weight of the entropy, which is subtracted from the loss.
    pub entropy_coef: f64,
    /// Weight in the loss of the divergence from the frozen reference.
    pub kl_loss_coef: f64,
    /// Estimator of the divergence.
    pub kl_loss_type: KlEstimator,
    /// On-policy distillation: weight of `logp_old - logp_teacher`, which is subtracted from the advantages.
    pub opd_coef: f64,
    /// Penalty on k1 in the rewards per token of `ppo` and `reinforce_plus_plus`.
    pub kl_coef: f64,
    /// Discount of `ppo` and `reinforce_plus_plus`.
    pub gamma: f64,
    /// Decay of the advantage estimates of `ppo`.
    pub lambda: f64,
    /// Whether the advantages of `ppo` are whitened over the batch; those of `reinforce_plus_plus` always are.
    pub whiten_advantages: bool,
    /// Clip of the critic's values around those of the batch.
    pub value_clip: f64,
}

/// The policy term of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// Clipped surrogate on the rows' advantages (Shao et al. 2024).
    #[default]
    Grpo,
    /// Clipped surrogate on advantages from a critic (Schulman et al. 2017).
    Ppo,
    /// Clipped surrogate with a ratio per sequence (Zheng et al. 2025), whose clips are 3e-4 and 4e-4.
    Gspo,
    /// Clipped ratios as detached weights (`MiniMax` 2025).
    Cispo,
    /// Policy gradient without a ratio (Williams 1992).
    Reinforce,
    /// Clipped surrogate on whitened discounted returns (Hu 2025).
    ReinforcePlusPlus,
    /// Maximum likelihood; advantages are not read.
    Sft,
}

/// The source of `logp_old`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogprobs {
    /// The rows: the ratio is relative to the behaviour policy, and its clip corrects stale data.
    Rollout,
    /// The weights at the start of the step.
    Recompute,
}

/// Estimator of a divergence (Schulman 2020).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// d; not accepted as a loss.
    K1,
    /// d^2 / 2.
    K2,
    /// exp(-d) - 1 + d.
    K3,
    /// k3, clamped to [-10, 10].
    #[default]
    LowVarKl,
}

/// Factor of the policy term from `w = exp(logp_old - logp_rollout)`, detached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Correction {
    /// Truncated importance sampling.
    Tis(Tis),
    /// `AReaL`'s decoupled objective.
    Decoupled(Decoupled),
    /// Masked importance sampling.
    Mis(Mis),
}

/// Bounds of w.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tis {
    /// Smallest factor.
    pub low: f64,
    /// Largest factor.
    pub high: f64,
}

/// Cap of w.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decoupled {
    /// Tokens whose w is above this get factor 0.
    pub cap: f64,
}

/// Bounds of w, of a token or its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mis {
    /// Level at which w is computed.
    pub level: MisLevel,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
    /// What happens to a w outside the bounds.
    pub outside: MisOutside,
    /// A token whose own w is below this sets the factor of its whole sequence to 0; 0 disables this.
    pub veto: f64,
}

/// Level at which a weight is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MisLevel {
    /// Per token.
    #[default]
    Token,
    /// Per sequence: the product over its trained tokens.
    Product,
    /// Per sequence: the geometric mean over its trained tokens.
    Geometric,
}

/// What happens to a weight outside its bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MisOutside {
    /// The weight is set to the bound.
    #[default]
    Clip,
    /// The weight is set to 0.
    Zero,
}

/// The objective cannot be trained, or not with these rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct ConfigError {
    /// The field's name in the configuration.
    pub field: &'static str,
    /// Why it is refused.
    pub reason: String,
}

impl Default for ObjectiveConfig {
    /// GRPO with a clip of 0.2 and no additional terms.
    fn default() -> Self {
        Self {
            objective: Objective::default(),
            eps_low: 0.2,
            eps_high: None,
            clip_c: None,
            old_logprobs: None,
            correction: None,
            entropy_coef: 0.0,
            kl_loss_coef: 0.0,
            kl_loss_type: KlEstimator::default(),
            opd_coef: 0.0,
            kl_coef: 0.0,
            gamma: 1.0,
            lambda: 1.0,
            whiten_advantages: false,
            value_clip: 0.2,
        }
    }
}

impl Default for Tis {
    fn default() -> Self {
        Self { low: 0.0, high: 2.0 }
    }
}

impl Default for Decoupled {
    fn default() -> Self {
        Self { cap: 5.0 }
    }
}

impl Default for Mis {
    fn default() -> Self {
        Self { level: MisLevel::default(), low: 0.5, high: 2.0, outside: MisOutside::default(), veto: 1e-4 }
    }
}

impl ObjectiveConfig {
    /// Refuses numbers outside their ranges, and terms that the objective would ignore.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        let shaped = matches!(self.objective, Objective::Ppo | Objective::ReinforcePlusPlus);
        let sft = self.objective == Objective::Sft;
        require(self.kl_coef == 0.0 || shaped, "kl_coef", "only ppo and reinforce_plus_plus have rewards per token")?;
        require(
            !self.whiten_advantages || self.objective == Objective::Ppo,
            "whiten_advantages",
            "only ppo leaves it open",
        )?;
        require(self.opd_coef == 0.0 || !sft, "opd_coef", "sft reads no advantages")?;
        require(self.clip_c.is_none() || self.clips(), "clip_c", "the objective does not clip its loss")?;
        require(
            self.kl_loss_coef == 0.0 || self.kl_loss_type != KlEstimator::K1,
            "kl_loss_type",
            "the gradient of k1 has zero expectation: as a loss take k2, k3 or low_var_kl",
        )?;
        if self.correction.is_some() {
            require(!sft, "correction", "sft has no behaviour policy to correct for")?;
            require(
                self.old_logprobs != Some(OldLogprobs::Rollout),
                "correction",
                "needs old_logprobs = \"recompute\": with \"rollout\" the ratio already is against the behaviour policy",
            )?;
        }
        Ok(())
    }

    /// Columns that the objective reads on every trained row; `frozen_teacher` means that a model replaces the teacher
    /// column.
    #[must_use]
    pub fn needs(&self, frozen_teacher: bool) -> Needs {
        let rollout = self.old_logprobs == Some(OldLogprobs::Rollout) && self.reads_old_logprobs();
        let logprobs = if self.correction.is_some() {
            Some("objective.correction")
        } else {
            rollout.then_some("objective.old_logprobs = \"rollout\"")
        };
        Needs {
            logprobs,
            teacher_logprobs: (self.opd_coef != 0.0 && !frozen_teacher).then_some("objective.opd_coef"),
            reward: self.needs_whole_batch().then_some("the objective"),
        }
    }

    /// The source of `logp_old` for rows with `logprobs`.
    #[must_use]
    pub fn old_logprobs(&self) -> OldLogprobs {
        match self.old_logprobs {
            Some(chosen) => chosen,
            None if self.correction.is_some() => OldLogprobs::Recompute,
            None => OldLogprobs::Rollout,
        }
    }

    /// Clip of the ratio above 1.
    #[must_use]
    pub fn eps_high(&self) -> f64 {
        self.eps_high.unwrap_or(self.eps_low)
    }

    /// Whether `logp_old` affects the result.
    #[must_use]
    pub fn reads_old_logprobs(&self) -> bool {
        self.opd_coef != 0.0 || !matches!(self.objective, Objective::Reinforce | Objective::Sft)
    }

    /// Whether advantages need the whole batch before its first microbatch, and so a separate pass that recomputes
    /// log-probabilities.
    #[must_use]
    pub fn needs_whole_batch(&self) -> bool {
        matches!(self.objective, Objective::Ppo | Objective::ReinforcePlusPlus)
    }

    /// How rewards are distributed over tokens.
    #[must_use]
    pub fn discounting(&self) -> Discounting {
        Discounting { kl_coef: self.kl_coef, gamma: self.gamma, lambda: self.lambda, opd_coef: self.opd_coef }
    }

    fn clips(&self) -> bool {
        matches!(self.objective, Objective::Grpo | Objective::Ppo | Objective::Gspo | Objective::ReinforcePlusPlus)
    }

    fn check_ranges(&self) -> Result<(), ConfigError> {
        let coefficients = [
            ("eps_low", self.eps_low),
            ("eps_high", self.eps_high()),
            ("entropy_coef", self.entropy_coef),
            ("kl_loss_coef", self.kl_loss_coef),
            ("opd_coef", self.opd_coef),
            ("kl_coef", self.kl_coef),
        ];
        for (field, value) in coefficients {
            require(value.is_finite() && value >= 0.0, field, &format!("is {value}, must be finite and at least 0"))?;
        }
        for (field, value) in [("gamma", self.gamma), ("lambda", self.lambda)] {
            require((0.0..=1.0).contains(&value), field, &format!("is {value}, must be between 0 and 1"))?;
        }
        let clip_c = self.clip_c.unwrap_or(f64::MAX);
        require(clip_c.is_finite() && clip_c > 1.0, "clip_c", &format!("is {clip_c}, must be finite and above 1"))?;
        let value_clip = self.value_clip;
        let reason = format!("is {value_clip}, must be finite and above 0");
        require(value_clip.is_finite() && value_clip > 0.0, "value_clip", &reason)?;
        self.correction.map_or(Ok(()), Correction::check)
    }
}

impl Correction {
    fn check(self) -> Result<(), ConfigError> {
        let (low, high) = match self {
            Self::Tis(Tis { low, high }) | Self::Mis(Mis { low, high, .. }) => (low, high),
            Self::Decoupled(Decoupled { cap }) => (0.0, cap),
        };
        let reason = format!("bounds {low} and {high} must be finite, at least 0 and ascending");
        require(low >= 0.0 && high > low && high.is_finite(), "correction", &reason)?;
        match self {
            Self::Mis(Mis { veto, .. }) => {
                let reason = format!("veto is {veto}, must be at least 0 and below 1");
                require((0.0..1.0).contains(&veto), "correction", &reason)
            }
            Self::Tis(_) | Self::Decoupled(_) => Ok(()),
        }
    }
}

fn require(holds: bool, field: &'static str, reason: &str) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError { field, reason: reason.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ObjectiveConfig, serde_json::Error> {
        serde_json::from_str(json)
    }

    fn refused(json: &str) -> String {
        let error = parse(json).expect("it parses").validate().expect_err("it cannot be trained");
        format!("{error}")
    }

    #[test]
    fn an_empty_configuration_is_grpo() {
        let config = parse("{}").expect("every field has a default");
        assert_eq!(config, ObjectiveConfig::default());
        config.validate().expect("the default trains");
        assert!((config.eps_high() - 0.2).abs() < f64::EPSILON);
    }

    #[test]
    fn corrections_take_their_defaults() {
        let config = parse(r#"{"correction": {"kind": "mis", "level": "geometric"}}"#).expect("it parses");
        let expected = Mis { level: MisLevel::Geometric, ..Mis::default() };
        assert_eq!(config.correction, Some(Correction::Mis(expected)));
        config.validate().expect("old_logprobs follows the correction");
        assert!(parse(r#"{"correction": {"kind": "tis", "cap": 2}}"#).is_err(), "tis has no cap");
        assert!(parse(r#"{"eps": 0.2}"#).is_err(), "the field is unknown");
    }

    #[test]
    fn refusals_name_the_field() {
        for (json, field) in [
            (r#"{"eps_low": -0.1}"#, "eps_low"),
            (r#"{"eps_high": -0.1}"#, "eps_high"),
            (r#"{"clip_c": 1.0}"#, "clip_c"),
            (r#"{"objective": "cispo", "clip_c": 3.0}"#, "clip_c"),
            (r#"{"gamma": 1.5}"#, "gamma"),
            (r#"{"value_clip": 0.0}"#, "value_clip"),
            (r#"{"kl_coef": 0.1}"#, "kl_coef"),
            (r#"{"whiten_advantages": true}"#, "whiten_advantages"),
            (r#"{"objective": "sft", "opd_coef": 1.0}"#, "opd_coef"),
            (r#"{"objective": "sft", "correction": {"kind": "tis"}}"#, "correction"),
            (r#"{"old_logprobs": "rollout", "correction": {"kind": "tis"}}"#, "correction"),
            (r#"{"correction": {"kind": "tis", "low": 3.0}}"#, "correction"),
            (r#"{"correction": {"kind": "decoupled", "cap": 0.0}}"#, "correction"),
            (r#"{"correction": {"kind": "mis", "veto": 1.0}}"#, "correction"),
            (r#"{"kl_loss_coef": 0.1, "kl_loss_type": "k1"}"#, "kl_loss_type"),
        ] {
            let error = refused(json);
            assert!(error.starts_with(&format!("{field}: ")), "{json}: {error}");
        }
    }

    #[test]
    fn old_logprobs_follow_the_correction() {
        let grpo = ObjectiveConfig::default();
        assert_eq!(grpo.old_logprobs(), OldLogprobs::Rollout);
        let corrected = ObjectiveConfig { correction: Some(Correction::Tis(Tis::default())), ..grpo.clone() };
        assert_eq!(corrected.old_logprobs(), OldLogprobs::Recompute);
        let chosen = ObjectiveConfig { old_logprobs: Some(OldLogprobs::Recompute), ..grpo };
        assert_eq!(chosen.old_logprobs(), OldLogprobs::Recompute);
    }

    #[test]
    fn columns_that_every_row_must_have_follow_the_objective() {
        let needs = |json: &str, frozen_teacher| {
            let Needs { logprobs, teacher_logprobs, reward } = parse(json).expect("it parses").needs(frozen_teacher);
            (logprobs.is_some(), teacher_logprobs.is_some(), reward.is_some())
        };
        assert_eq!(needs("{}", false), (false, false, false));
        assert_eq!(needs(r#"{"old_logprobs": "rollout"}"#, false), (true, false, false));
        assert_eq!(needs(r#"{"old_logprobs": "rollout", "objective": "sft"}"#, false), (false, false, false));
        assert_eq!(needs(r#"{"correction": {"kind": "tis"}}"#, false), (true, false, false));
        assert_eq!(needs(r#"{"opd_coef": 1.0}"#, false), (false, true, false));
        assert_eq!(needs(r#"{"opd_coef": 1.0}"#, true), (false, false, false));
        assert_eq!(needs(r#"{"objective": "ppo"}"#, false), (false, false, true));
    }
}
