//! Exports: the rollouts of a run, group after group, in pages of bounded size.
//!
//! A page examines a bounded number of groups and of rollouts, and both are found by an index. Groups whose payloads are
//! purged are passed over without reading their rollouts.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{GroupPk, RolloutPk, Run, Step},
    looking::export::{ExportCursor, ExportMember, ExportPage, ExportedPage},
    rules::Rules,
    scores::PRODUCER,
    states::{BatchState, GroupState, RolloutState, rollout_state},
};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use crate::{
    error::StoreError,
    op::Op,
    ops::{evals, read_sealed, scores},
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// Groups that one page examines.
const GROUPS_MAX: u32 = 512;

/// Rollouts of one page.
const ROLLOUTS_MAX: u32 = 1_024;

/// The last rollout that was received, of whichever policy.
pub struct LastRollout;

#[async_trait]
impl Op for LastRollout {
    type Output = RolloutPk;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<RolloutPk, StoreError> {
        const SELECT_LAST_ROLLOUT: Statement = Statement::new(
            "-- select_last_rollout
            SELECT rollout_pk
            FROM rollout
            ORDER BY rollout_pk DESC
            LIMIT 1",
        );
        let last = tx.fetch_optional(SELECT_LAST_ROLLOUT, Vec::new()).await?;
        last.map_or(Ok(RolloutPk(0)), |mut row| row.get("rollout_pk"))
    }
}

/// A group, with the batch that carries it.
struct ExportGroup {
    group_pk: GroupPk,
    run: Run,
    group_id: String,
    state: GroupState,
    size: u32,
    rollouts: u64,
    is_purged: bool,
    batch: Option<BatchState>,
    step: Option<Step>,
    rules: Arc<Rules>,
}

#[async_trait]
impl Op for ExportPage {
    type Output = ExportedPage;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<ExportedPage, StoreError> {
        let found = groups(self, tx).await?;
        let is_last = found.len() < GROUPS_MAX as usize;
        let (mut chosen, mut rollouts, mut purged) = (HashMap::new(), 0, 0);
        let mut end = None;
        for group in found {
            let ExportGroup { group_pk, .. } = group;
            // A group that is purged while it is read is read to its end, so that each of its rollouts is counted once.
            let is_begun = self.from.after.is_some() && self.from.group == group_pk;
            if group.run == self.run && group.is_purged && !is_begun {
                purged += group.rollouts;
            } else if group.run == self.run {
                // At least one group is read, and more while their rollouts fit into the page.
                if !chosen.is_empty() && rollouts + group.rollouts > u64::from(ROLLOUTS_MAX) {
                    return page(self, tx, chosen, purged, end).await;
                }
                rollouts += group.rollouts;
                chosen.insert(group_pk, group);
            }
            end = Some(group_pk);
        }
        let end = if is_last { None } else { end };
        page(self, tx, chosen, purged, end).await
    }
}

/// The next groups of the policy, of all runs.
async fn groups(export: &ExportPage, tx: &mut Tx<'_>) -> Result<Vec<ExportGroup>, StoreError> {
    const SELECT_EXPORT_GROUPS: Statement = Statement::new(
        "-- select_export_groups
        SELECT g.group_pk, g.run, g.group_id, g.state, g.size, g.kept + g.masked + g.dropped + g.late AS rollouts,
            g.purged_us, g.rules_pk, b.state AS batch_state, b.step
        FROM rollout_group AS g
        LEFT JOIN batch AS b ON b.batch_pk = g.batch_pk AND g.state = 'batched'
        WHERE g.policy_pk = $1 AND g.group_pk >= $2
        ORDER BY g.group_pk
        LIMIT $3",
    );
    let ExportCursor { group, after } = export.from;
    let first = if after.is_some() { group.0 } else { group.0.saturating_add(1) };
    let rows = tx.fetch_all(SELECT_EXPORT_GROUPS, args![export.policy_pk, first, GROUPS_MAX]).await?;
    let mut groups = Vec::with_capacity(rows.len());
    for mut row in rows {
        let rules = tx.rules(row.get("rules_pk")?).await?;
        groups.push(read_group(row, rules)?);
    }
    Ok(groups)
}

/// The rollouts of the groups. `end` is the last group that was examined, if more groups follow.
async fn page(
    export: &ExportPage,
    tx: &mut Tx<'_>,
    groups: HashMap<GroupPk, ExportGroup>,
    purged: u64,
    end: Option<GroupPk>,
) -> Result<ExportedPage, StoreError> {
    const SELECT_EXPORT_ROLLOUTS: Statement = among_keys!(
        "-- select_export_rollouts
        SELECT rollout_pk, group_pk, rollout_id, execution, verdict, reason, reward, advantage, policy_version,
            version_assumed, segments, tokens, unpacked_bytes, trained_spans, seal, received_us
        FROM rollout
        WHERE group_pk",
        "
            AND (group_pk > $2 OR rollout_pk > $3) AND rollout_pk <= $4
        ORDER BY group_pk, rollout_pk
        LIMIT $5"
    );
    let ExportCursor { group, after } = export.from;
    let keys = key_list(groups.keys().map(|group| group.0));
    let values = args![keys, group, after.unwrap_or(RolloutPk(0)), export.last, ROLLOUTS_MAX];
    let rows = if groups.is_empty() { Vec::new() } else { tx.fetch_all(SELECT_EXPORT_ROLLOUTS, values).await? };
    let is_cut = rows.len() == ROLLOUTS_MAX as usize;
    let mut next = end.map(|group| ExportCursor { group, after: None });
    let mut waiting = HashSet::new();
    if groups.values().any(|group| group.state.is_open()) {
        let keys = groups.values().filter(|group| group.state.is_open()).map(|group| group.group_pk.0);
        waiting = scores::waiting_in(tx, keys.collect()).await?;
    }
    let mut members = Vec::with_capacity(rows.len());
    for mut row in rows {
        let group_pk: GroupPk = row.get("group_pk")?;
        let missing = || StoreError::Corrupt("a rollout of another group was read".to_owned());
        let member = read_member(row, groups.get(&group_pk).ok_or_else(missing)?, &waiting)?;
        if is_cut {
            next = Some(ExportCursor { group: group_pk, after: Some(member.row.rollout_pk) });
        }
        members.push(member);
    }
    if export.evaluates {
        let mut found = evals::of_rollouts(tx, members.iter().map(|member| member.row.rollout_pk.0).collect()).await?;
        for member in &mut members {
            member.evaluates = found.remove(&member.row.rollout_pk);
        }
    }
    let mut given = scores::applied(tx, members.iter().map(|member| member.row.rollout_pk)).await?;
    for member in &mut members {
        let mut given = given.remove(&member.row.rollout_pk).unwrap_or_default();
        // A rollout that waits was not judged by what others gave.
        given.retain(|score| member.state != RolloutState::Scoring || score.scorer == PRODUCER);
        member.scores = given;
    }
    Ok(ExportedPage { members, purged, next })
}

fn read_group(mut row: Row, rules: Arc<Rules>) -> Result<ExportGroup, StoreError> {
    Ok(ExportGroup {
        group_pk: row.get("group_pk")?,
        run: row.get("run")?,
        group_id: row.get("group_id")?,
        state: row.get("state")?,
        size: row.get("size")?,
        rollouts: row.get("rollouts")?,
        is_purged: row.get::<Option<Timestamp>>("purged_us")?.is_some(),
        batch: row.get("batch_state")?,
        step: row.get("step")?,
        rules,
    })
}

fn read_member(mut row: Row, group: &ExportGroup, waiting: &HashSet<RolloutPk>) -> Result<ExportMember, StoreError> {
    let sealed = read_sealed(&mut row, group.group_id.clone())?;
    let verdict = sealed.verdict;
    let lacks_scores = waiting.contains(&sealed.rollout_pk);
    let contradict = || StoreError::Corrupt("a rollout's group and batch contradict each other".to_owned());
    let was_consumed = matches!(group.batch, Some(BatchState::Trained | BatchState::Checkpointed));
    Ok(ExportMember {
        row: sealed,
        group_size: group.size,
        execution_id: row.get("execution")?,
        reason: row.get("reason")?,
        state: rollout_state(verdict, lacks_scores, group.state, group.batch).ok_or_else(contradict)?,
        step: group.step.filter(|_| verdict.takes_place() && was_consumed),
        advantage: row.get("advantage")?,
        version_assumed: row.get("version_assumed")?,
        received_at: row.get("received_us")?,
        rules: Arc::clone(&group.rules),
        evaluates: None,
        scores: Vec::new(),
    })
}
