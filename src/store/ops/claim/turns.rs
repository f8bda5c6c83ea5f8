//! Batches in which environments take turns: the ready groups of each environment, and what it carries.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::ready::{Ready, fresh_of_environment, take_out_left_behind};
use crate::{
    buffer::{
        batch::{CarriedShares, EnvironmentLine, Turns, first_reads, take_turns},
        ids::{PolicyPk, Run},
        port::{Claim, Policy, StoreError},
    },
    store::sql::{Statement, Tx, args},
};

/// The most environments without rules whose groups a batch considers. If more of them have ready groups, the next batch
/// considers those that come next in the order of their labels.
const OTHERS_MAX: u32 = 256;

/// What the row of a policy keeps about its environments.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Kept {
    run: i64,
    carried: CarriedShares,
    /// The label after which the next batch looks for environments; empty if the last one considered all.
    after: String,
}

/// Reads what environments carry in the current run.
pub(in crate::store::ops) async fn carried(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
) -> Result<CarriedShares, StoreError> {
    Ok(kept(tx, policy, run).await?.carried)
}

async fn kept(tx: &mut Tx<'_>, policy: PolicyPk, run: Run) -> Result<Kept, StoreError> {
    const SELECT_SHARES: Statement = Statement::new(
        "-- select_shares
        SELECT shares
        FROM policy
        WHERE policy_pk = $1",
    );
    let shares: String = tx.fetch_one(SELECT_SHARES, args![policy]).await?.get("shares")?;
    let kept: Kept = serde_json::from_str(&shares).map_err(|error| StoreError::Corrupt(format!("shares: {error}")))?;
    Ok(if kept.run == run.0 { kept } else { Kept { run: run.0, ..Kept::default() } })
}

/// The groups of a new batch, if there are enough.
pub(super) async fn select(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    passed_over: &mut u64,
) -> Result<Option<Vec<Ready>>, StoreError> {
    const SET_SHARES: Statement = Statement::new(
        "-- set_shares
        UPDATE policy
        SET shares = $2
        WHERE policy_pk = $1",
    );
    let rules = &policy.rules.batch;
    // The groups of an environment are not read further than its turns go, so stale ones would stay behind them.
    take_out_left_behind(tx, policy, claim.now, passed_over).await?;
    let mut kept = kept(tx, policy.policy_pk, policy.run).await?;
    let (labels, after) = labels(tx, policy, &kept.after).await?;
    let most = claim.size.candidates(rules);
    let mut lines = Vec::new();
    for (label, limit) in labels.iter().zip(first_reads(rules, most, &labels)) {
        let ready = fresh_of_environment(tx, policy, claim.now, label, limit, passed_over).await?;
        lines.push((limit, ready));
    }
    let (order, carried) = loop {
        let known: Vec<EnvironmentLine<'_>> = labels
            .iter()
            .zip(&lines)
            .map(|(environment, (limit, ready))| EnvironmentLine {
                environment,
                ready: ready.iter().map(Ready::candidate).collect(),
                is_all: ready.len() < *limit as usize || *limit >= most,
            })
            .collect();
        match take_turns(rules, &claim.size, claim.partial, &kept.carried, &known) {
            Turns::Batch(order, carried) => break (order, carried),
            Turns::Nothing => return Ok(None),
            Turns::More(line) => {
                let limit = lines[line].0.saturating_mul(2).min(most);
                let ready = fresh_of_environment(tx, policy, claim.now, &labels[line], limit, passed_over).await?;
                lines[line] = (limit, ready);
            }
        }
    };
    (kept.carried, kept.after) = (carried, after);
    let text = serde_json::to_string(&kept).expect("numbers and labels always serialize");
    tx.guarded(SET_SHARES, args![policy.policy_pk, text], 1).await?;
    let mut lines: Vec<_> = lines.into_iter().map(|(_, ready)| ready.into_iter()).collect();
    Ok(Some(order.into_iter().filter_map(|line| lines[line].next()).collect()))
}

/// The labels of the environments that have rules or ready groups, and the label after which to look next, if there are
/// too many.
async fn labels(tx: &mut Tx<'_>, policy: &Policy, after: &str) -> Result<(Vec<String>, String), StoreError> {
    // Finds the next label with one search in the index, whatever the number of groups with the same label.
    const SELECT_LABELS: Statement = Statement::new(
        "-- select_labels
        WITH RECURSIVE found (label, place) AS (
            SELECT (
                SELECT COALESCE(environment, '')
                FROM rollout_group
                WHERE policy_pk = $1 AND run = $2 AND state = 'ready' AND COALESCE(environment, '') >= $3
                ORDER BY COALESCE(environment, '')
                LIMIT 1
            ), 1
            UNION ALL
            SELECT (
                SELECT COALESCE(environment, '')
                FROM rollout_group
                WHERE policy_pk = $1 AND run = $2 AND state = 'ready' AND COALESCE(environment, '') > found.label
                ORDER BY COALESCE(environment, '')
                LIMIT 1
            ), found.place + 1
            FROM found
            WHERE found.label IS NOT NULL AND found.place < $4
        )
        SELECT label
        FROM found
        WHERE label IS NOT NULL",
    );
    let named = &policy.rules.batch.environments;
    let most = OTHERS_MAX + named.len() as u32;
    let mut labels: BTreeSet<String> = named.keys().cloned().collect();
    // After the last label, the search goes on with the first one.
    for from in [Some(after), (!after.is_empty()).then_some("")].into_iter().flatten() {
        let rows = tx.fetch_all(SELECT_LABELS, args![policy.policy_pk, policy.run, from, most]).await?;
        let found = rows.into_iter().map(|mut row| row.get("label")).collect::<Result<Vec<String>, _>>()?;
        let last = found.last().filter(|_| found.len() == most as usize).cloned();
        labels.extend(found);
        if let Some(last) = last {
            return Ok((labels.into_iter().collect(), last));
        }
    }
    Ok((labels.into_iter().collect(), String::new()))
}
