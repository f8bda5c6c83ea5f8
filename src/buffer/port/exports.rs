//! Exports in the store: all rollouts of a run, read in pages.

use async_trait::async_trait;
use forebay_domain::{
    ids::RolloutPk,
    looking::export::{ExportPage, ExportedPage},
};

use crate::buffer::port::error::StoreError;

/// Rollouts for exports.
#[async_trait]
pub trait ExportStore: Send + Sync {
    /// The last rollout that was received, of whichever policy.
    async fn last_rollout(&self) -> Result<RolloutPk, StoreError>;
    /// The next rollouts, whole groups in the order in which they were opened, and in a group by arrival.
    async fn exported(&self, page: ExportPage) -> Result<ExportedPage, StoreError>;
}
