//! Columns of a batch that were uploaded, as an Arrow stream: their bytes are read, cut and sent part by part, so neither a
//! batch nor a segment is ever in memory with its columns.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    ops::Range,
    sync::Arc,
};

use arrow_array::RecordBatch;
use arrow_schema::ArrowError;
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_bounds::{
    budget::{Share, paid},
    work,
};
use forebay_domain::{
    blobs::PART_BYTES,
    columns::{self, OFFSET_BYTES},
    ids::BlobDigest,
    refusal::Refusal,
    samples::page::Row,
};
use forebay_service::{blobs::FoundBlob, error::BufferError};
use forebay_store::error::StoreError;
use forebay_wire::{ARROW_STREAM, ColumnRetention, ColumnRule, ColumnUpload};
use futures::{StreamExt as _, stream};
use tokio::sync::Semaphore;

use super::RowReader;
use crate::{
    Api,
    codecs::arrow::{
        self,
        uploads::{self, UploadColumn, UploadLengths},
    },
    http::{
        body::stopped,
        pages::{FIRST_PAGE_WAIT, Reader as _},
        problem::Failure,
        uploads::Reading,
    },
};

/// Bytes of columns up to which segments share a record batch. Readers hold one as a whole.
const BATCH_BYTES: u64 = 32 << 20;

/// How many times a page is held: as stored, unpacked, as rows, and as a response.
const PAGE_COPIES: u64 = 4;

/// How many parts of uploads are in memory: one that is written, and one that is read meanwhile.
const PARTS: usize = 2;

/// Bytes that the place of a column in a row takes: where its upload is, and what is to be done with it.
const CELL_BYTES: u64 = 512;

/// Rows of a page are priced with at least so many bytes.
const ROW_BYTES: u64 = 1 << 10;

/// What a page takes for parts. A reader that holds a page must not wait for the budget, because others may wait for its
/// bytes. So a page is paid for together with its parts, and a part waits only for those before it to be written.
const PARTS_BYTES: u64 = PARTS as u64 * PART_BYTES;

/// Which columns a reader wants.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub(super) names: Vec<String>,
    /// Which entries of the first dimension of rows.
    inner: Option<Range<u32>>,
}

impl Asked {
    pub(super) fn parse(columns: Option<&str>, inner: Option<&str>) -> Result<Self, Failure> {
        let names: Vec<String> = columns.into_iter().flat_map(|names| names.split(',')).map(str::to_owned).collect();
        let mut seen = BTreeSet::new();
        if names.len() > columns::COLUMNS_MAX || !names.iter().all(|name| !name.is_empty() && seen.insert(name)) {
            let detail = format!("must be at most {} names, each once, with commas between them", columns::COLUMNS_MAX);
            return Err(Failure::invalid("columns", detail));
        }
        let range = |text: &str| {
            let (first, end) = text.split_once(':')?;
            let range = first.parse().ok()?..end.parse().ok()?;
            (range.start < range.end).then_some(range)
        };
        let Some(text) = inner else { return Ok(Self { names, inner: None }) };
        if names.is_empty() {
            return Err(Failure::invalid("inner", "is only allowed with `columns`"));
        }
        let inner = range(text).ok_or_else(|| Failure::invalid("inner", "must be FIRST:END, such as 12:24"))?;
        Ok(Self { names, inner: Some(inner) })
    }
}

/// A column that is sent.
#[derive(Clone, Debug)]
struct Column {
    rule: ColumnRule,
    /// Bytes of a row, or of a number of a ragged row.
    bytes: u64,
    /// Which of the bytes of a row are sent.
    slice: Range<u64>,
    sent: UploadColumn,
}

impl Column {
    fn of(name: &str, rule: ColumnRule, inner: Option<&Range<u32>>) -> Result<Self, Failure> {
        let bytes = columns::row_bytes(&rule);
        let (mut slice, mut shape) = (0..bytes, rule.shape.clone());
        if let Some(inner) = inner {
            let first = shape.first_mut().filter(|length| inner.end <= **length).ok_or_else(|| {
                let of = if rule.ragged { "lists".to_owned() } else { format!("shape {:?}", rule.shape) };
                let detail = format!("is {}:{}, but the rows of column `{name}` are of {of}", inner.start, inner.end);
                Failure::invalid("inner", detail)
            })?;
            let entry = bytes / u64::from(*first);
            slice = u64::from(inner.start) * entry..u64::from(inner.end) * entry;
            *first = inner.end - inner.start;
        }
        let sent = UploadColumn {
            name: name.to_owned(),
            bytes: (slice.end - slice.start) as u32,
            is_ragged: rule.ragged,
            metadata: [
                ("dtype", rule.dtype.as_str().to_owned()),
                ("shape", serde_json::to_string(&shape).unwrap_or_default()),
                ("rows", rule.rows.as_str().to_owned()),
            ],
        };
        Ok(Self { rule, bytes, slice, sent })
    }

