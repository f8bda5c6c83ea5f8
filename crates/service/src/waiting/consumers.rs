//! The consumers that wait for a batch at this process, and since when.
//!
//! Separate from the [`wakers`](crate::waiting::wakers), which know requests: a trainer that waits makes one request after another,
//! and it still waits between them. The sweep writes what has changed, so that all replicas know it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use forebay_domain::{clock::Timestamp, consumers::ConsumerWait, ids::PolicyName};
use forebay_store::{error::StoreError, ops::consumers::WriteWaits};

use crate::Buffer;

/// Seconds in which a consumer whose request found no batch asks again, if it still waits.
const REPEAT_S: u64 = 10;

/// Time between two writes. People who look do not see a difference, and a trainer that asks all the time costs few
/// writes.
const FLUSH_US: i64 = 2_000_000;

/// The most consumers that are known at once. Consumers beyond wait without being shown.
const CONSUMERS_MAX: usize = 10_000;

/// The consumers that wait at this process.
#[derive(Debug, Default)]
pub(crate) struct WaitingConsumers(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    asking: BTreeMap<(PolicyName, String), Asking>,
    flushed_at: Option<Timestamp>,
}

#[derive(Debug)]
struct Asking {
    since: Timestamp,
    asked_at: Timestamp,
    until: Timestamp,
    /// Its requests that wait now.
    requests: usize,
    is_changed: bool,
    /// It got a batch, or its client has gone.
    is_over: bool,
}

/// A request that waits. When it is dropped, its client has gone, unless it ended otherwise before.
#[derive(Debug)]
pub(crate) struct Ask {
    consumers: Arc<WaitingConsumers>,
    key: (PolicyName, String),
    until: Timestamp,
}

impl WaitingConsumers {
    /// Since when a consumer waits that asks now.
    pub(crate) fn since(&self, policy: &PolicyName, consumer: &str, now: Timestamp) -> Timestamp {
        let inner = self.lock();
        let asking = inner.asking.get(&(policy.clone(), consumer.to_owned()));
        asking.filter(|asking| !asking.is_over && asking.until >= now).map_or(now, |asking| asking.since)
    }

    /// Notes a request that found no batch at `now` and has waited since `since`. It waits for `wait` more.
    pub(crate) fn ask(
        self: &Arc<Self>,
        policy: &PolicyName,
        consumer: &str,
        (since, now): (Timestamp, Timestamp),
        wait: Duration,
    ) -> Option<Ask> {
        let key = (policy.clone(), consumer.to_owned());
        let until = now.plus_seconds(wait.as_secs() + REPEAT_S);
        let mut inner = self.lock();
        if inner.asking.len() >= CONSUMERS_MAX && !inner.asking.contains_key(&key) {
            return None;
        }
        let fresh = Asking { since, asked_at: now, until, requests: 0, is_changed: true, is_over: false };
        let asking = inner.asking.entry(key.clone()).or_insert(fresh);
        let goes_on = !asking.is_over && asking.until >= now;
        asking.since = if goes_on { asking.since.min(since) } else { since };
        asking.until = if goes_on { asking.until.max(until) } else { until };
        asking.asked_at = now;
        asking.requests += 1;
        (asking.is_changed, asking.is_over) = (true, false);
        drop(inner);
        Some(Ask { consumers: Arc::clone(self), key, until })
    }

    /// Notes that a consumer got a batch, by a request that may have waited. Other requests of the same name wait on.
    pub(crate) fn granted(&self, policy: &PolicyName, consumer: &str, ask: Option<&Ask>) {
        let mut inner = self.lock();
        if let Some(asking) = inner.asking.get_mut(&(policy.clone(), consumer.to_owned())) {
            asking.is_changed = true;
            asking.is_over = asking.requests <= usize::from(ask.is_some());
        }
    }

    /// What has changed since the last write, if one is due.
    fn take(&self, now: Timestamp) -> Vec<ConsumerWait> {
        let mut inner = self.lock();
        let is_due = inner.flushed_at.is_none_or(|at| now.micros_since(at) >= FLUSH_US);
        if !is_due {
            return Vec::new();
        }
        let mut changed = Vec::new();
        inner.asking.retain(|(policy, consumer), asking| {
            if std::mem::take(&mut asking.is_changed) {
                changed.push(ConsumerWait {
                    policy: policy.clone(),
                    consumer: consumer.clone(),
                    since: asking.since,
                    asked_at: asking.asked_at,
                    until: asking.until,
                    is_over: asking.is_over,
                });
            }
            asking.requests > 0 || !(asking.is_over || asking.until < now)
        });
        if !changed.is_empty() {
            inner.flushed_at = Some(now);
        }
        changed
    }

