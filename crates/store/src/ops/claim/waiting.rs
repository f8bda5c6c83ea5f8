//! `staleness.action = "wait"`: rollouts that are under way and would be too old for any batch after this one.

use std::{cmp::min, collections::HashMap};

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, Run, Version},
    policies::Policy,
    session::SessionSpec,
    staleness::{UnderWay, WaitedFor, last_chance},
};

use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

/// Whether no batch may be granted now. Since when that is so is noted once per version: each version has its own rollouts
/// with a last chance, so that none is waited for longer than the rules say.
pub(super) async fn pauses(tx: &mut Tx<'_>, policy: &Policy, now: Timestamp) -> Result<bool, StoreError> {
    const SET_PAUSE: Statement = Statement::new(
        "-- set_pause
        UPDATE policy
        SET pause_version = $2, pause_us = $3
        WHERE policy_pk = $1",
    );
    let rules = &policy.rules.staleness;
    let Some(chance) = last_chance(rules, policy.version) else { return Ok(false) };
    if policy.pause.is_some_and(|pause| pause.until(rules) <= now) {
        return Ok(false);
    }
    let live = live(tx, policy.policy_pk, policy.run, chance, now).await?;
    if !live.is_empty() && policy.pause.is_none() {
        tx.guarded(SET_PAUSE, args![policy.policy_pk, policy.version, now], 1).await?;
    }
    Ok(!live.is_empty())
}

/// What the next batch waits for, if a claim found that it waits.
pub struct ReadWaitedFor {
    pub policy: Policy,
    pub now: Timestamp,
}

#[async_trait]
impl Op for ReadWaitedFor {
    type Output = Option<WaitedFor>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Policy { policy_pk, run, version, pause, ref rules, .. } = self.policy;
        let (Some(chance), Some(pause)) = (last_chance(&rules.staleness, version), pause) else { return Ok(None) };
        let until = pause.until(&rules.staleness);
        if until <= self.now {
            return Ok(None);
        }
        let live = live(tx, policy_pk, run, chance, self.now).await?;
        let Some(first) = live.iter().min_by_key(|each| each.began) else { return Ok(None) };
        let rollouts = live.iter().map(|each| each.rollouts).sum();
        let Some(named) = name(tx, first).await? else { return Ok(None) };
        Ok(Some(WaitedFor { first: named, began: first.began, rollouts, until }))
    }
}

/// Rollouts that are under way.
struct Live {
    kind: String,
    /// Key of the session, of the admission or of the rollout.
    key: i64,
    group: Option<Vec<u8>>,
    /// The oldest of its version and those of its group's rollouts that have arrived.
    oldest: Version,
    began: Timestamp,
    rollouts: u64,
}

/// What is under way and has its last chance now: as old as this version, alone or with its group. What is older is lost
/// already.
async fn live(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    chance: Version,
    now: Timestamp,
) -> Result<Vec<Live>, StoreError> {
    // A parked session has no agent, and an admission of a decided group is of an agent that was restarted. The room of a
    // session is no admission of its own.
    const SELECT_LAST_CHANCES: Statement = Statement::new(
        "-- select_last_chances
        WITH aging AS (
            SELECT g.group_key, MIN(r.version_min) AS version
            FROM rollout_group AS g
            JOIN rollout AS r ON r.group_pk = g.group_pk
            WHERE g.policy_pk = $1 AND g.run = $2 AND g.state = 'open' AND r.verdict = 'kept' AND r.version_min <= $3
            GROUP BY g.group_key
        ),
        live AS (
            SELECT 'session' AS kind, sp.session_pk AS pk, sp.group_key, COALESCE(sp.oldest_version, sp.version) AS version,
                s.opened_us AS began_us, 1 AS rollouts
            FROM session_policy AS sp
            JOIN session AS s ON s.session_pk = sp.session_pk
            WHERE sp.policy_pk = $1 AND sp.run = $2 AND sp.is_live = 1 AND sp.is_parked = 0
            UNION ALL
            SELECT 'admission', admission_pk, group_key, version, granted_us, granted - used
            FROM admission
            WHERE policy_pk = $1 AND expires_us > $4 AND used < granted AND granted_us IS NOT NULL
            UNION ALL
            SELECT 'scoring', sc.rollout_pk, g.group_key, r.version_min, sc.since_us, 1
            FROM scoring AS sc
            JOIN rollout AS r ON r.rollout_pk = sc.rollout_pk
            JOIN rollout_group AS g ON g.group_pk = sc.group_pk
            WHERE sc.policy_pk = $1 AND g.run = $2
        )
        SELECT live.kind, live.pk, live.group_key, live.version, live.began_us, CAST(live.rollouts AS BIGINT) AS rollouts,
            aging.version AS of_group
        FROM live
        LEFT JOIN aging ON aging.group_key = live.group_key
        WHERE (live.version <= $3 OR aging.version IS NOT NULL)
            AND NOT EXISTS (
                SELECT 1
                FROM rollout_group AS d
                WHERE d.policy_pk = $1 AND d.run = $2 AND d.group_key = live.group_key AND d.state <> 'open'
            )",
    );
    let rows = tx.fetch_all(SELECT_LAST_CHANCES, args![policy, run, chance, now]).await?;
    let mut live = rows.into_iter().map(read).collect::<Result<Vec<Live>, _>>()?;
    let mut oldest: HashMap<Vec<u8>, Version> = HashMap::new();
    for each in &live {
        if let Some(group) = &each.group {
            oldest.entry(group.clone()).and_modify(|found| *found = min(*found, each.oldest)).or_insert(each.oldest);
        }
    }
    live.retain(|each| each.group.as_ref().map_or(each.oldest, |group| oldest[group]) == chance);
    Ok(live)
}

fn read(mut row: Row) -> Result<Live, StoreError> {
    let versions: [Option<Version>; 2] = [row.get("version")?, row.get("of_group")?];
    Ok(Live {
        kind: row.get("kind")?,
        key: row.get("pk")?,
        group: row.get("group_key")?,
        oldest: versions.into_iter().flatten().min().unwrap_or(Version(i64::MAX)),
        began: row.get("began_us")?,
        rollouts: row.get("rollouts")?,
    })
}

async fn name(tx: &mut Tx<'_>, live: &Live) -> Result<Option<UnderWay>, StoreError> {
    const NAME_SESSION: Statement = Statement::new(
        "-- name_waited_session
        SELECT session_id, spec
        FROM session
        WHERE session_pk = $1",
    );
    const NAME_ADMISSION: Statement = Statement::new(
        "-- name_waited_admission
        SELECT admission_id
        FROM admission
        WHERE admission_pk = $1",
    );
    const NAME_ROLLOUT: Statement = Statement::new(
        "-- name_waited_rollout
        SELECT rollout_id
        FROM rollout
        WHERE rollout_pk = $1",
    );
    let statement = match live.kind.as_str() {
        "session" => NAME_SESSION,
        "admission" => NAME_ADMISSION,
        _ => NAME_ROLLOUT,
    };
    let Some(mut row) = tx.fetch_optional(statement, args![live.key]).await? else { return Ok(None) };
    Ok(Some(match live.kind.as_str() {
        "session" => {
            let spec: String = row.get("spec")?;
            let spec: SessionSpec = serde_json::from_str(&spec)
                .map_err(|_| StoreError::Corrupt("a session has a malformed specification".to_owned()))?;
            UnderWay::Session { session_id: row.get("session_id")?, rollout_id: spec.rollout_id }
        }
        "admission" => UnderWay::Admission(row.get("admission_id")?),
        _ => UnderWay::Scoring { rollout_id: row.get("rollout_id")? },
    }))
}
