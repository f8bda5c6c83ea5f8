//! Bounded scans: how many rows a filtered list reads for one page.
//!
//! A filter on a column without an index reads rows until enough of them match, and reads all rows of a policy if none
//! matches. An index for each filter would cost a write with every rollout. A filtered list therefore examines a
//! bounded number of rows in the order of their keys. Its page ends there even if few of them match, and the cursor
//! continues after them.

use forebay_domain::pages::{Cursor, Order, Page};

use crate::{
    error::StoreError,
    sql::{Arg, Statement, Tx, args},
};

/// Rows that one page of a filtered list examines: a few milliseconds if they are in memory.
const EXAMINED_MAX: u32 = 10_000;

/// A statement with a text for each order of its list.
#[derive(Clone, Copy)]
pub(super) struct InOrder {
    pub(super) oldest: Statement,
    pub(super) newest: Statement,
}

impl InOrder {
    /// The statement that reads in the order of a cursor.
    pub(super) fn of(self, cursor: Cursor) -> Statement {
        match cursor.order() {
            Order::Oldest => self.oldest,
            Order::Newest => self.newest,
        }
    }
}

/// A statement in both orders. The first part of its text ends with the column of `ORDER BY`.
macro_rules! in_order {
    ($to_the_column:expr, $rest:expr) => {
        $crate::ops::bounded_scan::InOrder {
            oldest: $crate::sql::Statement::new(concat!($to_the_column, "\n", $rest)),
            newest: $crate::sql::Statement::new(concat!($to_the_column, " DESC\n", $rest)),
        }
    };
}
pub(super) use in_order;

/// Counts the rows that a page examines: those above `$1` and up to `$2`, at most `$3`. The parameters of what follows
/// `FROM` begin with `$4`.
macro_rules! examine {
    ($name:literal, $key:literal, $from:literal) => {
        $crate::ops::bounded_scan::in_order!(
            concat!(
                $name,
                "
                SELECT COUNT(*) AS examined, MIN(x.examined_key) AS lowest, MAX(x.examined_key) AS highest
                FROM (
                    SELECT ",
                $key,
                " AS examined_key
                    FROM ",
                $from,
                " AND ",
                $key,
                " > $1 AND ",
                $key,
                " <= $2
                    ORDER BY ",
                $key
            ),
            "LIMIT $3
                ) AS x"
        )
    };
}
pub(super) use examine;

/// The rows that a page examines.
pub(super) struct Scan {
    from: Cursor,
    /// How to count rows; none if the list has no filter, so that a page has all rows that it examines.
    count: Option<(Statement, Vec<Arg>)>,
    examined: u32,
    /// The key of the last row that the page may examine, if there may be more rows than that.
    end: Option<i64>,
}

impl Scan {
    /// The rows of a list without filters.
    pub(super) fn unfiltered(from: Cursor) -> Self {
        Self { from, count: None, examined: 0, end: None }
    }

    /// The rows of a filtered list. The arguments are those of `$4` and the following ones.
    pub(super) async fn filtered(
        tx: &mut Tx<'_>,
        from: Cursor,
        statement: InOrder,
        owner: Vec<Arg>,
    ) -> Result<Self, StoreError> {
        let statement = statement.of(from);
        let (examined, end) = count(tx, from, None, statement, &owner).await?;
        let end = end.filter(|_| examined == EXAMINED_MAX);
        Ok(Self { from, count: Some((statement, owner)), examined, end })
    }

    /// The keys that the page may examine: above the first number and up to the second.
    pub(super) fn range(&self) -> (i64, i64) {
        self.from.range(self.end)
    }

    /// The page with the matching rows.
    pub(super) async fn page<T>(
        self,
        tx: &mut Tx<'_>,
        entries: Vec<T>,
        limit: u32,
        key: impl Fn(&T) -> i64,
    ) -> Result<Page<T>, StoreError> {
        let last = entries.last().map(key).filter(|_| entries.len() == limit as usize);
        let next = last.or(self.end).map(|key| self.from.behind(key));
        let examined = match (self.count, last) {
            (None, _) => entries.len() as u32,
            (Some(_), None) => self.examined,
            // The page was full before the end of the scan.
            (Some((statement, owner)), Some(last)) => count(tx, self.from, Some(last), statement, &owner).await?.0,
        };
        Ok(Page { entries, next, examined })
    }
}

/// The number of rows from a cursor up to a last one, and the key of the last of them.
async fn count(
    tx: &mut Tx<'_>,
    from: Cursor,
    last: Option<i64>,
    statement: Statement,
    owner: &[Arg],
) -> Result<(u32, Option<i64>), StoreError> {
    let (above, to) = from.range(last);
    let values = [args![above, to, EXAMINED_MAX], owner.to_vec()].concat();
    let mut row = tx.fetch_one(statement, values).await?;
    let end = if from.order() == Order::Oldest { "highest" } else { "lowest" };
    Ok((row.get("examined")?, row.get(end)?))
}