    /// Bytes of the offsets of so many rows.
    fn offset_bytes(&self, rows: u64) -> u64 {
        if self.rule.ragged { (rows + 1) * OFFSET_BYTES } else { 0 }
    }
}

/// What is sent next.
enum Part {
    Frame(Bytes),
    /// Bytes of an upload, as they are or with something done to them.
    Upload(Reading, Change),
}

/// What is done to the bytes of an upload.
enum Change {
    None,
    /// Of each row of so many bytes, only these are sent. The next byte is the one with this number.
    Slice {
        row: u64,
        slice: Range<u64>,
        at: u64,
    },
    /// Offsets are checked, and count from the first number of the record batch on.
    Offsets {
        base: u32,
        numbers: u64,
        last: Option<u32>,
        is_first: bool,
    },
}

/// A stream of samples with columns.
struct Sending {
    api: Api,
    reader: RowReader,
    columns: Arc<Vec<Column>>,
    parts: VecDeque<Part>,
    /// What pays for the page and for its parts.
    share: Option<Arc<Share>>,
    /// Which of the parts are not in memory.
    free: Arc<Semaphore>,
    is_first: bool,
    ended: bool,
}

/// Answers with the samples and these columns.
pub(super) async fn respond(api: &Api, reader: RowReader, asked: &Asked) -> Result<Response, Failure> {
    let column = |name: &String| Column::of(name, reader.samples.column(name)?, asked.inner.as_ref());
    let columns: Vec<Column> = asked.names.iter().map(column).collect::<Result<_, _>>()?;
    let sent: Vec<UploadColumn> = columns.iter().map(|column| column.sent.clone()).collect();
    let parts = [Part::Frame(uploads::beginning(&sent))].into();
    let mut sending = Sending {
        api: api.clone(),
        reader,
        columns: Arc::new(columns),
        parts,
        share: None,
        free: Arc::new(Semaphore::new(PARTS)),
        is_first: true,
        ended: false,
    };
    // The first page is read before the head is sent, so that an error can still become a problem document.
    sending.read_page().await?;
    let frames = stream::try_unfold(sending, |mut sending| async move {
        match sending.next().await {
            Ok(frames) => Ok(frames.map(|frames| (frames, sending))),
            Err(failure) => {
                let problem = failure.into_problem();
                let (kind, detail) = (problem.kind, problem.detail);
                tracing::warn!(problem.kind = kind, problem.detail = detail, "a stream of columns was aborted");
                Err(io::Error::other(kind))
            }
        }
    });
    let frames = frames.flat_map(|frames| match frames {
        Ok(frames) => stream::iter(frames.into_iter().map(Ok).collect::<Vec<_>>()),
        Err(error) => stream::iter(vec![Err(error)]),
    });
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(ARROW_STREAM));
    head.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    Ok((head, Body::from_stream(frames)).into_response())
}

impl Sending {
    /// The next frames; none at the end.
    async fn next(&mut self) -> Result<Option<Vec<Bytes>>, Failure> {
        loop {
            match self.parts.pop_front() {
                Some(Part::Frame(frame)) => return Ok(Some(vec![frame])),
                Some(Part::Upload(mut reading, mut change)) => {
                    let free = Arc::clone(&self.free).acquire_owned().await.map_err(|_| stopped())?;
                    let held = Arc::new((free, self.share.clone()));
                    let frames = reading.next().await?;
                    let is_last = reading.wanted.is_empty();
                    let bytes = frames.iter().map(Bytes::len).sum();
                    let frames = work::run(bytes, || change.apply(frames, is_last)).await;
                    let frames = frames.map_err(|detail| {
                        StoreError::Corrupt(format!("the upload {} {detail}", reading.found.blob.digest))
                    });
                    if !is_last {
                        self.parts.push_front(Part::Upload(reading, change));
                    }
                    let pay = |frame| paid(frame, Arc::clone(&held));
                    return Ok(Some(frames.map_err(BufferError::from)?.into_iter().map(pay).collect()));
                }
                None if self.ended => return Ok(None),
                None => self.read_page().await?,
            }
        }
    }

