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

mod generations;
mod item;
mod read;
mod start;
mod write;

use axum::{
    Json, Router,
    http::Method,
    routing::{get, post},
};
use forebay_api::http::{
    body::{parse, stopped},
    problem::Failure,
    roles::Needs,
};
use forebay_wire::{
    Role::{Admin, Produce, Train},
    Trajectory,
};
use serde_json::{Value, json, value::RawValue};

use crate::{Facade, needs_of, object::Object};

/// The name of the protocol in the names of consumers.
const NAME: &str = "slime";

/// Options of the facade.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlimeOptions {
    /// The most groups of one read, if the request does not name fewer.
    pub max_groups: Option<u32>,
    /// Which entry of a reward that is an object is the reward.
    pub reward_key: Option<String>,
}

type Slime = Facade<SlimeOptions>;

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
    Some(item::Item::parse(text(body).ok()?, None).ok()?.trajectory)
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

/// The text of a JSON body.
fn text(bytes: &[u8]) -> Result<&str, Failure> {
    // Only the error needs the general parser, which says where it is.
    let refused = |_| parse::<Box<RawValue>>(bytes).err().unwrap_or_else(stopped);
    serde_json::from_slice::<&RawValue>(bytes).map(|raw| raw.get().trim()).map_err(refused)
}

/// The options in a body, which may also be absent or null.
fn options(bytes: &[u8]) -> Result<Object<'_>, Failure> {
    if bytes.is_empty() {
        return Ok(Object::default());
    }
    match text(bytes)? {
        "null" => Ok(Object::default()),
        text => Object::of(text).ok_or_else(|| Failure::invalid("", "must be an object")),
    }
}

/// A number from 1 to `max`, which may be written as a text. None if it is absent, null or an empty text.
fn number(options: &Object<'_>, key: &str, max: u32) -> Result<Option<u32>, Failure> {
    let Some(sent) = options.get(key) else { return Ok(None) };
    let text: String = serde_json::from_str(sent).unwrap_or_else(|_| sent.to_owned());
    if text.is_empty() {
        return Ok(None);
    }
    let number = text.trim().parse::<u32>().ok().filter(|number| (1..=max).contains(number));
    number.map(Some).ok_or_else(|| Failure::invalid(format!("/{key}"), format!("must be an integer from 1 to {max}")))
}
