//! Stage 5, samples: the contents of a batch, one row per segment, as sent except for masks and weights.
//!
//! The digest of every payload is checked before its page is returned.

pub mod checked;
pub mod page;
pub mod pages;

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    formats::{payload::Payload, seal::SEAL_BYTES},
    ids::{GroupPk, PolicyName, RolloutId, RolloutPk, Version},
    lease::Batch,
    looking::ledger::Story,
    rules::Rules,
    scores::Score,
    staleness::TrainedSpan,
    states::Verdict,
};

/// The part of a rollout's row that belongs to its payload: it finds the payload, says how large it is, and is sealed
/// together with it.
#[derive(Clone, Debug)]
pub struct SealedRow {
    /// Key of the row.
    pub rollout_pk: RolloutPk,
    pub group_id: String,
    pub rollout_id: String,
    pub verdict: Verdict,
    /// Reward as sent.
    pub reward: Option<f64>,
    pub policy_version: Version,
    pub segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    /// The number of bytes that its payload unpacks to.
    pub unpacked_bytes: u64,
    /// The number of bytes of the columns that are made when it is read: the advantages of tokens, where turns are
    /// compared.
    pub made_bytes: u64,
    /// Trained tokens by version as sent, if they are recorded.
    pub trained_spans: Option<Vec<TrainedSpan>>,
    /// Checksum of the row.
    pub seal: [u8; SEAL_BYTES],
}

/// A rollout of a batch, kept or masked, without its payload.
#[derive(Clone, Debug)]
pub struct BatchMember {
    pub row: SealedRow,
    pub group_pk: GroupPk,
    pub advantage: f64,
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Tokens of each segment; none if it has at most one segment.
    pub segment_tokens: Option<Vec<u64>>,
    pub trained_tokens: u64,
    /// Trained tokens of all rollouts of its group, with the mask as delivered.
    pub group_trained_tokens: u64,
    /// Tokens of versions below this one are delivered with mask 0.
    pub mask_below: Option<Version>,
    /// Checksum of the advantages of its group; none before they are known.
    pub group_seal: Option<[u8; SEAL_BYTES]>,
    /// The rules of its group.
    pub rules: Arc<Rules>,
    /// Those of its reward components that these rules read, as its row has them.
    pub components: BTreeMap<String, f64>,
    /// Scores of these names that others gave it.
    pub scores: Vec<Score>,
    /// Its turns as its row has them, if these rules compare turns: a hash, because there may be many.
    pub turns: Option<blake3::Hash>,
    /// The rewards that others gave to its turns, with the numbers of the turns.
    pub turn_rewards: Vec<(u32, f64)>,
    /// The advantages of its turns; none before they are known, and if it does not count in the baseline.
    pub turn_advantages: Option<Vec<f64>>,
}

impl BatchMember {
    /// The number of rows that it is delivered as. A rollout without segments has one row.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.row.segments.max(1) as usize
    }

    /// The tokens of each of its rows. No seal covers them: if they are damaged, the tokens of the rollout in about equal
    /// parts.
    pub fn row_tokens(&self) -> impl Iterator<Item = u64> {
        let rows = self.rows();
        let stored = self.segment_tokens.as_deref().filter(|stored| stored.len() == rows);
        let (part, rest) = (self.row.tokens / rows as u64, self.row.tokens % rows as u64);
        (0..rows).map(move |row| stored.map_or(part + u64::from((row as u64) < rest), |stored| stored[row]))
    }
}

impl AsRef<Self> for SealedRow {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl AsRef<SealedRow> for BatchMember {
    fn as_ref(&self) -> &SealedRow {
        &self.row
    }
}

/// A rollout to look at.
#[derive(Clone, Debug)]
pub struct FindContent {
    pub policy: PolicyName,
    pub rollout_id: RolloutId,
}

/// A rollout, and what its payload is checked with.
#[derive(Clone, Debug)]
pub struct StoredContent {
    /// What happened to it.
    pub story: Story,
    /// The columns of its row.
    pub member: BatchMember,
    /// The batch that contains it.
    pub batch: Option<Batch>,
    /// Whether its payload is stored.
    pub has_payload: bool,
    /// The scores that its judgement counted.
    pub scores: Vec<Score>,
}

/// A payload with the key of its rollout.
#[derive(Clone, Debug)]
pub struct StoredPayload {
    /// Key of the rollout.
    pub rollout_pk: RolloutPk,
    pub payload: Payload,
}

/// A rollout of a batch, and which of its rows are read.
#[derive(Clone, Debug)]
pub struct Part {
    pub member: BatchMember,
    /// Whether each row is wanted; none if all are.
    pub wanted: Option<Vec<bool>>,
}

impl AsRef<SealedRow> for Part {
    fn as_ref(&self) -> &SealedRow {
        &self.member.row
    }
}
