//! Stage 5, lease: an exclusive claim on a batch that expires and is fenced by a token, and how it ends.
//!
//! The stage before is [`batch`](forebay_domain::batch). [`samples`](crate::samples) reads the contents of a
//! leased batch.

use std::time::Duration;

use forebay_domain::{
    batch::BatchSize,
    clock::Timestamp,
    ids::{BatchId, CallerId, ConsumerName, Epoch, GroupId, LeaseToken, PolicyName, RequestId, Step},
    lease::{Ack, Batch, BatchFilter, Claim, Claimed, Extend, LeaseProof, Nack, Readmit},
    pages::Page,
    peers::Awaited,
    reasons,
    refusal::Refusal,
    rules::LEASE_TTL_S_MAX,
    states::BatchState,
};
use forebay_store::ops::samples::FindBatch;
use tokio::time::Instant;
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    policies, sweep,
    waiting::{
        replicas,
        wakers::{Event, Woken},
    },
};

/// Longest wait for a batch or a version.
pub const WAIT_MS_MAX: u64 = 60_000;

/// A request for a batch.
///
/// A protocol that reads as much as it can calls `buffer.lease` like this, and acks what it got by its id and its lease:
///
/// ```
/// use forebay_domain::{batch::BatchSize, ids::PolicyName};
/// use forebay_service::lease::LeaseRequest;
///
/// let request = LeaseRequest {
///     size: BatchSize::Groups { at_most: 256 },
///     ttl_s: Some(86_400),
///     ..LeaseRequest::of(PolicyName::default())
/// };
/// ```
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    pub policy: PolicyName,
    /// The consumer that asks.
    pub consumer: Option<ConsumerName>,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// How large a new batch is. A batch that came back is delivered as it was cut, before any new one, whatever its
    /// size is; but a request for an exact number of samples gets only one with this number. Others that came back stay
    /// for other requests.
    ///
    /// A request that waits is woken when a batch by the rules may be ready. With another size, it may see only at its
    /// next poll, 500 ms later by default, that its batch is ready.
    pub size: BatchSize,
    /// Whether the request takes a batch with fewer groups when the time is over.
    pub partial: bool,
    /// Seconds of the lease, at most [`LEASE_TTL_S_MAX`]; those of the policy's rules if absent.
    pub ttl_s: Option<u64>,
    /// How long to wait.
    pub wait: Duration,
    /// The caller in whose share of the slots the request waits.
    pub caller: Option<CallerId>,
}

impl LeaseRequest {
    /// A request for a batch by the rules of the policy, that does not wait.
    #[must_use]
    pub fn of(policy: PolicyName) -> Self {
        Self {
            policy,
            consumer: None,
            request_id: None,
            epoch: None,
            size: BatchSize::Rules,
            partial: false,
            ttl_s: None,
            wait: Duration::ZERO,
            caller: None,
        }
    }
}

/// The answer to a request for a batch.
#[derive(Clone, Debug)]
pub struct Leased {
    /// The batch, with its lease.
    pub batch: Batch,
    /// Whether the request held it already.
    pub held: bool,
}

/// The holder of a lease, as the caller names it.
#[derive(Clone, Debug)]
pub struct Holder {
    pub batch_id: BatchId,
    pub lease: LeaseToken,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
}

impl Buffer {
    /// The next batch, or none when no batch became ready in time.
    ///
    /// If the caller drops the future while it waits, no batch was claimed. `is_still_permitted` is called before every
    /// claim, because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn lease(
        &self,
        request: LeaseRequest,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<Leased>, BufferError> {
        let waker = self.wakers.watch(&request.policy);
        let consumer = request.consumer.as_ref().map_or("", ConsumerName::as_str);
        let asking_since = self.waiting_consumers.since(&request.policy, consumer, self.clock.now());
        let started = Instant::now();
        let deadline = started + request.wait;
        let mut time_is_up = request.wait.is_zero();
        let (mut place, mut ask) = (None, None);
        let event = if matches!(request.size, BatchSize::Rules) { Event::Announced } else { Event::Unannounced };
        loop {
            // If this future is dropped before its first check, or the check is refused or fails, the next waiter gets its
            // wake-up.
            let passed_on = waker.pass_on();
            let answer = {
                let _turn = waker.turn.lock().await;
                if !is_still_permitted() {
                    return Err(Refusal::PermissionEnded.into());
                }
                let claim = claim(self, &request, request.partial && time_is_up, asking_since);
                self.store.write(claim).await??
            };
            passed_on.keep();
            sweep::report_expired(self, &request.policy, answer.expired);
            if answer.expired > 0 {
                // The batches of expired leases came back together, and this request takes at most one of them.
                replicas::wake(self, Awaited::Batch, &request.policy);
            }
            self.metrics.dropped_many(request.policy.as_str(), reasons::STALE, answer.stale);
            match answer.claimed {
                Claimed::Held(batch) => {
                    self.metrics.lease(batch.policy.as_str(), "held", 1);
                    // A wake-up that this request took was meant for a waiter that needs a new batch.
                    self.wakers.batch(&request.policy);
                    return Ok(Some(Leased { batch: *batch, held: true }));
                }
                Claimed::Granted(batch) => {
                    report_granted(self, &batch, started.elapsed());
                    self.waiting_consumers.granted(&request.policy, consumer, ask.as_ref());
                    // One event may have made several batches ready, so the next waiter has to check.
                    self.wakers.batch(&request.policy);
                    return Ok(Some(Leased { batch: *batch, held: false }));
                }
                Claimed::Nothing if time_is_up => {
                    let now = self.clock.now();
                    let asked =
                        || self.waiting_consumers.ask(&request.policy, consumer, (asking_since, now), Duration::ZERO);
                    if let Some(ask) = ask.or_else(asked) {
                        ask.ended(now);
                    }
                    return Ok(None);
                }
                Claimed::Nothing => {
                    if place.is_none() {
                        place = Some((self.batch_waiters.enter(request.caller.as_ref())?, self.metrics.waiting()));
                    }
                    if ask.is_none() {
                        let times = (asking_since, self.clock.now());
                        let left = deadline.saturating_duration_since(Instant::now());
                        ask = self.waiting_consumers.ask(&request.policy, consumer, times, left);
                    }
                    // Nothing announces that a rollout which is waited for has ended, or was waited for long enough.
                    let event = if answer.waits { Event::Unannounced } else { event };
                    time_is_up = self.wakers.wait_for_batch(&waker, event, deadline).await == Woken::DeadlinePassed;
                }
            }
        }
    }
}

