//! The rollout buffer of slime: producers write items one by one, and a trainer reads whole groups of them.
//!
//! - `write`: an item becomes a rollout of the group of its instance; `item` and `generations` say how.
//! - `read`: whole groups, as items. The next read of the same consumer acks them.
//! - `start`: a trainer begins. It says how large groups are, and gets back what it had read and not acked.
//!
//! The generation of an instance follows from the newest rollout of its execution. A rollout is posted on the condition
//! that its group is open (`NewRollout::only_open`), so a writer learns of a decision that came first, and tries the
//! next generation. The content digest has the first generation's group, so a repeated item is recognised in all of
//! them.

mod body;
mod generations;
mod item;
mod options;
mod read;
mod start;
mod write;

use axum::{
    Json, Router,
    http::Method,
    routing::{get, post},
};
use forebay_api::http::roles::Needs;
use forebay_wire::{
    Role::{Admin, Produce, Train},
    Trajectory,
};
use serde_json::{Value, json};

use self::options::Slime;
use crate::needs_of;

pub use options::SlimeOptions;

/// What each route needs.
const ROUTES: &[(&str, &str, Needs)] = &[
    ("POST", "/buffer/write", Needs::Role(&[Produce, Admin])),
    ("POST", "/get_rollout_data", Needs::Role(&[Train, Admin])),
    ("POST", "/start_rollout", Needs::Role(&[Train, Admin])),
    ("GET", "/", Needs::Nothing),
    ("GET", "/health", Needs::Nothing),
];

/// The rollout of an item that is written; none if it is refused.
pub(super) fn rollout(body: &[u8]) -> Option<Trajectory> {
    Some(item::Item::parse(body::text(body).ok()?, None).ok()?.trajectory)
}

pub(super) fn needs(method: &Method, route: &str) -> Needs {
    needs_of(ROUTES, method, route)
}

pub(super) fn router(slime: &Slime) -> Router {
    let routes = Router::new()
        .route("/buffer/write", post(write::write))
        .route("/get_rollout_data", post(read::read))
        .route("/start_rollout", post(start::start))
        .route("/", get(health))
        .route("/health", get(health));
    slime.finish(routes)
}

async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}
