//! The ledger: what became of every rollout, and the sums that must agree.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Buffer,
    ids::{GroupId, PolicyName, RolloutId},
    ingest::RULE_BY_HAND,
    refusal::{BufferError, Refusal},
};
use crate::{
    metrics::Ledger,
    store::{Group, GroupFilter, Page, Story, StoryFilter, Tallies},
};

impl Tallies {
    /// Receipts with `duplicate = false`.
    #[must_use]
    pub fn received(&self) -> i64 {
        self.value("received")
    }

    /// A tally, 0 when it was never written.
    #[must_use]
    pub fn value(&self, name: &str) -> i64 {
        self.values.get(name).copied().unwrap_or(0)
    }

    /// Tallies whose names start with `prefix.`, by the rest of their names.
    #[must_use]
    pub fn family(&self, prefix: &str) -> BTreeMap<String, i64> {
        let of_family = |(name, value): (&String, &i64)| {
            let rest = name.strip_prefix(prefix)?.strip_prefix('.')?;
            Some((rest.to_owned(), *value))
        };
        self.values.iter().filter_map(of_family).collect()
    }

    /// Rollouts received less the sum of all states: 0, or something was lost or counted twice.
    #[must_use]
    pub fn unconserved(&self) -> i64 {
        self.received() - self.family("rollout").values().sum::<i64>()
    }
}

impl Buffer {
    /// A rollout's story, in the current run of its policy.
    pub async fn story(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<Story, BufferError> {
        let (named, id) = (policy.clone(), rollout_id.to_string());
        let filter = StoryFilter { policy, rollout_id: Some(rollout_id), limit: 1, ..StoryFilter::default() };
        let story = self.stories(filter).await?.entries.pop();
        story.ok_or_else(|| Refusal::UnknownInPolicy { what: "rollout", id, policy: named }.into())
    }

    /// Rollouts in the order in which they arrived.
    pub async fn stories(&self, filter: StoryFilter) -> Result<Page<Story>, BufferError> {
        self.known(&filter.policy).await?;
        Ok(self.store.stories(filter).await?)
    }

    /// Groups in the order in which they were opened.
    pub async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, BufferError> {
        self.known(&filter.policy).await?;
        Ok(self.store.groups(filter).await?)
    }

    /// Decides an open group now, as if it had timed out.
    pub async fn close_group(&self, policy: PolicyName, group_id: GroupId) -> Result<Group, BufferError> {
        let decide = Arc::clone(&self.decide);
        let group = self.store.close_group(policy.clone(), group_id, decide, self.clock.now()).await??;
        self.report_decided(&policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
        Ok(group)
    }

    /// Discards a group that is open, ready or quarantined.
    pub async fn discard_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        reason: String,
    ) -> Result<Group, BufferError> {
        let group = self.store.discard_group(policy.clone(), group_id, reason, self.clock.now()).await??;
        self.report_decided(&policy, group.fill.state, Some(RULE_BY_HAND), &[]);
        Ok(group)
    }

    /// Tallies of every policy.
    pub async fn stats(&self) -> Result<BTreeMap<PolicyName, Tallies>, BufferError> {
        Ok(self.store.tallies(None).await?)
    }

    /// Brings the gauges up to date with the tallies, for a scrape.
    pub async fn refresh_gauges(&self) -> Result<(), BufferError> {
        let stats = self.stats().await?;
        let mut with_traffic: Vec<_> = stats.iter().filter(|(_, tallies)| !tallies.values.is_empty()).collect();
        // Where there are more than labels, those that are in use get them.
        with_traffic.sort_by_key(|(_, tallies)| std::cmp::Reverse(tallies.last_received_at));
        self.metrics.ledgers(with_traffic.into_iter().map(|(policy, tallies)| Ledger {
            policy: policy.as_str(),
            tallies: &tallies.values,
            unconserved: tallies.unconserved(),
        }));
        let mut after = String::new();
        loop {
            let page = self.store.policies(after.clone(), 100).await?;
            let Some(last) = page.last() else { return Ok(()) };
            last.name.as_str().clone_into(&mut after);
            for policy in page {
                self.metrics.version(policy.name.as_str(), policy.version.0);
            }
        }
    }
}
