//! The parts of slime's rollout buffer that the generator uses.

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use serde_json::{Value, json};

use super::Shared;

pub(crate) fn router() -> Router<Shared> {
    Router::new()
        .route("/", get(|| async { Json(json!({"status": "ok"})) }))
        .route("/start_rollout", post(start))
        .route("/buffer/write", post(write))
        .route("/get_rollout_data", post(read))
}

async fn start(State(peer): State<Shared>, Json(body): Json<Value>) -> Json<Value> {
    let mut state = peer.lock();
    state.expect(body["num_repeat_per_sample"] == "2", "the group size is text", &body);
    state.is_started = true;
    Json(json!({"message": "Rollout started"}))
}

async fn write(State(peer): State<Shared>, Json(item): Json<Value>) -> Response {
    let mut state = peer.lock();
    if let Some(refusal) = state.refusal() {
        return refusal;
    }
    let (started, length) = (state.is_started, |name: &str| item[name].as_array().map(Vec::len));
    state.expect(started, "the rollout was started", &item);
    for name in ["instance_id", "uid"] {
        state.expect(item[name].is_string(), name, &item);
    }
    let messages = item["messages"].as_array().is_some_and(|messages| {
        !messages.is_empty() && messages.iter().all(|one| one["role"].is_string() && one["content"].is_string())
    });
    state.expect(messages, "messages", &item);
    state.expect(item["reward"].is_number(), "reward", &item);
    state.expect(item["extra_info"]["timestamp"].is_string(), "timestamp", &item);
    state.expect(item["extra_info"]["finish_reason"].is_string(), "finish_reason", &item);
    if item.get("tokens").is_some() {
        let response = item["response_length"].as_u64().map(|length| length as usize);
        state.expect(length("tokens") > response, "tokens", &item);
        state.expect(length("loss_mask") == response, "loss_mask", &item);
        state.expect(length("rollout_log_probs") == response, "rollout_log_probs", &item);
    }
    state.take(item.clone());
    Json(json!({
        "success": true,
        "message": "Data has been successfully written to buffer",
        "data": {"data": [item], "meta_info": "write to buffer"},
    }))
    .into_response()
}

async fn read(State(peer): State<Shared>, Json(_): Json<Value>) -> String {
    let items = std::mem::take(&mut peer.lock().held);
    // The answer is written as text, because its first field must be `success`, and a map would be sorted.
    if items.is_empty() {
        return r#"{"success":false,"message":"No data available to read","data":{"data":[],"meta_info":{}}}"#
            .to_owned();
    }
    let message = format!("Successfully read {} items", items.len());
    let data = json!({"data": items, "meta_info": {"total_samples": items.len()}});
    format!(r#"{{"success":true,"message":"{message}","data":{data}}}"#)
}
