//! Stage 5, samples: the contents of a batch, one row per segment, as sent except for masks and weights.
//!
//! The digest of every payload is checked before its page is returned.

pub(in crate::buffer) mod checked;

use forebay_client::wire::{LossWeighting, Sample, Segment};

use self::checked::CheckedRollout;
use crate::buffer::{
    Buffer,
    ids::{BatchId, PolicyName},
    pages::{self, Members},
    payload::{Damaged, Payload},
    port::{Batch, BatchMember, StoreError, StoredPayload},
    refusal::{BufferError, Refusal},
    replicas::{self, Awaited},
    shard::{self, Shard},
    weights::BatchWeights,
};

/// A batch that is being read.
pub struct SampleReader {
    buffer: Buffer,
    batch: Batch,
    members: Members<BatchMember>,
}

/// The totals of one shard of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardTotals {
    /// The number of whole rollouts.
    pub rollouts: u32,
    /// The number of rows.
    pub samples: u32,
    /// The number of prompt and response tokens.
    pub tokens: u64,
}

pub(in crate::buffer) async fn samples(
    buffer: &Buffer,
    batch_id: BatchId,
    shard: Shard,
) -> Result<SampleReader, BufferError> {
    let batch = buffer.batch(batch_id).await?;
    let members = members(buffer, &batch).await?;
    let tokens: Vec<u64> = members.iter().map(|member| member.row.tokens).collect();
    let belongs = shard.members(&tokens);
    let members: Vec<_> = members.into_iter().zip(belongs).filter(|(_, yes)| *yes).map(|(member, _)| member).collect();
    Ok(SampleReader { buffer: buffer.clone(), batch, members: members.into() })
}

pub(in crate::buffer) async fn shards(
    buffer: &Buffer,
    batch: &Batch,
    count: u32,
) -> Result<Vec<ShardTotals>, BufferError> {
    let members = members(buffer, batch).await?;
    let tokens: Vec<u64> = members.iter().map(|member| member.row.tokens).collect();
    let mut totals = vec![ShardTotals::default(); count as usize];
    for (member, shard) in members.iter().zip(shard::assign(&tokens, count)) {
        let total = &mut totals[shard as usize];
        total.rollouts += 1;
        total.samples += member.row.segments.max(1);
        total.tokens += member.row.tokens;
    }
    Ok(totals)
}

/// The most bytes of the samples that `Buffer::newest_group` returns.
pub const NEWEST_BYTES_MAX: u64 = pages::PAGE_BYTES;

/// The samples of the newest group that is ready or in a batch. Its loss weights are not decided before it is in a batch,
/// so they are 0. Empty if there is none, or if it is larger than [`NEWEST_BYTES_MAX`] or damaged.
pub(in crate::buffer) async fn newest_group(buffer: &Buffer, policy: PolicyName) -> Result<Vec<Sample>, BufferError> {
    let members = buffer.store.newest_members(policy).await?;
    if pages::bytes_of(&members) > NEWEST_BYTES_MAX {
        return Ok(Vec::new());
    }
    let payloads = buffer.store.payloads(members.iter().map(|member| member.row.rollout_pk).collect()).await?;
    if payloads.len() != members.len() {
        return Ok(Vec::new());
    }
    let unpack = move || {
        let check = |(member, stored): (BatchMember, StoredPayload)| CheckedRollout::new(member, &stored.payload);
        members.into_iter().zip(payloads).map(check).collect::<Result<Vec<_>, _>>()
    };
    let Ok(rollouts) = tokio::task::spawn_blocking(unpack).await.map_err(|_| StoreError::Closed)? else {
        return Ok(Vec::new());
    };
    let weighting = LossWeighting::default();
    let weights = BatchWeights { weighting, constant: 1.0, rollouts: 0, samples: 0, trained_tokens: 0 };
    let rows = Page { rollouts: rollouts.into_iter(), weights, current: None };
    Ok(rows.map(|row| Sample { loss_weight: 0.0, ..row }).collect())
}

async fn members(buffer: &Buffer, batch: &Batch) -> Result<Vec<BatchMember>, BufferError> {
    let members = buffer.store.batch_members(batch.clone()).await?.ok_or(Refusal::Purged)?;
    if let Some(member) = checked::broken_groups(&members).next() {
        return Err(quarantine(buffer, batch, member, Damaged("its advantages differ from their seal")).await?);
    }
    if checked::totals(&members) != (batch.weights.samples, batch.weights.trained_tokens) {
        let found = format!("the rollouts of batch {} do not add up to its totals", batch.batch_id);
        return Err(StoreError::Corrupt(found).into());
    }
    Ok(members)
}

