//! A file that is being written: row groups of bounded size, so that neither writing nor reading needs memory for the
//! whole file. The columns of a row group are encoded on several threads.

use std::{
    io::Write,
    mem,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use arrow_array::{Array as _, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::{
    arrow::{
        ARROW_SCHEMA_META_KEY, ArrowWriter,
        arrow_writer::{ArrowColumnWriter, ArrowRowGroupWriterFactory, compute_leaves},
        encode_arrow_schema,
    },
    basic::{Compression, ZstdLevel},
    errors::ParquetError,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties},
        writer::SerializedFileWriter,
    },
    schema::types::ColumnPath,
};

use super::{columns::ELEMENT, footer::HeldFooter};
use crate::{ExportError, threads};

/// Bytes of an encoded row group in memory. Readers hold one row group at a time.
const ROW_GROUP_BYTES: usize = 32 << 20;

/// The columns with a value per token. They have no dictionary, which would fill up with the first rows.
pub(super) const PER_TOKEN: [&str; 5] = ["tokens", "logprobs", "teacher_logprobs", "values", "advantages"];

pub(crate) struct File<W: Write + Send> {
    schema: SchemaRef,
    out: SerializedFileWriter<HeldFooter<W>>,
    row_groups: ArrowRowGroupWriterFactory,
    /// The writers of the columns of the current row group, if it has rows.
    columns: Vec<ArrowColumnWriter>,
}

impl<W: Write + Send> File<W> {
    /// Begins a file with these columns.
    pub(crate) fn new(out: W, schema: Schema) -> Result<Self, ExportError> {
        let schema = Arc::new(schema);
        let properties = properties(&schema);
        let writer = ArrowWriter::try_new(HeldFooter::new(out), Arc::clone(&schema), Some(properties))?;
        let (mut out, row_groups) = writer.into_serialized_writer()?;
        // The schema is there twice. Arrow takes the first entry, which says that a text is JSON (`columns`). polars takes
        // the last one, and before 1.38 it may panic if that has an extension type.
        let plain: Vec<Field> = schema.fields().iter().map(|field| without_extensions(field)).collect();
        out.append_key_value_metadata(KeyValue::new(
            ARROW_SCHEMA_META_KEY.to_owned(),
            encode_arrow_schema(&Schema::new(plain)),
        ));
        Ok(Self { schema, out, row_groups, columns: Vec::new() })
    }

    /// Writes rows, and ends the row group if it is large.
    pub(crate) fn write(&mut self, arrays: Vec<ArrayRef>) -> Result<(), ExportError> {
        // This checks that the arrays have the types of the columns.
        let batch = RecordBatch::try_new(Arc::clone(&self.schema), arrays)?;
        if batch.num_rows() == 0 {
            return Ok(());
        }
        if self.columns.is_empty() {
            self.columns = self.row_groups.create_column_writers(self.out.flushed_row_groups().len())?;
        }
        encode(&batch, &mut self.columns)?;
        if self.columns.iter().map(ArrowColumnWriter::memory_size).sum::<usize>() > ROW_GROUP_BYTES {
            self.end_row_group()?;
        }
        Ok(())
    }

    fn end_row_group(&mut self) -> Result<(), ExportError> {
        let mut row_group = self.out.next_row_group()?;
        for column in mem::take(&mut self.columns) {
            column.close()?.append_to_row_group(&mut row_group)?;
        }
        row_group.close()?;
        Ok(())
    }

    /// Writes the end of the file.
    pub(crate) fn close(mut self) -> Result<(), ExportError> {
        if !self.columns.is_empty() {
            self.end_row_group()?;
        }
        self.out.flush()?;
        self.out.inner_mut().begin();
        let columns = self.out.finish()?.file_metadata().schema_descr().num_columns();
        Ok(self.out.inner_mut().end(columns)?)
    }
}

/// A column whose rows are to be encoded, with its writers: one for each of the columns that it has in the file.
struct Task<'t> {
    field: &'t Field,
    array: &'t ArrayRef,
    writers: &'t mut [ArrowColumnWriter],
    bytes: usize,
}

impl Task<'_> {
    fn run(self) -> Result<(), ParquetError> {
        let leaves = compute_leaves(self.field, self.array)?;
        self.writers.iter_mut().zip(leaves).try_for_each(|(writer, leaf)| writer.write(&leaf))
    }
}

/// Encodes the columns of a record batch, the largest first.
fn encode(batch: &RecordBatch, columns: &mut [ArrowColumnWriter]) -> Result<(), ExportError> {
    let mut left = columns;
    let mut tasks = Vec::with_capacity(batch.num_columns());
    for (field, array) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let (writers, rest) = mem::take(&mut left).split_at_mut(leaves(field.data_type()));
        left = rest;
        let bytes = array.to_data().get_slice_memory_size()?;
        tasks.push(Task { field, array, writers, bytes });
    }
    tasks.sort_by_key(|task| task.bytes);
    let tasks = Mutex::new(tasks);
    let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let run = || -> Result<(), ParquetError> {
        while let Some(task) = next() {
            task.run()?;
        }
        Ok(())
    };
    let done = thread::scope(|scope| {
        let others: Vec<_> = (1..threads()).map(|_| scope.spawn(run)).collect();
        let own = run();
        others
            .into_iter()
            .fold(own, |done, other| done.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
    });
    Ok(done?)
}

/// A field without Arrow's extension types.
fn without_extensions(field: &Field) -> Field {
    let of = match field.data_type() {
        DataType::List(item) => DataType::List(Arc::new(without_extensions(item))),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(|field| without_extensions(field)).collect()),
        other => other.clone(),
    };
    Field::new(field.name(), of, field.is_nullable())
}

/// How many columns a column has in a file.
fn leaves(of: &DataType) -> usize {
    match of {
        DataType::List(item) => leaves(item.data_type()),
        DataType::Struct(fields) => fields.iter().map(|field| leaves(field.data_type())).sum(),
        _ => 1,
    }
}

/// How files are written.
fn properties(schema: &Schema) -> WriterProperties {
    let level = ZstdLevel::try_new(1).expect("zstd has this level");
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_created_by(concat!("forebay ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_statistics_enabled(EnabledStatistics::None);
    for name in PER_TOKEN {
        let column = ColumnPath::from(vec![name.to_owned(), "list".to_owned(), ELEMENT.to_owned()]);
        properties = properties.set_column_dictionary_enabled(column, false);
    }
    // Only integers have statistics, by which readers pass over row groups, e.g. of other steps. The least float depends
    // on the order that the file declares (`footer`). In a file with nested columns, fastparquet takes the nulls of `step`
    // and `group_size` from the statistics of `status` and `policy`. It reads both columns only because texts have none.
    for field in schema.fields().iter().filter(|field| field.data_type().is_integer()) {
        let column = ColumnPath::from(field.name().as_str());
        properties = properties.set_column_statistics_enabled(column, EnabledStatistics::Chunk);
    }
    properties.build()
}
