//! Work for scorers: leases of scores that rollouts lack, and the contents of the rollouts.
//!
//! A request is woken when work of its names may be there. For work that opens at a time, such as a group that did not get
//! full, it wakes itself.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use forebay_domain::{
    ids::{CallerId, LeaseToken, PolicyName, RequestId, RolloutPk},
    peers::Awaited,
    refusal::Refusal,
    rules::LEASE_TTL_S_MAX,
    samples::{
        SealedRow,
        pages::{self, PAGE_BYTES},
    },
    score_work::{
        ExtendWork, ExtendedWork, LeaseWork, LeasedWork, ReleaseWork, RetryWork, WorkEvent, WorkItem, WorkRollout,
    },
};
use forebay_store::{error::StoreError, ops::scores::work::ExpireWork};
use forebay_wire::{ScoreInclude, Segment, SegmentText};
use serde_json::value::RawValue;
use tokio::time::Instant;
use tracing::instrument;

use crate::{
    Buffer,
    conversations::Conversations,
    error::BufferError,
    payloads,
    waiting::{replicas, wakers::Woken},
};

/// Items whose attempts one transaction gives back.
const RETRIED_AT_ONCE: u32 = 1_000;

/// Bytes of a text for each of its tokens, beyond which the texts of a rollout are not sent.
const TEXT_BYTES_PER_TOKEN: u64 = 16;

/// A request for work.
#[derive(Clone, Debug)]
pub struct WorkRequest {
    pub policy: PolicyName,
    /// The scores that the scorer can give: at least one, sorted, each once.
    pub names: Vec<String>,
    /// The most items.
    pub max: u32,
    pub scorer: String,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Seconds of the leases; those of the policy's rules if absent.
    pub ttl_s: Option<u64>,
    /// Whether the contents of the rollouts are read, so that they must not be too many.
    pub reads: bool,
    /// How long to wait.
    pub wait: Duration,
    /// The caller in whose share of the slots the request waits.
    pub caller: Option<CallerId>,
}

impl WorkRequest {
    fn claim(&self, buffer: &Buffer) -> LeaseWork {
        LeaseWork {
            policy: self.policy.clone(),
            names: self.names.clone(),
            max: self.max,
            scorer: self.scorer.clone(),
            request_id: self.request_id.clone(),
            ttl_s: self.ttl_s.map(|ttl_s| ttl_s.clamp(1, LEASE_TTL_S_MAX)),
            bytes_max: if self.reads { PAGE_BYTES } else { u64::MAX },
            now: buffer.clock.now(),
        }
    }
}

impl Buffer {
    /// The next work for a scorer; no items when there was none in time.
    ///
    /// If the caller drops the future while it waits, nothing was leased. `is_still_permitted` is called before every claim,
    /// because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn lease_work(
        &self,
        request: WorkRequest,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<LeasedWork, BufferError> {
        let line = self.wakers.watch_work(&request.policy, &request.names);
        let deadline = Instant::now() + request.wait;
        let mut time_is_up = request.wait.is_zero();
        let mut place = None;
        loop {
            // If this future is dropped before its first check, or the check is refused or fails, the next scorer gets its
            // wake-up.
            let passed_on = line.pass_on();
            let leased = {
                // A database that replicas share runs transactions at once; SQLite's writer runs one after the other.
                let _turn = line.turn(self.replicas.is_some()).await;
                if !is_still_permitted() {
                    return Err(Refusal::PermissionEnded.into());
                }
                self.store.write(request.claim(self)).await??
            };
            passed_on.keep();
            if !leased.items.is_empty() {
                if !leased.held {
                    let granted = leased.items.len() as u64;
                    self.metrics.score_work(request.policy.as_str(), WorkEvent::Granted.as_str(), granted);
                }
                // One event may have made several items.
                self.wakers.wake(Awaited::Work, &request.policy);
                if leased.left {
                    replicas::wake(self, Awaited::Work, &request.policy);
                }
                return Ok(leased);
            }
            if time_is_up {
                return Ok(leased);
            }
            if place.is_none() {
                place = Some((self.work_waiters.enter(request.caller.as_ref())?, self.metrics.waiting()));
            }
            let opens = leased.next.map(|next| next.micros_since(self.clock.now()).max(0));
            let opens = opens.map(|micros| Instant::now() + Duration::from_micros(micros.unsigned_abs()));
            let until = opens.map_or(deadline, |opens| opens.min(deadline));
            time_is_up = line.wait(until).await == Woken::DeadlinePassed && until == deadline;
        }
    }

