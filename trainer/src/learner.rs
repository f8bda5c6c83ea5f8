//! One optimizer step: computes the gradients of a batch and updates the weights with them.
//!
//! The two are separate because the ack comes between them. Gradients are added over microbatches of whole rows. The
//! weights of the loss contain the normalisation, so every split gives the same sum.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use forebay_client::wire::{Advantage, AdvantageName, PolicyRules, Requirement};
use tch::{Device, Tensor, no_grad};

use crate::{
    config::{ConfigError, MemoryConfig, TrainConfig},
    head::{self, Entropy, HeadInput, HeadOptions},
    loss::{
        self, LossError, LossInputs, LossStatistics, Objective, ObjectiveConfig, OldLogprobs, OldPolicy, StepStatistics,
    },
    microbatch::{Microbatch, plan},
    model::{ComputeKind, Decoder, LoadError, Parameters},
    optimizer::{AdamW, OptimizerConfig, OptimizerError, ParameterState, Schedule},
    returns::{self, Sequence},
    rows::{Expected, GroupId, Row, Rows},
    state::{Checkpoint, State, StateError},
};

/// Models, optimizers and the objective.
#[derive(Debug)]
pub struct Learner {
    step: i64,
    objective: ObjectiveConfig,
    memory: MemoryConfig,
    /// Longest sequence that is trained, in tokens.
    tokens_max: usize,
    policy: Trained,
    critic: Option<Trained>,
    reference: Option<Decoder>,
    teacher: Option<Decoder>,
}

/// A trained model.
#[derive(Debug)]
struct Trained {
    /// Prefix of its tensors' names in a checkpoint.
    name: &'static str,
    decoder: Decoder,
    optimizer: AdamW,
    schedule: Schedule,
    /// Checkpoint whose configuration and tokenizer are copied.
    base: PathBuf,
}

/// Figures of a batch's gradients. The tensors are with the parameters.
#[derive(Clone, Copy, Debug)]
pub struct StepOutcome {
    /// Statistics of the loss; `None` for a batch that trains nothing.
    pub statistics: Option<StepStatistics>,
    /// Global norm of the gradients of policy and critic together.
    pub gradient_norm: f64,
    /// Norm of the gradients of the policy.
    pub policy_gradient_norm: f64,
    /// Norm of the gradients of the critic, if there is one.
    pub critic_gradient_norm: Option<f64>,
    /// Loss of the critic.
    pub value_loss: Option<f64>,
    /// Learning rate of the policy in this step.
    pub learning_rate: f64,
}

impl StepOutcome {
    /// Whether the weights may be updated with these gradients.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let losses = [self.statistics.map(|statistics| statistics.loss), self.value_loss];
        self.gradient_norm.is_finite() && losses.into_iter().flatten().all(f64::is_finite)
    }
}

/// Why a step cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum LearnerError {
    /// A model cannot be loaded.
    #[error("the model in {} cannot be loaded", path.display())]
    Model {
        /// Its folder.
        path: PathBuf,
        /// The cause.
        source: LoadError,
    },
    /// The configuration cannot be used on this machine.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The optimizer's state of a checkpoint is NaN or infinite.
    #[error("the {what} in {} is not finite: go on from an older checkpoint", path.display())]
    NotFinite {
        /// The tensor.
        what: String,
        /// The folder.
        path: PathBuf,
    },
    /// An update made the weights or the optimizer's state NaN or infinite.
    #[error(
        "the {model}'s {what} is not finite after step {step}: training has diverged. Nothing of this step is saved or \
         published. Lower schedule.peak, set optimizer.clip_norm or choose another objective, and start again: training \
         goes on from the last checkpoint"
    )]
    Diverged {
        /// The model.
        model: &'static str,
        /// The tensor.
        what: String,
        /// The step.
        step: i64,
    },
    /// Two models have different vocabularies.
    #[error("the {role} in {} has {found} token ids, the policy {expected}: they must have the same vocabulary", path.display())]
    Vocabulary {
        /// The role of the model.
        role: &'static str,
        /// Its folder.
        path: PathBuf,
        /// Its vocabulary.
        found: i64,
        /// The policy's.
        expected: i64,
    },
    /// A column is missing.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// The optimizer refused.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// The last checkpoint cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
}

