//! The loop of a worker: load the newest weights, play a round of whole groups, post them, and repeat.
//!
//! The worker depends only on the versions that a trainer publishes. If no new version appears it continues to play,
//! until the service reports that the backlog is full; then it waits.

use std::time::{Duration, Instant};

use forebay_client::wire::{PolicyStatus, Trajectory};
use tch::Device;
use tokio::runtime::Handle;

use super::{
    Agent, RolloutError,
    follow::Follower,
    post::{Posted, Poster},
    task::{Problem, Task},
    weights::{Weights, WeightsError},
};
use crate::{
    chain,
    model::ComputeKind,
    published::{FolderError, Publication},
    random::Random,
    service::{Service, ServiceError},
};

/// Time between two progress lines of the log.
const PROGRESS: Duration = Duration::from_secs(10);

/// Number of attempts to load a version that exists and cannot be read.
const LOADS_MAX: u32 = 3;

/// Pause after a failed attempt to load a version. It grows with every attempt, up to one second.
const LOAD_PAUSE: Duration = Duration::from_millis(500);
const LOAD_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Settings of a worker.
#[derive(Debug)]
pub struct WorkerConfig {
    /// The task.
    pub task: Box<dyn Task>,
    /// Distinguishes this worker from others with the same seed: each plays its own problems.
    pub worker: String,
    /// Identifies this start of the worker. Together with `worker` it must be unique, because rollout ids begin with
    /// both.
    pub session: String,
    /// Determines, with `worker` and the order of the versions, what is played.
    pub seed: u64,
    /// Number of rollouts of a group; the size in the policy's rules if absent.
    pub group_size: Option<u32>,
    /// Number of groups that are played at once.
    pub groups_per_round: u32,
    /// Divisor of the logits.
    pub temperature: f32,
    /// Maximum number of tokens of a turn; the longest useful turn of the task if absent.
    pub turn_tokens_max: Option<usize>,
    /// Number of rollouts after which the worker ends, rounded up to whole rounds.
    pub rollouts_max: Option<u64>,
    /// Device of the model.
    pub device: Device,
    /// What it computes in.
    pub compute: ComputeKind,
}

/// Totals of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Number of rollouts that were played.
    pub rollouts: u64,
    /// Number of tokens that the model drew.
    pub tokens: u64,
    /// Sum of all rewards.
    pub reward: f64,
    /// Number of versions that were loaded.
    pub versions: u64,
    /// What happened to the rollouts.
    pub posted: Posted,
}

/// An agent that plays for one policy until it is stopped.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    runtime: Handle,
    service: Service,
    follower: Follower,
    poster: Poster,
    /// The seed that all random numbers derive from.
    seed: u64,
    round: u64,
    tally: Tally,
    progress: Progress,
}

impl Worker {
    /// Creates a worker for the policy of `service`. Calls to the service run on `runtime`.
    #[must_use]
    pub fn new(runtime: &Handle, service: Service, config: WorkerConfig) -> Self {
        Self {
            runtime: runtime.clone(),
            follower: Follower::start(runtime, service.clone()),
            poster: Poster::new(runtime.clone(), service.clone()),
            service,
            seed: config.seed ^ fingerprint(&config.worker),
            config,
            round: 0,
            tally: Tally::default(),
            progress: Progress::new(),
        }
    }

    /// Plays until `stop` is set or the configured number of rollouts is reached, and then posts everything that was
    /// played. After `stop`, posting ends after a few seconds even if the service has not accepted everything.
    ///
    /// Must not be called within the runtime.
    pub fn run(mut self, stop: &dyn Fn() -> bool) -> Result<Tally, RolloutError> {
        let mut weights = None;
        while !stop() && self.config.rollouts_max.is_none_or(|most| self.tally.rollouts < most) {
            let Some((weights, group_size)) = self.newest(&mut weights, stop)? else { break };
            let groups = self.play_round(weights, group_size)?;
            self.poster.send(groups, stop)?;
            self.tally.posted = self.poster.posted();
            self.progress.tell(&self.tally, weights.publication.version);
        }
        self.poster.settle(stop)?;
        self.tally.posted = self.poster.posted();
        Ok(self.tally)
    }

