//! The bounds of teams, checked where a team could exceed them: new policies, greater backlogs and new sessions.
//!
//! Names are matched here and not by the database, so that patterns mean the same in quotas as in keys and upstreams.

use std::sync::LazyLock;

use forebay_domain::{
    admission::room::NoRoom,
    ids::{PolicyName, PolicyPk},
    policies::WriteRules,
    quotas::{Quota, Quotas},
    refusal::Refusal,
    rules::Rules,
    states::SessionState,
    tally::Tally,
};

use crate::{
    error::StoreError,
    sql::{Statement, Tx, args},
};

/// Refuses one policy more than a team may have, and a backlog that it may not have. `before` are the rules of a policy
/// that exists. A backlog that does not rise is never refused, or else nobody could change any rule after an operator
/// has lowered a quota.
pub(super) async fn check_rules(
    tx: &mut Tx<'_>,
    quotas: &Quotas,
    write: &WriteRules,
    before: Option<&Rules>,
) -> Result<Result<(), Refusal>, StoreError> {
    // Two requests that count at the same time would each find room. SQLite has one writer anyway.
    const LOCK_QUOTAS: Statement = Statement {
        sqlite: "-- lock_quotas
            SELECT 1 AS is_locked",
        postgres: "-- lock_quotas
            SELECT 1::BIGINT AS is_locked
            FROM (SELECT pg_advisory_xact_lock(7308896101218)) AS locked",
    };
    const SELECT_POLICIES: Statement = Statement::new(
        "-- select_policies_of_quotas
        SELECT name, rules_pk
        FROM policy
        WHERE name NOT LIKE '%@%'",
    );
    let asked = write.rules.backlog.max_bytes;
    let rises = before.is_none_or(|before| before.backlog.max_bytes < asked);
    let bounds =
        |quota: &&Quota| before.is_none() && quota.policies_max.is_some() || rises && quota.backlog_bytes_max.is_some();
    let bounding: Vec<&Quota> = quotas.of(write.policy.as_str()).filter(bounds).collect();
    if bounding.is_empty() {
        return Ok(Ok(()));
    }
    tx.fetch_one(LOCK_QUOTAS, args![]).await?;
    let mut others: Vec<(String, i64)> = Vec::new();
    for mut row in tx.fetch_all(SELECT_POLICIES, args![]).await? {
        others.push((row.get("name")?, row.get("rules_pk")?));
    }
    others.retain(|(name, _)| name != write.policy.as_str());
    for quota in bounding {
        let of_team: Vec<i64> =
            others.iter().filter(|(name, _)| quota.policies.matches(name)).map(|(_, rules)| *rules).collect();
        let policies = quota.policies.to_string();
        if let Some(max) = quota.policies_max
            && before.is_none()
            && of_team.len() >= max as usize
        {
            return Ok(Err(Refusal::PoliciesOverQuota { policies, max }));
        }
        let Some(max) = quota.backlog_bytes_max.filter(|_| rises) else { continue };
        let mut others = 0_u64;
        for rules_pk in of_team {
            others = others.saturating_add(tx.rules(rules_pk).await?.backlog.max_bytes);
        }
        if others.saturating_add(asked) > max {
            return Ok(Err(Refusal::BacklogOverQuota { policies, max, others }));
        }
    }
    Ok(Ok(()))
}

/// Why a policy gets no other session, if its team has as many as it may have. Sessions of two policies are opened
/// under two locks, so a team may exceed its quota by one for each of its policies.
pub(super) async fn full_of_sessions(
    tx: &mut Tx<'_>,
    quotas: &Quotas,
    policy: &PolicyName,
) -> Result<Option<NoRoom>, StoreError> {
    static SELECT_OPEN_SESSIONS: LazyLock<Statement> = LazyLock::new(|| {
        Statement::new(String::leak(format!(
            "-- select_open_sessions
            SELECT p.policy_pk, p.name, CAST(SUM(t.value) AS BIGINT) AS value
            FROM tally_now AS t
            JOIN policy AS p ON p.policy_pk = t.policy_pk
            WHERE t.name = '{}'
            GROUP BY p.policy_pk, p.name",
            OPEN.name()
        )))
    });
    const OPEN: Tally = Tally::Sessions(SessionState::Open);
    let public = policy.public();
    let bounding: Vec<(&Quota, u32)> =
        quotas.of(public.as_str()).filter_map(|quota| Some((quota, quota.sessions_max?))).collect();
    if bounding.is_empty() {
        return Ok(None);
    }
    let mut open: Vec<(PolicyName, i64)> = Vec::new();
    for mut row in tx.fetch_all(*SELECT_OPEN_SESSIONS, args![]).await? {
        let policy_pk: PolicyPk = row.get("policy_pk")?;
        let name: String = row.get("name")?;
        let name = PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?;
        // Sessions that evaluate a policy are sessions of its team.
        open.push((name.public(), row.get::<i64>("value")? + tx.tallies().pending(policy_pk, OPEN)));
    }
    Ok(bounding.into_iter().find_map(|(quota, sessions)| {
        let of_team = open.iter().filter(|(name, _)| quota.policies.matches(name.as_str()));
        let is_full = of_team.map(|(_, value)| value).sum::<i64>() >= i64::from(sessions);
        is_full.then(|| NoRoom::Quota { policies: quota.policies.to_string(), sessions })
    }))
}
