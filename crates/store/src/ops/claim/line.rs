//! The position at which a claim begins to read the line of ready groups: after the part that earlier claims have
//! emptied.
//!
//! On Postgres, a group that was claimed leaves an entry in the index of ready groups. The entry stays as long as any
//! transaction might see the group as it was, for example until a `pg_dump` ends. A claim that began at the front would
//! read all of these entries.
//!
//! The beginning moves in two steps, because a post takes positions for its groups before it commits them. A claim
//! notes the position up to which it found the line empty, and which transactions had begun by then. A later claim
//! begins at that position if all of those transactions have ended, because it has itself read the groups that they
//! added. Transactions that begin later take later positions, because each gets its number before it takes a position.
//! Groups that are put back move the beginning back to their positions.
//!
//! A transaction that writes for a long time (unlike `pg_dump`) delays this. It holds for the line of `fifo`: where the
//! freshest groups come first, the entries of claimed groups stay at the front of the index until a new version is
//! published, and where the oldest come first, until a vacuum.

use forebay_domain::{ids::PolicyPk, policies::Policy};

use crate::{
    error::StoreError,
    sql::{Statement, Tx, args},
};

/// The line of a policy, read under the lock of the policy's row, with other notes that a claim keeps there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// The tallies when the previous batch was cut.
    pub(super) tally_mark: String,
    from: i64,
    next: i64,
    /// Transactions with lower numbers may have taken positions below `next`.
    mark: i64,
    /// The lowest number of a running transaction, and the first number that was not given out yet.
    oldest: i64,
    upcoming: i64,
}

/// The part of the line that a claim read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// The position of the first group that is left in the line.
    pub(super) first_left: Option<i64>,
    /// The position of the last group that the claim took.
    pub(super) last_taken: Option<i64>,
}

impl Line {
    pub(super) async fn read(tx: &mut Tx<'_>, policy: &Policy) -> Result<Self, StoreError> {
        const SELECT_LINE: Statement = Statement {
            sqlite: "-- select_line
                SELECT tally_mark, ready_from, ready_next, ready_mark, 0 AS oldest, 0 AS upcoming
                FROM policy
                WHERE policy_pk = $1",
            postgres: "-- select_line
                SELECT tally_mark, ready_from, ready_next, ready_mark,
                    CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS TEXT) AS BIGINT) AS oldest,
                    CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS TEXT) AS BIGINT) AS upcoming
                FROM policy
                WHERE policy_pk = $1",
        };
        let mut row = tx.fetch_one(SELECT_LINE, args![policy.policy_pk]).await?;
        Ok(Self {
            tally_mark: row.get("tally_mark")?,
            from: row.get("ready_from")?,
            next: row.get("ready_next")?,
            mark: row.get("ready_mark")?,
            oldest: row.get("oldest")?,
            upcoming: row.get("upcoming")?,
        })
    }

    /// The position at which a claim begins.
    pub(super) fn begin(&self) -> i64 {
        self.from
    }

    /// Notes the result of a claim that took no group, unless that can wait for the next batch.
    pub(super) async fn write_if_moved(
        self,
        tx: &mut Tx<'_>,
        policy: &Policy,
        found: Option<Found>,
    ) -> Result<(), StoreError> {
        let mut moved = self.clone();
        if let Some(found) = found {
            moved.advance(found);
        }
        // `next` alone is not worth a write, because an idle service writes nothing. It is noted with the next batch.
        if moved.from == self.from { Ok(()) } else { self.write(tx, policy, found).await }
    }

    /// Notes the result of a claim.
    pub(super) async fn write(
        mut self,
        tx: &mut Tx<'_>,
        policy: &Policy,
        found: Option<Found>,
    ) -> Result<(), StoreError> {
        const SET_LINE: Statement = Statement {
            sqlite: "-- set_line
                UPDATE policy
                SET tally_mark = $2, ready_from = $3, ready_next = $4,
                    ready_mark = CASE WHEN $5 = 1 THEN 0 ELSE ready_mark END
                WHERE policy_pk = $1",
            // The transaction numbers are read now, not before the line was read.
            postgres: "-- set_line
                UPDATE policy
                SET tally_mark = $2, ready_from = $3, ready_next = $4,
                    ready_mark = CASE
                        WHEN $5 = 1 THEN CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS TEXT) AS BIGINT)
                        ELSE ready_mark
                    END
                WHERE policy_pk = $1",
        };
        let is_noted_anew = found.is_some_and(|found| self.advance(found));
        let Self { tally_mark, from, next, .. } = self;
        let values = args![policy.policy_pk, tally_mark, from, next, is_noted_anew];
        tx.guarded(SET_LINE, values, 1).await
    }

    /// Moves the beginning as far as is certain. Returns whether `next` was noted again.
    fn advance(&mut self, found: Found) -> bool {
        let ended = self.oldest >= self.mark;
        let certain = if ended { self.next } else { self.from };
        self.from = found.first_left.map_or(certain, |left| left.min(certain));
        // A database that was copied into another cluster sees lower transaction numbers than it has noted.
        let is_noted_anew = ended || self.mark > self.upcoming;
        if is_noted_anew {
            let empty_up_to = found.first_left.or(found.last_taken.map(|last| last + 1));
            self.next = empty_up_to.unwrap_or(self.next).max(self.from);
        }
        is_noted_anew
    }
}

/// Moves the beginning back for groups that were put back, the first of them at this position.
pub(in crate::ops) async fn put_back(tx: &mut Tx<'_>, policy: PolicyPk, first: i64) -> Result<(), StoreError> {
    const MOVE_LINE_BACK: Statement = Statement::new(
        "-- move_line_back
        UPDATE policy
        SET ready_from = CASE WHEN ready_from > $2 THEN $2 ELSE ready_from END,
            ready_next = CASE WHEN ready_next > $2 THEN $2 ELSE ready_next END
        WHERE policy_pk = $1",
    );
    tx.guarded(MOVE_LINE_BACK, args![policy, first], 1).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(from: i64, next: i64, mark: i64, oldest: i64) -> Line {
        Line { tally_mark: String::new(), from, next, mark, oldest, upcoming: 100 }
    }

    fn left(place: i64) -> Found {
        Found { first_left: Some(place), last_taken: None }
    }

    #[test]
    fn the_beginning_waits_for_the_transactions_that_may_have_taken_places_before_it() {
        let mut waiting = line(10, 20, 50, 49);
        assert!(!waiting.advance(left(30)));
        assert_eq!((waiting.from, waiting.next), (10, 20));
        let mut ended = line(10, 20, 50, 50);
        assert!(ended.advance(left(30)));
        assert_eq!((ended.from, ended.next), (20, 30));
    }

    #[test]
    fn a_group_that_was_committed_late_stays_in_the_line() {
        let mut ended = line(10, 20, 50, 50);
        ended.advance(left(15));
        assert_eq!((ended.from, ended.next), (15, 15));
    }

    #[test]
    fn an_empty_line_ends_behind_what_was_taken() {
        let mut emptied = line(10, 20, 50, 50);
        emptied.advance(Found { first_left: None, last_taken: Some(40) });
        assert_eq!((emptied.from, emptied.next), (20, 41));
        let mut empty = line(10, 20, 50, 50);
        empty.advance(Found::default());
        assert_eq!((empty.from, empty.next), (20, 20));
    }

    #[test]
    fn numbers_of_another_cluster_are_noted_anew() {
        let mut copied = line(10, 20, 1_000, 90);
        assert!(copied.advance(left(30)));
        assert_eq!((copied.from, copied.next), (10, 30));
    }
}
