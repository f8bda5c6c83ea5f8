//! Scores that come after their rollouts: the last one judges a rollout, as its arrival does where none is missing.
//!
//! As in [`ingest`], the store decides in its transaction and evaluates nothing. It answers with what must be evaluated, and
//! is asked again.

pub mod work;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use forebay_bounds::work::on_thread;
use forebay_domain::{
    ids::{GroupPk, PolicyName, RolloutId, RolloutPk},
    peers::Awaited,
    reasons,
    refusal::Refusal,
    scoring::{
        ATTEMPTS_MAX, Complete, FindScores, FoundScores, Judged, NewScore, PutOutcome, PutScores, Scored,
        ScoredDecision, Stored,
    },
    states::Verdict,
};
use forebay_store::{
    error::StoreError,
    ops::scores::{DropUnscored, DroppedUnscored, UnscoredGroups},
};
use tracing::instrument;

use crate::{Buffer, error::BufferError, ingest, waiting::replicas};

/// Rollouts that one transaction of the sweep drops.
const DROPPED_AT_ONCE: usize = 1_000;

impl Buffer {
    /// Stores scores, all or none. When it returns, every rollout that they complete is judged, and every group that waited
    /// only for them is decided.
    #[instrument(level = "debug", skip_all)]
    pub async fn put_scores(&self, mut scores: Vec<NewScore>) -> Result<Vec<Scored>, BufferError> {
        let policies: BTreeSet<PolicyName> = scores.iter().map(|new| new.policy.clone()).collect();
        for policy in policies {
            let of_policy = || scores.iter().filter(|new| new.policy == policy);
            let evaluating =
                self.evaluating(policy.clone(), of_policy().map(|new| new.rollout_id.clone()).collect()).await?;
            for new in scores.iter_mut().filter(|new| new.policy == policy && evaluating.contains(&new.rollout_id)) {
                new.policy = policy.evaluations();
            }
        }
        let scores = Arc::new(scores);
        let mut judged: HashMap<RolloutPk, (u32, Judged)> = HashMap::new();
        // A request with many rollouts has them evaluated in parts. A rollout that comes again has other scores, or another
        // version.
        while judged.values().all(|(times, _)| *times < ATTEMPTS_MAX) {
            let known = judged.values().map(|(_, judged)| judged.clone()).collect();
            let put = PutScores { scores: Arc::clone(&scores), judged: Arc::new(known), now: self.clock.now() };
            match self.store.write(put).await?? {
                PutOutcome::Stored(Stored { scores, work }) => {
                    report(self, &scores);
                    work::report(self, work);
                    return Ok(scores);
                }
                PutOutcome::Judge(complete) => {
                    for one in judge(complete).await? {
                        let times = judged.get(&one.rollout_pk()).map_or(0, |(times, _)| *times);
                        judged.insert(one.rollout_pk(), (times + 1, one));
                    }
                }
            }
        }
        Err(Refusal::ScoresChanged.into())
    }

    /// The scores of a rollout, in the current run of its policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn scores(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<FoundScores, BufferError> {
        let policy = self.stored_under(policy, &rollout_id).await?;
        Ok(self.store.read(FindScores { policy, rollout_id }).await??)
    }
}

async fn judge(complete: Vec<Complete>) -> Result<Vec<Judged>, StoreError> {
    let judge = move || complete.into_iter().map(Complete::judge).collect();
    on_thread(judge).await.map_err(|_| StoreError::Closed)
}

/// Counts what was decided, and wakes waiters for the groups that became ready.
fn report(buffer: &Buffer, stored: &[Scored]) {
    for (index, scored) in stored.iter().enumerate() {
        let policy = scored.policy.as_str();
        if !scored.duplicate && !scored.failed {
            buffer.metrics.scored(policy, scored.applied);
        }
        let is_first = |same: fn(&Scored, &Scored) -> bool| !stored[..index].iter().any(|other| same(other, scored));
        let of_rollout = is_first(|one, other| (&one.policy, &one.rollout_id) == (&other.policy, &other.rollout_id));
        if let Some(decision) = scored.decision.as_ref().filter(|_| of_rollout) {
            report_decision(buffer, &scored.policy, decision);
        }
        let of_group = is_first(|one, other| (&one.policy, &one.group_id) == (&other.policy, &other.group_id));
        if scored.policy.is_evaluations() {
            buffer.evaluated(&scored.policy);
        } else if let Some((state, failed)) = scored.decided.as_ref().filter(|_| of_group) {
            ingest::report_decided(buffer, &scored.policy, *state, scored.group_reason.as_deref(), failed);
        }
    }
}

fn report_decision(buffer: &Buffer, policy: &PolicyName, decision: &ScoredDecision) {
    for filter in &decision.failed_filters {
        buffer.metrics.filter_failed(policy.as_str(), filter);
        buffer.noticed.filter_failed(policy, filter, buffer.clock.now());
    }
    for filter in &decision.over_budget {
        buffer.metrics.filter_over_budget(policy.as_str(), filter);
    }
    if let (Verdict::Dropped, Some(reason)) = (decision.verdict, &decision.reason) {
        buffer.metrics.dropped(policy.as_str(), reason);
    }
}

/// Drops rollouts whose time to be scored is over, and decides groups that waited only for them.
pub(crate) async fn drop_unscored(buffer: &Buffer, limit: u32) -> Result<(), StoreError> {
    loop {
        let now = buffer.clock.now();
        let groups = buffer.store.read(UnscoredGroups { now, limit }).await?;
        let mut dropped = 0;
        for group in groups {
            match drop_of_group(buffer, group).await {
                Ok(count) => dropped += count,
                // One group that cannot be changed must not hold up the others.
                Err(error) => {
                    tracing::error!(error = %error, group.pk = group.0, "rollouts without scores cannot be dropped");
                }
            }
        }
        if dropped == 0 {
            return Ok(());
        }
    }
}

async fn drop_of_group(buffer: &Buffer, group: GroupPk) -> Result<usize, StoreError> {
    let drop = DropUnscored { group, now: buffer.clock.now(), limit: DROPPED_AT_ONCE };
    let Some(DroppedUnscored { policy, dropped, decided }) = buffer.store.write(drop).await? else { return Ok(0) };
    buffer.metrics.dropped_many(policy.as_str(), reasons::UNSCORED, dropped as u64);
    // Work of a group may be open again, for rollouts that came while it was leased.
    replicas::wake(buffer, Awaited::Work, &policy);
    if let Some(group) = decided {
        ingest::report_decided(buffer, &policy, group.fill.state, group.reason.as_deref(), &group.failed_filters);
    }
    Ok(dropped)
}
