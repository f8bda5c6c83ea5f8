//! A page of a batch: rollouts that were checked and unpacked, as rows.
//!
//! Separate from the reader, which reads payloads and handles damage. A page consists of blocks, which are unpacked at
//! the same time on several threads. The columns of numbers of a block are joined, in the form in which Arrow sends them.

use std::{num::NonZero, sync::LazyLock, vec};

use forebay_wire::Sample;

use super::{
    Part,
    checked::{CheckedRollout, ones},
};
use crate::{
    formats::payload::{Damaged, Payload, SegmentColumns, SegmentHeader},
    samples::BatchMember,
    weights::BatchWeights,
};

/// The most blocks of a page.
const BLOCKS_MAX: usize = 4;

/// Unpacked bytes up to which a page is one block: another thread would cost more than it saves.
const ONE_BLOCK_BYTES: u64 = 256 << 10;

/// Rollouts that were read, checked and unpacked. As an iterator, it builds one row at a time.
pub struct Page {
    blocks: vec::IntoIter<Block>,
    current: Option<Rows>,
}

/// Some rollouts of a page.
#[derive(Debug)]
pub struct Block {
    pub rows: Vec<Row>,
    /// The columns of numbers of all rows.
    pub columns: SegmentColumns,
}

/// A row whose columns of numbers are in its block.
#[derive(Debug)]
pub struct Row {
    /// The row. Its columns of numbers are none.
    pub sample: Sample,
    /// The lengths of its columns.
    pub lengths: Lengths,
}

/// The lengths of a row's columns of numbers; none where the row does not have the column.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lengths {
    /// Prompt and response tokens.
    pub tokens: Option<usize>,
    /// 0 or 1 per response token.
    pub loss_mask: Option<usize>,
    /// Behaviour log-probabilities.
    pub logprobs: Option<usize>,
    /// Teacher log-probabilities.
    pub teacher_logprobs: Option<usize>,
    /// Critic values.
    pub values: Option<usize>,
    /// Advantages of tokens.
    pub advantages: Option<usize>,
}

/// A rollout whose stored data is damaged.
pub type DamagedMember = (BatchMember, Damaged);

/// A rollout, of which some rows are wanted, and its payload as stored.
pub type StoredPart = (Part, Payload);

impl Page {
    pub fn new(blocks: Vec<Block>) -> Self {
        Self { blocks: blocks.into_iter(), current: None }
    }

    /// The page without messages, for trainers, which have no use for them: they may be as long as the tokens.
    #[must_use]
    pub fn without_messages(mut self) -> Self {
        for row in self.blocks.as_mut_slice().iter_mut().flat_map(|block| &mut block.rows) {
            row.sample.messages = None;
        }
        self
    }

    /// The page with only those columns that were uploaded which the caller asked for.
    #[must_use]
    pub fn with_columns(mut self, asked: impl Fn(&str) -> bool) -> Self {
        for row in self.blocks.as_mut_slice().iter_mut().flat_map(|block| &mut block.rows) {
            row.sample.columns.retain(|name, _| asked(name));
        }
        self
    }

    /// The next block. A page is read either in blocks or as an iterator.
    pub fn next_block(&mut self) -> Option<Block> {
        debug_assert!(self.current.is_none(), "a row was taken from the iterator");
        self.blocks.next()
    }
}

impl Iterator for Page {
    type Item = Sample;

    fn next(&mut self) -> Option<Sample> {
        loop {
            if let Some(row) = self.current.as_mut().and_then(Iterator::next) {
                return Some(row);
            }
            self.current = Some(self.blocks.next()?.into());
        }
    }
}

/// Divides a page into parts of about the same number of bytes: one for each processor, and for each 256 KiB, but at most
/// `BLOCKS_MAX`.
pub fn divide(page: Vec<StoredPart>) -> Vec<Vec<StoredPart>> {
    static PROCESSORS: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, NonZero::get));
    let bytes: u64 = page.iter().map(|(part, _)| part.member.row.unpacked_bytes).sum();
    let parts = bytes.div_ceil(ONE_BLOCK_BYTES).clamp(1, BLOCKS_MAX.min(*PROCESSORS) as u64);
    let (mut divided, mut taken) = (vec![Vec::new()], 0);
    for (part, payload) in page {
        if taken * parts >= bytes * divided.len() as u64 && taken > 0 {
            divided.push(Vec::new());
        }
        taken += part.member.row.unpacked_bytes;
        divided.last_mut().expect("it begins with one").push((part, payload));
    }
    divided
}

