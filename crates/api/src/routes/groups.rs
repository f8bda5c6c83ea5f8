//! `/groups`: lists groups, and closes or discards a group by hand.

use axum::{Json as Answer, extract::State};
use forebay_domain::{
    groups::Group,
    ids::{BatchId, GroupId, ID_BYTES_MAX, PolicyName},
    looking::ledger::GroupFilter,
};
use forebay_wire::{CloseRequest, DiscardRequest, GroupInfo, GroupPage, GroupState, ListOrder};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::Json,
        guard::Caller,
        params::{self, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, NoSuchGroup, NoSuchPolicy},
};

/// Which groups to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct GroupQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// Only this group of the current run.
    #[param(min_length = 1, max_length = 256)]
    group_id: Option<String>,
    /// Only groups that this batch was cut with, in the order of their places in the batch.
    batch_id: Option<String>,
    /// Only groups in this state.
    state: Option<GroupState>,
    /// Only groups that were discarded or quarantined for this reason.
    #[param(min_length = 1, max_length = 256)]
    reason: Option<String>,
    /// Only groups of this environment.
    #[param(min_length = 1, max_length = 256)]
    environment: Option<String>,
    /// Which entries come first. `oldest` when absent; an `after` has the order of its list.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List groups in the order in which they were opened, or the newest first
///
/// With `state`, `reason` or `environment`, a page ends after a bounded number of the policy's groups, whether they match or not. A page can
/// therefore be short or empty and still have a `next`.
#[utoipa::path(
    get,
    path = "/groups",
    operation_id = "list_groups",
    tag = "agents",
    params(GroupQuery),
    responses(
        (status = 200, description = "A page of groups", body = GroupPage),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<GroupQuery>,
) -> Result<Answer<GroupPage>, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    let limit = params::page_limit(query.limit)?;
    let filter = GroupFilter {
        policy: policy.clone(),
        group_id: params::optional("group_id", query.group_id.as_deref(), GroupId::parse)?,
        batch_id: query.batch_id.as_deref().map(batch_id).transpose()?,
        state: query.state.map(Into::into),
        reason: query.reason.map(|reason| params::text("reason", reason, ID_BYTES_MAX)).transpose()?,
        environment: query.environment.map(|label| params::text("environment", label, ID_BYTES_MAX)).transpose()?,
        from: params::cursor(query.order, query.after.as_deref())?,
        limit,
    };
    let page = api.buffer.groups(filter).await?;
    let (next, examined) = (params::next(page.next), page.examined);
    let groups = page.entries.into_iter().map(|group| on_wire(&policy, group)).collect();
    Ok(Answer(GroupPage { groups, next, examined }))
}

/// Decide an open group now, as if it had timed out
#[utoipa::path(
    post,
    path = "/groups/close",
    operation_id = "close_group",
    tag = "agents",
    request_body = CloseRequest,
    responses(
        (status = 200, description = "The group after it was decided", body = GroupInfo),
        NoSuchGroup,
        (status = 409, description = "`group-decided`: the group is not open"),
    )
)]
pub(crate) async fn close(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<CloseRequest>,
) -> Result<Answer<GroupInfo>, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    let group_id = group_id(&request.group_id)?;
    let group = {
        let (policy, api) = (policy.clone(), api.acting_for(&grant));
        let closed = api.run_uncancelled(|buffer| async move { buffer.close_group(policy, group_id).await }).await;
        closed.map_err(|failure| if request.policy.is_none() { failure.unnamed_policy() } else { failure })?
    };
    Ok(Answer(on_wire(&policy, group)))
}

/// Discard a group that is open, ready or quarantined
#[utoipa::path(
    post,
    path = "/groups/discard",
    operation_id = "discard_group",
    tag = "agents",
    request_body = DiscardRequest,
    responses(
        (status = 200, description = "The group after it was discarded", body = GroupInfo),
        NoSuchGroup,
        (status = 409, description = "`group-decided`: the group is in a batch, or in a final state"),
    )
)]
pub(crate) async fn discard(
    State(api): State<Api>,
    Caller(grant): Caller,
    Json(request): Json<DiscardRequest>,
) -> Result<Answer<GroupInfo>, Failure> {
    let policy = params::policy(&grant, "/policy", request.policy.as_deref())?;
    let group_id = group_id(&request.group_id)?;
    let reason = params::text("/reason", request.reason, ID_BYTES_MAX)?;
    let api = api.acting_for(&grant);
    let group = api.buffer.discard_group(policy.clone(), group_id, reason).await.map_err(Failure::from);
    let group = group.map_err(|failure| if request.policy.is_none() { failure.unnamed_policy() } else { failure })?;
    Ok(Answer(on_wire(&policy, group)))
}

fn batch_id(text: &str) -> Result<BatchId, Failure> {
    text.parse().map_err(|_| Failure::invalid("batch_id", "must be the id of a batch"))
}

fn group_id(text: &str) -> Result<GroupId, Failure> {
    GroupId::parse(text).map_err(|error| Failure::invalid("/group_id", error.to_string()))
}

fn on_wire(policy: &PolicyName, group: Group) -> GroupInfo {
    GroupInfo {
        policy: policy.to_string(),
        run: group.run.0,
        group_id: group.group_id,
        state: group.fill.state.into(),
        reason: group.reason,
        failed_filters: group.failed_filters,
        environment: group.environment,
        size: group.fill.size,
        min_size: group.min_size,
        arrived: group.fill.arrived(),
        kept: group.fill.kept,
        masked: group.fill.masked,
        dropped: group.fill.dropped,
        scoring: group.fill.scoring,
        late: group.late,
        batch_id: group.batch_id.map(|batch_id| batch_id.to_string()),
        tokens: group.tokens,
        trained_tokens: group.trained_tokens,
        reward_mean: group.reward_mean,
        reward_min: group.reward_min,
        reward_max: group.reward_max,
        versions: params::trained_versions(group.trained_versions),
        opened_at: group.opened_at.to_string(),
        deadline_at: params::time(group.deadline_at),
        decided_at: params::time(group.decided_at),
        purged_at: params::time(group.purged_at),
    }
}
