//! Byte budgets. All bytes that clients make the service hold are taken from a budget and given back when they are
//! dropped.
//!
//! There are three budgets, so that one kind of client cannot use up what another needs: one for posts of trajectories
//! and their responses, one for all other calls, and one for pages of samples.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    body::{Body, HttpBody as _},
    http::{Method, StatusCode},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::problem::Failure;
use crate::metrics::Metrics;

/// Bytes per permit. A semaphore can count at least 2^29 permits.
const PERMIT_BYTES: usize = 1 << 10;

/// Responses up to this length take nothing from a budget. The number of connections bounds them, and acks, heartbeats
/// and probes are answered even if a budget is used up.
const FREE_ANSWER_BYTES: usize = 32 << 10;

/// The most bytes that the service holds for clients at the same time, by kind.
#[derive(Clone, Copy, Debug)]
pub struct ByteBudgets {
    /// Bodies of posts of trajectories, and their responses.
    pub posts: usize,
    /// Larger bodies of all other calls, and larger responses except samples.
    pub control: usize,
    /// Pages of samples that are being read, converted or sent.
    pub samples: usize,
}

/// The budgets of one service.
#[derive(Clone, Debug)]
pub(crate) struct Budgets {
    pub(crate) posts: Budget,
    pub(crate) control: Budget,
    pub(crate) samples: Budget,
}

impl Budgets {
    pub(super) fn new(bytes: ByteBudgets, metrics: &Metrics) -> Self {
        Self {
            posts: Budget::new(bytes.posts, metrics.http.body_bytes_in_flight.clone()),
            control: Budget::new(bytes.control, metrics.http.control_bytes_in_flight.clone()),
            samples: Budget::new(bytes.samples, metrics.http.samples_bytes_in_flight.clone()),
        }
    }
}

/// A budget of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    permits: Arc<Semaphore>,
    permits_max: usize,
    in_flight: IntGauge,
}

impl Budget {
    pub(super) fn new(bytes: usize, in_flight: IntGauge) -> Self {
        let permits_max = bytes.div_ceil(PERMIT_BYTES).min(Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        Self { permits: Arc::new(Semaphore::new(permits_max)), permits_max, in_flight }
    }

    /// The whole budget.
    pub(super) fn bytes(&self) -> usize {
        self.permits_max * PERMIT_BYTES
    }

    /// Takes bytes, or fails immediately. Waiting would only queue more requests in memory.
    pub(crate) fn take(&self, bytes: usize) -> Result<Share, Failure> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.permits).try_acquire_many_owned(permits).map_err(|_| overloaded())?;
        Ok(Share::new(Some(permit), permits as usize * PERMIT_BYTES, &self.in_flight))
    }

    /// Waits until the bytes are available and takes them. A request for more than the whole budget gets all of it.
    ///
    /// Requests are served in order. No task waits here while it holds bytes that only it can give back, so there is no
    /// deadlock.
    pub(crate) async fn wait_for(&self, bytes: usize) -> Share {
        let permits = bytes.div_ceil(PERMIT_BYTES).min(self.permits_max);
        let permit = Arc::clone(&self.permits).acquire_many_owned(permits as u32).await;
        let permit = permit.expect("the semaphore is never closed");
        Share::new(Some(permit), permits * PERMIT_BYTES, &self.in_flight)
    }

    /// Like [`wait_for`](Self::wait_for), but fails after `limit`.
    pub(super) async fn wait_at_most(&self, limit: Duration, bytes: usize) -> Result<Share, Failure> {
        tokio::time::timeout(limit, self.wait_for(bytes)).await.map_err(|_| overloaded())
    }

    /// A share that counts in the gauge but takes nothing from the budget. Something else must bound such bytes.
    pub(super) fn free(&self, bytes: usize) -> Share {
        Share::new(None, bytes, &self.in_flight)
    }
}

pub(super) fn overloaded() -> Failure {
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "Too many bytes are in flight")
        .detail("the byte budget is used up and nothing was changed; retry after a pause")
        .retry()
}

/// A share of a budget. It is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    permit: Option<OwnedSemaphorePermit>,
    bytes: usize,
    in_flight: IntGauge,
}

impl Share {
    fn new(permit: Option<OwnedSemaphorePermit>, bytes: usize, in_flight: &IntGauge) -> Self {
        in_flight.add(bytes as i64);
        Self { permit, bytes, in_flight: in_flight.clone() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps a share for `bytes` and gives back the rest.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let Some(permit) = &mut self.permit else { return };
        let surplus = permit.num_permits().saturating_sub(bytes.div_ceil(PERMIT_BYTES));
        if permit.split(surplus).is_some() {
            self.in_flight.sub((surplus * PERMIT_BYTES) as i64);
            self.bytes -= surplus * PERMIT_BYTES;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.in_flight.sub(self.bytes as i64);
    }
}

/// Several shares that cover the same data.
#[derive(Debug, Default)]
pub(crate) struct Shares(Vec<Share>);

impl Shares {
    pub(crate) fn push(&mut self, share: Share) {
        self.0.push(share);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(Share::bytes).sum()
    }

    /// Keeps a share for `bytes` and gives back the rest.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let mut left = bytes;
        for share in &mut self.0 {
            share.shrink(left);
            left = left.saturating_sub(share.bytes);
        }
        self.0.retain(|share| share.bytes > 0);
    }
}

/// Bytes with their shares of a budget, which are given back when the last reference to the bytes is dropped.
struct PaidBytes<S> {
    bytes: Bytes,
    _shares: S,
}

impl<S> AsRef<[u8]> for PaidBytes<S> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Attaches shares to bytes until they are dropped. hyper drops them when they are written or the connection ends.
pub(crate) fn paid<S: Send + 'static>(bytes: Bytes, shares: S) -> Bytes {
    Bytes::from_owner(PaidBytes { bytes, _shares: shares })
}

