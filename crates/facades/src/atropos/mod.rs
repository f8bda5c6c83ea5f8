//! The API server of Atropos: environments post scored groups, and a trainer reads batches of a fixed number of
//! sequences.
//!
//! A post passes through the submodules in this order:
//!
//! 1. `wire`: bodies are read as leniently as the original reads them.
//! 2. `retries`: whether a post repeats one that was not answered.
//! 3. `convert`: a group as rollouts, and samples as groups again.
//! 4. `post`: groups are stored, and odd ones are answered as held.
//! 5. `batch`: groups are read, with an exact number of sequences.
//!
//! `run` is what the server remembers besides data: registrations and the step. It is a document in the database, which
//! `state` reads and changes.
//!
//! The example trainer sends its requests again if it gets no answer, registers when it starts, and never acks. A read is
//! therefore a lease, which the next read acks and settles. A batch whose answer did not arrive comes again with the next
//! read, and `/register` gives back what was read and not acked.
//!
//! What the server remembers is changed by compare-and-set. A process keeps only its last reading, and asks for a newer
//! revision with every call. Groups of odd sizes are ready groups that no batch takes until they add up
//! (`batch::held_back`). Clients repeat posts without an id, so groups are named by the digest of the body and the
//! number of the post, and a process knows which of its answers were written.

mod batch;
mod convert;
mod post;
mod retries;
mod run;
mod shared;
mod state;
mod wire;

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, Method, StatusCode},
    response::Response,
    routing::{get, post as post_to},
};
use forebay_api::http::{problem::Failure, roles::Needs};
use forebay_domain::refusal::Refusal;
use forebay_service::error::BufferError;
use forebay_wire::{
    Role::{self, Admin, Produce, Read, Train},
    Trajectory, Violation,
};
use serde_json::{Value, json};

use crate::{
    atropos::{
        convert::Names,
        run::{ENVIRONMENTS_MAX, Queued, TooManyEnvironments},
        shared::{Atropos, NAME},
        wire::{EnvIdentifier, RegisterEnv, Registration, ScoredData},
    },
    calls::{Call, Posted},
    needs_of,
};

pub(super) use shared::Shared;

/// What each route needs.
const ROUTES: &[(&str, &str, Needs)] = &[
    ("GET", "/", Needs::Nothing),
    ("GET", "/health", Needs::Nothing),
    ("POST", "/register", Needs::Role(&[Train, Admin])),
    ("POST", "/register-env", Needs::Role(PRODUCERS)),
    ("POST", "/disconnect-env", Needs::Role(PRODUCERS)),
    ("GET", "/wandb_info", Needs::Role(ALL)),
    ("GET", "/info", Needs::Role(ALL)),
    ("POST", "/scored_data", Needs::Role(PRODUCERS)),
    ("POST", "/scored_data_list", Needs::Role(PRODUCERS)),
    ("GET", "/batch", Needs::Role(&[Train, Admin])),
    ("GET", "/latest_example", Needs::Role(&[Train, Read, Admin])),
    ("GET", "/status", Needs::Role(ALL)),
    ("GET", "/status-env", Needs::Role(ALL)),
    ("GET", "/reset_data", Needs::Role(&[Admin])),
];

const PRODUCERS: &[Role] = &[Produce, Admin];
const ALL: &[Role] = &[Produce, Train, Read, Admin];

/// The rollouts of a scored group that is posted, and what its price is besides that of the body; none if it is refused.
pub(super) fn rollouts(body: &[u8]) -> Option<(Vec<Trajectory>, usize)> {
    let scored = ScoredData::parse(body).ok()?;
    let price = scored.repeated_bytes();
    let names = Names { policy: "default".to_owned(), group_id: "group".to_owned(), environment: None };
    Some((convert::rollouts(scored, &names), price))
}

pub(super) fn needs(method: &Method, route: &str) -> Needs {
    needs_of(ROUTES, method, route)
}

pub(super) fn router(atropos: &Atropos) -> Router {
    let routes = Router::new()
        .route("/", get(root))
        .route("/health", get(root))
        .route("/register", post_to(register))
        .route("/register-env", post_to(register_environment))
        .route("/disconnect-env", post_to(disconnect_environment))
        .route("/wandb_info", get(wandb_info))
        .route("/info", get(info))
        .route("/scored_data", post_to(scored_data))
        .route("/scored_data_list", post_to(scored_data_list))
        .route("/batch", get(next_batch))
        .route("/latest_example", get(latest_example))
        .route("/status", get(status))
        .route("/status-env", get(status_of_environment))
        .route("/reset_data", get(reset));
    atropos.finish(routes)
}

async fn root() -> Json<Value> {
    Json(json!({"message": "AtroposLib API"}))
}

/// A trainer begins. What it has read and not acked is given back, so that it is delivered again.
async fn register(State(atropos): State<Atropos>, call: Call, Posted(body): Posted) -> Result<Response, Failure> {
    let trainer = Registration::parse(&body.bytes).map_err(refused)?;
    let reader = call.reader(NAME, &atropos.policy)?;
    let given_back = atropos.api.run_uncancelled(|buffer| async move {
        match buffer.give_back_reads(&reader).await {
            Err(BufferError::Refused(Refusal::UnknownPolicy(_))) => Ok(0),
            given_back => given_back,
        }
    });
    if given_back.await? > 0 {
        tracing::info!("a trainer of Atropos has registered, and gets again what was read and not acked");
    }
    atropos.change(|run| run.register(trainer.clone())).await?;
    // The integer is larger than JSON libraries other than Python's can hold, so it is written by hand.
    let uuid = uuid::Uuid::new_v4().as_u128();
    Ok(json_text(format!("{{\"uuid\":{uuid}}}")))
}

