//! `GET /policies/{policy}/series`: what happened to a policy over time, for charts.

use axum::{Json as Answer, extract::State};
use forebay_domain::{
    clock::Timestamp,
    looking::history::{METRICS_MAX, Metric, Series, SeriesRequest},
};
use forebay_wire::PolicySeries;
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

/// Seconds of a bucket if the caller does not say.
const STEP_S: u64 = 60;

/// The widest bucket: as long as the history.
const STEP_S_MAX: u64 = 180 * 86_400;

/// Which window of which metrics to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SeriesQuery {
    /// Begin of the window as RFC 3339 text; an hour before its end when absent.
    from: Option<String>,
    /// End of the window; now when absent.
    to: Option<String>,
    /// Width of a bucket in seconds, a multiple of 60; 60 when absent. Windows that begin more than a day ago get at least
    /// 600, and those that begin more than 14 days ago at least 3,600.
    #[param(minimum = 60, maximum = 15_552_000)]
    step_s: Option<u64>,
    /// Names of metrics, separated by commas, at most 16. `dropped.*` and `discarded.*` stand for the 8 rules with the
    /// largest numbers, and `other`.
    metrics: String,
}

/// See what happened to a policy over time
///
/// Counters: `received`, `tokens_received`, `kept`, `masked`, `dropped`, `late`, `dropped.RULE` (rollouts, with those of
/// discarded groups), `discarded.RULE` (groups), `decided_ready`, `stale_groups`, `acked_batches`, `acked_rollouts`,
/// `acked_tokens`, `waited_s`, `lease_expired`, `lease_nacked`. Gauges: `ready_groups`, `open_groups`, `leased_batches`,
/// `returned_batches`, `live_bytes`, `reserved`, `version`. All replicas answer the same.
#[utoipa::path(
    get,
    path = "/policies/{policy}/series",
    operation_id = "get_series",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy"), SeriesQuery),
    responses(
        (status = 200, description = "Columns of at most 2,000 buckets", body = PolicySeries),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Query(query): Query<SeriesQuery>,
) -> Result<Answer<PolicySeries>, Failure> {
    let request = SeriesRequest {
        policy,
        from: params::moment("from", query.from.as_deref())?,
        to: params::moment("to", query.to.as_deref())?,
        step: step(query.step_s.unwrap_or(STEP_S))?,
        metrics: metrics(&query.metrics)?,
    };
    Ok(Answer(on_wire(api.buffer.series(request).await?)))
}

/// Width of a bucket in minutes.
fn step(seconds: u64) -> Result<i64, Failure> {
    if !seconds.is_multiple_of(60) || !(60..=STEP_S_MAX).contains(&seconds) {
        return Err(Failure::invalid("step_s", format!("must be a multiple of 60, from 60 to {STEP_S_MAX}")));
    }
    Ok((seconds / 60) as i64)
}

fn metrics(text: &str) -> Result<Vec<Metric>, Failure> {
    let names: Vec<&str> = text.split(',').map(str::trim).collect();
    if names.len() > METRICS_MAX {
        return Err(Failure::invalid("metrics", format!("must be at most {METRICS_MAX} names")));
    }
    let parse = |name: &str| {
        Metric::parse(name).ok_or_else(|| {
            let known: Vec<&str> = Metric::names().collect();
            let known = known.join(", ");
            Failure::invalid("metrics", format!("`{name}` is none of {known}, dropped.RULE, discarded.RULE"))
        })
    };
    names.into_iter().map(parse).collect()
}

fn on_wire(series: Series) -> PolicySeries {
    let time = |minute: i64| Timestamp::from_micros(minute * 60_000_000).to_string();
    let Series { from, to, step, columns } = series;
    PolicySeries {
        from: time(from),
        to: time(to),
        step_s: step as u64 * 60,
        at: (from..to).step_by(usize::try_from(step).unwrap_or(1)).map(|minute| minute * 60).collect(),
        metrics: columns,
    }
}
