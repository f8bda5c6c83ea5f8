//! Metrics for the trainer's log: about a new batch, and about the rollouts received since the previous one.

use std::collections::BTreeMap;

use forebay_domain::{
    batch::{REWARD_TRAINED, component_metric},
    ids::Version,
    policies::Policy,
    tally::Tally,
};
use serde::{Deserialize, Serialize};

use super::{line::Line, ready::Ready};
use crate::{
    error::StoreError,
    sql::{Statement, Tx, args, key_list},
};

/// The most reward components that a batch has metrics of: those that the most rollouts have.
const COMPONENTS_MAX: i64 = 64;

/// The tallies when the previous batch was cut.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct TallyMark {
    rewards: i64,
    reward_sum: f64,
    dropped: BTreeMap<String, i64>,
}

/// The metrics of a new batch of these groups. The line notes the tallies for the next batch.
pub(super) async fn metrics(
    tx: &mut Tx<'_>,
    policy: &Policy,
    groups: &[Ready],
    line: &mut Line,
) -> Result<BTreeMap<String, f64>, StoreError> {
    const SELECT_FLOW: Statement = Statement::new(
        "-- select_flow
        SELECT name, CAST(SUM(value) AS BIGINT) AS value, SUM(amount) AS amount
        FROM tally_now
        WHERE policy_pk = $1 AND (name = 'reward' OR name LIKE 'dropped.%')
        GROUP BY name",
    );
    let before: TallyMark = serde_json::from_str(&line.tally_mark).unwrap_or_default();
    let mut now = TallyMark::default();
    for mut row in tx.fetch_all(SELECT_FLOW, args![policy.policy_pk]).await? {
        let (name, value): (String, i64) = (row.get("name")?, row.get("value")?);
        match Tally::parse(&name) {
            Some(Tally::Dropped(rule)) => {
                now.dropped.insert(rule, value);
            }
            Some(Tally::Reward) => (now.rewards, now.reward_sum) = (value, row.get("amount")?),
            _ => {}
        }
    }
    let mut metrics = flow_metrics(&before, &now);
    metrics.extend(batch_metrics(policy.version, groups));
    metrics.extend(environment_metrics(policy, groups));
    metrics.extend(component_metrics(tx, groups).await?);
    let masked: u64 = groups.iter().filter_map(|group| group.masking.as_ref()).map(|masking| masking.tokens).sum();
    if masked > 0 {
        metrics.insert("staleness/masked-tokens".to_owned(), masked as f64);
    }
    line.tally_mark = serde_json::to_string(&now).expect("names and finite numbers always serialize");
    Ok(metrics)
}

fn flow_metrics(before: &TallyMark, now: &TallyMark) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let rewards = now.rewards - before.rewards;
    if rewards > 0 {
        metrics.insert("reward/all".to_owned(), (now.reward_sum - before.reward_sum) / rewards as f64);
    }
    for (rule, total) in &now.dropped {
        let dropped = total - before.dropped.get(rule).copied().unwrap_or(0);
        if dropped > 0 {
            metrics.insert(format!("dropped/{rule}"), dropped as f64);
        }
    }
    metrics
}

fn batch_metrics(current: Version, groups: &[Ready]) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let rewards: i64 = groups.iter().map(|group| group.reward_count).sum();
    let reward_sum: f64 = groups.iter().map(|group| group.reward_sum).sum();
    if rewards > 0 && reward_sum.is_finite() {
        metrics.insert(REWARD_TRAINED.to_owned(), reward_sum / rewards as f64);
    }
    let staleness: Vec<i64> = groups.iter().map(|group| group.staleness(current)).collect();
    let mean = staleness.iter().sum::<i64>() as f64 / staleness.len().max(1) as f64;
    metrics.insert("staleness/mean".to_owned(), mean);
    metrics.insert("staleness/max".to_owned(), staleness.iter().copied().max().unwrap_or(0) as f64);
    metrics
}

/// The groups of each environment that has rules.
fn environment_metrics<'p>(policy: &'p Policy, groups: &'p [Ready]) -> impl Iterator<Item = (String, f64)> + 'p {
    policy.rules.batch.environments.keys().map(|label| {
        let of = groups.iter().filter(|group| group.candidate().environment == Some(label.as_str()));
        (format!("environments/{label}/groups"), of.count() as f64)
    })
}

/// The mean of each reward component over the kept rollouts of these groups that have it. A sum may be too large for a
/// double: in SQLite the mean is then not finite and is left out, and Postgres adds decimals, which have no such limit.
async fn component_metrics(tx: &mut Tx<'_>, groups: &[Ready]) -> Result<Vec<(String, f64)>, StoreError> {
    const SELECT_COMPONENTS: Statement = Statement {
        sqlite: "-- select_components
            SELECT part.key AS name, AVG(part.value) AS mean
            FROM rollout AS r, json_each(r.components) AS part
            WHERE r.group_pk IN (SELECT value FROM json_each($1)) AND r.verdict = 'kept' AND r.components IS NOT NULL
            GROUP BY part.key
            ORDER BY COUNT(*) DESC, part.key
            LIMIT $2",
        postgres: "-- select_components
            SELECT part.key AS name, CAST(AVG(CAST(part.value AS NUMERIC)) AS DOUBLE PRECISION) AS mean
            -- One lookup in the index for each key: without statistics, the planner may read the whole table for all.
            FROM unnest($1::bigint[]) AS k (group_pk)
            CROSS JOIN LATERAL (
                SELECT components
                FROM rollout
                WHERE group_pk = k.group_pk AND verdict = 'kept' AND components IS NOT NULL
                OFFSET 0
            ) AS r
            CROSS JOIN LATERAL json_each_text(CAST(r.components AS JSON)) AS part
            GROUP BY part.key
            ORDER BY COUNT(*) DESC, part.key COLLATE \"C\"
            LIMIT $2",
    };
    let keys = key_list(groups.iter().map(|group| group.group_pk.0));
    let mut means = Vec::new();
    for mut row in tx.fetch_all(SELECT_COMPONENTS, args![keys, COMPONENTS_MAX]).await? {
        let (name, mean): (String, Option<f64>) = (row.get("name")?, row.get("mean")?);
        means.extend(mean.filter(|mean| mean.is_finite()).map(|mean| (component_metric(&name), mean)));
    }
    Ok(means)
}
