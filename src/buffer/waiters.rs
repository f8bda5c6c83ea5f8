//! Places of requests that wait for a batch or a version: how many may wait at once.
//!
//! Separate from [`wake`](super::wake), which ends their waits. There is one pool for each kind of wait, so that agents
//! that wait for versions never keep trainers from their batches. Within a pool each caller has a share, so that one
//! caller cannot keep out the others. Where the service needs no keys, callers cannot be told apart, and the size of the
//! pool is the only bound. A request takes its place after it has looked: one that need not wait needs no place.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use super::{ids::CallerId, refusal::Refusal};

/// The places of those who wait for one kind of thing.
#[derive(Debug)]
pub(super) struct Waiters {
    /// What they wait for, for messages.
    awaited: &'static str,
    max: usize,
    per_caller_max: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// Callers without a place have no entry.
    by_caller: HashMap<CallerId, usize>,
}

/// A place, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place<'w> {
    waiters: &'w Waiters,
    caller: Option<&'w CallerId>,
}

impl Waiters {
    pub(super) fn new(awaited: &'static str, max: usize, per_caller_max: usize) -> Self {
        Self { awaited, max, per_caller_max, taken: Mutex::default() }
    }

    /// Takes a place, or refuses at once: who waited for a place would need one for that.
    pub(super) fn enter<'w>(&'w self, caller: Option<&'w CallerId>) -> Result<Place<'w>, Refusal> {
        let Self { awaited, max, per_caller_max, .. } = *self;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= max {
            return Err(Refusal::TooManyWaiters { awaited, max });
        }
        if let Some(caller) = caller {
            let of_caller = taken.by_caller.get(caller).copied().unwrap_or(0);
            if of_caller >= per_caller_max {
                return Err(Refusal::TooManyWaitersOfKey { awaited, max: per_caller_max });
            }
            taken.by_caller.insert(caller.clone(), of_caller + 1);
        }
        taken.all += 1;
        Ok(Place { waiters: self, caller })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut taken = self.waiters.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        let Some(caller) = self.caller else { return };
        if let Some(of_caller) = taken.by_caller.get_mut(caller) {
            *of_caller -= 1;
            if *of_caller == 0 {
                taken.by_caller.remove(caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_has_a_share_and_all_have_a_bound() {
        let (one, other) = (CallerId::new("one"), CallerId::new("other"));
        let waiters = Waiters::new("a batch", 3, 2);
        let first = waiters.enter(Some(&one)).expect("a place is free");
        let _second = waiters.enter(Some(&one)).expect("a place is free");
        let refused = waiters.enter(Some(&one)).expect_err("its share is used up");
        assert_eq!(refused, Refusal::TooManyWaitersOfKey { awaited: "a batch", max: 2 });
        let third = waiters.enter(Some(&other)).expect("another caller has a share of its own");
        let refused = waiters.enter(None).expect_err("all places are taken");
        assert_eq!(refused, Refusal::TooManyWaiters { awaited: "a batch", max: 3 });
        drop(first);
        drop(third);
        assert_eq!(waiters.taken.lock().expect("nobody panicked").by_caller.len(), 1, "who left is forgotten");
        let _callers_without_keys = [waiters.enter(None), waiters.enter(None)].map(|place| place.expect("it is free"));
    }
}
