//! Where an id is found, and what is known about the life of what it names.
use async_trait::async_trait;
use forebay_domain::{
    ids::{GroupPk, IdKey, PolicyName, PolicyPk, Run},
    lease::Batch,
    looking::{
        insight::{FindId, FindLife, IdMatches, LastMember, Life, LifeOf},
        ledger::StoryFilter,
    },
    states::GroupState,
};

use super::ledger;
use crate::{
    error::StoreError,
    op::Op,
    ops::{
        batch::{self, select_batch},
        policy, scores,
    },
    sql::{Row, Statement, Tx, args, key_found, key_list},
};

/// Batches of a group that are told.
const BATCHES_MAX: usize = 8;

#[async_trait]
impl Op for FindId {
    type Output = IdMatches;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<IdMatches, StoreError> {
        // The unique index begins with the policy, so each policy is one search in it. OFFSET keeps the planner of
        // Postgres from reading the whole table instead.
        const FIND_ROLLOUTS: Statement = Statement {
            sqlite: "-- find_rollouts_in_policies
                SELECT p.name, r.rollout_id AS id
                FROM json_each($1) AS listed
                CROSS JOIN policy AS p ON p.policy_pk = listed.value
                CROSS JOIN rollout AS r ON r.policy_pk = p.policy_pk AND r.run = p.run AND r.rollout_key = $2",
            postgres: "-- find_rollouts_in_policies
                SELECT p.name, r.id
                FROM policy AS p
                CROSS JOIN LATERAL (
                    SELECT rollout_id AS id
                    FROM rollout
                    WHERE policy_pk = p.policy_pk AND run = p.run AND rollout_key = $2
                    OFFSET 0
                ) AS r
                WHERE p.policy_pk = ANY ($1::bigint[])",
        };
        const FIND_GROUPS: Statement = Statement {
            sqlite: "-- find_groups_in_policies
                SELECT p.name, g.group_id AS id
                FROM json_each($1) AS listed
                CROSS JOIN policy AS p ON p.policy_pk = listed.value
                CROSS JOIN rollout_group AS g ON g.policy_pk = p.policy_pk AND g.run = p.run AND g.group_key = $2",
            postgres: "-- find_groups_in_policies
                SELECT p.name, g.id
                FROM policy AS p
                CROSS JOIN LATERAL (
                    SELECT group_id AS id
                    FROM rollout_group
                    WHERE policy_pk = p.policy_pk AND run = p.run AND group_key = $2
                    OFFSET 0
                ) AS g
                WHERE p.policy_pk = ANY ($1::bigint[])",
        };
        const FIND_SESSIONS: Statement = Statement {
            sqlite: "-- find_sessions_in_policies
                SELECT p.name, s.session_id
                FROM json_each($1) AS listed
                CROSS JOIN policy AS p ON p.policy_pk = listed.value
                CROSS JOIN session_policy AS sp
                    ON sp.policy_pk = p.policy_pk AND sp.run = p.run AND sp.rollout_key = $2
                CROSS JOIN session AS s ON s.session_pk = sp.session_pk
                ORDER BY p.name",
            postgres: "-- find_sessions_in_policies
                SELECT p.name, s.session_id
                FROM policy AS p
                CROSS JOIN LATERAL (
                    SELECT session_pk
                    FROM session_policy
                    WHERE policy_pk = p.policy_pk AND run = p.run AND rollout_key = $2
                    OFFSET 0
                ) AS sp
                JOIN session AS s ON s.session_pk = sp.session_pk
                WHERE p.policy_pk = ANY ($1::bigint[])
                ORDER BY p.name",
        };
        const COUNT_OPEN_SESSIONS: Statement = Statement {
            sqlite: "-- count_open_sessions_in_policies
                SELECT p.name, COUNT(*) AS sessions
                FROM json_each($1) AS listed
                CROSS JOIN policy AS p ON p.policy_pk = listed.value
                CROSS JOIN session_policy AS sp
                    ON sp.policy_pk = p.policy_pk AND sp.run = p.run AND sp.group_key = $2 AND sp.is_live = 1
                GROUP BY p.name
                ORDER BY p.name",
            postgres: "-- count_open_sessions_in_policies
                SELECT p.name, COUNT(*) AS sessions
                FROM policy AS p
                CROSS JOIN LATERAL (
                    SELECT session_pk
                    FROM session_policy
                    WHERE policy_pk = p.policy_pk AND run = p.run AND group_key = $2 AND is_live = 1
                    OFFSET 0
                ) AS sp
                WHERE p.policy_pk = ANY ($1::bigint[])
                GROUP BY p.name
                ORDER BY p.name",
        };
        let mut found = IdMatches::default();
        let searched = |key: IdKey| args![key_list(self.policies.iter().map(|policy| policy.0)), key];
        if let Some(rollout_id) = &self.rollout_id {
            found.rollouts = having(tx, FIND_ROLLOUTS, &self.policies, rollout_id.key()).await?;
            for mut row in tx.fetch_all(FIND_SESSIONS, searched(rollout_id.key())).await? {
                found.sessions.push((name(&mut row)?, row.get("session_id")?));
            }
        }
        if let Some(group_id) = &self.group_id {
            found.groups = having(tx, FIND_GROUPS, &self.policies, group_id.key()).await?;
            for mut row in tx.fetch_all(COUNT_OPEN_SESSIONS, searched(group_id.key())).await? {
                found.open_sessions.push((name(&mut row)?, row.get("sessions")?));
            }
        }
        Ok(found)
    }
}

