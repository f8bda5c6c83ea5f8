//! Stage 5, samples: the contents of a batch, one row per segment, as sent except for masks and weights.
//!
//! The digest of every payload is checked before its page is returned.
//!
//! Pages are bounded by their expanded size, and all readers share a budget of bytes. The seals of the rows' columns
//! are checked as well (`formats::seal` of the domain).

use std::{collections::BTreeSet, sync::Arc};

use forebay_domain::{
    formats::payload::Damaged,
    ids::{BatchId, PolicyName},
    lease::Batch,
    peers::Awaited,
    refusal::Refusal,
    rules::Rules,
    samples::{
        BatchMember, Part, checked,
        page::{self, Block, DamagedMember, Page, StoredPart},
        pages::{self, Members},
    },
    shard::{Division, Shard},
    weights::BatchWeights,
};
use forebay_store::{
    error::StoreError,
    ops::{facades::NewestMembers, lease::QuarantineDamaged, samples::BatchMembers},
};
use forebay_wire::{ColumnRule, LossWeighting, Sample};
use tracing::instrument;

use crate::{Buffer, error::BufferError, payloads, waiting::replicas};

/// A batch that is being read.
pub struct SampleReader {
    buffer: Buffer,
    batch: Batch,
    /// The rules of its groups, also of those that are not in the shard.
    rules: Vec<Arc<Rules>>,
    members: Members<Part>,
}

/// The totals of one shard of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardTotals {
    /// The number of rollouts that have a row in it.
    pub rollouts: u32,
    /// The number of rows.
    pub samples: u32,
    /// The number of prompt and response tokens.
    pub tokens: u64,
}

impl Buffer {
    /// Opens a batch, or a shard of it, for reading; needs no lease.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch_id))]
    pub async fn samples(&self, batch_id: BatchId, shard: Option<Shard>) -> Result<SampleReader, BufferError> {
        let batch = self.batch(batch_id).await?;
        let members = members(self, &batch).await?;
        let mut rules: Vec<Arc<Rules>> = members.iter().map(|member| Arc::clone(&member.rules)).collect();
        rules.dedup_by(|next, before| Arc::ptr_eq(next, before));
        let parts: Vec<Part> = match shard {
            None => members.into_iter().map(|member| Part { member, wanted: None }).collect(),
            Some(shard) => parts_of(shard, members),
        };
        Ok(SampleReader { buffer: self.clone(), batch, rules, members: parts.into() })
    }
}

/// The rollouts that have rows in a shard.
fn parts_of(shard: Shard, members: Vec<BatchMember>) -> Vec<Part> {
    let mut belongs = shard.members(&row_tokens(&members)).into_iter();
    let part = |member: BatchMember| {
        let wanted: Vec<bool> = belongs.by_ref().take(member.rows()).collect();
        let is_whole = wanted.iter().all(|wanted| *wanted);
        wanted.contains(&true).then(|| Part { member, wanted: (!is_whole).then_some(wanted) })
    };
    members.into_iter().filter_map(part).collect()
}

impl Buffer {
    /// The totals of each shard of a batch.
    #[instrument(level = "debug", skip_all, fields(batch.id = %batch.batch_id))]
    pub async fn shards(&self, batch: &Batch, division: Division) -> Result<Vec<ShardTotals>, BufferError> {
        let members = members(self, batch).await?;
        let tokens = row_tokens(&members);
        let mut rows = division.assign(&tokens).into_iter().zip(tokens);
        let mut totals = vec![ShardTotals::default(); division.count() as usize];
        for member in &members {
            let mut shards = BTreeSet::new();
            for (shard, tokens) in rows.by_ref().take(member.rows()) {
                let total = &mut totals[shard as usize];
                total.rollouts += u32::from(shards.insert(shard));
                total.samples += 1;
                total.tokens += tokens;
            }
        }
        Ok(totals)
    }
}

/// The tokens of the rows of a batch, in order.
fn row_tokens(members: &[BatchMember]) -> Vec<u64> {
    members.iter().flat_map(BatchMember::row_tokens).collect()
}

/// The most bytes of the samples that `Buffer::newest_group` returns.
pub const NEWEST_BYTES_MAX: u64 = pages::PAGE_BYTES;

