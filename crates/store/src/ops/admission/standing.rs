//! What a policy has, as far as it decides about room: read under the lock of the policy's row.

use std::collections::BTreeMap;

use forebay_domain::{
    admission::{
        refused::{RefusedRoom, RoomFor, noted, without},
        room::{Asked, BegunGroup, NextBatch, NoRoom, PATIENCE_PART, Recent, Share, Standing, capacity},
    },
    batch::shares::needed,
    clock::Timestamp,
    ids::IdKey,
    policies::{Policy, ReadEnvironments},
    states::{GroupState, RolloutState},
    tally::Tally,
};

use super::{super::policy, StoredBacklog};
use crate::{
    error::StoreError,
    ops::{claim::turns, places_left, session::parked::release_parked},
    sql::{Statement, Tx, args},
};

/// The newest rollouts whose tokens tell how many rollouts a batch has.
const RECENT_MAX: i64 = 256;

/// The number of rollouts for which a policy whose row is locked has room: at least one. Nothing is reserved yet.
pub(in crate::ops) async fn grant(
    tx: &mut Tx<'_>,
    policy: &Policy,
    by: RoomFor,
    asked: &Asked<'_>,
    now: Timestamp,
) -> Result<Result<u32, NoRoom>, StoreError> {
    if let Some(granted) = asked.grant_begun() {
        return Ok(Ok(granted));
    }
    super::give_back_expired(tx, policy, now).await?;
    let stored = StoredBacklog::read(tx, policy.policy_pk).await?;
    if policy.name.is_evaluations() {
        // Nothing waits for a batch there, so that nothing has to be completed for one.
        let backlog = stored.with(policy.policy_pk, tx.tallies());
        let room = capacity(&policy.rules, backlog, None, false).min(asked.rollouts.into()) as u32;
        if room == 0 {
            release_parked(tx, policy.policy_pk, now).await?;
            return Ok(Err(NoRoom::Evaluation(backlog)));
        }
        return Ok(Ok(room));
    }
    let backlog = stored.with(policy.policy_pk, tx.tallies());
    let at_once = asked.grant_at_once(&policy.rules, backlog, policy.is_version_due());
    let granted = if let Some(granted) = at_once {
        Ok(granted)
    } else {
        super::give_back_decided(tx, policy).await?;
        standing(tx, policy, &stored, now).await?.decide(&policy.rules, asked)
    };
    if granted.is_err() {
        release_parked(tx, policy.policy_pk, now).await?;
    }
    note(tx, policy, by, asked.environment, granted.as_ref().err(), now).await?;
    Ok(granted)
}

/// Notes with the policy that room was granted, or the rule that refused it.
pub(in crate::ops) async fn note(
    tx: &mut Tx<'_>,
    policy: &Policy,
    by: RoomFor,
    environment: Option<&str>,
    refused_by: Option<&NoRoom>,
    now: Timestamp,
) -> Result<(), StoreError> {
    const SET_REFUSED: Statement = Statement::new(
        "-- set_refused
        UPDATE policy
        SET refused = $2
        WHERE policy_pk = $1",
    );
    let refused = match refused_by {
        None => without(&policy.refused, by, environment),
        Some(rule) => noted(&policy.refused, RefusedRoom::new(by, environment, rule.code(), now), now),
    };
    let Some(refused) = refused else { return Ok(()) };
    let text = serde_json::to_string(&refused).expect("numbers and labels always serialize");
    tx.guarded(SET_REFUSED, args![policy.policy_pk, text], 1).await
}

/// The rollouts of a group that room is reserved for, and its size if an admission named it.
pub(in crate::ops) async fn reserved_of(
    tx: &mut Tx<'_>,
    policy: &Policy,
    group_key: IdKey,
) -> Result<(u64, Option<u32>), StoreError> {
    const SUM_RESERVED_OF_GROUP: Statement = Statement::new(
        "-- sum_reserved_of_group
        SELECT CAST(COALESCE(SUM(granted - used), 0) AS BIGINT) AS unused, MAX(group_size) AS group_size
        FROM admission
        WHERE policy_pk = $1 AND group_key = $2",
    );
    let mut row = tx.fetch_one(SUM_RESERVED_OF_GROUP, args![policy.policy_pk, group_key]).await?;
    Ok((row.get("unused")?, row.get("group_size")?))
}

async fn standing(
    tx: &mut Tx<'_>,
    policy: &Policy,
    stored: &StoredBacklog,
    now: Timestamp,
) -> Result<Standing, StoreError> {
    let mut standing = Standing {
        backlog: stored.with(policy.policy_pk, tx.tallies()),
        next: next_batch(tx, policy, stored).await?,
        recent: recent(tx, policy).await?,
        is_version_due: policy.is_version_due(),
        ..Standing::default()
    };
    let mut begun = open_groups(tx, policy).await?;
    let patience_us = (policy.rules.group.timeout_s.saturating_mul(1_000_000) / PATIENCE_PART) as i64;
    reserved(tx, policy, now.as_micros().saturating_sub(patience_us), &mut begun, &mut standing).await?;
    standing.begun = begun.into_values().collect();
    Ok(standing)
}

/// What is ready for the next batch of a policy.
pub(in crate::ops) async fn next_batch(
    tx: &mut Tx<'_>,
    policy: &Policy,
    stored: &StoredBacklog,
) -> Result<NextBatch, StoreError> {
    let shares = shares(tx, policy).await?;
    let tallies = tx.tallies();
    let count = |tally| stored.count(policy.policy_pk, tallies, tally);
    let of_batches = [RolloutState::Leased, RolloutState::Returned];
    Ok(NextBatch {
        ready_groups: count(Tally::Groups(GroupState::Ready)),
        shares,
        is_in_training: of_batches.into_iter().any(|state| count(Tally::Rollouts(state)) > 0),
    })
}

