//! The ledger by executions: which group an execution has reached.
//!
//! An execution has no table: its id is a column of its rollouts, with an index. An id that the service made is not
//! part of the content, so that a repeated post without an id is recognised.
use async_trait::async_trait;
use forebay_domain::{
    ids::{ExecutionId, PolicyName, Run},
    looking::ledger::LatestGroup,
};

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Finds the group of the newest rollout of an execution.
pub struct FindLatestGroup {
    pub policy: PolicyName,
    pub execution_id: ExecutionId,
}

#[async_trait]
impl Op for FindLatestGroup {
    type Output = Option<LatestGroup>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // The newest entry of the index by execution. Only if policies share executions, entries of others are passed over.
        // The sum keeps both databases from searching the index by policy, which has far more entries.
        const SELECT_LATEST_GROUP: Statement = Statement::new(
            "-- select_latest_group
            SELECT r.run, g.group_id, g.state
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.execution = $1 AND r.policy_pk + 0 = $2
            ORDER BY r.rollout_pk DESC
            LIMIT 1",
        );
        let Some(policy) = policy::find(tx, &self.policy).await? else { return Ok(None) };
        let values = args![&self.execution_id, policy.policy_pk];
        let Some(mut row) = tx.fetch_optional(SELECT_LATEST_GROUP, values).await? else { return Ok(None) };
        if row.get::<Run>("run")? != policy.run {
            return Ok(None);
        }
        Ok(Some(LatestGroup { group_id: row.get("group_id")?, state: row.get("state")? }))
    }
}
