//! Ends work on another thread when nobody waits for it any more.
//!
//! A thread goes on after the future that waits for it was dropped. So whoever waits holds a [`Waiting`], and the work
//! asks its [`Cancellation`] in every loop over what an agent sent.

use std::sync::{Arc, Weak};

/// Held by whoever waits for the work. When it is dropped, the work is cancelled.
#[derive(Debug, Default)]
pub struct Waiting(Arc<()>);

/// Tells the work whether it is cancelled. The default is work that never is.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Option<Weak<()>>);

impl Waiting {
    /// For the work.
    #[must_use]
    pub fn cancellation(&self) -> Cancellation {
        Cancellation(Some(Arc::downgrade(&self.0)))
    }
}

impl Cancellation {
    /// Whether nobody waits any more.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|waiting| waiting.strong_count() == 0)
    }
}
