//! Stage 7, sweep: changes that time alone makes due, and rules that are no longer used.
//!
//! The sweeps of admissions, groups and leases are declared with their stages.

use std::collections::BTreeSet;

use crate::ids::GroupPk;

/// Whether payloads are left to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadMoves {
    /// All of them are where they belong, or cannot be moved.
    Done,
    /// The next call moves more.
    More,
    /// The store moves them by itself.
    InBackground,
}

/// The rules of some groups.
#[derive(Clone, Debug, Default)]
pub struct RulesOfGroups {
    /// Keys of the rules.
    pub rules: BTreeSet<i64>,
    /// The last of the groups; none when there are no more.
    pub last: Option<GroupPk>,
}
