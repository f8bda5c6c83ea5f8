//! Lines of JSON, which are made on several threads and written in their order.

use std::{io::Write, thread};

use serde::Serialize;

use crate::{ExportError, threads};

/// Values that a thread makes lines of before they are written. It bounds the text that is held.
const VALUES_AT_ONCE: usize = 8;

/// Writes a line for each value.
pub(crate) fn write<T: Serialize + Sync>(out: &mut impl Write, values: &[T]) -> Result<(), ExportError> {
    let threads = threads();
    for values in values.chunks(threads * VALUES_AT_ONCE) {
        let mut parts = values.chunks(values.len().div_ceil(threads));
        let own = parts.next().unwrap_or_default();
        let texts = thread::scope(|scope| {
            let others: Vec<_> = parts.map(|part| scope.spawn(move || text(part))).collect();
            let mut texts = vec![text(own)];
            texts.extend(
                others.into_iter().map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
            );
            texts
        });
        for text in texts {
            out.write_all(&text?)?;
        }
    }
    Ok(())
}

fn text<T: Serialize>(values: &[T]) -> Result<Vec<u8>, serde_json::Error> {
    let mut text = Vec::new();
    for value in values {
        serde_json::to_writer(&mut text, value)?;
        text.push(b'\n');
    }
    Ok(text)
}