    /// A write failed.
    fn put_back(&self, waits: &[ConsumerWait]) {
        let mut inner = self.lock();
        for wait in waits {
            let key = (wait.policy.clone(), wait.consumer.clone());
            if let Some(asking) = inner.asking.get_mut(&key) {
                asking.is_changed = true;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ask {
    /// The request ends without a batch, and its consumer is expected to ask again soon.
    pub(crate) fn ended(mut self, now: Timestamp) {
        self.until = now.plus_seconds(REPEAT_S);
        let mut inner = self.consumers.lock();
        if let Some(asking) = inner.asking.get_mut(&self.key)
            && asking.requests == 1
            && !asking.is_over
        {
            // The time of the wait that was not used is not part of it.
            asking.is_changed |= asking.until != self.until;
            asking.until = self.until;
            asking.requests = 0;
        }
    }
}

impl Drop for Ask {
    fn drop(&mut self) {
        let mut inner = self.consumers.lock();
        if let Some(asking) = inner.asking.get_mut(&self.key)
            && asking.requests > 0
        {
            asking.requests -= 1;
            if asking.requests == 0 && !asking.is_over {
                (asking.is_changed, asking.is_over) = (true, true);
            }
        }
    }
}

/// Writes which consumers wait, if that has changed and was not written in the last seconds.
pub(crate) async fn flush(buffer: &Buffer) -> Result<(), StoreError> {
    let now = buffer.clock.now();
    let changed = buffer.waiting_consumers.take(now);
    if changed.is_empty() {
        return Ok(());
    }
    let written = buffer.store.write(WriteWaits { waits: changed.clone(), now }).await;
    if written.is_err() {
        buffer.waiting_consumers.put_back(&changed);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_micros(second * 1_000_000)
    }

    const WAIT: Duration = Duration::from_secs(30);

    fn taken(consumers: &WaitingConsumers, second: i64) -> Vec<(i64, i64, bool)> {
        let second_of = |time: Timestamp| time.as_micros() / 1_000_000;
        let wait_of = |wait: ConsumerWait| (second_of(wait.since), second_of(wait.until), wait.is_over);
        consumers.take(at(second)).into_iter().map(wait_of).collect()
    }

    #[test]
    fn a_consumer_waits_from_its_first_request_on_and_across_pauses() {
        let (consumers, policy) = (Arc::new(WaitingConsumers::default()), PolicyName::default());
        let ask = consumers.ask(&policy, "a", (at(100), at(100)), WAIT).expect("there is room");
        assert_eq!(taken(&consumers, 100), [(100, 140, false)]);
        ask.ended(at(130));
        assert_eq!(taken(&consumers, 131), [], "nothing has changed");
        assert_eq!(consumers.since(&policy, "a", at(140)), at(100));
        assert_eq!(consumers.since(&policy, "a", at(141)), at(141), "it has stopped asking");
        assert_eq!(consumers.since(&policy, "b", at(140)), at(140));
        let since = consumers.since(&policy, "a", at(135));
        let ask = consumers.ask(&policy, "a", (since, at(135)), WAIT).expect("there is room");
        assert_eq!(taken(&consumers, 136), [(100, 175, false)]);
        consumers.granted(&policy, "a", Some(&ask));
        drop(ask);
        assert_eq!(taken(&consumers, 137), [], "it was written a second ago");
        assert_eq!(taken(&consumers, 138), [(100, 175, true)]);
        assert_eq!(consumers.since(&policy, "a", at(139)), at(139));
    }

    #[test]
    fn a_consumer_whose_client_has_gone_does_not_wait_any_more() {
        let (consumers, policy) = (Arc::new(WaitingConsumers::default()), PolicyName::default());
        let one = consumers.ask(&policy, "", (at(100), at(100)), WAIT);
        let two = consumers.ask(&policy, "", (at(101), at(101)), WAIT);
        assert_eq!(taken(&consumers, 101), [(100, 141, false)]);
        drop(one);
        assert_eq!(taken(&consumers, 104), [], "the other one without a name waits");
        drop(two);
        assert_eq!(taken(&consumers, 106), [(100, 141, true)]);
        assert_eq!(taken(&consumers, 109), []);
    }
}
