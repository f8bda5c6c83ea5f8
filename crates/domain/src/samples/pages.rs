//! Pages of rollouts, as batches and exports are read: bounded in bytes, and checked.
//!
//! Separate from [`samples`](super) and [`export`](crate::looking::export), which select rollouts, make rows of them and
//! decide what follows from a payload that is purged or damaged.

use crate::{
    formats::{
        payload::{Damaged, Payload, Unpacked},
        seal::RolloutSeal,
    },
    samples::SealedRow,
};

/// Bytes of the rollouts of one page, unless a single rollout has more.
pub const PAGE_BYTES: u64 = 8 << 20;

/// Bytes of a row besides its columns of numbers: the ids of its rollout, up to 256 bytes each, and the row itself. In
/// a rollout of thousands of short segments this is the greatest part.
const ROW_BYTES: u64 = 1 << 10;

/// The most rollouts of one page.
const PAGE_ROLLOUTS: usize = 256;

/// Rollouts that are still to be read, in order.
#[derive(Debug)]
pub struct Members<M>(std::vec::IntoIter<M>);

impl<M> Default for Members<M> {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl<M> From<Vec<M>> for Members<M> {
    fn from(members: Vec<M>) -> Self {
        Self(members.into_iter())
    }
}

impl<M: AsRef<SealedRow>> Members<M> {
    pub fn as_slice(&self) -> &[M] {
        self.0.as_slice()
    }

    /// The bytes that the rollouts of the next page take in memory; 0 at the end.
    pub fn next_page_bytes(&self) -> u64 {
        bytes_of(&self.as_slice()[..self.next_page_rollouts()])
    }

    /// Takes the rollouts of the next page; none at the end.
    pub fn take_page(&mut self) -> Vec<M> {
        let rollouts = self.next_page_rollouts();
        self.0.by_ref().take(rollouts).collect()
    }

    fn next_page_rollouts(&self) -> usize {
        let mut bytes = 0;
        let fits = |member: &&M| {
            bytes += expanded_bytes((*member).as_ref());
            bytes <= PAGE_BYTES
        };
        let fitting = self.as_slice().iter().take(PAGE_ROLLOUTS).take_while(fits).count();
        fitting.max(1).min(self.as_slice().len())
    }
}

/// The bytes that rollouts take in memory.
pub fn bytes_of(members: &[impl AsRef<SealedRow>]) -> u64 {
    members.iter().map(|member| expanded_bytes(member.as_ref())).sum()
}

fn expanded_bytes(row: &SealedRow) -> u64 {
    row.unpacked_bytes.saturating_add(row.made_bytes).saturating_add(u64::from(row.segments.max(1)) * ROW_BYTES)
}

/// Checks the seal of a rollout and the digest of its payload, and unpacks the payload.
pub fn unpack(row: &SealedRow, payload: &Payload) -> Result<Unpacked, Damaged> {
    check_seal(row, payload)?;
    payload.unpack()
}

/// Checks the seal of a rollout, which covers the digest of its payload.
pub fn check_seal(row: &SealedRow, payload: &Payload) -> Result<(), Damaged> {
    let seal = RolloutSeal {
        rollout_id: &row.rollout_id,
        group_id: &row.group_id,
        verdict: row.verdict,
        reward: row.reward,
        policy_version: row.policy_version,
        trained_spans: row.trained_spans.as_deref(),
        payload: &payload.digest,
    };
    if row.seal != seal.checksum() {
        return Err(Damaged("its row differs from its seal"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ids::{RolloutPk, Version},
        states::Verdict,
    };

    struct Row(SealedRow);

    impl AsRef<SealedRow> for Row {
        fn as_ref(&self) -> &SealedRow {
            &self.0
        }
    }

    #[test]
    fn columns_that_are_made_take_room_in_a_page() {
        let row = |made_bytes| SealedRow {
            rollout_pk: RolloutPk(1),
            group_id: String::new(),
            rollout_id: String::new(),
            verdict: Verdict::Kept,
            reward: None,
            policy_version: Version(0),
            segments: 1,
            tokens: 1,
            unpacked_bytes: PAGE_BYTES / 2 - ROW_BYTES,
            made_bytes,
            trained_spans: None,
            seal: [0; 16],
        };
        let rows = |made_bytes| Members::from(vec![Row(row(made_bytes)), Row(row(made_bytes))]).next_page_bytes();
        assert_eq!(rows(0), PAGE_BYTES);
        assert_eq!(rows(1), PAGE_BYTES / 2 + 1, "only one of them fits now");
        // What is damaged does not overflow.
        assert_eq!(rows(u64::MAX), u64::MAX);
    }
}
