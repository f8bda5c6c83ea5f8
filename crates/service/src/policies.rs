//! Policies: their rules, and the contents of their buffers.

use std::{sync::Arc, time::Duration};

use forebay_domain::{
    batch::shares::needed,
    ids::{CallerId, PolicyName, Version},
    peers::Awaited,
    policies::{ExistingPolicy, Policy, ReadEnvironments, RulesWritten, WaitingFor, WriteRules},
    refusal::Refusal,
    rules::{Rules, changes},
    tally::Tallies,
};
use forebay_store::{
    error::StoreError,
    ops::policy::{FindPolicy, ListPolicies, ReadTallies, ReadWaiting},
};
use serde_json::Value;
use tokio::time::Instant;
use tracing::instrument;

use crate::{Buffer, error::BufferError, waiting::replicas};

/// Policies that are read at once. The caller may see only a few of them.
const POLICIES_AT_ONCE: u32 = 100;

/// Ready groups of an environment that are counted, if a batch has no more. The number is only shown to people.
const READY_COUNTED: u32 = 1_000;

/// A policy with the contents of its buffer.
#[derive(Clone, Debug)]
pub struct PolicyOverview {
    pub policy: Policy,
    pub tallies: Tallies,
    /// What its trainer is waiting for.
    pub waiting: WaitingFor,
    /// What its trainer is waiting for of each environment that has rules.
    pub environments: Vec<EnvironmentOverview>,
}

/// The groups of an environment, and how many of them the next batch needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentOverview {
    /// Its label.
    pub environment: String,
    /// Ready groups. At least as many as a batch has groups are counted.
    pub ready: i64,
    /// The groups that the next batch has of it at least, and waits for.
    pub needed: i64,
    /// Open groups, among a bounded number of those of the policy.
    pub open: i64,
}

impl Buffer {
    /// Writes rules. Rules that decide groups apply to groups opened from now on; all other rules apply from the next
    /// call on.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn put_policy(&self, name: PolicyName, rules: Arc<Rules>) -> Result<RulesWritten, BufferError> {
        let write = WriteRules {
            policy: name.clone(),
            rules,
            existing: ExistingPolicy::Replace,
            quotas: Some(Arc::clone(&self.options.quotas)),
            by: self.acting.clone(),
            now: self.clock.now(),
        };
        let written = self.store.write(write).await??;
        tracing::info!(policy.name = %name, "rules written");
        self.noticed.rules_changed(&name);
        // A smaller batch may be full now.
        replicas::wake(self, Awaited::Batch, &name);
        Ok(written)
    }

    /// Changes the rules of a policy by a JSON merge patch. `parse` checks the resulting rules, which may take longer
    /// than an async worker should be blocked.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn patch_policy(
        &self,
        name: PolicyName,
        patch: Value,
        parse: fn(Value) -> Result<Rules, Refusal>,
    ) -> Result<(), BufferError> {
        // A write fails only if another caller changed the rules in between, so each retry means progress of another
        // caller.
        loop {
            let policy = existing_policy(self, &name).await?;
            let merged = changes::patched(&policy.rules, &patch);
            let parsed = tokio::task::spawn_blocking(move || parse(merged)).await.map_err(|_| StoreError::Closed)?;
            let write = WriteRules {
                policy: name.clone(),
                rules: Arc::new(parsed?),
                existing: ExistingPolicy::ReplaceOnly(policy.rules_pk),
                quotas: Some(Arc::clone(&self.options.quotas)),
                by: self.acting.clone(),
                now: self.clock.now(),
            };
            if !matches!(self.store.write(write).await??, RulesWritten::Outdated) {
                tracing::info!(policy.name = %name, "rules changed");
                self.noticed.rules_changed(&name);
                replicas::wake(self, Awaited::Batch, &name);
                return Ok(());
            }
        }
    }

    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn policy(&self, name: &PolicyName) -> Result<PolicyOverview, BufferError> {
        let policy = existing_policy(self, name).await?;
        overview(self, policy).await
    }

    /// One policy, once its version is above `version`, or below it because a resume or reset lowered it.
    ///
    /// None when neither happened in time. A request that waits takes a slot in the share of its caller.
    /// `is_still_permitted` is called before the answer, because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %name))]
    pub async fn policy_above(
        &self,
        name: &PolicyName,
        version: Version,
        wait: Duration,
        caller: Option<&CallerId>,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Option<PolicyOverview>, BufferError> {
        let before = existing_policy(self, name).await?;
        if before.version != version {
            return overview(self, before).await.map(Some);
        }
        if wait.is_zero() {
            return Ok(None);
        }
        let _place = self.version_waiters.enter(caller)?;
        let _count = self.metrics.waiting();
        let waker = self.wakers.watch(name);
        let look = || async {
            let policy = existing_policy(self, name).await?;
            if !is_still_permitted() {
                return Err(Refusal::PermissionEnded.into());
            }
            // A version lowered by a resume ends the wait, too, because the waiter follows a lineage that has ended.
            let changed = policy.version != version || policy.run != before.run;
            Ok::<_, BufferError>(changed.then_some(policy))
        };
        match self.wakers.until_version(&waker, Instant::now() + wait, look).await? {
            Some(policy) => overview(self, policy).await.map(Some),
            None => Ok(None),
        }
    }

    /// Policies after a name that the caller may see, in order.
    #[instrument(level = "debug", skip_all)]
    pub async fn policies(
        &self,
        mut after: String,
        limit: u32,
        sees: impl Fn(&PolicyName) -> bool,
    ) -> Result<Vec<PolicyOverview>, BufferError> {
        let mut overviews = Vec::new();
        loop {
            let page = self.store.read(ListPolicies { after, limit: POLICIES_AT_ONCE, evaluations: false }).await?;
            let is_last = page.len() < POLICIES_AT_ONCE as usize;
            after = page.last().map(|policy| policy.name.as_str().to_owned()).unwrap_or_default();
            for policy in page.into_iter().filter(|policy| sees(&policy.name)) {
                overviews.push(overview(self, policy).await?);
                if overviews.len() == limit as usize {
                    return Ok(overviews);
                }
            }
            if is_last {
                return Ok(overviews);
            }
        }
    }
}

