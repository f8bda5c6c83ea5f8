//! HTTP in and out: wire to domain and back. No SQL, no decisions.
//!
//! [`router`] is the table of contents; each resource has a file with its handlers in the same order. [`guard`] decides
//! who comes in, by the table in [`roles`].

mod accept;
mod admissions;
mod arrow;
mod batches;
mod body;
mod budget;
mod bulk;
mod compressed;
mod decode;
mod document;
mod explain;
mod framing;
mod groups;
mod guard;
mod headers;
mod keys;
mod observe;
mod operations;
mod params;
#[doc(hidden)]
pub mod parsers;
mod policies;
mod problem;
mod refusals;
mod roles;
mod samples;
mod trajectories;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{Router, middleware, routing::get};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument as _;
use utoipa_axum::{router::OpenApiRouter, routes};
use utoipa_swagger_ui::SwaggerUi;

pub use body::BodyLimits;
pub use budget::ByteBudgets;
pub use framing::TwoLengths;
pub use guard::Access;

use self::{budget::Budgets, compressed::Compressors, guard::Guard, problem::Failure, refusals::Refusals};
use crate::{buffer::Buffer, metrics::Metrics};

/// What every handler is given.
#[derive(Clone)]
pub struct Api {
    buffer: Buffer,
    metrics: Arc<Metrics>,
    limits: BodyLimits,
    budgets: Budgets,
    compressors: Compressors,
    guard: Guard,
    refusals: Arc<Refusals>,
    draining: Arc<AtomicBool>,
}

impl Api {
    /// The API of a buffer, at an address, for those who may come in.
    #[must_use]
    pub fn new(buffer: Buffer, metrics: Arc<Metrics>, limits: BodyLimits, access: Access, listen: SocketAddr) -> Self {
        let budgets = Budgets::new(limits.budgets, &metrics);
        Self {
            buffer,
            metrics,
            limits,
            budgets,
            compressors: Compressors::default(),
            guard: Guard::new(access, listen),
            refusals: Arc::default(),
            draining: Arc::default(),
        }
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

/// Every route of the service.
pub fn router(api: Api) -> Router {
    let (router, document) = routes().split_for_parts();
    router
        .merge(SwaggerUi::new("/docs").url("/openapi.json", document::complete(document)))
        .route("/metrics", get(operations::metrics))
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .layer(middleware::from_fn_with_state(api.clone(), guard::guard))
        .layer(middleware::from_fn(framing::check))
        .layer(CatchPanicLayer::custom(problem::panicked))
        .layer(middleware::from_fn_with_state(api.clone(), observe::observe))
        .layer(middleware::map_response(headers::secure))
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
    OpenApiRouter::with_openapi(document::document())
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
        .routes(routes!(policies::get, policies::put, policies::patch))
        .routes(routes!(policies::publish))
        .routes(routes!(policies::checkpoint))
        .routes(routes!(policies::resume))
        .routes(routes!(policies::reset))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::revoke))
        .routes(routes!(operations::stats))
        .routes(routes!(operations::health))
        .routes(routes!(operations::ready))
}
