//! `GET /batches/{id}/samples`: streams the rows of a batch page by page, so that a batch is never held in memory as a
//! whole.
//!
//! All readers share a byte budget. A reader waits for the bytes of a page before it reads the page, and gives them
//! back when the page is written to the connection. It waits only when it holds no page, so that readers cannot
//! deadlock.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use forebay_client::wire::{ARROW_STREAM, Sample};
use futures::{TryStreamExt as _, stream};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Api,
    accept::{accepted, asks_for_zstd},
    arrow, body,
    budget::{Budget, Share, paid},
    compression::Compressor,
    openapi::{ArrowStream, InvalidQuery, NoSuchBatch},
    params::{BatchPath, Query},
    problem::Failure,
};
use crate::buffer::{
    refusal::BufferError,
    samples::{Page, SampleReader},
    shard::{SHARDS_MAX, Shard},
};

/// The size at which a frame is sent.
const FRAME_BYTES: usize = 1 << 20;

/// The most bytes of the rows of one record batch, unless a single row is larger. A page is one record batch, except a
/// page of a very large rollout. The bound keeps every column far below the 2 GiB that its offsets can address.
const RECORD_BATCH_BYTES: usize = 16 << 20;

/// How many times a page is held: as stored, unpacked, as rows, and as a response.
const PAGE_COPIES: u64 = 4;

/// How long a request waits for the bytes of its first page. After that it is refused and may be repeated.
pub(super) const FIRST_PAGE_WAIT: Duration = Duration::from_secs(10);

/// The estimated length of the text of a token with its mask and log-probability. A longer text only makes the buffer
/// grow.
const TOKEN_TEXT_BYTES: usize = 24;

/// Options for reading a part of a batch.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ShardQuery {
    /// Index of the shard, below `shards`.
    shard: Option<u32>,
    /// Number of shards.
    shards: Option<u32>,
}

/// Get the samples of a batch: one row per segment
///
/// The call needs no lease. Rows are ordered by the group's place in the batch, then by the rollout's arrival, then by
/// segment. A shard is a deterministic set of whole rollouts. `messages` and `metadata` are only on the row of segment
/// 0 of their rollout and null on its other rows. With `Accept-Encoding: zstd` the body is one zstd frame, unless too
/// many other responses are being compressed.
#[utoipa::path(
    get,
    path = "/batches/{id}/samples",
    operation_id = "get_samples",
    tag = "trainers",
    params(("id" = String, Path, description = "Id of the batch"), ShardQuery),
    responses(
        (status = 200, description = "The rows. `Accept` selects the format: NDJSON (also for `*/*`), a JSON array or an Arrow IPC stream",
            content(
                (Sample = "application/x-ndjson"),
                (Vec<Sample> = "application/json"),
                (ArrowStream = "application/vnd.apache.arrow.stream"),
            )),
        NoSuchBatch,
        (status = 406, description = "No acceptable representation"),
        (status = 410, description = "The payloads are purged"),
        InvalidQuery,
        (status = 503, description = "Other readers use up the byte budget of samples; retry"),
    )
)]
pub(super) async fn get(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Query(query): Query<ShardQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let format = negotiate(&headers)?;
    let shard = shard(&query)?;
    let compressor = asks_for_zstd(&headers).then(|| Compressor::new(&api.compressors)).flatten();
    let budget = api.budgets.samples.clone();
    let mut reader = api.buffer.samples(batch_id, shard).await?;
    let granted = budget.wait_at_most(FIRST_PAGE_WAIT, page_cost(&reader)).await?;
    // The first page is read before the head is sent, so that an error can still become a problem document.
    let first = PaidPage::read(&mut reader, granted).await?;
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(format.media()));
    head.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    if compressor.is_some() {
        head.insert(header::CONTENT_ENCODING, HeaderValue::from_static("zstd"));
    }
    let writer = Writer::new(format);
    let rows = Rows { budget, reader, writer, compressor, page: first, is_first: true, ended: false };
    let frames = stream::try_unfold(rows, Rows::frames)
        .map_ok(|frames| stream::iter(frames.into_iter().map(Ok::<_, std::io::Error>)));
    let body = Body::from_stream(frames.try_flatten());
    Ok((head, body).into_response())
}

