//! Dry runs: what other filters would have done with the groups that were decided last.
//!
//! Not a stage that rollouts pass; it reads the ledger and changes nothing. It repeats the decisions of
//! [`ingest`](crate::ingest) and [`finalize`](forebay_domain::finalize) with the filters that the policy has now
//! and with a draft. Everything else stays as it was: the size of a group, what a dropped rollout means, and when the
//! rollouts arrived. What agents would have sent instead is not known, so the report says so where it matters.
//!
//! `judge` decides one group, and `report` adds up what was found.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use forebay_domain::{
    ids::GroupPk,
    looking::dry_run::{
        Bounds, FindPastGroups, IN_PAYLOAD, PastGroup, PastRollout, Payloads, TryFilters, judge::Judge, report::Report,
    },
    policies::Policy,
    refusal::Refusal,
    rules::Rules,
    samples::StoredPayload,
};
use forebay_store::{
    error::StoreError,
    ops::{looking::dry_run::ListPublished, scores::AppliedScores},
};
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

const PAGE_GROUPS: u32 = 256;

/// The most rollouts of a dry run.
const ROLLOUTS_MAX: u64 = 100_000;

/// Bytes of payloads that are in memory at once, unpacked. A rollout with more cannot be judged by its payload.
const PAYLOADS_BYTES_AT_ONCE: u64 = 16 << 20;

/// Bytes that a dry run takes besides payloads: a page of groups and the report.
const ROWS_BYTES: u64 = 8 << 20;

/// A dry run that has not begun.
pub struct DryRun {
    buffer: Buffer,
    request: TryFilters,
    policy: Policy,
    draft: Arc<Rules>,
}

impl Buffer {
    /// Checks filters that are to be tried on the groups that were decided last. Nothing is changed.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn try_filters(&self, mut request: TryFilters) -> Result<DryRun, BufferError> {
        let policy = policies::existing_policy(self, &request.policy).await?;
        let (rules, filter) = (Arc::clone(&policy.rules), std::mem::take(&mut request.filter));
        // Compiling filters may take too long for an async worker thread.
        let draft =
            tokio::task::spawn_blocking(move || rules.with_filters(filter)).await.map_err(|_| StoreError::Closed)?;
        let draft = Arc::new(draft.map_err(Refusal::Invalid)?);
        Ok(DryRun { buffer: self.clone(), request, policy, draft })
    }
}

impl DryRun {
    /// The bytes that it takes at most.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // As stored and decompressed, and what is kept of all rollouts of a group.
        if self.may_need_payloads() {
            ROWS_BYTES + 2 * PAYLOADS_BYTES_AT_ONCE + self.request.bounds.payload_bytes
        } else {
            ROWS_BYTES
        }
    }

    fn may_need_payloads(&self) -> bool {
        [&self.draft, &self.policy.rules].iter().any(|rules| rules.filters().rollout_filters_name(&IN_PAYLOAD))
    }

    /// Tries the draft on the newest groups.
    pub async fn run(self) -> Result<Report, BufferError> {
        let judge = self.judge().await?;
        let mut trial = Trial {
            buffer: self.buffer.clone(),
            report: Report::new(judge.depends_on_versions(), self.request.examples_max as usize),
            judge: Arc::new(judge),
            bounds: self.request.bounds,
            evaluated: Duration::ZERO,
        };
        let examined_max = u64::from(self.request.groups_max) * 2;
        let mut before = GroupPk(i64::MAX);
        loop {
            let left = examined_max - trial.report.examined;
            let wanted = u64::from(self.request.groups_max).saturating_sub(trial.report.groups);
            if left == 0 || wanted == 0 {
                break;
            }
            let page = FindPastGroups {
                policy_pk: self.policy.policy_pk,
                run: self.policy.run,
                environment: self.request.environment.clone(),
                before,
                limit: wanted.min(PAGE_GROUPS.into()) as u32,
                examined_max: left.min(PAGE_GROUPS.into()) as u32,
            };
            let page = self.buffer.store.read(page).await?;
            trial.report.examined += u64::from(page.examined);
            trial.report.is_complete &= page.too_large == 0;
            for chunk in chunks(page.groups, &trial.judge) {
                if !trial.judge_all(chunk).await? {
                    return Ok(trial.report);
                }
            }
            let Some(next) = page.next else { break };
            before = next;
        }
        Ok(trial.report)
    }

    async fn judge(&self) -> Result<Judge, BufferError> {
        let (draft, now) = (Arc::clone(&self.draft), Arc::clone(&self.policy.rules));
        let depends = |rules: &Rules| rules.filters().depend_on_versions();
        let published = if depends(&draft) || depends(&now) {
            self.buffer.store.read(ListPublished(self.policy.policy_pk)).await?
        } else {
            Vec::new()
        };
        Ok(Judge::new(draft, now, published))
    }
}

