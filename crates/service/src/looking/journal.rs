//! The journal: what operators and time did to a policy.
//!
//! Separate from the ledger, which says what became of rollouts. Most entries are written by the transactions that do what
//! they tell. What no transaction knows, such as that agents are refused, is noticed in memory and written with the next
//! sweep.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use forebay_domain::{
    clock::Timestamp,
    ids::PolicyName,
    looking::journal::{Happening, JournalEntry, Notice, ReadJournal},
    pages::{Cursor, Page},
};
use forebay_store::{error::StoreError, ops::journal::WriteNotices};
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

/// The most filters that a process remembers as failing. Policies have at most dozens of them.
const FAILING_MAX: usize = 10_000;

/// What this process noticed and has not yet written.
#[derive(Debug, Default)]
pub(crate) struct Noticed {
    waiting: Mutex<Vec<Notice>>,
    /// Policies whose backlog is full, as the journal has it.
    full: Mutex<BTreeSet<PolicyName>>,
    /// Filters that were failing, with their policies.
    failing: Mutex<BTreeSet<(PolicyName, String)>>,
}

impl Noticed {
    /// Notes that a filter could not be evaluated. Only the first time in this process counts.
    pub(crate) fn filter_failed(&self, policy: &PolicyName, filter: &str, at: Timestamp) {
        let key = (policy.clone(), filter.to_owned());
        {
            let mut failing = lock(&self.failing);
            if failing.len() >= FAILING_MAX || !failing.insert(key) {
                return;
            }
        }
        let happening = Happening::FilterFails(filter.to_owned());
        lock(&self.waiting).push(Notice { policy: policy.clone(), happening, at });
    }

    /// Notes that other rules apply to a policy: its filters may fail anew.
    pub(crate) fn rules_changed(&self, policy: &PolicyName) {
        lock(&self.failing).retain(|(of, _)| of != policy);
    }

    /// Notes which policies refuse new groups now.
    fn full_now(&self, closed: BTreeSet<PolicyName>, at: Timestamp) {
        let mut full = lock(&self.full);
        let mut waiting = lock(&self.waiting);
        for policy in closed.difference(&full) {
            waiting.push(Notice { policy: policy.clone(), happening: Happening::BacklogFull, at });
        }
        for policy in full.difference(&closed) {
            waiting.push(Notice { policy: policy.clone(), happening: Happening::BacklogFreed, at });
        }
        *full = closed;
    }

    fn take(&self) -> Vec<Notice> {
        std::mem::take(&mut *lock(&self.waiting))
    }

    fn put_back(&self, mut notices: Vec<Notice>) {
        let mut waiting = lock(&self.waiting);
        notices.append(&mut waiting);
        *waiting = notices;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes what this process noticed. If that fails, the next sweep writes it.
pub(crate) async fn flush(buffer: &Buffer) -> Result<(), StoreError> {
    let mut full = buffer.gates.closed();
    // That no more may evaluate a policy now is nothing that happens to its training.
    full.retain(|policy| !policy.is_evaluations());
    buffer.noticed.full_now(full, buffer.clock.now());
    let notices = buffer.noticed.take();
    if notices.is_empty() {
        return Ok(());
    }
    let written = buffer.store.write(WriteNotices(notices.clone())).await;
    if written.is_err() {
        buffer.noticed.put_back(notices);
    }
    written
}

impl Buffer {
    /// What operators and time did to a policy.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn journal(
        &self,
        policy: &PolicyName,
        from: Cursor,
        limit: u32,
    ) -> Result<Page<JournalEntry>, BufferError> {
        let policy = policies::existing_policy(self, policy).await?.policy_pk;
        Ok(self.store.read(ReadJournal { policy, from, limit }).await?)
    }
}
