//! `staleness.action = "wait"`: rollouts that are under way and would be too old for any batch after this one.

use std::{collections::HashMap, ops::RangeInclusive};

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{PolicyPk, Run, Version},
    lease::Claim,
    policies::Policy,
    session::SessionSpec,
    staleness::{Pause, UnderWay, WaitedFor, last_chances},
};
use forebay_wire::StalenessAction;

use crate::{
    error::StoreError,
    op::Op,
    ops::session::parked,
    sql::{Statement, Tx, args},
};

/// Whether no batch may be granted now. Nothing is written as long as that does not change.
///
/// Rollouts are waited for from the first claim on that would have got a batch, for `staleness.wait_s`. Those that were
/// waited for in vain are not waited for again, by any trainer.
pub(super) async fn pauses(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim) -> Result<bool, StoreError> {
    let rules = &policy.rules.staleness;
    let ahead = if rules.action == StalenessAction::Wait { ahead(tx, policy, claim).await? } else { 0 };
    let (mut pause, mut given_up) = (policy.pause, policy.given_up);
    let is_paused = loop {
        let Some(chances) = last_chances(rules, policy.version, ahead) else { break false };
        let chances = behind(&chances, given_up);
        if live(tx, policy.policy_pk, policy.run, &chances, claim.now).await?.is_empty() {
            break false;
        }
        match pause {
            // It was for rollouts that are too old by now.
            Some(of) if of.version < *chances.start() => pause = None,
            Some(of) if of.until(rules) <= claim.now => {
                given_up = given_up.max(Some(of.version));
                pause = None;
            }
            Some(_) => break true,
            None => {
                pause = Some(Pause { version: *chances.end(), since: claim.now });
                break true;
            }
        }
    };
    // What holds this trainer's batch back is not all that another one may wait for, who holds other batches.
    if !is_paused && let Some(of) = pause {
        let chances = last_chances(rules, policy.version, i64::MAX);
        let chances = chances.map(|chances| behind(&(*chances.start()..=of.version), given_up));
        let is_waited_for = match chances {
            Some(chances) => !live(tx, policy.policy_pk, policy.run, &chances, claim.now).await?.is_empty(),
            None => false,
        };
        if is_waited_for && of.until(rules) <= claim.now {
            given_up = given_up.max(Some(of.version));
        }
        pause = pause.filter(|_| is_waited_for && of.until(rules) > claim.now);
    }
    if (pause, given_up) != (policy.pause, policy.given_up) {
        set(tx, policy.policy_pk, pause, given_up).await?;
    }
    Ok(is_paused)
}

/// How many versions come before the one that follows from training a new batch: of batches that its trainer holds, and of
/// one that was trained and whose version is not published. What other trainers hold may be of the same step.
async fn ahead(tx: &mut Tx<'_>, policy: &Policy, claim: &Claim) -> Result<i64, StoreError> {
    const COUNT_HELD: Statement = Statement::new(
        "-- count_held_batches
        SELECT COUNT(*) AS held
        FROM batch
        WHERE policy_pk = $1 AND run = $2 AND state = 'leased' AND consumer = $3 AND expires_us > $4",
    );
    let values = args![policy.policy_pk, policy.run, claim.consumer(), claim.now];
    let held: i64 = tx.fetch_one(COUNT_HELD, values).await?.get("held")?;
    Ok(held + i64::from(policy.is_version_due()))
}

/// The versions that were not waited for in vain.
fn behind(chances: &RangeInclusive<Version>, given_up: Option<Version>) -> RangeInclusive<Version> {
    let first = given_up.map_or(i64::MIN, |version| version.0.saturating_add(1));
    Version(first.max(chances.start().0))..=*chances.end()
}

/// Forgets what was waited for.
pub(in crate::ops) async fn forget(tx: &mut Tx<'_>, policy: &Policy) -> Result<(), StoreError> {
    if policy.pause.is_none() && policy.given_up.is_none() {
        return Ok(());
    }
    set(tx, policy.policy_pk, None, None).await
}

