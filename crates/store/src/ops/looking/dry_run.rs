//! The groups that were decided last, with their rollouts, for dry runs of filters.
//!
//! A page examines a bounded number of groups and of rollouts, and both are found by an index.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{GroupPk, PolicyPk, Version},
    looking::dry_run::{FindPastGroups, PastGroup, PastGroups, PastRollout},
    reasons,
    rules::Rules,
    states::{GroupState, Verdict},
};
use std::collections::HashMap;

use crate::{
    error::StoreError,
    op::Op,
    ops::{names, trained_spans},
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// Rollouts of one page. A group with more is passed over.
const ROLLOUTS_MAX: u64 = 4_096;

#[async_trait]
impl Op for FindPastGroups {
    type Output = PastGroups;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<PastGroups, StoreError> {
        const SELECT_PAST_GROUPS: Statement = Statement::new(
            "-- select_past_groups
            SELECT group_pk, run, group_id, rules_pk, environment, state, reason, size, min_size,
                kept + masked + dropped + late AS rollouts, opened_us, decided_us, ready_seq, samples
            FROM rollout_group
            WHERE policy_pk = $1 AND group_pk < $2
            ORDER BY group_pk DESC
            LIMIT $3",
        );
        let rows = tx.fetch_all(SELECT_PAST_GROUPS, args![self.policy_pk, self.before, self.examined_max]).await?;
        let mut page = PastGroups { groups: Vec::new(), examined: 0, too_large: 0, next: None };
        let is_last = rows.len() < self.examined_max as usize;
        let (mut keys, mut rollouts) = (Vec::new(), 0);
        let mut is_cut = false;
        for mut row in rows {
            let group_pk: GroupPk = row.get("group_pk")?;
            let of_group: u64 = row.get("rollouts")?;
            if let Some(group) = read_group(self, tx, row).await? {
                if of_group > ROLLOUTS_MAX {
                    page.too_large += 1;
                } else if rollouts + of_group > ROLLOUTS_MAX || page.groups.len() == self.limit as usize {
                    is_cut = true;
                    break;
                } else {
                    rollouts += of_group;
                    keys.push(group_pk);
                    page.groups.push(group);
                }
            }
            page.examined += 1;
            page.next = Some(group_pk);
        }
        page.next = page.next.filter(|_| is_cut || !is_last);
        let mut members = members(tx, &keys).await?;
        for (group_pk, group) in keys.iter().zip(&mut page.groups) {
            group.rollouts = members.remove(group_pk).unwrap_or_default();
            // On Postgres, a rollout can get its key before and its lock after the rollout that completes the group.
            group.rollouts.sort_by_key(|rollout| rollout.verdict == Verdict::Late);
        }
        Ok(page)
    }
}

/// A group without its rollouts; none if it is not wanted.
async fn read_group(find: &FindPastGroups, tx: &mut Tx<'_>, mut row: Row) -> Result<Option<PastGroup>, StoreError> {
    let (environment, state): (Option<String>, GroupState) = (row.get("environment")?, row.get("state")?);
    let is_wanted = find.environment.is_none() || find.environment == environment;
    let decided_at: Option<Timestamp> = row.get("decided_us")?;
    let (Some(decided_at), false) = (decided_at, state.is_open() || !is_wanted || row.get::<i64>("run")? != find.run.0)
    else {
        return Ok(None);
    };
    let rules = tx.rules(row.get("rules_pk")?).await?;
    let reason: Option<String> = row.get("reason")?;
    let became_ready = row.get::<Option<i64>>("ready_seq")?.is_some();
    if !became_ready && !is_by_rules(reason.as_deref(), row.get("samples")?, &rules) {
        return Ok(None);
    }
    Ok(Some(PastGroup {
        group_id: row.get("group_id")?,
        size: row.get("size")?,
        min_size: row.get("min_size")?,
        discarded: reason.filter(|_| !became_ready).or_else(|| (!became_ready).then(String::new)),
        environment,
        rules,
        opened_at: row.get("opened_us")?,
        decided_at,
        rollouts: Vec::new(),
    }))
}

/// Whether rules discarded a group that was never ready: an operator or a reset could have discarded it while it was open,
/// and then it has no sums.
fn is_by_rules(reason: Option<&str>, samples: u64, rules: &Rules) -> bool {
    let is_reason = |reason: &str| {
        [reasons::INCOMPLETE, reasons::EXHAUSTED, reasons::ALL_MASKED].contains(&reason)
            || rules.filter.iter().any(|filter| filter.name == reason)
    };
    samples > 0 || reason.is_some_and(is_reason)
}

/// The rollouts of groups, in the order of their keys.
async fn members(tx: &mut Tx<'_>, groups: &[GroupPk]) -> Result<HashMap<GroupPk, Vec<PastRollout>>, StoreError> {
    const SELECT_PAST_ROLLOUTS: Statement = among_keys!(
        "-- select_past_rollouts
        SELECT rollout_pk, group_pk, rollout_id, verdict, reason, failed_filters, reward, policy_version,
            version_assumed, segments, tokens, trained_tokens, trained_spans, status, response_tokens,
            max_segment_tokens, unpacked_bytes, received_us
        FROM rollout
        WHERE group_pk",
        "
        ORDER BY group_pk, rollout_pk
        LIMIT $2"
    );
    let mut found: HashMap<GroupPk, Vec<PastRollout>> = HashMap::new();
    if groups.is_empty() {
        return Ok(found);
    }
    let keys = key_list(groups.iter().map(|group| group.0));
    for mut row in tx.fetch_all(SELECT_PAST_ROLLOUTS, args![keys, ROLLOUTS_MAX]).await? {
        let group: GroupPk = row.get("group_pk")?;
        found.entry(group).or_default().push(read_rollout(row)?);
    }
    Ok(found)
}

fn read_rollout(mut row: Row) -> Result<PastRollout, StoreError> {
    // If stale tokens were masked, the column has only the tokens that are left.
    let spans = trained_spans(&mut row)?;
    let sent = spans.map(|spans| spans.iter().map(|span| span.tokens).sum());
    let left: u64 = row.get("trained_tokens")?;
    Ok(PastRollout {
        rollout_pk: row.get("rollout_pk")?,
        rollout_id: row.get("rollout_id")?,
        verdict: row.get("verdict")?,
        reason: row.get("reason")?,
        failed_filters: names(row.get("failed_filters")?),
        reward: row.get("reward")?,
        policy_version: row.get("policy_version")?,
        version_assumed: row.get("version_assumed")?,
        segments: row.get("segments")?,
        tokens: row.get("tokens")?,
        trained_tokens: sent.unwrap_or(left),
        status: row.get("status")?,
        response_tokens: row.get("response_tokens")?,
        max_segment_tokens: row.get("max_segment_tokens")?,
        unpacked_bytes: row.get("unpacked_bytes")?,
        received_at: row.get("received_us")?,
    })
}

/// The versions of a policy and when each was published, in the order of the versions.
pub struct ListPublished(pub PolicyPk);

#[async_trait]
impl Op for ListPublished {
    type Output = Vec<(Version, Timestamp)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Old versions are thinned out, so this is bounded.
        const LIST_PUBLISHED: Statement = Statement::new(
            "-- list_published
            SELECT version, published_us
            FROM version
            WHERE policy_pk = $1
            ORDER BY version",
        );
        let rows = tx.fetch_all(LIST_PUBLISHED, args![self.0]).await?;
        rows.into_iter().map(|mut row| Ok((row.get("version")?, row.get("published_us")?))).collect()
    }
}
