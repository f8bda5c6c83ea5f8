//! The HTTP API: maps requests to domain types and results to responses. There is no SQL and no decision in this
//! crate.
//!
//! - [`router`]: the table of contents. Each resource has a file in [`mod@routes`] with its handlers in the same order;
//!   those that only read are in `routes/looking`.
//! - [`http`]: what every listener of the service needs, so also agents and facades: byte budgets, bodies, permission,
//!   problem documents, pages.
//! - [`codecs`]: how trajectories arrive as JSON and Arrow, and how samples leave.

pub mod agent_urls;
pub mod codecs;
pub mod http;
mod openapi;
#[doc(hidden)]
pub mod parsers;
pub mod routes;

use std::{
    net::SocketAddr,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{Router, middleware, routing::get};
use forebay_domain::access::Grant;
use forebay_service::{Buffer, engines::Engines};
use forebay_telemetry::metrics::Metrics;
use tokio::sync::Semaphore;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument as _;
use utoipa_axum::{router::OpenApiRouter, routes};
use utoipa_swagger_ui::SwaggerUi;

use crate::{
    agent_urls::AgentUrls,
    http::{
        body::{self, BodyLimits},
        budgets::Budgets,
        compression::Compressors,
        framing,
        guard::{self, Access, Guard, RouteNeeds},
        headers, observe,
        problem::{self, ErrorBody, Failure},
        refusals::Refusals,
    },
    routes::{
        admissions, batches, console, evals, groups, imports, keys,
        looking::{content, exports, filters, journal, series, steps, why},
        media, operations, policies, samples, score_leases, scores, sessions,
        tokenizers::{self, Tokenizers},
        trajectories, whoami,
    },
};

/// The state that every handler can use.
#[derive(Clone)]
pub struct Api {
    /// Acts for the caller.
    buffer: Buffer,
    /// Behind one pointer, because every layer that a request goes through clones the state.
    parts: Arc<Parts>,
}

/// What all requests to a listener share.
#[derive(Clone)]
pub struct Parts {
    metrics: Arc<Metrics>,
    limits: BodyLimits,
    budgets: Budgets,
    compressors: Compressors,
    /// Limits how many rollouts are unpacked at a time for people who look at them.
    content_readers: Arc<Semaphore>,
    /// Limits how many drafts of filters are tried at a time.
    filter_tries: Arc<Semaphore>,
    guard: Guard,
    refusals: Arc<Refusals>,
    draining: Arc<AtomicBool>,
    errors: ErrorBody,
    /// What routes begin with in metrics and in the log, so that the routes of listeners can be told apart.
    route_prefix: &'static str,
    /// What shows token ids as text.
    tokenizers: Tokenizers,
    /// The engines and the addresses of sessions; none if sessions cannot be opened.
    sessions: Option<(Arc<dyn Engines>, AgentUrls)>,
}

impl Deref for Api {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Api {
    /// Creates the API of a buffer. `listen` is the bound address, and `access` says who may use the service.
    #[must_use]
    pub fn new(buffer: Buffer, metrics: Arc<Metrics>, limits: BodyLimits, access: Access, listen: SocketAddr) -> Self {
        let budgets = Budgets::new(limits.budgets, &metrics);
        let parts = Parts {
            metrics,
            limits,
            budgets,
            compressors: Compressors::default(),
            content_readers: Arc::new(Semaphore::new(content::READERS_MAX)),
            filter_tries: Arc::new(Semaphore::new(filters::TRIES_MAX)),
            guard: Guard::new(access, listen),
            refusals: Arc::default(),
            draining: Arc::default(),
            errors: ErrorBody::Problem,
            route_prefix: "",
            tokenizers: Tokenizers::default(),
            sessions: None,
        };
        Self { buffer, parts: Arc::new(parts) }
    }

    /// The same API, with sessions if there is a listener for agents.
    #[must_use]
    pub fn with_sessions(self, sessions: Option<(Arc<dyn Engines>, AgentUrls)>) -> Self {
        self.with(|parts| Parts { sessions, ..parts })
    }

    /// The same API, with the tokenizers of policies.
    #[must_use]
    pub fn with_tokenizers(self, tokenizers: Tokenizers) -> Self {
        self.with(|parts| Parts { tokenizers, ..parts })
    }

    fn with(self, change: impl FnOnce(Parts) -> Parts) -> Self {
        Self { buffer: self.buffer, parts: Arc::new(change(Arc::unwrap_or_clone(self.parts))) }
    }

    /// The state of a listener that speaks another protocol. It shares everything with the API, but has routes of its own
    /// and writes errors as `FastAPI` does.
    #[must_use]
    pub fn of_facade(&self, prefix: &'static str, listen: SocketAddr, needs: RouteNeeds) -> Self {
        let guard = self.guard.of_listener(listen, needs);
        self.clone().with(|parts| Parts { guard, errors: ErrorBody::Detail, route_prefix: prefix, ..parts })
    }

    /// Puts the layers around routes that every listener of the API has.
    pub fn layered(self, router: Router) -> Router {
        router
            .layer(middleware::from_fn_with_state(self.clone(), guard::guard))
            .layer(middleware::from_fn(framing::check))
            .layer(CatchPanicLayer::custom(problem::panicked))
            .layer(middleware::from_fn_with_state(self.clone(), observe::observe))
            .layer(middleware::map_response(headers::secure))
    }

    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    pub fn limits(&self) -> BodyLimits {
        self.limits
    }

    /// Whether a grant still holds, for requests that wait.
    pub fn still_grants(&self, grant: &Grant) -> bool {
        self.guard.keyring.still_grants(grant)
    }

    /// The same API, whose changes the journal attributes to a caller.
    fn acting_for(&self, grant: &Grant) -> Self {
        Self { buffer: self.buffer.acting_for(guard::caller_id(grant)), parts: Arc::clone(&self.parts) }
    }

    /// Runs a change of the store to its end, even if the client disconnects and the handler is dropped. Waiting
    /// requests are then still woken after the commit, and the shares of the byte budget are held as long as the bytes
    /// that they pay for.
    pub async fn run_uncancelled<T, E, F>(&self, work: impl FnOnce(Buffer) -> F) -> Result<T, Failure>
    where
        T: Send + 'static,
        E: Into<Failure> + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        match tokio::spawn(work(self.buffer.clone()).in_current_span()).await {
            Ok(outcome) => outcome.map_err(Into::into),
            // A panic is a bug. It is passed on to the layer that reports all panics.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(body::stopped()),
        }
    }

    /// Makes `/readyz` fail.
    pub fn fail_readiness(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Makes `/readyz` fail, and answers all waiting requests.
    pub fn drain(&self) {
        self.fail_readiness();
        self.buffer.stop_waiting();
    }
}

/// Every route of the service.
pub fn router(api: Api) -> Router {
    let (router, document) = routes().split_for_parts();
    let router = router
        .merge(SwaggerUi::new("/docs").url("/openapi.json", openapi::complete(document)))
        .route("/metrics", get(operations::metrics))
        .route("/", get(console::page))
        .route("/console/{*path}", get(console::file))
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .with_state(api.clone());
    api.layered(router)
}

/// The OpenAPI document of [`router`], as pretty JSON.
#[must_use]
pub fn openapi() -> String {
    let mut text = openapi::complete(routes().to_openapi()).to_pretty_json().expect("the document is plain data");
    text.push('\n');
    text
}

fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(openapi::document())
        .routes(routes!(trajectories::post, trajectories::get))
        .routes(routes!(imports::post))
        .routes(routes!(media::post))
        .routes(routes!(media::put, media::get))
        .routes(routes!(media::post_column))
        .routes(routes!(media::put_column))
        .routes(routes!(admissions::post))
        .routes(routes!(scores::post, scores::get))
        .routes(routes!(score_leases::lease))
        .routes(routes!(score_leases::extend))
        .routes(routes!(score_leases::retry))
        .routes(routes!(sessions::open, sessions::list))
        .routes(routes!(sessions::get))
        .routes(routes!(sessions::turns))
        .routes(routes!(sessions::resume))
        .routes(routes!(sessions::save_state, sessions::state))
        .routes(routes!(sessions::finish))
        .routes(routes!(sessions::finish_all))
        .routes(routes!(sessions::abort))
        .routes(routes!(groups::list))
        .routes(routes!(groups::close))
        .routes(routes!(groups::discard))
        .routes(routes!(batches::lease, batches::list))
        .routes(routes!(batches::get))
        .routes(routes!(samples::get))
        .routes(routes!(batches::extend))
        .routes(routes!(batches::ack))
        .routes(routes!(batches::nack))
        .routes(routes!(batches::readmit))
        .routes(routes!(policies::list))
        .routes(routes!(policies::get, policies::put, policies::patch))
        .routes(routes!(policies::publish))
        .routes(routes!(policies::checkpoint))
        .routes(routes!(policies::resume))
        .routes(routes!(policies::reset))
        .routes(routes!(evals::put))
        .routes(routes!(evals::tasks))
        .routes(routes!(evals::list))
        .routes(routes!(why::overview))
        .routes(routes!(why::policy))
        .routes(routes!(why::id))
        .routes(routes!(series::get))
        .routes(routes!(steps::get))
        .routes(routes!(journal::get))
        .routes(routes!(tokenizers::get))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::revoke))
        .routes(routes!(whoami::get))
        .routes(routes!(content::get))
        .routes(routes!(filters::variables))
        .routes(routes!(filters::attempt))
        .routes(routes!(exports::get))
        .routes(routes!(operations::stats))
        .routes(routes!(operations::health))
        .routes(routes!(operations::ready))
}
