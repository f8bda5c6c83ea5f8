//! Rows as Parquet: compressed row groups of bounded size, so that neither writing nor reading needs memory for the
//! whole file.

use std::{io::Write, sync::Arc};

use ::parquet::{
    arrow::ArrowWriter,
    basic::{Compression, ZstdLevel},
    file::properties::{EnabledStatistics, WriterProperties},
    schema::types::ColumnPath,
};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use forebay_client::wire::ExportedRollout;

use self::columns::Columns;
use crate::{
    ExportError, Requirement, Writer, Written,
    row::{self, Row},
};

pub(crate) mod columns;

/// Bytes of an encoded row group in memory. Readers hold one row group at a time.
const ROW_GROUP_BYTES: usize = 32 << 20;

/// Bytes of the rows that are made into columns at once, unless a single row has more.
const BATCH_BYTES: usize = 8 << 20;

/// The columns with a value per token. They have no dictionary, which would fill up with the first rows, and no
/// statistics.
const PER_TOKEN: [&str; 4] = ["tokens", "logprobs", "teacher_logprobs", "values"];

/// Writes rows as Parquet.
pub struct Parquet<W: Write + Send> {
    schema: SchemaRef,
    out: ArrowWriter<W>,
    required: Option<Requirement>,
    rows: u64,
    left_out: u64,
    not_messages: u64,
}

impl<W: Write + Send> Parquet<W> {
    /// Writes to `out` only rows that have what is required.
    pub fn new(out: W, required: Option<Requirement>) -> Result<Self, ExportError> {
        let schema = Arc::new(columns::schema());
        let out = ArrowWriter::try_new(out, Arc::clone(&schema), Some(properties()))?;
        Ok(Self { schema, out, required, rows: 0, left_out: 0, not_messages: 0 })
    }

    fn batch(&mut self, rows: &[Row<'_>]) -> Result<(), ExportError> {
        let Columns { arrays, not_messages } = columns::of(rows);
        self.not_messages += not_messages;
        self.rows += rows.len() as u64;
        write_batch(&mut self.out, &self.schema, arrays)
    }
}

/// Writes a batch, and ends the row group if it is large.
pub(crate) fn write_batch<W: Write + Send>(
    out: &mut ArrowWriter<W>,
    schema: &SchemaRef,
    arrays: Vec<arrow_array::ArrayRef>,
) -> Result<(), ExportError> {
    out.write(&RecordBatch::try_new(Arc::clone(schema), arrays)?)?;
    if out.memory_size() > ROW_GROUP_BYTES {
        out.flush()?;
    }
    Ok(())
}

/// How files are written.
pub(crate) fn properties() -> WriterProperties {
    let level = ZstdLevel::try_new(1).expect("zstd has this level");
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_created_by(concat!("forebay ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_max_row_group_row_count(Some(1 << 20));
    for name in PER_TOKEN {
        let column = ColumnPath::from(vec![name.to_owned(), "list".to_owned(), columns::ELEMENT.to_owned()]);
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_statistics_enabled(column, EnabledStatistics::None);
    }
    properties.build()
}

/// An estimate of the bytes of a row.
fn row_bytes(row: &Row<'_>) -> usize {
    let floats = [row.logprobs, row.teacher_logprobs, row.values].into_iter().flatten().map(<[_]>::len).sum::<usize>();
    let json =
        [row.messages, row.metadata, row.tools].into_iter().flatten().map(|json| json.get().len()).sum::<usize>();
    4 * (row.tokens.map_or(0, <[_]>::len) + floats) + row.loss_mask.map_or(0, <[_]>::len) + json
}

impl<W: Write + Send> Writer for Parquet<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        let (rows, left_out) = row::rows(rollouts, self.required);
        self.left_out += left_out;
        let (mut first, mut bytes) = (0, 0);
        for (index, row) in rows.iter().enumerate() {
            bytes += row_bytes(row);
            if bytes >= BATCH_BYTES {
                self.batch(&rows[first..=index])?;
                (first, bytes) = (index + 1, 0);
            }
        }
        if first < rows.len() { self.batch(&rows[first..]) } else { Ok(()) }
    }

    fn finish(self: Box<Self>) -> Result<Written, ExportError> {
        self.out.close()?;
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
        for name in PER_TOKEN {
            let field = schema.field_with_name(name).expect("it is a column");
            let arrow_schema::DataType::List(element) = field.data_type() else { panic!("{name} is no list") };
            assert_eq!(element.name(), columns::ELEMENT);
        }
    }
}
