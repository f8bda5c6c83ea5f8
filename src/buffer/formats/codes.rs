//! The numbers that stand for variants in digests and seals.
//!
//! The numbers are written out because they are stored. The enums belong to another crate. If a number changed with the
//! order of an enum, retries would be refused as conflicts and sealed rows would look damaged. A new variant takes a
//! number that was never used.

use forebay_client::wire::Status;

use crate::buffer::states::Verdict;

/// The number of a status in the digest of a trajectory's content.
pub(in crate::buffer) fn of_status(status: Status) -> u8 {
    match status {
        Status::Completed => 0,
        Status::Truncated => 1,
        Status::Aborted => 2,
        Status::Failed => 3,
    }
}

/// The number of a verdict in the seal of a rollout.
pub(in crate::buffer) fn of_verdict(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Kept => 0,
        Verdict::Masked => 1,
        Verdict::Dropped => 2,
        Verdict::Late => 3,
    }
}

/// Stands before turns in the digest of a trajectory's content, where other trajectories have the number of their
/// segments.
pub(in crate::buffer) const TURNS: i64 = -1;