impl Block {
    /// Checks and unpacks rollouts. This takes milliseconds, so async workers must not call it.
    pub fn unpack(rollouts: Vec<StoredPart>, weights: BatchWeights) -> Result<Self, Box<DamagedMember>> {
        // The number of tokens is not covered by a seal. The stored bytes, of which a token takes at least two if it is
        // not compressed, bound what a damaged number reserves.
        let stated = |(part, payload): &StoredPart| part.member.row.tokens.min(payload.body.len() as u64) as usize;
        let tokens = rollouts.iter().map(stated).sum();
        let mut columns = SegmentColumns {
            tokens: Vec::with_capacity(tokens),
            loss_mask: Vec::with_capacity(tokens),
            logprobs: Vec::with_capacity(tokens),
            ..SegmentColumns::default()
        };
        let mut rows = Vec::with_capacity(rollouts.len());
        for (Part { member, wanted }, payload) in rollouts {
            let start = Begin::at_end(&columns);
            let checked = CheckedRollout::unpack_onto(&mut columns, member.clone(), &payload);
            let checked = checked.map_err(|damage| Box::new((member, damage)))?;
            put_advantages(&mut columns, start, &checked);
            let first = rows.len();
            put_rows(&mut rows, checked, &columns.loss_mask[start.loss_mask..], weights);
            if let Some(wanted) = wanted {
                keep(&mut columns, start, rows[first..].iter().map(|row| row.lengths).zip(wanted.iter().copied()));
                let mut wanted = wanted.into_iter();
                let others = rows.extract_if(first.., |_| wanted.next() == Some(false));
                others.for_each(drop);
            }
        }
        Ok(Self { rows, columns })
    }
}

/// Leaves the advantages of a rollout's tokens, if they are delivered: 0 where the mask is 0. They are those of its turns,
/// or those that were posted; then a segment without a response may lack them, and all others have them, because the rules
/// require them.
fn put_advantages(columns: &mut SegmentColumns, start: Begin, checked: &CheckedRollout<SegmentHeader>) {
    let rules = &checked.member.rules;
    let masks = &columns.loss_mask[start.loss_mask..];
    if !rules.tokens_have_advantages() || rules.compare_turns() {
        columns.advantages.truncate(start.advantages);
    }
    if rules.compare_turns() {
        checked.put_token_advantages(&mut columns.advantages);
    }
    for (advantage, _) in columns.advantages[start.advantages..].iter_mut().zip(masks).filter(|(_, bit)| **bit == 0) {
        *advantage = 0.0;
    }
}

/// Appends the rows of a rollout. A rollout without segments has one row without tokens.
fn put_rows(rows: &mut Vec<Row>, checked: CheckedRollout<SegmentHeader>, mut loss_mask: &[u8], weights: BatchWeights) {
    let CheckedRollout { member, rollout, mask, policy_version, .. } = checked;
    let (count, tokens_have_advantages) = (rollout.segments.len(), member.rules.tokens_have_advantages());
    let compares_turns = member.rules.compare_turns();
    // Only the first row carries them. Repeated in every row, they would be most of a batch of long conversations.
    let (mut messages, mut metadata) = (rollout.messages, rollout.metadata);
    let mut put = |index: usize, segment: Option<SegmentHeader>| {
        let response = segment.as_ref().map_or(0, |segment| segment.response);
        let (own, others) = loss_mask.split_at(response);
        loss_mask = others;
        let has = |is_present: fn(&SegmentHeader) -> bool| segment.as_ref().is_some_and(is_present).then_some(response);
        let lengths = Lengths {
            tokens: segment.as_ref().map(|segment| segment.tokens),
            loss_mask: segment.as_ref().map(|segment| segment.response),
            logprobs: has(|segment| segment.logprobs),
            teacher_logprobs: has(|segment| segment.teacher_logprobs),
            values: has(|segment| segment.values),
            advantages: if compares_turns {
                segment.as_ref().map(|segment| segment.response)
            } else {
                has(|segment| segment.advantages).filter(|_| tokens_have_advantages)
            },
        };
        let (kind, versions, columns, media) =
            segment.map(|segment| (segment.kind, segment.versions, segment.columns, segment.media)).unwrap_or_default();
        let sample = Sample {
            rollout_id: member.row.rollout_id.clone(),
            group_id: member.row.group_id.clone(),
            segment: index as i32,
            segments: count.max(1) as i32,
            kind,
            environment: rollout.environment.clone(),
            verdict: member.row.verdict.into(),
            status: rollout.status,
            tokens: None,
            response_length: response as i32,
            loss_mask: None,
            logprobs: None,
            teacher_logprobs: None,
            values: None,
            advantages: None,
            temperature: rollout.sampling.temperature,
            top_p: rollout.sampling.top_p,
            top_k: rollout.sampling.top_k,
            reward: member.row.reward,
            advantage: (!tokens_have_advantages).then_some(member.advantage as f32),
            loss_weight: weights.of_sample(mask, ones(own)),
            policy_version: Some(policy_version.0),
            versions,
            columns,
            media,
            messages: messages.take(),
            metadata: metadata.take(),
        };
        rows.push(Row { sample, lengths });
    };
    if count == 0 {
        put(0, None);
    }
    for (index, segment) in rollout.segments.into_iter().enumerate() {
        put(index, Some(segment));
    }
}

