//! The journal: what operators and time did to a policy.
//!
//! Separate from the ledger, which says what became of rollouts. Most entries are written by the transactions that do what
//! they tell. What no transaction knows, such as that agents are refused, is noticed in memory and written with the next
//! sweep.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use forebay_wire::PolicyRules;
use serde_json::{Value, json};

use super::{
    Buffer,
    ids::{BatchId, PolicyName, Run, Step},
    policies,
    port::{Cursor, JournalEntry, Notice, Page, ReadJournal, StoreError},
    refusal::BufferError,
    rules::changes,
};
use crate::clock::Timestamp;

/// The most filters that a process remembers as failing. Policies have at most dozens of them.
const FAILING_MAX: usize = 10_000;

/// What can happen to a policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Happening {
    /// Other rules apply.
    RulesChanged(changes::Changed),
    /// A trainer resumed.
    Resumed {
        /// From this step, or from nothing.
        step: Option<Step>,
        /// Batches that came back.
        returned: u64,
    },
    /// A new run began.
    Reset(Run),
    /// A batch is not delivered any more.
    BatchQuarantined {
        /// The batch.
        batch: BatchId,
        /// How often its leases ended by expiry or nack.
        failed_deliveries: u32,
        /// Why.
        reason: Option<String>,
    },
    /// Groups of a batch are not delivered any more.
    GroupsQuarantined {
        /// The batch.
        batch: BatchId,
        /// How many.
        count: usize,
        /// Why.
        reason: String,
    },
    /// A batch, or its quarantined groups, is delivered again.
    Readmitted(BatchId),
    /// A group was decided by hand.
    GroupClosed(String),
    /// A group was discarded by hand.
    GroupDiscarded {
        /// The group.
        group_id: String,
        /// Why.
        reason: String,
    },
    /// Leases were not extended in time.
    LeasesExpired(u64),
    /// Agents are refused.
    BacklogFull,
    /// Agents are not refused any more.
    BacklogFreed,
    /// A filter cannot be evaluated.
    FilterFails(String),
}

impl Happening {
    /// The name in the database and on the wire.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::RulesChanged(_) => "rules-changed",
            Self::Resumed { .. } => "resumed",
            Self::Reset(_) => "reset",
            Self::BatchQuarantined { .. } => "batch-quarantined",
            Self::GroupsQuarantined { .. } => "groups-quarantined",
            Self::Readmitted(_) => "readmitted",
            Self::GroupClosed(_) => "group-closed",
            Self::GroupDiscarded { .. } => "group-discarded",
            Self::LeasesExpired(_) => "leases-expired",
            Self::BacklogFull => "backlog-full",
            Self::BacklogFreed => "backlog-freed",
            Self::FilterFails(_) => "filter-fails",
        }
    }

    /// More about it, as an object.
    #[must_use]
    pub fn detail(&self) -> Value {
        match self {
            Self::RulesChanged(changed) => json!({
                "filters_added": changed.filters_added,
                "filters_removed": changed.filters_removed,
                "filters_changed": changed.filters_changed,
                "settings_changed": changed.settings,
            }),
            Self::Resumed { step, returned } => json!({"step": step.map(|step| step.0), "returned": returned}),
            Self::Reset(run) => json!({"run": run.0}),
            Self::BatchQuarantined { batch, failed_deliveries, reason } => {
                json!({"batch_id": batch.to_string(), "failed_deliveries": failed_deliveries, "reason": reason})
            }
            Self::GroupsQuarantined { batch, count, reason } => {
                json!({"batch_id": batch.to_string(), "count": count, "reason": reason})
            }
            Self::Readmitted(batch) => json!({"batch_id": batch.to_string()}),
            Self::GroupClosed(group_id) => json!({"group_id": group_id}),
            Self::GroupDiscarded { group_id, reason } => json!({"group_id": group_id, "reason": reason}),
            Self::LeasesExpired(count) => json!({"count": count}),
            Self::BacklogFull | Self::BacklogFreed => json!({}),
            Self::FilterFails(filter) => json!({"filter": filter}),
        }
    }

    /// What the rules changed; none if they are the same.
    #[must_use]
    pub fn rules_changed(before: &PolicyRules, after: &PolicyRules) -> Option<Self> {
        let changed = changes::changed(before, after);
        (!changed.is_empty()).then_some(Self::RulesChanged(changed))
    }
}

/// What this process noticed and has not yet written.
#[derive(Debug, Default)]
pub(in crate::buffer) struct Noticed {
    waiting: Mutex<Vec<Notice>>,
    /// Policies whose backlog is full, as the journal has it.
    full: Mutex<BTreeSet<PolicyName>>,
    /// Filters that were failing, with their policies.
    failing: Mutex<BTreeSet<(PolicyName, String)>>,
}

impl Noticed {
    /// Notes that a filter could not be evaluated. Only the first time in this process counts.
    pub(in crate::buffer) fn filter_failed(&self, policy: &PolicyName, filter: &str, at: Timestamp) {
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
    pub(in crate::buffer) fn rules_changed(&self, policy: &PolicyName) {
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
pub(in crate::buffer) async fn flush(buffer: &Buffer) -> Result<(), StoreError> {
    buffer.noticed.full_now(buffer.gates.closed(), buffer.clock.now());
    let notices = buffer.noticed.take();
    if notices.is_empty() {
        return Ok(());
    }
    let written = buffer.store.note(notices.clone()).await;
    if written.is_err() {
        buffer.noticed.put_back(notices);
    }
    written
}

/// Reads a page of the journal of a policy.
pub(in crate::buffer) async fn journal(
    buffer: &Buffer,
    policy: &PolicyName,
    from: Cursor,
    limit: u32,
) -> Result<Page<JournalEntry>, BufferError> {
    let policy = policies::existing_policy(buffer, policy).await?.policy_pk;
    Ok(buffer.store.journal(ReadJournal { policy, from, limit }).await?)
}