/// The bytes that the next page of a reader takes from the budget.
fn page_cost(reader: &SampleReader) -> usize {
    usize::try_from(reader.next_page_bytes().saturating_mul(PAGE_COPIES)).unwrap_or(usize::MAX)
}

fn shard(query: &ShardQuery) -> Result<Shard, Failure> {
    match (query.shard, query.shards) {
        (None, None) => Ok(Shard::WHOLE),
        (Some(index), Some(count)) => Shard::new(index, count)
            .ok_or_else(|| Failure::invalid("shard", format!("must be below `shards`, which is at most {SHARDS_MAX}"))),
        (None, Some(_)) => Err(Failure::invalid("shard", "is required if `shards` is present")),
        (Some(_), None) => Err(Failure::invalid("shards", "is required if `shard` is present")),
    }
}

/// Formats of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Ndjson,
    Json,
    Arrow,
}

impl Format {
    fn media(self) -> &'static str {
        match self {
            Self::Ndjson => "application/x-ndjson",
            Self::Json => "application/json",
            Self::Arrow => ARROW_STREAM,
        }
    }
}

/// The preferred one of the accepted formats, or NDJSON if the caller has no preference.
fn negotiate(headers: &HeaderMap) -> Result<Format, Failure> {
    let mut entries = accepted(headers, header::ACCEPT).peekable();
    if entries.peek().is_none() {
        return Ok(Format::Ndjson);
    }
    let best = entries.filter_map(|(media, quality)| {
        let format = match media.as_str() {
            "application/x-ndjson" | "*/*" | "application/*" => Format::Ndjson,
            "application/json" => Format::Json,
            ARROW_STREAM => Format::Arrow,
            _ => return None,
        };
        (quality > 0.0).then_some((format, quality))
    });
    // If quality values are equal, the format named first wins.
    best.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(format, _)| format).ok_or_else(|| {
        Failure::not_acceptable(
            "samples are available as application/x-ndjson, application/json or application/vnd.apache.arrow.stream",
        )
    })
}

/// A page with its share of the budget. The share also covers the response made of the page, until it is written.
struct PaidPage {
    page: Page,
    share: Arc<Share>,
}

impl PaidPage {
    async fn read(reader: &mut SampleReader, share: Share) -> Result<Option<Self>, BufferError> {
        let page = reader.next_page().await?;
        Ok(page.map(|page| Self { page, share: Arc::new(share) }))
    }
}

/// A response body that is being written.
struct Rows {
    budget: Budget,
    reader: SampleReader,
    writer: Writer,
    compressor: Option<Compressor>,
    page: Option<PaidPage>,
    /// Whether the page that was read before the head is still to be written.
    is_first: bool,
    ended: bool,
}

impl Rows {
    /// Returns the next frames. An error closes the connection, so that the client never takes damaged or incomplete
    /// rows for a complete batch.
    async fn frames(mut self) -> Result<Option<(Vec<Bytes>, Self)>, std::io::Error> {
        if self.ended {
            return Ok(None);
        }
        if self.page.is_none() && !std::mem::take(&mut self.is_first) {
            let share = self.budget.wait_for(page_cost(&self.reader)).await;
            self.page = PaidPage::read(&mut self.reader, share).await.map_err(|error| broken(error.into()))?;
        }
        let write = move || self.write().map(|frames| (frames, self));
        let written = tokio::task::spawn_blocking(write).await.map_err(|_| broken(body::stopped()))??;
        Ok(Some(written))
    }

    /// Writes rows of the current page until a frame is full. After the last page, it writes the end of the body.
    fn write(&mut self) -> Result<Vec<Bytes>, std::io::Error> {
        self.is_first = false;
        let Some(PaidPage { mut page, mut share }) = self.page.take() else {
            self.ended = true;
            let end = self.writer.end()?;
            let mut frames = self.compress(end)?;
            frames.extend(self.compressor.as_mut().map(Compressor::end).transpose()?);
            return Ok(frames);
        };
        let (frames, is_done) = self.writer.rows(&mut page)?;
        let frames = self.compress(frames)?;
        if is_done {
            drop(page);
            if let Some(share) = Arc::get_mut(&mut share) {
                share.shrink(frames.iter().map(Bytes::len).sum());
            }
        } else {
            self.page = Some(PaidPage { page, share: Arc::clone(&share) });
        }
        Ok(frames.into_iter().map(|frame| paid(frame, Arc::clone(&share))).collect())
    }