impl Learner {
    /// Starts from the configured model, or continues from a checkpoint.
    pub fn open(config: &TrainConfig, checkpoint: Option<&Checkpoint>) -> Result<Self, LearnerError> {
        let device = config.device()?;
        let compute = config.compute(device);
        let model = checkpoint.map_or_else(|| config.model.clone(), Checkpoint::model);
        let decoder = load(&model, device, compute)?;
        let policy = decoder.config().clone();
        let alike = |role, path: &Path, other: &Decoder| same_vocabulary(role, path, other, policy.vocab_size);
        let frozen = |role, path: &Option<PathBuf>| match path {
            Some(path) => {
                let decoder = load(path, device, compute)?;
                alike(role, path, &decoder)?;
                Ok::<_, LearnerError>(Some(decoder))
            }
            None => Ok(None),
        };
        let critic = match &config.critic {
            Some(critic) => {
                let base = critic.model.clone().unwrap_or_else(|| config.model.clone());
                let folder = checkpoint.and_then(Checkpoint::critic).unwrap_or_else(|| base.clone());
                let decoder = Decoder::load_critic(&folder, device, compute)
                    .map_err(|source| LearnerError::Model { path: folder.clone(), source })?;
                alike("critic", &folder, &decoder)?;
                Some(Trained::new("critic", decoder, critic.optimizer, critic.schedule, base)?)
            }
            None => None,
        };
        let mut learner = Self {
            step: 0,
            objective: config.objective.clone(),
            memory: config.memory,
            tokens_max: 0,
            policy: Trained::new("policy", decoder, config.optimizer, config.schedule, config.model.clone())?,
            critic,
            reference: frozen("reference", &config.reference)?,
            teacher: frozen("teacher", &config.teacher)?,
        };
        learner.tokens_max = learner.positions_max().min(config.data.tokens_max.unwrap_or(usize::MAX));
        if let Some(checkpoint) = checkpoint {
            learner.restore(checkpoint, device)?;
        }
        Ok(learner)
    }

    /// Longest sequence that every model was trained on.
    fn positions_max(&self) -> usize {
        let critic = self.critic.as_ref().map(|critic| &critic.decoder);
        let models = [Some(&self.policy.decoder), critic, self.reference.as_ref(), self.teacher.as_ref()];
        let positions = models.into_iter().flatten().map(|model| model.config().max_position_embeddings as usize);
        positions.min().unwrap_or(usize::MAX)
    }

    fn restore(&mut self, checkpoint: &Checkpoint, device: Device) -> Result<(), LearnerError> {
        let mut tensors: BTreeMap<String, Tensor> = checkpoint.optimizer(device)?.into_iter().collect();
        for model in std::iter::once(&mut self.policy).chain(self.critic.as_mut()) {
            model.restore(checkpoint.optimizer_steps, &mut tensors)?;
            if let Some(what) = model.optimizer.not_finite() {
                return Err(LearnerError::NotFinite { what, path: checkpoint.folder().to_owned() });
            }
        }
        self.step = checkpoint.step;
        Ok(())
    }

    /// Last optimizer step.
    #[must_use]
    pub fn step(&self) -> i64 {
        self.step
    }

    /// The columns that rows need here.
    #[must_use]
    pub fn expected(&self) -> Expected {
        Expected {
            vocabulary: self.policy.decoder.config().vocab_size as usize,
            tokens_max: self.tokens_max,
            needs: self.objective.needs(self.teacher.is_some()),
        }
    }

