//! Routes for trainers and operators: pause, continue, abort, and new weights.

use std::path::PathBuf;

use axum::{
    body::Body,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;

use super::{Refusal, Site, body};
use crate::engine::PauseMode;

#[derive(Debug, Deserialize)]
pub(super) struct AbortBody {
    model: Option<String>,
    rid: Option<String>,
    #[serde(default)]
    abort_all: bool,
}

pub(super) async fn abort(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let body: AbortBody = body::read(&site, body).await?;
    let rid = body.rid.filter(|rid| !rid.is_empty());
    if rid.is_none() && !body.abort_all {
        let message = "it is missing, and `abort_all` is not set".to_owned();
        return Err(Refusal::Invalid { param: "rid", message });
    }
    site.model(body.model.as_deref())?.abort(if body.abort_all { None } else { rid });
    Ok(done("aborted"))
}

#[derive(Debug, Deserialize)]
pub(super) struct PauseBody {
    model: Option<String>,
    #[serde(default)]
    mode: PauseMode,
}

pub(super) async fn pause(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let body: PauseBody = body::read(&site, body).await?;
    site.model(body.model.as_deref())?.pause(body.mode).await?;
    Ok(done("paused"))
}

#[derive(Debug, Deserialize)]
pub(super) struct ModelBody {
    model: Option<String>,
}

pub(super) async fn resume(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let body: ModelBody = body::read(&site, body).await?;
    site.model(body.model.as_deref())?.resume().await?;
    Ok(done("continued"))
}

pub(super) async fn flush(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let body: ModelBody = body::read(&site, body).await?;
    site.model(body.model.as_deref())?.flush().await?;
    Ok(done("flushed"))
}

#[derive(Debug, Deserialize)]
pub(super) struct UpdateBody {
    model: Option<String>,
    model_path: PathBuf,
    weight_version: Option<String>,
}

/// Loads other weights. Running requests go on with them from their next token.
pub(super) async fn update(State(site): State<Site>, body: Body) -> Result<Response, Refusal> {
    let body: UpdateBody = body::read(&site, body).await?;
    let slot = site.slot(body.model.as_deref())?;
    match slot.update(&body.model_path, body.weight_version).await {
        Ok(version) => Ok(done(&format!("loaded weight version {version}"))),
        Err(error) => {
            let message = crate::chain(&error);
            tracing::warn!(model = slot.name(), error = message, "did not load weights; the old ones stay");
            let body = json!({"success": false, "message": message});
            Ok((StatusCode::BAD_REQUEST, body::json(&body)).into_response())
        }
    }
}

fn done(message: &str) -> Response {
    body::json(&json!({"success": true, "message": message}))
}