/// Groups that are judged together: at least one, and more as long as their payloads are few.
fn chunks(groups: Vec<PastGroup>, judge: &Judge) -> Vec<Vec<PastGroup>> {
    let mut chunks: Vec<Vec<PastGroup>> = Vec::new();
    let mut bytes = 0;
    for group in groups {
        let of_group = payload_bytes(judge.payloads_of(&group));
        match chunks.last_mut() {
            Some(chunk) if bytes + of_group <= PAYLOADS_BYTES_AT_ONCE => {
                bytes += of_group;
                chunk.push(group);
            }
            _ => {
                bytes = of_group;
                chunks.push(vec![group]);
            }
        }
    }
    chunks
}

/// A dry run under way.
struct Trial {
    buffer: Buffer,
    judge: Arc<Judge>,
    report: Report,
    bounds: Bounds,
    evaluated: Duration,
}

impl Trial {
    /// Judges groups one after the other. Returns false if a bound was reached.
    async fn judge_all(&mut self, mut groups: Vec<PastGroup>) -> Result<bool, BufferError> {
        let (mut rollouts, mut bytes) = (self.report.rollouts, self.report.payload_bytes);
        let exceeds = |group: &PastGroup| {
            rollouts += group.rollouts.len() as u64;
            bytes += payload_bytes(self.judge.payloads_of(group));
            rollouts > ROLLOUTS_MAX || bytes > self.bounds.payload_bytes
        };
        let fitting = groups.iter().position(exceeds);
        if let Some(count) = fitting {
            groups.truncate(count);
            self.report.is_complete = false;
        }
        let described = self.describe(&groups).await?;
        let (judge, report) = (Arc::clone(&self.judge), std::mem::take(&mut self.report));
        let left = self.bounds.evaluation.saturating_sub(self.evaluated);
        let evaluate = move || {
            let started = Instant::now();
            let report = judge_within(&judge, &groups, &described, left, report);
            (report, started.elapsed())
        };
        let (report, took) = tokio::task::spawn_blocking(evaluate).await.map_err(|_| StoreError::Closed)?;
        self.report = report;
        self.evaluated += took;
        Ok(fitting.is_none() && !self.report.is_out_of_time)
    }

    /// What the payloads of groups say, where filters need it.
    async fn describe(&mut self, groups: &[PastGroup]) -> Result<Payloads, BufferError> {
        let mut found = Payloads::default();
        let needed: Vec<&PastRollout> = groups.iter().flat_map(|group| self.judge.payloads_of(group)).collect();
        let mut rest = needed.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest.iter().take_while(|rollout| {
                bytes += if is_small(rollout) { rollout.unpacked_bytes } else { 0 };
                bytes <= PAYLOADS_BYTES_AT_ONCE
            });
            let (page, others) = rest.split_at(count.count());
            rest = others;
            found.too_large.extend(page.iter().filter(|rollout| !is_small(rollout)).map(|rollout| rollout.rollout_pk));
            let small: Vec<&PastRollout> = page.iter().copied().filter(|rollout| is_small(rollout)).collect();
            self.report.payload_bytes += payload_bytes(small.iter().copied());
            let stored = self.buffer.store.payloads(small.iter().map(|rollout| rollout.rollout_pk).collect()).await?;
            let keeps_metadata = self.judge.names("metadata");
            let unpack = move || {
                let describe = |stored: StoredPayload| {
                    let mut described = stored.payload.describe();
                    if let (Ok(described), false) = (&mut described, keeps_metadata) {
                        described.metadata = None;
                    }
                    (stored.rollout_pk, described)
                };
                stored.into_iter().map(describe).collect::<Vec<_>>()
            };
            let described = tokio::task::spawn_blocking(unpack).await.map_err(|_| StoreError::Closed)?;
            found.described.extend(described);
            if self.judge.reads_scores() {
                let rollouts = small.iter().map(|rollout| rollout.rollout_pk).collect();
                found.scores.extend(self.buffer.store.read(AppliedScores(rollouts)).await?);
            }
        }
        Ok(found)
    }
}

/// The bytes of the payloads that may be unpacked.
fn payload_bytes<'r>(rollouts: impl Iterator<Item = &'r PastRollout>) -> u64 {
    rollouts.filter(|rollout| is_small(rollout)).map(|rollout| rollout.unpacked_bytes).sum()
}

/// Whether a payload may be unpacked.
fn is_small(rollout: &PastRollout) -> bool {
    rollout.unpacked_bytes <= PAYLOADS_BYTES_AT_ONCE
}

/// Judges groups until the time is over.
fn judge_within(
    judge: &Judge,
    groups: &[PastGroup],
    payloads: &Payloads,
    left: Duration,
    mut report: Report,
) -> Report {
    let until = Instant::now() + left;
    for group in groups {
        let is_late = || Instant::now() >= until;
        let Some(judged) = judge.group(group, payloads, &is_late) else {
            (report.is_complete, report.is_out_of_time) = (false, true);
            break;
        };
        report.add(group, judged);
    }
    report
}
