//! `GET /batches/{id}/samples`: the rows of a batch, in one of three formats.

mod columns;

use std::io;

use axum::{extract::State, http::HeaderMap, response::Response};
use bytes::Bytes;
use forebay_domain::{
    samples::page::Page,
    shard::{Division, SHARDS_MAX, Shard},
};
use forebay_service::{error::BufferError, samples::SampleReader};
use forebay_wire::{ARROW_STREAM, Sample, ShardBalance};
use serde::Deserialize;
use utoipa::IntoParams;

use self::columns::Asked;
use crate::{
    Api,
    codecs::arrow,
    http::{
        accept::preferred,
        pages::{self, Reader},
        params::{BatchPath, Query},
        problem::Failure,
    },
    openapi::{ArrowStream, InvalidQuery, NoSuchBatch},
};

/// The size at which a frame is sent.
const FRAME_BYTES: usize = 1 << 20;

/// The estimated length of the text of a token with its mask and log-probability. A longer text only makes the buffer
/// grow.
const TOKEN_TEXT_BYTES: usize = 24;

/// Options for reading a part of a batch.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShardQuery {
    /// Index of the shard, below `shards`.
    shard: Option<u32>,
    /// Number of shards.
    shards: Option<u32>,
    /// What the shards have about equal amounts of: `tokens` (default), or `squared_tokens`, the sum of the squared
    /// lengths of their rows. All readers of a batch must ask for the same.
    balance: Option<ShardBalance>,
    /// Whether rows have `messages` (default `true`). Trainers leave them out, because nothing is trained on them.
    messages: Option<bool>,
    /// Names of columns of the rules, with commas between them. Arrow then has a column `column.NAME` for each, with the bytes
    /// of its rows; the other formats name the uploads.
    columns: Option<String>,
    /// `FIRST:END`: of each row of these columns only the entries `FIRST..END` of its first dimension. For Arrow.
    inner: Option<String>,
}

/// Get the samples of a batch: one row per segment
///
/// The call needs no lease. Rows are ordered by the group's place in the batch, then by the rollout's arrival, then by
/// segment. A shard is a deterministic set of rows. `messages` and `metadata` are only on the row of segment
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
pub(crate) async fn get(
    State(api): State<Api>,
    BatchPath(batch_id): BatchPath,
    Query(query): Query<ShardQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let format = negotiate(&headers)?;
    let samples = api.buffer.samples(batch_id, shard(&query)?).await?;
    let asked = Asked::parse(query.columns.as_deref(), query.inner.as_deref())?;
    let is_columns = format == Format::Arrow && !asked.names.is_empty();
    if !is_columns && query.inner.is_some() {
        return Err(Failure::invalid("inner", "is only for Arrow: the other formats name uploads"));
    }
    let reader = RowReader { samples, messages: query.messages.unwrap_or(true), columns: asked.names.clone() };
    if is_columns {
        return columns::respond(&api, reader, &asked).await;
    }
    pages::respond(&api, &headers, "samples", format.media(), reader, Writer::new(format)).await
}

/// Reads the rows of a batch, with their messages or without, and with some of their columns.
struct RowReader {
    samples: SampleReader,
    messages: bool,
    columns: Vec<String>,
}

impl Reader for RowReader {
    type Page = Page;

    async fn next_page_bytes(&mut self) -> Result<u64, BufferError> {
        Ok(self.samples.next_page_bytes())
    }

    async fn next_page(&mut self) -> Result<Option<Page>, BufferError> {
        let page = self.samples.next_page().await?;
        let page = page.map(|page| page.with_columns(|name| self.columns.iter().any(|asked| asked == name)));
        Ok(if self.messages { page } else { page.map(Page::without_messages) })
    }
}

fn shard(query: &ShardQuery) -> Result<Option<Shard>, Failure> {
    match (query.shard, query.shards) {
        (None, None) if query.balance.is_some() => Err(Failure::invalid("balance", "is only allowed with `shards`")),
        (None, None) => Ok(None),
        (Some(index), Some(count)) => {
            let division = Division::new(count, query.balance.unwrap_or_default());
            let shard = division.and_then(|division| Shard::new(index, division));
            let detail = || format!("must be below `shards`, which is at most {SHARDS_MAX}");
            shard.map(Some).ok_or_else(|| Failure::invalid("shard", detail()))
        }
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
    let known = |media: &str| match media {
        "application/x-ndjson" | "*/*" | "application/*" => Some(Format::Ndjson),
        "application/json" => Some(Format::Json),
        ARROW_STREAM => Some(Format::Arrow),
        _ => None,
    };
    preferred(headers, Format::Ndjson, known).ok_or_else(|| {
        Failure::not_acceptable(
            "samples are available as application/x-ndjson, application/json or application/vnd.apache.arrow.stream",
        )
    })
}

/// Writes rows in one of the formats.
enum Writer {
    Text {
        format: TextFormat,
        written: u64,
    },
    /// A block is one record batch.
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
            Format::Arrow => Self::Arrow(Box::new(arrow::Encoder::new(arrow::samples_schema()))),
        }
    }
}

impl pages::Writer<RowReader> for Writer {
    fn page_copies(&self) -> u64 {
        4
    }

    fn rows(&mut self, page: &mut Page) -> Result<(Vec<Bytes>, bool), io::Error> {
        match self {
            Self::Arrow(encoder) => {
                let mut frames = Vec::new();
                while let Some(block) = page.next_block() {
                    let written = arrow::samples(block).and_then(|batch| encoder.batch(&batch)).map_err(|error| {
                        tracing::error!(error = %error, "writing rows as Arrow failed");
                        io::Error::other(error)
                    })?;
                    frames.extend(written);
                }
                Ok((frames, true))
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

    fn end(&mut self, _: &RowReader) -> Result<Vec<Bytes>, io::Error> {
        match self {
            Self::Arrow(encoder) => encoder.end().map_err(io::Error::other),
            Self::Text { format: TextFormat::Ndjson, .. } => Ok(Vec::new()),
            Self::Text { written: 0, .. } => Ok(vec![Bytes::from_static(b"[]")]),
            Self::Text { .. } => Ok(vec![Bytes::from_static(b"]")]),
        }
    }
}

impl TextFormat {
    fn write_row(self, text: &mut Vec<u8>, row: &Sample, is_first: bool) -> Result<(), io::Error> {
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
