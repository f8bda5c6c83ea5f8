//! Hands groups in while the next ones are played: at most one round is on its way.
//!
//! A full backlog or a service that is away holds the worker up here, and nowhere else: what has been played is kept
//! until it is taken.

use std::time::{Duration, Instant};

use forebay_client::wire::{GroupState, Receipt, Trajectory, Verdict};
use tokio::{runtime::Handle, task::JoinSet};

use crate::service::{Service, ServiceError};

/// How soon a wish to stop is noticed.
const LOOK: Duration = Duration::from_millis(200);

/// How long a worker that stops still tries to hand in what it has played.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// What became of the rollouts that were handed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Posted {
    /// Groups that the service has taken.
    pub groups: u64,
    /// Their rollouts.
    pub rollouts: u64,
    /// Rollouts that it had already.
    pub duplicates: u64,
    /// Rollouts that a rule dropped, or that came too late for their group.
    pub refused: u64,
    /// Rollouts that were played, and not taken before the worker stopped.
    pub abandoned: u64,
}

/// Groups on their way to the service.
#[derive(Debug)]
pub(super) struct Poster {
    runtime: Handle,
    service: Service,
    underway: JoinSet<Result<Vec<Receipt>, ServiceError>>,
    rollouts_underway: u64,
    /// When a wish to stop was noticed.
    stopping_since: Option<Instant>,
    posted: Posted,
}

impl Poster {
    pub(super) fn new(runtime: Handle, service: Service) -> Self {
        Self {
            runtime,
            service,
            underway: JoinSet::new(),
            rollouts_underway: 0,
            stopping_since: None,
            posted: Posted::default(),
        }
    }

    pub(super) fn posted(&self) -> Posted {
        self.posted
    }

    /// Begins to hand in `groups`, each all or nothing, once the round before has been taken.
    pub(super) fn send(&mut self, groups: Vec<Vec<Trajectory>>, stop: &dyn Fn() -> bool) -> Result<(), ServiceError> {
        self.settle(stop)?;
        for group in groups {
            self.rollouts_underway += group.len() as u64;
            let service = self.service.clone();
            let post = async move { service.patiently("post", || service.client().post_bundle(&group)).await };
            self.underway.spawn_on(post, &self.runtime);
        }
        Ok(())
    }

    /// Waits until everything is taken. Once `stop` says so it waits no longer than [`STOP_GRACE`].
    pub(super) fn settle(&mut self, stop: &dyn Fn() -> bool) -> Result<(), ServiceError> {
        while !self.underway.is_empty() {
            let runtime = self.runtime.clone();
            let answer = runtime.block_on(async { tokio::time::timeout(LOOK, self.underway.join_next()).await });
            if let Ok(Some(Ok(receipts))) = answer {
                self.note(&receipts?);
            } else if stop() && self.stopping_since.get_or_insert_with(Instant::now).elapsed() > STOP_GRACE {
                self.abandon();
            }
        }
        Ok(())
    }

    fn note(&mut self, receipts: &[Receipt]) {
        self.rollouts_underway -= receipts.len() as u64;
        self.posted.groups += 1;
        self.posted.rollouts += receipts.len() as u64;
        for receipt in receipts {
            self.posted.duplicates += u64::from(receipt.duplicate);
            self.posted.refused += u64::from(matches!(receipt.verdict, Verdict::Dropped | Verdict::Late));
            for warning in &receipt.warnings {
                tracing::warn!(rollout.id = receipt.rollout_id, warning, "the service warns");
            }
        }
        let Some(last) = receipts.last().filter(|last| last.group.state == GroupState::Open) else { return };
        tracing::warn!(
            group.id = last.group_id,
            arrived = last.group.arrived,
            size = last.group.size,
            "the group stays open: a rule dropped some of its rollouts, and this agent sends no replacements; \
             `on_drop = \"shrink\"` decides such groups",
        );
    }

    fn abandon(&mut self) {
        tracing::warn!(rollouts = self.rollouts_underway, "stopped before the service took all that was played");
        self.posted.abandoned += std::mem::take(&mut self.rollouts_underway);
        self.underway = JoinSet::new();
    }
}
