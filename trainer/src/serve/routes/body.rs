//! Bodies of requests: read within bounds of bytes and time, and parsed with errors that name the field.

use std::time::Duration;

use axum::{body::Body, http::header, response::IntoResponse, response::Response};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Refusal, Site};

/// Largest body: a prompt of a million ids with six digits each fits twice.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Time in which a body must arrive.
const BODY_TIMEOUT: Duration = Duration::from_mins(1);

/// Reads a body as JSON. An empty body is an empty object.
pub(super) async fn read<T: DeserializeOwned>(site: &Site, body: Body) -> Result<T, Refusal> {
    let reading = async {
        let _place = site.app.bodies.acquire().await;
        axum::body::to_bytes(body, BODY_BYTES_MAX).await.map_err(|_| Refusal::TooLarge)
    };
    let bytes = tokio::time::timeout(BODY_TIMEOUT, reading).await.map_err(|_| Refusal::TooSlow)??;
    let text: &[u8] = if bytes.iter().all(u8::is_ascii_whitespace) { b"{}" } else { &bytes };
    let mut json = serde_json::Deserializer::from_slice(text);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        Refusal::Body(if path == "." { error.to_string() } else { format!("`{path}`: {error}") })
    })?;
    json.end().map_err(|error| Refusal::Body(error.to_string()))?;
    Ok(parsed)
}

/// Answers with JSON.
pub(super) fn json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
