//! The report of a step: one line of JSON, Prometheus metrics, files for `TensorBoard` and Weights & Biases, and a
//! progress bar for people.
//!
//! This is separate from the loop, which passes one [`StepReport`] per step and does not know where it is written.

mod protobuf;
mod tensorboard;
mod wandb;

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{Router, extract::State, http::header, routing::get};
use indicatif::{ProgressBar, ProgressStyle};
use prometheus::{Gauge, IntCounter, IntGauge, Registry, TextEncoder};
use serde::Serialize;
use serde_json::Value;
use tokio::runtime::Handle;

pub use self::wandb::RunDescription;

use self::{tensorboard::EventFile, wandb::RunFile};
use crate::loss::StepStatistics;

/// The progress bar on the screen, if there is one. Lines of the log are printed above it.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Standard error, as the log writes to it: the progress bar is hidden while a line is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogWriter;

impl io::Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match bar {
            Some(bar) => bar.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// The report of one optimizer step. Means over tokens are over trained tokens (mask 1).
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepReport {
    /// Optimizer step, from 1.
    pub step: i64,
    /// Newest weight version that was published when the step began.
    pub version: i64,
    /// Batch that the step consumed; several ids are separated by commas.
    pub batch_id: String,
    /// Seconds since the trainer started.
    pub seconds: f64,
    /// Mean reward over all rollouts that were received since the previous batch, trained or not.
    pub reward_all: Option<f64>,
    /// Mean reward over the rollouts of the batch that train a token.
    pub reward_trained: Option<f64>,
    /// Means of reward components over the kept rollouts of the batches, under the names of the batches' metrics, e.g.
    /// `components/gold/mean`.
    #[serde(flatten)]
    pub components: BTreeMap<String, f64>,
    /// Statistics of the loss.
    #[serde(flatten)]
    pub statistics: StepStatistics,
    /// Loss of the critic.
    pub value_loss: Option<f64>,
    /// Global norm of the gradients before they were clipped, of policy and critic together.
    pub gradient_norm: f64,
    /// Global norm of the gradients of the policy before they were clipped.
    pub policy_gradient_norm: f64,
    /// Global norm of the gradients of the critic before they were clipped, if there is a critic.
    pub critic_gradient_norm: Option<f64>,
    /// Learning rate of the policy in this step.
    pub learning_rate: f64,
    /// Mean staleness of the trained rollouts: current version minus the version of the oldest trained token.
    pub staleness_mean: f64,
    /// Largest staleness of a trained rollout.
    pub staleness_max: i64,
    /// Number of rollouts, trained or not.
    pub rollouts: usize,
    /// Number of trained rows without behaviour log-probabilities. Their ratio is 1.
    pub rows_without_logprobs: usize,
    /// Number of trained rows that were sampled with a `top_p` or `top_k` that excluded tokens.
    pub rows_top_sampled: usize,
    /// Number of prompt and response tokens.
    pub tokens: usize,
    /// Tokens per second, without the time spent waiting for data.
    pub tokens_per_s: f64,
    /// Seconds spent waiting for data before the step.
    pub waited_s: f64,
    /// Share of the time since the previous step that was spent waiting for data.
    pub waiting_share: f64,
}

/// Writes reports to all configured outputs.
pub struct Reporter {
    lines: Option<File>,
    events: Option<EventFile>,
    run: Option<RunFile>,
    metrics: Arc<TrainerMetrics>,
    bar: ProgressBar,
}

impl Reporter {
    /// Shows a progress bar of `steps` steps if standard error is a terminal. The other outputs are added later.
    #[must_use]
    pub fn new(steps: i64) -> Self {
        let bar = ProgressBar::new(steps.max(0) as u64);
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        if !bar.is_hidden() {
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        }
        Self { lines: None, events: None, run: None, metrics: Arc::new(TrainerMetrics::new()), bar }
    }

    /// From now on appends one line per step to the file at `path`. Existing lines of steps above `done` are removed,
    /// because these steps are computed again.
    pub fn write_lines(&mut self, path: &Path, done: i64) -> io::Result<()> {
        forget_steps_above(path, done)?;
        self.lines = Some(OpenOptions::new().create(true).append(true).open(path)?);
        self.bar.set_position(done.max(0) as u64);
        Ok(())
    }

