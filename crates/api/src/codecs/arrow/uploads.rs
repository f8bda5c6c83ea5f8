//! Record batches whose last columns are not in memory: they are sent part by part, as they are read.
//!
//! A message of Arrow says how long each buffer of its record batch is before the buffers follow, so only lengths must be
//! known when it begins. A library encodes the other columns; what it wrote is repeated here with the columns behind them.
//! The format is that of <https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc>.

use std::{collections::HashMap, sync::Arc};

use arrow_array::RecordBatch;
use arrow_ipc::{
    Buffer, FieldNode, MessageBuilder, MessageHeader, MetadataVersion, RecordBatchBuilder, root_as_message,
    writer::{DictionaryTracker, IpcDataGenerator, IpcWriteContext, IpcWriteOptions},
};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use bytes::Bytes;
use flatbuffers::FlatBufferBuilder;

use super::samples_schema;

/// Buffers begin at multiples of it.
const ALIGNMENT: usize = 64;

/// What precedes the length of a message.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// The end of a stream.
pub(crate) const END: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// A column of a stream: a list of rows for each segment. Rows, and the numbers of ragged rows, are bytes of one length.
#[derive(Clone, Debug)]
pub(crate) struct UploadColumn {
    pub(crate) name: String,
    /// Bytes of a row as it is sent, or of a number of a ragged row.
    pub(crate) bytes: u32,
    pub(crate) is_ragged: bool,
    /// What readers make arrays with.
    pub(crate) metadata: [(&'static str, String); 3],
}

/// What a record batch has of a column.
#[derive(Clone, Debug, Default)]
pub(crate) struct UploadLengths {
    /// The number of rows of each segment; none where it does not have the column.
    pub(crate) rows: Vec<Option<u64>>,
    /// The number of numbers of all ragged rows.
    pub(crate) numbers: u64,
}

/// The beginning of a record batch, and what belongs before and behind the bytes of each column.
pub(crate) struct Head {
    pub(crate) frames: Vec<Bytes>,
    pub(crate) columns: Vec<Gap>,
}

/// The bytes of a column: `before`, then the offsets of ragged rows and `between`, then rows or numbers and `behind`.
pub(crate) struct Gap {
    pub(crate) before: Bytes,
    pub(crate) between: Bytes,
    pub(crate) behind: Bytes,
}

impl UploadColumn {
    fn field(&self) -> Field {
        let item = |of: DataType| DataType::List(Arc::new(Field::new("item", of, false)));
        let row = DataType::FixedSizeBinary(self.bytes as i32);
        let of = if self.is_ragged { item(item(row)) } else { item(row) };
        let metadata: HashMap<_, _> =
            self.metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        Field::new(format!("column.{}", self.name), of, true).with_metadata(metadata)
    }
}

/// The beginning of a stream of samples with these columns behind the others.
pub(crate) fn beginning(columns: &[UploadColumn]) -> Bytes {
    let mut fields: Vec<Arc<Field>> = samples_schema().fields().iter().cloned().collect();
    fields.extend(columns.iter().map(|column| Arc::new(column.field())));
    let (schema, mut tracker) = (Schema::new(fields), DictionaryTracker::new(true));
    let options = IpcWriteOptions::default();
    let encoded = IpcDataGenerator {}.schema_to_bytes_with_dictionary_tracker(&schema, &mut tracker, &options);
    framed(&encoded.ipc_message)
}

/// The beginning of a record batch of samples with these columns.
pub(crate) fn head(samples: &RecordBatch, columns: &[(UploadColumn, UploadLengths)]) -> Result<Head, ArrowError> {
    let (options, mut context) = (IpcWriteOptions::default(), IpcWriteContext::default());
    let (_, encoded) =
        IpcDataGenerator {}.encode(samples, &mut DictionaryTracker::new(true), &options, &mut context)?;
    let invalid = |error: &str| ArrowError::IpcError(error.to_owned());
    let message = root_as_message(&encoded.ipc_message).map_err(|error| invalid(&error.to_string()))?;
    let written = message.header_as_record_batch().ok_or_else(|| invalid("it is no record batch"))?;
    let mut nodes: Vec<FieldNode> = written.nodes().into_iter().flatten().copied().collect();
    let mut buffers: Vec<Buffer> = written.buffers().into_iter().flatten().copied().collect();
    let mut body = Body { buffers: &mut buffers, end: encoded.arrow_data.len() as u64 };
    let first = body.padding();
    let mut gaps = Vec::with_capacity(columns.len());
    for (column, lengths) in columns {
        gaps.push(body.column(&mut nodes, column, lengths)?);
    }
    let body_bytes = body.end;
    let mut builder = FlatBufferBuilder::new();
    let (buffers, nodes) = (builder.create_vector(&buffers), builder.create_vector(&nodes));
    let mut batch = RecordBatchBuilder::new(&mut builder);
    batch.add_length(samples.num_rows() as i64);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    let batch = batch.finish().as_union_value();
    let mut message = MessageBuilder::new(&mut builder);
    message.add_version(MetadataVersion::V5);
    message.add_header_type(MessageHeader::RecordBatch);
    message.add_bodyLength(body_bytes as i64);
    message.add_header(batch);
    let message = message.finish();
    builder.finish(message, None);
    Ok(Head { frames: vec![framed(builder.finished_data()), encoded.arrow_data.into(), first], columns: gaps })
}

/// A message with its length before it.
fn framed(message: &[u8]) -> Bytes {
    let length = (8 + message.len()).next_multiple_of(ALIGNMENT);
    let mut framed = Vec::with_capacity(length);
    framed.extend_from_slice(&CONTINUATION);
    framed.extend_from_slice(&((length - 8) as u32).to_le_bytes());
    framed.extend_from_slice(message);
    framed.resize(length, 0);
    framed.into()
}

/// The body of a record batch, of which the end grows with every buffer.
struct Body<'b> {
    buffers: &'b mut Vec<Buffer>,
    end: u64,
}

impl Body<'_> {
    /// Bytes up to the next multiple of the alignment.
    fn padding(&mut self) -> Bytes {
        let padded = self.end.next_multiple_of(ALIGNMENT as u64);
        let padding = (padded - self.end) as usize;
        self.end = padded;
        Bytes::from_static(&[0; ALIGNMENT][..padding])
    }

