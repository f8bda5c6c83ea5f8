//! The trainer of one policy: it makes the calls that docs/trainers.md describes, in their order, so it is safe to kill. Its
//! checkpoint is a file.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use forebay_client::{
    Client, ClientError,
    wire::{AckRequest, BatchDescriptor, BatchRequest, CheckpointRequest, ResumeRequest, Sample, VersionRequest},
};
use serde::{Deserialize, Serialize};

use super::{engine::Engine, table::Table};

/// Steps from one checkpoint to the next.
const SAVE_EVERY: i64 = 5;

/// Milliseconds of one long poll for a batch.
const WAIT_MS: u64 = 30_000;

/// What is saved: the weights, and what they have learned from.
#[derive(Clone, Serialize, Deserialize)]
struct Weights {
    step: i64,
    table: Table,
    /// The rollouts that these weights have learned from, by step; older steps than [`REMEMBERED_STEPS`] are only counted.
    trained: BTreeMap<i64, BTreeSet<String>>,
    trained_count: usize,
}

/// Steps whose rollouts are remembered. A demo of a minute has fewer.
pub(super) const REMEMBERED_STEPS: i64 = 200;

/// What the learner has done so far. It outlives a learner that is killed.
#[derive(Clone, Default)]
pub(super) struct Progress {
    pub(super) step: i64,
    /// Rollouts that the current weights have learned from.
    pub(super) trained: usize,
    /// The rollouts of the steps that a restart may repeat.
    rollouts: BTreeMap<i64, BTreeSet<String>>,
}

/// The trainer of one policy.
pub(super) struct Learner {
    pub(super) client: Client,
    pub(super) engine: Engine,
    pub(super) policy: &'static str,
    /// The weights before the first step.
    pub(super) table: Table,
    pub(super) file: PathBuf,
    /// How long a step takes. Real ones take minutes; without a pause, the page would show a trainer that only waits.
    pub(super) compute: Duration,
    pub(super) progress: Arc<Mutex<Progress>>,
}

impl Learner {
    /// Learns until `last`, and then ends without saving, as a process does that is killed.
    pub(super) async fn run(&self, last: Option<i64>) -> anyhow::Result<()> {
        let mut weights = self.load()?;
        let saved = (weights.step > 0).then_some(weights.step);
        let resume = ResumeRequest { step: saved, ..ResumeRequest::default() };
        let epoch = self.client.resume(self.policy, &resume).await.context("the learner cannot resume")?.epoch;
        self.engine.load(self.policy, weights.table.clone());
        while last != Some(weights.step) {
            let request = BatchRequest {
                policy: Some(self.policy.to_owned()),
                consumer: Some(format!("{}-learner", self.policy)),
                request_id: Some(format!("{epoch}-{}", weights.step + 1)),
                wait_ms: Some(WAIT_MS),
                epoch: Some(epoch),
                ..BatchRequest::default()
            };
            let Some(batch) = self.client.lease(&request).await.context("a batch cannot be leased")? else { continue };
            match self.step(&mut weights, &batch, epoch).await {
                // Its lease has expired, for example because the machine slept. The batch comes again.
                Err(error) if kind(&error) == Some("lease-lost") => {}
                outcome => outcome?,
            }
        }
        Ok(())
    }

    /// One optimizer step, and a checkpoint if it is time for one.
    async fn step(&self, weights: &mut Weights, batch: &BatchDescriptor, epoch: i64) -> anyhow::Result<()> {
        let samples = self
            .client
            .samples(&batch.batch_id, &[("messages", "false")])
            .await
            .context("the samples cannot be read")?;
        let mut table = weights.table.clone();
        for sample in &samples {
            learn(&mut table, sample);
        }
        tokio::time::sleep(self.compute).await;
        let lease = batch.lease.clone().context("the batch has no lease")?;
        let step = weights.step + 1;
        let ack = AckRequest { lease, step, epoch: Some(epoch) };
        self.client.ack(&batch.batch_id, &ack).await.context("a batch cannot be acked")?;
        // Only now the weights may move.
        weights.table = table;
        weights.step = step;
        self.note(weights, &samples)?;
        if step % SAVE_EVERY == 0 {
            self.save(weights).context("the weights cannot be saved")?;
            let request = CheckpointRequest { step, force: None, epoch: Some(epoch) };
            self.client.checkpoint(self.policy, &request).await.context("the checkpoint cannot be announced")?;
        }
        self.engine.load(self.policy, weights.table.clone());
        let version = VersionRequest { version: step, step: Some(step), uri: None, epoch: Some(epoch), force: None };
        self.client.publish(self.policy, &version).await.context("the version cannot be published")?;
        Ok(())
    }

    /// The step of the last checkpoint.
    pub(super) fn saved_step(&self) -> anyhow::Result<i64> {
        Ok(self.load()?.step)
    }

    /// Replaces the file as a whole, so that a learner that is killed in the middle leaves the old one.
    fn save(&self, weights: &Weights) -> anyhow::Result<()> {
        let partial = self.file.with_extension("partial");
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(&serde_json::to_vec(weights)?)?;
        file.sync_all()?;
        Ok(std::fs::rename(partial, &self.file)?)
    }

    fn load(&self) -> anyhow::Result<Weights> {
        match std::fs::read(&self.file) {
            Ok(bytes) => serde_json::from_slice(&bytes).context("the saved weights cannot be read"),
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            Err(_) => Ok(Weights { step: 0, table: self.table.clone(), trained: BTreeMap::new(), trained_count: 0 }),
        }
    }

    /// Checks that nothing is trained twice, and that a step that is repeated after a restart has the same rollouts.
    fn note(&self, weights: &mut Weights, samples: &[Sample]) -> anyhow::Result<()> {
        let rollouts: BTreeSet<String> = samples.iter().map(|sample| sample.rollout_id.clone()).collect();
        for before in weights.trained.values() {
            ensure!(before.is_disjoint(&rollouts), "{} has learned from a rollout twice: {rollouts:?}", self.policy);
        }
        weights.trained_count += rollouts.len();
        weights.trained.insert(weights.step, rollouts.clone());
        weights.trained.retain(|step, _| *step > weights.step - REMEMBERED_STEPS);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = progress.rollouts.insert(weights.step, rollouts.clone())
            && before != rollouts
        {
            bail!("step {} of {} has other rollouts than before the restart", weights.step, self.policy);
        }
        progress.rollouts.retain(|step, _| *step >= weights.step - SAVE_EVERY);
        progress.step = weights.step;
        progress.trained = weights.trained_count;
        Ok(())
    }
}

/// The type of the problem with which the service refused.
fn kind(error: &anyhow::Error) -> Option<&str> {
    error.downcast_ref::<ClientError>().and_then(ClientError::kind)
}

/// The gradient of `loss_weight * advantage * ln(probability)` over the trained tokens of a segment.
fn learn(table: &mut Table, sample: &Sample) {
    let (Some(tokens), Some(mask)) = (&sample.tokens, &sample.loss_mask) else { return };
    let prompt = tokens.len() - mask.len();
    for (place, trained) in mask.iter().enumerate() {
        if *trained == 1 {
            let weight = sample.loss_weight as f32 * sample.advantage.unwrap_or(0.0);
            table.learn(&tokens[..prompt + place], tokens[prompt + place], weight);
        }
    }
}