    /// Describes what the policy's rules permit although the objective cannot train on it well.
    #[must_use]
    pub fn mismatches(&self, rules: &PolicyRules) -> Vec<String> {
        let needs = self.expected().needs;
        let columns = [
            (needs.logprobs, Requirement::Logprobs, "logprobs"),
            (needs.teacher_logprobs, Requirement::TeacherLogprobs, "teacher_logprobs"),
        ];
        let mut found: Vec<String> = columns
            .into_iter()
            .filter(|(_, requirement, _)| !rules.require.contains(requirement))
            .filter_map(|(reader, _, column)| {
                let reader = reader?;
                Some(format!(
                    "{reader} reads {column}, but the policy's rules do not `require` them: groups without them are given \
                     back by name. Add \"{column}\" to `require` and such rows are refused when they are posted"
                ))
            })
            .collect();
        let reads_advantages = !self.objective.needs_whole_batch() && self.objective.objective != Objective::Sft;
        if rules.advantage == Advantage::Named(AdvantageName::None)
            && reads_advantages
            && self.objective.opd_coef == 0.0
        {
            found.push(
                "the policy's rules have advantage = \"none\", but the objective reads advantages: nothing would be \
                 learned. Let the policy compute them, e.g. advantage = \"grpo\""
                    .to_owned(),
            );
        }
        found
    }

