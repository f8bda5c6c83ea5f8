//! Reads trajectories from Arrow record batches: one row per segment, and all rows of a rollout are adjacent.
//!
//! It builds the same values as the JSON reader, so that a rollout has the same verdict, errors and digest in either
//! format.

use std::{panic::AssertUnwindSafe, sync::Arc};

use arrow_array::{
    Array, ArrowPrimitiveType, GenericListArray, OffsetSizeTrait, PrimitiveArray, RecordBatch, StructArray,
    cast::AsArray,
    types::{Float32Type, Float64Type, Int8Type, Int32Type, Int64Type, UInt8Type, UInt32Type},
};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{ArrowError, DataType};
use axum::http::StatusCode;
use bytes::Bytes;
use forebay_telemetry::panics;
use forebay_wire::{Components, NamedObjects, Sampling, Segment, Trajectory, TurnSpan, VersionSpan};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::{
    codecs::{
        arrow::types::{COLUMNS, name_of, takes},
        decode::{BODY_SEGMENTS_MAX, BUNDLE_MAX},
        explain::{explain, explain_text},
    },
    http::{body::unsupported, problem::Failure},
};

/// The first bytes of an Arrow file, which is a different format from a stream.
const FILE_MAGIC: &[u8] = b"ARROW1";

/// Reads the trajectories of a stream.
pub(crate) fn bundle(body: Bytes) -> Result<Vec<Trajectory>, Failure> {
    // The Arrow reader may panic on malformed input, so a panic is treated as a malformed body.
    let read = panics::catch(AssertUnwindSafe(|| read(body)));
    read.unwrap_or_else(|| Err(malformed("its parts are inconsistent")))
}

fn read(body: Bytes) -> Result<Vec<Trajectory>, Failure> {
    if body.starts_with(FILE_MAGIC) {
        return Err(malformed("it is an Arrow file: write a stream (in Python, pyarrow.ipc.new_stream)"));
    }
    let mut bundle = Bundle { viewed_bytes_left: body.len(), ..Bundle::default() };
    let mut stream = Buffer::from(body);
    let mut decoder = StreamDecoder::new();
    for number in 1.. {
        let batch = decoder.decode(&mut stream);
        let batch = batch.map_err(|error| not_read(&error, decoder.schema().is_some().then_some(number)))?;
        let Some(batch) = batch else { break };
        bundle.add(&batch)?;
    }
    decoder.finish().map_err(|_| malformed("it ends in the middle of a message"))?;
    bundle.end()
}

/// Explains why a record batch or the schema cannot be read. The messages of the Arrow reader are about its own types,
/// so they are not passed on to the client.
fn not_read(error: &ArrowError, batch: Option<usize>) -> Failure {
    match error {
        // Compressed buffers are refused, because the Arrow reader would allocate whatever length each of them claims.
        ArrowError::InvalidArgumentError(detail) if detail.contains("IPC decompression") => unsupported(
            "the buffers inside an Arrow stream must not be compressed: compress the whole body instead, with \
             Content-Encoding: zstd",
        ),
        ArrowError::IpcError(detail) if detail == "Unexpected EOS" => malformed("there is extra data after its end"),
        _ => match batch {
            Some(number) => malformed(format!(
                "record batch {number} cannot be read: it is damaged, does not match the schema, or has text that is \
                 not UTF-8"
            )),
            None => malformed(
                "the schema at its beginning cannot be read: it is damaged, or the body is not an Arrow stream",
            ),
        },
    }
}

fn malformed(detail: impl Into<String>) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, "malformed", "The body is not an Arrow IPC stream").detail(detail)
}

/// The rollouts read so far. The last one may continue on the next row.
#[derive(Default)]
struct Bundle {
    rows: usize,
    /// Bytes that the texts of the remaining `utf8_view` columns may have. Many views may name the same bytes, so their
    /// texts could take far more memory than the body.
    viewed_bytes_left: usize,
    done: Vec<Trajectory>,
    current: Option<Trajectory>,
}

impl Bundle {
    fn add(&mut self, batch: &RecordBatch) -> Result<(), Failure> {
        self.rows = self.rows.saturating_add(batch.num_rows());
        if self.rows > BODY_SEGMENTS_MAX {
            return Err(Failure::invalid("", format!("a body may have at most {BODY_SEGMENTS_MAX} rows")));
        }
        let columns = Columns::new(batch)?;
        self.pay_for_views(batch)?;
        (0..batch.num_rows()).try_for_each(|row| self.add_row(&columns, row))
    }

