//! `GET /batch`: whole groups with exactly as many sequences as the trainer registered. The next read acks them.
//!
//! The answer is written group by group. If it does not arrive whole, its batch is given back at once, and the next read
//! gets it again.

use std::{
    io::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use forebay_api::http::{accept::accepts_gzip, body::stopped, problem::Failure};
use forebay_bounds::budget::{Share, paid};
use forebay_domain::{batch::BatchSize, lease::Batch, refusal::Refusal, samples::page::Page};
use forebay_service::{
    Buffer,
    error::BufferError,
    lease::{Holder, LeaseRequest},
    reading::Reader,
    samples::{NEWEST_BYTES_MAX, SampleReader},
};
use forebay_wire::Sample;
use futures::{StreamExt as _, stream};
use serde_json::json;

use crate::{
    atropos::{
        convert,
        run::Run,
        shared::{Atropos, NAME},
    },
    calls::Call,
};

/// Answers from this size on are compressed, if the client accepts it.
const COMPRESSED_FROM_BYTES: usize = 1_000;

/// The size at which a part of the answer is sent.
const PART_BYTES: usize = 1 << 20;

/// How many times a page is held: as stored, unpacked, as rows, and as a part of the answer.
const PAGE_COPIES: u64 = 4;

/// How long a batch is leased while its answer is written, from the last extension. A process that ends meanwhile does not
/// give it back.
const WRITE_LEASE_S: u64 = 120;

/// How often the lease of a long answer is extended.
const EXTEND_EVERY: Duration = Duration::from_secs(30);

/// Acks what the caller has read, and answers with the next batch.
pub(super) async fn next(atropos: &Atropos, call: &Call, headers: &HeaderMap) -> Result<Response, Failure> {
    let mut run = atropos.run().await?;
    if run.trainer.is_none() {
        let message = "Trainer not registered. Call /register first.";
        return Ok(plain(&json!({"status": "error", "message": message, "batch": []})));
    }
    if !run.started {
        atropos.change(|run| run.started = run.trainer.is_some()).await?;
        run = atropos.run().await?;
    }
    let reader = call.reader(NAME, &atropos.policy)?;
    let Some((batch, taken)) = take(atropos, call, &run, reader).await? else {
        return Ok(plain(&json!({"batch": null})));
    };
    let rows = atropos.buffer().samples(batch.batch_id, None).await?;
    let writing = Writing::new(atropos.clone(), taken, rows);
    // The first part is written before the head is sent, so that an error can still be an answer.
    let Some((mut first, mut writing)) = writing.next().await? else { return Err(stopped()) };
    while first.len() < COMPRESSED_FROM_BYTES && !writing.is_whole {
        let Some((more, next)) = writing.next().await? else { return Err(stopped()) };
        first = paid([first, more].concat().into(), next.shares.clone());
        writing = next;
    }
    let is_compressed = first.len() >= COMPRESSED_FROM_BYTES && accepts_gzip(headers);
    writing.gzip = is_compressed.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
    let first = writing.compress(first)?;
    let rest = stream::try_unfold(writing, |writing| async move { writing.next_part().await.map_err(broken) });
    let body = stream::once(async { Ok::<Bytes, std::io::Error>(first) }).chain(rest);
    Ok(answer(Body::from_stream(body), is_compressed))
}

/// Acks what was read, and leases the next batch.
async fn take(atropos: &Atropos, call: &Call, run: &Run, reader: Reader) -> Result<Option<(Batch, Taken)>, Failure> {
    let request = LeaseRequest { ttl_s: Some(WRITE_LEASE_S), ..reader.request(BatchSize::Samples(run.packing())) };
    let (facade, grant) = (atropos.clone(), call.grant.clone());
    let leased = atropos.api.run_uncancelled(|buffer| async move {
        // A policy that the first post will create has nothing yet.
        let nothing = |error| match error {
            BufferError::Refused(Refusal::UnknownPolicy(_)) => Ok(None),
            error => Err(Failure::from(error)),
        };
        if let Err(error) = buffer.ack_reads(&reader).await {
            return nothing(error);
        }
        let leased = match buffer.lease(request, || facade.api.still_grants(&grant)).await {
            Ok(leased) => leased,
            Err(error) => return nothing(error),
        };
        let Some(batch) = leased.map(|leased| leased.batch) else { return Ok(None) };
        let holder = batch.lease.clone().map(|lease| Holder { batch_id: batch.batch_id, lease, epoch: None });
        let taken = Taken { buffer, reader, holder, extended_at: Instant::now() };
        // A batch is a step when it is first delivered, also if the client leaves now and reads it with its next call.
        if batch.attempt == 1 {
            facade.change(|run| run.step += 1).await?;
        }
        Ok(Some((batch, taken)))
    });
    leased.await
}

/// A batch whose answer is being written. If the answer does not reach its end, the batch is given back.
struct Taken {
    buffer: Buffer,
    reader: Reader,
    holder: Option<Holder>,
    extended_at: Instant,
}

impl Taken {
    /// Extends the lease if the answer takes long.
    async fn extend(&mut self) -> Result<(), BufferError> {
        if self.extended_at.elapsed() >= EXTEND_EVERY
            && let Some(holder) = self.holder.clone()
        {
            self.buffer.extend(holder, WRITE_LEASE_S).await?;
            self.extended_at = Instant::now();
        }
        Ok(())
    }

    /// Records that the whole answer was sent.
    async fn sent(&mut self) -> Result<(), BufferError> {
        self.buffer.mark_read(&self.reader, self.holder.clone().into_iter().collect()).await?;
        self.holder = None;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let (Some(holder), Ok(runtime)) = (self.holder.take(), tokio::runtime::Handle::try_current()) else { return };
        let buffer = self.buffer.clone();
        runtime.spawn(async move {
            let reason = Some("the answer did not arrive".to_owned());
            // If it fails, the lease expires.
            if let Err(error) = buffer.nack(holder, reason, Vec::new()).await {
                tracing::warn!(error = %error, "a batch whose answer did not arrive was not given back");
            }
        });
    }
}

/// An answer that is being written.
struct Writing {
    atropos: Atropos,
    taken: Taken,
    rows: SampleReader,
    page: Option<Page>,
    /// The samples of the group whose last sample was not read yet.
    group: Vec<Sample>,
    /// The bytes of the pages that `page` and `group` come from.
    shares: Vec<Arc<Share>>,
    /// What is written before the next group: the head, and then a comma.
    before: &'static [u8],
    is_whole: bool,
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl Writing {
    fn new(atropos: Atropos, taken: Taken, rows: SampleReader) -> Self {
        Self {
            atropos,
            taken,
            rows,
            page: None,
            group: Vec::new(),
            shares: Vec::new(),
            before: br#"{"batch":["#,
            is_whole: false,
            gzip: None,
        }
    }

    /// The next part, compressed if the answer is. It may be empty, because the encoder keeps some bytes.
    async fn next_part(self) -> Result<Option<(Bytes, Self)>, Failure> {
        let Some((part, mut writing)) = self.next().await? else { return Ok(None) };
        let part = writing.compress(part)?;
        Ok(Some((part, writing)))
    }

    /// The next part. After the last part, the read is recorded before the answer ends, so a client that has seen the end
    /// has what its next read acks.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, Failure> {
        if self.is_whole {
            self.taken.sent().await?;
            return Ok(None);
        }
        self.taken.extend().await?;
        if self.page.is_none() {
            let bytes = (self.rows.next_page_bytes() * PAGE_COPIES) as usize;
            let samples = &self.atropos.api.budgets().samples;
            // Whoever holds bytes does not wait for more. Then the answer is aborted, and the read repeated.
            let share = if self.group.is_empty() { samples.wait_for(bytes).await } else { samples.take(bytes)? };
            if self.group.is_empty() {
                self.shares.clear();
            }
            self.shares.push(Arc::new(share));
            self.page = self.rows.next_page().await?;
        }
        let write = move || {
            let part = self.write();
            let shares = self.shares.clone();
            (paid(part.into(), shares), self)
        };
        tokio::task::spawn_blocking(write).await.map(Some).map_err(|_| stopped())
    }

    /// Writes groups of the current page until a part is full.
    fn write(&mut self) -> Vec<u8> {
        let mut part = Vec::new();
        let Some(mut page) = self.page.take() else {
            self.write_group(&mut part);
            part.extend_from_slice(b"]}");
            self.is_whole = true;
            return part;
        };
        for row in page.by_ref() {
            if self.group.first().is_some_and(|first| first.group_id != row.group_id) {
                self.write_group(&mut part);
            }
            self.group.push(row);
            if part.len() >= PART_BYTES {
                self.page = Some(page);
                break;
            }
        }
        part
    }

    fn write_group(&mut self, part: &mut Vec<u8>) {
        if !self.group.is_empty() {
            part.extend_from_slice(std::mem::replace(&mut self.before, b","));
            convert::scored_data(part, &self.group);
            self.group.clear();
        }
    }

    fn compress(&mut self, part: Bytes) -> Result<Bytes, Failure> {
        let Some(gzip) = &mut self.gzip else { return Ok(part) };
        let written = gzip.write_all(&part);
        let compressed = match written {
            Ok(()) if self.is_whole => self.gzip.take().map_or(Ok(Vec::new()), GzEncoder::finish),
            Ok(()) => Ok(std::mem::take(gzip.get_mut())),
            Err(error) => Err(error),
        };
        let compressed = compressed.map_err(|_| stopped())?;
        Ok(paid(compressed.into(), self.shares.clone()))
    }
}

/// `GET /latest_example`: the newest group, or empty lists.
pub(super) async fn latest(atropos: &Atropos, headers: &HeaderMap) -> Result<Response, Failure> {
    let bytes = (NEWEST_BYTES_MAX * PAGE_COPIES) as usize;
    let share = atropos.api.budgets().samples.wait_for(bytes).await;
    let samples = match atropos.buffer().newest_group(atropos.policy.clone()).await {
        Err(BufferError::Refused(Refusal::UnknownPolicy(_))) => Vec::new(),
        samples => samples?,
    };
    if samples.is_empty() {
        return Ok(plain(&json!({
            "tokens": [], "masks": [], "scores": [], "advantages": [], "ref_logprobs": [], "generation_params": [],
            "inference_logprobs": [], "messages": [], "images": [],
        })));
    }
    let is_accepted = accepts_gzip(headers);
    let write = move || {
        let mut text = Vec::new();
        convert::scored_data(&mut text, &samples);
        if text.len() < COMPRESSED_FROM_BYTES || !is_accepted {
            return Ok((text, false));
        }
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&text).and_then(|()| gzip.finish()).map(|compressed| (compressed, true))
    };
    let written = tokio::task::spawn_blocking(write).await.map_err(|_| stopped())?;
    let (text, is_compressed) = written.map_err(|_| stopped())?;
    let body = stream::once(async move { Ok::<Bytes, std::io::Error>(paid(text.into(), share)) });
    Ok(answer(Body::from_stream(body), is_compressed))
}

fn plain(body: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn answer(body: Body, is_compressed: bool) -> Response {
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if is_compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Ends the connection, so that the client never takes a part for the whole.
fn broken(failure: Failure) -> std::io::Error {
    let problem = failure.into_problem();
    tracing::warn!(problem.kind = problem.kind, "an answer with a batch was aborted");
    std::io::Error::other(problem.kind)
}
