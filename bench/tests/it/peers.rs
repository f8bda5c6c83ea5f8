//! Stand-ins for the services that the generator is compared with: they check what they are sent.

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

/// What a stand-in holds.
#[derive(Default)]
pub(crate) struct State {
    /// Posted and not yet read.
    held: Vec<Value>,
    posted: usize,
    /// What was not as the format says.
    wrong: Vec<String>,
    /// Statuses of the next posts, the last first.
    refuse: Vec<u16>,
    /// What a trainer registered with.
    registered: Option<Value>,
    is_started: bool,
}

impl State {
    fn expect(&mut self, holds: bool, what: &str, body: &Value) {
        if !holds {
            self.wrong.push(format!("{what}: {body}"));
        }
    }

    /// The refusal that is next.
    fn refusal(&mut self) -> Option<Response> {
        let status = StatusCode::from_u16(self.refuse.pop()?).expect("a status");
        Some((status, [(RETRY_AFTER, "0")], Json(json!({"detail": "not today"}))).into_response())
    }

    fn take(&mut self, body: Value) {
        self.posted += 1;
        self.held.push(body);
    }
}

/// A state that handlers share.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no handler panics")
    }
}

/// A stand-in that serves.
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

    /// Bodies that were taken.
    pub(crate) fn count(&self) -> usize {
        self.state.lock().posted
    }

    /// Bodies that nobody has read.
    pub(crate) fn left(&self) -> usize {
        self.state.lock().held.len()
    }
}
