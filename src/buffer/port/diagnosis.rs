//! Diagnosis in the store: whether its rows agree with each other.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::{BatchMember, StoreError};
use crate::buffer::{
    ids::{GroupPk, PolicyName},
    tally::{Tallies, Tally},
};

/// Reads for diagnosis. No request of a client waits for them.
#[async_trait]
pub trait DiagnosisStore: Send + Sync {
    /// Reads every row and compares it with the rows that refer to it.
    async fn examine(&self) -> Result<Examination, StoreError>;
    /// Faults that the database finds in its own file.
    async fn integrity(&self) -> Result<Vec<String>, StoreError>;
    /// Where payloads are.
    async fn count_payloads(&self) -> Result<PayloadPlaces, StoreError>;
    /// Where payloads are, and what is wrong there.
    async fn payload_places(&self) -> Result<PayloadPlaces, StoreError>;
    /// The rollouts with payloads of the first `groups` groups after a group.
    async fn group_members(&self, after: GroupPk, groups: u32) -> Result<Vec<BatchMember>, StoreError>;
}

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
