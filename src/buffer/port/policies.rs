//! Policies in the store: their rules, and the contents of their buffers.

use std::collections::BTreeMap;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyName, PolicyPk, Run, Version},
    policies::{EnvironmentGroups, Policy, PolicyGauges, ReadEnvironments, RulesWritten, WaitingFor, WriteRules},
    tally::Tallies,
};

use crate::buffer::port::error::{Answer, StoreError};

/// Policies and their tallies.
#[async_trait]
pub trait PolicyStore: Send + Sync {
    /// Writes the rules of a policy. The policy is created if it does not exist.
    async fn write_rules(&self, write: WriteRules) -> Answer<RulesWritten>;
    /// One policy.
    async fn policy(&self, name: PolicyName) -> Result<Option<Policy>, StoreError>;
    /// Policies after a name, in order.
    async fn policies(&self, after: String, limit: u32) -> Result<Vec<Policy>, StoreError>;
    /// Tallies of every policy, or of one.
    async fn tallies(&self, policy: Option<PolicyPk>) -> Result<BTreeMap<PolicyName, Tallies>, StoreError>;
    /// What the next batch of the policy is waiting for.
    async fn waiting_for(&self, policy: PolicyPk, run: Run, now: Timestamp) -> Result<WaitingFor, StoreError>;
    /// The groups of environments in a run of the policy, and what the environments carry to the next batch.
    async fn environments(&self, read: ReadEnvironments) -> Result<EnvironmentGroups, StoreError>;
    /// The versions of all policies, in the order of their names.
    async fn versions(&self) -> Result<Vec<(PolicyName, Version)>, StoreError>;
    /// What metrics show of some policies.
    async fn gauges(&self, policies: Vec<PolicyName>) -> Result<Vec<PolicyGauges>, StoreError>;
}
