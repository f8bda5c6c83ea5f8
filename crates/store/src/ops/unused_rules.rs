//! Rules that no policy and no group uses any more.
use async_trait::async_trait;
use forebay_domain::{ids::GroupPk, sweep::RulesOfGroups};

use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, among_keys, args, key_list},
};

/// Rules that no policy uses now, the oldest first.
pub struct SupersededRules {
    pub limit: u32,
}

#[async_trait]
impl Op for SupersededRules {
    type Output = Vec<i64>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Vec<i64>, StoreError> {
        const SELECT_SUPERSEDED_RULES: Statement = Statement::new(
            "-- select_superseded_rules
            SELECT rules_pk
            FROM rules
            WHERE rules_pk NOT IN (SELECT rules_pk FROM policy)
            ORDER BY rules_pk
            LIMIT $1",
        );
        let rows = tx.fetch_all(SELECT_SUPERSEDED_RULES, args![self.limit]).await?;
        rows.into_iter().map(|mut row| row.get("rules_pk")).collect()
    }
}

/// The rules of the groups after a group, up to `limit` groups. There is no index for this, because every insert of a
/// group would pay for it.
pub struct FindRulesOfGroups {
    pub after: GroupPk,
    pub limit: u32,
}

#[async_trait]
impl Op for FindRulesOfGroups {
    type Output = RulesOfGroups;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<RulesOfGroups, StoreError> {
        const SELECT_RULES_OF_GROUPS: Statement = Statement::new(
            "-- select_rules_of_groups
            SELECT group_pk, rules_pk
            FROM rollout_group
            WHERE group_pk > $1
            ORDER BY group_pk
            LIMIT $2",
        );
        let mut found = RulesOfGroups::default();
        for mut row in tx.fetch_all(SELECT_RULES_OF_GROUPS, args![self.after, self.limit]).await? {
            found.last = Some(row.get("group_pk")?);
            found.rules.insert(row.get("rules_pk")?);
        }
        Ok(found)
    }
}

/// Deletes rules that no policy uses. Returns how many were deleted.
pub struct ForgetRules(pub Vec<i64>);

#[async_trait]
impl Op for ForgetRules {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        const FORGET_RULES: Statement = among_keys!(
            "-- forget_rules
            DELETE FROM rules
            WHERE rules_pk",
            " AND rules_pk NOT IN (SELECT rules_pk FROM policy)"
        );
        tx.execute(FORGET_RULES, args![key_list(self.0.iter().copied())]).await
    }
}