    /// From now on writes a new event file for `TensorBoard` in `folder`. It covers the steps above `done`.
    pub fn write_events(&mut self, folder: &Path, done: i64) -> io::Result<()> {
        self.events = Some(EventFile::create(folder, done)?);
        Ok(())
    }

    /// From now on writes a run for Weights & Biases in `folder`. The run begins with the steps in the file `lines`.
    pub fn write_run(&mut self, folder: &Path, description: &RunDescription, lines: &Path) -> io::Result<()> {
        let text = std::fs::read_to_string(lines)?;
        let done: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        self.run = Some(RunFile::create(folder, description, &done)?);
        Ok(())
    }

    /// Serves `/metrics` at `address` until the runtime ends. Returns the address that was bound.
    pub fn serve(&self, runtime: &Handle, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address))?;
        let bound = listener.local_addr()?;
        let router = Router::new().route("/metrics", get(metrics)).with_state(Arc::clone(&self.metrics));
        runtime.spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "metrics are no longer served");
            }
        });
        Ok(bound)
    }

    /// Writes the report of a step to every output.
    pub fn step(&mut self, report: &StepReport) -> io::Result<()> {
        self.metrics.step(report);
        if let Some(lines) = &mut self.lines {
            let mut line = serde_json::to_vec(report)?;
            line.push(b'\n');
            lines.write_all(&line)?;
        }
        let value = serde_json::to_value(report)?;
        if let Some(events) = &mut self.events {
            let numbers: Vec<(&str, f64)> =
                numbers(&value).filter_map(|(name, number)| Some((name, number.as_f64()?))).collect();
            events.step(report.step, &numbers)?;
        }
        if let Some(run) = &mut self.run {
            run.step(&value)?;
        }
        self.bar.set_position(report.step.max(0) as u64);
        self.bar.set_message(format!(
            "reward {} loss {:+.4} staleness {:.1} {:.0} tok/s waiting {:.0}%",
            report.reward_all.or(report.reward_trained).map_or_else(|| "-".to_owned(), |reward| format!("{reward:.3}")),
            report.statistics.loss,
            report.staleness_mean,
            report.tokens_per_s,
            100.0 * report.waiting_share,
        ));
        if !self.bar.is_hidden() {
            // The progress bar shows the same numbers.
            return Ok(());
        }
        tracing::info!(
            step = report.step,
            policy.version = report.version,
            batch.id = report.batch_id,
            reward = report.reward_all,
            reward_trained = report.reward_trained,
            loss = report.statistics.loss,
            gradient_norm = report.gradient_norm,
            staleness_max = report.staleness_max,
            tokens_per_s = report.tokens_per_s.round(),
            waiting_share = report.waiting_share,
            "step"
        );
        Ok(())
    }

    /// Counts a batch whose lease was lost before its ack.
    pub fn lost(&self) {
        self.metrics.lost.inc();
    }

    /// Counts a batch that was given back, because of all or some of its groups.
    pub fn given_back(&self) {
        self.metrics.given_back.inc();
    }

    /// Sets the step of the last saved checkpoint.
    pub fn saved(&self, step: i64) {
        self.metrics.saved_step.set(step);
    }

    /// Marks the run as successful. Called when training has ended without an error.
    pub fn end(&mut self) -> io::Result<()> {
        self.run.as_mut().map_or(Ok(()), RunFile::end)
    }

    /// Stops drawing the progress bar and leaves its last state on the screen.
    pub fn finish(&self) {
        self.bar.abandon();
        *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The numbers of a report by name, without the step.
fn numbers(report: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let all = report.as_object().into_iter().flatten();
    all.filter(|(name, value)| *name != "step" && value.is_number()).map(|(name, value)| (name.as_str(), value))
}

/// Removes an incomplete last line and the lines of steps above `done`. A trainer that was killed wrote these lines,
/// and the resumed trainer computes these steps again.
fn forget_steps_above(path: &Path, done: i64) -> io::Result<()> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let is_done =
        |line: &&str| serde_json::from_str::<Value>(line).is_ok_and(|report| report["step"].as_i64() <= Some(done));
    let kept: String = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).filter(is_done).collect();
    if kept.len() == text.len() {
        return Ok(());
    }
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    let mut aside = tempfile::Builder::new().permissions(std::fs::metadata(path)?.permissions()).tempfile_in(folder)?;
    aside.write_all(kept.as_bytes())?;
    aside.as_file().sync_all()?;
    aside.persist(path)?;
    Ok(())
}

