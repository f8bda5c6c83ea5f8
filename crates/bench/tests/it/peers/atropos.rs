//! The parts of an Atropos API server that the generator uses.

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use serde_json::{Value, json};

use super::Shared;

/// The fields that a trainer must register with.
const REGISTRATION: [&str; 8] = [
    "wandb_group",
    "wandb_project",
    "batch_size",
    "max_token_len",
    "checkpoint_dir",
    "save_checkpoint_interval",
    "starting_step",
    "num_steps",
];

pub(crate) fn router() -> Router<Shared> {
    Router::new()
        .route("/info", get(|| async { Json(json!({"batch_size": -1, "max_token_len": -1})) }))
        .route("/register", post(register))
        .route("/register-env", post(register_environment))
        .route("/scored_data", post(write))
        .route("/batch", get(read))
}

async fn register(State(peer): State<Shared>, Json(body): Json<Value>) -> Json<Value> {
    let mut state = peer.lock();
    for name in REGISTRATION {
        state.expect(body.get(name).is_some(), name, &body);
    }
    state.registered = Some(body);
    Json(json!({"uuid": 7}))
}

async fn register_environment(State(peer): State<Shared>, Json(body): Json<Value>) -> Json<Value> {
    let mut state = peer.lock();
    for name in ["max_token_length", "desired_name", "weight", "group_size"] {
        state.expect(body.get(name).is_some(), name, &body);
    }
    if !state.is_started {
        return Json(json!({"status": "wait for trainer to start"}));
    }
    Json(json!({"status": "success", "env_id": 0, "wandb_name": "bench_0"}))
}

async fn write(State(peer): State<Shared>, Json(group): Json<Value>) -> Response {
    let mut state = peer.lock();
    if let Some(refusal) = state.refusal() {
        return refusal;
    }
    let lengths = |name: &str| {
        let sequences = group[name].as_array()?;
        sequences.iter().map(|sequence| sequence.as_array().map(Vec::len)).collect::<Option<Vec<usize>>>()
    };
    let tokens = lengths("tokens");
    state.expect(tokens.is_some(), "tokens", &group);
    state.expect(lengths("masks") == tokens, "masks", &group);
    state.expect(lengths("inference_logprobs") == tokens, "inference_logprobs", &group);
    state.expect(group["scores"].as_array().map(Vec::len) == tokens.as_ref().map(Vec::len), "scores", &group);
    state.expect(group["env_id"] == 0, "env_id", &group);
    let flat = |name: &str| {
        let sequences = group[name].as_array().into_iter().flatten();
        sequences.flat_map(|sequence| sequence.as_array().cloned().unwrap_or_default()).collect::<Vec<Value>>()
    };
    let masked_alike =
        flat("tokens").iter().zip(flat("masks")).zip(flat("inference_logprobs")).all(|((token, mask), logprob)| {
            if mask == -100 { logprob == 1.0 } else { mask == *token && logprob.as_f64() <= Some(0.0) }
        });
    state.expect(masked_alike, "masks are tokens or -100, and then the log-probability is 1", &group);
    state.take(group);
    Json(json!({"status": "received"})).into_response()
}

/// Returns only whole batches, with as many sequences as the trainer has registered.
async fn read(State(peer): State<Shared>) -> Json<Value> {
    let mut state = peer.lock();
    let Some(registered) = &state.registered else {
        return Json(
            json!({"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}),
        );
    };
    let batch_size = registered["batch_size"].as_u64().expect("a number") as usize;
    state.is_started = true;
    let (mut groups, mut sequences) = (0, 0);
    for group in &state.held {
        if sequences == batch_size {
            break;
        }
        sequences += group["scores"].as_array().map_or(0, Vec::len);
        groups += 1;
    }
    if sequences != batch_size {
        return Json(json!({"batch": null}));
    }
    let batch: Vec<Value> = state.held.drain(..groups).collect();
    Json(json!({"batch": batch}))
}
