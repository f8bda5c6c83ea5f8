//! What the ledger knows about a policy and about the things that have an id, for people who ask why.

use async_trait::async_trait;
use forebay_domain::looking::insight::{FindId, FindLife, IdMatches, LedgerFacts, Life, ReadFacts};

use crate::buffer::port::error::StoreError;

/// Facts that explanations are made of. Every read examines a bounded number of rows.
#[async_trait]
pub trait InsightStore: Send + Sync {
    /// What is known about a policy besides its tallies.
    async fn policy_facts(&self, read: ReadFacts) -> Result<LedgerFacts, StoreError>;
    /// Which of the policies have a rollout or a group with an id in their current runs.
    async fn find_id(&self, find: FindId) -> Result<IdMatches, StoreError>;
    /// A rollout or a group of the current run of a policy, with what explains its state.
    async fn life(&self, find: FindLife) -> Result<Option<Life>, StoreError>;
}