    /// Heartbeat: the leases that are alive now expire `ttl_s` from now.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn extend_work(
        &self,
        policy: PolicyName,
        leases: Vec<LeaseToken>,
        ttl_s: Option<u64>,
    ) -> Result<ExtendedWork, BufferError> {
        let ttl_s = ttl_s.map(|ttl_s| ttl_s.clamp(1, LEASE_TTL_S_MAX));
        Ok(self.store.write(ExtendWork { policy, leases, ttl_s, now: self.clock.now() }).await??)
    }

    /// Gives leased work back as if it had never been leased.
    pub async fn release_work(&self, policy: &PolicyName, leases: Vec<LeaseToken>) -> Result<(), BufferError> {
        self.store.write(ReleaseWork { leases }).await?;
        replicas::wake(self, Awaited::Work, policy);
        Ok(())
    }

    /// Gives exhausted work its attempts back. Returns how many items there were.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn retry_work(&self, policy: PolicyName, name: String) -> Result<u64, BufferError> {
        let retry = RetryWork { policy: policy.clone(), name, limit: RETRIED_AT_ONCE };
        let mut retried = 0;
        loop {
            let some = self.store.write(retry.clone()).await??;
            retried += some;
            if some > 0 {
                replicas::wake(self, Awaited::Work, &policy);
            }
            if some < u64::from(RETRIED_AT_ONCE) {
                return Ok(retried);
            }
        }
    }
}

/// Counts what happened to work, and wakes scorers for what can be leased again.
pub(super) fn report(buffer: &Buffer, events: Vec<(PolicyName, WorkEvent)>) {
    let mut counts: BTreeMap<(PolicyName, WorkEvent), u64> = BTreeMap::new();
    for event in events {
        *counts.entry(event).or_default() += 1;
    }
    for ((policy, event), items) in counts {
        buffer.metrics.score_work(policy.as_str(), event.as_str(), items);
        match event {
            WorkEvent::Failed | WorkEvent::Expired | WorkEvent::Reopened => {
                replicas::wake(buffer, Awaited::Work, &policy);
            }
            WorkEvent::Exhausted => {
                tracing::warn!(policy.name = %policy, items, "work for scorers is exhausted: its attempts are used up");
            }
            WorkEvent::Granted | WorkEvent::Settled => {}
        }
    }
}

/// Ends expired leases of work.
pub(crate) async fn expire(buffer: &Buffer, limit: u32) -> Result<(), StoreError> {
    loop {
        let expired = buffer.store.write(ExpireWork { now: buffer.clock.now(), limit }).await?;
        let is_last = expired.len() < limit as usize;
        report(buffer, expired);
        if is_last {
            return Ok(());
        }
    }
}

/// What a rollout consists of, as far as it was wanted.
#[derive(Debug, Default)]
pub struct Contents {
    pub messages: Option<Box<RawValue>>,
    pub metadata: Option<Box<RawValue>>,
    pub text: Option<Vec<SegmentText>>,
    pub segments: Option<Vec<Segment>>,
}

/// The contents of rollouts by their keys; none of a damaged one.
pub type ContentsRead = BTreeMap<RolloutPk, Option<Contents>>;

/// The contents of leased work, of as many rollouts as fit into an answer.
pub struct WorkReader {
    buffer: Buffer,
    policy: PolicyName,
    wanted: Vec<ScoreInclude>,
    rows: Vec<SealedRow>,
    /// Bytes of the whole answer besides the contents.
    row_bytes: u64,
}

