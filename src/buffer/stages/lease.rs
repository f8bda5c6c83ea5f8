//! Stage 5, lease: an exclusive claim on a batch that expires and is fenced by a token, and how it ends.
//!
//! The stage before is [`batch`](forebay_domain::batch). [`samples`](crate::buffer::samples) reads the contents of a
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

use crate::buffer::{
    Buffer,
    coordination::wakers::{Event, Woken},
    error::BufferError,
    policies, replicas, sweep,
};

/// Longest wait for a batch or a version.
pub const WAIT_MS_MAX: u64 = 60_000;

/// A request for a batch.
///
/// A protocol that reads as much as it can calls `buffer.lease` like this, and acks what it got by its id and its lease:
///
/// ```
/// use forebay::buffer::{batch::BatchSize, ids::PolicyName, lease::LeaseRequest};
///
/// let request = LeaseRequest {
///     size: BatchSize::Groups { at_most: 256 },
///     ttl_s: Some(86_400),
///     ..LeaseRequest::of(PolicyName::default())
/// };
/// ```
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// Policy.
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
    /// The batch.
    pub batch_id: BatchId,
    /// The token.
    pub lease: LeaseToken,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
}

pub(in crate::buffer) async fn lease(
    buffer: &Buffer,
    request: LeaseRequest,
    is_still_permitted: impl Fn() -> bool + Send + Sync,
) -> Result<Option<Leased>, BufferError> {
    let waker = buffer.wakers.watch(&request.policy);
    let consumer = request.consumer.as_ref().map_or("", ConsumerName::as_str);
    let asking_since = buffer.askers.since(&request.policy, consumer, buffer.clock.now());
    let started = Instant::now();
    let deadline = started + request.wait;
    let mut time_is_up = request.wait.is_zero();
    let (mut place, mut ask) = (None, None);
    let event = if matches!(request.size, BatchSize::Rules) { Event::Announced } else { Event::Unannounced };
    loop {
        // If this future is dropped before its first check, or the check is refused or fails, the next waiter gets its
        // wake-up.
        let passed_on = buffer.wakers.pass_on(&request.policy);
        let answer = {
            let _turn = waker.turn.lock().await;
            if !is_still_permitted() {
                return Err(Refusal::PermissionEnded.into());
            }
            let claim = claim(buffer, &request, request.partial && time_is_up, asking_since);
            buffer.store.write(claim).await??
        };
        passed_on.keep();
        sweep::report_expired(buffer, &request.policy, answer.expired);
        if answer.expired > 0 {
            // The batches of expired leases came back together, and this request takes at most one of them.
            replicas::wake(buffer, Awaited::Batch, &request.policy);
        }
        buffer.metrics.dropped_many(request.policy.as_str(), reasons::STALE, answer.stale);
        match answer.claimed {
            Claimed::Held(batch) => {
                buffer.metrics.lease(batch.policy.as_str(), "held", 1);
                // A wake-up that this request took was meant for a waiter that needs a new batch.
                buffer.wakers.batch(&request.policy);
                return Ok(Some(Leased { batch: *batch, held: true }));
            }
            Claimed::Granted(batch) => {
                report_granted(buffer, &batch, started.elapsed());
                buffer.askers.granted(&request.policy, consumer, ask.as_ref());
                // One event may have made several batches ready, so the next waiter has to check.
                buffer.wakers.batch(&request.policy);
                return Ok(Some(Leased { batch: *batch, held: false }));
            }
            Claimed::Nothing if time_is_up => {
                let now = buffer.clock.now();
                let asked = || buffer.askers.ask(&request.policy, consumer, (asking_since, now), Duration::ZERO);
                if let Some(ask) = ask.or_else(asked) {
                    ask.ended(now);
                }
                return Ok(None);
            }
            Claimed::Nothing => {
                if place.is_none() {
                    place = Some((buffer.batch_waiters.enter(request.caller.as_ref())?, buffer.metrics.waiting()));
                }
                if ask.is_none() {
                    let times = (asking_since, buffer.clock.now());
                    let left = deadline.saturating_duration_since(Instant::now());
                    ask = buffer.askers.ask(&request.policy, consumer, times, left);
                }
                time_is_up = buffer.wakers.wait_for_batch(&waker, event, deadline).await == Woken::DeadlinePassed;
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

pub(in crate::buffer) async fn extend(buffer: &Buffer, holder: Holder, ttl_s: u64) -> Result<Batch, BufferError> {
    let extend = Extend { proof: proof(buffer, holder), ttl_s };
    Ok(buffer.store.write(extend).await??)
}

pub(in crate::buffer) async fn ack(buffer: &Buffer, holder: Holder, step: Step) -> Result<Batch, BufferError> {
    let ack = Ack { proof: proof(buffer, holder), step };
    let batch = buffer.store.write(ack).await??;
    buffer.metrics.lease(batch.policy.as_str(), "acked", 1);
    buffer.metrics.acked(batch.policy.as_str(), buffer.clock.now().micros_since(batch.created_at) as f64 / 1e6);
    Ok(batch)
}

pub(in crate::buffer) async fn nack(
    buffer: &Buffer,
    holder: Holder,
    reason: Option<String>,
    groups: Vec<GroupId>,
) -> Result<Batch, BufferError> {
    let nack = Nack { proof: proof(buffer, holder), reason, groups };
    let batch = buffer.store.write(nack).await??;
    buffer.metrics.lease(batch.policy.as_str(), "nacked", 1);
    if batch.state == BatchState::Quarantined {
        tracing::warn!(batch.id = %batch.batch_id, policy.name = %batch.policy, "batch quarantined: its deliveries are used up");
    }
    replicas::wake(buffer, Awaited::Batch, &batch.policy);
    Ok(batch)
}

pub(in crate::buffer) async fn readmit(buffer: &Buffer, batch_id: BatchId) -> Result<Batch, BufferError> {
    let batch = buffer.store.write(Readmit { batch_id, by: buffer.acting.clone(), now: buffer.clock.now() }).await??;
    replicas::wake(buffer, Awaited::Batch, &batch.policy);
    Ok(batch)
}

pub(in crate::buffer) async fn batch(buffer: &Buffer, batch_id: BatchId) -> Result<Batch, BufferError> {
    let batch = buffer.store.read(FindBatch(batch_id)).await?;
    batch.ok_or_else(|| Refusal::Unknown("the batch").into())
}

pub(in crate::buffer) async fn batches(buffer: &Buffer, filter: BatchFilter) -> Result<Page<Batch>, BufferError> {
    policies::existing_policy(buffer, &filter.policy).await?;
    Ok(buffer.store.read(filter).await?)
}

fn proof(buffer: &Buffer, holder: Holder) -> LeaseProof {
    LeaseProof { batch_id: holder.batch_id, lease: holder.lease, epoch: holder.epoch, now: buffer.clock.now() }
}
