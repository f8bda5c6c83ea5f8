//! Rows as Parquet.

use std::io::Write;

use arrow_array::{Array as _, RecordBatch};
use arrow_select::filter::filter_record_batch;
use forebay_client::wire::ExportedRollout;

use self::{columns::Columns, file::File};
use crate::{ExportError, Requirement, Writer, Written, batch};

pub(crate) mod columns;
pub(crate) mod file;

/// Writes rows as Parquet.
pub struct Parquet<W: Write + Send> {
    file: File<W>,
    required: Option<Requirement>,
    rows: u64,
    left_out: u64,
    not_messages: u64,
}

impl<W: Write + Send> Parquet<W> {
    /// Writes to `out` only rows that have what is required.
    pub fn new(out: W, required: Option<Requirement>) -> Result<Self, ExportError> {
        let file = File::new(out, columns::schema())?;
        Ok(Self { file, required, rows: 0, left_out: 0, not_messages: 0 })
    }

    /// The rows that have what is required.
    fn complete(&mut self, batch: RecordBatch) -> Result<RecordBatch, ExportError> {
        let Some(required) = self.required else { return Ok(batch) };
        let column = match required {
            Requirement::Messages => "messages",
            Requirement::Tokens => "tokens",
        };
        let column = batch.column_by_name(column).expect("it is a column");
        self.left_out += column.null_count() as u64;
        if column.null_count() == 0 {
            return Ok(batch);
        }
        let present = (0..column.len()).map(|row| Some(column.is_valid(row))).collect();
        Ok(filter_record_batch(&batch, &present)?)
    }
}

impl<W: Write + Send> Writer for Parquet<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        self.write_batch(batch::of(rollouts)?)
    }

    fn write_batch(&mut self, batch: RecordBatch) -> Result<(), ExportError> {
        let batch = self.complete(batch)?;
        let Columns { arrays, not_messages } = columns::of(&batch);
        self.not_messages += not_messages;
        self.rows += batch.num_rows() as u64;
        self.file.write(arrays)
    }

    fn finish(self: Box<Self>) -> Result<Written, ExportError> {
        self.file.close()?;
        let left_out = vec![
            (self.left_out, "rows without what --require names"),
            (self.not_messages, "rows whose messages have no role and are null"),
        ];
        Ok(Written { rows: self.rows, left_out })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_per_token_exist() {
        let schema = columns::schema();
        for name in file::PER_TOKEN {
            let field = schema.field_with_name(name).expect("it is a column");
            let arrow_schema::DataType::List(element) = field.data_type() else { panic!("{name} is no list") };
            assert_eq!(element.name(), columns::ELEMENT);
        }
    }
}
