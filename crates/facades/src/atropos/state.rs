//! The state of the run in the database.
//!
//! Separate from `run`, which decides what changes. The last state that was read is kept with its revision, so that an
//! unchanged one is not read again; every call asks whether it is still the newest.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;
use forebay_api::http::problem::Failure;
use forebay_domain::facades::FacadeState;

use crate::atropos::{run::Run, shared::Atropos};

/// How often a change is tried while others change the state at the same time.
const ATTEMPTS_MAX: u32 = 100;

/// A state with its revision, 0 before the first one is stored.
#[derive(Clone, Default)]
struct Known {
    revision: u64,
    run: Arc<Run>,
}

/// The last state that was read.
#[derive(Default)]
pub(super) struct Cache(Mutex<Known>);

impl Cache {
    fn get(&self) -> Known {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, known: Known) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = known;
    }
}

impl Atropos {
    /// The state of the run.
    pub(super) async fn run(&self) -> Result<Arc<Run>, Failure> {
        self.newest().await.map(|known| known.run)
    }

    /// Changes the state of the run. `change` may be called several times, on newer states.
    pub(super) async fn change<T>(&self, mut change: impl FnMut(&mut Run) -> T) -> Result<T, Failure> {
        for _ in 0..ATTEMPTS_MAX {
            let known = self.newest().await?;
            let mut run = Run::clone(&known.run);
            let answer = change(&mut run);
            if run == *known.run {
                return Ok(answer);
            }
            let body = serde_json::to_string(&run).expect("a state is plain data");
            let next = Known { revision: known.revision + 1, run: Arc::new(run) };
            let (name, state) = (self.state_name(), FacadeState { revision: next.revision, body });
            let written =
                self.api.run_uncancelled(|buffer| async move { buffer.write_facade_state(name, state).await });
            if written.await? {
                self.options.cache.set(next);
                return Ok(answer);
            }
        }
        Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Too many calls change the run at once").retry())
    }

    async fn newest(&self) -> Result<Known, Failure> {
        let known = self.options.cache.get();
        let Some(FacadeState { revision, body }) =
            self.buffer().facade_state(self.state_name(), known.revision).await?
        else {
            return Ok(known);
        };
        let run = serde_json::from_str(&body).map_err(|error| {
            tracing::error!(error = %error, "the state of the facade `atropos` cannot be read");
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The state of the run is damaged")
        })?;
        let newest = Known { revision, run: Arc::new(run) };
        self.options.cache.set(newest.clone());
        Ok(newest)
    }

    /// The name of the state: each policy has its own run.
    fn state_name(&self) -> String {
        format!("atropos:{}", self.policy)
    }
}
