//! Stand-ins for other services, which check the requests that they get.

pub(crate) mod atropos;
pub(crate) mod slime;

use std::sync::{Arc, Mutex, MutexGuard};

use axum::{
    Json, Router,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// The state of a stand-in.
#[derive(Default)]
pub(crate) struct State {
    /// Bodies that were posted but not yet read.
    held: Vec<Value>,
    posted: usize,
    /// Requests that do not have the service's format.
    wrong: Vec<String>,
    /// Statuses of the next posts, in reverse order.
    refuse: Vec<u16>,
    /// The registration of a trainer.
    registered: Option<Value>,
    is_started: bool,
}

impl State {
    fn expect(&mut self, holds: bool, what: &str, body: &Value) {
        if !holds {
            self.wrong.push(format!("{what}: {body}"));
        }
    }

    /// Returns the next refusal, if there is one.
    fn refusal(&mut self) -> Option<Response> {
        let status = StatusCode::from_u16(self.refuse.pop()?).expect("a status");
        Some((status, [(RETRY_AFTER, "0")], Json(json!({"detail": "not today"}))).into_response())
    }

    fn take(&mut self, body: Value) {
        self.posted += 1;
        self.held.push(body);
    }
}

/// The state that handlers share.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no handler panics")
    }
}

/// A stand-in that is running.
pub(crate) struct Peer {
    pub(crate) url: String,
    state: Shared,
}

impl Peer {
    pub(crate) async fn start(router: Router<Shared>) -> Self {
        let state = Shared::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let router = router.with_state(state.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, state }
    }

    /// Answers the next posts with these statuses.
    pub(crate) fn refuse(&self, statuses: &[u16]) {
        self.state.lock().refuse.extend(statuses);
    }

    pub(crate) fn wrong(&self) -> Vec<String> {
        self.state.lock().wrong.clone()
    }

    /// Number of bodies that were accepted.
    pub(crate) fn count(&self) -> usize {
        self.state.lock().posted
    }

    /// Number of bodies that no trainer has read.
    pub(crate) fn left(&self) -> usize {
        self.state.lock().held.len()
    }
}
