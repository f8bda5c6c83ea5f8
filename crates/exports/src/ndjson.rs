//! Rows as JSON, one per line. Messages, tools and metadata are as they were posted.

use std::io::Write;

use forebay_wire::ExportedRollout;

use crate::{ExportError, Requirement, Writer, Written, lines, row};

/// Writes rows as NDJSON.
pub struct Ndjson<W> {
    out: W,
    required: Option<Requirement>,
    rows: u64,
    left_out: u64,
}

impl<W: Write + Send> Ndjson<W> {
    /// Writes to `out`, which should be buffered, only rows that have what is required.
    pub fn new(out: W, required: Option<Requirement>) -> Self {
        Self { out, required, rows: 0, left_out: 0 }
    }
}

impl<W: Write + Send> Writer for Ndjson<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        let mut rows = row::rows(rollouts);
        let found = rows.len();
        rows.retain(|row| match self.required {
            None => true,
            Some(Requirement::Messages) => row.messages.is_some(),
            Some(Requirement::Tokens) => row.tokens.is_some(),
        });
        self.left_out += (found - rows.len()) as u64;
        self.rows += rows.len() as u64;
        lines::write(&mut self.out, &rows)
    }

    fn finish(mut self: Box<Self>) -> Result<Written, ExportError> {
        self.out.flush()?;
        let left_out = vec![(self.left_out, "rows without what --require names")];
        Ok(Written { rows: self.rows, left_out, ..Written::default() })
    }
}