fn claim(buffer: &Buffer, request: &LeaseRequest, partial: bool, asking_since: Timestamp) -> Claim {
    Claim {
        policy: request.policy.clone(),
        consumer: request.consumer.clone(),
        request_id: request.request_id.clone(),
        epoch: request.epoch,
        size: request.size.clone(),
        partial,
        ttl_s: request.ttl_s.map(|ttl_s| ttl_s.clamp(1, LEASE_TTL_S_MAX)),
        batch_id: BatchId::mint(),
        lease: LeaseToken::mint(),
        asking_since,
        now: buffer.clock.now(),
    }
}

fn report_granted(buffer: &Buffer, batch: &Batch, waited: Duration) {
    let policy = batch.policy.as_str();
    let event = if batch.attempt > 1 { "redelivered" } else { "granted" };
    buffer.metrics.lease(policy, event, 1);
    let oldest = batch.trained_versions.map_or(batch.version_current, |versions| versions.oldest);
    let staleness = batch.version_current.0.saturating_sub(oldest.0).max(0);
    buffer.metrics.granted(policy, waited, batch.tokens, staleness);
}

impl Buffer {
    /// Heartbeat: the lease now expires `ttl_s` from now.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn extend(&self, holder: Holder, ttl_s: u64) -> Result<Batch, BufferError> {
        let extend = Extend { proof: proof(self, holder), ttl_s };
        Ok(self.store.write(extend).await??)
    }

    /// Records that an optimizer step consumed the batch.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn ack(&self, holder: Holder, step: Step) -> Result<Batch, BufferError> {
        let ack = Ack { proof: proof(self, holder), step };
        let batch = self.store.write(ack).await??;
        self.metrics.lease(batch.policy.as_str(), "acked", 1);
        self.metrics.acked(batch.policy.as_str(), self.clock.now().micros_since(batch.created_at) as f64 / 1e6);
        Ok(batch)
    }

    /// Gives the batch back; the named groups are quarantined.
    #[instrument(level = "debug", skip_all, fields(batch.id = %holder.batch_id))]
    pub async fn nack(
        &self,
        holder: Holder,
        reason: Option<String>,
        groups: Vec<GroupId>,
    ) -> Result<Batch, BufferError> {
        let nack = Nack { proof: proof(self, holder), reason, groups };
        let batch = self.store.write(nack).await??;
        self.metrics.lease(batch.policy.as_str(), "nacked", 1);
        if batch.state == BatchState::Quarantined {
            tracing::warn!(batch.id = %batch.batch_id, policy.name = %batch.policy, "batch quarantined: its deliveries are used up");
        }
        replicas::wake(self, Awaited::Batch, &batch.policy);
        Ok(batch)
    }

    /// Makes a quarantined batch, or the quarantined groups of a split batch, available again with a fresh count.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn readmit(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        let batch = self.store.write(Readmit { batch_id, by: self.acting.clone(), now: self.clock.now() }).await??;
        replicas::wake(self, Awaited::Batch, &batch.policy);
        Ok(batch)
    }

    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn batch(&self, batch_id: BatchId) -> Result<Batch, BufferError> {
        let batch = self.store.read(FindBatch(batch_id)).await?;
        batch.ok_or_else(|| Refusal::Unknown("the batch").into())
    }

    /// Batches in the order in which they were cut.
    #[instrument(level = "debug", skip_all)]
    pub async fn batches(&self, filter: BatchFilter) -> Result<Page<Batch>, BufferError> {
        policies::existing_policy(self, &filter.policy).await?;
        Ok(self.store.read(filter).await?)
    }
}

fn proof(buffer: &Buffer, holder: Holder) -> LeaseProof {
    LeaseProof { batch_id: holder.batch_id, lease: holder.lease, epoch: holder.epoch, now: buffer.clock.now() }
}
