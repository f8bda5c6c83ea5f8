//! What the metrics show of policies.
//!
//! Separate from the policies, because a scrape must stay cheap with thousands of them. It reads the rules of no policy
//! that has no label of its own: the parsed rules of all of them would not fit into memory, and each scrape would parse
//! them again and push out those that are in use.

use async_trait::async_trait;
use forebay_domain::{
    ids::{PolicyName, PolicyPk, Run, Version},
    policies::PolicyGauges,
};
use std::collections::BTreeMap;

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

/// The versions of all policies, in the order of their names.
pub struct ReadVersions;

#[async_trait]
impl Op for ReadVersions {
    type Output = Vec<(PolicyName, Version)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_VERSIONS: Statement = Statement::new(
            "-- select_versions
            SELECT name, version
            FROM policy
            WHERE name NOT LIKE '%@%'
            ORDER BY name",
        );
        let rows = tx.fetch_all(SELECT_VERSIONS, args![]).await?;
        let read = |mut row: Row| {
            let name: String = row.get("name")?;
            let name = PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            Ok((name, row.get("version")?))
        };
        rows.into_iter().map(read).collect()
    }
}

/// What the metrics show of some policies. Those that are gone are left out.
pub struct ReadGauges(pub Vec<PolicyName>);

#[async_trait]
impl Op for ReadGauges {
    type Output = Vec<PolicyGauges>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let mut found = Vec::new();
        for name in &self.0 {
            if let Some(policy) = policy::find(tx, name).await? {
                let newest_metrics = newest_metrics(tx, policy.policy_pk, policy.run).await?;
                found.push(PolicyGauges { policy, newest_metrics });
            }
        }
        Ok(found)
    }
}

/// The metrics of the newest batch of a policy; empty if this run has none.
async fn newest_metrics(tx: &mut Tx<'_>, policy: PolicyPk, run: Run) -> Result<BTreeMap<String, f64>, StoreError> {
    // The condition on the run is not one of the search: a new run would search the batches of all runs before it.
    const SELECT_NEWEST_METRICS: Statement = Statement::new(
        "-- select_newest_metrics
        SELECT CASE WHEN run = $2 THEN metrics END AS metrics
        FROM batch
        WHERE policy_pk = $1
        ORDER BY batch_pk DESC
        LIMIT 1",
    );
    let Some(mut row) = tx.fetch_optional(SELECT_NEWEST_METRICS, args![policy, run]).await? else {
        return Ok(BTreeMap::new());
    };
    let metrics: Option<String> = row.get("metrics")?;
    metrics.map_or(Ok(BTreeMap::new()), |metrics| {
        serde_json::from_str(&metrics).map_err(|error| StoreError::Corrupt(error.to_string()))
    })
}
