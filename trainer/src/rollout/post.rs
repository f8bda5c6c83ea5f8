//! Posts groups while the next ones are played. At most one round is being posted at a time.
//!
//! A full backlog or an unavailable service blocks the worker only here: groups that have been played are kept until
//! the service has accepted them.

use std::time::{Duration, Instant};

use forebay_client::wire::{GroupState, Receipt, Trajectory, Verdict};
use tokio::{runtime::Handle, task::JoinSet};

use crate::service::{Service, ServiceError};

/// How often the stop flag is checked.
const LOOK: Duration = Duration::from_millis(200);

/// How long a worker that stops still tries to post what it has played.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// What happened to the rollouts that were posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Posted {
    /// Number of groups that the service accepted.
    pub groups: u64,
    /// Number of rollouts in these groups.
    pub rollouts: u64,
    /// Number of rollouts that the service had already.
    pub duplicates: u64,
    /// Number of rollouts that a rule dropped, or that arrived after their group was decided.
    pub refused: u64,
    /// Number of rollouts that were played but not accepted before the worker stopped.
    pub abandoned: u64,
}

/// Groups that are being posted to the service.
#[derive(Debug)]
pub(super) struct Poster {
    runtime: Handle,
    service: Service,
    underway: JoinSet<Result<Vec<Receipt>, ServiceError>>,
    rollouts_underway: u64,
    /// When the worker noticed that it should stop.
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

    /// Starts to post `groups`, each of them all or nothing, once the previous round has been accepted.
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

    /// Waits until all groups are accepted. Once `stop` is set, waits at most [`STOP_GRACE`].
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
                tracing::warn!(rollout.id = receipt.rollout_id, warning, "the service sent a warning");
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
        tracing::warn!(rollouts = self.rollouts_underway, "stopped before the service accepted all rollouts");
        self.posted.abandoned += std::mem::take(&mut self.rollouts_underway);
        self.underway = JoinSet::new();
    }
}
