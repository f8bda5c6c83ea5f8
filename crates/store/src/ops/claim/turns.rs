//! Batches in which environments take turns: the ready groups of each environment, and what it carries.

use forebay_domain::{
    batch::shares::{CarriedShares, EnvironmentLine, Turns, first_reads, take_turns, weight},
    ids::{PolicyPk, Run},
    lease::Claim,
    policies::Policy,
};
use forebay_wire::BatchRules;
use serde::{Deserialize, Serialize};

use super::ready::{Ready, fresh_groups, fresh_of_environment, take_out_left_behind};
use crate::{
    error::StoreError,
    sql::{Statement, Tx, args},
};

/// The most environments without rules that a batch considers. Such environments have equal shares. If more of them have
/// ready groups, they take turns over the batches in the order of their labels: each gets its share, and nothing has to be
/// kept for each of them. Only if the groups of all environments that were considered are too few for a batch, groups of
/// the others follow in the order of the line.
const OTHERS_MAX: u32 = 256;

/// Stands for all environments without rules, if there are too many. No label has a control character.
const OTHERS: &str = "\u{1}";

/// What the row of a policy keeps about its environments.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Kept {
    run: i64,
    carried: CarriedShares,
    /// The last environment without rules that had a turn; empty if the last batch considered all.
    after: String,
}

/// Reads what environments carry in the current run.
pub(in crate::ops) async fn carried(tx: &mut Tx<'_>, policy: PolicyPk, run: Run) -> Result<CarriedShares, StoreError> {
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

/// Notes what environments carry after a batch.
pub(super) async fn keep(tx: &mut Tx<'_>, policy: PolicyPk, kept: &Kept) -> Result<(), StoreError> {
    const SET_SHARES: Statement = Statement::new(
        "-- set_shares
        UPDATE policy
        SET shares = $2
        WHERE policy_pk = $1",
    );
    let text = serde_json::to_string(kept).expect("numbers and labels always serialize");
    tx.guarded(SET_SHARES, args![policy, text], 1).await
}

/// The groups of a new batch, if there are enough, and what is to be [kept](keep) with it. `begin` is where the line of all
/// ready groups begins.
pub(super) async fn select(
    tx: &mut Tx<'_>,
    policy: &Policy,
    claim: &Claim,
    begin: i64,
    passed_over: &mut u64,
) -> Result<Option<(Vec<Ready>, Kept)>, StoreError> {
    let rules = &policy.rules.batch;
    // The groups of an environment are not read further than its turns go, so stale ones would stay behind them.
    take_out_left_behind(tx, policy, claim.now, passed_over).await?;
    let mut kept = kept(tx, policy.policy_pk, policy.run).await?;
    let (named, others, is_cut) = labels(tx, policy, &kept.after).await?;
    let most = claim.size.candidates(rules);
    let labels: Vec<String> = named.iter().copied().chain(&others).cloned().collect();
    let limits = first_reads(rules, most, &labels);
    let (of_named, of_others) = limits.split_at(named.len());
    let mut lines = Vec::new();
    for (label, limit) in named.iter().zip(of_named) {
        lines.push(Line::read(tx, policy, claim, label, *limit, most, passed_over).await?);
    }
    let limit = of_others.iter().copied().max().unwrap_or(most);
    if is_cut {
        lines.push(Line::of_all(tx, policy, claim, &others, limit, most, passed_over).await?);
    } else {
        for label in &others {
            lines.push(Line::read(tx, policy, claim, label, limit, most, passed_over).await?);
        }
        lines.sort_by(|one, other| one.label.cmp(other.label));
    }
    let mut has_rest = !is_cut;
    let (order, carried) = loop {
        let known: Vec<EnvironmentLine<'_>> = lines.iter().map(|line| line.known(rules)).collect();
        let turns = take_turns(rules, &claim.size, claim.partial, &kept.carried, &known);
        let groups: usize = lines.iter().map(|line| line.ready.len()).sum();
        match turns {
            Turns::More(at) => {
                let Line { label, limit, .. } = lines[at];
                let limit = limit.saturating_mul(2).min(most);
                lines[at] = if label == OTHERS {
                    has_rest = false;
                    Line::of_all(tx, policy, claim, &others, limit, most, passed_over).await?
                } else {
                    Line::read(tx, policy, claim, label, limit, most, passed_over).await?
                };
            }
            Turns::Batch(order, carried) if has_rest || order.len() < groups => break (order, carried),
            Turns::Nothing if has_rest => return Ok(None),
            // What was considered may be too little although there are other groups.
            Turns::Batch(..) | Turns::Nothing => {
                has_rest = true;
                let limit = most.saturating_add(groups as u32);
                let mut rest = fresh_groups(tx, policy, claim.now, begin, limit, passed_over).await?;
                rest.retain(|group| !labels.iter().any(|label| label == group.environment()));
                lines.iter_mut().filter(|line| line.label == OTHERS).for_each(|line| line.ready.append(&mut rest));
            }
        }
    };
    let taken = order.iter().filter(|at| lines[**at].label == OTHERS).count();
    kept.after = match taken.min(others.len()).checked_sub(1) {
        _ if !is_cut => String::new(),
        Some(last) => others[last].clone(),
        None => kept.after,
    };
    kept.carried = carried;
    let mut lines: Vec<_> = lines.into_iter().map(|line| line.ready.into_iter()).collect();
    Ok(Some((order.into_iter().filter_map(|line| lines[line].next()).collect(), kept)))
}

/// Ready groups that were read: of an environment, or of all environments without rules.
struct Line<'l> {
    label: &'l str,
    /// The number of environments.
    environments: usize,
    /// The most groups of each that were read.
    limit: u32,
    ready: Vec<Ready>,
    is_all: bool,
}