async fn metrics(State(metrics): State<Arc<TrainerMetrics>>) -> ([(header::HeaderName, &'static str); 1], String) {
    let text = TextEncoder::new().encode_to_string(&metrics.registry.gather()).unwrap_or_default();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

/// Reads the value of a gauge from a report.
type Read = fn(&StepReport) -> Option<f64>;

/// The Prometheus metrics: values of the last step as gauges, sums as counters. They have no labels, because a trainer
/// has only one policy.
struct TrainerMetrics {
    registry: Registry,
    step: IntGauge,
    version: IntGauge,
    saved_step: IntGauge,
    staleness_max: IntGauge,
    gauges: Vec<(Gauge, Read)>,
    tokens: IntCounter,
    trained_tokens: IntCounter,
    rollouts: IntCounter,
    lost: IntCounter,
    given_back: IntCounter,
    rows_without_logprobs: IntCounter,
    rows_top_sampled: IntCounter,
    waited: prometheus::Counter,
}

impl TrainerMetrics {
    fn new() -> Self {
        let registry = Registry::new();
        let gauge = |name: &str, help: &str, read: Read| {
            let gauge = Gauge::new(format!("forebay_trainer_{name}"), help).expect("the name is valid");
            registry.register(Box::new(gauge.clone())).expect("the name is new");
            (gauge, read)
        };
        let int = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("forebay_trainer_{name}"), help).expect("the name is valid");
            registry.register(Box::new(gauge.clone())).expect("the name is new");
            gauge
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("forebay_trainer_{name}"), help).expect("the name is valid");
            registry.register(Box::new(counter.clone())).expect("the name is new");
            counter
        };
        let waited =
            prometheus::Counter::new("forebay_trainer_waiting_seconds_total", "Seconds spent waiting for data.")
                .expect("the name is valid");
        registry.register(Box::new(waited.clone())).expect("the name is new");
        let gauges = vec![
            gauge("loss", "Loss of the last step.", |r| Some(r.statistics.loss)),
            gauge("reward_all", "Mean reward over all rollouts received.", |r| r.reward_all),
            gauge("reward_trained", "Mean reward over the rollouts of the last batch that train a token.", |r| {
                r.reward_trained
            }),
            gauge("clip_fraction", "Share of tokens whose ratio was clipped.", |r| r.statistics.clip_fraction),
            gauge("kl_rollout", "Divergence (k3) from the generating weights.", |r| r.statistics.kl_rollout),
            gauge("kl_reference", "Divergence from the reference model.", |r| r.statistics.kl_reference),
            gauge("entropy", "Mean entropy, nats per token.", |r| r.statistics.entropy),
            gauge("ratio_mean", "Mean importance ratio.", |r| r.statistics.ratio_mean),
            gauge("ratio_max", "Largest importance ratio.", |r| r.statistics.ratio_max),
            gauge("value_loss", "Loss of the critic.", |r| r.value_loss),
            gauge("gradient_norm", "Global norm of the gradients before clipping.", |r| Some(r.gradient_norm)),
            gauge("critic_gradient_norm", "Norm of the critic's gradients before clipping.", |r| {
                r.critic_gradient_norm
            }),
            gauge("learning_rate", "Learning rate.", |r| Some(r.learning_rate)),
            gauge("staleness_mean", "Mean staleness of the rollouts of the last batch, in versions.", |r| {
                Some(r.staleness_mean)
            }),
            gauge("tokens_per_second", "Tokens per second in the last step, without waiting.", |r| {
                Some(r.tokens_per_s)
            }),
            gauge("waiting_share", "Share of the last step's time that was spent waiting for data.", |r| {
                Some(r.waiting_share)
            }),
        ];
        Self {
            step: int("step", "Last optimizer step."),
            version: int("version", "Newest weight version that is published."),
            saved_step: int("saved_step", "Step of the last saved checkpoint."),
            staleness_max: int("staleness_max", "Largest staleness in the last batch, in versions."),
            tokens: counter("tokens_total", "Prompt and response tokens of all steps."),
            trained_tokens: counter("trained_tokens_total", "Tokens with mask 1 of all steps."),
            rollouts: counter("rollouts_total", "Rollouts of all steps."),
            lost: counter("lost_batches_total", "Batches whose lease was lost before their ack."),
            given_back: counter(
                "given_back_batches_total",
                "Batches given back, because of all or some of their groups.",
            ),
            rows_without_logprobs: counter(
                "rows_without_logprobs_total",
                "Trained rows without behaviour log-probabilities, whose ratio is 1.",
            ),
            rows_top_sampled: counter(
                "rows_top_sampled_total",
                "Trained rows that were sampled with a top_p or top_k that excluded tokens.",
            ),
            waited,
            gauges,
            registry,
        }
    }

    fn step(&self, report: &StepReport) {
        self.step.set(report.step);
        self.version.set(report.version);
        self.staleness_max.set(report.staleness_max);
        for (gauge, read) in &self.gauges {
            // A gauge keeps its value if the step has none.
            if let Some(value) = read(report) {
                gauge.set(value);
            }
        }
        self.tokens.inc_by(report.tokens as u64);
        self.trained_tokens.inc_by(report.statistics.trained_tokens as u64);
        self.rollouts.inc_by(report.rollouts as u64);
        self.rows_top_sampled.inc_by(report.rows_top_sampled as u64);
        self.rows_without_logprobs.inc_by(report.rows_without_logprobs as u64);
        self.waited.inc_by(report.waited_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_are_done_again_are_reported_once() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = folder.path().join("metrics.jsonl");
        let mut first = Reporter::new(10);
        first.write_lines(&path, 0).expect("the file can be written");
        for step in 1..=3 {
            first.step(&StepReport { step, ..StepReport::default() }).expect("it is written");
        }
        drop(first);
        let torn = std::fs::read_to_string(&path).expect("it is there") + "{\"step\": 4, \"lo";
        std::fs::write(&path, torn).expect("it can be written");
        let mut second = Reporter::new(10);
        second.write_lines(&path, 2).expect("the file can be written");
        second.step(&StepReport { step: 3, ..StepReport::default() }).expect("it is written");
        let steps: Vec<i64> = std::fs::read_to_string(&path)
            .expect("it is there")
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("it is JSON")["step"].as_i64())
            .map(|step| step.expect("it is a number"))
            .collect();
        assert_eq!(steps, [1, 2, 3]);
    }

    #[test]
    fn components_stand_beside_the_other_numbers_of_a_line() {
        let components = BTreeMap::from([("components/gold/mean".to_owned(), 0.75)]);
        let report = serde_json::to_value(StepReport { step: 1, components, ..StepReport::default() });
        let report = report.expect("it is JSON");
        assert_eq!(report["components/gold/mean"], 0.75);
        assert!(numbers(&report).any(|(name, _)| name == "components/gold/mean"), "and so in every output");
    }

    #[test]
    fn the_last_step_is_served_as_metrics() {
        forebay_client::install_tls_provider();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
        let mut reporter = Reporter::new(10);
        let address = reporter.serve(runtime.handle(), ([127, 0, 0, 1], 0).into()).expect("a port is free");
        let statistics = StepStatistics { loss: -0.25, trained_tokens: 7, ..StepStatistics::default() };
        for step in [1, 2] {
            let report = StepReport { step, statistics, reward_trained: Some(0.5), ..StepReport::default() };
            reporter.step(&report).expect("nothing is written");
        }
        reporter.lost();
        let url = format!("http://{address}/metrics");
        let text = runtime.block_on(async { reqwest::get(url).await?.text().await }).expect("it is served");
        for line in [
            "forebay_trainer_step 2",
            "forebay_trainer_loss -0.25",
            "forebay_trainer_reward_trained 0.5",
            "forebay_trainer_trained_tokens_total 14",
            "forebay_trainer_lost_batches_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "`{line}` is not in\n{text}");
        }
    }
}