pub(crate) async fn existing_policy(buffer: &Buffer, name: &PolicyName) -> Result<Policy, BufferError> {
    let policy = buffer.store.read(FindPolicy(name.clone())).await?;
    policy.ok_or_else(|| Refusal::UnknownPolicy(name.clone()).into())
}

async fn overview(buffer: &Buffer, policy: Policy) -> Result<PolicyOverview, BufferError> {
    let tallies =
        buffer.store.read(ReadTallies(Some(policy.policy_pk))).await?.remove(&policy.name).unwrap_or_default();
    let waiting =
        buffer.store.read(ReadWaiting { policy: policy.policy_pk, run: policy.run, now: buffer.clock.now() }).await?;
    let environments = environments(buffer, &policy).await?;
    Ok(PolicyOverview { policy, tallies, waiting, environments })
}

/// The environments that have rules.
pub(crate) async fn environments(buffer: &Buffer, policy: &Policy) -> Result<Vec<EnvironmentOverview>, StoreError> {
    let rules = &policy.rules.batch;
    if rules.environments.is_empty() {
        return Ok(Vec::new());
    }
    let read = ReadEnvironments {
        policy: policy.policy_pk,
        run: policy.run,
        labels: rules.environments.keys().cloned().collect(),
        ready_max: rules.groups.max(READY_COUNTED),
    };
    let groups = buffer.store.read(read).await?;
    let needed = needed(rules, &groups.carried);
    let overview = |label: &String| EnvironmentOverview {
        environment: label.clone(),
        ready: groups.ready.get(label).copied().unwrap_or(0),
        needed: needed.get(label.as_str()).map_or(0, |needed| *needed as i64),
        open: groups.open.get(label).copied().unwrap_or(0),
    };
    Ok(rules.environments.keys().map(overview).collect())
}