    /// A buffer of so many bytes, which the caller sends, and then the padding behind it.
    fn buffer(&mut self, bytes: u64) -> Bytes {
        self.buffers.push(Buffer::new(self.end as i64, bytes as i64));
        self.end += bytes;
        self.padding()
    }

    fn column(
        &mut self,
        nodes: &mut Vec<FieldNode>,
        column: &UploadColumn,
        lengths: &UploadLengths,
    ) -> Result<Gap, ArrowError> {
        let rows: u64 = lengths.rows.iter().flatten().sum();
        let most = rows.max(lengths.numbers);
        if i32::try_from(most).is_err() {
            let detail = format!("{most} rows or numbers of column {} do not fit into one record batch", column.name);
            return Err(ArrowError::InvalidArgumentError(detail));
        }
        let count = lengths.rows.len();
        let nulls = lengths.rows.iter().filter(|rows| rows.is_none()).count();
        nodes.push(FieldNode::new(count as i64, nulls as i64));
        let mut before = vec![0_u8; count.div_ceil(8)];
        for (index, _) in lengths.rows.iter().enumerate().filter(|(_, rows)| rows.is_some()) {
            before[index / 8] |= 1 << (index % 8);
        }
        before.extend(self.buffer(before.len() as u64));
        let mut offset = 0_i32;
        before.extend_from_slice(&offset.to_le_bytes());
        for rows in &lengths.rows {
            offset += rows.unwrap_or(0) as i32;
            before.extend_from_slice(&offset.to_le_bytes());
        }
        before.extend(self.buffer(4 * (count as u64 + 1)));
        nodes.push(FieldNode::new(rows as i64, 0));
        // What is below has no nulls, so its validity has no bytes.
        self.buffer(0);
        let (mut between, mut values) = (Bytes::new(), rows);
        if column.is_ragged {
            between = self.buffer(4 * (rows + 1));
            values = lengths.numbers;
            nodes.push(FieldNode::new(values as i64, 0));
            self.buffer(0);
        }
        let behind = self.buffer(values * u64::from(column.bytes));
        Ok(Gap { before: before.into(), between, behind })
    }
}
