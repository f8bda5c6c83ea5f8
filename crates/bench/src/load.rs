//! The load: connections that post groups, and trainers that take batches.
//!
//! In the closed loop, every connection sends its next body as soon as the previous one is answered. This is the
//! highest load that this number of agents can cause. In the open loop, bodies are due at a constant rate even if the
//! service is slower, and a latency begins when its body was due. So the latencies also show when the service has
//! stalled. The previous module is [`crate::template`], the next [`crate::report`](mod@crate::report).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use tokio::task::JoinSet;

use crate::{
    progress::Progress,
    protocol::Protocol,
    tally::{Tally, Window},
    target::{Answer, Target},
    template::{Bodies, Body},
};

/// Pause before a repeat if the service names none.
const PAUSE: Duration = Duration::from_millis(100);

/// Random addition to the pause, so that connections that were refused together do not repeat together.
const JITTER: Duration = Duration::from_millis(100);

/// Number of broken connections of one body after which the run ends. A service that refuses early may close a
/// connection before its answer is read; a service that has ended never answers again.
const BROKEN_MAX: u32 = 20;

/// The tasks of connections and trainers. They end when the set is dropped.
type Tasks = JoinSet<anyhow::Result<()>>;

/// The amount of load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) connections: usize,
    pub(crate) trainers: usize,
    /// Bodies per second that are due; `None` for the closed loop.
    pub(crate) rate: Option<f64>,
    /// Number of bodies after which the run ends.
    pub(crate) bodies_max: Option<u64>,
}

/// State that connections and trainers share.
pub(crate) struct Run {
    pub(crate) load: Load,
    pub(crate) target: Target,
    pub(crate) protocol: Arc<dyn Protocol>,
    pub(crate) bodies: Bodies,
    pub(crate) tally: Tally,
    next_body: AtomicU64,
    /// Number of connections that are still posting.
    posting: AtomicUsize,
}

impl Run {
    pub(crate) fn new(
        load: Load,
        target: Target,
        protocol: Arc<dyn Protocol>,
        bodies: Bodies,
        tally: Tally,
    ) -> Arc<Self> {
        let posting = AtomicUsize::new(load.connections);
        Arc::new(Self { load, target, protocol, bodies, tally, next_body: AtomicU64::new(0), posting })
    }

    /// Runs until the end or an interrupt. The first error ends the run.
    pub(crate) async fn finish(self: &Arc<Self>) -> anyhow::Result<()> {
        let mut tasks = Tasks::new();
        for _ in 0..self.load.connections {
            let run = Arc::clone(self);
            tasks.spawn(async move { run.connection().await });
        }
        for _ in 0..self.load.trainers {
            let run = Arc::clone(self);
            tasks.spawn(async move { run.trainer().await });
        }
        let mut progress = Progress::new();
        let outcome = self.wait_for(tasks, &mut progress).await;
        progress.end();
        outcome
    }

    async fn wait_for(&self, mut tasks: Tasks, progress: &mut Progress) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + Progress::EVERY, Progress::EVERY);
        let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
        loop {
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    None => return Ok(()),
                    Some(outcome) => outcome.context("the generator is broken")??,
                },
                _ = ticks.tick() => progress.tell(&self.tally),
                _ = &mut interrupt => {
                    self.tally.interrupted();
                    return Ok(());
                }
            }
        }
    }

    /// In the open loop, the number of bodies that were due before the end but not sent.
    pub(crate) fn behind(&self) -> u64 {
        let Window { start, until, .. } = self.tally.window;
        let (sent, interrupted) =
            self.tally.write(|counts| (counts.posted.bodies + counts.abandoned, counts.interrupted));
        let (Some(rate), Some(end)) = (self.load.rate, interrupted.or(until)) else { return 0 };
        let due = rate * (end - start).as_secs_f64();
        (due as u64).saturating_sub(sent)
    }

    async fn connection(&self) -> anyhow::Result<()> {
        while let Some((number, due)) = self.next().await {
            let body = self.bodies.body(number);
            if self.post(&body).await? {
                self.tally.posted(&body, due);
            } else {
                self.tally.abandoned();
            }
        }
        self.posting.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until the next body is due. Returns its number and when it was due, or `None` if there is no further body.
    async fn next(&self) -> Option<(u64, Instant)> {
        let number = self.next_body.fetch_add(1, Ordering::Relaxed);
        if self.load.bodies_max.is_some_and(|most| number >= most) {
            return None;
        }
        let window = &self.tally.window;
        let due = match self.load.rate {
            Some(rate) => window.start + Duration::from_secs_f64(number as f64 / rate),
            None => Instant::now(),
        };
        if window.until.is_some_and(|until| due >= until) || window.is_over() {
            return None;
        }
        tokio::time::sleep_until(due.into()).await;
        Some((number, due))
    }

    /// Posts a body until it is accepted. Returns false if the run ended before that.
    async fn post(&self, body: &Body) -> anyhow::Result<bool> {
        let mut broken = 0;
        loop {
            let pause = match self.target.post(self.protocol.path(), body).await? {
                Answer::Accepted(answer) if self.protocol.is_taken(&answer) => return Ok(true),
                Answer::Accepted(answer) => bail!("not taken: {}", String::from_utf8_lossy(&answer)),
                Answer::Refused { status, retry_after } => {
                    self.tally.refused(status);
                    retry_after.unwrap_or(PAUSE)
                }
                Answer::Broken(error) => {
                    self.tally.broken();
                    broken += 1;
                    if broken == BROKEN_MAX {
                        return Err(error).with_context(|| format!("{} no longer answers", self.target.url));
                    }
                    PAUSE
                }
            };
            tokio::time::sleep(pause + JITTER.mul_f64(rand::random())).await;
            if self.tally.window.is_over() {
                return Ok(false);
            }
        }
    }

    /// Takes one batch after the other, until the time is over or all groups are posted and no batch is left.
    async fn trainer(&self) -> anyhow::Result<()> {
        while !self.tally.window.is_over() {
            // This is read before the round, because groups that are posted during the round are taken in the next one.
            let is_last = self.tally.window.until.is_none() && self.posting.load(Ordering::Relaxed) == 0;
            match self.protocol.take().await? {
                Some(taken) => self.tally.taken(&taken),
                None if is_last => break,
                None => {}
            }
        }
        Ok(())
    }
}
