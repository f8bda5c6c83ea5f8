//! The ledger: the state of every rollout, and counts that must agree.

use std::{collections::BTreeMap, sync::Arc};

use forebay_domain::{
    batch,
    groups::{CloseGroup, DiscardGroup, Group},
    ids::{GroupId, PolicyName, RolloutId, Version},
    looking::ledger::{GroupFilter, Story, StoryFilter},
    pages::Page,
    policies::PolicyGauges,
    reasons,
    refusal::Refusal,
    tally::{Tallies, Tally},
};
use forebay_store::{
    error::StoreError,
    ops::{
        gauges::{ReadGauges, ReadVersions},
        policy::ReadTallies,
    },
};
use forebay_telemetry::metrics::{ENVIRONMENTS_MAX, Ledger, Metrics, POLICY_LABELS_MAX, Rewards};

use super::{Buffer, ingest, policies};
use crate::buffer::error::BufferError;

/// Rollouts of an execution that are read at once, if the caller may see only some of them.
const STORIES_AT_ONCE: u32 = 100;

/// How often they are read at most for one page.
const READS_MAX: u32 = 4;

pub(in crate::buffer) async fn story(
    buffer: &Buffer,
    policy: PolicyName,
    rollout_id: RolloutId,
) -> Result<Story, BufferError> {
    let (named, id) = (policy.clone(), rollout_id.to_string());
    let filter = StoryFilter { policy: Some(policy), rollout_id: Some(rollout_id), limit: 1, ..StoryFilter::default() };
    let story = stories(buffer, filter, |_| true).await?.entries.pop();
    story.ok_or_else(|| Refusal::UnknownInPolicy { what: "rollout", id, policy: named }.into())
}

/// A page of rollouts of the policies that the caller sees.
pub(in crate::buffer) async fn stories(
    buffer: &Buffer,
    filter: StoryFilter,
    sees: impl Fn(&PolicyName) -> bool,
) -> Result<Page<Story>, BufferError> {
    if let Some(policy) = &filter.policy {
        policies::existing_policy(buffer, policy).await?;
        return Ok(buffer.store.read(filter).await?);
    }
    // Rollouts of other policies are passed over, so that a page does not tell that there are any.
    let limit = filter.limit as usize;
    let mut page = Page { entries: Vec::new(), next: Some(filter.from), examined: 0 };
    // A filtered list examines as many rollouts as one read does.
    let reads = if filter.has_filters() { 1 } else { READS_MAX };
    for _ in 0..reads {
        let Some(from) = page.next.filter(|_| page.entries.len() < limit) else { break };
        let read = StoryFilter { from, limit: filter.limit.max(STORIES_AT_ONCE), ..filter.clone() };
        let read = buffer.store.read(read).await?;
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

pub(in crate::buffer) async fn groups(buffer: &Buffer, filter: GroupFilter) -> Result<Page<Group>, BufferError> {
    policies::existing_policy(buffer, &filter.policy).await?;
    Ok(buffer.store.read(filter).await?)
}

pub(in crate::buffer) async fn close_group(
    buffer: &Buffer,
    policy: PolicyName,
    group_id: GroupId,
) -> Result<Group, BufferError> {
    let close = CloseGroup { policy: policy.clone(), group_id, by: buffer.acting.clone(), now: buffer.clock.now() };
    let group = buffer.store.write(close).await??;
    ingest::report_decided(buffer, &policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
    Ok(group)
}

pub(in crate::buffer) async fn discard_group(
    buffer: &Buffer,
    policy: PolicyName,
    group_id: GroupId,
    reason: String,
) -> Result<Group, BufferError> {
    let by = buffer.acting.clone();
    let discard = DiscardGroup { policy: policy.clone(), group_id, reason, by, now: buffer.clock.now() };
    let group = buffer.store.write(discard).await??;
    ingest::report_decided(buffer, &policy, group.fill.state, Some(reasons::BY_HAND), &[]);
    Ok(group)
}

pub(in crate::buffer) async fn stats(buffer: &Buffer) -> Result<BTreeMap<PolicyName, Tallies>, BufferError> {
    Ok(buffer.store.read(ReadTallies(None)).await?)
}

/// Sets the gauges of the ledger. Of many policies, only those that have a label of their own are read in detail.
pub(in crate::buffer) async fn refresh_gauges(buffer: &Buffer) -> Result<(), BufferError> {
    let (stats, versions) = (stats(buffer).await?, buffer.store.read(ReadVersions).await?);
    let metrics = Arc::clone(&buffer.metrics);
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
    for PolicyGauges { policy, newest_metrics } in buffer.store.read(ReadGauges(labelled)).await? {
        if buffer.metrics.has_label(policy.name.as_str()) {
            rewards.push((policy.name.to_string(), rewards_of(&newest_metrics)));
        }
        if environments.len() < ENVIRONMENTS_MAX {
            let found = policies::environments(buffer, &policy).await?.into_iter();
            environments.extend(found.map(|of| (policy.name.to_string(), of.environment, of.ready, of.needed)));
        }
    }
    buffer.metrics.environments(&environments);
    buffer.metrics.rewards(&rewards);
    Ok(())
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
