//! Exports: the rollouts of a run as they were posted, with what became of them.
//!
//! Not a stage that rollouts pass; it reads them in whichever state they are. An export has every rollout that was
//! acknowledged before it began, and none that arrived later: the last one is noted at the beginning. The state of each
//! is the state when its row is read, because a snapshot that lasts as long as an export would keep the database from
//! removing old rows. Masks are those that were posted, unlike in [`samples`](crate::samples).
//!
//! Whole groups are read in the order of their keys. A snapshot is not needed, because rows are written once and a
//! rollout that arrives later has a higher key. Another process may read a served SQLite file, because in WAL mode
//! readers have snapshots of their own.

use std::{collections::BTreeMap, sync::Arc};

use forebay_domain::{
    formats::payload::Unpacked,
    ids::{PolicyName, PolicyPk, Run, Version},
    looking::export::{ExportCursor, ExportMember, ExportPage},
    policies::Policy,
    refusal::Refusal,
    rules::filter::{Filters, facts::RolloutFacts},
    samples::pages::{self, Members},
    scores,
    states::{RolloutState, Verdict},
};
use forebay_store::{
    Store,
    error::StoreError,
    ops::{looking::export::LastRollout, policy::FindPolicy},
};
use forebay_wire::{self as wire, ExportCounts, ExportResult, ExportedRollout, FilterAction, FilterRule, FilterScope};
use serde_json::value::RawValue;
use tracing::instrument;

use crate::{Buffer, error::BufferError, payloads};

/// Which rollouts an export has.
#[derive(Clone, Debug, Default)]
pub struct ExportFilter {
    /// Only rollouts in these states, if there are any.
    pub states: Vec<RolloutState>,
    /// Only rollouts with these verdicts, if there are any.
    pub verdicts: Vec<Verdict>,
    /// Only rollouts with at least this reward.
    pub min_reward: Option<f64>,
    /// Only rollouts for which this expression is true.
    pub expression: Option<Arc<Expression>>,
}

/// An expression over the variables of filters of scope `rollout`.
#[derive(Debug)]
pub struct Expression(Filters);

impl Expression {
    /// Compiles an expression, or says what is wrong with it.
    pub fn compile(text: &str) -> Result<Self, String> {
        let rule = FilterRule {
            name: "where".to_owned(),
            scope: FilterScope::Rollout,
            when: text.to_owned(),
            action: FilterAction::Drop,
        };
        let compiled = Filters::compile(&[rule]).map(Self);
        compiled.map_err(|faults| faults.into_iter().map(|fault| fault.message).collect::<Vec<_>>().join("; "))
    }

    /// Whether it is true; none if it cannot be evaluated.
    fn is_true(&self, facts: &RolloutFacts<'_>) -> Option<bool> {
        let evaluation = self.0.evaluate_rollout(facts);
        if evaluation.failed.is_empty() { Some(evaluation.matched.is_some()) } else { None }
    }
}

/// An export that is being read.
pub struct ExportReader {
    store: Arc<Store>,
    policy: PolicyName,
    version: Version,
    filter: ExportFilter,
    page: ExportPage,
    is_last: bool,
    members: Members<ExportMember>,
    counts: ExportCounts,
}

/// Begins an export of a run, or of the current one.
pub async fn begin(
    store: Arc<Store>,
    policy: PolicyName,
    run: Option<Run>,
    filter: ExportFilter,
) -> Result<ExportReader, BufferError> {
    let mut found = store.read(FindPolicy(policy.clone())).await?;
    if found.is_none() && policy.is_evaluations() {
        // Nothing has evaluated the policy yet, so the export is empty: it has what belongs to no policy.
        let trained = store.read(FindPolicy(policy.public())).await?;
        found = trained.map(|trained| Policy { policy_pk: PolicyPk(0), ..trained });
    }
    let Policy { policy_pk, run: current, version, .. } =
        found.ok_or_else(|| BufferError::from(Refusal::UnknownPolicy(policy.clone())))?;
    let last = store.read(LastRollout).await?;
    let evaluates = policy.is_evaluations();
    let page = ExportPage { policy_pk, run: run.unwrap_or(current), evaluates, last, from: ExportCursor::START };
    let (members, counts) = (Members::default(), ExportCounts::default());
    Ok(ExportReader { store, policy, version, filter, page, is_last: false, members, counts })
}