    fn pay_for_views(&mut self, batch: &RecordBatch) -> Result<(), Failure> {
        for (field, array) in batch.schema_ref().fields().iter().zip(batch.columns()) {
            let Some(views) = array.as_string_view_opt() else { continue };
            let bytes: usize = views.iter().flatten().map(str::len).sum();
            let left = self.viewed_bytes_left.checked_sub(bytes);
            self.viewed_bytes_left = left.ok_or_else(|| {
                let detail = "has texts that are together longer than the body: write the column as utf8";
                Failure::invalid(pointer(field.name()), detail)
            })?;
        }
        Ok(())
    }

    fn add_row(&mut self, columns: &Columns<'_>, row: usize) -> Result<(), Failure> {
        if !self.current.as_ref().is_some_and(|current| columns.continues(current, row)) {
            self.done.extend(self.current.take());
        }
        if self.done.len() >= BUNDLE_MAX {
            return Err(Failure::invalid("", format!("a bundle has 1 to {BUNDLE_MAX} trajectories")));
        }
        let added = columns.trajectory(row).and_then(|mut next| {
            columns.check_place(row, self.current.as_ref().map_or(0, |current| current.segments.len()))?;
            let Some(current) = &mut self.current else {
                self.current = Some(next);
                return Ok(());
            };
            check_same(current, &next)?;
            let segment = next.segments.pop();
            current.segments.push(segment.ok_or_else(|| {
                Invalid::new("tokens", "is null, which is only allowed if the rollout has a single row")
            })?);
            Ok(())
        });
        added.map_err(|problem| self.problem(problem))
    }

    /// Reports an error in the current row, with the index of its rollout.
    fn problem(&self, problem: Invalid) -> Failure {
        let index = self.done.len();
        Failure::invalid(format!("/{index}/{}", problem.column), problem.detail)
    }

    fn end(mut self) -> Result<Vec<Trajectory>, Failure> {
        self.done.extend(self.current.take());
        if self.done.is_empty() {
            return Err(Failure::invalid("", format!("a bundle has 1 to {BUNDLE_MAX} trajectories")));
        }
        Ok(self.done)
    }
}

/// An error in a cell.
struct Invalid {
    column: &'static str,
    detail: String,
}

impl Invalid {
    fn new(column: &'static str, detail: impl Into<String>) -> Self {
        Self { column, detail: detail.into() }
    }
}

/// Checks that the columns of the rollout are the same on all of its rows. Its JSON columns may be on the first row
/// only.
fn check_same(first: &Trajectory, next: &Trajectory) -> Result<(), Invalid> {
    // All fields are named: of one that is forgotten here, the values of later rows would be lost.
    let Trajectory {
        group_id,
        group_size,
        environment,
        execution_id,
        policy_version,
        admission_id,
        status,
        reward,
        reward_components,
        sampling,
        messages,
        metadata,
        purpose,
        suite,
        task,
        // The row would begin another rollout.
        policy: _,
        rollout_id: _,
        // Each row has its own segment, and rows have no calls.
        segments: _,
        turns: _,
    } = next;
    let same = [
        ("group_id", first.group_id == *group_id),
        ("group_size", first.group_size == *group_size),
        ("environment", first.environment == *environment),
        ("execution_id", first.execution_id == *execution_id),
        ("policy_version", first.policy_version == *policy_version),
        ("admission_id", first.admission_id == *admission_id),
        ("status", first.status == *status),
        ("purpose", first.purpose == *purpose),
        ("suite", first.suite == *suite),
        ("task", first.task == *task),
        ("reward", first.reward.map(f64::to_bits) == reward.map(f64::to_bits)),
        ("reward_components", first.reward_components == *reward_components),
        ("temperature", first.sampling == *sampling),
        ("messages", messages.is_none() || text(first.messages.as_deref()) == text(messages.as_deref())),
        ("metadata", metadata.is_none() || text(first.metadata.as_deref()) == text(metadata.as_deref())),
    ];
    match same.into_iter().find(|(_, same)| !same) {
        Some((column, _)) => Err(Invalid::new(column, "differs from the value on the rollout's first row")),
        None => Ok(()),
    }
}

fn text(raw: Option<&RawValue>) -> Option<&str> {
    raw.map(RawValue::get)
}

/// The columns of a record batch, in the order of [`COLUMNS`].
struct Columns<'b>(Vec<Option<&'b Arc<dyn Array>>>);