    /// Weights of the policy.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        self.policy.decoder.parameters()
    }

    /// The contents of a checkpoint.
    #[must_use]
    pub fn state(&self) -> State<'_> {
        let models = || std::iter::once(&self.policy).chain(&self.critic);
        State {
            step: self.step,
            model: (self.policy.decoder.parameters(), &self.policy.base),
            critic: self.critic.as_ref().map(|critic| (critic.decoder.parameters(), critic.base.as_path())),
            average: self.average(),
            optimizer_steps: self.policy.optimizer.steps(),
            optimizer: models().flat_map(Trained::moments).collect(),
        }
    }

    /// The averaged weights of the policy, if an average is kept.
    fn average(&self) -> Option<Parameters> {
        let averages: BTreeMap<&str, Tensor> =
            self.policy.optimizer.state().filter_map(|(name, state)| Some((name, state.average?))).collect();
        self.parameters().replaced(|name| averages.get(name).map(Tensor::shallow_clone))
    }

    /// Computes the gradients of a batch and replaces the existing ones. The weights do not change.
    pub fn gradients(&mut self, batch: &Rows) -> Result<StepOutcome, LearnerError> {
        let rows = batch.trained();
        self.policy.optimizer.zero_grad();
        if let Some(critic) = &mut self.critic {
            critic.optimizer.zero_grad();
        }
        let learning_rate = self.policy.schedule.learning_rate(self.step as u64);
        if rows.is_empty() {
            return Ok(StepOutcome {
                statistics: None,
                gradient_norm: 0.0,
                policy_gradient_norm: 0.0,
                critic_gradient_norm: None,
                value_loss: None,
                learning_rate,
            });
        }
        let lengths: Vec<usize> = rows.iter().map(|row| row.inputs().len()).collect();
        let plan = plan(&lengths, self.memory.microbatch_tokens);
        let old = self.objective.old_logprobs();
        let prepared = if self.objective.needs_whole_batch() { Some(self.prepare(rows, &plan, old)?) } else { None };
        let mut statistics: Option<LossStatistics> = None;
        let mut head_gradient = self.policy.decoder.head().detach().zeros_like();
        for indices in &plan {
            let microbatch = Microbatch::new(rows, indices, self.policy.decoder.device());
            let part = self.policy_gradients(&microbatch, old, prepared.as_ref(), &mut head_gradient)?;
            statistics = Some(match statistics {
                Some(sum) => sum.add(&part),
                None => part,
            });
        }
        head::inject(self.policy.decoder.head(), &head_gradient).backward();
        let value_loss = match (&self.critic, &prepared) {
            (Some(critic), Some(prepared)) => Some(self.critic_gradients(critic, rows, &plan, prepared)),
            _ => None,
        };
        let policy_gradient_norm = self.policy.optimizer.gradient_norm().unwrap_or(0.0);
        let critic_gradient_norm = self.critic.as_ref().and_then(|critic| critic.optimizer.gradient_norm());
        Ok(StepOutcome {
            statistics: statistics.map(|sum| sum.finish()),
            gradient_norm: policy_gradient_norm.hypot(critic_gradient_norm.unwrap_or(0.0)),
            policy_gradient_norm,
            critic_gradient_norm,
            value_loss,
            learning_rate,
        })
    }

    /// The groups whose rows give gradients that are not finite even when they are alone.
    pub fn culprits(&mut self, batch: &Rows) -> Result<Vec<GroupId>, LearnerError> {
        let mut found = Vec::new();
        for group in batch.groups() {
            if !self.gradients(&batch.of_group(group))?.is_finite() {
                found.push(group.clone());
            }
        }
        Ok(found)
    }

    /// Updates the weights with the gradients. Call this only after the batch is acked.
    pub fn apply(&mut self, outcome: &StepOutcome) -> Result<(), LearnerError> {
        if outcome.statistics.is_some() {
            let step = self.step as u64;
            for model in std::iter::once(&mut self.policy).chain(self.critic.as_mut()) {
                model.optimizer.step(model.schedule.learning_rate(step))?;
                if let Some(what) = model.optimizer.not_finite() {
                    return Err(LearnerError::Diverged { model: model.name, what, step: self.step + 1 });
                }
            }
        }
        self.step += 1;
        Ok(())
    }

    fn policy_gradients(
        &self,
        microbatch: &Microbatch,
        old: OldLogprobs,
        prepared: Option<&Prepared>,
        head_gradient: &mut Tensor,
    ) -> Result<LossStatistics, LearnerError> {
        let decoder = &self.policy.decoder;
        if !self.memory.recompute_layers {
            let predicting = microbatch.predicting(&decoder.hidden(&microbatch.inputs));
            let (gradient, statistics) = self.head_gradients(microbatch, &predicting, old, prepared, head_gradient)?;
            head::inject(&predicting, &gradient).backward();
            return Ok(statistics);
        }
        let recomputed = decoder.hidden_recomputed(&microbatch.inputs);
        let hidden = recomputed.hidden().detach().set_requires_grad(true);
        let predicting = microbatch.predicting(&hidden);
        let (gradient, statistics) = self.head_gradients(microbatch, &predicting, old, prepared, head_gradient)?;
        head::inject(&predicting, &gradient).backward();
        recomputed.backward(&hidden.grad());
        Ok(statistics)
    }

    /// Returns the gradient of the loss with respect to the hidden states at trained tokens. The gradient of the head
    /// is added to `head_gradient`.
    fn head_gradients(
        &self,
        microbatch: &Microbatch,
        predicting: &Tensor,
        old: OldLogprobs,
        prepared: Option<&Prepared>,
        head_gradient: &mut Tensor,
    ) -> Result<(Tensor, LossStatistics), LearnerError> {
        let hidden = predicting.detach();
        let weight = self.policy.decoder.head().detach().to_kind(hidden.kind());
        let entropy = if self.objective.entropy_coef == 0.0 { Entropy::Reported } else { Entropy::Trained };
        let input = head_input(microbatch, &hidden, &weight);
        let forward = head::forward(&input, HeadOptions { logits_max: self.memory.logits, entropy });
        let needs_reference = self.objective.kl_loss_coef != 0.0;
        let reference = self.reference.as_ref().filter(|_| needs_reference);
        let reference = reference.map(|model| self.log_probabilities(model, microbatch));
        // If advantages are prepared, they already include distillation.
        let teacher = self.teacher.as_ref().filter(|_| self.objective.opd_coef != 0.0 && prepared.is_none());
        let teacher = teacher.map(|model| self.log_probabilities(model, microbatch));
        let advantages = prepared.map(|prepared| microbatch.flatten(&prepared.advantages));
        let recomputed = prepared.and_then(|prepared| prepared.logp_old.as_ref()).map(|old| microbatch.flatten(old));
        let inputs = LossInputs {
            tokens: &microbatch.flat,
            logp: &forward.logp,
            entropy: forward.entropy.as_ref(),
            logp_old: match (old, &recomputed) {
                (_, Some(logp_old)) => OldPolicy::Recomputed(logp_old),
                (OldLogprobs::Rollout, None) => OldPolicy::Rollout,
                (OldLogprobs::Recompute, None) => OldPolicy::Current,
            },
            logp_reference: reference.as_ref(),
            logp_teacher: teacher.as_ref(),
            advantages: advantages.as_ref(),
        };
        let gradients = loss::differentiate(&self.objective, &inputs)?;
        let hidden_gradient = forward.backward(&gradients.logp, gradients.entropy.as_ref(), head_gradient);
        Ok((hidden_gradient, gradients.statistics))
    }

    /// Log-probabilities of the trained tokens under a model that is not trained here.
    fn log_probabilities(&self, model: &Decoder, microbatch: &Microbatch) -> Tensor {
        no_grad(|| {
            let hidden = microbatch.predicting(&model.hidden(&microbatch.inputs));
            let weight = model.head().detach().to_kind(hidden.kind());
            head::log_probabilities(&head_input(microbatch, &hidden, &weight), self.memory.logits)
        })
    }

    /// Computes advantages that need the whole batch, in a pass without gradients.
    fn prepare(&self, rows: &[Row], plan: &[Vec<usize>], old: OldLogprobs) -> Result<Prepared, LearnerError> {
        let columns = || vec![Vec::new(); rows.len()];
        let (mut logp_old, mut logp_reference, mut logp_teacher, mut values) =
            (columns(), columns(), columns(), columns());
        let penalised = self.objective.kl_coef != 0.0;
        let distilled = self.objective.opd_coef != 0.0;
        if penalised && self.reference.is_none() {
            return Err(ConfigError::missing("reference", "objective.kl_coef needs it").into());
        }
        let recomputes = old == OldLogprobs::Recompute || rows.iter().any(|row| row.logprobs().is_none());
        for indices in plan {
            let microbatch = Microbatch::new(rows, indices, self.policy.decoder.device());
            if recomputes {
                microbatch.unflatten(&self.log_probabilities(&self.policy.decoder, &microbatch), &mut logp_old);
            }
            if let Some(reference) = self.reference.as_ref().filter(|_| penalised) {
                microbatch.unflatten(&self.log_probabilities(reference, &microbatch), &mut logp_reference);
            }
            if let Some(teacher) = self.teacher.as_ref().filter(|_| distilled) {
                microbatch.unflatten(&self.log_probabilities(teacher, &microbatch), &mut logp_teacher);
            }
            if let Some(critic) = &self.critic {
                microbatch.unflatten(&no_grad(|| critic.values(&microbatch)), &mut values);
            }
        }
        for (row, column) in rows.iter().zip(&mut logp_old) {
            if let Some(logprobs) = row.logprobs().filter(|_| old == OldLogprobs::Rollout) {
                *column = logprobs.to_vec();
            }
        }
        for (row, column) in rows.iter().zip(&mut logp_teacher) {
            if let Some(logprobs) = row.teacher_logprobs().filter(|_| distilled && self.teacher.is_none()) {
                *column = logprobs.to_vec();
            }
        }
        let kl = penalised.then(|| differences(&logp_old, &logp_reference));
        let gap = distilled.then(|| differences(&logp_old, &logp_teacher));
        let sequences: Vec<Sequence<'_>> = rows
            .iter()
            .enumerate()
            .map(|(index, row)| Sequence {
                reward: row.reward().unwrap_or(0.0),
                positions: row.positions(),
                kl: kl.as_ref().map(|columns| columns[index].as_slice()),
                gap: gap.as_ref().map(|columns| columns[index].as_slice()),
            })
            .collect();
        let discounting = self.objective.discounting();
        let (advantages, returns) = if self.objective.objective == Objective::Ppo {
            if self.critic.is_none() {
                return Err(ConfigError::missing("critic", "the objective `ppo` reads its values").into());
            }
            let estimates: Vec<returns::Estimate> = sequences
                .iter()
                .zip(&values)
                .map(|(sequence, values)| returns::generalized_advantages(sequence, values, discounting))
                .collect();
            let mut advantages: Vec<Vec<f64>> = estimates.iter().map(|estimate| estimate.advantages.clone()).collect();
            returns::distill(&mut advantages, &sequences, self.objective.opd_coef);
            if self.objective.whiten_advantages {
                returns::whiten(&mut advantages);
            }
            (advantages, estimates.into_iter().map(|estimate| estimate.returns).collect())
        } else {
            (returns::reinforce_plus_plus(&sequences, discounting), Vec::new())
        };
        Ok(Prepared {
            logp_old: recomputes.then_some(logp_old),
            advantages: to_f32(advantages),
            returns: to_f32(returns),
            values,
        })
    }

    /// Computes the gradients of the critic, and its loss.
    fn critic_gradients(&self, critic: &Trained, rows: &[Row], plan: &[Vec<usize>], prepared: &Prepared) -> f64 {
        let mut sum = 0.0;
        for indices in plan {
            let microbatch = Microbatch::new(rows, indices, critic.decoder.device());
            let loss = returns::value_loss(
                &critic.values(&microbatch),
                &microbatch.flatten(&prepared.values),
                &microbatch.flatten(&prepared.returns),
                &microbatch.flat.loss_weight,
                self.objective.value_clip,
            );
            loss.loss.backward();
            sum += loss.loss.double_value(&[]);
        }
        sum
    }
}

