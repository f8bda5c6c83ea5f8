//! The ledger: the state of every rollout, and counts that must agree.

use std::{collections::BTreeMap, sync::Arc};

use forebay_domain::{
    batch,
    groups::{CloseGroup, DecidedGroup, DiscardGroup, Group},
    ids::{ExecutionId, GroupId, PolicyName, RolloutId, Version},
    looking::ledger::{GroupFilter, LatestGroup, Story, StoryFilter},
    pages::Page,
    policies::PolicyGauges,
    reasons,
    refusal::Refusal,
    tally::{Tallies, Tally},
};
use forebay_store::{
    error::StoreError,
    ops::{
        executions::FindLatestGroup,
        gauges::{ReadGauges, ReadVersions},
        policy::ReadTallies,
    },
};
use forebay_telemetry::metrics::{ENVIRONMENTS_MAX, Ledger, Metrics, POLICY_LABELS_MAX, Rewards};
use tracing::instrument;

use crate::{Buffer, error::BufferError, ingest, policies};

/// Rollouts of an execution that are read at once, if the caller may see only some of them.
const STORIES_AT_ONCE: u32 = 100;

/// How often they are read at most for one page.
const READS_MAX: u32 = 4;

impl Buffer {
    /// The group of the newest rollout of an execution, in the current run of a policy; none if it has no rollout there.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn latest_group(
        &self,
        policy: PolicyName,
        execution_id: ExecutionId,
    ) -> Result<Option<LatestGroup>, StoreError> {
        self.store.read(FindLatestGroup { policy, execution_id }).await
    }

    /// The history of a rollout, in the current run of its policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn story(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<Story, BufferError> {
        let (named, id) = (policy.clone(), rollout_id.to_string());
        let policy = self.stored_under(policy, &rollout_id).await?;
        let filter =
            StoryFilter { policy: Some(policy), rollout_id: Some(rollout_id), limit: 1, ..StoryFilter::default() };
        let story = self.stories(filter, |_| true).await?.entries.pop();
        story.ok_or_else(|| Refusal::UnknownInPolicy { what: "rollout", id, policy: named }.into())
    }

    /// Rollouts in the order in which they arrived. Without a policy, only those of policies that the caller `sees`.
    #[instrument(level = "debug", skip_all)]
    pub async fn stories(
        &self,
        filter: StoryFilter,
        sees: impl Fn(&PolicyName) -> bool,
    ) -> Result<Page<Story>, BufferError> {
        if let Some(policy) = &filter.policy {
            // Nothing may have evaluated the policy yet.
            policies::existing_policy(self, &policy.public()).await?;
            return Ok(self.store.read(filter).await?);
        }
        // Rollouts of other policies are passed over, so that a page does not tell that there are any.
        let limit = filter.limit as usize;
        let mut page = Page { entries: Vec::new(), next: Some(filter.from), examined: 0 };
        // A filtered list examines as many rollouts as one read does.
        let reads = if filter.has_filters() { 1 } else { READS_MAX };
        for _ in 0..reads {
            let Some(from) = page.next.filter(|_| page.entries.len() < limit) else { break };
            let read = StoryFilter { from, limit: filter.limit.max(STORIES_AT_ONCE), ..filter.clone() };
            let read = self.store.read(read).await?;
            page.next = read.next;
            page.entries.extend(read.entries.into_iter().filter(|story| sees(&story.policy)));
        }
        if page.entries.len() > limit {
            page.entries.truncate(limit);
            page.next = page.entries.last().map(|story| filter.from.behind(story.rollout_pk.0));
        }
        page.examined = page.entries.len() as u32;
        Ok(page)
    }

    /// Groups in the order in which they were opened, or the newest first.
    #[instrument(level = "debug", skip_all)]
    pub async fn groups(&self, filter: GroupFilter) -> Result<Page<Group>, BufferError> {
        policies::existing_policy(self, &filter.policy).await?;
        Ok(self.store.read(filter).await?)
    }

    /// Decides an open group now, as if it had timed out.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn close_group(&self, policy: PolicyName, group_id: GroupId) -> Result<Group, BufferError> {
        let close = CloseGroup { policy: policy.clone(), group_id, by: self.acting.clone(), now: self.clock.now() };
        let DecidedGroup { group, unscored, .. } = self.store.write(close).await??;
        self.metrics.dropped_many(policy.as_str(), reasons::UNSCORED, unscored as u64);
        ingest::report_decided(self, &policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
        Ok(group)
    }

    /// Discards a group that is open, ready or quarantined.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn discard_group(
        &self,
        policy: PolicyName,
        group_id: GroupId,
        reason: String,
    ) -> Result<Group, BufferError> {
        let by = self.acting.clone();
        let discard = DiscardGroup { policy: policy.clone(), group_id, reason, by, now: self.clock.now() };
        let group = self.store.write(discard).await??;
        ingest::report_decided(self, &policy, group.fill.state, Some(reasons::BY_HAND), &[]);
        Ok(group)
    }

    /// Tallies of every policy.
    #[instrument(level = "debug", skip_all)]
    pub async fn stats(&self) -> Result<BTreeMap<PolicyName, Tallies>, BufferError> {
        let mut tallies = self.store.read(ReadTallies(None)).await?;
        // What evaluates a policy counts nowhere among what is trained.
        tallies.retain(|policy, _| !policy.is_evaluations());
        Ok(tallies)
    }

    /// Updates the gauges from the tallies before a scrape.
    #[instrument(level = "debug", skip_all)]
    pub async fn refresh_gauges(&self) -> Result<(), BufferError> {
        let (stats, versions) = (self.stats().await?, self.store.read(ReadVersions).await?);
        let metrics = Arc::clone(&self.metrics);
        // Adding up thousands of policies takes longer than a task may keep its thread.
        let labelled = tokio::task::spawn_blocking(move || {
            set_ledgers(&metrics, &stats);
            for (policy, version) in &versions {
                metrics.version(policy.as_str(), version.0);
            }
            let is_shown = |(policy, _): &(PolicyName, Version)| metrics.has_label(policy.as_str());
            let all_are_shown = versions.len() <= POLICY_LABELS_MAX;
            versions.into_iter().filter(|policy| all_are_shown || is_shown(policy)).map(|(policy, _)| policy).collect()
        });
        let labelled = labelled.await.map_err(|_| StoreError::Closed)?;
        let (mut environments, mut rewards) = (Vec::new(), Vec::new());
        for PolicyGauges { policy, newest_metrics } in self.store.read(ReadGauges(labelled)).await? {
            if self.metrics.has_label(policy.name.as_str()) {
                rewards.push((policy.name.to_string(), rewards_of(&newest_metrics)));
            }
            if environments.len() < ENVIRONMENTS_MAX {
                let found = policies::environments(self, &policy).await?.into_iter();
                environments.extend(found.map(|of| (policy.name.to_string(), of.environment, of.ready, of.needed)));
            }
        }
        self.metrics.environments(&environments);
        self.metrics.rewards(&rewards);
        Ok(())
    }
}