    /// Returns the weights of the current version, loading them if necessary, and the size of a group. Waits for the
    /// first version. Returns `None` if `stop` is set before there is one.
    fn newest<'slot>(
        &mut self,
        weights: &'slot mut Option<Weights>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<(&'slot Weights, u32)>, RolloutError> {
        let (mut attempts, mut failures) = (0, 0);
        let mut told = false;
        while !stop() {
            let status = self.follower.status();
            let Some((current, status)) =
                status.as_ref().and_then(|status| Some((Publication::current(status)?, status)))
            else {
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(policy = self.service.policy(), "waiting for the first version of the weights");
                }
                self.follower.wait(&self.runtime)?;
                continue;
            };
            let group_size = self.config.group_size.unwrap_or_else(|| group_size(status));
            if weights.as_ref().is_some_and(|weights| weights.publication == current) {
                return Ok(weights.as_ref().map(|weights| (weights, group_size)));
            }
            // The old weights are freed first, because memory may be too small for two sets.
            *weights = None;
            attempts += 1;
            let error = match Weights::load(&current, self.config.device, self.config.compute) {
                Ok(loaded) => {
                    tracing::debug!(version = current.version, "loaded a version");
                    self.tally.versions += 1;
                    return Ok(Some((weights.insert(loaded), group_size)));
                }
                Err(error) => error,
            };
            // A folder may disappear while it is read because a newer version replaces it. A folder that stays and
            // cannot be read is an error.
            failures += u32::from(!matches!(error, WeightsError::Folder(FolderError::Gone(_))));
            if failures >= LOADS_MAX {
                return Err(error.into());
            }
            tracing::warn!(version = current.version, error = chain(&error), "cannot load the version; trying again");
            self.pause(LOAD_PAUSE.saturating_mul(attempts).min(LOAD_PAUSE_MAX), stop)?;
        }
        Ok(None)
    }

    /// Plays the next groups from the worker's stream of problems.
    fn play_round(&mut self, weights: &Weights, group_size: u32) -> Result<Vec<Vec<Trajectory>>, RolloutError> {
        let (round, groups) = (self.round, self.config.groups_per_round);
        self.round += 1;
        let number = |group: u32| round * u64::from(groups) + u64::from(group);
        let problems: Vec<Box<dyn Problem>> =
            (0..groups).map(|group| self.config.task.pose(self.seed, number(group))).collect();
        let rows: Vec<&dyn Problem> =
            problems.iter().flat_map(|problem| std::iter::repeat_n(&**problem, group_size as usize)).collect();
        let agent = Agent {
            decoder: &weights.decoder,
            version: weights.publication.version,
            tokenizer: &weights.tokenizer,
            temperature: self.config.temperature,
            turn_tokens_max: self.config.turn_tokens_max.unwrap_or_else(|| self.config.task.turn_tokens()),
        };
        let played = agent.play(&rows, round_seed(self.seed, round))?;
        for rollout in &played {
            self.tally.rollouts += 1;
            self.tally.tokens += rollout.loss_mask.iter().map(|&mask| u64::from(mask)).sum::<u64>();
            self.tally.reward += rollout.outcome.reward;
        }
        let chunks = played.chunks(group_size as usize).zip(0..groups);
        Ok(chunks
            .map(|(members, group)| {
                let group_id = format!("{}.{}.{}", self.config.worker, self.config.session, number(group));
                let name = |(index, played)| Trajectory {
                    policy: Some(self.service.policy().to_owned()),
                    rollout_id: Some(format!("{group_id}.{index}")),
                    group_id: Some(group_id.clone()),
                    group_size: Some(group_size),
                    environment: Some(self.config.task.name().to_owned()),
                    ..agent.trajectory(played)
                };
                members.iter().enumerate().map(name).collect()
            })
            .collect())
    }

    /// Waits, but not longer than until the policy's status changes or `stop` is set.
    fn pause(&mut self, pause: Duration, stop: &dyn Fn() -> bool) -> Result<(), ServiceError> {
        let started = Instant::now();
        while started.elapsed() < pause && !stop() {
            if self.follower.wait(&self.runtime)? {
                break;
            }
        }
        Ok(())
    }
}

/// Returns the group size in the policy's rules.
fn group_size(status: &PolicyStatus) -> u32 {
    status.rules.group.size.max(1)
}

/// Hashes a name to a number that is the same on every machine and in every build (64-bit FNV-1a).
fn fingerprint(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The seed of the random numbers of a round. Its stream differs from those of problems, which count up from 0.
fn round_seed(seed: u64, round: u64) -> u64 {
    let mut random = Random::new(seed, u64::MAX - round);
    let mut half = || (random.uniform() * 2f64.powi(32)) as u64;
    (half() << 32) | half()
}

/// Writes a progress line every few seconds.
#[derive(Debug)]
struct Progress {
    since: Instant,
    before: Tally,
}

impl Progress {
    fn new() -> Self {
        Self { since: Instant::now(), before: Tally::default() }
    }

    fn tell(&mut self, tally: &Tally, version: i64) {
        let elapsed = self.since.elapsed();
        if elapsed < PROGRESS {
            return;
        }
        let rollouts = tally.rollouts - self.before.rollouts;
        let per_second = |count: u64| (count as f64 / elapsed.as_secs_f64()).round();
        tracing::info!(
            version,
            rollouts = tally.rollouts,
            reward_mean = ((tally.reward - self.before.reward) / rollouts.max(1) as f64 * 1e3).round() / 1e3,
            rollouts_per_s = per_second(rollouts),
            tokens_per_s = per_second(tally.tokens - self.before.tokens),
            refused = tally.posted.refused,
            "playing",
        );
        *self = Self { since: Instant::now(), before: *tally };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_those_of_fnv() {
        // From the published test vectors of the algorithm.
        assert_eq!(fingerprint(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fingerprint("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn rounds_have_seeds_of_their_own() {
        let seeds: std::collections::BTreeSet<u64> = (0..100).map(|round| round_seed(7, round)).collect();
        assert_eq!(seeds.len(), 100);
        assert_eq!(round_seed(7, 3), round_seed(7, 3));
        assert_ne!(round_seed(8, 3), round_seed(7, 3));
    }
}
