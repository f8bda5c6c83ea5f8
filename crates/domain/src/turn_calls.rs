//! Which call each turn of a rollout is, so that a score can name its turn by the call.
//!
//! Separate from [`credit`](crate::credit), which compares turns and does not ask where they come from.

use forebay_wire::Segment;
use memchr::memchr_iter;
use serde::{Deserialize, Serialize};

use crate::{assemble::Assembly, credit::TURNS_MAX};

/// The ids of the calls that are the turns of a rollout, in the order of the turns; empty for a turn that is no single call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TurnCalls {
    /// The ids of the turns that were posted.
    Posted(Vec<String>),
    /// Those of the answers that a session recorded, without the prefixes that APIs add.
    Recorded(Vec<String>),
}

impl TurnCalls {
    /// The number of the turn that is this call.
    #[must_use]
    pub fn place(&self, call: &str) -> Option<u32> {
        let (ids, id) = match self {
            Self::Posted(ids) => (ids, call),
            Self::Recorded(ids) => (ids, without_prefix(call)),
        };
        let place = ids.iter().position(|known| known == id && !known.is_empty())?;
        u32::try_from(place).ok()
    }
}

/// The id of an answer without the prefix of an API, which ends with `-` or `_`. The id itself has neither.
#[must_use]
pub fn without_prefix(id: &str) -> &str {
    id.rsplit(['-', '_']).next().unwrap_or(id)
}

/// The id of the call of each turn of these segments, which were assembled from calls with the ids that `id_of` tells. None if
/// there is none, or if there are more turns than a rollout may have where turns are compared.
#[must_use]
pub fn of_assembly<'a>(
    assembly: &Assembly,
    segments: &[Segment],
    id_of: impl Fn(usize) -> Option<&'a str>,
) -> Option<Vec<String>> {
    let mut ids: Vec<String> = Vec::new();
    for (chain, segment) in assembly.chains.iter().zip(segments) {
        let turns = segment.turns.as_ref().map_or_else(|| runs(&segment.loss_mask), Vec::len);
        if ids.len() + turns > TURNS_MAX {
            return None;
        }
        // Where nothing stands between two calls, or nothing is left of one, the runs of trained tokens are not the calls.
        if turns == chain.calls.len() {
            ids.extend(chain.calls.iter().map(|&call| id_of(call).unwrap_or_default().to_owned()));
        } else {
            ids.resize(ids.len() + turns, String::new());
        }
    }
    ids.iter().any(|id| !id.is_empty()).then_some(ids)
}

/// The number of runs of ones.
fn runs(mask: &[u8]) -> usize {
    memchr_iter(1, mask).filter(|&at| at == 0 || mask[at - 1] == 0).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_found_by_its_call() {
        let ids = || vec!["a-1".to_owned(), String::new(), "1".to_owned()];
        let posted = TurnCalls::Posted(ids());
        assert_eq!(["a-1", "1", "b-1", ""].map(|id| posted.place(id)), [Some(0), Some(2), None, None]);
        let recorded = TurnCalls::Recorded(ids());
        assert_eq!(
            ["chatcmpl-1", "msg_1", "1", "chatcmpl-"].map(|id| recorded.place(id)),
            [Some(2), Some(2), Some(2), None]
        );
    }

    #[test]
    fn runs_of_ones_are_counted() {
        let counts = [&[][..], &[0, 0], &[1, 1], &[1, 0, 1, 1, 0, 0, 1], &[0, 1]].map(runs);
        assert_eq!(counts, [0, 0, 1, 3, 1]);
    }
}
