//! Stage 7, sweep: what time alone changes. Expired work is back within a second of its end.
//!
//! Every replica sweeps; the guards of the store make that harmless.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Buffer,
    finalize::Cause,
    ids::{GroupPk, PolicyName},
    replicas::Awaited,
};
use crate::store::StoreError;

/// Pause between sweeps, a quarter of what [`Buffer::run_sweeper`] promises.
const SWEEP_EVERY: Duration = Duration::from_millis(250);

/// Things of one kind that one transaction of a sweep changes.
const SLICE: u32 = 1_000;

impl Buffer {
    /// Sweeps until it is dropped. What expired is back within a second.
    pub async fn run_sweeper(&self) {
        loop {
            tokio::time::sleep(SWEEP_EVERY).await;
            if !self.takes_work()
                && let Err(error) = self.ping().await
            {
                tracing::debug!(error = %error, "the store still cannot write");
                continue;
            }
            // Posts and leases read the changes that are still to be added.
            if let Err(error) = self.fold_tallies().await {
                tracing::warn!(error = %error, "changes of tallies were not added to them; the next time goes on");
            }
            let started = Instant::now();
            let outcome = self.sweep().await;
            self.metrics.swept(started.elapsed(), outcome.is_ok());
            if let Err(error) = outcome {
                tracing::warn!(error = %error, "a sweep failed; the next one goes on");
            }
        }
    }

    /// One sweep: leases past their end, groups past their deadline, payloads and tombstones past their time.
    pub async fn sweep(&self) -> Result<(), StoreError> {
        if !self.store.anything_due(self.clock.now()).await? {
            return Ok(());
        }
        self.expire_leases().await?;
        self.decide_overdue_groups().await?;
        while self.store.expire_admissions(self.clock.now(), SLICE).await? >= u64::from(SLICE) {}
        while self.store.retire(self.clock.now(), SLICE).await? >= u64::from(SLICE) {}
        while self.store.discard_stragglers(self.clock.now(), SLICE).await? >= u64::from(SLICE) {}
        Ok(())
    }

    /// Adds changes of tallies to them, where the store appends changes.
    pub async fn fold_tallies(&self) -> Result<(), StoreError> {
        self.store.fold_tallies().await
    }

    async fn expire_leases(&self) -> Result<(), StoreError> {
        let expired = self.store.expire_leases(self.clock.now(), SLICE).await?;
        for (policy, leases) in expired {
            self.report_expired(&policy, leases);
            self.wake(Awaited::Batch, &policy);
        }
        Ok(())
    }

    /// Counts leases that were past their end.
    pub(super) fn report_expired(&self, policy: &PolicyName, leases: u64) {
        if leases > 0 {
            tracing::info!(policy.name = %policy, leases, "leases expired");
            self.metrics.lease(policy.as_str(), "expired", leases);
        }
    }

    async fn decide_overdue_groups(&self) -> Result<(), StoreError> {
        loop {
            let now = self.clock.now();
            let overdue = self.store.overdue_groups(now, SLICE).await?;
            let slice = overdue.len();
            let mut failed = 0;
            for group in overdue {
                if let Err(error) = self.decide_overdue_group(group).await {
                    // One group that cannot be decided must not hold up the others.
                    failed += 1;
                    tracing::error!(error = %error, group.pk = group.0, "an overdue group cannot be decided");
                }
            }
            if slice < SLICE as usize || failed == slice {
                return Ok(());
            }
        }
    }

    async fn decide_overdue_group(&self, group: GroupPk) -> Result<(), StoreError> {
        let (decide, now) = (Arc::clone(&self.decide), self.clock.now());
        if let Some((policy, group)) = self.store.decide_overdue(group, Cause::TimedOut, decide, now).await? {
            self.report_decided(&policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
        }
        Ok(())
    }
}