async fn set(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    pause: Option<Pause>,
    given_up: Option<Version>,
) -> Result<(), StoreError> {
    const SET_PAUSE: Statement = Statement::new(
        "-- set_pause
        UPDATE policy
        SET pause_version = $2, pause_us = $3, given_up_version = $4
        WHERE policy_pk = $1",
    );
    let (version, since) = (pause.map(|pause| pause.version), pause.map(|pause| pause.since));
    tx.guarded(SET_PAUSE, args![policy, version, since, given_up], 1).await
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
        let Policy { policy_pk, run, version, pause, given_up, ref rules, .. } = self.policy;
        let Some(pause) = pause else { return Ok(None) };
        let until = pause.until(&rules.staleness);
        // The claim that paused may have been one of a trainer that holds other batches.
        let Some(chances) = last_chances(&rules.staleness, version, i64::MAX) else { return Ok(None) };
        if until <= self.now {
            return Ok(None);
        }
        let newest = pause.version.max(*chances.start());
        let chances = behind(&(*chances.start()..=newest), given_up);
        let live = live(tx, policy_pk, run, &chances, self.now).await?;
        let Some(first) = live.iter().min_by_key(|each| each.began) else { return Ok(None) };
        let rollouts = live.iter().map(|each| each.rollouts).sum();
        let named = name(tx, first).await?;
        Ok(named.map(|(first, began)| WaitedFor { first, began, rollouts, until }))
    }
}

/// Rollouts that are under way.
struct Live {
    what: What,
    group: Option<Vec<u8>>,
    version: Version,
    began: Timestamp,
    rollouts: u64,
}

/// Keys of what is under way.
#[derive(Clone, Copy)]
enum What {
    Session(i64),
    Admission(i64),
    /// A group in which rollouts wait for scores.
    Scoring(i64),
}

/// What is under way and has its last chance now: as old as one of these versions, alone or with its group. What is older
/// is lost already.
async fn live(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    chances: &RangeInclusive<Version>,
    now: Timestamp,
) -> Result<Vec<Live>, StoreError> {
    if chances.is_empty() {
        return Ok(Vec::new());
    }
    let mut oldest: HashMap<Vec<u8>, Version> = HashMap::new();
    let mut live = scoring(tx, policy, run, &mut oldest).await?;
    live.append(&mut sessions(tx, policy, run, now).await?);
    live.append(&mut admissions(tx, policy, now).await?);
    let open: Vec<Vec<u8>> = oldest.keys().cloned().collect();
    for each in &live {
        if let Some(group) = &each.group {
            let version = oldest.entry(group.clone()).or_insert(each.version);
            *version = each.version.min(*version);
        }
    }
    let mut found = Vec::new();
    let mut may_come: HashMap<Vec<u8>, bool> = open.into_iter().map(|group| (group, true)).collect();
    for each in live {
        let version = each.group.as_ref().map_or(each.version, |group| oldest[group]);
        if !chances.contains(&version) {
            continue;
        }
        if let Some(group) = &each.group
            && !may_come.contains_key(group)
        {
            let is_new = is_new(tx, policy, run, group).await?;
            may_come.insert(group.clone(), is_new);
        }
        if each.group.as_ref().is_none_or(|group| may_come[group]) {
            found.push(each);
        }
    }
    Ok(found)
}

/// The open groups with rollouts that wait for scores. Adds the oldest version of each open group.
async fn scoring(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    oldest: &mut HashMap<Vec<u8>, Version>,
) -> Result<Vec<Live>, StoreError> {
    const SELECT_OPEN_VERSIONS: Statement = Statement::new(
        "-- select_open_versions
        SELECT group_pk, group_key, scoring, opened_us, (
                SELECT MIN(r.version_min)
                FROM rollout AS r
                WHERE r.group_pk = g.group_pk AND r.verdict = 'kept'
            ) AS version
        FROM rollout_group AS g
        WHERE policy_pk = $1 AND run = $2 AND state = 'open'",
    );
    let mut live = Vec::new();
    for mut row in tx.fetch_all(SELECT_OPEN_VERSIONS, args![policy, run]).await? {
        let (group, rollouts): (Vec<u8>, u64) = (row.get("group_key")?, row.get("scoring")?);
        // What trains nothing is never too old.
        let version = row.get::<Option<Version>>("version")?.unwrap_or(Version(i64::MAX));
        oldest.insert(group.clone(), version);
        if rollouts > 0 {
            let what = What::Scoring(row.get("group_pk")?);
            live.push(Live { what, group: Some(group), version, began: row.get("opened_us")?, rollouts });
        }
    }
    Ok(live)
}