/// The policies that have an id, by name.
async fn having(
    tx: &mut Tx<'_>,
    statement: Statement,
    policies: &[PolicyPk],
    key: IdKey,
) -> Result<Vec<PolicyName>, StoreError> {
    let mut found = Vec::new();
    for mut row in tx.fetch_all(statement, args![key_list(policies.iter().map(|policy| policy.0)), key]).await? {
        key_found(&row.get::<String>("id")?, |found| *found == key)?;
        found.push(name(&mut row)?);
    }
    found.sort();
    Ok(found)
}

fn name(row: &mut Row) -> Result<PolicyName, StoreError> {
    let name: String = row.get("name")?;
    PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))
}

#[async_trait]
impl Op for FindLife {
    type Output = Option<Life>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Option<Life>, StoreError> {
        const SELECT_RULES_OF_GROUP: Statement = Statement::new(
            "-- select_rules_of_group
            SELECT policy_pk, run, rules_pk, ready_seq
            FROM rollout_group
            WHERE group_pk = $1",
        );
        let story = match &self.of {
            LifeOf::Rollout(rollout_id) => {
                let filter = StoryFilter {
                    policy: Some(self.policy.clone()),
                    rollout_id: Some(rollout_id.clone()),
                    limit: 1,
                    ..StoryFilter::default()
                };
                let Some(story) = filter.run(tx).await?.entries.pop() else { return Ok(None) };
                Some(story)
            }
            LifeOf::Group(_) => None,
        };
        let Some(group_pk) = group_of(self, tx).await? else { return Ok(None) };
        let group = ledger::group(tx, group_pk).await?;
        let mut row = tx.fetch_one(SELECT_RULES_OF_GROUP, args![group_pk]).await?;
        let rules = tx.rules(row.get("rules_pk")?).await?;
        let place = row.get::<Option<i64>>("ready_seq")?.filter(|_| group.fill.state == GroupState::Ready);
        let line = match place {
            Some(place) => Some(groups_before(tx, row.get("policy_pk")?, row.get("run")?, place, self.line_max).await?),
            None => None,
        };
        let last_member = last_member(tx, group_pk).await?;
        let batches = batches(tx, group_pk).await?;
        let given = match &story {
            Some(story) => scores::of_rollout(tx, story.rollout_pk).await?,
            None => Vec::new(),
        };
        Ok(Some(Life { story, group, rules, last_member, line, batches, scores: given }))
    }
}

async fn group_of(find: &FindLife, tx: &mut Tx<'_>) -> Result<Option<GroupPk>, StoreError> {
    const OF_ROLLOUT: Statement = Statement::new(
        "-- find_group_of_rollout
        SELECT group_pk
        FROM rollout
        WHERE policy_pk = $1 AND run = $2 AND rollout_key = $3",
    );
    const OF_ID: Statement = Statement::new(
        "-- find_group_of_id
        SELECT group_pk
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND group_key = $3",
    );
    let Some(policy) = policy::find(tx, &find.policy).await? else { return Ok(None) };
    let (statement, key) = match &find.of {
        LifeOf::Rollout(rollout_id) => (OF_ROLLOUT, rollout_id.key()),
        LifeOf::Group(group_id) => (OF_ID, group_id.key()),
    };
    let row = tx.fetch_optional(statement, args![policy.policy_pk, policy.run, key]).await?;
    row.map(|mut row| row.get("group_pk")).transpose()
}

/// How many ready groups were ready before, up to a bound.
async fn groups_before(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    run: Run,
    place: i64,
    line_max: i64,
) -> Result<i64, StoreError> {
    const COUNT_READY_BEFORE: Statement = Statement::new(
        "-- count_ready_before
        SELECT COUNT(*) AS line
        FROM (
            SELECT ready_seq
            FROM rollout_group
            WHERE policy_pk = $1 AND run = $2 AND state = 'ready' AND ready_seq < $3
            LIMIT $4
        ) AS ready_before",
    );
    tx.fetch_one(COUNT_READY_BEFORE, args![policy, run, place, line_max]).await?.get("line")
}

/// The rollout that took the last place of a group.
async fn last_member(tx: &mut Tx<'_>, group: GroupPk) -> Result<Option<LastMember>, StoreError> {
    const SELECT_LAST_MEMBER: Statement = Statement::new(
        "-- select_last_member
        SELECT rollout_id, received_us
        FROM rollout
        WHERE group_pk = $1 AND verdict IN ('kept', 'masked')
        ORDER BY rollout_pk DESC
        LIMIT 1",
    );
    let Some(mut row) = tx.fetch_optional(SELECT_LAST_MEMBER, args![group]).await? else { return Ok(None) };
    Ok(Some(LastMember { rollout_id: row.get("rollout_id")?, received_at: row.get("received_us")? }))
}

/// The newest batches that have carried a group, the oldest of them first.
async fn batches(tx: &mut Tx<'_>, group: GroupPk) -> Result<Vec<Batch>, StoreError> {
    const SELECT_CARRIERS_OF_GROUP: Statement =
        Statement::new(select_batch!("WHERE b.batch_pk IN (SELECT batch_pk FROM batch_group WHERE group_pk = $1)"));
    // Only a split or a discarded batch gives a group back, so there are few.
    let rows = tx.fetch_all(SELECT_CARRIERS_OF_GROUP, args![group]).await?;
    let mut batches = rows.into_iter().map(batch::read).collect::<Result<Vec<_>, _>>()?;
    batches.sort_by_key(|batch| batch.batch_pk.0);
    batches.drain(..batches.len().saturating_sub(BATCHES_MAX));
    Ok(batches)
}
