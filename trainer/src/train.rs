//! The loop: lease, compute gradients, ack, and only then update the weights.
//!
//! One rule makes it safe to kill the trainer at any moment: the weights never contain data that is not acked, a step
//! counts as saved only when its checkpoint is on disk, and a restart tells the service which step that is. All batches
//! that were acked after it come back, in order.

mod dry_run;
mod gather;

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::runtime::{Handle, Runtime};

pub use self::dry_run::{DryRun, dry_run};

use self::gather::{Gathered, Gathering, Held};
use crate::{
    config::{ConfigError, TrainConfig},
    engine::{Engines, KeyError},
    feed::Feed,
    learner::{Learner, LearnerError, StepOutcome},
    publish::{Lineage, PublishError, PublishOptions, Publisher},
    report::{Reporter, RunDescription, StepReport},
    rows::Rows,
    service::{Acked, Service, ServiceError},
    state::{Checkpoints, StateError},
};

/// Time that a call to the service may still take once the trainer is stopped.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// How often the stop flag is checked.
const STOP_LOOK: Duration = Duration::from_millis(200);

/// Why training ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file or folder of the output cannot be used.
    #[error("cannot use {}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Another process trains in this output folder.
    #[error("{} is in use by another trainer", .0.display())]
    Locked(PathBuf),
    /// The runtime cannot be started.
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
    /// The model cannot be loaded or does not fit the configuration, or training has diverged.
    #[error(transparent)]
    Learner(#[from] LearnerError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// A version cannot be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The API key of an engine cannot be used.
    #[error(transparent)]
    EngineKey(#[from] KeyError),
    /// The service refuses a call, or is not reached.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The trainer was stopped while the service did not answer.
    #[error(
        "stopped while the service did not answer; batches that were acked but not saved are delivered again after the \
         next start"
    )]
    Stopped,
    /// Many batches in a row cannot be trained on, so the cause is probably elsewhere.
    #[error(
        "{refused} batches in a row could not be trained, the last was {batch_id}: {reason}. The fault is likely in the \
         model or the configuration, and giving back more batches would quarantine them. Groups that were quarantined \
         come back with POST /batches/{{id}}/readmit"
    )]
    Refused {
        /// Number of consecutive batches that could not be trained on.
        refused: u32,
        /// The last of them.
        batch_id: String,
        /// The error in it.
        reason: String,
    },
}

impl TrainError {
    /// Whether the weights are those of an acked step and the lineage is this trainer's, so that they are worth saving.
    fn leaves_a_step_to_save(&self) -> bool {
        match self {
            Self::Stopped | Self::Refused { .. } => true,
            Self::Service(error) => matches!(error, ServiceError::GaveUp { .. }),
            _ => false,
        }
    }
}

/// Trains until the configured number of steps is done or `stop` is set, and then saves the last step.
///
/// With `force` a lineage gap is accepted: steps that the service has settled and this trainer has lost stay lost. If
/// the service has forgotten this trainer's steps because it was restored from a backup, training continues from the
/// last checkpoint, as after a crash.
pub fn train(config: &TrainConfig, force: bool, stop: &dyn Fn() -> bool) -> Result<(), TrainError> {
    config.check()?;
    let _lock = lock(&config.output)?;
    let runtime = Runtime::new().map_err(TrainError::Runtime)?;
    let service =
        Service::new(&config.server, &config.policy, &config.consumer, &config.credentials, config.patience())?;
    let checkpoints = Checkpoints::new(config.output.join("checkpoints"), config.checkpoint.keep);
    checkpoints.remove_partial()?;
    Publisher::remove_partial(&config.output.join("published"))?;
    let lines = config.output.join("metrics.jsonl");
    let mut reporter = Reporter::new(config.steps);
    if let Some(address) = config.metrics_listen {
        let bound = reporter.serve(runtime.handle(), address).map_err(|source| unwritten(&lines, source))?;
        tracing::info!(listen = %bound, "serving /metrics");
    }
    let mut force = force;
    loop {
        let life = Life {
            runtime: runtime.handle(),
            stop,
            config,
            service: &service,
            checkpoints: &checkpoints,
            lines: &lines,
        };
        let (epoch, outcome) = life.train(force, &mut reporter)?;
        match outcome {
            Err(error) if life.is_forgotten(epoch, &error) => {
                tracing::warn!(
                    error = crate::chain(&error),
                    "the service has lost steps of this trainer: continuing from the last checkpoint"
                );
                // The steps that are saved here are later than those that the service knows.
                force = true;
            }
            outcome => return outcome,
        }
    }
}

