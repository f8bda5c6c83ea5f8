//! Rows in the binary format of `COPY`: a header, the rows and a trailer, with big-endian numbers.
//!
//! The format has no types. The columns of the table determine them.

use bytes::BufMut;

use crate::{buffer::port::StoreError, store::sql::Arg};

const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";

/// The rows of one statement.
pub(super) fn binary(rows: Vec<Vec<Arg>>) -> Result<Vec<u8>, StoreError> {
    let bodies = rows.iter().flatten().map(|value| if let Arg::Shared(bytes) = value { bytes.len() } else { 16 });
    let mut data = Vec::with_capacity(HEADER.len() + 2 + bodies.sum::<usize>() + 8 * rows.len());
    data.put_slice(HEADER);
    for row in rows {
        data.put_i16(row.len() as i16);
        for value in row {
            put(&mut data, &value)?;
        }
    }
    data.put_i16(-1);
    Ok(data)
}

fn put(data: &mut Vec<u8>, value: &Arg) -> Result<(), StoreError> {
    match value {
        Arg::Int(None) | Arg::Real(None) | Arg::Text(None) | Arg::Blob(None) => data.put_i32(-1),
        Arg::Int(Some(value)) => put_bytes(data, &value.to_be_bytes()),
        Arg::Real(Some(value)) => put_bytes(data, &value.to_be_bytes()),
        Arg::Text(Some(value)) => put_bytes(data, value.as_bytes()),
        Arg::Blob(Some(value)) => put_bytes(data, value),
        Arg::Shared(value) => put_bytes(data, value),
        Arg::Keys(_) | Arg::IdKeys(_) | Arg::Reals(_) => {
            return Err(StoreError::Corrupt(format!("{value:?} is not the value of a column")));
        }
    }
    Ok(())
}

fn put_bytes(data: &mut Vec<u8>, bytes: &[u8]) {
    data.put_i32(bytes.len() as i32);
    data.put_slice(bytes);
}