impl Buffer {
    #[must_use]
    pub fn work_reader(&self, policy: PolicyName, items: &[WorkItem], wanted: Vec<ScoreInclude>) -> WorkReader {
        let mut rows: Vec<SealedRow> = Vec::new();
        let mut bytes = 0;
        let rollouts = || items.iter().flat_map(|item| &item.rollouts);
        for rollout in rollouts().filter(|_| !wanted.is_empty()) {
            bytes += pages::bytes_of(std::slice::from_ref(rollout));
            if !rows.is_empty() && bytes > PAGE_BYTES {
                break;
            }
            rows.push(rollout.row.clone());
        }
        let row_bytes = rollouts().map(WorkRollout::row_bytes).sum();
        WorkReader { buffer: self.clone(), policy, wanted, rows, row_bytes }
    }
}

impl WorkReader {
    /// The bytes that reading takes at most, with an answer as JSON.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // As stored, unpacked, and as JSON, which is up to three times as long.
        let per_token = if self.wanted.contains(&ScoreInclude::Text) { 2 * TEXT_BYTES_PER_TOKEN } else { 0 };
        let text: u64 = self.rows.iter().map(|row| row.tokens.saturating_mul(per_token)).sum();
        pages::bytes_of(&self.rows).saturating_mul(5).saturating_add(text).saturating_add(self.row_bytes)
    }

    /// Reads and checks the rollouts, and makes an answer of them.
    pub async fn read<T: Send + 'static>(
        self,
        answer: impl FnOnce(ContentsRead) -> T + Send + 'static,
    ) -> Result<T, BufferError> {
        let Self { buffer, policy, wanted, rows, row_bytes: _ } = self;
        let payloads = payloads::read_payloads(buffer.store.as_ref(), &rows).await?;
        let conversations = Arc::clone(&buffer.conversations);
        let unpack = move || {
            let has = |part| wanted.contains(&part);
            let mut read = ContentsRead::new();
            for (row, payload) in rows.into_iter().zip(payloads) {
                let unpacked = payload.map(|payload| pages::unpack(&row, &payload));
                let contents = match unpacked {
                    Some(Ok(unpacked)) => {
                        let text =
                            has(ScoreInclude::Text).then(|| texts(conversations.as_ref(), &policy, &unpacked.segments));
                        Some(Contents {
                            messages: unpacked.messages.filter(|_| has(ScoreInclude::Messages)),
                            metadata: unpacked.metadata.filter(|_| has(ScoreInclude::Metadata)),
                            text: text.flatten(),
                            segments: has(ScoreInclude::Segments).then_some(unpacked.segments),
                        })
                    }
                    Some(Err(error)) => {
                        tracing::error!(rollout.id = %row.rollout_id, error = %error, "a rollout for a scorer is damaged");
                        None
                    }
                    None => None,
                };
                read.insert(row.rollout_pk, contents);
            }
            answer(read)
        };
        Ok(tokio::task::spawn_blocking(unpack).await.map_err(|_| StoreError::Closed)?)
    }
}

/// The segments as text; none if the tokenizer is not known, or the text is far longer than texts are.
fn texts(conversations: &dyn Conversations, policy: &PolicyName, segments: &[Segment]) -> Option<Vec<SegmentText>> {
    let mut texts = Vec::with_capacity(segments.len());
    for Segment { tokens, loss_mask, .. } in segments {
        let (prompt, response) = tokens.split_at(tokens.len().saturating_sub(loss_mask.len()));
        let of = |ids: &[i32]| {
            let text = conversations.text(policy, ids)?;
            (text.len() as u64 <= TEXT_BYTES_PER_TOKEN * (ids.len() as u64 + 16)).then_some(text)
        };
        texts.push(SegmentText { prompt: of(prompt)?, response: of(response)? });
    }
    Some(texts)
}
