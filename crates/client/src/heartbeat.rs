//! Keeps a lease alive while a trainer computes. It is separate from the client, which does nothing in the background.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep_until, timeout_at},
};

use crate::{
    client::{Client, ClientError},
    wire::{BatchDescriptor, ExtendRequest},
};

/// Longest lease time that the service grants, in seconds.
const TTL_S_MAX: u64 = 86_400;

/// Number of heartbeats within one lease time: two may fail before the lease is in danger.
const BEATS_PER_TTL: u32 = 3;

/// Number of attempts within one period while they fail. An answer from something other than the service, such as a
/// proxy, must not cost a whole period.
const ATTEMPTS_PER_PERIOD: u32 = 4;

/// A background task that extends a lease until it is dropped.
///
/// The task stops when the lease is lost: either the service says so, or it did not answer before the lease expired.
/// The trainer then discards the gradients of the batch. Drop the heartbeat once the batch is acked or given back,
/// because the lease then no longer exists.
#[derive(Debug)]
pub struct Heartbeat {
    lost: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Heartbeat {
    /// Extends the lease of `batch` to `ttl` from now, at once and then three times within every `ttl`.
    ///
    /// `ttl` is rounded up to whole seconds, from 1 s to 24 h. Returns [`ClientError::NoLease`] unless the descriptor
    /// is an answer to [`Client::lease`]. Must be called within a tokio runtime.
    pub fn start(client: Client, batch: &BatchDescriptor, ttl: Duration) -> Result<Self, ClientError> {
        let lease = batch.lease.clone().ok_or_else(|| ClientError::NoLease { batch_id: batch.batch_id.clone() })?;
        let ttl_s = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).clamp(1, TTL_S_MAX);
        let granted = batch.expires_in_ms.and_then(|left_ms| u64::try_from(left_ms).ok()).map(Duration::from_millis);
        Ok(Self::spawn(Beats {
            client,
            batch_id: batch.batch_id.clone(),
            request: ExtendRequest { lease, ttl_s, epoch: None },
            granted: granted.unwrap_or(Duration::from_secs(ttl_s)),
            ttl: Duration::from_secs(ttl_s),
            period: Duration::from_secs(ttl_s) / BEATS_PER_TTL,
        }))
    }

