//! Diagnosis: whether the rows of a store agree with each other.

use std::collections::BTreeMap;

use crate::{
    ids::PolicyName,
    tally::{Tallies, Tally},
};

/// Where payloads are.
#[derive(Clone, Debug, Default)]
pub struct PayloadPlaces {
    /// Payloads in the database.
    pub in_database: u64,
    /// Payloads in segment files.
    pub in_files: u64,
    /// Segment files.
    pub files: u64,
    /// Their bytes.
    pub file_bytes: u64,
    /// The bytes of these that rows name.
    pub named_bytes: u64,
    /// What is wrong.
    pub findings: Vec<String>,
}

/// The result of reading every row in one snapshot.
#[derive(Clone, Debug)]
pub struct Examination {
    /// The tallies as they are stored.
    pub tallies: BTreeMap<PolicyName, Tallies>,
    /// The same counts, counted from the rows.
    pub counted: BTreeMap<PolicyName, BTreeMap<Tally, i64>>,
    /// Rows that contradict others.
    pub contradictions: Vec<Contradiction>,
}

/// Rows that contradict others.
#[derive(Clone, Debug)]
pub struct Contradiction {
    /// What is wrong with them.
    pub what: &'static str,
    /// How many there are at least.
    pub at_least: i64,
    /// The first of them.
    pub named: Vec<String>,
}