impl Buffer {
    /// The samples of the policy's newest group that is ready or in a batch.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn newest_group(&self, policy: PolicyName) -> Result<Vec<Sample>, BufferError> {
        let members = self.store.read(NewestMembers { policy }).await?;
        if pages::bytes_of(&members) > NEWEST_BYTES_MAX {
            return Ok(Vec::new());
        }
        let payloads = self.store.payloads(members.iter().map(|member| member.row.rollout_pk).collect()).await?;
        if payloads.len() != members.len() {
            return Ok(Vec::new());
        }
        let parts = members.into_iter().map(|member| Part { member, wanted: None });
        let page = parts.zip(payloads.into_iter().map(|stored| stored.payload)).collect();
        let weighting = LossWeighting::default();
        let weights = BatchWeights { weighting, constant: 1.0, groups: 0, rollouts: 0, samples: 0, trained_tokens: 0 };
        let Ok(page) = unpack(page, weights).await? else { return Ok(Vec::new()) };
        let rows = move || page.map(|row| Sample { loss_weight: 0.0, ..row }).collect();
        Ok(tokio::task::spawn_blocking(rows).await.map_err(|_| StoreError::Closed)?)
    }
}

/// Checks and unpacks rollouts, on several threads if they are large.
async fn unpack(page: Vec<StoredPart>, weights: BatchWeights) -> Result<Result<Page, Box<DamagedMember>>, StoreError> {
    let unpack = |part| tokio::task::spawn_blocking(move || Block::unpack(part, weights));
    let parts: Vec<_> = page::divide(page).into_iter().map(unpack).collect();
    // All end before an error is returned, because the caller then gives back the bytes that they hold.
    let blocks = futures::future::join_all(parts).await.into_iter().collect::<Result<Vec<_>, _>>();
    let blocks = blocks.map_err(|_| StoreError::Closed)?.into_iter().collect::<Result<Vec<_>, _>>();
    Ok(blocks.map(Page::new))
}

async fn members(buffer: &Buffer, batch: &Batch) -> Result<Vec<BatchMember>, BufferError> {
    let mut members = buffer.store.read(BatchMembers(batch.clone())).await?.ok_or(Refusal::Purged)?;
    if let Some(member) = checked::broken_groups(&members).next() {
        return Err(quarantine(buffer, batch, member, Damaged("its advantages differ from their seal")).await?);
    }
    if checked::totals(&members) != Some((batch.weights.samples, batch.weights.trained_tokens)) {
        let found = format!("the rollouts of batch {} do not add up to its totals", batch.batch_id);
        return Err(StoreError::Corrupt(found).into());
    }
    checked::whiten(&mut members);
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
    buffer
        .store
        .write(QuarantineDamaged { batch_id: batch.batch_id, group: member.group_pk, now: buffer.clock.now() })
        .await?;
    replicas::wake(buffer, Awaited::Batch, &batch.policy);
    Ok(Refusal::Damaged.into())
}

impl SampleReader {
    /// The next rollouts, or none at the end.
    pub async fn next_page(&mut self) -> Result<Option<Page>, BufferError> {
        let page = payloads::next_page(self.buffer.store.as_ref(), &mut self.members).await?;
        if page.is_empty() {
            return Ok(None);
        }
        let stored = |(part, payload): (Part, Option<_>)| payload.map(|payload| (part, payload));
        let page: Option<Vec<StoredPart>> = page.into_iter().map(stored).collect();
        match unpack(page.ok_or(Refusal::Purged)?, self.batch.weights).await? {
            Ok(page) => Ok(Some(page)),
            Err(found) => Err(quarantine(&self.buffer, &self.batch, &found.0, found.1).await?),
        }
    }

    /// How the groups declare a column that the caller asked for.
    pub fn column(&self, name: &str) -> Result<ColumnRule, Refusal> {
        let mut rules = self.rules.iter().filter_map(|rules| rules.columns.get(name));
        let Some(first) = rules.next() else {
            return Err(Refusal::invalid("columns", format!("`{name}` is declared by no group of the batch")));
        };
        let layout = |rule: &ColumnRule| (rule.dtype, rule.shape.clone(), rule.rows, rule.ragged);
        if rules.all(|rule| layout(rule) == layout(first)) {
            return Ok(first.clone());
        }
        let detail = format!(
            "the rules declared `{name}` anew while the groups of the batch arrived: read it as NDJSON, which names the uploads"
        );
        Err(Refusal::invalid("columns", detail))
    }

    /// The ids of the groups that are still to be read, in order, once for each rollout.
    pub fn group_ids(&self) -> impl Iterator<Item = &str> {
        self.members.as_slice().iter().map(|part| part.member.row.group_id.as_str())
    }

    /// The bytes of the rows of the next page; 0 at the end.
    #[must_use]
    pub fn next_page_bytes(&self) -> u64 {
        self.members.next_page_bytes()
    }
}
