//! The loop: lease, gradients, ack, and only then move the weights.
//!
//! The rule that makes it safe to kill at any moment: weights never hold data that is not acked, a step counts as saved
//! only when its checkpoint is on disk, and a restart tells the service which step that is. Whatever was acked after
//! it comes back, in order.

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Instant,
};

use tokio::runtime::{Handle, Runtime};

use crate::{
    config::{ConfigError, TrainConfig},
    feed::{Delivery, Fed, Feed},
    learner::{Learner, LearnerError, StepOutcome},
    publish::{Lineage, PublishError, Publisher},
    report::{Reporter, StepReport},
    rows::{Rows, RowsError},
    service::{Acked, Service, ServiceError},
    state::{Checkpoints, StateError},
};

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
        /// Why.
        source: std::io::Error,
    },
    /// Another process trains there.
    #[error("{} is in use by another trainer", .0.display())]
    Locked(PathBuf),
    /// The runtime does not start.
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
    /// The model cannot be loaded or does not fit the configuration.
    #[error(transparent)]
    Learner(#[from] LearnerError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// A version cannot be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The service refuses to go on.
    #[error(transparent)]
    Service(#[from] ServiceError),
}

/// Trains until the configured number of steps is done, or `stop` says so: then the last step is saved.
///
/// With `force` a lineage gap is accepted: steps that the service has settled and this trainer has lost stay lost.
pub fn train(config: &TrainConfig, force: bool, stop: &dyn Fn() -> bool) -> Result<(), TrainError> {
    config.check()?;
    let _lock = lock(&config.output)?;
    let runtime = Runtime::new().map_err(TrainError::Runtime)?;
    let service = Service::new(&config.server, &config.policy, &config.consumer, &config.credentials)?;
    let checkpoints = Checkpoints::new(config.output.join("checkpoints"), config.checkpoint.keep);
    let publisher = Publisher::new(
        config.output.join("published"),
        config.model.clone(),
        config.publish.keep,
        config.publish.engine.clone(),
    );

    let last = checkpoints.latest()?;
    let mut learner = Learner::open(config, last.as_ref())?;
    let resumed = runtime.block_on(service.resume(last.map(|checkpoint| checkpoint.step), force))?;
    let mut trainer = Trainer {
        runtime: runtime.handle(),
        config,
        service: &service,
        checkpoints: &checkpoints,
        publisher: &publisher,
        lineage: Lineage { version: resumed.version, step: learner.step(), epoch: resumed.epoch },
        saved: learner.step(),
    };
    tracing::info!(
        step = learner.step(),
        epoch = resumed.epoch,
        policy.version = resumed.version,
        returned_batches = resumed.returned_batches,
        parameters = learner.parameters().count(),
        "resumed"
    );
    trainer.publish_what_is_missing(&learner)?;

    let lines = config.output.join("metrics.jsonl");
    let unwritten = |source| TrainError::Output { path: lines.clone(), source };
    let mut reporter = Reporter::new(Some(&lines), config.steps, learner.step()).map_err(unwritten)?;
    if let Some(address) = config.metrics_listen {
        let bound = reporter.serve(runtime.handle(), address).map_err(unwritten)?;
        tracing::info!(listen = %bound, "serving /metrics");
    }

    let started = Instant::now();
    let mut step_began = Instant::now();
    let ttl = std::time::Duration::from_secs(config.data.lease_ttl_s);
    let mut feed = Feed::start(runtime.handle(), service.clone(), resumed.epoch, config.data.ahead, ttl);
    while learner.step() < config.steps {
        let Some(Fed { mut delivery, waited }) = feed.next(runtime.handle(), stop)? else { break };
        let rows = match Rows::read(&delivery.rows, learner.vocabulary(), trainer.lineage.version) {
            Ok(rows) => rows,
            Err(error) => {
                trainer.give_back(&delivery, &error)?;
                continue;
            }
        };
        let outcome = learner.gradients(&rows)?;
        if !outcome.gradient_norm.is_finite() {
            trainer.refuse(&delivery, "the gradients are not finite")?;
            continue;
        }
        let next = learner.step() + 1;
        if runtime.block_on(service.ack(&delivery.batch, next))? == Acked::Lost {
            tracing::warn!(
                batch.id = delivery.batch.batch_id,
                step = next,
                "the lease was lost: the gradients are discarded"
            );
            reporter.lost();
            continue;
        }
        delivery.release();
        learner.apply(&outcome)?;
        let pace = Pace {
            seconds: started.elapsed().as_secs_f64(),
            waited: waited.as_secs_f64(),
            whole: step_began.elapsed().as_secs_f64(),
        };
        step_began = Instant::now();
        let report = report(next, trainer.lineage.version, &delivery, &rows, &outcome, pace);
        reporter.step(&report).map_err(unwritten)?;

        if next % config.checkpoint.every == 0 {
            trainer.save(&learner, &reporter)?;
        }
        if next % config.publish.every == 0 {
            trainer.publish(&learner)?;
        }
    }
    trainer.save(&learner, &reporter)?;
    trainer.publish(&learner)?;
    reporter.finish();
    Ok(())
}

/// One process per output folder: two would remove each other's checkpoints.
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

/// What the loop's calls have in common.
struct Trainer<'a> {
    runtime: &'a Handle,
    config: &'a TrainConfig,
    service: &'a Service,
    checkpoints: &'a Checkpoints,
    publisher: &'a Publisher,
    /// The newest version and the step that it was taken after.
    lineage: Lineage,
    /// Last step that the service knows to be saved.
    saved: i64,
}

