//! HTTP in and out: wire to domain and back. No SQL, no decisions.
//!
//! [`router`] is the table of contents; each resource has a file with its handlers in the same order.

mod admissions;
mod batches;
mod body;
mod document;
mod groups;
mod measure;
mod observe;
mod operations;
mod params;
#[doc(hidden)]
pub mod parsers;
mod policies;
mod problem;
mod samples;
mod trajectories;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::{Router, routing::get};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument as _;
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};
use utoipa_swagger_ui::SwaggerUi;

pub use body::BodyLimits;

use self::{body::BodyBudget, problem::Failure};
use crate::{buffer::Buffer, metrics::Metrics};

/// What every handler is given.
#[derive(Clone)]
pub struct Api {
    buffer: Buffer,
    metrics: Arc<Metrics>,
    bodies: BodyBudget,
    draining: Arc<AtomicBool>,
}

impl Api {
    /// The API of a buffer.
    #[must_use]
    pub fn new(buffer: Buffer, metrics: Arc<Metrics>, limits: BodyLimits) -> Self {
        let bodies = BodyBudget::new(limits, metrics.body_bytes_in_flight.clone());
        Self { buffer, metrics, bodies, draining: Arc::default() }
    }

    /// Runs what changes the store to its end, also when the client hangs up and its handler is dropped: who waits is
    /// woken after the commit, and what pays for a body's bytes is held for as long as they are.
    async fn to_the_end<T, E, F>(&self, work: impl FnOnce(Buffer) -> F) -> Result<T, Failure>
    where
        T: Send + 'static,
        E: Into<Failure> + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        match tokio::spawn(work(self.buffer.clone()).in_current_span()).await {
            Ok(outcome) => outcome.map_err(Into::into),
            // A bug is reported where all are.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(body::stopped()),
        }
    }

    /// Turns readiness off and answers everybody who waits.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.buffer.stop_waiting();
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Forebay",
        description = "The durable rollout buffer between LLM agents and the trainers that learn from them. \
            Errors are RFC 9457 problems with a stable `type`.",
        license(name = "MIT OR Apache-2.0")
    ),
    tags(
        (name = "agents", description = "Hand in trajectories, look up what became of them"),
        (name = "trainers", description = "Lease batches, ack them, keep the lineage of the weights"),
        (name = "policies", description = "Rules, versions and what a trainer is waiting for"),
        (name = "operations", description = "Health, metrics and totals"),
    )
)]
struct Document;

/// Every route of the service.
pub fn router(api: Api) -> Router {
    let (router, document) = routes().split_for_parts();
    let document = document::complete(document);
    router
        .merge(SwaggerUi::new("/docs").url("/openapi.json", document))
        .route("/metrics", get(operations::metrics))
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .layer(CatchPanicLayer::custom(problem::panicked))
        .layer(axum::middleware::from_fn_with_state(api.clone(), observe::observe))
        .with_state(api)
}

/// The OpenAPI document of [`router`], as pretty JSON.
#[must_use]
pub fn openapi() -> String {
    let mut text = document::complete(routes().to_openapi()).to_pretty_json().expect("the document is plain data");
    text.push('\n');
    text
}

fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(trajectories::post, trajectories::get))
        .routes(routes!(admissions::post))
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
        .routes(routes!(policies::get, policies::put))
        .routes(routes!(policies::publish))
        .routes(routes!(policies::checkpoint))
        .routes(routes!(policies::resume))
        .routes(routes!(policies::reset))
        .routes(routes!(operations::stats))
        .routes(routes!(operations::health))
        .routes(routes!(operations::ready))
}
