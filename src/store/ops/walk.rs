//! Walks: how far a filtered list reads for one page.
//!
//! A filter on a column without an index reads every row until enough match, and all rows of a policy where none does.
//! An index for each filter would cost a write with every rollout. So a filtered list examines a bounded number of rows
//! in the order of their keys, and its page ends there, however few of them match; the cursor goes on behind.

use crate::store::{
    Page, StoreError,
    sql::{Arg, Statement, Tx, args},
};

/// Rows that one page of a filtered list examines: a few milliseconds.
pub(super) const EXAMINED_MAX: u32 = 4_000;

/// The key of the last row that a page may examine, where there are more rows than that.
///
/// The statement selects the keys `walk_end` of what is examined in their order; its last place is the offset.
pub(super) async fn end(
    tx: &mut Tx<'_>,
    statement: Statement,
    mut values: Vec<Arg>,
) -> Result<Option<i64>, StoreError> {
    values.extend(args![EXAMINED_MAX - 1]);
    match tx.fetch_optional(statement, values).await? {
        Some(mut row) => Ok(Some(row.get("walk_end")?)),
        None => Ok(None),
    }
}

/// The page of those that matched up to the end of the walk.
pub(super) fn page<T>(entries: Vec<T>, limit: u32, end: Option<i64>, key: impl Fn(&T) -> i64) -> Page<T> {
    let next = if entries.len() == limit as usize { entries.last().map(key) } else { end };
    Page { entries, next }
}