impl ExportReader {
    /// Reads rows until there is a rollout that may be exported, or to the end. Returns the bytes of the next page; 0 at
    /// the end.
    pub async fn next_page_bytes(&mut self) -> Result<u64, BufferError> {
        while self.members.as_slice().is_empty() && !self.is_last {
            let read = self.store.read(self.page).await?;
            self.counts.purged += read.purged;
            match read.next {
                Some(next) => self.page.from = next,
                None => self.is_last = true,
            }
            let found = read.members.len();
            let members: Vec<_> = read.members.into_iter().filter(|member| self.filter.admits(member)).collect();
            self.counts.filtered += (found - members.len()) as u64;
            self.members = members.into();
        }
        Ok(self.members.next_page_bytes())
    }

    /// The next rollouts, or none at the end. A page may be empty although more follow.
    pub async fn next_page(&mut self) -> Result<Option<Vec<ExportedRollout>>, BufferError> {
        self.next_page_bytes().await?;
        let page = payloads::next_page(self.store.as_ref(), &mut self.members).await?;
        if page.is_empty() {
            return Ok(None);
        }
        let (policy, run) = (self.policy.clone(), self.page.run);
        let (version, expression) = (self.version, self.filter.expression.clone());
        let unpack = move || {
            let mut counts = ExportCounts::default();
            let mut exported = Vec::with_capacity(page.len());
            for (member, payload) in page {
                let Some(payload) = payload else {
                    counts.purged += 1;
                    continue;
                };
                match pages::unpack(&member.row, &payload) {
                    Ok(unpacked) => match verdict(expression.as_deref(), &member, &unpacked, version) {
                        Some(true) => exported.push(export(&policy, run, member, unpacked)),
                        Some(false) => counts.filtered += 1,
                        None => {
                            counts.filtered += 1;
                            counts.unevaluated += 1;
                        }
                    },
                    Err(damage) => {
                        tracing::error!(
                            rollout.id = %member.row.rollout_id,
                            group.id = %member.row.group_id,
                            error = %damage,
                            "a rollout is left out of an export"
                        );
                        counts.damaged += 1;
                    }
                }
            }
            (exported, counts)
        };
        let (exported, found) = tokio::task::spawn_blocking(unpack).await.map_err(|_| StoreError::Closed)?;
        self.counts.rollouts += exported.len() as u64;
        self.counts.purged += found.purged;
        self.counts.filtered += found.filtered;
        self.counts.unevaluated += found.unevaluated;
        self.counts.damaged += found.damaged;
        Ok(Some(exported))
    }

    /// What was exported and left out so far.
    #[must_use]
    pub fn counts(&self) -> ExportCounts {
        self.counts
    }
}

impl ExportFilter {
    /// Whether a rollout may be exported, as far as its row shows.
    fn admits(&self, member: &ExportMember) -> bool {
        (self.states.is_empty() || self.states.contains(&member.state))
            && (self.verdicts.is_empty() || self.verdicts.contains(&member.row.verdict))
            && self.min_reward.is_none_or(|least| member.row.reward.is_some_and(|reward| reward >= least))
    }
}

/// The value of the expression on a rollout; true without an expression.
fn verdict(
    expression: Option<&Expression>,
    member: &ExportMember,
    unpacked: &Unpacked,
    current: Version,
) -> Option<bool> {
    let Some(expression) = expression else { return Some(true) };
    let scores = member.all_scores(&unpacked.reward_components);
    let components = exported_components(member, &unpacked.reward_components);
    let sum = |of: fn(&wire::Segment) -> usize| unpacked.segments.iter().map(of).sum::<usize>() as i64;
    expression.is_true(&RolloutFacts {
        status: unpacked.status.as_str(),
        reward: member.row.reward,
        reward_components: &components,
        scores: &scores,
        environment: unpacked.environment.as_deref(),
        policy_version: member.row.policy_version.0,
        version_current: current.0,
        staleness: current.0.saturating_sub(member.row.policy_version.0).max(0),
        segments: unpacked.segments.len() as i64,
        tokens: sum(|segment| segment.tokens.len()),
        response_tokens: sum(|segment| segment.loss_mask.len()),
        trained_tokens: sum(|segment| segment.loss_mask.iter().map(|&bit| usize::from(bit)).sum()),
        max_segment_tokens: unpacked.segments.iter().map(|segment| segment.tokens.len()).max().unwrap_or(0) as i64,
        temperature: f64::from(unpacked.sampling.temperature),
        metadata: unpacked.metadata.as_deref(),
    })
}

