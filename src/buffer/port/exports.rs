//! Exports in the store: all rollouts of a run, read in pages.

use async_trait::async_trait;

use super::StoreError;
use crate::{
    buffer::{
        ids::{ExecutionId, GroupPk, PolicyPk, RolloutPk, Run, Step, Version},
        seal::SEAL_BYTES,
        staleness::TrainedSpan,
        states::{RolloutState, Verdict},
    },
    clock::Timestamp,
};

/// Rollouts for exports.
#[async_trait]
pub trait ExportStore: Send + Sync {
    /// The last rollout that was received, of whichever policy.
    async fn last_rollout(&self) -> Result<RolloutPk, StoreError>;
    /// The next rollouts, whole groups in the order in which they were opened, and in a group by arrival.
    async fn exported(&self, page: ExportPage) -> Result<ExportedPage, StoreError>;
}

/// Which rollouts to read next.
#[derive(Clone, Copy, Debug)]
pub struct ExportPage {
    /// Policy.
    pub policy_pk: PolicyPk,
    /// Run.
    pub run: Run,
    /// The last rollout of the export. Later ones are not read.
    pub last: RolloutPk,
    /// Where the page begins.
    pub from: ExportCursor,
}

/// A place between two rollouts of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportCursor {
    /// The group in which the page begins, or after which it begins if `after` is none.
    pub group: GroupPk,
    /// The rollout of this group after which the page begins.
    pub after: Option<RolloutPk>,
}

impl ExportCursor {
    /// The first page.
    pub const START: Self = Self { group: GroupPk(0), after: None };
}

/// Rollouts that were read, without payloads.
#[derive(Debug)]
pub struct ExportedPage {
    /// The rollouts in order. May be empty although more follow.
    pub members: Vec<ExportMember>,
    /// How many rollouts of groups whose payloads are purged were passed over.
    pub purged: u64,
    /// Where the next page begins; none after the last page.
    pub next: Option<ExportCursor>,
}

/// A rollout of an export, without its payload.
#[derive(Clone, Debug)]
pub struct ExportMember {
    /// Key of the row.
    pub rollout_pk: RolloutPk,
    /// Its id.
    pub rollout_id: String,
    /// Its group's id.
    pub group_id: String,
    /// The number of places of its group.
    pub group_size: u32,
    /// The execution that it belongs to; none if an earlier version stored it.
    pub execution_id: Option<ExecutionId>,
    /// Its verdict.
    pub verdict: Verdict,
    /// The reason of its verdict.
    pub reason: Option<String>,
    /// Its state.
    pub state: RolloutState,
    /// The step that consumed it.
    pub step: Option<Step>,
    /// Reward as sent.
    pub reward: Option<f64>,
    /// Advantage.
    pub advantage: Option<f64>,
    /// Its version.
    pub policy_version: Version,
    /// Whether the version was assumed.
    pub version_assumed: bool,
    /// Segments.
    pub segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// The number of bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// Trained tokens by version as sent, if they are recorded.
    pub trained_spans: Option<Vec<TrainedSpan>>,
    /// Checksum of its row; none in rows of versions that stored no seals.
    pub seal: Option<[u8; SEAL_BYTES]>,
    /// The time of its arrival.
    pub received_at: Timestamp,
}
