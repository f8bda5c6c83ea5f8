//! Stage 3 in the store: groups are decided or discarded outside of ingest.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    finalize::Cause,
    groups::{CloseGroup, DecidedGroup, DiscardGroup, Group},
    ids::GroupPk,
};

use crate::buffer::port::error::{Answer, StoreError};

/// The stage of the decision, for groups that no post decides.
#[async_trait]
pub trait GroupStore: Send + Sync {
    /// Decides an open group as if it had timed out.
    async fn close_group(&self, close: CloseGroup) -> Answer<Group>;
    /// Discards a group that is open, ready or quarantined.
    async fn discard_group(&self, discard: DiscardGroup) -> Answer<Group>;
    /// Sweep: open groups past their deadline, up to `limit`.
    async fn overdue_groups(&self, now: Timestamp, limit: u32) -> Result<Vec<GroupPk>, StoreError>;
    /// Sweep: decides an overdue group. None if it was decided in the meantime.
    async fn decide_overdue(
        &self,
        group: GroupPk,
        cause: Cause,
        now: Timestamp,
    ) -> Result<Option<DecidedGroup>, StoreError>;
    /// Sweep: discards groups that a concurrent post added to a run that `reset` had just ended.
    async fn discard_stragglers(&self, now: Timestamp, limit: u32) -> Result<u64, StoreError>;
}