/// The reward components of a rollout, with the scores that others gave.
fn exported_components(member: &ExportMember, sent: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    if member.scores.is_empty() { sent.clone() } else { scores::components(sent, member.all_scores(sent)) }
}

fn export(policy: &PolicyName, run: Run, member: ExportMember, unpacked: Unpacked) -> ExportedRollout {
    // If every segment has spans, the version follows from them, and a version beside them would say nothing.
    let has_spans = |segment: &wire::Segment| segment.versions.is_some();
    let is_spanned = !unpacked.segments.is_empty() && unpacked.segments.iter().all(has_spans);
    let policy_version = member.row.policy_version.0;
    let reward_components = exported_components(&member, &unpacked.reward_components);
    let (purpose, suite, task) = match member.evaluates {
        Some(of) => (wire::Purpose::Eval, Some(of.suite), Some(of.task)),
        None => (wire::Purpose::Train, None, None),
    };
    // A rollout that evaluates its policy is alone.
    let is_grouped = purpose == wire::Purpose::Train;
    ExportedRollout {
        result: ExportResult {
            run: run.0,
            verdict: member.row.verdict.into(),
            reason: member.reason,
            state: member.state.into(),
            advantage: member.advantage,
            step: member.step.map(|step| step.0),
            policy_version,
            policy_version_assumed: member.version_assumed,
            received_at: member.received_at.to_string(),
        },
        trajectory: wire::Trajectory {
            policy: Some(policy.to_string()),
            rollout_id: Some(member.row.rollout_id),
            group_id: is_grouped.then_some(member.row.group_id),
            group_size: is_grouped.then_some(member.group_size),
            environment: unpacked.environment,
            execution_id: Some(member.execution_id.to_string()),
            policy_version: (!is_spanned).then_some(policy_version),
            admission_id: None,
            status: unpacked.status,
            reward: member.row.reward,
            reward_components,
            sampling: unpacked.sampling,
            segments: unpacked.segments,
            turns: Vec::new(),
            messages: unpacked.messages.map(on_one_line),
            metadata: unpacked.metadata.map(on_one_line),
            purpose,
            suite,
            task,
        },
    }
}

/// The same JSON without line breaks. A line break cannot be inside a JSON string, so replacing each with a space keeps
/// the meaning.
fn on_one_line(json: Box<RawValue>) -> Box<RawValue> {
    if !json.get().contains(['\n', '\r']) {
        return json;
    }
    let text = json.get().replace(['\n', '\r'], " ");
    RawValue::from_string(text).expect("white space between tokens of JSON may be any")
}

impl Buffer {
    /// Begins an export of a run, or of the current one.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn export(
        &self,
        policy: PolicyName,
        run: Option<Run>,
        filter: ExportFilter,
    ) -> Result<ExportReader, BufferError> {
        begin(Arc::clone(&self.store), policy, run, filter).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_is_checked_like_a_filter() {
        assert!(Expression::compile("reward > 0.5 && status == 'completed'").is_ok());
        let unknown = Expression::compile("rewards > 0.5").expect_err("no such variable in this scope");
        assert!(unknown.contains("rewards"), "{unknown}");
        assert!(Expression::compile("reward >").is_err());
    }

    #[test]
    fn line_breaks_between_tokens_become_spaces() {
        let json = RawValue::from_string("{\n\"a\":\r\n\"b\\nc\"}".to_owned()).expect("it is JSON");
        assert_eq!(on_one_line(json).get(), "{ \"a\":  \"b\\nc\"}");
    }
}