    /// Reads the next page, and finds its uploads before any of its bytes are sent.
    async fn read_page(&mut self) -> Result<(), Failure> {
        // Frames of the page before, which are not written yet, hold its share.
        self.share = None;
        let bytes = self.reader.next_page_bytes().await?;
        let cell_bytes = (bytes / ROW_BYTES).saturating_mul(self.columns.len() as u64 * CELL_BYTES);
        let cost = bytes.saturating_mul(PAGE_COPIES).saturating_add(cell_bytes).saturating_add(PARTS_BYTES);
        let (budget, cost) = (&self.api.budgets.samples, usize::try_from(cost).unwrap_or(usize::MAX));
        let share = if std::mem::take(&mut self.is_first) {
            budget.wait_at_most(FIRST_PAGE_WAIT, cost).await?
        } else {
            budget.wait_for(cost).await
        };
        let Some(mut page) = self.reader.next_page().await? else {
            self.ended = true;
            self.parts.push_back(Part::Frame(Bytes::from_static(uploads::END)));
            return Ok(());
        };
        let columns = Arc::clone(&self.columns);
        // The share is where the memory is, also if the reader goes away meanwhile.
        let make = move || {
            let mut batches = Vec::new();
            while let Some(block) = page.next_block() {
                let cells = cells(&columns, &block.rows);
                batches.extend(divide(&columns, &arrow::samples(block)?, cells));
            }
            Ok::<_, ArrowError>((batches, share))
        };
        let written = tokio::task::spawn_blocking(make).await.map_err(|_| stopped())?;
        let (batches, mut share) = written.map_err(|error| not_written(&error))?;
        let found = self.find(&batches).await?;
        let columns = Arc::clone(&self.columns);
        let heads = tokio::task::spawn_blocking(move || {
            let written = |batch: Batch| {
                let lengths: Vec<_> =
                    columns.iter().zip(&batch.cells).map(|(column, cells)| lengths(column, cells)).collect();
                uploads::head(&batch.samples, &lengths).map(|head| (head, batch.cells))
            };
            let heads = batches.into_iter().map(written).collect::<Result<Vec<_>, _>>()?;
            let bytes: usize = heads.iter().flat_map(|(head, _)| &head.frames).map(Bytes::len).sum();
            share.shrink(bytes + cell_bytes.saturating_add(PARTS_BYTES) as usize);
            Ok::<_, ArrowError>((heads, share))
        });
        let (heads, share) = heads.await.map_err(|_| stopped())?.map_err(|error| not_written(&error))?;
        let share = Arc::new(share);
        self.share = Some(Arc::clone(&share));
        for (head, cells) in heads {
            self.parts.extend(head.frames.into_iter().map(|frame| Part::Frame(paid(frame, Arc::clone(&share)))));
            for ((column, cells), gap) in self.columns.iter().zip(cells).zip(head.columns) {
                put_column(&self.api, &mut self.parts, column, &cells, gap, &found);
            }
        }
        Ok(())
    }

    /// The uploads of record batches.
    async fn find(&self, batches: &[Batch]) -> Result<HashMap<BlobDigest, FoundBlob>, Failure> {
        let cells = || batches.iter().flat_map(|batch| self.columns.iter().zip(&batch.cells));
        let cells = || cells().flat_map(|(column, cells)| cells.iter().flatten().map(move |cell| (column, cell)));
        let digests: BTreeSet<BlobDigest> = cells().map(|(_, cell)| cell.digest).collect();
        let found = self.api.buffer.blobs(digests).await?;
        match cells().find(|(_, cell)| !found.contains_key(&cell.digest)) {
            None => Ok(found),
            // The rollout was purged in the meantime.
            Some((column, _)) if column.rule.retention == ColumnRetention::Rollout => Err(Refusal::Purged.into()),
            Some((column, cell)) => Err(expired(column, cell)),
        }
    }
}

fn not_written(error: &ArrowError) -> Failure {
    tracing::error!(error = %error, "writing rows as Arrow failed");
    Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The rows cannot be written as Arrow")
        .detail(error.to_string())
}

fn expired(column: &Column, cell: &Cell) -> Failure {
    let (name, rollout, segment) = (&column.sent.name, &cell.rollout, cell.segment);
    let until = match column.rule.retention {
        ColumnRetention::Ack => "an ack",
        ColumnRetention::Checkpoint | ColumnRetention::Rollout => "a checkpoint",
    };
    Failure::new(StatusCode::GONE, "column-expired", "A column is gone").detail(format!(
        "column `{name}` of segment {segment} of rollout `{rollout}` was kept until {until}, as its `retention` says: read the \
         batch without it, or keep it longer"
    ))
}

