//! The values that cross into SQL: arguments of statements, and rows that are read.

use std::sync::Arc;

use bytes::Bytes;
use forebay_domain::{
    clock::Timestamp,
    formats::codes,
    ids::{
        AdmissionId, BatchId, BatchPk, CallPk, Epoch, ExecutionId, GroupPk, IdKey, KeyPk, PolicyPk, RolloutPk, Run,
        SessionId, SessionPk, Step, Version,
    },
    states::{BatchState, GroupState, SessionState, Verdict},
};
use forebay_wire::Status;

use crate::error::StoreError;

/// A value to bind.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    Int(Option<i64>),
    Real(Option<f64>),
    Text(Option<String>),
    Blob(Option<Vec<u8>>),
    /// Bytes that are too many to copy.
    Shared(Bytes),
    /// Keys of rows in one argument: an array on Postgres, JSON text for `json_each` on SQLite.
    Keys(Vec<i64>),
    /// Keys of ids in one argument: an array on Postgres, JSON text of hexadecimal digits on SQLite.
    IdKeys(Vec<IdKey>),
    /// An array of floats, for Postgres only.
    Reals(Vec<f64>),
    /// The values of one column in several rows, which are of one kind: an array, for Postgres only.
    Column(Vec<Arg>),
}

impl Arg {
    /// The type of the column that a value is for, as Postgres names it.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "bigint",
            Self::Real(_) => "float8",
            Self::Text(_) => "text",
            Self::Blob(_) | Self::Shared(_) => "bytea",
            Self::Keys(_) | Self::IdKeys(_) | Self::Reals(_) | Self::Column(_) => "anyarray",
        }
    }

    /// The bytes that a value takes in a statement, about.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Int(_) | Self::Real(_) => 8,
            Self::Text(value) => value.as_ref().map_or(0, String::len),
            Self::Blob(value) => value.as_ref().map_or(0, Vec::len),
            Self::Shared(value) => value.len(),
            Self::Keys(keys) => 8 * keys.len(),
            Self::IdKeys(keys) => size_of::<IdKey>() * keys.len(),
            Self::Reals(values) => 8 * values.len(),
            Self::Column(values) => values.iter().map(Self::bytes).sum(),
        }
    }
}

impl From<i64> for Arg {
    fn from(value: i64) -> Self {
        Self::Int(Some(value))
    }
}

impl From<Option<i64>> for Arg {
    fn from(value: Option<i64>) -> Self {
        Self::Int(value)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self::Int(Some(value.into()))
    }
}

impl From<u64> for Arg {
    /// Lengths and counts. Validation keeps them far below the sign bit.
    fn from(value: u64) -> Self {
        Self::Int(Some(value as i64))
    }
}

impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self::Int(Some(value as i64))
    }
}

