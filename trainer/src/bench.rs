//! `bench`: measures how many tokens per second a training step processes, on rows computed by a fixed formula.
//!
//! `trainer/bench/eager.py` has the same rows, microbatches, objective and optimizer. The two can be compared on one
//! machine, and their losses must agree.

use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use forebay_client::wire::{Sample, Status, Verdict};
use serde::Serialize;

use crate::{
    config::{ComputeConfig, DeviceConfig, TrainConfig},
    learner::{Learner, LearnerError},
    rows::Rows,
};

/// Measure training steps without a service.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Checkpoint to train.
    pub model: PathBuf,
    /// Number of sequences in a batch, of 96 to 350 tokens each.
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub rows: usize,
    /// Makes the sequences N times as long, for devices that would wait for work otherwise.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub longer: u16,
    /// Number of measured steps, after one warm-up step.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub steps: usize,
    /// Number of tokens in one microbatch, including padding.
    #[arg(long, default_value_t = 4_096, value_name = "N")]
    pub microbatch_tokens: usize,
    /// Keep only the inputs of each layer, and recompute the activations for the gradients.
    #[arg(long)]
    pub recompute_layers: bool,
    /// Device of the tensors.
    #[arg(long, value_enum, default_value_t = DeviceConfig::Auto)]
    pub device: DeviceConfig,
    /// Type that layers compute in.
    #[arg(long, value_enum, default_value_t = ComputeConfig::Auto)]
    pub compute: ComputeConfig,
    /// Number of libtorch's CPU threads; one per core if absent.
    #[arg(long, value_name = "N")]
    pub threads: Option<i32>,
}

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The program that was measured.
    pub engine: &'static str,
    /// Number of CPU threads.
    pub threads: i32,
    /// Number of parameters of the model.
    pub parameters: usize,
    /// Number of tokens in a step.
    pub tokens: usize,
    /// Loss of the first step.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Median seconds of a step.
    pub seconds_median: f64,
    /// Tokens of a step divided by its median time.
    pub tokens_per_s: f64,
}

/// Measures gradients and updates on the same batch repeatedly.
pub fn bench(args: &BenchArgs) -> Result<Measured, LearnerError> {
    if let Some(threads) = args.threads {
        tch::set_num_threads(threads);
    }
    let mut config = TrainConfig::new(args.model.clone(), PathBuf::new());
    config.device = args.device;
    config.compute = args.compute;
    config.memory.microbatch_tokens = args.microbatch_tokens;
    config.memory.recompute_layers = args.recompute_layers;
    config.optimizer.beta2 = 0.95;
    config.optimizer.weight_decay = 0.01;
    config.schedule.peak = 1e-5;
    let mut learner = Learner::open(&config, None)?;
    let expected = learner.expected();
    let samples = samples(args.rows, args.longer.into(), expected.vocabulary);
    let rows = Rows::read(&samples, &expected, 0).expect("the rows are made within every bound");
    let (mut losses, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..=args.steps {
        let started = Instant::now();
        let outcome = learner.gradients(&rows)?;
        learner.apply(&outcome)?;
        losses.extend(outcome.statistics.map(|statistics| statistics.loss));
        // On a GPU the update is only queued, and reading the norm of the gradients in the next step would include the
        // wait for it.
        if let Some((_, tensor)) = learner.parameters().iter().next() {
            tensor.get(0).sum(tch::Kind::Float).double_value(&[]);
        }
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
    let tokens = rows.statistics().tokens;
    Ok(Measured {
        engine: "forebay-trainer",
        threads: tch::get_num_threads(),
        parameters: learner.parameters().count(),
        tokens,
        loss_first: losses.first().copied().unwrap_or(f64::NAN),
        loss_last: losses.last().copied().unwrap_or(f64::NAN),
        seconds_median: median,
        tokens_per_s: tokens as f64 / median,
    })
}

/// Lengths, ids and numbers, computed by the same formulas as in `eager.py`.
fn samples(count: usize, longer: usize, vocabulary: usize) -> Vec<Sample> {
    let response_of = |row: usize| (64 + row * 37 % 192) * longer;
    let trained: usize = (0..count).map(response_of).sum();
    (0..count)
        .map(|row| {
            let (prompt, response) = ((32 + row * 7 % 64) * longer, response_of(row));
            let id = |t: usize| ((row * 7_919 + t * 104_729) % vocabulary) as i32;
            Sample {
                columns: BTreeMap::new(),
                media: Vec::new(),
                rollout_id: row.to_string(),
                group_id: (row / 8).to_string(),
                segment: 0,
                segments: 1,
                kind: None,
                environment: None,
                verdict: Verdict::Kept,
                status: Status::Completed,
                tokens: Some((0..prompt + response).map(id).collect()),
                response_length: response as i32,
                loss_mask: Some(vec![1; response]),
                logprobs: Some((0..response).map(|t| -10.4 + ((row + t) % 9) as f32 / 20.0 - 0.2).collect()),
                teacher_logprobs: None,
                values: None,
                temperature: 1.0,
                top_p: 1.0,
                top_k: -1,
                reward: Some(1.0),
                advantage: Some((row % 5) as f32 / 2.0 - 1.0),
                advantages: None,
                loss_weight: 1.0 / trained as f64,
                policy_version: Some(0),
                versions: None,
                messages: None,
                metadata: None,
            }
        })
        .collect()
}
