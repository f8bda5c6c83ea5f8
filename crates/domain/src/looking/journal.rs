//! The journal: what operators and time did to a policy.
//!
//! Separate from the [`ledger`](super::ledger), which says what became of rollouts. Most entries are written by the
//! transactions that do what they tell. What no transaction knows, such as that agents are refused, is a [`Notice`].

use crate::{
    clock::Timestamp,
    ids::{BatchId, CallerId, PolicyName, PolicyPk, Run, Step},
    pages::Cursor,
    rules::changes,
};

use forebay_wire::PolicyRules;
use serde_json::{Value, json};

/// Which page of a journal to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadJournal {
    pub policy: PolicyPk,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries.
    pub limit: u32,
}

/// An entry as it is stored. Other versions may have written kinds that this one does not know.
#[derive(Clone, Debug)]
pub struct JournalEntry {
    /// When it happened.
    pub at: Timestamp,
    /// What happened.
    pub kind: String,
    /// The key of the person who did it; none if time did it, or if the service needs no keys.
    pub key_id: Option<CallerId>,
    /// More about it.
    pub detail: Value,
}

/// Something that a process noticed. Several processes may notice the same.
#[derive(Clone, Debug)]
pub struct Notice {
    pub policy: PolicyName,
    /// What it is.
    pub happening: Happening,
    /// When.
    pub at: Timestamp,
}

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
        batch: BatchId,
        /// How often its leases ended by expiry or nack.
        failed_deliveries: u32,
        /// Why.
        reason: Option<String>,
    },
    /// Groups of a batch are not delivered any more.
    GroupsQuarantined {
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
