//! Bounds on what a model has accepted: requests and their tokens. Beyond them a request is refused at once, so that a
//! client learns of the overload in place of waiting for an unknown time.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// What a model has accepted and not yet answered.
#[derive(Debug)]
pub(super) struct Admission {
    requests: AtomicUsize,
    tokens: AtomicUsize,
    requests_max: usize,
    tokens_max: usize,
}

/// The place of one accepted request. It is free again when the permit is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    admission: Arc<Admission>,
    tokens: usize,
}

impl Admission {
    pub(super) fn new(requests_max: usize, tokens_max: usize) -> Arc<Self> {
        Arc::new(Self { requests: AtomicUsize::new(0), tokens: AtomicUsize::new(0), requests_max, tokens_max })
    }

    /// Accepts a request that may reach `tokens` tokens, or returns `None` if there is no room for it.
    pub(super) fn admit(self: &Arc<Self>, tokens: usize) -> Option<Permit> {
        add(&self.requests, 1, self.requests_max)?;
        if add(&self.tokens, tokens, self.tokens_max).is_none() {
            self.requests.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Permit { admission: Arc::clone(self), tokens })
    }

    /// Number of tokens that accepted requests may reach.
    pub(super) fn tokens(&self) -> usize {
        self.tokens.load(Ordering::Relaxed)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.requests.fetch_sub(1, Ordering::Relaxed);
        self.admission.tokens.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

fn add(counter: &AtomicUsize, amount: usize, most: usize) -> Option<()> {
    let sum = |count: usize| count.checked_add(amount).filter(|sum| *sum <= most);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).ok().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_tokens_are_bounded_and_freed_together() {
        let admission = Admission::new(2, 100);
        let first = admission.admit(60).expect("there is room");
        assert!(admission.admit(41).is_none(), "too many tokens");
        let second = admission.admit(40).expect("a refused request leaves no trace");
        assert!(admission.admit(0).is_none(), "too many requests");
        drop(first);
        assert_eq!(admission.tokens(), 40);
        drop((admission.admit(60).expect("the room is free again"), second));
        assert_eq!(admission.tokens(), 0);
    }
}
