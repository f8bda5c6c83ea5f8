//! HTTP: the table of routes, and who may call them.
//!
//! Every route exists twice: at the root, where a request may name its model in the field `model` and the first model is
//! meant otherwise, and below `/models/{name}`, where that model is meant. A trainer whose policy is one of several
//! models uses the second as the base URL of its engine.

mod body;
mod chat;
mod completion;
mod control;
mod generate;
mod info;
mod refusal;
mod stream;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::header,
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use tokio::sync::Semaphore;

pub(super) use refusal::Refusal;

use super::{
    Dialect,
    model::{ServedModel, Slot},
};

/// Number of requests whose bodies are read at once. With the largest size of a body, this bounds their memory.
const BODIES_MAX: usize = 64;

/// Everything that handlers use.
#[derive(Clone, Debug)]
pub(super) struct App {
    slots: Arc<[Arc<Slot>]>,
    dialect: Dialect,
    key: Option<blake3::Hash>,
    bodies: Arc<Semaphore>,
}

/// What a handler sees: the server, and the model that is meant if a request names none.
#[derive(Clone, Debug)]
struct Site {
    app: App,
    slot: Arc<Slot>,
    /// Whether the URL names the model.
    is_fixed: bool,
}

impl App {
    /// The routes of these models, the first of which is meant if a request names none.
    pub(super) fn new(slots: &[Arc<Slot>], dialect: Dialect, api_key: Option<&str>) -> Self {
        Self {
            slots: slots.into(),
            dialect,
            key: api_key.map(|key| blake3::hash(key.as_bytes())),
            bodies: Arc::new(Semaphore::new(BODIES_MAX)),
        }
    }

    pub(super) fn router(&self) -> Router {
        let site = |slot: &Arc<Slot>, is_fixed| Site { app: self.clone(), slot: Arc::clone(slot), is_fixed };
        let mut router = Router::new();
        if let Some(first) = self.slots.first() {
            router = router.merge(routes().with_state(site(first, false)));
        }
        for slot in &*self.slots {
            let path = format!("/models/{}", slot.name());
            router = router.nest(&path, routes().with_state(site(slot, true)));
        }
        router
            .fallback(async || Refusal::NoRoute)
            .method_not_allowed_fallback(async || Refusal::Method)
            .layer(middleware::from_fn_with_state(self.clone(), guard))
    }

    /// Aborts all requests, for the end of the server.
    pub(super) fn stop(&self) {
        for model in self.slots.iter().filter_map(|slot| slot.model().ok()) {
            model.stop();
        }
    }
}

fn routes() -> Router<Site> {
    Router::new()
        .route("/generate", post(generate::generate))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/models", get(info::models))
        .route("/health", get(info::health))
        .route("/health_generate", get(info::health))
        .route("/get_model_info", get(info::model_info))
        .route("/model_info", get(info::model_info))
        .route("/get_server_info", get(info::server_info))
        .route("/server_info", get(info::server_info))
        .route("/abort_request", post(control::abort))
        .route("/pause_generation", post(control::pause))
        .route("/continue_generation", post(control::resume))
        .route("/flush_cache", get(control::flush).post(control::flush))
        .route("/update_weights_from_disk", post(control::update))
}

impl Site {
    /// The name that a request means, whose field `model` is `named`.
    fn slot(&self, named: Option<&str>) -> Result<&Arc<Slot>, Refusal> {
        let Some(name) = named.filter(|name| !name.is_empty()) else { return Ok(&self.slot) };
        let is_meant = |slot: &&Arc<Slot>| slot.name() == name;
        let found =
            if self.is_fixed { Some(&self.slot).filter(is_meant) } else { self.app.slots.iter().find(is_meant) };
        found.ok_or_else(|| Refusal::UnknownModel(name.to_owned()))
    }

    /// The model that a request means.
    fn model(&self, named: Option<&str>) -> Result<&ServedModel, Refusal> {
        self.slot(named)?.model()
    }
}

/// Refuses callers without the key, and pages of a browser.
async fn guard(State(app): State<App>, request: Request, next: Next) -> Result<Response, Refusal> {
    let headers = request.headers();
    // A browser sends this header with every request of a page that could change something. No client of the server is a
    // page, and without the check any page that the user opens could load other weights.
    if headers.contains_key(header::ORIGIN) {
        return Err(Refusal::Page);
    }
    // Whoever checks that the server is alive needs no key.
    let is_free = request.uri().path().ends_with("/health");
    if let Some(key) = app.key.filter(|_| !is_free) {
        let sent = headers.get(header::AUTHORIZATION).and_then(|sent| sent.to_str().ok());
        let sent = sent.and_then(|sent| sent.strip_prefix("Bearer "));
        // Hashes are compared in constant time.
        if sent.is_none_or(|sent| blake3::hash(sent.as_bytes()) != key) {
            return Err(Refusal::Unauthorized);
        }
    }
    Ok(next.run(request).await)
}
