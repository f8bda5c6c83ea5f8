//! `POST /get_rollout_data`: whole groups, as items. The next read of the same consumer acks them.

use std::collections::{HashSet, VecDeque};

use axum::{
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_api::http::{
    body::{ReadBody, stopped},
    problem::Failure,
};
use forebay_bounds::budget::paid;
use forebay_domain::{batch::BatchSize, lease::Batch, samples::page::Page};
use forebay_service::{Buffer, error::BufferError, lease::Holder, reading::Reader, samples::SampleReader};
use forebay_wire::Sample;
use futures::{StreamExt as _, stream};
use serde_json::json;

use crate::{
    calls::{Call, Posted},
    slime::{
        body::{number, options},
        generations::instance_of,
        item,
        options::{NAME, Slime},
    },
};

/// The most groups of one read.
const GROUPS_MAX: u32 = 1_024;

/// The most items that a request may ask for.
const ITEMS_MAX: u32 = 65_536;

/// The most leases that are asked for at once. They share commits.
const LEASES_AT_ONCE: u32 = 8;

/// Stored bytes after which a read takes no further batch, so that its response arrives before its client gives up.
const BYTES_MAX: i64 = 128 << 20;

/// How many times a page is held: as stored, unpacked, as rows, and as a response.
const PAGE_COPIES: u64 = 4;

/// How much one read takes.
#[derive(Clone, Copy)]
struct Bounds {
    groups: u32,
    items: Option<u32>,
}

impl Bounds {
    /// How many groups may be leased at once, when these groups and items are taken. Items are counted in whole groups, so
    /// the last group may exceed their bound.
    fn next(self, groups: u32, items: u32) -> u32 {
        let left = self.groups.saturating_sub(groups);
        match self.items {
            None => left.min(LEASES_AT_ONCE),
            Some(bound) => u32::from(items < bound).min(left),
        }
    }
}

pub(super) async fn read(
    State(slime): State<Slime>,
    call: Call,
    Posted(ReadBody { bytes, shares: _shares }): Posted,
) -> Result<Response, Failure> {
    let bounds = bounds(&slime, &bytes)?;
    let reader = call.reader(NAME, &slime.policy)?;
    let (api, grant) = (slime.api.clone(), call.grant);
    // It is finished also if the client leaves, so that every lease has its holder in `Taken`. Nobody then receives
    // `Taken`, and its batches are given back.
    let take = |buffer: Buffer| async move {
        buffer.ack_reads(&reader).await?;
        let mut taken = Taken::new(buffer, reader);
        let rows = taken.take(bounds, || api.still_grants(&grant)).await?;
        Ok::<_, BufferError>((taken, rows))
    };
    let (taken, rows) = slime.api.run_uncancelled(take).await?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    if rows.is_empty() {
        let none = r#"{"success":false,"message":"No data available to read","data":{"data":[],"meta_info":{}}}"#;
        return Ok((json, none).into_response());
    }
    // The first page is read before the head is sent, so that an error can still be an answer.
    let first = Reading::new(slime, taken, rows).next().await?;
    let Some((first, reading)) = first else { return Err(stopped()) };
    let rest = stream::try_unfold(reading, |reading| async move { reading.next().await.map_err(broken) });
    let body = stream::once(async { Ok::<Bytes, std::io::Error>(first) }).chain(rest);
    Ok((json, Body::from_stream(body)).into_response())
}

fn bounds(slime: &Slime, bytes: &[u8]) -> Result<Bounds, Failure> {
    let options = options(bytes)?;
    let groups = number(&options, "max_groups", GROUPS_MAX)?.or(slime.options.max_groups).unwrap_or(GROUPS_MAX);
    Ok(Bounds { groups: groups.min(GROUPS_MAX), items: number(&options, "num_samples", ITEMS_MAX)? })
}

/// Ends the connection, so that the client never takes a part for the whole.
fn broken(failure: Failure) -> std::io::Error {
    let problem = failure.into_problem();
    tracing::warn!(problem.kind = problem.kind, "a read of a facade was aborted");
    std::io::Error::other(problem.kind)
}

/// The batches of one read. If the response does not reach its end, they are given back.
struct Taken {
    buffer: Buffer,
    reader: Reader,
    holders: Vec<Holder>,
    /// How many items they have.
    items: u32,
}

/// The proof that a batch is leased.
fn holder(batch: &Batch) -> Option<Holder> {
    batch.lease.clone().map(|lease| Holder { batch_id: batch.batch_id, lease, epoch: None })
}

impl Taken {
    fn new(buffer: Buffer, reader: Reader) -> Self {
        Self { buffer, reader, holders: Vec::new(), items: 0 }
    }

    /// Leases batches until nothing is ready or the read is large enough.
    ///
    /// slime's client puts all items of a read that have the same `instance_id` into one group. So a read ends before a
    /// second generation of an instance, which the next read then delivers. For this, each group is a batch of its own.
    ///
    /// It must not be cancelled: a lease that is being made has no holder yet.
    async fn take(
        &mut self,
        bounds: Bounds,
        permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<VecDeque<SampleReader>, BufferError> {
        let mut taken = VecDeque::new();
        let mut instances = HashSet::new();
        let (mut groups, mut bytes) = (0, 0);
        let mut is_done = false;
        while !is_done && bytes < BYTES_MAX {
            let count = bounds.next(groups, self.items);
            if count == 0 {
                break;
            }
            let batches = self.lease(count, &permitted).await?;
            is_done = (batches.len() as u32) < count;
            for batch in batches {
                let rows = self.buffer.samples(batch.batch_id, None).await?;
                let found: HashSet<String> = rows.group_ids().map(|id| instance_of(id).to_owned()).collect();
                if !instances.is_disjoint(&found) {
                    is_done = true;
                    self.release(&batch).await?;
                    continue;
                }
                instances.extend(found);
                groups += batch.groups;
                bytes += batch.live_bytes;
                self.items += batch.rollouts;
                taken.push_back(rows);
            }
        }
        Ok(taken)
    }

    /// Leases up to this many groups, in the order of their batches.
    async fn lease(
        &mut self,
        count: u32,
        permitted: &(impl Fn() -> bool + Send + Sync),
    ) -> Result<Vec<Batch>, BufferError> {
        let lease = || self.buffer.lease(self.reader.request(BatchSize::Groups { at_most: 1 }), permitted);
        let outcomes = futures::future::join_all((0..count).map(|_| lease())).await;
        let mut batches = Vec::new();
        let mut failed = None;
        for outcome in outcomes {
            match outcome {
                Ok(leased) => batches.extend(leased.map(|leased| leased.batch)),
                Err(error) => failed = Some(error),
            }
        }
        batches.sort_by_key(|batch| batch.batch_pk);
        self.holders.extend(batches.iter().filter_map(holder));
        failed.map_or(Ok(batches), Err)
    }

    /// Gives back a batch that is not part of this read.
    async fn release(&mut self, batch: &Batch) -> Result<(), BufferError> {
        let Some(holder) = holder(batch) else { return Ok(()) };
        self.holders.retain(|held| held.batch_id != holder.batch_id);
        self.buffer.release_read(&self.reader, holder).await
    }

    /// Records that everything was sent.
    async fn sent(&mut self) -> Result<(), BufferError> {
        self.buffer.mark_read(&self.reader, self.holders.clone()).await?;
        self.holders.clear();
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let holders = std::mem::take(&mut self.holders);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if holders.is_empty() {
            return;
        }
        let buffer = self.buffer.clone();
        runtime.spawn(async move {
            for holder in holders {
                let reason = Some("the read did not arrive".to_owned());
                // If it fails, the lease expires.
                if let Err(error) = buffer.nack(holder, reason, Vec::new()).await {
                    tracing::warn!(error = %error, "a batch of a read that did not arrive was not given back");
                }
            }
        });
    }
}

/// What the response says about all items.
#[derive(Default)]
struct Totals {
    items: u64,
    rewards: f64,
    /// The texts of their ids, each group once.
    instances: Vec<String>,
    group_id: String,
}

impl Totals {
    fn add(&mut self, first: &Sample, instance: String) {
        self.items += 1;
        self.rewards += first.reward.unwrap_or(0.0);
        if self.instances.is_empty() || self.group_id != first.group_id {
            self.group_id.clone_from(&first.group_id);
            self.instances.push(instance);
        }
    }

    fn write(&self, text: &mut String) {
        let (items, groups) = (self.items as f64, self.instances.len() as f64);
        let info = json!({
            "total_samples": self.items,
            "num_groups": self.instances.len(),
            "avg_group_size": items / groups,
            "avg_reward": self.rewards / items,
        });
        let info = info.to_string();
        text.push_str(info.trim_end_matches('}'));
        text.push_str(r#","finished_groups":["#);
        text.push_str(&self.instances.join(","));
        text.push_str("]}");
    }
}

/// A response that is being written.
struct Reading {
    slime: Slime,
    taken: Taken,
    rows: VecDeque<SampleReader>,
    totals: Totals,
    /// What is written before the next item: the head, and then a comma.
    before: String,
    is_whole: bool,
}

impl Reading {
    fn new(slime: Slime, taken: Taken, rows: VecDeque<SampleReader>) -> Self {
        let message = format!("Successfully read {} items", taken.items);
        let before = format!(r#"{{"success":true,"message":"{message}","data":{{"data":["#);
        Self { slime, taken, rows, totals: Totals::default(), before, is_whole: false }
    }

    /// The next part of the response. After the last part, the read is recorded before the response ends, so a client
    /// that has seen the end has what its next read acks.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, Failure> {
        if self.is_whole {
            self.taken.sent().await?;
            return Ok(None);
        }
        while let Some(rows) = self.rows.front_mut() {
            let bytes = rows.next_page_bytes() * PAGE_COPIES;
            let mut share = self.slime.api.budgets().samples.wait_for(bytes as usize).await;
            let Some(page) = rows.next_page().await? else {
                self.rows.pop_front();
                continue;
            };
            let write = move || {
                let text = self.write_page(page);
                (text, self)
            };
            let (text, reading) = tokio::task::spawn_blocking(write).await.map_err(|_| stopped())?;
            share.shrink(text.len());
            return Ok(Some((paid(text.into(), share), reading)));
        }
        let mut tail = r#"],"meta_info":"#.to_owned();
        self.totals.write(&mut tail);
        tail.push_str("}}");
        self.is_whole = true;
        Ok(Some((tail.into(), self)))
    }

    fn write_page(&mut self, page: Page) -> String {
        let mut text = String::new();
        let mut rows = page.peekable();
        while let Some(first) = rows.next() {
            let mut rollout = vec![first];
            while let Some(row) = rows.next_if(|row| row.segment > 0) {
                rollout.push(row);
            }
            text.push_str(&std::mem::replace(&mut self.before, ",".to_owned()));
            let instance = item::write(&mut text, &rollout);
            self.totals.add(&rollout[0], instance);
        }
        text
    }
}