impl From<bool> for Arg {
    fn from(value: bool) -> Self {
        Self::Int(Some(value.into()))
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Self {
        Self::Real(Some(value))
    }
}

impl From<Option<f64>> for Arg {
    fn from(value: Option<f64>) -> Self {
        Self::Real(value)
    }
}

impl From<&str> for Arg {
    fn from(value: &str) -> Self {
        Self::Text(Some(value.to_owned()))
    }
}

impl From<String> for Arg {
    fn from(value: String) -> Self {
        Self::Text(Some(value))
    }
}

impl From<Option<&str>> for Arg {
    fn from(value: Option<&str>) -> Self {
        Self::Text(value.map(str::to_owned))
    }
}

impl From<Option<String>> for Arg {
    fn from(value: Option<String>) -> Self {
        Self::Text(value)
    }
}

impl From<&[u8]> for Arg {
    fn from(value: &[u8]) -> Self {
        Self::Blob(Some(value.to_vec()))
    }
}

impl From<Option<&[u8]>> for Arg {
    fn from(value: Option<&[u8]>) -> Self {
        Self::Blob(value.map(<[u8]>::to_vec))
    }
}

impl From<Bytes> for Arg {
    fn from(value: Bytes) -> Self {
        Self::Shared(value)
    }
}

impl From<IdKey> for Arg {
    fn from(value: IdKey) -> Self {
        value.as_bytes().into()
    }
}

impl From<&ExecutionId> for Arg {
    fn from(value: &ExecutionId) -> Self {
        Self::Blob(Some(value.stored()))
    }
}

impl From<Timestamp> for Arg {
    fn from(value: Timestamp) -> Self {
        Self::Int(Some(value.as_micros()))
    }
}

impl From<Option<Timestamp>> for Arg {
    fn from(value: Option<Timestamp>) -> Self {
        Self::Int(value.map(Timestamp::as_micros))
    }
}

macro_rules! number_arg {
    ($($id:ident),*) => { $(
        impl From<$id> for Arg {
            fn from(value: $id) -> Self {
                Self::Int(Some(value.0))
            }
        }

        impl From<Option<$id>> for Arg {
            fn from(value: Option<$id>) -> Self {
                Self::Int(value.map(|id| id.0))
            }
        }
    )* };
}
number_arg!(PolicyPk, GroupPk, RolloutPk, BatchPk, SessionPk, CallPk, Run, Epoch, Step, Version);

macro_rules! state_arg {
    ($($state:ident),*) => { $(
        impl From<$state> for Arg {
            fn from(value: $state) -> Self {
                value.as_str().into()
            }
        }

        impl From<Option<$state>> for Arg {
            fn from(value: Option<$state>) -> Self {
                value.map($state::as_str).into()
            }
        }
    )* };
}
state_arg!(GroupState, BatchState, SessionState, Verdict);

/// A list of keys of rows as one argument.
pub(crate) fn key_list(keys: impl IntoIterator<Item = i64>) -> Arg {
    Arg::Keys(keys.into_iter().collect())
}

/// A list of ids' keys as one argument.
pub(crate) fn id_key_list(keys: impl IntoIterator<Item = IdKey>) -> Arg {
    Arg::IdKeys(keys.into_iter().collect())
}

/// Keys of rows as JSON text.
pub(crate) fn json_keys(keys: &[i64]) -> String {
    let keys: Vec<String> = keys.iter().map(i64::to_string).collect();
    format!("[{}]", keys.join(","))
}

/// Keys of ids as JSON text of hexadecimal digits.
pub(crate) fn json_id_keys(keys: &[IdKey]) -> String {
    let keys: Vec<String> = keys.iter().map(|key| format!("\"{}\"", key.to_hex())).collect();
    format!("[{}]", keys.join(","))
}

/// A value as read.
#[derive(Clone, Debug)]
pub(crate) enum Cell {
    Null,
    Int(i64),
    Real(f64),
    Text(String),
    Blob(Vec<u8>),
}

/// A row as read, its values by column name.
#[derive(Debug)]
pub(crate) struct Row {
    columns: Arc<[String]>,
    cells: Vec<Cell>,
}

impl Row {
    pub(crate) fn new(columns: Arc<[String]>, cells: Vec<Cell>) -> Self {
        Self { columns, cells }
    }

    fn cell(&mut self, column: &str) -> Result<Cell, StoreError> {
        let index = self.columns.iter().position(|name| name == column);
        match index.and_then(|index| self.cells.get_mut(index)) {
            Some(cell) => Ok(std::mem::replace(cell, Cell::Null)),
            None => Err(self.corrupt(column, "missing")),
        }
    }

    /// Takes a value out of the row.
    pub(crate) fn get<T: FromCell>(&mut self, column: &str) -> Result<T, StoreError> {
        let cell = self.cell(column)?;
        T::from_cell(cell).ok_or_else(|| self.corrupt(column, "not of its type"))
    }

    /// Takes a text out of the row that is the name of a value of the policy's rules, for example a loss weighting.
    pub(crate) fn parse<T: serde::de::DeserializeOwned>(&mut self, column: &str) -> Result<T, StoreError> {
        let text: String = self.get(column)?;
        serde_json::from_value(serde_json::Value::String(text)).map_err(|_| self.corrupt(column, "not a known name"))
    }

