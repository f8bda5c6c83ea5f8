//! The listener of agents: the calls of recorded sessions.
//!
//! An agent uses the session's URL and key like those of an inference service. It can call and nothing else: sessions
//! are opened, finished and read on the main listener, so a sandbox that reaches only this one cannot grade itself.
//!
//! A call passes through the modules in this order:
//!
//! 1. `listener`: the routes; whose session it is, and which dialect.
//! 2. `body`: its body is read within a budget.
//! 3. `call`: the call is recorded once the engine has answered. `asking` has it answer, `upstreams` knows the engines
//!    and whether they are ready, `histories` knows the calls before, and `exact` renders prompts for engines that are
//!    sent ids. `references` finds answers that a call names instead of sending them.
//! 4. `answer`: has `call` answer and writes it, at once or as events. `orphans` goes on with calls whose agent is gone.
//!
//! `audits` has the engine score a sample of recorded calls again. `counting` tells agents how many tokens a prompt has,
//! and `teachers` lets engines score the segments of finished sessions. `conversations` reads what was said in recorded
//! calls. `blocking` runs what grows with the bytes of an agent, and ends it if the agent leaves.
//!
//! The dialects and the client of engines are the crate `forebay_gateway`.

mod answer;
mod asking;
pub mod audits;
mod blocking;
mod body;
mod call;
pub mod configured;
mod conversations;
mod counting;
#[cfg_attr(not(feature = "exact"), path = "no_exact.rs")]
mod exact;
mod histories;
pub mod listener;
mod orphans;
mod references;
mod refusal;
mod sampling;
mod scoring;
mod stored;
mod teachers;
pub mod upstreams;

use std::{sync::Arc, time::Duration};

use axum::http::HeaderValue;
use forebay_bounds::budget::Budget;
use forebay_service::Buffer;
use forebay_telemetry::metrics::Metrics;
use tokio::sync::watch;

use crate::{audits::AuditOptions, upstreams::Upstreams};

/// Limits and times of the calls of agents.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// The most bytes of the body of one call.
    pub body_bytes_max: usize,
    /// The most bytes of the bodies of all calls that are in flight.
    pub inflight_bytes_max: usize,
    /// How long a body may take to arrive.
    pub read_timeout: Duration,
    /// The pause between two signs of life in the events of a call that the engine still answers.
    pub keep_alive: Duration,
    /// How long a call without events waits for its answer, if its client does not say how long it waits.
    pub hold: Duration,
    /// Which recorded calls are scored again.
    pub audit: AuditOptions,
    /// The origins whose pages may call.
    pub origins: Vec<HeaderValue>,
}

/// What all calls share.
#[derive(Clone)]
pub struct Agents(Arc<Shared>);

struct Shared {
    buffer: Buffer,
    upstreams: Upstreams,
    metrics: Arc<Metrics>,
    options: AgentOptions,
    histories: histories::Histories,
    orphans: orphans::Orphans,
    /// Bytes of bodies.
    bytes: Budget,
    draining: watch::Sender<bool>,
}

impl Agents {
    fn buffer(&self) -> &Buffer {
        &self.0.buffer
    }

    fn upstreams(&self) -> &Upstreams {
        &self.0.upstreams
    }

    fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    fn histories(&self) -> &histories::Histories {
        &self.0.histories
    }

    fn orphans(&self) -> &orphans::Orphans {
        &self.0.orphans
    }

    fn options(&self) -> &AgentOptions {
        &self.0.options
    }

    /// Tells whether the service stops.
    fn draining(&self) -> watch::Receiver<bool> {
        self.0.draining.subscribe()
    }

    /// Creates what [`listener::router`] needs.
    #[must_use]
    pub fn new(buffer: Buffer, upstreams: Upstreams, metrics: Arc<Metrics>, options: AgentOptions) -> Self {
        let bytes = Budget::counted(options.inflight_bytes_max, metrics.agent_call_bytes_in_flight());
        Self(Arc::new(Shared {
            buffer,
            upstreams,
            metrics,
            options,
            histories: histories::none(),
            orphans: orphans::Orphans::default(),
            bytes,
            draining: watch::Sender::new(false),
        }))
    }

    /// Answers the calls that wait for an engine, because the service stops.
    pub fn drain(&self) {
        self.0.draining.send_replace(true);
    }
}