/// The newest rollouts that take places; none without such rollouts, and without a bound of tokens.
async fn recent(tx: &mut Tx<'_>, policy: &Policy) -> Result<Option<Recent>, StoreError> {
    const SUM_RECENT_TOKENS: Statement = Statement::new(
        "-- sum_recent_tokens
        SELECT COUNT(*) AS rollouts, CAST(COALESCE(SUM(tokens), 0) AS BIGINT) AS tokens
        FROM (
            SELECT tokens, verdict
            FROM rollout
            WHERE policy_pk = $1
            ORDER BY rollout_pk DESC
            LIMIT $2
        ) AS newest
        WHERE verdict IN ('kept', 'masked')",
    );
    if policy.rules.batch.max_tokens.is_none() {
        return Ok(None);
    }
    let mut row = tx.fetch_one(SUM_RECENT_TOKENS, args![policy.policy_pk, RECENT_MAX]).await?;
    let recent = Recent { rollouts: row.get("rollouts")?, tokens: row.get("tokens")? };
    Ok((recent.rollouts > 0).then_some(recent))
}

/// The environments with a minimum share.
async fn shares(tx: &mut Tx<'_>, policy: &Policy) -> Result<Vec<Share>, StoreError> {
    let rules = &policy.rules.batch;
    let has_minimum = |label: &&String| rules.environments[*label].min_share > 0.0;
    let labels: Vec<String> = rules.environments.keys().filter(has_minimum).cloned().collect();
    if labels.is_empty() {
        return Ok(Vec::new());
    }
    let carried = turns::carried(tx, policy.policy_pk, policy.run).await?;
    let read = ReadEnvironments { policy: policy.policy_pk, run: policy.run, labels, ready_max: rules.groups };
    let ready = policy::count_ready_of(&read, tx).await?;
    let share = |(label, needed): (&str, u64)| Share {
        environment: label.to_owned(),
        needed,
        ready: ready.get(label).map_or(0, |ready| (*ready).max(0) as u64),
    };
    Ok(needed(rules, &carried).into_iter().map(share).collect())
}

type Begun = BTreeMap<Vec<u8>, BegunGroup>;

/// Open groups, by their keys.
async fn open_groups(tx: &mut Tx<'_>, policy: &Policy) -> Result<Begun, StoreError> {
    const SELECT_MISSING: Statement = Statement::new(
        "-- select_missing
        SELECT group_key, COALESCE(environment, '') AS environment, rules_pk, state, size, kept, masked, dropped, scoring
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND state = 'open'",
    );
    let mut begun = Begun::new();
    for mut row in tx.fetch_all(SELECT_MISSING, args![policy.policy_pk, policy.run]).await? {
        let missing = u64::from(places_left(tx, &mut row).await?);
        let group = BegunGroup { environment: row.get("environment")?, missing, reserved: 0 };
        begun.insert(row.get("group_key")?, group);
    }
    Ok(begun)
}

/// Adds the unused room of admissions: to their groups if they name them. Room that was reserved before `since_us` shows
/// nobody at work.
async fn reserved(
    tx: &mut Tx<'_>,
    policy: &Policy,
    since_us: i64,
    begun: &mut Begun,
    standing: &mut Standing,
) -> Result<(), StoreError> {
    const SELECT_RESERVED: Statement = Statement::new(
        "-- select_reserved
        SELECT a.group_key, COALESCE(a.environment, '') AS environment, MAX(a.group_size) AS group_size,
            CAST(SUM(a.granted - a.used) AS BIGINT) AS unused,
            CAST(SUM(CASE WHEN a.granted_us > $3 THEN a.granted - a.used ELSE 0 END) AS BIGINT) AS lately,
            MAX(COALESCE(a.granted_us, 9223372036854775807)) AS latest_us, MAX(g.state) AS state
        FROM admission AS a
        LEFT JOIN rollout_group AS g ON g.policy_pk = a.policy_pk AND g.run = $2 AND g.group_key = a.group_key
        WHERE a.policy_pk = $1 AND a.used < a.granted
        GROUP BY a.group_key, COALESCE(a.environment, '')",
    );
    for mut row in tx.fetch_all(SELECT_RESERVED, args![policy.policy_pk, policy.run, since_us]).await? {
        let (unused, environment): (u64, String) = (row.get("unused")?, row.get("environment")?);
        let is_decided = row.get::<Option<GroupState>>("state")?.is_some_and(|state| !state.is_open());
        if is_decided {
            continue;
        }
        let is_recent = row.get::<i64>("latest_us")? > since_us;
        let size = row.get::<Option<u64>>("group_size")?;
        let label = match row.get::<Option<Vec<u8>>>("group_key")? {
            None => {
                *standing.unnamed.entry(environment.clone()).or_default() += unused;
                standing.unnamed_lately += row.get::<u64>("lately")?;
                environment
            }
            Some(key) => {
                let missing = size.unwrap_or(0);
                let group = begun.entry(key).or_insert(BegunGroup { missing, ..BegunGroup::default() });
                group.reserved += unused;
                if group.environment.is_empty() {
                    group.environment = environment;
                }
                group.environment.clone()
            }
        };
        if is_recent {
            standing.at_work.insert(label);
        }
    }
    Ok(())
}
