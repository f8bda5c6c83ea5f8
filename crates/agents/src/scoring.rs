//! How much of an engine scores take, which teachers and audits share.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::Semaphore;

/// How many segments one engine scores at once. Reading prompts keeps an engine busy with a few of them.
pub(crate) const SCORES_AT_ONCE: usize = 16;

/// How long an engine may take for one segment. A paused engine does not answer.
pub(crate) const SCORE_TIMEOUT: Duration = Duration::from_mins(5);

/// How many audits of one engine are in memory. One runs, and the others wait for it.
const AUDITS_MAX: usize = 8;

/// The audits of one engine.
#[derive(Debug)]
pub(crate) struct Audits {
    pub(crate) places: Arc<Semaphore>,
    pub(crate) turn: Semaphore,
    pub(crate) warned: Mutex<Option<Instant>>,
}

impl Default for Audits {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(AUDITS_MAX)), turn: Semaphore::new(1), warned: Mutex::default() }
    }
}