impl<'l> Line<'l> {
    async fn read(
        tx: &mut Tx<'_>,
        policy: &Policy,
        claim: &Claim,
        label: &'l str,
        limit: u32,
        most: u32,
        passed_over: &mut u64,
    ) -> Result<Self, StoreError> {
        let ready = fresh_of_environment(tx, policy, claim.now, label, limit, passed_over).await?;
        let is_all = ready.len() < limit as usize || limit >= most;
        Ok(Self { label, environments: 1, limit, ready, is_all })
    }

    /// The groups of environments that have equal shares: first one of each, then a second one of each, and so on.
    async fn of_all(
        tx: &mut Tx<'_>,
        policy: &Policy,
        claim: &Claim,
        labels: &[String],
        limit: u32,
        most: u32,
        passed_over: &mut u64,
    ) -> Result<Self, StoreError> {
        let mut all = Self { label: OTHERS, environments: labels.len(), limit, ready: Vec::new(), is_all: true };
        let mut rounds = Vec::new();
        for label in labels {
            let line = Line::read(tx, policy, claim, label, limit, most, passed_over).await?;
            all.is_all &= line.is_all;
            rounds.extend(line.ready.into_iter().enumerate());
        }
        // The sort keeps the order of the labels within a round.
        rounds.sort_by_key(|(round, _)| *round);
        all.ready = rounds.into_iter().map(|(_, group)| group).collect();
        Ok(all)
    }

    fn known(&self, rules: &BatchRules) -> EnvironmentLine<'_> {
        EnvironmentLine {
            environment: self.label,
            weight: weight(rules, self.label) * self.environments as f64,
            ready: self.ready.iter().map(Ready::candidate).collect(),
            is_all: self.is_all,
        }
    }
}

/// The labels of the environments that a batch considers: those that have rules, and others that have ready groups. If
/// there are too many others, they begin behind a label and go on with the first one, and the last value is true.
async fn labels<'p>(
    tx: &mut Tx<'_>,
    policy: &'p Policy,
    after: &str,
) -> Result<(Vec<&'p String>, Vec<String>, bool), StoreError> {
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
    // The label after which the search begins comes last, and one more label shows that there are too many.
    let most = OTHERS_MAX + named.len() as u32 + 2;
    let mut others: Vec<String> = Vec::new();
    for from in [Some(after), (!after.is_empty()).then_some("")].into_iter().flatten() {
        let rows = tx.fetch_all(SELECT_LABELS, args![policy.policy_pk, policy.run, from, most]).await?;
        for mut row in rows {
            let label: String = row.get("label")?;
            let is_last = !from.is_empty() && label == after;
            if !is_last && !named.contains_key(&label) && !others.contains(&label) {
                others.push(label);
            }
        }
    }
    let is_cut = others.len() > OTHERS_MAX as usize;
    others.truncate(OTHERS_MAX as usize);
    Ok((named.keys().collect(), others, is_cut))
}