/// One lineage of the weights, from a resume to its end.
#[derive(Clone, Copy)]
struct Life<'a> {
    runtime: &'a Handle,
    stop: &'a dyn Fn() -> bool,
    config: &'a TrainConfig,
    service: &'a Service,
    checkpoints: &'a Checkpoints,
    lines: &'a Path,
}

impl Life<'_> {
    /// Resumes from the last checkpoint and trains. Returns the epoch that began and the result.
    fn train(self, force: bool, reporter: &mut Reporter) -> Result<(i64, Result<(), TrainError>), TrainError> {
        let Self { runtime, stop, config, service, checkpoints, lines } = self;
        // Keys of engines that cannot be read end the run before a new epoch begins.
        let engines = Engines::start(runtime, config.publish.engine.clone())?;
        let last = checkpoints.latest()?;
        let mut learner = Learner::open(config, last.as_ref())?;
        let resume = service.resume(last.map(|checkpoint| checkpoint.step), force);
        let resumed = wait(runtime, stop, resume)?;
        reporter.write_lines(lines, learner.step()).map_err(|source| unwritten(lines, source))?;
        if config.report.tensorboard {
            let folder = config.output.join("tensorboard");
            let opened = reporter.write_events(&folder, learner.step());
            opened.map_err(|source| unwritten(&folder, source))?;
        }
        if let Some(project) = &config.report.wandb_project {
            let folder = config.output.join("wandb");
            let opened = reporter.write_run(&folder, &described(config, project), lines);
            opened.map_err(|source| unwritten(&folder, source))?;
        }
        let newest = Lineage { version: resumed.version, step: learner.step(), epoch: resumed.epoch };
        let options = PublishOptions {
            folder: config.output.join("published"),
            base: config.model.clone(),
            keep: config.publish.keep,
            engine_wait: Duration::from_secs(config.publish.engine_wait_s),
        };
        let publisher = Publisher::start(runtime, service.clone(), options, engines, newest);
        tracing::info!(
            step = learner.step(),
            epoch = resumed.epoch,
            policy.version = resumed.version,
            returned_batches = resumed.returned_batches,
            parameters = learner.parameters().count(),
            "resumed"
        );
        let saved = learner.step();
        let mut trainer = Trainer { life: self, publisher, epoch: resumed.epoch, published: None, saved, reporter };
        let outcome = trainer.run(&mut learner);
        Ok((resumed.epoch, trainer.end(&learner, outcome)))
    }

    /// Whether an error means that the service has lost data, and not that another trainer took over.
    fn is_forgotten(self, epoch: i64, error: &TrainError) -> bool {
        let (TrainError::Service(error) | TrainError::Publish(PublishError::Service(error))) = error else {
            return false;
        };
        match error {
            ServiceError::Superseded(_) => {
                let status = wait(self.runtime, self.stop, self.service.status());
                status.is_ok_and(|status| status.restored || status.epoch < epoch)
            }
            // A trainer only names batches that it leased, so an unknown batch means that the service has lost data.
            ServiceError::Client(refused) => refused.kind() == Some("not-found"),
            _ => false,
        }
    }
}

/// The run as shown by Weights & Biases.
fn described(config: &TrainConfig, project: &str) -> RunDescription {
    let name =
        config.output.file_name().map_or_else(|| config.policy.clone(), |name| name.to_string_lossy().into_owned());
    RunDescription {
        project: project.to_owned(),
        name,
        config: json!({
            "policy": config.policy,
            "model": config.model,
            "steps": config.steps,
            "batches_per_step": config.data.batches_per_step,
            "objective": config.objective,
            "optimizer": config.optimizer,
            "schedule": config.schedule,
        }),
    }
}

fn unwritten(path: &Path, source: std::io::Error) -> TrainError {
    TrainError::Output { path: path.to_owned(), source }
}