/// The results of a pass over the whole batch, by row and trained token.
struct Prepared {
    logp_old: Option<Vec<Vec<f32>>>,
    advantages: Vec<Vec<f32>>,
    returns: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Trained {
    fn new(
        name: &'static str,
        decoder: Decoder,
        optimizer: OptimizerConfig,
        schedule: Schedule,
        base: PathBuf,
    ) -> Result<Self, LearnerError> {
        schedule.validate()?;
        let parameters = decoder.parameters().iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
        let optimizer = AdamW::new(optimizer, parameters)?;
        Ok(Self { name, decoder, optimizer, schedule, base })
    }

    /// Values at the trained tokens of a microbatch. Each value is read before its token.
    fn values(&self, microbatch: &Microbatch) -> Tensor {
        self.decoder.values(&microbatch.predicting(&self.decoder.hidden(&microbatch.inputs)))
    }

    fn moments(&self) -> impl Iterator<Item = (String, Tensor)> + '_ {
        self.optimizer.state().flat_map(|(parameter, state)| {
            let named = |moment: &str, tensor| (format!("{}.{moment}.{parameter}", self.name), tensor);
            let both = [named("mean", state.mean), named("square", state.square)];
            both.into_iter().chain(state.average.map(|average| named("average", average))).collect::<Vec<_>>()
        })
    }

