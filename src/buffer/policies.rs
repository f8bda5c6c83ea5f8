//! Policies: their rules, and what their buffers hold.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::time::Instant;

use super::{
    Buffer,
    ids::{CallerId, PolicyName, Version},
    refusal::{BufferError, Refusal},
    replicas::Awaited,
    rule_changes,
    rules::Rules,
};
use crate::store::{ExistingPolicy, Policy, RulesWritten, StoreError, Tallies, WaitingFor, WriteRules};

/// Policies read at once; a caller may see few of them.
const POLICIES_AT_ONCE: u32 = 100;

/// A policy with what its buffer holds.
#[derive(Clone, Debug)]
pub struct PolicyOverview {
    /// The policy.
    pub policy: Policy,
    /// Its tallies.
    pub tallies: Tallies,
    /// What its trainer is waiting for.
    pub waiting: WaitingFor,
}

impl Buffer {
    /// Writes rules: what decides a group holds for groups opened from now on, the rest from the next call on.
    pub async fn put_policy(&self, name: PolicyName, rules: Arc<Rules>) -> Result<RulesWritten, BufferError> {
        let write = WriteRules {
            policy: name.clone(),
            rules,
            existing: ExistingPolicy::Replace,
            policies_max: Some(self.options.policies_max),
            now: self.clock.now(),
        };
        let written = self.store.write_rules(write).await??;
        tracing::info!(policy.name = %name, "rules written");
        // A smaller batch may be full now.
        self.wake(Awaited::Batch, &name);
        Ok(written)
    }

    /// Changes the rules of a policy by a JSON merge patch; `parse` checks the rules that come of it, which may take longer
    /// than an async worker should be held up.
    pub async fn patch_policy(
        &self,
        name: PolicyName,
        patch: Value,
        parse: fn(Value) -> Result<Rules, Refusal>,
    ) -> Result<(), BufferError> {
        // Each turn that is lost means that somebody else's change was written.
        loop {
            let policy = self.known(&name).await?;
            let merged = rule_changes::patched(&policy.rules, &patch);
            let parsed = tokio::task::spawn_blocking(move || parse(merged)).await.map_err(|_| StoreError::Closed)?;
            let write = WriteRules {
                policy: name.clone(),
                rules: Arc::new(parsed?),
                existing: ExistingPolicy::ReplaceOnly(policy.rules_pk),
                policies_max: Some(self.options.policies_max),
                now: self.clock.now(),
            };
            if !matches!(self.store.write_rules(write).await??, RulesWritten::Outdated) {
                tracing::info!(policy.name = %name, "rules changed");
                self.wake(Awaited::Batch, &name);
                return Ok(());
            }
        }
    }

    /// One policy.
    pub async fn policy(&self, name: &PolicyName) -> Result<PolicyOverview, BufferError> {
        let policy = self.known(name).await?;
        self.overview(policy).await
    }

    /// One policy, once its version is above `version`, or below it because a resume or reset lowered it.
    ///
    /// None when nothing happened in time. Who waits takes a place in the caller's share. Nothing is told once `may_know`
    /// says so: a permission can end while its owner waits.
    pub async fn policy_above(
        &self,
        name: &PolicyName,
        version: Version,
        wait: Duration,
        caller: Option<&CallerId>,
        may_know: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<PolicyOverview>, BufferError> {
        let before = self.known(name).await?;
        if before.version != version {
            return self.overview(before).await.map(Some);
        }
        if wait.is_zero() {
            return Ok(None);
        }
        let _place = self.version_waiters.enter(caller)?;
        let _count = self.metrics.waiting();
        let waker = self.wakers.watch(name);
        let look = || async {
            let policy = self.known(name).await?;
            if !may_know() {
                return Err(Refusal::PermissionEnded.into());
            }
            // A lower version answers too, whenever the resume was: who waits follows a lineage that is over.
            let changed = policy.version != version || policy.run != before.run;
            Ok::<_, BufferError>(changed.then_some(policy))
        };
        match self.wakers.until_version(&waker, Instant::now() + wait, look).await? {
            Some(policy) => self.overview(policy).await.map(Some),
            None => Ok(None),
        }
    }

    /// Policies after a name that the caller sees, in order.
    pub async fn policies(
        &self,
        mut after: String,
        limit: u32,
        sees: impl Fn(&PolicyName) -> bool,
    ) -> Result<Vec<PolicyOverview>, BufferError> {
        let mut overviews = Vec::new();
        loop {
            let page = self.store.policies(after, POLICIES_AT_ONCE).await?;
            let is_last = page.len() < POLICIES_AT_ONCE as usize;
            after = page.last().map(|policy| policy.name.as_str().to_owned()).unwrap_or_default();
            for policy in page.into_iter().filter(|policy| sees(&policy.name)) {
                overviews.push(self.overview(policy).await?);
                if overviews.len() == limit as usize {
                    return Ok(overviews);
                }
            }
            if is_last {
                return Ok(overviews);
            }
        }
    }

    /// A policy that exists.
    pub(super) async fn known(&self, name: &PolicyName) -> Result<Policy, BufferError> {
        let policy = self.store.policy(name.clone()).await?;
        policy.ok_or_else(|| Refusal::UnknownPolicy(name.clone()).into())
    }

    async fn overview(&self, policy: Policy) -> Result<PolicyOverview, BufferError> {
        let tallies = self.store.tallies(Some(policy.policy_pk)).await?.remove(&policy.name).unwrap_or_default();
        let waiting = self.store.waiting_for(policy.policy_pk, policy.run, self.clock.now()).await?;
        Ok(PolicyOverview { policy, tallies, waiting })
    }
}