impl<'b> Columns<'b> {
    fn new(batch: &'b RecordBatch) -> Result<Self, Failure> {
        let mut columns = vec![None; COLUMNS.len()];
        for (field, array) in batch.schema_ref().fields().iter().zip(batch.columns()) {
            let name = field.name();
            let Some(place) = COLUMNS.iter().position(|(known, _)| known == name) else {
                return Err(Failure::invalid(pointer(name), "is not a supported column"));
            };
            if columns[place].replace(array).is_some() {
                return Err(Failure::invalid(pointer(name), "appears twice"));
            }
            if !takes(name, array.data_type()) {
                let (expected, found) = (COLUMNS[place].1, name_of(array.data_type()));
                return Err(Failure::invalid(pointer(name), format!("must be {expected}, not {found}")));
            }
        }
        Ok(Self(columns))
    }

    fn cell(&self, column: &str, row: usize) -> Option<&'b dyn Array> {
        let place = COLUMNS.iter().position(|(known, _)| *known == column)?;
        self.0[place].map(AsRef::as_ref).filter(|array| !array.is_null(row))
    }

    fn text(&self, column: &str, row: usize) -> Option<&'b str> {
        let array = self.cell(column, row)?;
        Some(match array.data_type() {
            DataType::LargeUtf8 => array.as_string::<i64>().value(row),
            DataType::Utf8View => array.as_string_view().value(row),
            _ => array.as_string::<i32>().value(row),
        })
    }

    fn owned(&self, column: &str, row: usize) -> Option<String> {
        self.text(column, row).map(str::to_owned)
    }

    fn int(&self, column: &str, row: usize) -> Option<i64> {
        let array = self.cell(column, row)?;
        Some(match array.data_type() {
            DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
            DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
            _ => array.as_primitive::<Int64Type>().value(row),
        })
    }

    /// Converts a number to a narrower type.
    fn narrow<T: TryFrom<i64>>(&self, column: &'static str, row: usize) -> Result<Option<T>, Invalid> {
        let Some(number) = self.int(column, row) else { return Ok(None) };
        T::try_from(number).map(Some).map_err(|_| Invalid::new(column, format!("{number} is out of range")))
    }

    /// A number, or true and false for 1 and 0.
    fn float(&self, column: &str, row: usize) -> Option<f64> {
        let array = self.cell(column, row)?;
        Some(match array.data_type() {
            DataType::Boolean => f64::from(u8::from(array.as_boolean().value(row))),
            DataType::Float32 => array.as_primitive::<Float32Type>().value(row).into(),
            DataType::Float64 => array.as_primitive::<Float64Type>().value(row),
            _ => self.int(column, row)? as f64,
        })
    }

    fn json<T: serde::de::DeserializeOwned>(&self, column: &'static str, row: usize) -> Result<Option<T>, Invalid> {
        let Some(text) = self.text(column, row) else { return Ok(None) };
        serde_json::from_str(text).map(Some).map_err(|error| Invalid::new(column, explain_text(&error)))
    }

    /// The items of a list, none of which is null.
    fn list(&self, column: &'static str, row: usize) -> Result<Option<Arc<dyn Array>>, Invalid> {
        let Some(array) = self.cell(column, row) else { return Ok(None) };
        let values = items(array, row);
        if values.null_count() > 0 {
            return Err(Invalid::new(column, "contains a null"));
        }
        Ok(Some(values))
    }

    fn ids(&self, column: &'static str, row: usize) -> Result<Option<Vec<i32>>, Invalid> {
        let Some(values) = self.list(column, row)? else { return Ok(None) };
        match values.data_type() {
            DataType::Int64 => each(column, values.as_primitive::<Int64Type>(), i32::try_from),
            DataType::UInt32 => each(column, values.as_primitive::<UInt32Type>(), i32::try_from),
            _ => Ok(values.as_primitive::<Int32Type>().values().to_vec()),
        }
        .map(Some)
    }

    /// A mask, which may be of any type that has 0 and 1. Other whole numbers are left to validation.
    fn mask(&self, column: &'static str, row: usize) -> Result<Option<Vec<u8>>, Invalid> {
        let Some(values) = self.list(column, row)? else { return Ok(None) };
        let whole = |value: f64| if value - f64::from(value as u8) == 0.0 { Ok(value as u8) } else { Err(()) };
        match values.data_type() {
            DataType::Int8 => each(column, values.as_primitive::<Int8Type>(), u8::try_from),
            DataType::Int32 => each(column, values.as_primitive::<Int32Type>(), u8::try_from),
            DataType::Int64 => each(column, values.as_primitive::<Int64Type>(), u8::try_from),
            DataType::Float32 => each(column, values.as_primitive::<Float32Type>(), |value| whole(value.into())),
            DataType::Float64 => each(column, values.as_primitive::<Float64Type>(), whole),
            _ => Ok(values.as_primitive::<UInt8Type>().values().to_vec()),
        }
        .map(Some)
    }

    fn floats(&self, column: &'static str, row: usize) -> Result<Option<Vec<f32>>, Invalid> {
        Ok(self.list(column, row)?.map(|values| narrow(values.as_ref())))
    }

    /// Log-probabilities, in which a null stands for NaN as in JSON.
    fn logprobs(&self, column: &'static str, row: usize) -> Option<Vec<f32>> {
        let values = items(self.cell(column, row)?, row);
        let mut logprobs = narrow(values.as_ref());
        if let Some(nulls) = values.nulls() {
            for (logprob, _) in logprobs.iter_mut().zip(nulls.iter()).filter(|(_, is_valid)| !is_valid) {
                *logprob = f32::NAN;
            }
        }
        Some(logprobs)
    }

    fn versions(&self, row: usize) -> Result<Option<Vec<VersionSpan>>, Invalid> {
        let Some(array) = self.cell("versions", row) else { return Ok(None) };
        let spans = items(array, row);
        let spans: &StructArray = spans.as_struct();
        let parts = [0, 1, 2].map(|part| spans.column(part).as_primitive::<Int64Type>());
        if spans.null_count() > 0 || parts.iter().any(|part| part.null_count() > 0) {
            return Err(Invalid::new("versions", "contains a null"));
        }
        let span = |index| VersionSpan(parts[0].value(index), parts[1].value(index), parts[2].value(index));
        Ok(Some((0..spans.len()).map(span).collect()))
    }

    fn turns(&self, row: usize) -> Result<Option<Vec<TurnSpan>>, Invalid> {
        let Some(array) = self.cell("turns", row) else { return Ok(None) };
        let turns = items(array, row);
        let turns: &StructArray = turns.as_struct();
        let number = |name| turns.column_by_name(name).map(AsArray::as_primitive::<Int64Type>);
        let (Some(start), Some(length)) = (number("start"), number("length")) else { return Ok(None) };
        if turns.null_count() + start.null_count() + length.null_count() > 0 {
            return Err(Invalid::new("turns", "contains a null"));
        }
        let rewards = turns.column_by_name("reward").and_then(AsArray::as_primitive_opt::<Float64Type>);
        let keys = turns.column_by_name("state_key");
        let key = |index| {
            let keys = keys.filter(|keys| keys.is_valid(index))?;
            let short = keys.as_string_opt::<i32>().map(|keys| keys.value(index));
            short.or_else(|| keys.as_string_opt::<i64>().map(|keys| keys.value(index)))
        };
        let turn = |index| TurnSpan {
            start: start.value(index),
            length: length.value(index),
            reward: rewards.filter(|rewards| rewards.is_valid(index)).map(|rewards| rewards.value(index)),
            state_key: key(index).map(str::to_owned),
        };
        Ok(Some((0..turns.len()).map(turn).collect()))
    }

    /// Whether a row continues the previous rollout. A row without an id is always a rollout of its own.
    fn continues(&self, current: &Trajectory, row: usize) -> bool {
        let id = self.text("rollout_id", row);
        id.is_some() && id == current.rollout_id.as_deref() && self.text("policy", row) == current.policy.as_deref()
    }

    /// Checks the place in its rollout that a row states.
    fn check_place(&self, row: usize, place: usize) -> Result<(), Invalid> {
        match self.int("segment", row) {
            Some(stated) if stated != place as i64 => {
                let detail =
                    format!("is {stated}, but must be {place}: the rows of a rollout must be adjacent and in order");
                Err(Invalid::new("segment", detail))
            }
            _ => Ok(()),
        }
    }

    /// Builds a rollout from one row, with one segment.
    fn trajectory(&self, row: usize) -> Result<Trajectory, Invalid> {
        let whole = Sampling::default();
        Ok(Trajectory {
            policy: self.owned("policy", row),
            rollout_id: self.owned("rollout_id", row),
            group_id: self.owned("group_id", row),
            group_size: self.narrow("group_size", row)?,
            environment: self.owned("environment", row),
            execution_id: self.owned("execution_id", row),
            policy_version: self.int("policy_version", row),
            admission_id: self.owned("admission_id", row),
            status: self.named("status", row)?,
            reward: self.float("reward", row),
            reward_components: self.json::<Components>("reward_components", row)?.unwrap_or_default().0,
            sampling: Sampling {
                temperature: self.float("temperature", row).map_or(whole.temperature, |number| number as f32),
                top_p: self.float("top_p", row).map_or(whole.top_p, |number| number as f32),
                top_k: self.narrow("top_k", row)?.unwrap_or(whole.top_k),
            },
            segments: self.segment(row)?.into_iter().collect(),
            turns: Vec::new(),
            messages: self.json("messages", row)?,
            metadata: self.json("metadata", row)?,
            purpose: self.named("purpose", row)?,
            suite: self.owned("suite", row),
            task: self.owned("task", row),
        })
    }

    /// One of a fixed set of names; the default if the cell is null.
    fn named<T: DeserializeOwned + Default>(&self, column: &'static str, row: usize) -> Result<T, Invalid> {
        let Some(name) = self.text(column, row) else { return Ok(T::default()) };
        serde_json::from_value(name.into()).map_err(|error| Invalid::new(column, explain(&error.to_string())))
    }

    /// Builds the segment of a row, or nothing if the row has neither tokens nor a mask.
    fn segment(&self, row: usize) -> Result<Option<Segment>, Invalid> {
        let (tokens, loss_mask) = (self.ids("tokens", row)?, self.mask("loss_mask", row)?);
        let (tokens, loss_mask) = match (tokens, loss_mask) {
            (None, None) => return self.no_segment(row),
            (Some(_), None) => return Err(Invalid::new("loss_mask", "is required if `tokens` is present")),
            (None, Some(_)) => return Err(Invalid::new("tokens", "is required if `loss_mask` is present")),
            (Some(tokens), Some(loss_mask)) => (tokens, loss_mask),
        };
        Ok(Some(Segment {
            kind: self.owned("kind", row),
            tokens,
            loss_mask,
            response_length: self.narrow("response_length", row)?,
            logprobs: self.logprobs("logprobs", row),
            teacher_logprobs: self.logprobs("teacher_logprobs", row),
            values: self.floats("values", row)?,
            advantages: self.logprobs("advantages", row),
            versions: self.versions(row)?,
            turns: self.turns(row)?,
            columns: self.json("columns", row)?.map(|NamedObjects(columns)| columns).unwrap_or_default(),
            media: self.json("media", row)?.unwrap_or_default(),
        }))
    }

    /// Checks that a row without tokens has no other values of a segment, because they would be lost.
    fn no_segment(&self, row: usize) -> Result<Option<Segment>, Invalid> {
        const OF_SEGMENTS: [&str; 9] =
            ["kind", "logprobs", "teacher_logprobs", "values", "advantages", "versions", "turns", "columns", "media"];
        let of_segment = OF_SEGMENTS.into_iter().find(|column| self.cell(column, row).is_some());
        let length = self.int("response_length", row).filter(|&length| length != 0).map(|_| "response_length");
        match of_segment.or(length) {
            Some(column) => Err(Invalid::new(column, "must be null on a row without `tokens`")),
            None => Ok(None),
        }
    }
}