/// A segment's upload of a column.
#[derive(Clone, Debug)]
struct Cell {
    digest: BlobDigest,
    bytes: u64,
    rows: u64,
    rollout: String,
    segment: i32,
}

/// The cells of each column.
fn cells(columns: &[Column], rows: &[Row]) -> Vec<Vec<Option<Cell>>> {
    let cell = |column: &Column, row: &Row| {
        let ColumnUpload { digest, bytes } = row.sample.columns.get(&column.sent.name)?;
        let tokens = row.lengths.tokens.unwrap_or(0) as u64;
        Some(Cell {
            digest: digest.parse().ok()?,
            bytes: *bytes,
            rows: column.rule.rows.count(tokens, row.sample.response_length as u64),
            rollout: row.sample.rollout_id.clone(),
            segment: row.sample.segment,
        })
    };
    columns.iter().map(|column| rows.iter().map(|row| cell(column, row)).collect()).collect()
}

/// A record batch of samples, and the cells of its columns.
struct Batch {
    samples: RecordBatch,
    cells: Vec<Vec<Option<Cell>>>,
}

/// Divides a record batch into some of which each has columns of [`BATCH_BYTES`], or one row.
fn divide(columns: &[Column], samples: &RecordBatch, mut cells: Vec<Vec<Option<Cell>>>) -> Vec<Batch> {
    let bytes = |row: usize| {
        let of = |(column, cells): (&Column, &Vec<Option<Cell>>)| {
            let cell = cells[row].as_ref()?;
            let sent = cell.rows * (column.slice.end - column.slice.start);
            Some(if column.rule.ragged { cell.bytes } else { sent })
        };
        columns.iter().zip(&cells).filter_map(of).sum::<u64>()
    };
    let (mut begins, mut sum) = (Vec::new(), 0);
    for row in 0..samples.num_rows() {
        let next = bytes(row);
        if begins.is_empty() || next > BATCH_BYTES.saturating_sub(sum) {
            begins.push(row);
            sum = 0;
        }
        sum = sum.saturating_add(next);
    }
    let mut batches = VecDeque::with_capacity(begins.len());
    // From the last one on, so that the cells are divided without a copy.
    let mut end = samples.num_rows();
    for begin in begins.into_iter().rev() {
        let cells = cells.iter_mut().map(|cells| cells.split_off(begin)).collect();
        batches.push_front(Batch { samples: samples.slice(begin, end - begin), cells });
        end = begin;
    }
    batches.into()
}

/// The numbers of a ragged cell.
fn numbers(column: &Column, cell: &Cell) -> u64 {
    cell.bytes.saturating_sub(column.offset_bytes(cell.rows)) / column.bytes
}

fn lengths(column: &Column, cells: &[Option<Cell>]) -> (UploadColumn, UploadLengths) {
    let numbers = |cell: &Cell| if column.rule.ragged { numbers(column, cell) } else { 0 };
    let lengths = UploadLengths {
        rows: cells.iter().map(|cell| cell.as_ref().map(|cell| cell.rows)).collect(),
        numbers: cells.iter().flatten().map(numbers).sum(),
    };
    (column.sent.clone(), lengths)
}

/// Adds the parts of a column of a record batch.
fn put_column(
    api: &Api,
    parts: &mut VecDeque<Part>,
    column: &Column,
    cells: &[Option<Cell>],
    gap: uploads::Gap,
    found: &HashMap<BlobDigest, FoundBlob>,
) {
    let reading =
        |cell: &Cell, wanted: Range<u64>| Reading { api: api.clone(), found: found[&cell.digest].clone(), wanted };
    let stored = || cells.iter().flatten();
    parts.push_back(Part::Frame(gap.before));
    if column.rule.ragged {
        let (mut base, mut is_first) = (0, true);
        for cell in stored() {
            let numbers = numbers(column, cell);
            let change = Change::Offsets { base, numbers, last: None, is_first: std::mem::take(&mut is_first) };
            parts.push_back(Part::Upload(reading(cell, 0..column.offset_bytes(cell.rows)), change));
            base += numbers as u32;
        }
        if is_first {
            parts.push_back(Part::Frame(Bytes::from_static(&[0; OFFSET_BYTES as usize])));
        }
        parts.push_back(Part::Frame(gap.between));
    }
    for cell in stored() {
        let from = column.offset_bytes(cell.rows);
        if from == cell.bytes {
            continue;
        }
        let is_whole = column.slice == (0..column.bytes);
        let change = if is_whole {
            Change::None
        } else {
            Change::Slice { row: column.bytes, slice: column.slice.clone(), at: 0 }
        };
        parts.push_back(Part::Upload(reading(cell, from..cell.bytes), change));
    }
    parts.push_back(Part::Frame(gap.behind));
}