/// The rows of a block that are left, and where their columns begin.
struct Rows {
    left: vec::IntoIter<Row>,
    columns: SegmentColumns,
    begin: Begin,
}

/// Where the columns of the next row begin.
#[derive(Clone, Copy, Default)]
struct Begin {
    tokens: usize,
    loss_mask: usize,
    logprobs: usize,
    teacher_logprobs: usize,
    values: usize,
    advantages: usize,
}

impl Begin {
    fn at_end(columns: &SegmentColumns) -> Self {
        let SegmentColumns { tokens, loss_mask, logprobs, teacher_logprobs, values, advantages } = columns;
        Self {
            tokens: tokens.len(),
            loss_mask: loss_mask.len(),
            logprobs: logprobs.len(),
            teacher_logprobs: teacher_logprobs.len(),
            values: values.len(),
            advantages: advantages.len(),
        }
    }
}

/// Removes the numbers of rows that are not wanted. The first row begins at `start`.
fn keep(columns: &mut SegmentColumns, start: Begin, rows: impl Iterator<Item = (Lengths, bool)> + Clone) {
    let SegmentColumns { tokens, loss_mask, logprobs, teacher_logprobs, values, advantages } = columns;
    keep_in(tokens, start.tokens, rows.clone().map(|(lengths, wanted)| (lengths.tokens, wanted)));
    keep_in(loss_mask, start.loss_mask, rows.clone().map(|(lengths, wanted)| (lengths.loss_mask, wanted)));
    keep_in(logprobs, start.logprobs, rows.clone().map(|(lengths, wanted)| (lengths.logprobs, wanted)));
    let of_teacher = rows.clone().map(|(lengths, wanted)| (lengths.teacher_logprobs, wanted));
    keep_in(teacher_logprobs, start.teacher_logprobs, of_teacher);
    keep_in(values, start.values, rows.clone().map(|(lengths, wanted)| (lengths.values, wanted)));
    keep_in(advantages, start.advantages, rows.map(|(lengths, wanted)| (lengths.advantages, wanted)));
}

fn keep_in<T: Copy>(column: &mut Vec<T>, start: usize, rows: impl Iterator<Item = (Option<usize>, bool)>) {
    let (mut from, mut to) = (start, start);
    for (length, wanted) in rows {
        let end = from + length.unwrap_or(0);
        if wanted {
            column.copy_within(from..end, to);
            to += end - from;
        }
        from = end;
    }
    column.truncate(to);
}

impl From<Block> for Rows {
    fn from(block: Block) -> Self {
        Self { left: block.rows.into_iter(), columns: block.columns, begin: Begin::default() }
    }
}

impl Iterator for Rows {
    type Item = Sample;

    fn next(&mut self) -> Option<Sample> {
        let Row { sample, lengths } = self.left.next()?;
        let Self { columns, begin, .. } = self;
        Some(Sample {
            tokens: next_of(&mut columns.tokens, &mut begin.tokens, lengths.tokens),
            loss_mask: next_of(&mut columns.loss_mask, &mut begin.loss_mask, lengths.loss_mask),
            logprobs: next_of(&mut columns.logprobs, &mut begin.logprobs, lengths.logprobs),
            teacher_logprobs: next_of(
                &mut columns.teacher_logprobs,
                &mut begin.teacher_logprobs,
                lengths.teacher_logprobs,
            ),
            values: next_of(&mut columns.values, &mut begin.values, lengths.values),
            advantages: next_of(&mut columns.advantages, &mut begin.advantages, lengths.advantages),
            ..sample
        })
    }
}

/// The next numbers of a column. The last row takes the column with it, so that the rows of a very large rollout are not
/// held twice.
fn next_of<T: Copy>(column: &mut Vec<T>, begin: &mut usize, length: Option<usize>) -> Option<Vec<T>> {
    let length = length?;
    let start = *begin;
    *begin += length;
    match (start, *begin == column.len()) {
        _ if length == 0 => Some(Vec::new()),
        (0, true) => Some(std::mem::take(column)),
        (_, true) => Some(std::mem::take(column).split_off(start)),
        (_, false) => Some(column[start..*begin].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_gets_its_numbers_and_the_last_one_the_column() {
        let (mut column, mut begin) = ((0..9).collect(), 0);
        for (length, expected) in [(2, vec![0, 1]), (0, vec![]), (3, vec![2, 3, 4]), (4, vec![5, 6, 7, 8]), (0, vec![])]
        {
            assert_eq!(next_of(&mut column, &mut begin, None), None);
            assert_eq!(next_of(&mut column, &mut begin, Some(length)), Some(expected));
        }
        assert_eq!(column.capacity(), 0);
        assert_eq!(next_of(&mut vec![7; 5], &mut 0, Some(5)), Some(vec![7; 5]));
    }
}