    fn compress(&mut self, frames: Vec<Bytes>) -> Result<Vec<Bytes>, std::io::Error> {
        match &mut self.compressor {
            Some(compressor) => compressor.parts(frames),
            None => Ok(frames),
        }
    }
}

/// Writes rows in one of the formats.
enum Writer {
    Text { format: TextFormat, written: u64 },
    Arrow(Box<arrow::Encoder>),
}

/// Text formats, which write one row after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextFormat {
    Ndjson,
    Json,
}

impl Writer {
    fn new(format: Format) -> Self {
        match format {
            Format::Ndjson => Self::Text { format: TextFormat::Ndjson, written: 0 },
            Format::Json => Self::Text { format: TextFormat::Json, written: 0 },
            Format::Arrow => Self::Arrow(Box::default()),
        }
    }

    /// Returns frames of the next rows of a page, and whether the page is complete.
    fn rows(&mut self, page: &mut Page) -> Result<(Vec<Bytes>, bool), std::io::Error> {
        match self {
            Self::Arrow(encoder) => {
                let (mut rows, mut bytes) = (Vec::new(), 0);
                while bytes < RECORD_BATCH_BYTES
                    && let Some(row) = page.next()
                {
                    bytes += arrow::row_bytes(&row);
                    rows.push(row);
                }
                let is_done = bytes < RECORD_BATCH_BYTES;
                if rows.is_empty() {
                    return Ok((Vec::new(), is_done));
                }
                let frames = encoder.rows(&rows).map_err(|error| {
                    tracing::error!(error = %error, "writing rows as Arrow failed");
                    std::io::Error::other(error)
                })?;
                Ok((frames, is_done))
            }
            Self::Text { format, written } => {
                let mut text = Vec::new();
                while text.len() < FRAME_BYTES {
                    let Some(row) = page.next() else { return Ok((vec![text.into()], true)) };
                    format.write_row(&mut text, &row, *written == 0)?;
                    *written += 1;
                }
                Ok((vec![text.into()], false))
            }
        }
    }

    /// Returns the end of the body.
    fn end(&mut self) -> Result<Vec<Bytes>, std::io::Error> {
        match self {
            Self::Arrow(encoder) => encoder.end().map_err(std::io::Error::other),
            Self::Text { format: TextFormat::Ndjson, .. } => Ok(Vec::new()),
            Self::Text { written: 0, .. } => Ok(vec![Bytes::from_static(b"[]")]),
            Self::Text { .. } => Ok(vec![Bytes::from_static(b"]")]),
        }
    }
}

impl TextFormat {
    fn write_row(self, text: &mut Vec<u8>, row: &Sample, is_first: bool) -> Result<(), std::io::Error> {
        if self == Self::Json {
            text.push(if is_first { b'[' } else { b',' });
        }
        // Reserving avoids growth by doubling, during which a row of several megabytes would be held twice.
        text.reserve(row.tokens.as_ref().map_or(0, Vec::len) * TOKEN_TEXT_BYTES);
        let start = text.len();
        serde_json::to_writer(&mut *text, row)?;
        if self == Self::Ndjson {
            // Messages and metadata are written as they were sent, including line breaks between JSON tokens. A line
            // break cannot be inside a JSON string, so replacing each with a space keeps the meaning.
            for byte in &mut text[start..] {
                if matches!(byte, b'\n' | b'\r') {
                    *byte = b' ';
                }
            }
            text.push(b'\n');
        }
        Ok(())
    }
}

fn broken(failure: Failure) -> std::io::Error {
    let problem = failure.into_problem();
    tracing::warn!(problem.kind = problem.kind, "a stream of samples was aborted");
    std::io::Error::other(problem.kind)
}