    fn restore(&mut self, steps: i64, tensors: &mut BTreeMap<String, Tensor>) -> Result<(), LearnerError> {
        let mut take = |moment: &str, parameter: &str| tensors.remove(&format!("{}.{moment}.{parameter}", self.name));
        let mut saved = BTreeMap::new();
        for (parameter, _) in self.decoder.parameters().iter() {
            // The optimizer names the missing parameter.
            if let (Some(mean), Some(square)) = (take("mean", parameter), take("square", parameter)) {
                let state = ParameterState { mean, square, average: take("average", parameter) };
                saved.insert(parameter.to_owned(), state);
            }
        }
        Ok(self.optimizer.restore(steps, &saved)?)
    }
}

fn load(path: &Path, device: Device, compute: ComputeKind) -> Result<Decoder, LearnerError> {
    Decoder::load(path, device, compute).map_err(|source| LearnerError::Model { path: path.to_owned(), source })
}

fn head_input<'a>(microbatch: &'a Microbatch, hidden: &'a Tensor, weight: &'a Tensor) -> HeadInput<'a> {
    HeadInput { hidden, weight, targets: &microbatch.flat.targets, temperature: microbatch.flat.temperature.as_ref() }
}

/// Differences of two columns, row by row.
fn differences(left: &[Vec<f32>], right: &[Vec<f32>]) -> Vec<Vec<f32>> {
    left.iter()
        .zip(right)
        .map(|(left, right)| left.iter().zip(right).map(|(left, right)| left - right).collect())
        .collect()
}

fn same_vocabulary(role: &'static str, path: &Path, other: &Decoder, expected: i64) -> Result<(), LearnerError> {
    let found = other.config().vocab_size;
    if found == expected {
        Ok(())
    } else {
        Err(LearnerError::Vocabulary { role, path: path.to_owned(), found, expected })
    }
}

fn to_f32(columns: Vec<Vec<f64>>) -> Vec<Vec<f32>> {
    columns.into_iter().map(|column| column.into_iter().map(|value| value as f32).collect()).collect()
}
