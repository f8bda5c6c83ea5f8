//! Listeners that speak the protocols of other rollout buffers, so that their clients only change an address.
//!
//! A facade is transport, like [`api`](forebay_api): it maps the calls of a protocol to the [`buffer`](forebay_service), and
//! keeps nothing in memory, so any replica can answer any call. It is separate from the API because its routes, its
//! bodies and its errors are those of the protocol. Everything else is shared: keys and their roles, limits and byte
//! budgets, TLS, metrics and the log.
//!
//! - `calls`: what handlers get of a request: what its caller may do, which consumer it is, and the body.
//! - `paths`: keys and consumers in paths, for clients that can only change their address.
//! - `object`: JSON objects as they were sent.
//! - [`slime`]: the rollout buffer of slime.
//! - `atropos`: the API server of Atropos.
//! - [`parsers`]: what tests call.
//!
//! The leases of a reader are found by the name of their consumer. They have another name while a response is sent, and
//! get that of the consumer before the response ends; so a response that does not arrive is not acked by the next read.

mod calls;
mod object;
pub mod parsers;
mod paths;
pub mod slime;

mod atropos;

use std::{net::SocketAddr, sync::Arc};

use axum::{Router, http::Method, middleware};
use forebay_api::{
    Api,
    http::{problem::Failure, roles::Needs},
};
use forebay_domain::ids::PolicyName;
use forebay_service::Buffer;

/// A facade as it is configured.
#[derive(Clone, Debug)]
pub struct FacadeConfig {
    /// Address to listen on.
    pub listen: String,
    /// The policy whose rollouts its clients write and read.
    pub policy: PolicyName,
    /// What its clients speak.
    pub protocol: Protocol,
}

/// The protocol of a facade, with its options.
#[derive(Clone, Debug)]
pub enum Protocol {
    /// The rollout buffer of slime.
    Slime(slime::SlimeOptions),
    /// The API server of Atropos.
    Atropos,
}

impl Protocol {
    /// Its name in the configuration and in the log.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Slime(_) => "slime",
            Self::Atropos => "atropos",
        }
    }
}

/// The routes of a facade on a listener with this address.
pub fn router(api: &Api, config: &FacadeConfig, listen: SocketAddr) -> Router {
    let policy = config.policy.clone();
    let router = match &config.protocol {
        Protocol::Slime(options) => {
            slime::router(&Facade::new(api.of_facade("slime:", listen, slime::needs), policy, options.clone()))
        }
        Protocol::Atropos => {
            let api = api.of_facade("atropos:", listen, atropos::needs);
            atropos::router(&Facade::new(api, policy, atropos::Shared::default()))
        }
    };
    // Prefixes are taken from a path before the routes see it, so keys never reach a metric or the log.
    Router::new().fallback_service(router).layer(middleware::map_request(paths::take_prefixes))
}

/// What the handlers of one facade share. `O` are the options of its protocol.
pub(crate) struct Facade<O> {
    api: Api,
    policy: PolicyName,
    options: Arc<O>,
}

impl<O> Clone for Facade<O> {
    fn clone(&self) -> Self {
        Self { api: self.api.clone(), policy: self.policy.clone(), options: Arc::clone(&self.options) }
    }
}

impl<O: Send + Sync + 'static> Facade<O> {
    fn new(api: Api, policy: PolicyName, options: O) -> Self {
        Self { api, policy, options: Arc::new(options) }
    }

    fn buffer(&self) -> &Buffer {
        self.api.buffer()
    }

    /// The router with the layers that all listeners have, and with the protocol's errors for unknown routes.
    fn finish(&self, routes: Router<Self>) -> Router {
        let whole =
            routes.fallback(no_such_route).method_not_allowed_fallback(forebay_api::http::problem::method_not_allowed);
        self.api.clone().layered(whole.with_state(self.clone()))
    }
}

/// Looks up what a route needs in the table of a facade. A route without an entry needs the role `admin`.
fn needs_of(routes: &[(&str, &str, Needs)], method: &Method, route: &str) -> Needs {
    // The handler of GET also answers HEAD.
    let verb = if method == Method::HEAD { "GET" } else { method.as_str() };
    let entry = routes.iter().find(|entry| entry.0 == verb && entry.1 == route);
    entry.map_or(Needs::Role(&[forebay_wire::Role::Admin]), |entry| entry.2)
}

async fn no_such_route() -> Failure {
    Failure::new(axum::http::StatusCode::NOT_FOUND, "no-such-route", "Not Found")
}
