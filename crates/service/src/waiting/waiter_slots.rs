//! Slots for requests that wait for a batch or a version: they bound how many may wait at once.
//!
//! Separate from [`wakers`](crate::waiting::wakers), which ends the waits. There is one pool for each kind of wait, so that
//! agents that wait for versions never keep trainers from their batches. Within a pool each caller has a share, so that
//! one caller cannot use up the pool. If the service needs no keys, callers cannot be told apart, and the size of the
//! pool is the only bound. A request takes a slot only after its first check found nothing, because a request that does
//! not wait needs no slot.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use forebay_domain::{ids::CallerId, refusal::Refusal};

/// The slots for one kind of wait.
#[derive(Debug)]
pub(crate) struct WaiterSlots {
    /// What the requests wait for, for messages.
    awaited: &'static str,
    max: usize,
    per_caller_max: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// Callers without a slot have no entry.
    by_caller: HashMap<CallerId, usize>,
}

/// A slot, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot<'w> {
    waiters: &'w WaiterSlots,
    caller: Option<&'w CallerId>,
}

impl WaiterSlots {
    pub(crate) fn new(awaited: &'static str, max: usize, per_caller_max: usize) -> Self {
        Self { awaited, max, per_caller_max, taken: Mutex::default() }
    }

    /// Takes a slot, or refuses at once. Requests do not queue for slots, because a queue would need a bound of its
    /// own.
    pub(crate) fn enter<'w>(&'w self, caller: Option<&'w CallerId>) -> Result<Slot<'w>, Refusal> {
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
        Ok(Slot { waiters: self, caller })
    }
}

impl Drop for Slot<'_> {
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
        let waiters = WaiterSlots::new("a batch", 3, 2);
        let first = waiters.enter(Some(&one)).expect("a place is free");
        let _second = waiters.enter(Some(&one)).expect("a place is free");
        let refused = waiters.enter(Some(&one)).expect_err("its share is used up");
        assert_eq!(refused, Refusal::TooManyWaitersOfKey { awaited: "a batch", max: 2 });
        let third = waiters.enter(Some(&other)).expect("another caller has a share of its own");
        let refused = waiters.enter(None).expect_err("all places are taken");
        assert_eq!(refused, Refusal::TooManyWaiters { awaited: "a batch", max: 3 });
        drop(first);
        drop(third);
        assert_eq!(
            waiters.taken.lock().expect("nobody panicked").by_caller.len(),
            1,
            "a caller without a slot has no entry"
        );
        let _callers_without_keys = [waiters.enter(None), waiters.enter(None)].map(|place| place.expect("it is free"));
    }
}
