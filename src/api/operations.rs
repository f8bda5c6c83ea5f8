//! Health, metrics and totals.

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Duration};

use axum::{
    Json as Answer,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use forebay_client::wire::{Health, PolicyStats, Problem, Stats};
use serde_json::json;

use super::{Api, body, guard::Caller, problem::Failure};

/// How long the store may take to prove that it writes.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a scrape waits for the ledger's gauges before it goes without news.
const GAUGES_TIMEOUT: Duration = Duration::from_secs(2);

/// Totals of every policy that the caller sees, and whether they add up
#[utoipa::path(
    get,
    path = "/stats",
    operation_id = "get_stats",
    tag = "operations",
    responses(
        (status = 200, description = "Totals", body = Stats),
        (status = 503, description = "The store cannot answer", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn stats(State(api): State<Api>, Caller(grant): Caller) -> Result<Answer<Stats>, Failure> {
    let tallies = api.buffer.stats().await?;
    let policies: BTreeMap<String, PolicyStats> = tallies
        .into_iter()
        .filter(|(policy, _)| grant.sees(policy))
        .map(|(policy, tallies)| {
            let stats = PolicyStats {
                received: tallies.received(),
                rollouts: tallies.family("rollout"),
                groups: tallies.family("group"),
                batches: tallies.family("batch"),
                dropped: tallies.family("dropped"),
                live_bytes: tallies.value("live_bytes"),
                conserved: tallies.unconserved() == 0,
            };
            (policy.to_string(), stats)
        })
        .collect();
    let conserved = policies.values().all(|policy| policy.conserved);
    Ok(Answer(Stats { policies, conserved }))
}

/// The process is alive
#[utoipa::path(
    get,
    path = "/healthz",
    operation_id = "get_health",
    tag = "operations",
    responses((status = 200, description = "Alive", body = Health))
)]
pub(super) async fn health() -> Answer<Health> {
    Answer(Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}

/// The service takes work: its store reads and writes, and it is not stopping
#[utoipa::path(
    get,
    path = "/readyz",
    operation_id = "get_readiness",
    tag = "operations",
    responses(
        (status = 200, description = "Ready"),
        (status = 503, description = "Not ready", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn ready(State(api): State<Api>) -> Result<Response, Failure> {
    if api.draining.load(Ordering::Acquire) {
        return Err(body::stopped());
    }
    let not_ready = |detail: &str| {
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "not-ready", "The store does not take work")
            .detail(detail)
            .retry()
    };
    if !api.buffer.takes_work() {
        return Err(not_ready("the store cannot write"));
    }
    match tokio::time::timeout(READY_TIMEOUT, api.buffer.ping()).await {
        Ok(Ok(())) => Ok(Answer(json!({"status": "ready"})).into_response()),
        Ok(Err(_)) => Err(not_ready("the store cannot write")),
        Err(_) => Err(not_ready("the store did not answer in time")),
    }
}

/// Everything in Prometheus' text format. Not in the `OpenAPI` document: its contract is Prometheus'.
pub(super) async fn metrics(State(api): State<Api>) -> Result<Response, Failure> {
    // A scrape answers also when the store does not: what it says then is most needed.
    match tokio::time::timeout(GAUGES_TIMEOUT, api.buffer.refresh_gauges()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            api.metrics.gauge_failures.inc();
            tracing::warn!(error = %error, "the ledger's gauges are not up to date");
        }
        Err(_) => {
            api.metrics.gauge_failures.inc();
            tracing::warn!("the ledger's gauges are not up to date: the store did not answer in time");
        }
    }
    let text = api.metrics.render().map_err(|error| {
        tracing::error!(error = %error, "metrics could not be written");
        body::stopped()
    })?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}
