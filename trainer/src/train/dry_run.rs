//! Reports what a run would do. Everything is loaded and checked; nothing is leased, written or published.

use std::{fmt, path::PathBuf, time::Duration};

use forebay_client::wire::PolicyStatus;
use tokio::runtime::Runtime;

use super::TrainError;
use crate::{
    config::TrainConfig,
    learner::Learner,
    rows::Needs,
    service::{Patience, Service},
    state::{Checkpoint, Checkpoints},
};

/// Patience with the service; it is short because a person waits for the result.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run would do; printed as a few lines for people.
#[derive(Debug)]
pub struct DryRun {
    config: TrainConfig,
    /// Step and folder of the checkpoint that it would continue from.
    from: Option<(i64, PathBuf)>,
    device: String,
    parameters: usize,
    tokens_max: usize,
    needs: Needs,
    status: PolicyStatus,
    warnings: Vec<String>,
}

/// Loads models and checkpoint, and reads the policy's status. Fails if the run would fail.
pub fn dry_run(config: &TrainConfig) -> Result<DryRun, TrainError> {
    config.check()?;
    for engine in &config.publish.engine {
        engine.authorization()?;
    }
    let device = config.device()?;
    let checkpoint = Checkpoints::new(config.output.join("checkpoints"), config.checkpoint.keep).latest()?;
    let learner = Learner::open(config, checkpoint.as_ref())?;
    let runtime = Runtime::new().map_err(TrainError::Runtime)?;
    let patience = config.patience();
    let patience = Patience { call: patience.call.min(PATIENCE), ..patience };
    let service = Service::new(&config.server, &config.policy, &config.consumer, &config.credentials, patience)?;
    let status = runtime.block_on(service.status())?;
    let expected = learner.expected();
    Ok(DryRun {
        config: config.clone(),
        from: checkpoint.map(|found: Checkpoint| (found.step, found.folder().to_owned())),
        device: format!("{device:?}, layers compute in {:?}", config.compute(device)),
        parameters: learner.parameters().count(),
        tokens_max: expected.tokens_max,
        needs: expected.needs,
        warnings: learner.mismatches(&status.rules),
        status,
    })
}

impl fmt::Display for DryRun {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, status, .. } = self;
        let step = self.from.as_ref().map(|(step, _)| *step);
        writeln!(out, "model      {}, {} parameters on {}", config.model.display(), self.parameters, self.device)?;
        match &self.from {
            Some((step, folder)) => writeln!(out, "start      step {step}, from {}", folder.display())?,
            None => writeln!(out, "start      step 0, from the model")?,
        }
        let steps = config.steps - step.unwrap_or(0);
        writeln!(out, "train      {} more steps of {} batches each", steps.max(0), config.data.batches_per_step)?;
        let columns = [
            self.needs.logprobs.map(|_| "logprobs"),
            self.needs.teacher_logprobs.map(|_| "teacher_logprobs"),
            self.needs.reward.map(|_| "reward"),
        ];
        let columns: Vec<&str> = columns.into_iter().flatten().collect();
        let needed = if columns.is_empty() { "no other columns".to_owned() } else { columns.join(", ") };
        writeln!(out, "rows       at most {} tokens; every trained row needs {needed}", self.tokens_max)?;
        writeln!(
            out,
            "policy     {} at {}: version {}, epoch {}, {} of {} ready groups of a batch, {} batches returned",
            config.policy,
            config.server,
            status.version,
            status.epoch,
            status.waiting.ready_groups,
            status.waiting.needed_groups,
            status.waiting.returned_batches,
        )?;
        match status.checkpoint_step {
            Some(settled) if settled > step.unwrap_or(-1) => writeln!(
                out,
                "resume     would be refused: step {settled} is settled, and no checkpoint here contains it (--force \
                 continues with the batches that can still be delivered)"
            )?,
            _ => writeln!(
                out,
                "resume     begins epoch {} and brings back the batches that were acked after the start",
                status.epoch + 1
            )?,
        }
        let engines: Vec<&str> = config.publish.engine.iter().map(|engine| engine.url.as_str()).collect();
        let told = if engines.is_empty() { "no engine".to_owned() } else { engines.join(", ") };
        writeln!(out, "publish    every {} steps below {}, {told}", config.publish.every, config.output.display())?;
        self.warnings.iter().try_for_each(|warning| writeln!(out, "warning    {warning}"))
    }
}
