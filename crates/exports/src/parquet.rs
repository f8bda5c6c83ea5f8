//! Rows as Parquet.

use std::io::Write;

use arrow_array::{Array as _, RecordBatch, cast::AsArray as _};
use arrow_select::filter::filter_record_batch;
use forebay_wire::ExportedRollout;

use self::file::File;
use crate::{
    ExportError, Requirement, Writer, Written, batch,
    conversation::{Conversation, Message, Unreadable},
};

pub(crate) mod columns;
pub(crate) mod file;
mod footer;

/// Writes rows as Parquet.
pub struct Parquet<W: Write + Send> {
    file: File<W>,
    required: Option<Requirement>,
    rows: u64,
    left_out: u64,
    unreadable: Unreadable,
}

impl<W: Write + Send> Parquet<W> {
    /// Writes to `out` only rows that have what is required.
    pub fn new(out: W, required: Option<Requirement>) -> Result<Self, ExportError> {
        let file = File::new(out, columns::schema())?;
        Ok(Self { file, required, rows: 0, left_out: 0, unreadable: Unreadable::default() })
    }

    /// Whether each row has what is required. Messages of which none can be read are none.
    fn complete(&self, batch: &RecordBatch, conversations: &[Option<Conversation>]) -> Vec<bool> {
        let has_messages = |one: &Option<Conversation>| one.as_ref().is_some_and(|one| !one.is_lost());
        match self.required {
            None => vec![true; batch.num_rows()],
            Some(Requirement::Messages) => conversations.iter().map(has_messages).collect(),
            Some(Requirement::Tokens) => {
                let tokens = batch.column_by_name("tokens").expect("it is a column");
                (0..tokens.len()).map(|row| tokens.is_valid(row)).collect()
            }
        }
    }

    /// Counts the messages that cannot be read, and returns those of the rows that are written.
    fn read(
        &mut self,
        batch: &RecordBatch,
        conversations: Vec<Option<Conversation>>,
        is_written: &[bool],
    ) -> Vec<Option<Vec<Message>>> {
        let rollout_ids = batch.column_by_name("rollout_id").expect("it is a column").as_string::<i32>();
        let mut read = Vec::with_capacity(conversations.len());
        for (index, (conversation, &is_written)) in conversations.into_iter().zip(is_written).enumerate() {
            let row = is_written.then_some(self.rows);
            if let Some(conversation) = &conversation {
                self.unreadable.add(row, rollout_ids.value(index), conversation);
            }
            if is_written {
                self.rows += 1;
                read.push(conversation.filter(|one| !one.is_lost()).map(|one| one.messages));
            } else {
                self.left_out += 1;
            }
        }
        read
    }
}

impl<W: Write + Send> Writer for Parquet<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        self.write_batch(batch::of(rollouts)?)
    }

    fn write_batch(&mut self, batch: RecordBatch) -> Result<(), ExportError> {
        let conversations = columns::conversations(&batch);
        let is_written = self.complete(&batch, &conversations);
        let read = self.read(&batch, conversations, &is_written);
        let batch = if is_written.contains(&false) { filter_record_batch(&batch, &is_written.into())? } else { batch };
        self.file.write(columns::of(&batch, &read))
    }

    fn finish(self: Box<Self>) -> Result<Written, ExportError> {
        self.file.close()?;
        let left_out = vec![(self.left_out, "rows without what --require names")];
        Ok(Written { rows: self.rows, left_out, unreadable: self.unreadable })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::parquet::{
        basic::{ColumnOrder, SortOrder, Type},
        file::metadata::ParquetMetaDataReader,
    };
    use arrow_array::{ArrayRef, Float64Array, Int64Array};
    use arrow_schema::{DataType, Field, Schema};

    use super::*;

    #[test]
    fn columns_of_floats_have_an_order_that_old_readers_know_and_no_statistics() {
        let schema = Schema::new(vec![
            Field::new("reward", DataType::Float64, true),
            Field::new("step", DataType::Int64, false),
        ]);
        let mut bytes = Vec::new();
        let mut file = File::new(&mut bytes, schema).expect("it can be written");
        let columns = [0.5, -0.0, f64::NAN].map(|reward| -> Vec<ArrayRef> {
            vec![Arc::new(Float64Array::from(vec![reward])), Arc::new(Int64Array::from(vec![1]))]
        });
        for columns in columns {
            file.write(columns).expect("it can be written");
        }
        file.close().expect("it can be written");
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&bytes::Bytes::from(bytes)).expect("a file");
        assert_eq!(metadata.file_metadata().num_rows(), 3);
        let orders = metadata.file_metadata().column_orders().expect("it declares them");
        assert!(orders.iter().all(|order| matches!(order, ColumnOrder::TYPE_DEFINED_ORDER(_))), "{orders:?}");
        for column in metadata.row_group(0).columns() {
            assert_eq!(column.statistics().is_some(), column.column_type() != Type::DOUBLE, "{}", column.column_path());
        }
        assert_eq!(orders[1], ColumnOrder::TYPE_DEFINED_ORDER(SortOrder::SIGNED));
    }

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