fn set_ledgers(metrics: &Metrics, stats: &BTreeMap<PolicyName, Tallies>) {
    let mut with_traffic: Vec<_> = stats.iter().filter(|(_, tallies)| !tallies.counts.is_empty()).collect();
    // If there are more policies than labels, the policies with the latest traffic get them.
    with_traffic.sort_by_key(|(_, tallies)| std::cmp::Reverse(tallies.last_received_at()));
    metrics.ledgers(with_traffic.into_iter().map(|(policy, tallies)| (policy.as_str(), gauges(tallies))));
}

/// The rewards in the metrics of a batch.
fn rewards_of(metrics: &BTreeMap<String, f64>) -> Rewards {
    let components = metrics.iter().filter_map(|(name, mean)| Some((batch::component(name)?.to_owned(), *mean)));
    Rewards { mean: metrics.get(batch::REWARD_TRAINED).copied(), components: components.collect() }
}

fn gauges(tallies: &Tallies) -> Ledger {
    Ledger {
        rollouts: tallies.rollouts(),
        groups: tallies.groups(),
        batches: tallies.batches(),
        sessions: tallies.sessions(),
        received: tallies.received(),
        live_bytes: tallies.count(&Tally::LiveBytes),
        reserved: tallies.count(&Tally::Reserved),
        assumed_versions: tallies.count(&Tally::AssumedVersion),
        unconserved: tallies.unconserved(),
    }
}
