//! Seals: checksums of the contents of rows, checked when a batch is read.
//!
//! A payload's digest covers only its bytes. It covers neither the rollout that they belong to nor the numbers in its
//! row, so without a seal a flipped bit in a reward would be trained on. A rollout is sealed when it is stored, and its
//! group's advantages are sealed when the group is decided.

use crate::{
    formats::{canonical::Hasher, codes},
    ids::{RolloutPk, Version},
    staleness::TrainedSpan,
    states::Verdict,
};

/// Bytes of a seal. It detects accidents; it does not protect against somebody who can write to the database.
pub const SEAL_BYTES: usize = 16;

/// The parts of a rollout's row that no later stage changes.
#[derive(Clone, Copy, Debug)]
pub struct RolloutSeal<'a> {
    pub rollout_id: &'a str,
    pub group_id: &'a str,
    pub verdict: Verdict,
    pub reward: Option<f64>,
    pub policy_version: Version,
    /// Its trained tokens by version, if they are recorded.
    pub trained_spans: Option<&'a [TrainedSpan]>,
    /// Digest of its payload.
    pub payload: &'a [u8; 32],
}

impl RolloutSeal<'_> {
    /// The seal of the rollout.
    #[must_use]
    pub fn checksum(&self) -> [u8; SEAL_BYTES] {
        let mut hasher = Hasher::default();
        hasher.text(self.rollout_id);
        hasher.text(self.group_id);
        hasher.tag(codes::of_verdict(self.verdict));
        hasher.option(self.reward, float);
        hasher.int(self.policy_version.0);
        hasher.option(self.trained_spans, |hasher, spans| {
            for &TrainedSpan { segment, version, tokens } in spans {
                hasher.int(segment.into());
                hasher.int(version.0);
                hasher.int(tokens as i64);
            }
        });
        hasher.bytes(self.payload);
        short(hasher)
    }
}

/// The seal of the advantages of a group, in the order of its rollouts: of each, and of its turns if these have some.
#[must_use]
pub fn of_group<'a>(advantages: impl IntoIterator<Item = (RolloutPk, f64, Option<&'a [f64]>)>) -> [u8; SEAL_BYTES] {
    let mut hasher = Hasher::default();
    for (rollout, advantage, of_turns) in advantages {
        hasher.int(rollout.0);
        float(&mut hasher, advantage);
        // Groups without turns have the seals that versions without turns wrote.
        if let Some(of_turns) = of_turns {
            hasher.int(of_turns.len() as i64);
            for advantage in of_turns {
                float(&mut hasher, *advantage);
            }
        }
    }
    short(hasher)
}

/// Hashes a float without the sign of a zero, because SQLite does not store that sign.
fn float(hasher: &mut Hasher, value: f64) {
    hasher.float(value + 0.0);
}

fn short(hasher: Hasher) -> [u8; SEAL_BYTES] {
    let mut seal = [0; SEAL_BYTES];
    seal.copy_from_slice(&hasher.finish().as_bytes()[..SEAL_BYTES]);
    seal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sign_of_a_zero_does_not_break_a_seal() {
        let seal = |advantage: f64| of_group([(RolloutPk(1), advantage, None)]);
        assert_eq!(seal(0.0), seal(-0.0));
        assert_ne!(seal(0.0), seal(f64::MIN_POSITIVE));
        let of_turns = |turns: &[f64]| of_group([(RolloutPk(1), 0.0, Some(turns))]);
        assert_ne!(of_turns(&[]), seal(0.0));
        assert_ne!(of_turns(&[0.5]), of_turns(&[0.25]));
    }
}
