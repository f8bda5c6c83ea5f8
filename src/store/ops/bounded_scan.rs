//! Bounded scans: how many rows a filtered list reads for one page.
//!
//! A filter on a column without an index reads rows until enough of them match, and reads all rows of a policy if none
//! matches. An index for each filter would cost a write with every rollout. A filtered list therefore examines a
//! bounded number of rows in the order of their keys. Its page ends there even if few of them match, and the cursor
//! continues after them.

use crate::{
    buffer::port::{Page, StoreError},
    store::sql::{Arg, Statement, Tx, args},
};

/// Rows that one page of a filtered list examines: a few milliseconds.
pub(super) const EXAMINED_MAX: u32 = 4_000;

/// The key of the last row that a page may examine, if there are more rows than that.
///
/// The statement selects the keys of the examined rows, in order, as `scan_end`; its last parameter is the offset.
pub(super) async fn end(
    tx: &mut Tx<'_>,
    statement: Statement,
    mut values: Vec<Arg>,
) -> Result<Option<i64>, StoreError> {
    values.extend(args![EXAMINED_MAX - 1]);
    match tx.fetch_optional(statement, values).await? {
        Some(mut row) => Ok(Some(row.get("scan_end")?)),
        None => Ok(None),
    }
}

/// The page with the matching rows up to the end of the scan.
pub(super) fn page<T>(entries: Vec<T>, limit: u32, end: Option<i64>, key: impl Fn(&T) -> i64) -> Page<T> {
    let next = if entries.len() == limit as usize { entries.last().map(key) } else { end };
    Page { entries, next }
}
