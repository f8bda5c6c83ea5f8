//! Stage 5, samples: what a batch holds, one row per segment, as sent except where a mask or weight says otherwise.
//!
//! Pages are bounded in bytes, and every payload's digest is checked before its page is handed out.

use forebay_client::wire::{Sample, Segment, Verdict};

use super::{
    Buffer,
    ids::BatchId,
    payload::{Damaged, Unpacked},
    refusal::{BufferError, Refusal},
    shard::{self, Shard},
    weights::RolloutMask,
};
use crate::store::{Batch, BatchMember};

/// Tokens of one page, unless a single rollout has more: about 10 MiB unpacked.
const PAGE_TOKENS: u64 = 1 << 20;

/// Rollouts of one page.
const PAGE_ROLLOUTS: usize = 256;

/// A batch being read.
pub struct SampleReader {
    buffer: Buffer,
    batch: Batch,
    members: std::vec::IntoIter<BatchMember>,
}

/// What one shard of a batch holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardTotals {
    /// Whole rollouts.
    pub rollouts: u32,
    /// Rows.
    pub samples: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
}

impl Buffer {
    /// Opens a shard of a batch for reading; needs no lease.
    pub async fn samples(&self, batch_id: BatchId, shard: Shard) -> Result<SampleReader, BufferError> {
        let batch = self.batch(batch_id).await?;
        let members = self.members(&batch).await?;
        let tokens: Vec<u64> = members.iter().map(|member| member.tokens).collect();
        let belongs = shard.members(&tokens);
        let members: Vec<_> =
            members.into_iter().zip(belongs).filter(|(_, yes)| *yes).map(|(member, _)| member).collect();
        Ok(SampleReader { buffer: self.clone(), batch, members: members.into_iter() })
    }

    /// What each of `count` shards of a batch holds.
    pub async fn shards(&self, batch: &Batch, count: u32) -> Result<Vec<ShardTotals>, BufferError> {
        let members = self.members(batch).await?;
        let tokens: Vec<u64> = members.iter().map(|member| member.tokens).collect();
        let mut totals = vec![ShardTotals::default(); count as usize];
        for (member, shard) in members.iter().zip(shard::assign(&tokens, count)) {
            let total = &mut totals[shard as usize];
            total.rollouts += 1;
            total.samples += member.segments.max(1);
            total.tokens += member.tokens;
        }
        Ok(totals)
    }

    async fn members(&self, batch: &Batch) -> Result<Vec<BatchMember>, BufferError> {
        let members = self.store.batch_members(batch.clone()).await?;
        members.ok_or_else(|| Refusal::Purged.into())
    }
}

impl SampleReader {
    /// The next rows, or none at the end.
    pub async fn next_page(&mut self) -> Result<Option<Vec<Sample>>, BufferError> {
        let page = self.take_page();
        if page.is_empty() {
            return Ok(None);
        }
        let keys = page.iter().map(|member| member.rollout_pk).collect();
        let payloads = self.buffer.store.payloads(keys).await?;
        if payloads.len() != page.len() {
            return Err(Refusal::Purged.into());
        }
        let weights = self.batch.weights;
        let unpack = move || -> Result<Vec<Sample>, Box<(BatchMember, Damaged)>> {
            let mut rows = Vec::new();
            for (member, stored) in page.iter().zip(payloads) {
                let unpacked = stored.payload.unpack().map_err(|damage| Box::new((member.clone(), damage)))?;
                rows.extend(rows_of(member, unpacked, &weights));
            }
            Ok(rows)
        };
        match tokio::task::spawn_blocking(unpack).await.map_err(|_| crate::store::StoreError::Closed)? {
            Ok(rows) => Ok(Some(rows)),
            Err(found) => {
                let (member, damage) = *found;
                tracing::error!(
                    batch.id = %self.batch.batch_id,
                    rollout.id = %member.rollout_id,
                    group.id = %member.group_id,
                    error = %damage,
                    "a stored payload is damaged; its group is quarantined"
                );
                self.buffer.store.quarantine_damaged(self.batch.batch_id, member.group_pk).await?;
                self.buffer.wakers.batch(&self.batch.policy);
                Err(Refusal::Damaged.into())
            }
        }
    }

    fn take_page(&mut self) -> Vec<BatchMember> {
        let mut tokens = 0;
        let mut page = Vec::new();
        while page.len() < PAGE_ROLLOUTS {
            let Some(next) = self.members.as_slice().first() else { break };
            tokens += next.tokens;
            if tokens > PAGE_TOKENS && !page.is_empty() {
                break;
            }
            page.extend(self.members.next());
        }
        page
    }
}

fn rows_of(member: &BatchMember, unpacked: Unpacked, weights: &super::weights::BatchWeights) -> Vec<Sample> {
    let delivers = member.verdict == Verdict::Kept;
    let mask = RolloutMask {
        trained_tokens: if delivers { member.trained_tokens } else { 0 },
        trained_samples: if delivers { member.trained_segments.into() } else { 0 },
    };
    let row = |segment: Option<Segment>, index: usize, segments: usize, of: &Unpacked| -> Sample {
        let (tokens, mut loss_mask, rest) = match segment {
            Some(mut segment) => {
                (Some(std::mem::take(&mut segment.tokens)), Some(std::mem::take(&mut segment.loss_mask)), segment)
            }
            None => (None, None, Segment::default()),
        };
        if let Some(mask) = loss_mask.as_mut().filter(|_| !delivers) {
            mask.fill(0);
        }
        let trained = loss_mask.iter().flatten().map(|&bit| u64::from(bit)).sum();
        Sample {
            rollout_id: member.rollout_id.clone(),
            group_id: member.group_id.clone(),
            segment: index as i32,
            segments: segments as i32,
            kind: rest.kind,
            environment: of.environment.clone(),
            verdict: member.verdict,
            status: of.status,
            tokens,
            response_length: loss_mask.as_ref().map_or(0, Vec::len) as i32,
            loss_mask,
            logprobs: rest.logprobs,
            teacher_logprobs: rest.teacher_logprobs,
            values: rest.values,
            temperature: of.sampling.temperature,
            reward: member.reward,
            advantage: member.advantage as f32,
            loss_weight: weights.of_sample(mask, trained),
            policy_version: Some(member.policy_version.0),
            versions: rest.versions,
            messages: of.messages.clone(),
            metadata: of.metadata.clone(),
        }
    };
    let mut unpacked = unpacked;
    let segments = std::mem::take(&mut unpacked.segments);
    if segments.is_empty() {
        return vec![row(None, 0, 0, &unpacked)];
    }
    let count = segments.len();
    segments.into_iter().enumerate().map(|(index, segment)| row(Some(segment), index, count, &unpacked)).collect()
}
