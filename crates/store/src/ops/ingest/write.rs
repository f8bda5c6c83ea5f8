//! Writes the results of the bundles of one transaction, with few statements for any number of bundles.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use forebay_domain::{
    clock::Timestamp,
    credit,
    finalize::{GroupDecision, MemberAdvantage, ReadyGroup},
    formats::{codes, seal::RolloutSeal},
    ids::{GroupPk, IdKey, PolicyPk, RolloutPk, Run},
    ingest::{
        decide::RolloutDecision,
        new_rollout::{Form, NewRollout},
    },
    rules::Rules,
    scores::{BesideRow, PRODUCER, REWARD},
    states::GroupState,
};
use serde::Serialize;

use super::{
    decide::Changes,
    work::{GroupWork, Incoming, Keyed},
};
use crate::{
    error::StoreError,
    ops::{
        blobs::{self, NamedBlob},
        evals::{self, NewEvaluation},
        group::{self, LockedGroup},
        scores, session,
    },
    sql::{Arg, InsertRows, Statement, Tx, args, key_list},
};

/// Writes everything. Groups come before the rollouts that refer to them.
pub(super) async fn write(tx: &mut Tx<'_>, changes: Changes<'_>, now: Timestamp) -> Result<(), StoreError> {
    let Changes { groups, arrived, mut advantages, ready, allowances, ended } = changes;
    allowances.write(tx).await?;
    let numbers = group::next_ready(tx, ready.len()).await?;
    let ready_seqs: HashMap<Keyed, i64> = ready.into_iter().zip(numbers).collect();
    let (opened, stored): (Vec<_>, Vec<_>) =
        groups.iter().filter(|(_, group)| group.changed).partition(|(_, group)| group.opened_under.is_some());
    insert_groups(tx, &opened, &ready_seqs, now).await?;
    let rows = arrived.iter().map(|row| row.args(advantages.remove(&row.rollout_pk).as_ref(), now)).collect();
    INSERT_ROLLOUTS.run(tx, rows).await?;
    let rows = arrived.iter().filter_map(|row| row.payload_args(tx)).collect();
    blobs::INSERT_PAYLOADS.run(tx, rows).await?;
    let uses: Vec<_> = arrived.iter().flat_map(Arrived::uses).collect();
    blobs::name(tx, &uses, now).await?;
    blobs::name_in_passing(tx, arrived.iter().flat_map(Arrived::passed).collect(), now).await?;
    let rows = arrived.iter().filter_map(|row| row.scoring_args(now)).collect();
    scores::INSERT_SCORING.run(tx, rows).await?;
    let rows = arrived.iter().filter_map(|row| row.score_args(now)).collect();
    scores::INSERT_SCORES.run(tx, rows).await?;
    write_work(tx, &groups, &arrived, now).await?;
    let evaluations: Vec<_> = arrived.iter().filter_map(Arrived::evaluation).collect();
    if !evaluations.is_empty() {
        evals::write(tx, &evaluations, now).await?;
    }
    // The advantages that are left belong to rollouts that were stored before.
    let mut advantages: Vec<MemberAdvantage> = advantages.into_values().collect();
    advantages.sort_unstable_by_key(|advantage| advantage.rollout_pk);
    group::set_advantages(tx, &advantages).await?;
    write_counts(tx, &stored).await?;
    session::write_ended(tx, &ended, now).await?;
    for (key, group) in stored {
        match &group.decision {
            Some(GroupDecision::Ready(ready)) => {
                group::write_ready(tx, &group.locked, ready, ready_seqs[key], now).await?;
            }
            Some(GroupDecision::Discard(_)) => {
                group::write_discarded(tx, &group.locked, GroupState::Open, now).await?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Makes work for scorers of what rollouts lack.
async fn write_work(
    tx: &mut Tx<'_>,
    groups: &BTreeMap<Keyed, GroupWork>,
    arrived: &[Arrived<'_>],
    now: Timestamp,
) -> Result<(), StoreError> {
    let is_waiting = |group: &&GroupWork| {
        group.changed
            && group.locked.rules.have_work()
            && group.locked.fill.state.is_open()
            && group.locked.fill.scoring > 0
    };
    let waiting: BTreeMap<GroupPk, &LockedGroup> =
        groups.values().filter(is_waiting).map(|group| (group.locked.group_pk, &group.locked)).collect();
    if waiting.is_empty() {
        return Ok(());
    }
    let mut missing: HashMap<GroupPk, BTreeSet<&str>> = HashMap::new();
    let mut rows = Vec::new();
    for row in arrived {
        let Some(group) = waiting.get(&row.group_pk) else { continue };
        missing.entry(row.group_pk).or_default().extend(row.decision.scoring.iter().map(String::as_str));
        rows.extend(scores::work::rows_of_rollout(group, row.rollout_pk, &row.decision.scoring, now));
    }
    scores::work::INSERT_WORK.run(tx, rows).await?;
    for (group_pk, group) in waiting {
        scores::work::of_group(tx, group, &missing.remove(&group_pk).unwrap_or_default(), now).await?;
    }
    Ok(())
}

/// A new rollout and the decision about it.
pub(super) struct Arrived<'b> {
    rollout_pk: RolloutPk,
    rollout_key: IdKey,
    new: &'b NewRollout,
    decision: RolloutDecision,
    policy_pk: PolicyPk,
    run: Run,
    group_pk: GroupPk,
    keeps_payload: bool,
    /// The blobs that it names.
    named: Vec<NamedBlob>,
    /// Whether the decision of its group reads its turns.
    compares_turns: bool,
    /// The rules of its group, if they use scores.
    scored_by: Option<Arc<Rules>>,
}

impl<'b> Arrived<'b> {
    pub(super) fn new(
        rollout_pk: RolloutPk,
        incoming: &Incoming<'b>,
        group: &LockedGroup,
        decision: &RolloutDecision,
        named: Vec<NamedBlob>,
    ) -> Self {
        let LockedGroup { policy_pk, run, group_pk, rules, .. } = group;
        let delivered = decision.verdict.takes_place();
        Self {
            rollout_pk,
            rollout_key: incoming.rollout_key,
            new: incoming.new,
            decision: decision.clone(),
            policy_pk: *policy_pk,
            run: *run,
            group_pk: *group_pk,
            keeps_payload: delivered || rules.retention.dropped_s > 0,
            named,
            compares_turns: delivered && rules.compare_turns(),
            scored_by: rules.use_scores().then(|| Arc::clone(rules)),
        }
    }

    /// What is stored of it by the rules of its group.
    fn form(&self) -> &'b Form {
        self.new.form(self.decision.retries)
    }

    /// Bytes that count as not yet trained: of its payload, and of the uploads that it keeps from being deleted.
    pub(super) fn live_bytes(&self) -> i64 {
        let named = self.named.iter().map(|named| named.bytes as i64).sum::<i64>();
        if self.decision.verdict.takes_place() { self.form().payload.body.len() as i64 + named } else { 0 }
    }

    fn args(&self, advantage: Option<&MemberAdvantage>, now: Timestamp) -> Vec<Arg> {
        let (new, decision) = (self.new, &self.decision);
        let Form { facts, payload, .. } = self.form();
        let seal = RolloutSeal {
            rollout_id: new.rollout_id.as_str(),
            group_id: new.group_id.as_ref().map_or(new.rollout_id.as_str(), |group| group.as_str()),
            verdict: decision.verdict,
            reward: decision.reward,
            policy_version: decision.versions.version,
            trained_spans: decision.trained_spans.as_deref(),
            payload: &payload.digest,
        }
        .checksum();
        let trained_versions = decision.trained_versions();
        let compares = |rules: &Arc<Rules>| rules.compare_turns();
        let turn_calls = facts.turn_calls.as_deref().filter(|_| self.scored_by.as_ref().is_some_and(compares));
        args![
            self.rollout_pk,
            self.policy_pk,
            self.run,
            self.rollout_key.as_bytes(),
            new.rollout_id.as_str(),
            self.group_pk,
            decision.verdict,
            decision.reason.as_deref(),
            Some(decision.failed_filters.join(",")).filter(|names| !names.is_empty()),
            decision.reward,
            advantage.map(|advantage| advantage.of_rollout),
            new.content.as_bytes(),
            decision.versions.version,
            decision.versions.assumed,
            trained_versions.map(|versions| versions.oldest),
            trained_versions.map(|versions| versions.newest),
            facts.segments,
            facts.trained_segments,
            facts.tokens,
            facts.trained_tokens,
            payload.unpacked_bytes,
            now,
            decision.trained_spans.as_deref().map(to_json),
            &seal[..],
            &new.execution_id,
            i64::from(codes::of_status(facts.status)),
            facts.response_tokens,
            facts.max_segment_tokens,
            Some(&facts.reward_components).filter(|components| !components.is_empty()).map(to_json),
            facts.segment_tokens.as_deref().map(to_json),
            self.compares_turns.then(|| credit::pack(&facts.turns)).as_deref(),
            group::packed_turns(advantage).as_deref(),
            turn_calls.map(to_json),
        ]
    }

    /// What it is a result of, if it evaluates its policy.
    fn evaluation(&self) -> Option<NewEvaluation<'b>> {
        let decision = &self.decision;
        let is_decided = decision.scoring.is_empty() && decision.verdict.takes_place();
        Some(NewEvaluation {
            rollout_pk: self.rollout_pk,
            policy_pk: self.policy_pk,
            run: self.run,
            of: self.new.evaluates.as_ref()?,
            version: decision.versions.version,
            mixed: decision.trains_several_versions(),
            reward: decision.reward.filter(|_| is_decided),
        })
    }

    /// What it waits for, if it lacks scores.
    fn scoring_args(&self, now: Timestamp) -> Option<Vec<Arg>> {
        let rules = self.scored_by.as_ref().filter(|_| !self.decision.scoring.is_empty())?;
        let beside = BesideRow::of(rules, &self.form().facts);
        Some(args![
            self.rollout_pk,
            self.group_pk,
            self.policy_pk,
            to_json(&self.decision.scoring),
            beside.as_ref().map(to_json),
            now,
            now.plus_seconds(rules.scores.timeout_s),
        ])
    }

    /// The reward that the producer sent, because the row has the one that is made of scores.
    fn score_args(&self, now: Timestamp) -> Option<Vec<Arg>> {
        let reward = self.form().facts.reward.filter(|_| self.scored_by.is_some())?;
        Some(args![self.rollout_pk, REWARD, PRODUCER, true, reward, None::<String>, now])
    }

    /// The blobs that it keeps.
    fn uses(&self) -> impl Iterator<Item = (RolloutPk, NamedBlob)> {
        self.named.iter().filter(|_| self.keeps_payload).map(|named| (self.rollout_pk, *named))
    }

    /// The keys of the columns that it names and does not keep.
    fn passed(&self) -> impl Iterator<Item = i64> {
        let columns = self.named.iter().filter(|named| named.is_column && !self.keeps_payload);
        columns.map(|named| named.blob_pk.as_i64())
    }

    fn payload_args(&self, tx: &mut Tx<'_>) -> Option<Vec<Arg>> {
        if !self.keeps_payload {
            return None;
        }
        Some(blobs::payload_row(tx, self.rollout_pk, &self.form().payload))
    }
}

static INSERT_ROLLOUTS: InsertRows = InsertRows::new(
    "insert_rollouts",
    "rollout",
    "rollout_pk, policy_pk, run, rollout_key, rollout_id, group_pk, verdict, reason, failed_filters, reward,
        advantage, content_digest, policy_version, version_assumed, version_min, version_max, segments,
        trained_segments, tokens, trained_tokens, unpacked_bytes, received_us, trained_spans, seal, execution,
        status, response_tokens, max_segment_tokens, components, segment_tokens, turns, turn_advantages,
        turn_calls",
);

/// Opens groups, in the order of their keys. If another replica opens one of them at the same time, this waits for its
/// commit and then fails the unique index.
async fn insert_groups(
    tx: &mut Tx<'_>,
    opened: &[(&Keyed, &GroupWork)],
    ready_seqs: &HashMap<Keyed, i64>,
    now: Timestamp,
) -> Result<(), StoreError> {
    static INSERT_GROUPS: InsertRows = InsertRows::new(
        "insert_groups",
        "rollout_group",
        "group_pk, policy_pk, run, group_key, group_id, rules_pk, environment, state, reason, failed_filters,
            size, min_size, kept, masked, dropped, scoring, late, payload_bytes, opened_us, deadline_us, decided_us,
            purge_us, ready_seq, seal, failed_deliveries, delivered, samples, trained_samples, tokens,
            trained_tokens, reward_sum, reward_count, reward_min, reward_max, version_min, version_max",
    );
    let row = |(key, group): &(&Keyed, &GroupWork)| {
        let LockedGroup { group_pk, policy_pk, run, group_id, rules, fill, .. } = &group.locked;
        let ready = match &group.decision {
            Some(GroupDecision::Ready(ready)) => Some(ready),
            Some(GroupDecision::Discard(_)) | None => None,
        };
        let seal = ready.map(ReadyGroup::seal);
        let is_open = fill.state.is_open();
        let mut values = args![
            *group_pk,
            *policy_pk,
            *run,
            key.1.as_bytes(),
            group_id.as_str(),
            group.opened_under,
            group.locked.environment.as_deref(),
            fill.state,
            group.locked.reason.as_deref(),
            group.locked.failed_names(),
            fill.size,
            group.locked.min_size,
            fill.kept,
            fill.masked,
            fill.dropped,
            fill.scoring,
            group.late,
            group.locked.payload_bytes,
            group.locked.opened_at,
            is_open.then(|| {
                let deadline = group.locked.opened_at.plus_seconds(rules.group.timeout_s);
                group.scored_until.map_or(deadline, |scored| scored.max(deadline))
            }),
            (!is_open).then_some(now),
            (fill.state == GroupState::Discarded).then(|| group.locked.purge_at(now)),
            ready_seqs.get(*key).copied(),
            seal.as_ref().map(|seal| &seal[..]),
            0_i64,
            0_i64,
        ];
        values.extend(group::totals_args(&group.locked.totals.unwrap_or_default()));
        values
    };
    INSERT_GROUPS.run(tx, opened.iter().map(row).collect()).await
}

/// Writes the new counts of groups that were stored before.
async fn write_counts(tx: &mut Tx<'_>, stored: &[(&Keyed, &GroupWork)]) -> Result<(), StoreError> {
    const WRITE_COUNTS: Statement = Statement {
        sqlite: "-- write_counts
            UPDATE rollout_group
            SET kept = v.value ->> 1, masked = v.value ->> 2, dropped = v.value ->> 3, late = late + (v.value ->> 4),
                payload_bytes = v.value ->> 5, scoring = v.value ->> 6,
                deadline_us = CASE WHEN deadline_us < v.value ->> 7 THEN v.value ->> 7 ELSE deadline_us END
            FROM json_each($1) AS v
            WHERE rollout_group.group_pk = v.value ->> 0",
        postgres: "-- write_counts
            UPDATE rollout_group
            SET kept = (v ->> 1)::bigint, masked = (v ->> 2)::bigint, dropped = (v ->> 3)::bigint,
                late = late + (v ->> 4)::bigint, payload_bytes = (v ->> 5)::bigint, scoring = (v ->> 6)::bigint,
                deadline_us = CASE WHEN deadline_us < (v ->> 7)::bigint THEN (v ->> 7)::bigint ELSE deadline_us END
            FROM json_array_elements($1::json) AS v
            -- The list of keys shows the planner how few rows these are.
            WHERE rollout_group.group_pk = ANY ($2::bigint[]) AND rollout_group.group_pk = (v ->> 0)::bigint",
    };
    if stored.is_empty() {
        return Ok(());
    }
    let row = |(_, group): &(&Keyed, &GroupWork)| {
        let LockedGroup { group_pk, fill, payload_bytes, .. } = &group.locked;
        // A decided group has no deadline, and nothing is later than none.
        let scored_until = group.scored_until.map_or(0, Timestamp::as_micros);
        (group_pk.0, fill.kept, fill.masked, fill.dropped, group.late, *payload_bytes, fill.scoring, scored_until)
    };
    let rows: Vec<_> = stored.iter().map(row).collect();
    let rows = serde_json::to_string(&rows).expect("tuples of numbers always serialize");
    let keys = key_list(stored.iter().map(|(_, group)| group.locked.group_pk.0));
    tx.guarded(WRITE_COUNTS, args![rows, keys], stored.len()).await
}

fn to_json(value: &(impl Serialize + ?Sized)) -> String {
    serde_json::to_string(value).expect("lists and maps of finite numbers always serialize")
}