/// Locks the output folder, because two processes would remove each other's checkpoints.
fn lock(output: &Path) -> Result<File, TrainError> {
    let path = output.join(".lock");
    let opened = std::fs::create_dir_all(output).and_then(|()| File::create(&path));
    let file = opened.map_err(|source| TrainError::Output { path: path.clone(), source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(TrainError::Locked(output.to_owned())),
        Err(std::fs::TryLockError::Error(source)) => Err(TrainError::Output { path, source }),
    }
}

/// Waits for a call, but only a short time once the trainer is stopped.
fn wait<T, E>(
    runtime: &Handle,
    stop: &dyn Fn() -> bool,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, TrainError>
where
    TrainError: From<E>,
{
    let stopped = async {
        while !stop() {
            tokio::time::sleep(STOP_LOOK).await;
        }
        tokio::time::sleep(STOP_GRACE).await;
    };
    runtime.block_on(async {
        tokio::select! {
            answer = call => Ok(answer?),
            () = stopped => Err(TrainError::Stopped),
        }
    })
}

/// State that the loop's calls share.
struct Trainer<'a> {
    life: Life<'a>,
    publisher: Publisher,
    /// Lineage of this trainer.
    epoch: i64,
    /// Last step that was passed to the publisher.
    published: Option<i64>,
    /// Last step that is saved and that the service knows.
    saved: i64,
    reporter: &'a mut Reporter,
}

impl Trainer<'_> {
    fn wait<T, E>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, TrainError>
    where
        TrainError: From<E>,
    {
        wait(self.life.runtime, self.life.stop, call)
    }

    fn run(&mut self, learner: &mut Learner) -> Result<(), TrainError> {
        self.prepare(learner)?;
        self.steps(learner)?;
        self.save(learner)?;
        self.publish(learner)
    }

    /// Returns success once the last version is published, or the error once everything worth saving is saved.
    fn end(self, learner: &Learner, outcome: Result<(), TrainError>) -> Result<(), TrainError> {
        let Self { life: Life { runtime, stop, checkpoints, lines, .. }, mut publisher, reporter, saved, .. } = self;
        reporter.finish();
        let outcome = outcome.and_then(|()| wait(runtime, stop, publisher.finish()));
        let Err(error) = outcome else { return reporter.end().map_err(|source| unwritten(lines, source)) };
        if error.leaves_a_step_to_save() && learner.step() > saved {
            checkpoints.save(&learner.state())?;
        }
        runtime.block_on(publisher.abandon(STOP_GRACE));
        Err(error)
    }

    /// Before the first step: compares the policy's rules with the objective, publishes what is missing, serves metrics.
    fn prepare(&mut self, learner: &Learner) -> Result<(), TrainError> {
        let status = self.wait(self.life.service.status())?;
        for mismatch in learner.mismatches(&status.rules) {
            tracing::warn!(policy = self.life.service.policy(), "{mismatch}");
        }
        // The previous process may have ended between saving a step and publishing it.
        let step = learner.step();
        let due = step % self.life.config.publish.every == 0 || step >= self.life.config.steps;
        let is_published = status.version_step == Some(step) && status.version_uri.is_some();
        if (due && !is_published) || status.version_uri.is_none() {
            self.publish(learner)?;
        } else {
            self.published = status.version_step;
            self.life.runtime.block_on(self.publisher.tell_engines_again());
        }
        Ok(())
    }

    fn steps(&mut self, learner: &mut Learner) -> Result<(), TrainError> {
        let started = Instant::now();
        let mut step_began = Instant::now();
        let data = &self.life.config.data;
        let ttl = Duration::from_secs(data.lease_ttl_s);
        let ahead = data.ahead + data.batches_per_step - 1;
        let mut feed = Feed::start(self.life.runtime, self.life.service.clone(), self.epoch, ahead, ttl);
        let mut gathering = Gathering::default();
        while learner.step() < self.life.config.steps {
            let Some(gathered) = self.gather(&mut gathering, &mut feed, learner)? else { break };
            let Some((consumed, rows, outcome)) = self.ack(gathered, learner)? else { continue };
            learner.apply(&outcome)?;
            let pace = Pace {
                seconds: started.elapsed().as_secs_f64(),
                waited: gathering.take_waited().as_secs_f64(),
                whole: step_began.elapsed().as_secs_f64(),
            };
            step_began = Instant::now();
            let report = report(learner.step(), self.publisher.newest().version, &consumed, &rows, &outcome, pace);
            self.reporter.step(&report).map_err(|source| unwritten(self.life.lines, source))?;
            // This makes room, so that the feed leases the next batch while the step is saved.
            drop(consumed);
            if learner.step() % self.life.config.checkpoint.every == 0 {
                self.save(learner)?;
            }
            if learner.step() % self.life.config.publish.every == 0 {
                self.publish(learner)?;
            }
        }
        Ok(())
    }

    /// Acks the batches of a step. Batches whose lease was lost are left out: the gradients are computed again on the
    /// others, which are acked. Returns `None` if none is left.
    fn ack(
        &mut self,
        gathered: Gathered,
        learner: &mut Learner,
    ) -> Result<Option<(Vec<Held>, Rows, StepOutcome)>, TrainError> {
        let Gathered { held, rows, outcome } = gathered;
        let step = learner.step() + 1;
        let gathered_batches = held.len();
        let mut acked = Vec::new();
        for mut held in held {
            if self.wait(self.life.service.ack(&held.delivery.batch, step))? == Acked::Lost {
                self.lost(&held);
                continue;
            }
            held.delivery.release();
            acked.push(held);
        }
        if acked.is_empty() {
            return Ok(None);
        }
        if acked.len() == gathered_batches {
            return Ok(Some((acked, rows, outcome)));
        }
        let rows = gather::merge(&acked);
        let outcome = learner.gradients(&rows)?;
        Ok(Some((acked, rows, outcome)))
    }

    fn lost(&self, held: &Held) {
        let batch_id = &held.delivery.batch.batch_id;
        tracing::warn!(batch.id = batch_id, "the lease was lost: the batch is left out of this step");
        self.reporter.lost();
    }

    /// Publishes the weights, unless they are published already.
    fn publish(&mut self, learner: &Learner) -> Result<(), TrainError> {
        let step = learner.step();
        if self.published != Some(step) {
            self.publisher.publish(self.life.runtime, learner.parameters(), step)?;
            self.published = Some(step);
        }
        Ok(())
    }

    /// Saves the step and settles the oldest checkpoint that is kept, so that returning to it is no lineage gap.
    fn save(&mut self, learner: &Learner) -> Result<(), TrainError> {
        let step = learner.step();
        if step == self.saved {
            return Ok(());
        }
        self.life.checkpoints.save(&learner.state())?;
        let oldest = self.life.checkpoints.oldest_step()?.unwrap_or(step);
        self.wait(self.life.service.checkpointed(oldest, self.epoch))?;
        self.reporter.saved(step);
        self.saved = step;
        Ok(())
    }
}

