//! Stage 5, lease: an exclusive, expiring, fenced claim on a batch, and how it ends.
//!
//! The stage before is [`batch`](super::batch); what a lease delivers is [`samples`](super::samples)'.

use std::time::Duration;

use forebay_client::wire::BatchState;
use tokio::time::Instant;

use super::{
    Buffer,
    ids::{BatchId, CallerId, ConsumerName, Epoch, GroupId, LeaseToken, PolicyName, RequestId, Step},
    refusal::{BufferError, Refusal},
    replicas::Awaited,
    wake::Woken,
};
use crate::store::{Batch, BatchFilter, Claim, Claimed, LeaseProof, Page};

/// Longest wait for a batch or a version.
pub const WAIT_MS_MAX: u64 = 60_000;

/// A request for a batch.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// Policy.
    pub policy: PolicyName,
    /// Who asks.
    pub consumer: Option<ConsumerName>,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// Take what is there when the time is over.
    pub partial: bool,
    /// How long to wait.
    pub wait: Duration,
    /// Whose share of the waiters' places the request takes.
    pub caller: Option<CallerId>,
}

/// A batch in the hands of who asked for it.
#[derive(Clone, Debug)]
pub struct Leased {
    /// The batch, with its lease.
    pub batch: Batch,
    /// The request held it already.
    pub held: bool,
}

/// Who speaks for a lease.
#[derive(Clone, Debug)]
pub struct Holder {
    /// The batch.
    pub batch_id: BatchId,
    /// The token.
    pub lease: LeaseToken,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
}

impl Buffer {
    /// The next batch, or none when no batch became ready in time.
    ///
    /// A caller that is dropped while it waits has claimed nothing, and so has one that `may_take` stops: it is asked
    /// before every claim, because a permission can end while its owner waits.
    pub async fn lease(
        &self,
        request: LeaseRequest,
        may_take: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<Leased>, BufferError> {
        let waker = self.wakers.watch(&request.policy);
        let started = Instant::now();
        let deadline = started + request.wait;
        let mut time_is_up = request.wait.is_zero();
        let mut place = None;
        loop {
            // Dropped before it has looked, refused or failed, this caller leaves its wake-up to the next in line.
            let passed_on = self.wakers.pass_on(&request.policy);
            let answer = {
                let _turn = waker.turn.lock().await;
                if !may_take() {
                    return Err(Refusal::PermissionEnded.into());
                }
                let claim = self.claim(&request, request.partial && time_is_up);
                self.store.claim(claim).await??
            };
            passed_on.keep();
            self.report_expired(&request.policy, answer.expired);
            if answer.expired > 0 {
                // They came back at once, and this request takes one of them at most.
                self.wake(Awaited::Batch, &request.policy);
            }
            self.metrics.dropped_many(request.policy.as_str(), "stale", answer.stale);
            match answer.claimed {
                Claimed::Held(batch) => {
                    self.metrics.lease(batch.policy.as_str(), "held", 1);
                    // The wake-up, if there was one, was for somebody who needs a new batch.
                    self.wakers.batch(&request.policy);
                    return Ok(Some(Leased { batch: *batch, held: true }));
                }
                Claimed::Granted(batch) => {
                    self.report_granted(&batch, started.elapsed());
                    // One event may have made several batches: let the next in line look.
                    self.wakers.batch(&request.policy);
                    return Ok(Some(Leased { batch: *batch, held: false }));
                }
                Claimed::Nothing if time_is_up => return Ok(None),
                Claimed::Nothing => {
                    if place.is_none() {
                        place = Some((self.batch_waiters.enter(request.caller.as_ref())?, self.metrics.waiting()));
                    }
                    time_is_up = self.wakers.wait_for_batch(&waker, deadline).await == Woken::TimeIsUp;
                }
            }
        }
    }

    fn claim(&self, request: &LeaseRequest, partial: bool) -> Claim {
        Claim {
            policy: request.policy.clone(),
            consumer: request.consumer.clone(),
            request_id: request.request_id.clone(),
            epoch: request.epoch,
            partial,
            batch_id: BatchId::mint(),
            lease: LeaseToken::mint(),
            now: self.clock.now(),
        }
    }

    fn report_granted(&self, batch: &Batch, waited: Duration) {
        let policy = batch.policy.as_str();
        let event = if batch.attempt > 1 { "redelivered" } else { "granted" };
        self.metrics.lease(policy, event, 1);
        let oldest = batch.trained_versions.map_or(batch.version_current, |(oldest, _)| oldest);
        let staleness = batch.version_current.0.saturating_sub(oldest.0).max(0);
        self.metrics.granted(policy, waited, batch.tokens, staleness);
    }

    /// Heartbeat: the lease expires `ttl_s` from now.
    pub async fn extend(&self, holder: Holder, ttl_s: u64) -> Result<Batch, BufferError> {
        Ok(self.store.extend(self.proof(holder), ttl_s).await??)
    }

    /// The batch was consumed by an optimizer step.
    pub async fn ack(&self, holder: Holder, step: Step) -> Result<Batch, BufferError> {
        let batch = self.store.ack(self.proof(holder), step).await??;
        self.metrics.lease(batch.policy.as_str(), "acked", 1);
        self.metrics.acked(batch.policy.as_str(), self.clock.now().micros_since(batch.created_at) as f64 / 1e6);
        Ok(batch)
    }

    /// Gives the batch back; named groups are quarantined.
    pub async fn nack(
        &self,
        holder: Holder,
        reason: Option<String>,
        groups: Vec<GroupId>,
    ) -> Result<Batch, BufferError> {
        let batch = self.store.nack(self.proof(holder), reason, groups).await??;
        self.metrics.lease(batch.policy.as_str(), "nacked", 1);
        if batch.state == BatchState::Quarantined {
            tracing::warn!(batch.id = %batch.batch_id, policy.name = %batch.policy, "batch quarantined: its deliveries are used up");
        }
        self.wake(Awaited::Batch, &batch.policy);
        Ok(batch)
    }

    /// A quarantined batch, or the quarantined groups of a split one, come back with a fresh count.
    pub async fn readmit(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        let batch = self.store.readmit(batch_id).await??;
        self.wake(Awaited::Batch, &batch.policy);
        Ok(batch)
    }

    /// One batch.
    pub async fn batch(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        let batch = self.store.batch(batch_id).await?;
        batch.ok_or_else(|| Refusal::Unknown("the batch").into())
    }

    /// Batches in the order in which they were cut.
    pub async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, BufferError> {
        self.known(&filter.policy).await?;
        Ok(self.store.batches(filter).await?)
    }

    fn proof(&self, holder: Holder) -> LeaseProof {
        LeaseProof { batch_id: holder.batch_id, lease: holder.lease, epoch: holder.epoch, now: self.clock.now() }
    }
}
