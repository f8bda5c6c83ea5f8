//! Diagnosis in the store: whether its rows agree with each other.

use async_trait::async_trait;
use forebay_domain::{
    ids::GroupPk,
    looking::diagnosis::{Examination, PayloadPlaces},
    samples::BatchMember,
};

use crate::buffer::port::error::StoreError;

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