async fn register_environment(
    State(atropos): State<Atropos>,
    _: Call,
    Posted(body): Posted,
) -> Result<Json<Value>, Failure> {
    let asked = RegisterEnv::parse(&body.bytes).map_err(refused)?;
    let registered = atropos.change(|run| run.register_environment(asked.clone())).await?;
    registered.map(Json).map_err(|TooManyEnvironments| {
        Failure::new(StatusCode::CONFLICT, "too-many-environments", "Too many environments are registered")
            .detail(format!("a run has at most {ENVIRONMENTS_MAX} environments; /reset_data begins another"))
    })
}

async fn disconnect_environment(
    State(atropos): State<Atropos>,
    _: Call,
    Posted(body): Posted,
) -> Result<Json<Value>, Failure> {
    let EnvIdentifier { env_id } = wire::parse(&body.bytes).map_err(refused)?;
    let found = atropos.change(|run| run.disconnect(env_id)).await?;
    Ok(Json(match found {
        Some(()) => json!({"status": "success"}),
        None => json!({"status": "failure", "error": format!("environment {env_id} is not registered")}),
    }))
}

async fn wandb_info(State(atropos): State<Atropos>, _: Call) -> Result<Json<Value>, Failure> {
    Ok(Json(atropos.run().await?.wandb_info()))
}

async fn info(State(atropos): State<Atropos>, _: Call) -> Result<Json<Value>, Failure> {
    Ok(Json(atropos.run().await?.info()))
}

async fn scored_data(State(atropos): State<Atropos>, _: Call, Posted(body): Posted) -> Result<Response, Failure> {
    post::post(&atropos, body, post::one, post::answer_one).await
}

async fn scored_data_list(State(atropos): State<Atropos>, _: Call, Posted(body): Posted) -> Result<Response, Failure> {
    post::post(&atropos, body, ScoredData::parse_list, post::answer_list).await
}

async fn next_batch(State(atropos): State<Atropos>, call: Call, headers: HeaderMap) -> Result<Response, Failure> {
    batch::next(&atropos, &call, &headers).await
}

async fn latest_example(State(atropos): State<Atropos>, _: Call, headers: HeaderMap) -> Result<Response, Failure> {
    batch::latest(&atropos, &headers).await
}

async fn status(State(atropos): State<Atropos>, _: Call) -> Result<Json<Value>, Failure> {
    let run = atropos.run().await?;
    Ok(Json(run.status(&queue(&atropos, &run).await?)))
}

async fn status_of_environment(
    State(atropos): State<Atropos>,
    _: Call,
    Posted(body): Posted,
) -> Result<Json<Value>, Failure> {
    let EnvIdentifier { env_id } = wire::parse(&body.bytes).map_err(refused)?;
    let run = atropos.run().await?;
    let Some(environment) = run.environment(env_id) else {
        return Err(Failure::invalid("/env_id", format!("environment {env_id} is not registered")));
    };
    Ok(Json(run.status_of(environment, &queue(&atropos, &run).await?)))
}

/// Begins the run anew. What was posted and not read is discarded with the reason `reset`, which the ledger keeps.
async fn reset(State(atropos): State<Atropos>, _: Call) -> Result<Response, Failure> {
    let policy = atropos.policy.clone();
    let discarded = atropos.api.run_uncancelled(|buffer| async move {
        match buffer.reset(policy, None).await {
            Err(BufferError::Refused(Refusal::UnknownPolicy(_))) => Ok(0),
            done => done.map(|done| done.groups),
        }
    });
    let groups = discarded.await?;
    atropos.change(|run| *run = run::Run::default()).await?;
    tracing::warn!(groups, policy.name = %atropos.policy, "a client of Atropos has reset the policy");
    Ok(axum::response::IntoResponse::into_response("Reset successful"))
}

/// The ready groups that are not held, by environment and size.
async fn queue(atropos: &Atropos, run: &run::Run) -> Result<Vec<Queued>, Failure> {
    let mut ready = atropos.buffer().ready_groups(atropos.policy.clone(), post::READY_MAX).await?;
    for at in post::held_back(run, &ready).into_iter().rev() {
        ready.remove(at);
    }
    let mut groups = std::collections::BTreeMap::new();
    for group in ready {
        *groups.entry((group.environment, group.samples)).or_insert(0) += 1;
    }
    let queued = |((environment, sequences), groups)| Queued { environment, sequences, groups };
    Ok(groups.into_iter().map(queued).collect())
}

fn refused(violation: Violation) -> Failure {
    Failure::invalid(violation.pointer, violation.detail)
}

fn json_text(text: String) -> Response {
    axum::response::IntoResponse::into_response(([(axum::http::header::CONTENT_TYPE, "application/json")], text))
}
