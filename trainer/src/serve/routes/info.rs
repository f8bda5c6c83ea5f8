//! Routes that say what is served.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use serde_json::{Value, json};

use super::{Refusal, Site, body};

/// Every model that is meant has weights. Their threads run, because the server ends when one of them does.
pub(super) async fn health(State(site): State<Site>) -> Result<(), Refusal> {
    let mut slots = site.app.slots.iter().filter(|slot| !site.is_fixed || Arc::ptr_eq(slot, &site.slot));
    slots.try_for_each(|slot| slot.model().map(drop))
}

/// The list of models, as `OpenAI` gives it. Models without weights are not in it.
pub(super) async fn models(State(site): State<Site>) -> Response {
    let models: Vec<Value> = site
        .app
        .slots
        .iter()
        .filter_map(|slot| slot.model().ok())
        .map(|model| {
            json!({
                "id": model.name(), "object": "model", "created": model.created(), "owned_by": "forebay",
                "root": model.folder(), "max_model_len": model.context(),
            })
        })
        .collect();
    body::json(&json!({"object": "list", "data": models}))
}

/// The model that the URL means, and the label of its weights.
pub(super) async fn model_info(State(site): State<Site>) -> Result<Response, Refusal> {
    let model = site.model(None)?;
    Ok(body::json(&json!({
        "model_path": model.folder(), "served_model_name": model.name(), "is_generation": true,
        "weight_version": *model.gauges().version(),
    })))
}

/// The load and the bounds of the model that the URL means.
pub(super) async fn server_info(State(site): State<Site>) -> Result<Response, Refusal> {
    let model = site.model(None)?;
    let (gauges, limits) = (model.gauges(), model.limits());
    Ok(body::json(&json!({
        "version": env!("CARGO_PKG_VERSION"), "served_model_name": model.name(),
        "running_requests": gauges.running(), "waiting_requests": gauges.waiting(),
        "accepted_tokens": model.accepted_tokens(), "generated_tokens": gauges.drawn(),
        "peak_cache_tokens": gauges.cached_peak(), "max_cache_tokens": model.cache_tokens(),
        "max_running_requests": limits.running, "max_queued_requests": limits.queue,
        "max_total_num_tokens": limits.tokens, "context_length": model.context(),
    })))
}
