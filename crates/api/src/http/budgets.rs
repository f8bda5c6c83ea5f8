//! The byte budgets of the main listener and of facades, and how responses take bytes from them.
//!
//! There are three [budgets](forebay_bounds::budget), so that one kind of client cannot use up what another needs:
//! one for posts of trajectories and their responses, one for all other calls, and one for pages of samples.

use std::sync::{Arc, Mutex, PoisonError};

use axum::{
    body::{Body, HttpBody as _},
    http::{Method, StatusCode},
    response::{IntoResponse as _, Response},
};
use forebay_bounds::budget::{Budget, FREE_ANSWER_BYTES, Full, Shares, collected::NoMemory, paid};
use forebay_telemetry::metrics::Metrics;

use crate::http::problem::Failure;

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
pub struct Budgets {
    pub posts: Budget,
    pub control: Budget,
    pub samples: Budget,
}

impl Budgets {
    pub fn new(bytes: ByteBudgets, metrics: &Metrics) -> Self {
        Self {
            posts: Budget::counted(bytes.posts, metrics.http.body_bytes_in_flight.clone()),
            control: Budget::counted(bytes.control, metrics.http.control_bytes_in_flight.clone()),
            samples: Budget::counted(bytes.samples, metrics.http.samples_bytes_in_flight.clone()),
        }
    }
}

impl From<Full> for Failure {
    fn from(Full: Full) -> Self {
        overloaded()
    }
}

pub fn overloaded() -> Failure {
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "Too many bytes are in flight")
        .detail("the byte budget is used up and nothing was changed; retry after a pause")
        .retry()
}

impl From<NoMemory> for Failure {
    fn from(NoMemory: NoMemory) -> Self {
        overloaded().detail(
            "the system has no memory for the body and nothing was changed; retry after a pause, or give the service more \
             memory",
        )
    }
}

/// Marks a response whose bytes already have shares of a budget.
#[derive(Clone, Copy, Debug)]
pub struct IsPaid;

/// The shares of a request's body, held while its handler runs.
#[derive(Clone, Debug, Default)]
pub struct HeldByRequest(Arc<Mutex<Shares>>);

impl HeldByRequest {
    pub fn hold(&self, shares: Shares) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = shares;
    }
}

/// Takes the bytes of a response from the budget until it is written. If the budget has no room, an error is sent
/// instead.
pub async fn pay(budget: &Budget, method: &Method, response: Response) -> Response {
    let length = response.body().size_hint().exact().unwrap_or(0) as usize;
    if length <= FREE_ANSWER_BYTES || response.extensions().get::<IsPaid>().is_some() {
        return response;
    }
    let share = match budget.take(length) {
        Ok(share) => share,
        Err(Full) if method.is_safe() => return overloaded().into_response(),
        Err(Full) => {
            let detail =
                "the request was handled, but the byte budget has no room for its response; look up the result";
            return overloaded().detail(detail).into_response();
        }
    };
    let (head, body) = response.into_parts();
    match axum::body::to_bytes(body, length).await {
        Ok(bytes) => Response::from_parts(head, Body::from(paid(bytes, share))),
        // This cannot happen, because a body of known length is in memory.
        Err(_) => crate::http::body::stopped().into_response(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn long_answers_are_paid_for_until_they_are_gone_and_short_ones_are_free() {
        let gauge = prometheus::IntGauge::new("bytes", "bytes").expect("the name is valid");
        let budget = Budget::counted(64 << 10, gauge.clone());
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
}