impl Trainer<'_> {
    /// Publishes the step that was resumed from, where the life before ended between saving and publishing it, and
    /// the weights that training begins with.
    fn publish_what_is_missing(&mut self, learner: &Learner) -> Result<(), TrainError> {
        let status = self.runtime.block_on(self.service.status())?;
        let step = learner.step();
        let due = step % self.config.publish.every == 0 || step >= self.config.steps;
        let is_published = status.version_step == Some(step) && status.version_uri.is_some();
        self.lineage.step = status.version_step.unwrap_or(-1);
        if (due && !is_published) || status.version_uri.is_none() {
            self.lineage.step = -1;
            self.publish(learner)?;
        }
        Ok(())
    }

    /// Publishes the weights, unless they are published.
    fn publish(&mut self, learner: &Learner) -> Result<(), TrainError> {
        if self.lineage.step == learner.step() {
            return Ok(());
        }
        let next = Lineage { version: self.lineage.version + 1, step: learner.step(), epoch: self.lineage.epoch };
        let folder = self.publisher.publish(self.runtime, self.service, learner.parameters(), next)?;
        tracing::info!(policy.version = next.version, step = next.step, folder = %folder.display(), "published");
        self.lineage = next;
        Ok(())
    }

    /// Saves the step and settles it, unless that is done.
    fn save(&mut self, learner: &Learner, reporter: &Reporter) -> Result<(), TrainError> {
        let step = learner.step();
        if step == self.saved {
            return Ok(());
        }
        self.checkpoints.save(&learner.state())?;
        self.runtime.block_on(self.service.checkpointed(step, self.lineage.epoch))?;
        reporter.saved(step);
        self.saved = step;
        Ok(())
    }

    /// Gives a batch back that holds rows which cannot be trained on; their groups are quarantined.
    fn give_back(&self, delivery: &Delivery, error: &RowsError) -> Result<(), TrainError> {
        let mut groups: Vec<String> = error
            .violations
            .iter()
            .filter_map(|violation| delivery.rows.get(violation.row))
            .map(|row| row.group_id.clone())
            .collect();
        groups.sort_unstable();
        groups.dedup();
        self.nack(delivery, &error.to_string(), Some(groups))
    }

    /// Gives a batch back whole; after its last delivery it is quarantined.
    fn refuse(&self, delivery: &Delivery, reason: &str) -> Result<(), TrainError> {
        self.nack(delivery, reason, None)
    }

    fn nack(&self, delivery: &Delivery, reason: &str, groups: Option<Vec<String>>) -> Result<(), TrainError> {
        tracing::error!(batch.id = delivery.batch.batch_id, reason, ?groups, "the batch is given back");
        self.runtime.block_on(self.service.nack(&delivery.batch, reason, groups))?;
        Ok(())
    }
}

/// Where the time went, in seconds.
#[derive(Clone, Copy)]
struct Pace {
    /// Since the start.
    seconds: f64,
    /// Without data before the step.
    waited: f64,
    /// Since the step before.
    whole: f64,
}

fn report(step: i64, version: i64, delivery: &Delivery, rows: &Rows, outcome: &StepOutcome, pace: Pace) -> StepReport {
    let statistics = rows.statistics();
    let batch = &delivery.batch;
    StepReport {
        step,
        version,
        batch_id: batch.batch_id.clone(),
        seconds: pace.seconds,
        reward_all: batch.metrics.get("reward/all").copied(),
        reward_trained: statistics.reward_trained_mean,
        statistics: outcome.statistics.unwrap_or_default(),
        value_loss: outcome.value_loss,
        gradient_norm: outcome.gradient_norm,
        learning_rate: outcome.learning_rate,
        staleness_mean: statistics.staleness_mean.unwrap_or(0.0),
        staleness_max: statistics.staleness_max.unwrap_or(0),
        rollouts: statistics.rollouts,
        tokens: statistics.tokens,
        tokens_per_s: statistics.tokens as f64 / (pace.whole - pace.waited).max(1e-9),
        waited_s: pace.waited,
        waiting_share: (pace.waited / pace.whole.max(1e-9)).min(1.0),
    }
}