    fn corrupt(&self, column: &str, problem: &str) -> StoreError {
        // The first column is the key of the row in every statement that selects it.
        let key = match self.cells.first() {
            Some(Cell::Int(key)) => format!("{} {key}", self.columns[0]),
            _ => "a row".to_owned(),
        };
        StoreError::Corrupt(format!("column `{column}` of {key} is {problem}"))
    }
}

/// A type that a column can be read as.
pub(crate) trait FromCell: Sized {
    fn from_cell(cell: Cell) -> Option<Self>;
}

impl FromCell for i64 {
    fn from_cell(cell: Cell) -> Option<Self> {
        if let Cell::Int(value) = cell { Some(value) } else { None }
    }
}

impl FromCell for u32 {
    fn from_cell(cell: Cell) -> Option<Self> {
        i64::from_cell(cell)?.try_into().ok()
    }
}

impl FromCell for u64 {
    fn from_cell(cell: Cell) -> Option<Self> {
        i64::from_cell(cell)?.try_into().ok()
    }
}

impl FromCell for bool {
    fn from_cell(cell: Cell) -> Option<Self> {
        Some(i64::from_cell(cell)? != 0)
    }
}

impl FromCell for f64 {
    fn from_cell(cell: Cell) -> Option<Self> {
        match cell {
            Cell::Real(value) => Some(value),
            Cell::Int(value) => Some(value as Self),
            _ => None,
        }
    }
}

impl FromCell for String {
    fn from_cell(cell: Cell) -> Option<Self> {
        if let Cell::Text(value) = cell { Some(value) } else { None }
    }
}

impl FromCell for Vec<u8> {
    fn from_cell(cell: Cell) -> Option<Self> {
        if let Cell::Blob(value) = cell { Some(value) } else { None }
    }
}

impl FromCell for Bytes {
    fn from_cell(cell: Cell) -> Option<Self> {
        Vec::from_cell(cell).map(Self::from)
    }
}

impl<const N: usize> FromCell for [u8; N] {
    fn from_cell(cell: Cell) -> Option<Self> {
        Vec::from_cell(cell)?.try_into().ok()
    }
}

impl FromCell for ExecutionId {
    fn from_cell(cell: Cell) -> Option<Self> {
        Self::from_stored(&Vec::from_cell(cell)?)
    }
}

impl FromCell for Status {
    fn from_cell(cell: Cell) -> Option<Self> {
        codes::status_of(i64::from_cell(cell)?)
    }
}

impl FromCell for Timestamp {
    fn from_cell(cell: Cell) -> Option<Self> {
        i64::from_cell(cell).map(Self::from_micros)
    }
}

macro_rules! uuid_cell {
    ($($id:ident),*) => { $(
        impl FromCell for $id {
            fn from_cell(cell: Cell) -> Option<Self> {
                <[u8; 16]>::from_cell(cell).map(Self::from_bytes)
            }
        }
    )* };
}
uuid_cell!(AdmissionId, BatchId, SessionId);

macro_rules! number_cell {
    ($($id:ident),*) => { $(
        impl FromCell for $id {
            fn from_cell(cell: Cell) -> Option<Self> {
                i64::from_cell(cell).map(Self)
            }
        }
    )* };
}
number_cell!(PolicyPk, GroupPk, RolloutPk, BatchPk, SessionPk, CallPk, KeyPk, Run, Epoch, Step, Version);

macro_rules! state_cell {
    ($($state:ident),*) => { $(
        impl FromCell for $state {
            fn from_cell(cell: Cell) -> Option<Self> {
                if let Cell::Text(name) = cell { Self::parse(&name) } else { None }
            }
        }
    )* };
}
state_cell!(GroupState, BatchState, SessionState, Verdict);

impl<T: FromCell> FromCell for Option<T> {
    fn from_cell(cell: Cell) -> Option<Self> {
        match cell {
            Cell::Null => Some(None),
            cell => T::from_cell(cell).map(Some),
        }
    }
}
