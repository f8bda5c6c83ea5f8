//! Data sets of exported rollouts: Parquet, NDJSON, session traces, pairs of preferences, and trajectories.
//!
//! Everything here turns [`ExportedRollout`]s into bytes and knows neither the service nor its database, so that an
//! export over HTTP and one from the database are the same. A [`Writer`] takes rollouts in order and holds a bounded
//! number of them. The modules, in reading order: `row` (one row per segment), [`batch`] (the rows as Arrow, and back),
//! `lines` (JSON on several threads), `ndjson` and `parquet` (the rows), `conversation` (messages in one shape, and those
//! that cannot be read), `pairs`, `traces`, `trajectories`.

pub mod arrays;
pub mod batch;
mod conversation;
mod lines;
mod ndjson;
mod pairs;
mod parquet;
mod row;
mod traces;
mod trajectories;

use std::{fmt, io, str::FromStr, thread};

use arrow_array::RecordBatch;
use forebay_wire::ExportedRollout;

pub use self::{
    conversation::{Unreadable, UnreadableMessage},
    ndjson::Ndjson,
    pairs::Pairs,
    parquet::Parquet,
    row::Requirement,
    traces::Traces,
    trajectories::Trajectories,
};

/// Formats of exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One row per segment, as Parquet.
    Parquet,
    /// One row per segment, as JSON.
    Ndjson,
    /// One session trace per rollout, in the format that the Hugging Face Hub shows.
    Sts,
    /// The best and the worst rollout of each group.
    Pairs,
    /// One trajectory per rollout, as `POST /trajectories` takes it.
    Forebay,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "parquet" => Ok(Self::Parquet),
            "ndjson" => Ok(Self::Ndjson),
            "sts" => Ok(Self::Sts),
            "pairs" => Ok(Self::Pairs),
            "forebay" => Ok(Self::Forebay),
            _ => Err("must be parquet, ndjson, sts, pairs or forebay".to_owned()),
        }
    }
}

/// The most threads that write one page. More would wait for those that read pages.
const THREADS_MAX: usize = 4;

/// The number of threads that write a page.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// Writes rollouts in one format.
pub trait Writer: Send {
    /// Writes rollouts. Groups arrive whole, one after the other.
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError>;

    /// Writes the rollouts of a record batch, which has the columns of [`batch::schema`].
    fn write_batch(&mut self, batch: RecordBatch) -> Result<(), ExportError> {
        self.write(&batch::rollouts(&batch)?)
    }

    /// Writes the end.
    fn finish(self: Box<Self>) -> Result<Written, ExportError>;
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Rows, traces or pairs.
    pub rows: u64,
    /// What was left out, and how often.
    pub left_out: Vec<(u64, &'static str)>,
    /// Messages that are missing because they cannot be read.
    pub unreadable: Unreadable,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows", self.rows)?;
        let notable = self.left_out.iter().filter(|(count, _)| *count > 0);
        notable.into_iter().try_for_each(|(count, what)| write!(f, ", {count} {what}"))
    }
}

/// An export cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file cannot be written.
    #[error("cannot write the export")]
    Io(#[from] io::Error),
    /// A row cannot be written as JSON.
    #[error("cannot write a row as JSON")]
    Json(#[from] serde_json::Error),
    /// Rows cannot be written as Parquet.
    #[error("cannot write rows as Parquet")]
    Parquet(#[from] ::parquet::errors::ParquetError),
    /// Rows cannot be made into columns.
    #[error("cannot make columns of rows")]
    Arrow(#[from] arrow_schema::ArrowError),
}