/// Where the time was spent, in seconds.
#[derive(Clone, Copy)]
struct Pace {
    /// Since the start.
    seconds: f64,
    /// Waiting for data before the step.
    waited: f64,
    /// Since the previous step.
    whole: f64,
}

/// The mean of each reward component over the batches that have it.
fn components<'m>(batches: impl Iterator<Item = &'m BTreeMap<String, f64>>) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::<&str, (f64, f64)>::new();
    for (name, mean) in batches.flatten().filter(|(name, _)| name.starts_with("components/")) {
        let (sum, count) = sums.entry(name).or_default();
        *sum += mean;
        *count += 1.0;
    }
    sums.into_iter().map(|(name, (sum, count))| (name.to_owned(), sum / count)).collect()
}

fn report(step: i64, version: i64, consumed: &[Held], rows: &Rows, outcome: &StepOutcome, pace: Pace) -> StepReport {
    let statistics = rows.statistics();
    let batches = || consumed.iter().map(|held| &held.delivery.batch);
    let rewards: Vec<f64> = batches().filter_map(|batch| batch.metrics.get("reward/all").copied()).collect();
    let components = components(batches().map(|batch| &batch.metrics));
    StepReport {
        step,
        version,
        batch_id: batches().map(|batch| batch.batch_id.as_str()).collect::<Vec<_>>().join(","),
        seconds: pace.seconds,
        reward_all: (!rewards.is_empty()).then(|| rewards.iter().sum::<f64>() / rewards.len() as f64),
        reward_trained: statistics.reward_trained_mean,
        components,
        statistics: outcome.statistics.unwrap_or_default(),
        value_loss: outcome.value_loss,
        gradient_norm: outcome.gradient_norm,
        policy_gradient_norm: outcome.policy_gradient_norm,
        critic_gradient_norm: outcome.critic_gradient_norm,
        learning_rate: outcome.learning_rate,
        staleness_mean: statistics.staleness_mean.unwrap_or(0.0),
        staleness_max: statistics.staleness_max.unwrap_or(0),
        rollouts: statistics.rollouts,
        rows_without_logprobs: statistics.rows_without_logprobs,
        rows_top_sampled: statistics.rows_top_sampled,
        tokens: statistics.tokens,
        tokens_per_s: statistics.tokens as f64 / (pace.whole - pace.waited).max(1e-9),
        waited_s: pace.waited,
        waiting_share: (pace.waited / pace.whole.max(1e-9)).min(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_means_over_the_batches_that_have_them() {
        let metrics = |entries: &[(&str, f64)]| -> BTreeMap<String, f64> {
            entries.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let first = metrics(&[("components/gold/mean", 1.0), ("components/cost/mean", -0.5), ("reward/all", 9.0)]);
        let second = metrics(&[("components/gold/mean", 0.5), ("staleness/mean", 1.0)]);
        let found = components([&first, &second].into_iter());
        assert_eq!(found, metrics(&[("components/gold/mean", 0.75), ("components/cost/mean", -0.5)]));
        assert!(components(std::iter::empty()).is_empty());
    }
}