/// Quarantines the damaged group before the error is returned.
async fn quarantine(
    buffer: &Buffer,
    batch: &Batch,
    member: &BatchMember,
    damage: Damaged,
) -> Result<BufferError, BufferError> {
    tracing::error!(
        batch.id = %batch.batch_id,
        rollout.id = %member.row.rollout_id,
        group.id = %member.row.group_id,
        error = %damage,
        "a group is quarantined"
    );
    buffer.store.quarantine_damaged(batch.batch_id, member.group_pk, buffer.clock.now()).await?;
    replicas::wake(buffer, Awaited::Batch, &batch.policy);
    Ok(Refusal::Damaged.into())
}

/// Rollouts that were read, checked and unpacked. Their rows are built one at a time.
pub struct Page {
    rollouts: std::vec::IntoIter<CheckedRollout>,
    weights: BatchWeights,
    current: Option<RolloutRows>,
}

/// A rollout whose stored data is damaged.
type DamagedMember = (BatchMember, Damaged);

impl SampleReader {
    /// The next rollouts, or none at the end.
    pub async fn next_page(&mut self) -> Result<Option<Page>, BufferError> {
        let page = self.members.next_page(self.buffer.store.as_ref()).await?;
        if page.is_empty() {
            return Ok(None);
        }
        if page.iter().any(|(_, payload)| payload.is_none()) {
            return Err(Refusal::Purged.into());
        }
        let unpack = move || -> Result<Vec<CheckedRollout>, Box<DamagedMember>> {
            let check = |(member, payload): (BatchMember, Option<Payload>)| {
                let payload = payload?;
                let checked = CheckedRollout::new(member.clone(), &payload);
                Some(checked.map_err(|damage| Box::new((member, damage))))
            };
            page.into_iter().filter_map(check).collect()
        };
        match tokio::task::spawn_blocking(unpack).await.map_err(|_| StoreError::Closed)? {
            Ok(rollouts) => {
                Ok(Some(Page { rollouts: rollouts.into_iter(), weights: self.batch.weights, current: None }))
            }
            Err(found) => Err(quarantine(&self.buffer, &self.batch, &found.0, found.1).await?),
        }
    }

    /// The ids of the groups that are still to be read, in order, once for each rollout.
    pub fn group_ids(&self) -> impl Iterator<Item = &str> {
        self.members.as_slice().iter().map(|member| member.row.group_id.as_str())
    }

    /// The bytes of the rows of the next page; 0 at the end.
    #[must_use]
    pub fn next_page_bytes(&self) -> u64 {
        self.members.next_page_bytes()
    }
}

impl Iterator for Page {
    type Item = Sample;

    fn next(&mut self) -> Option<Sample> {
        loop {
            if let Some(row) = self.current.as_mut().and_then(Iterator::next) {
                return Some(row);
            }
            self.current = Some(RolloutRows::new(self.rollouts.next()?, self.weights));
        }
    }
}

/// The rows of one rollout.
struct RolloutRows {
    of: CheckedRollout,
    weights: BatchWeights,
    /// The segments that are left. A rollout without segments has one row without tokens.
    segments: std::vec::IntoIter<Option<Segment>>,
    count: usize,
    next: usize,
}

impl RolloutRows {
    fn new(mut of: CheckedRollout, weights: BatchWeights) -> Self {
        let segments = std::mem::take(&mut of.rollout.segments);
        let segments: Vec<Option<Segment>> =
            if segments.is_empty() { vec![None] } else { segments.into_iter().map(Some).collect() };
        Self { of, weights, count: segments.len(), segments: segments.into_iter(), next: 0 }
    }
}

impl Iterator for RolloutRows {
    type Item = Sample;

    fn next(&mut self) -> Option<Sample> {
        let segment = self.segments.next()?;
        let index = self.next;
        self.next += 1;
        let has_tokens = segment.is_some();
        let segment = segment.unwrap_or_default();
        let trained = checked::trained_tokens(&segment);
        // Only the first row carries them. Repeated in every row, they would be most of a batch of long conversations.
        let (messages, metadata) = (self.of.rollout.messages.take(), self.of.rollout.metadata.take());
        let CheckedRollout { member, rollout, mask, policy_version } = &self.of;
        Some(Sample {
            rollout_id: member.row.rollout_id.clone(),
            group_id: member.row.group_id.clone(),
            segment: index as i32,
            segments: self.count as i32,
            kind: segment.kind,
            environment: rollout.environment.clone(),
            verdict: member.row.verdict.into(),
            status: rollout.status,
            tokens: has_tokens.then_some(segment.tokens),
            response_length: segment.loss_mask.len() as i32,
            loss_mask: has_tokens.then_some(segment.loss_mask),
            logprobs: segment.logprobs,
            teacher_logprobs: segment.teacher_logprobs,
            values: segment.values,
            temperature: rollout.sampling.temperature,
            top_p: rollout.sampling.top_p,
            top_k: rollout.sampling.top_k,
            reward: member.row.reward,
            advantage: member.advantage as f32,
            loss_weight: self.weights.of_sample(*mask, trained),
            policy_version: Some(policy_version.0),
            versions: segment.versions,
            messages,
            metadata,
        })
    }
}
