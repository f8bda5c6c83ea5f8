//! Pages of lists: in which order a list is read, where a page begins, and what it has.

/// The order of a list, by the keys of its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The oldest entries first.
    #[default]
    Oldest,
    /// The newest entries first.
    Newest,
}

/// Where a page begins. A cursor belongs to one order of its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cursor {
    /// In the order of the keys, after this one.
    After(i64),
    /// Against the order of the keys, before this one.
    Before(i64),
}

impl Default for Cursor {
    fn default() -> Self {
        Self::first(Order::default())
    }
}

impl Cursor {
    /// The beginning of a list.
    #[must_use]
    pub fn first(order: Order) -> Self {
        match order {
            Order::Oldest => Self::After(0),
            Order::Newest => Self::Before(i64::MAX),
        }
    }

    /// The order that the cursor belongs to.
    #[must_use]
    pub fn order(self) -> Order {
        match self {
            Self::After(_) => Order::Oldest,
            Self::Before(_) => Order::Newest,
        }
    }

    /// The cursor behind a row in the same order.
    #[must_use]
    pub fn behind(self, key: i64) -> Self {
        match self {
            Self::After(_) => Self::After(key),
            Self::Before(_) => Self::Before(key),
        }
    }

    /// The keys from the cursor up to a last one, or to the end of the list: the first number is below them, and the
    /// second is the highest of them.
    #[must_use]
    pub fn range(self, last: Option<i64>) -> (i64, i64) {
        match self {
            Self::After(key) => (key, last.unwrap_or(i64::MAX)),
            Self::Before(key) => (last.map_or(0, |last| last.saturating_sub(1)), key.saturating_sub(1)),
        }
    }
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// Entries in the order of the list. A page of a filtered list may be empty although more entries follow.
    pub entries: Vec<T>,
    /// Where the next page begins; none on the last page.
    pub next: Option<Cursor>,
    /// How many rows were read to find the entries.
    pub examined: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_behind_the_cursor_and_ends_with_the_last_key() {
        assert_eq!(Cursor::After(4).range(Some(9)), (4, 9));
        assert_eq!(Cursor::After(4).range(None), (4, i64::MAX));
        // The keys 9 to 4, from the newest: 8 down to 4.
        assert_eq!(Cursor::Before(9).range(Some(4)), (3, 8));
        assert_eq!(Cursor::Before(9).range(None), (0, 8));
        assert_eq!(Cursor::first(Order::Newest).range(None), (0, i64::MAX - 1));
        assert_eq!(Cursor::Before(i64::MIN).range(Some(i64::MIN)), (i64::MIN, i64::MIN));
    }
}
