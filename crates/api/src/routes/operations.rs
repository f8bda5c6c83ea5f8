//! Health, metrics and totals.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{
    Json as Answer,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use forebay_domain::tally::Tally;
use forebay_wire::{Health, PolicyStats, Stats};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{body, guard::Caller, params::Query, problem::Failure},
    openapi::InvalidQuery,
};

/// How long the store may take to show that it can write.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a scrape waits for new values of the ledger's gauges. After that it returns the old values.
const GAUGES_TIMEOUT: Duration = Duration::from_secs(2);

/// Get totals of every policy that the caller may access, and whether they add up
#[utoipa::path(
    get,
    path = "/stats",
    operation_id = "get_stats",
    tag = "operations",
    responses(
        (status = 200, description = "Totals", body = Stats),
    )
)]
pub(crate) async fn stats(State(api): State<Api>, Caller(grant): Caller) -> Result<Answer<Stats>, Failure> {
    let tallies = api.buffer.stats().await?;
    let policies: BTreeMap<String, PolicyStats> = tallies
        .into_iter()
        .filter(|(policy, _)| grant.sees(policy))
        .map(|(policy, tallies)| {
            let stats = PolicyStats {
                received: tallies.received(),
                rollouts: tallies.rollouts(),
                groups: tallies.groups(),
                batches: tallies.batches(),
                dropped: tallies.dropped(),
                live_bytes: tallies.count(&Tally::LiveBytes),
                conserved: tallies.unconserved() == 0,
            };
            (policy.to_string(), stats)
        })
        .collect();
    let conserved = policies.values().all(|policy| policy.conserved);
    Ok(Answer(Stats { policies, conserved }))
}

/// Check that the process is alive
#[utoipa::path(
    get,
    path = "/healthz",
    operation_id = "get_health",
    tag = "operations",
    responses((status = 200, description = "Alive", body = Health))
)]
pub(crate) async fn health() -> Answer<Health> {
    Answer(Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadyQuery {
    /// With 1, everything is checked. Without it, an object store that takes no payloads does not make the service
    /// unready, because it refuses posts only, and leases and acks go on.
    full: Option<u8>,
}

/// Check that the service accepts work: its database reads and writes, and it is not stopping
#[utoipa::path(
    get,
    path = "/readyz",
    operation_id = "get_readiness",
    tag = "operations",
    params(ReadyQuery),
    responses(
        (status = 200, description = "Ready"),
        InvalidQuery,
        (status = 503, description = "Not ready"),
    )
)]
pub(crate) async fn ready(State(api): State<Api>, Query(query): Query<ReadyQuery>) -> Result<Response, Failure> {
    if api.draining.load(Ordering::Acquire) {
        return Err(body::stopped());
    }
    let not_ready = |detail: &str| {
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "not-ready", "The store does not accept work")
            .detail(detail)
            .retry()
    };
    if !api.buffer.is_database_writable() {
        return Err(not_ready("the store cannot write"));
    }
    if query.full.is_some_and(|full| full > 0) && !api.buffer.is_writable() {
        return Err(not_ready("the object store takes no payloads, so posts are refused; leases and acks go on"));
    }
    match tokio::time::timeout(READY_TIMEOUT, api.buffer.ping()).await {
        Ok(Ok(())) => Ok(Answer(json!({"status": "ready"})).into_response()),
        Ok(Err(_)) => Err(not_ready("the store cannot write")),
        Err(_) => Err(not_ready("the store did not answer in time")),
    }
}

/// Returns all metrics in the Prometheus text format. It is not in the `OpenAPI` document, because Prometheus defines
/// its format.
pub(crate) async fn metrics(State(api): State<Api>) -> Result<Response, Failure> {
    // A scrape succeeds even if the store does not answer, because the other metrics matter most then.
    match tokio::time::timeout(GAUGES_TIMEOUT, api.buffer.refresh_gauges()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            api.metrics.ledger_not_read();
            tracing::warn!(error = %error, "the ledger's gauges are not up to date");
        }
        Err(_) => {
            api.metrics.ledger_not_read();
            tracing::warn!("the ledger's gauges are not up to date: the store did not answer in time");
        }
    }
    let metrics = Arc::clone(&api.metrics);
    let rendered = tokio::task::spawn_blocking(move || metrics.render()).await.map_err(|_| body::stopped())?;
    let text = rendered.map_err(|error| {
        tracing::error!(error = %error, "encoding the metrics failed");
        body::stopped()
    })?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}
