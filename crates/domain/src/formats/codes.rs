//! The numbers that stand for variants in digests, seals and columns.
//!
//! The numbers are written out because they are stored. The enums belong to another crate. If a number changed with the
//! order of an enum, retries would be refused as conflicts and sealed rows would look damaged. A new variant takes a
//! number that was never used.

use forebay_wire::Status;

use crate::states::Verdict;

/// The number of a status in the digest of a trajectory's content, and in the row of a rollout.
#[must_use]
pub fn of_status(status: Status) -> u8 {
    match status {
        Status::Completed => 0,
        Status::Truncated => 1,
        Status::Aborted => 2,
        Status::Failed => 3,
    }
}

/// The status with this number; none if only another version knows the number.
#[must_use]
pub fn status_of(number: i64) -> Option<Status> {
    [Status::Completed, Status::Truncated, Status::Aborted, Status::Failed]
        .into_iter()
        .find(|status| i64::from(of_status(*status)) == number)
}

/// The number of a verdict in the seal of a rollout.
pub fn of_verdict(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Kept => 0,
        Verdict::Masked => 1,
        Verdict::Dropped => 2,
        Verdict::Late => 3,
    }
}

/// Stands before turns in the digest of a trajectory's content, where other trajectories have the number of their
/// segments.
pub const TURNS: i64 = -1;