    /// Whether the lease is lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        *self.lost.borrow() || self.task.is_finished()
    }

    /// Waits until the lease is lost. Never returns while the lease is alive.
    pub async fn lost(&self) {
        // The sender is dropped without a message only when its runtime ends, and then nothing extends the lease
        // either.
        let _ = self.lost.clone().wait_for(|lost| *lost).await;
    }

    fn spawn(beats: Beats) -> Self {
        let (sender, lost) = watch::channel(false);
        let task = tokio::spawn(async move {
            beats.run().await;
            sender.send_replace(true);
        });
        Self { lost, task }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// State of the background task.
struct Beats {
    client: Client,
    batch_id: String,
    request: ExtendRequest,
    /// Time left of the lease when it was granted.
    granted: Duration,
    /// Time left of the lease after each successful heartbeat.
    ttl: Duration,
    /// Time between heartbeats.
    period: Duration,
}

impl Beats {
    /// Returns when the lease is lost.
    async fn run(self) {
        // The lease time is measured from the answer, so the task never assumes an end before the service's own.
        let mut expires = Instant::now() + self.granted;
        loop {
            // An attempt that hangs must not use up the time of the next one.
            let end = expires.min(Instant::now() + self.period);
            let next = match timeout_at(end, self.client.extend(&self.batch_id, &self.request)).await {
                Ok(Ok(_)) => {
                    expires = Instant::now() + self.ttl;
                    end
                }
                Ok(Err(error)) if is_final(&error) => {
                    tracing::warn!(batch.id = self.batch_id, %error, "lease is lost");
                    return;
                }
                Ok(Err(error)) => {
                    tracing::debug!(batch.id = self.batch_id, %error, "could not extend the lease yet");
                    end.min(Instant::now() + self.period / ATTEMPTS_PER_PERIOD)
                }
                Err(_) => {
                    tracing::debug!(batch.id = self.batch_id, "could not extend the lease yet: no answer in time");
                    end
                }
            };
            sleep_until(next).await;
            if Instant::now() >= expires {
                tracing::warn!(batch.id = self.batch_id, "lease expired before the service answered");
                return;
            }
        }
    }
}

/// Whether the answer means that the service will never extend this lease again. A request that was refused because of
/// its credentials or its route says nothing about the lease.
fn is_final(error: &ClientError) -> bool {
    error.problem().is_some_and(|problem| match problem.status {
        401 | 403 | 405 | 407 | 408 | 421 | 429 => false,
        404 => problem.kind != "no-such-route",
        status => (400..500).contains(&status),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{
        RetryPolicy,
        stub::{self, Stub},
    };

    const LONG: Duration = Duration::from_hours(1);
    const SHORT: Duration = Duration::from_millis(30);

    /// Heartbeats every few milliseconds.
    fn beats(stub: &Stub, granted: Duration) -> Beats {
        Beats {
            client: stub.client().with_retry(RetryPolicy::none()),
            batch_id: "b1".to_owned(),
            request: ExtendRequest { lease: "k1".to_owned(), ttl_s: 1, epoch: None },
            granted,
            ttl: LONG,
            period: Duration::from_millis(5),
        }
    }

    #[tokio::test]
    async fn lost_lease_is_reported_and_ends_the_heartbeat() {
        let stub = Stub::start([stub::problem(409, "lease-lost", "")]).await;
        let heartbeat = Heartbeat::start(stub.client(), &stub::batch("b1", Some("k1")), LONG).expect("has a lease");
        heartbeat.lost().await;
        assert!(heartbeat.is_lost());
        let requests = stub.requests();
        assert_eq!(requests.len(), 1);
        assert!(requests[0].starts_with("POST /batches/b1/extend "), "{requests:?}");
        assert!(requests[0].ends_with(r#"{"lease":"k1","ttl_s":3600}"#), "{requests:?}");
    }

    #[tokio::test]
    async fn lease_is_extended_again_and_again() {
        let stub = Stub::start([stub::json(200, &stub::batch("b1", None))]).await;
        let heartbeat = Heartbeat::spawn(beats(&stub, LONG));
        stub.answered(3).await;
        assert!(!heartbeat.is_lost());
    }

    #[tokio::test]
    async fn failed_beat_is_made_good_by_the_next() {
        let extended = stub::json(200, &stub::batch("b1", None));
        let stub = Stub::start([stub::problem(503, "store-unavailable", ""), stub::BROKEN.to_owned(), extended]).await;
        let heartbeat = Heartbeat::spawn(beats(&stub, LONG));
        stub.answered(4).await;
        assert!(!heartbeat.is_lost());
    }

    #[tokio::test]
    async fn lease_that_runs_out_without_an_answer_is_lost() {
        let stub = Stub::start([stub::BROKEN.to_owned()]).await;
        let heartbeat = Heartbeat::spawn(beats(&stub, SHORT));
        heartbeat.lost().await;
        assert!(heartbeat.is_lost());
    }

    #[tokio::test]
    async fn service_that_hangs_does_not_hide_the_end_of_the_lease() {
        let stub = Stub::start([stub::HANG.to_owned()]).await;
        let heartbeat = Heartbeat::spawn(beats(&stub, SHORT));
        heartbeat.lost().await;
        assert!(heartbeat.is_lost());
    }

    #[tokio::test]
    async fn dropped_heartbeat_stops() {
        let stub = Stub::start([stub::json(200, &stub::batch("b1", None))]).await;
        let heartbeat = Heartbeat::spawn(beats(&stub, LONG));
        let task = heartbeat.task.abort_handle();
        stub.answered(1).await;
        drop(heartbeat);
        while !task.is_finished() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn descriptor_without_a_lease_is_refused() {
        let stub = Stub::start([]).await;
        let refused = Heartbeat::start(stub.client(), &stub::batch("b1", None), LONG);
        assert!(matches!(refused, Err(ClientError::NoLease { batch_id }) if batch_id == "b1"));
        assert_eq!(stub.requests().len(), 0);
    }

    #[tokio::test]
    async fn time_to_live_is_rounded_up_within_its_bounds() {
        for (ttl, ttl_s) in [(Duration::ZERO, 1), (Duration::from_millis(1_001), 2), (LONG * 48, 86_400)] {
            let stub = Stub::start([stub::problem(409, "lease-lost", "")]).await;
            let heartbeat = Heartbeat::start(stub.client(), &stub::batch("b1", Some("k1")), ttl).expect("has a lease");
            heartbeat.lost().await;
            assert!(stub.requests()[0].ends_with(&format!(r#""ttl_s":{ttl_s}}}"#)));
        }
    }
}