/// Marks a response whose bytes already have shares of a budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IsPaid;

/// The shares of a request's body, held while its handler runs.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldByRequest(Arc<Mutex<Shares>>);

impl HeldByRequest {
    pub(super) fn hold(&self, shares: Shares) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = shares;
    }
}

/// Takes the bytes of a response from the budget until it is written. If the budget has no room, an error is sent
/// instead.
pub(super) async fn pay(budget: &Budget, method: &Method, response: Response) -> Response {
    let length = response.body().size_hint().exact().unwrap_or(0) as usize;
    if length <= FREE_ANSWER_BYTES || response.extensions().get::<IsPaid>().is_some() {
        return response;
    }
    let share = match budget.take(length) {
        Ok(share) => share,
        Err(failure) if method.is_safe() => return failure.into_response(),
        Err(failure) => {
            let detail =
                "the request was handled, but the byte budget has no room for its response; look up the result";
            return failure.detail(detail).into_response();
        }
    };
    let (head, body) = response.into_parts();
    match axum::body::to_bytes(body, length).await {
        Ok(bytes) => Response::from_parts(head, Body::from(paid(bytes, share))),
        // This cannot happen, because a body of known length is in memory.
        Err(_) => super::body::stopped().into_response(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn budget(bytes: usize) -> (Budget, IntGauge) {
        let gauge = IntGauge::new("bytes", "bytes").expect("the name is valid");
        (Budget::new(bytes, gauge.clone()), gauge)
    }

    #[test]
    fn what_is_taken_is_counted_until_it_is_given_back() {
        let (budget, gauge) = budget(8 << 10);
        let mut share = budget.take(5_000).expect("there is room");
        assert_eq!((share.bytes(), gauge.get()), (5 << 10, 5 << 10));
        assert!(budget.take(4 << 10).is_err(), "only 3 KiB are left");
        share.shrink(1);
        assert_eq!((share.bytes(), gauge.get()), (1 << 10, 1 << 10));
        let bytes = paid(Bytes::from_static(b"sent in two parts"), share);
        let rest = bytes.slice(5..);
        drop(bytes);
        assert_eq!(gauge.get(), 1 << 10, "a part of the bytes is still held");
        drop(rest);
        assert_eq!(gauge.get(), 0);
        budget.take(8 << 10).expect("everything came back");
    }

    #[test]
    fn long_answers_are_paid_for_until_they_are_gone_and_short_ones_are_free() {
        let (budget, gauge) = budget(64 << 10);
        let answer = |bytes: usize| Response::new(Body::from(vec![b'x'; bytes]));
        let pay = |method: &Method, bytes: usize| pay(&budget, method, answer(bytes)).now_or_never().expect("no wait");
        let free = pay(&Method::GET, FREE_ANSWER_BYTES);
        assert_eq!((free.status(), gauge.get()), (StatusCode::OK, 0));
        let held = pay(&Method::GET, 48 << 10);
        assert_eq!((held.status(), gauge.get()), (StatusCode::OK, 48 << 10));
        for method in [Method::GET, Method::PUT] {
            assert_eq!(pay(&method, 48 << 10).status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        drop(held);
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn several_shares_shrink_together() {
        let (budget, gauge) = budget(64 << 10);
        let mut shares = Shares::default();
        for _ in 0..4 {
            shares.push(budget.take(4 << 10).expect("there is room"));
        }
        shares.shrink(6 << 10);
        assert_eq!((shares.bytes(), gauge.get()), (6 << 10, 6 << 10));
    }

    #[test]
    fn who_wants_more_than_there_is_gets_all_of_it_and_others_wait_in_order() {
        let (budget, _) = budget(8 << 10);
        let all = budget.wait_for(usize::MAX >> 1).now_or_never().expect("nobody holds anything");
        assert_eq!(all.bytes(), 8 << 10);
        let mut first = Box::pin(budget.wait_for(8 << 10));
        let mut second = Box::pin(budget.wait_for(1));
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        drop(all);
        assert!((&mut second).now_or_never().is_none(), "a small request does not pass a large one");
        drop((&mut first).now_or_never().expect("it is the first in line"));
        assert!((&mut second).now_or_never().is_some());
    }
}
