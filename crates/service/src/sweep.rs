//! Stage 7, sweep: makes the changes that time alone makes due. Expired work is available again within a second.
//!
//! Every replica sweeps. The conditions of the store's statements make concurrent sweeps harmless.
//!
//! It ends expired leases, decides overdue groups, purges payloads and expires rows. If nothing is due, it only reads.
//! Rules that no policy and no group has are deleted separately ([`unused_rules`](crate::unused_rules)).

use std::time::{Duration, Instant};

use forebay_domain::{
    finalize::Cause,
    groups::DecidedGroup,
    health::Health,
    ids::{GroupPk, PolicyName},
    lease::ExpiredLeases,
    peers::Awaited,
    reasons,
    sweep::PayloadMoves,
};
use forebay_store::{
    error::StoreError,
    ops::{
        admission::ExpireAdmissions,
        blobs::RetireBlobs,
        group::{DecideOverdue, OverdueGroups},
        session::sweep::RetireSessions,
        sweep::{AnythingDue, DiscardStragglers, ExpireLeases, Probe, Retire},
    },
};

use crate::{
    Buffer, ingest,
    looking::journal,
    scores,
    session::end,
    waiting::{consumers, replicas},
};

/// Pause between sweeps, a quarter of the delay that [`Buffer::run_sweeper`] allows.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// Pause between slices of payloads that move, so that posts and leases have most of the database's time.
const MOVE_INTERVAL: Duration = Duration::from_millis(250);

/// Pause between looks for objects that are no longer needed.
const CARE_INTERVAL: Duration = Duration::from_secs(2);

/// Pause after a failure, which is probably one of the object store.
const CARE_FAILED_PAUSE: Duration = Duration::from_secs(10);

/// The most rows of one kind that one transaction of a sweep changes.
const SLICE: u32 = 1_000;

/// The same for uploads, each of which has up to 64 pieces.
const BLOBS: u32 = 16;

impl Buffer {
    /// Sweeps until the future is dropped. Expired leases come back within a second.
    pub async fn run_sweeper(&self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            if !self.is_database_writable()
                && let Err(error) = self.ping().await
            {
                tracing::debug!(error = %error, "the store still cannot write");
                continue;
            }
            // Posts and leases read the changes that are not yet added, so these must stay few.
            if let Err(error) = self.fold_tallies().await {
                tracing::warn!(error = %error, "adding changes to the tallies failed; the next sweep tries again");
            }
            if let Err(error) = self.flush_delivered().await {
                tracing::warn!(error = %error, "marking calls as delivered failed; the next sweep tries again");
            }
            let started = Instant::now();
            let outcome = self.sweep().await;
            self.metrics.swept(started.elapsed(), outcome.is_ok());
            if let Err(error) = outcome {
                tracing::warn!(error = %error, "a sweep failed; the next one tries again");
            }
        }
    }

    /// Moves payloads to where the configuration wants them, and removes objects that are no longer needed, until the future
    /// is dropped.
    pub async fn run_payload_care(&self) {
        tokio::join!(care_for_payloads(self), probe_payloads(self));
    }
}

/// Finds out whether the object store takes payloads again after it took none.
async fn probe_payloads(buffer: &Buffer) {
    let mut health = buffer.health.clone();
    while health.wait_for(|health| *health == Health::WithoutPayloads).await.is_ok() {
        if let Err(error) = buffer.store.write(Probe).await {
            tracing::debug!(error = %error, "payloads still cannot be stored");
            tokio::time::sleep(SWEEP_INTERVAL).await;
        }
    }
}

async fn care_for_payloads(buffer: &Buffer) {
    loop {
        let pause = match buffer.store.look_after_payloads(buffer.clock.now()).await {
            Ok(PayloadMoves::More) => MOVE_INTERVAL,
            Ok(PayloadMoves::Done | PayloadMoves::InBackground) => CARE_INTERVAL,
            Err(error) => {
                tracing::warn!(error = %error, "looking after payloads failed; it is tried again");
                CARE_FAILED_PAUSE
            }
        };
        tokio::time::sleep(pause).await;
    }
}

impl Buffer {
    /// Sweeps once: expired leases, overdue groups, and payloads and tombstones whose retention is over.
    pub async fn sweep(&self) -> Result<(), StoreError> {
        // A snapshot that fails must not keep expired work from coming back.
        if let Err(error) = self.store.snapshot(self.clock.now()).await {
            tracing::warn!(error = %error, "a snapshot for the history failed; the next sweep tries again");
        }
        if let Err(error) = journal::flush(self).await {
            tracing::warn!(error = %error, "writing the journal failed; the next sweep tries again");
        }
        if let Err(error) = consumers::flush(self).await {
            tracing::warn!(error = %error, "noting who waits failed; the next sweep tries again");
        }
        if !self.store.read(AnythingDue(self.clock.now())).await? {
            return Ok(());
        }
        expire_leases(self).await?;
        scores::work::expire(self, SLICE).await?;
        end::expire(self, SLICE).await?;
        // Before groups whose time is over, which are not decided while one of their rollouts lacks a score.
        scores::drop_unscored(self, SLICE).await?;
        decide_overdue_groups(self).await?;
        while self.store.write(ExpireAdmissions { now: self.clock.now(), limit: SLICE }).await? >= u64::from(SLICE) {}
        while self.store.write(Retire { now: self.clock.now(), limit: SLICE }).await? >= u64::from(SLICE) {}
        while self.store.write(RetireBlobs { now: self.clock.now(), limit: BLOBS }).await? >= u64::from(BLOBS) {}
        while self.store.write(RetireSessions { now: self.clock.now(), limit: SLICE }).await? >= u64::from(SLICE) {}
        while self.store.write(DiscardStragglers { now: self.clock.now(), limit: SLICE }).await? >= u64::from(SLICE) {}
        Ok(())
    }

    /// Adds appended changes to the tallies, if the store appends changes.
    pub async fn fold_tallies(&self) -> Result<(), StoreError> {
        self.store.fold_tallies().await
    }
}

async fn expire_leases(buffer: &Buffer) -> Result<(), StoreError> {
    let expired = buffer.store.write(ExpireLeases { now: buffer.clock.now(), limit: SLICE }).await?;
    for ExpiredLeases { policy, leases } in expired {
        report_expired(buffer, &policy, leases);
        replicas::wake(buffer, Awaited::Batch, &policy);
    }
    Ok(())
}

/// Counts expired leases.
pub(crate) fn report_expired(buffer: &Buffer, policy: &PolicyName, leases: u64) {
    if leases > 0 {
        tracing::info!(policy.name = %policy, leases, "leases expired");
        buffer.metrics.lease(policy.as_str(), "expired", leases);
    }
}

async fn decide_overdue_groups(buffer: &Buffer) -> Result<(), StoreError> {
    loop {
        let now = buffer.clock.now();
        let overdue = buffer.store.read(OverdueGroups { now, limit: SLICE }).await?;
        let slice = overdue.len();
        let mut failed = 0;
        for group in overdue {
            if let Err(error) = decide_overdue_group(buffer, group).await {
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

async fn decide_overdue_group(buffer: &Buffer, group: GroupPk) -> Result<(), StoreError> {
    let decided = buffer.store.write(DecideOverdue { group, cause: Cause::TimedOut, now: buffer.clock.now() }).await?;
    if let Some(DecidedGroup { policy, group, unscored }) = decided {
        buffer.metrics.dropped_many(policy.as_str(), reasons::UNSCORED, unscored as u64);
        ingest::report_decided(buffer, &policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
    }
    Ok(())
}
