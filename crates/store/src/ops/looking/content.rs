//! One rollout with what is needed to look into its payload.
use std::collections::HashMap;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::RolloutPk,
    lease::Batch,
    looking::ledger::StoryFilter,
    samples::{FindContent, StoredContent},
    states::GroupState,
};

use crate::{
    error::StoreError,
    op::Op,
    ops::{
        batch::{self, select_batch},
        samples::{read_members, select_members},
        scores,
    },
    sql::{Statement, Tx, args},
};

#[async_trait]
impl Op for FindContent {
    type Output = Option<StoredContent>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_ROLLOUT: Statement = Statement::new(select_members!(
            "-- select_rollout_to_look_at",
            "FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.rollout_pk = $1"
        ));
        let filter = StoryFilter {
            policy: Some(self.policy.clone()),
            rollout_id: Some(self.rollout_id.clone()),
            limit: 1,
            ..StoryFilter::default()
        };
        let Some(story) = filter.run(tx).await?.entries.pop() else { return Ok(None) };
        let Some(mut row) = tx.fetch_optional(SELECT_ROLLOUT, args![story.rollout_pk]).await? else { return Ok(None) };
        let is_purged = row.get::<Option<Timestamp>>("purged_us")?.is_some();
        let Some(member) = read_members(tx, vec![row]).await?.pop() else { return Ok(None) };
        let is_carried = story.group.state == GroupState::Batched && story.verdict.takes_place();
        let batch = if is_carried { carrier(tx, story.rollout_pk).await? } else { None };
        let has_payload = !is_purged && has_payload(tx, story.rollout_pk).await?;
        let judged = story.scoring.is_empty();
        let scores = if judged { scores::applied(tx, [story.rollout_pk]).await? } else { HashMap::new() };
        let scores = scores.into_values().next().unwrap_or_default();
        Ok(Some(StoredContent { story, member, batch, has_payload, scores }))
    }
}

/// The batch that contains a rollout.
async fn carrier(tx: &mut Tx<'_>, rollout: RolloutPk) -> Result<Option<Batch>, StoreError> {
    const SELECT_CARRIER: Statement = Statement::new(select_batch!(
        "WHERE b.batch_pk = (
                SELECT g.batch_pk
                FROM rollout AS r
                JOIN rollout_group AS g ON g.group_pk = r.group_pk
                WHERE r.rollout_pk = $1
            )"
    ));
    tx.fetch_optional(SELECT_CARRIER, args![rollout]).await?.map(batch::read).transpose()
}

/// Whether the payload of a rollout is stored.
async fn has_payload(tx: &mut Tx<'_>, rollout: RolloutPk) -> Result<bool, StoreError> {
    const FIND_PAYLOAD: Statement = Statement::new(
        "-- find_payload
        SELECT rollout_pk
        FROM payload
        WHERE rollout_pk = $1",
    );
    Ok(tx.fetch_optional(FIND_PAYLOAD, args![rollout]).await?.is_some())
}
