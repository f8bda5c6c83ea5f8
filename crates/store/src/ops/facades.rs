//! Foreign protocols: their state, and reads of the line of ready groups.
use async_trait::async_trait;
use forebay_domain::{
    facades::{FacadeState, ReadyGroup},
    ids::PolicyName,
    samples::BatchMember,
};

use super::samples::{read_members, select_members};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

/// How many of the newest groups are looked at for one that is ready or in a batch.
const NEWEST_GROUPS: u32 = 256;

/// The state with this name. None if there is none, or if its revision is `known`.
pub struct FindFacadeState {
    pub name: String,
    pub known: u64,
}

#[async_trait]
impl Op for FindFacadeState {
    type Output = Option<FacadeState>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_FACADE_STATE: Statement = Statement::new(
            "-- select_facade_state
            SELECT revision, body
            FROM facade_state
            WHERE name = $1 AND revision <> $2",
        );
        let found = tx.fetch_optional(SELECT_FACADE_STATE, args![self.name.as_str(), self.known]).await?;
        found.map(|mut row| Ok(FacadeState { revision: row.get("revision")?, body: row.get("body")? })).transpose()
    }
}

/// Replaces a state, if it still has the revision before this one. Returns whether it had.
pub struct WriteFacadeState {
    pub name: String,
    pub state: FacadeState,
}

#[async_trait]
impl Op for WriteFacadeState {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Of several first writes, the one that comes first inserts the row.
        const INSERT_FACADE_STATE: Statement = Statement::new(
            "-- insert_facade_state
            INSERT INTO facade_state (name, revision, body)
            VALUES ($1, $2, $3)
            ON CONFLICT (name) DO NOTHING",
        );
        // The condition is checked again after a wait for another transaction, so one of several writes changes the row.
        const UPDATE_FACADE_STATE: Statement = Statement::new(
            "-- update_facade_state
            UPDATE facade_state
            SET revision = $2, body = $3
            WHERE name = $1 AND revision = $2 - 1",
        );
        let FacadeState { revision, body } = &self.state;
        let statement = if *revision == 1 { INSERT_FACADE_STATE } else { UPDATE_FACADE_STATE };
        Ok(tx.execute(statement, args![self.name.as_str(), *revision, body.as_str()]).await? == 1)
    }
}

/// The first ready groups of the policy's run, in the order in which they became ready.
pub struct ListReadyGroups {
    pub policy: PolicyName,
    pub limit: u32,
}

#[async_trait]
impl Op for ListReadyGroups {
    type Output = Vec<ReadyGroup>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LIST_READY_GROUPS: Statement = Statement::new(
            "-- list_ready_groups
            SELECT environment, samples
            FROM rollout_group
            WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $1)
                AND run = (SELECT run FROM policy WHERE name = $1) AND state = 'ready'
            ORDER BY ready_seq
            LIMIT $2",
        );
        let rows = tx.fetch_all(LIST_READY_GROUPS, args![self.policy.as_str(), self.limit]).await?;
        let read = |mut row: Row| Ok(ReadyGroup { environment: row.get("environment")?, samples: row.get("samples")? });
        rows.into_iter().map(read).collect()
    }
}

/// The rollouts of the newest group of the policy's run that is ready or in a batch. Empty if none of the newest
/// groups is, or if its payloads are purged.
pub struct NewestMembers {
    pub policy: PolicyName,
}

#[async_trait]
impl Op for NewestMembers {
    type Output = Vec<BatchMember>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_NEWEST_GROUP: Statement = Statement::new(
            "-- select_newest_group
            SELECT newest.group_pk
            FROM (
                SELECT group_pk, run, state
                FROM rollout_group
                WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $1)
                ORDER BY group_pk DESC
                LIMIT $2
            ) AS newest
            WHERE newest.run = (SELECT run FROM policy WHERE name = $1) AND newest.state IN ('ready', 'batched')
            ORDER BY newest.group_pk DESC
            LIMIT 1",
        );
        const SELECT_NEWEST_MEMBERS: Statement = Statement::new(select_members!(
            "-- select_newest_members",
            "FROM rollout_group AS g
            JOIN rollout AS r ON r.group_pk = g.group_pk
            WHERE g.group_pk = $1 AND r.verdict IN ('kept', 'masked') AND g.purged_us IS NULL
            ORDER BY r.rollout_pk"
        ));
        let newest = tx.fetch_optional(SELECT_NEWEST_GROUP, args![self.policy.as_str(), NEWEST_GROUPS]).await?;
        let Some(mut row) = newest else { return Ok(Vec::new()) };
        let group_pk: i64 = row.get("group_pk")?;
        let rows = tx.fetch_all(SELECT_NEWEST_MEMBERS, args![group_pk]).await?;
        read_members(tx, rows).await
    }
}
