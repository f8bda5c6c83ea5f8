//! Work for scorers: scores that rollouts lack, leased to whoever can give them.
//!
//! As with batches, a lease expires, is fenced by a token and comes back; unlike them, an item goes when the score is there,
//! whoever gave it. Scores are posted with the lease through [`scoring`](crate::scoring).

use std::collections::BTreeMap;

use forebay_wire::{ScoreWorkPer, Status};

use crate::{
    clock::Timestamp,
    ids::{LeaseToken, PolicyName, RequestId},
    samples::SealedRow,
};

/// The most items of one request, and the most leases of one heartbeat.
pub const ITEMS_MAX: u32 = 256;

/// The most bytes of an answer without the contents of rollouts, unless a single group has more.
pub const ROW_BYTES_MAX: u64 = 4 << 20;

/// Bytes of a rollout in an answer besides its contents and the names of its scores.
const ROW_BYTES: u64 = 1 << 10;

/// Bytes of a score besides its name.
const SCORE_BYTES: u64 = 32;

/// A request for work.
#[derive(Clone, Debug)]
pub struct LeaseWork {
    pub policy: PolicyName,
    /// The scores that the scorer can give: at least one, sorted, each once.
    pub names: Vec<String>,
    /// The most items.
    pub max: u32,
    pub scorer: String,
    /// Makes the request repeatable.
    pub request_id: Option<RequestId>,
    /// Seconds of the leases; those of the policy's rules if absent.
    pub ttl_s: Option<u64>,
    /// The most bytes of the rollouts, unpacked. The first item may have more.
    pub bytes_max: u64,
    pub now: Timestamp,
}

/// Work that was leased.
#[derive(Debug)]
pub struct LeasedWork {
    /// The oldest first.
    pub items: Vec<WorkItem>,
    /// Whether the same request held it already.
    pub held: bool,
    /// Whether more was locked than leased, so that others did not see it when they looked.
    pub left: bool,
    /// If there is nothing, when the next work opens that has a time for that.
    pub next: Option<Timestamp>,
}

/// One piece of leased work.
#[derive(Debug)]
pub struct WorkItem {
    pub lease: LeaseToken,
    pub expires_at: Timestamp,
    /// The number of this lease of the item, from 1.
    pub attempt: u32,
    pub attempts_max: u32,
    pub name: String,
    pub per: ScoreWorkPer,
    pub group_id: String,
    /// The rollout, or the kept and masked rollouts of the group.
    pub rollouts: Vec<WorkRollout>,
}

/// A rollout that needs a score, or that stands beside one.
#[derive(Debug)]
pub struct WorkRollout {
    pub row: SealedRow,
    /// The required scores that it lacks.
    pub scoring: Vec<String>,
    pub status: Status,
    /// What its producer sent. The components of a judged rollout have its scores with them.
    pub reward: Option<f64>,
    pub reward_components: BTreeMap<String, f64>,
    /// Whether the components are left out, because those of the whole group are too many.
    pub is_cut: bool,
}

impl WorkRollout {
    /// The bytes that it takes in an answer, besides its contents.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        let names = self.scoring.iter().chain(self.reward_components.keys());
        names.map(|name| name.len() as u64 + SCORE_BYTES).sum::<u64>() + ROW_BYTES
    }
}

impl AsRef<SealedRow> for WorkRollout {
    fn as_ref(&self) -> &SealedRow {
        &self.row
    }
}

/// Extends leases of work.
#[derive(Clone, Debug)]
pub struct ExtendWork {
    pub policy: PolicyName,
    pub leases: Vec<LeaseToken>,
    /// Seconds from now; those of the policy's rules if absent.
    pub ttl_s: Option<u64>,
    pub now: Timestamp,
}

/// What became of leases that were to be extended.
#[derive(Clone, Debug)]
pub struct ExtendedWork {
    pub expires_at: Timestamp,
    /// For each of them whether it is held.
    pub held: Vec<bool>,
}

/// Gives leased work back as if it had never been leased.
#[derive(Clone, Debug)]
pub struct ReleaseWork {
    pub leases: Vec<LeaseToken>,
}

/// Gives exhausted work its attempts back, up to a number of items.
#[derive(Clone, Debug)]
pub struct RetryWork {
    pub policy: PolicyName,
    pub name: String,
    pub limit: u32,
}

/// What happens to leased work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkEvent {
    Granted,
    /// The score is there.
    Settled,
    /// The scores of the group are there, but for rollouts that came meanwhile.
    Reopened,
    /// Its holder could not give the score.
    Failed,
    /// Its holder was not heard of.
    Expired,
    /// As `Failed` or `Expired`, and its attempts are used up.
    Exhausted,
}

impl WorkEvent {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Settled => "settled",
            Self::Reopened => "reopened",
            Self::Failed => "failed",
            Self::Expired => "expired",
            Self::Exhausted => "exhausted",
        }
    }
}