fn pointer(name: &str) -> String {
    format!("/{}", name.chars().take(128).collect::<String>().replace('~', "~0").replace('/', "~1"))
}

/// Converts each number to the type of the column.
fn each<T: ArrowPrimitiveType<Native: std::fmt::Display>, N, E>(
    column: &'static str,
    values: &PrimitiveArray<T>,
    convert: impl Fn(T::Native) -> Result<N, E>,
) -> Result<Vec<N>, Invalid> {
    let convert = |&value: &T::Native| {
        convert(value).map_err(|_| Invalid::new(column, format!("contains {value}, which is out of range")))
    };
    values.values().iter().map(convert).collect()
}

/// The nearest 32-bit floats.
fn narrow(values: &dyn Array) -> Vec<f32> {
    match values.data_type() {
        DataType::Float64 => values.as_primitive::<Float64Type>().values().iter().map(|&value| value as f32).collect(),
        _ => values.as_primitive::<Float32Type>().values().to_vec(),
    }
}

/// The items of the list in a cell.
fn items(array: &dyn Array, row: usize) -> Arc<dyn Array> {
    fn of<O: OffsetSizeTrait>(array: &dyn Array, row: usize) -> Arc<dyn Array> {
        let lists: &GenericListArray<O> = array.as_list();
        lists.value(row)
    }
    if matches!(array.data_type(), DataType::LargeList(_)) { of::<i64>(array, row) } else { of::<i32>(array, row) }
}