/// Open sessions. One that was parked lately may have an agent again soon.
async fn sessions(tx: &mut Tx<'_>, policy: PolicyPk, run: Run, now: Timestamp) -> Result<Vec<Live>, StoreError> {
    const SELECT_LIVE_SESSIONS: Statement = Statement::new(
        "-- select_live_sessions
        SELECT sp.session_pk, sp.group_key, COALESCE(sp.oldest_version, sp.version) AS version, s.opened_us
        FROM session_policy AS sp
        JOIN session AS s ON s.session_pk = sp.session_pk
        WHERE sp.policy_pk = $1 AND sp.run = $2 AND sp.is_live = 1
            AND (sp.is_parked = 0 OR COALESCE(sp.parked_us, 0) > $3)",
    );
    let mut live = Vec::new();
    for mut row in tx.fetch_all(SELECT_LIVE_SESSIONS, args![policy, run, parked::stays_since(now)]).await? {
        live.push(Live {
            what: What::Session(row.get("session_pk")?),
            group: Some(row.get("group_key")?),
            version: row.get("version")?,
            began: row.get("opened_us")?,
            rollouts: 1,
        });
    }
    Ok(live)
}

/// Reserved room that was not used. That of sessions is no admission of its own.
async fn admissions(tx: &mut Tx<'_>, policy: PolicyPk, now: Timestamp) -> Result<Vec<Live>, StoreError> {
    const SELECT_LIVE_ADMISSIONS: Statement = Statement::new(
        "-- select_live_admissions
        SELECT admission_pk, group_key, version, granted_us, granted - used AS rollouts
        FROM admission
        WHERE policy_pk = $1 AND expires_us > $2 AND used < granted AND granted_us IS NOT NULL",
    );
    let mut live = Vec::new();
    for mut row in tx.fetch_all(SELECT_LIVE_ADMISSIONS, args![policy, now]).await? {
        live.push(Live {
            what: What::Admission(row.get("admission_pk")?),
            group: row.get("group_key")?,
            version: row.get("version")?,
            began: row.get("granted_us")?,
            rollouts: row.get("rollouts")?,
        });
    }
    Ok(live)
}

/// Whether no rollout of the group has arrived. If it is decided, what is under way comes too late for it: an agent that was
/// restarted has asked for its room a second time.
async fn is_new(tx: &mut Tx<'_>, policy: PolicyPk, run: Run, group: &[u8]) -> Result<bool, StoreError> {
    const FIND_DECIDED: Statement = Statement::new(
        "-- find_decided_group
        SELECT group_pk
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND group_key = $3",
    );
    Ok(tx.fetch_optional(FIND_DECIDED, args![policy, run, group]).await?.is_none())
}

async fn name(tx: &mut Tx<'_>, live: &Live) -> Result<Option<(UnderWay, Timestamp)>, StoreError> {
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
        SELECT r.rollout_id, sc.since_us
        FROM scoring AS sc
        JOIN rollout AS r ON r.rollout_pk = sc.rollout_pk
        WHERE sc.group_pk = $1
        ORDER BY sc.rollout_pk
        LIMIT 1",
    );
    let (statement, key) = match live.what {
        What::Session(key) => (NAME_SESSION, key),
        What::Admission(key) => (NAME_ADMISSION, key),
        What::Scoring(key) => (NAME_ROLLOUT, key),
    };
    let Some(mut row) = tx.fetch_optional(statement, args![key]).await? else { return Ok(None) };
    Ok(Some(match live.what {
        What::Session(_) => {
            let spec: String = row.get("spec")?;
            let spec: SessionSpec = serde_json::from_str(&spec)
                .map_err(|_| StoreError::Corrupt("a session has a malformed specification".to_owned()))?;
            (UnderWay::Session { session_id: row.get("session_id")?, rollout_id: spec.rollout_id }, live.began)
        }
        What::Admission(_) => (UnderWay::Admission(row.get("admission_id")?), live.began),
        What::Scoring(_) => (UnderWay::Scoring { rollout_id: row.get("rollout_id")? }, row.get("since_us")?),
    }))
}
