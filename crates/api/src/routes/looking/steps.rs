//! `GET /policies/{policy}/steps`: what the steps of a trainer had, one by one or several together.

use axum::{Json as Answer, extract::State};
use forebay_domain::{
    looking::steps::{BUCKETS_MAX, Spread, StepBucket, StepCursor, StepRow},
    pages::Order,
};
use forebay_wire::{self as wire, ListOrder, NumberSpread, PolicySteps, StepInfo};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        params::{self, PolicyPath, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, NoSuchPolicy},
};

/// Which steps to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StepQuery {
    /// The order of the entries; `oldest` when absent.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// The first step of a range that is shown in `buckets`. Needs `to`.
    #[param(minimum = 0)]
    from: Option<i64>,
    /// The last step of the range.
    #[param(minimum = 0)]
    to: Option<i64>,
    /// The most buckets, at most 1,000; 500 when absent.
    #[param(minimum = 1, maximum = 1000)]
    points: Option<i64>,
}

/// Buckets if the caller does not say.
const POINTS: i64 = 500;

/// See what the steps of a trainer had
///
/// Without `from` and `to`, the answer is a page of steps. With both, it has the steps of this range in buckets. The newest
/// 100,000 steps of a policy are kept, and only those of the current run are shown.
#[utoipa::path(
    get,
    path = "/policies/{policy}/steps",
    operation_id = "list_steps",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy"), StepQuery),
    responses(
        (status = 200, description = "Steps, or buckets of them", body = PolicySteps),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Query(query): Query<StepQuery>,
) -> Result<Answer<PolicySteps>, Failure> {
    if query.from.is_some() || query.to.is_some() || query.points.is_some() {
        let (from, to, points) = range(&query)?;
        let buckets = api.buffer.step_buckets(&policy, from, to, points).await?;
        let buckets = buckets.iter().map(bucket_on_wire).collect();
        return Ok(Answer(PolicySteps { steps: Vec::new(), next: None, buckets }));
    }
    let limit = params::page_limit(query.limit)?;
    let (order, after) = cursor(query.order, query.after.as_deref())?;
    let page = api.buffer.steps(&policy, order, after, limit).await?;
    let prefix = if order == Order::Newest { NEWEST_FIRST } else { "" };
    let next = page.next.map(|next| format!("{prefix}{}.{}", next.step, next.epoch));
    let steps = page.steps.iter().map(step_on_wire).collect();
    Ok(Answer(PolicySteps { steps, next, buckets: Vec::new() }))
}

/// The first characters of cursors of pages that begin with the newest step.
const NEWEST_FIRST: &str = "n";

fn range(query: &StepQuery) -> Result<(forebay_domain::ids::Step, forebay_domain::ids::Step, i64), Failure> {
    if query.order.is_some() || query.after.is_some() || query.limit.is_some() {
        return Err(Failure::invalid("from", "is for buckets, which have no `order`, `after` and `limit`"));
    }
    let both = query.from.zip(query.to).ok_or_else(|| Failure::invalid("from", "needs `to`, and `to` needs `from`"))?;
    let (from, to) = (params::step("from", both.0)?, params::step("to", both.1)?);
    if to < from {
        return Err(Failure::invalid("to", "must not be below `from`"));
    }
    match query.points.unwrap_or(POINTS) {
        points @ 1..=BUCKETS_MAX => Ok((from, to, points)),
        _ => Err(Failure::invalid("points", format!("must be 1 to {BUCKETS_MAX}"))),
    }
}

fn cursor(order: Option<ListOrder>, after: Option<&str>) -> Result<(Order, Option<StepCursor>), Failure> {
    let named = order.map(|order| match order {
        ListOrder::Oldest => Order::Oldest,
        ListOrder::Newest => Order::Newest,
    });
    let Some(after) = after else { return Ok((named.unwrap_or_default(), None)) };
    let (order, place) = match after.strip_prefix(NEWEST_FIRST) {
        Some(place) => (Order::Newest, place),
        None => (Order::Oldest, after),
    };
    if named.is_some_and(|named| named != order) {
        return Err(Failure::invalid("after", "is of a page in the other `order`; leave `order` out, or `after`"));
    }
    let (step, epoch) = place.split_once('.').unwrap_or((place, ""));
    Ok((order, Some(StepCursor { step: params::row_key(step)?, epoch: params::row_key(epoch)? })))
}

fn step_on_wire(row: &StepRow) -> StepInfo {
    let share = |sum: f64, count: i64| (count > 0).then(|| sum / count as f64);
    StepInfo {
        step: row.step,
        epoch: row.epoch,
        acked_at: row.acked_at.to_string(),
        undone: row.undone,
        batches: row.batches,
        groups: row.groups,
        flat_groups: row.flat_groups,
        rollouts: row.rollouts,
        tokens: row.tokens,
        trained_tokens: row.trained_tokens,
        reward_trained: share(row.reward_sum, row.reward_count),
        reward_all: row.reward_all,
        staleness_mean: share(row.stale_sum as f64, row.groups),
        staleness_max: row.stale_max,
        waited_ms: row.waited_us / 1_000,
        held_ms: row.held_us / 1_000,
        attempts: row.attempts,
        version: row.version,
    }
}

fn bucket_on_wire(bucket: &StepBucket) -> wire::StepBucket {
    let spread = |spread: Option<Spread>| spread.map(|Spread { mean, min, max }| NumberSpread { mean, min, max });
    wire::StepBucket {
        step_from: bucket.step_from,
        step_to: bucket.step_to,
        acked_at: bucket.acked_at.to_string(),
        steps: bucket.steps,
        undone: bucket.undone,
        reward_trained: spread(bucket.reward_trained),
        reward_all: spread(bucket.reward_all),
        staleness: spread(bucket.staleness),
        staleness_max: bucket.staleness_max,
        tokens: spread(bucket.tokens),
        groups: spread(bucket.groups),
        flat_groups: spread(bucket.flat_groups),
        waited_ms: spread(bucket.waited_ms),
        held_ms: spread(bucket.held_ms),
        attempts_max: bucket.attempts_max,
        version: bucket.version,
    }
}