impl Change {
    /// What of these bytes is sent.
    fn apply(&mut self, frames: Vec<Bytes>, is_last: bool) -> Result<Vec<Bytes>, String> {
        match self {
            Self::None => Ok(frames),
            Self::Slice { row, slice, at } => {
                Ok(frames.into_iter().map(|frame| sliced(&frame, *row, slice, at)).collect())
            }
            Self::Offsets { base, numbers, last, is_first } => {
                let mut changed = Vec::with_capacity(frames.len());
                for frame in frames {
                    let is_beginning = last.is_none();
                    columns::check_offsets(last, &frame, *numbers)?;
                    let offsets =
                        frame.chunks_exact(OFFSET_BYTES as usize).skip(usize::from(is_beginning && !*is_first));
                    let added = offsets.flat_map(|offset| {
                        let offset = u32::from_le_bytes(offset.try_into().expect("chunks have this length"));
                        (offset + *base).to_le_bytes()
                    });
                    changed.push(Bytes::from(added.collect::<Vec<u8>>()));
                }
                match last {
                    Some(end) if is_last && u64::from(*end) != *numbers => {
                        Err(format!("ends with the offset {end}, but has {numbers} numbers"))
                    }
                    _ => Ok(changed),
                }
            }
        }
    }
}

/// The wanted bytes of the rows in a frame that begins with byte `at` of them.
fn sliced(frame: &[u8], row: u64, slice: &Range<u64>, at: &mut u64) -> Bytes {
    let (begin, end) = (*at, *at + frame.len() as u64);
    *at = end;
    let width = (slice.end - slice.start) as usize;
    let mut wanted = Vec::with_capacity((frame.len() / row as usize + 2) * width);
    for start in (begin / row..end.div_ceil(row)).map(|index| index * row) {
        let from = (start + slice.start).clamp(begin, end) - begin;
        let to = (start + slice.end).clamp(begin, end) - begin;
        wanted.extend_from_slice(&frame[from as usize..to as usize]);
    }
    wanted.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_the_same_however_the_bytes_are_divided() {
        let rows: Vec<u8> = (0..=255).cycle().take(7 * 60).collect();
        let expected: Vec<u8> = rows.chunks(60).flat_map(|row| row[20..30].to_vec()).collect();
        for part in [1, 7, 20, 29, 60, 61, 500] {
            let mut change = Change::Slice { row: 60, slice: 20..30, at: 0 };
            let frames = rows.chunks(part).map(Bytes::copy_from_slice).collect();
            assert_eq!(change.apply(frames, true).expect("it has no offsets").concat(), expected, "{part}");
        }
    }

    #[test]
    fn offsets_go_on_where_those_before_end() {
        let of = |offsets: &[u32]| offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<u8>>();
        let parts = |parts: &[&[u32]]| parts.iter().map(|part| Bytes::from(of(part))).collect::<Vec<_>>();
        let changed = |offsets: &[&[u32]], base, is_first| {
            let mut change = Change::Offsets { base, numbers: 7, last: None, is_first };
            change.apply(parts(offsets), true).map(|frames| frames.concat())
        };
        assert_eq!(changed(&[&[0, 3], &[7]], 0, true), Ok(of(&[0, 3, 7])));
        assert_eq!(changed(&[&[0, 3], &[7]], 10, false), Ok(of(&[13, 17])));
        assert_eq!(changed(&[&[0, 3]], 0, true), Err("ends with the offset 3, but has 7 numbers".to_owned()));
        assert!(changed(&[&[0, 8]], 0, true).is_err());
    }

    #[test]
    fn names_and_ranges_are_checked() {
        let pointer = |columns, inner| {
            Asked::parse(columns, inner).map(|_| ()).map_err(|failure| failure.into_problem().errors[0].pointer.clone())
        };
        assert_eq!(pointer(None, None), Ok(()));
        assert_eq!(pointer(Some("a,b"), Some("12:24")), Ok(()));
        assert_eq!(pointer(Some(""), None), Err("columns".to_owned()));
        assert_eq!(pointer(Some("a,a"), None), Err("columns".to_owned()));
        for inner in ["12", "2:2", "a:b", "-1:2"] {
            assert_eq!(pointer(Some("a"), Some(inner)), Err("inner".to_owned()), "{inner}");
        }
        assert_eq!(pointer(None, Some("0:1")), Err("inner".to_owned()));
    }
}
