//! The bytes of engines' answers that are in memory until they are parsed, taken from one budget.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes per permit.
const PERMIT_BYTES: usize = 1 << 10;

/// A budget of bytes for the answers of one or more engines.
#[derive(Clone, Debug)]
pub struct AnswerBudget {
    permits: Arc<Semaphore>,
    permits_max: usize,
}

/// A part of a budget, which is given back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    budget: AnswerBudget,
    permit: Option<OwnedSemaphorePermit>,
}

impl AnswerBudget {
    /// A budget of so many bytes, rounded up to KiB.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let permits_max = bytes.div_ceil(PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { permits: Arc::new(Semaphore::new(permits_max)), permits_max }
    }

    /// The largest answer that the budget has room for.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.permits_max * PERMIT_BYTES
    }

    /// Takes the bytes if they are there.
    pub(super) fn take(&self, bytes: usize) -> Option<Share> {
        let mut share = Share { budget: self.clone(), permit: None };
        share.grow(bytes).then_some(share)
    }

    /// Waits until the bytes are there, and takes them. An answer that is larger than the budget gets all of it. No answer
    /// waits here while it has bytes of the budget, so there is no deadlock.
    pub(super) async fn wait_for(&self, bytes: usize) -> Share {
        let permits = bytes.div_ceil(PERMIT_BYTES).min(self.permits_max);
        let permit = Arc::clone(&self.permits).acquire_many_owned(permits as u32).await;
        Share { budget: self.clone(), permit: Some(permit.expect("the semaphore is never closed")) }
    }
}

impl Share {
    /// Makes the share as large as these bytes. False if the budget has no room: to wait would hold up others, because
    /// this answer has bytes already.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let held = self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = bytes.div_ceil(PERMIT_BYTES).saturating_sub(held);
        if missing == 0 {
            return true;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        let Ok(more) = Arc::clone(&self.budget.permits).try_acquire_many_owned(missing) else { return false };
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            permit @ None => *permit = Some(more),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_waits_for_room_unless_it_has_bytes_already() {
        let budget = AnswerBudget::new(8 << 10);
        let mut first = budget.wait_for(5 << 10).await;
        let mut second = Box::pin(budget.wait_for(4 << 10));
        let waits = tokio::time::timeout(std::time::Duration::ZERO, &mut second).await;
        assert!(waits.is_err(), "there are 3 KiB");
        assert!(!first.grow(9 << 10));
        assert!(first.grow(1 << 10), "it has more than that");
        drop(first);
        let mut second = second.await;
        assert!(second.grow(8 << 10) && !second.grow((8 << 10) + 1));
        drop(second);
        let all = budget.wait_for(usize::MAX >> 1).await;
        assert!(tokio::time::timeout(std::time::Duration::ZERO, budget.wait_for(1)).await.is_err());
        drop(all);
    }
}
