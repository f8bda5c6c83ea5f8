//! Assembles the calls of an agent to an inference engine into training sequences.
//!
//! It is separate from the stages, because it is a pure function of a set of calls: neither the order in which calls are
//! given nor messages nor the protocol of the agent changes its result. Posted `turns` and recorded sessions use the
//! same function.
//!
//! The rule behind it is that a token is trained only behind the very ids that it was sampled behind. A call continues
//! another one if its prompt begins with all ids of the other one, and nothing is ever repaired:
//!
//! 1. A call without completion ids is dropped (`empty`).
//! 2. `parents`: the parent of a call is the call whose prompt and completion are the longest prefix of its prompt.
//! 3. `retries`: a call that nothing continues is dropped if it belongs to an attempt that was given up (`abandoned`), if
//!    its answer was not delivered (`undelivered`), or if another call with the same prompt took its place (`retry`). The
//!    rules of the policy say which calls do.
//! 4. `chains`: every call that nothing continues ends a chain. Each call belongs to one chain: the longest one through
//!    it.
//! 5. `segments`: a chain becomes a segment. Its prompt is the prompt of its first own call.
//!
//! `breaks` reports where histories that should have been continued were not.

mod call;
mod set;

pub mod breaks;
pub mod chains;
pub mod parents;
pub mod paths;
pub mod retries;
pub mod segments;
#[cfg(test)]
mod tests;

use forebay_wire::{self as wire, Retries};

use self::{breaks::Break, chains::Chain, retries::DropReason};

pub use call::{After, Call};
pub use set::{CallSet, NoBeginning};

/// How a set of calls is divided into segments. It holds indexes and lengths but no ids, so that the size of the segments
/// is known before they are built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembly {
    /// Number of calls.
    pub calls: usize,
    /// The segments, in the order in which their last calls ended.
    pub chains: Vec<Chain>,
    /// Prompts that share much with an earlier call and do not continue it, in the order of their calls' ends.
    pub breaks: Vec<Break>,
    /// The calls that are in no segment, in the order of their ends.
    pub dropped: Vec<(usize, DropReason)>,
    /// Stop tokens that are not trained, because the next prompt has another id in their place.
    pub trimmed: usize,
}

impl CallSet<'_> {
    /// Divides the calls into segments.
    #[must_use]
    pub fn assemble(&self, retries: Retries) -> Assembly {
        let dropped = retries::drop(self, retries);
        let is_kept: Vec<bool> = dropped.iter().map(Option::is_none).collect();
        let (chains, trimmed) = chains::divide(self, &is_kept);
        let breaks = breaks::find(self, &is_kept);
        let dropped = self.by_end().into_iter().filter_map(|call| Some((call, dropped[call]?))).collect();
        Assembly { calls: self.calls.len(), chains, breaks, dropped, trimmed }
    }

    /// Builds the segment of a chain of this set. Its arrays have the lengths that the chain states.
    #[must_use]
    pub fn segment(&self, chain: &Chain) -> wire::Segment {
        segments::build(self, chain)
    }
}

impl Assembly {
    /// The number of ids of all segments.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.chains.iter().map(|chain| chain.tokens).sum()
    }

    /// The counts, as a receipt shows them.
    #[must_use]
    pub fn counts(&self) -> wire::Assembly {
        let dropped = |reason: DropReason| self.dropped.iter().filter(|(_, dropped)| *dropped == reason).count() as u32;
        wire::Assembly {
            calls: self.calls as u32,
            segments: self.chains.len() as u32,
            breaks: self.breaks.len() as u32,
            dropped: wire::DroppedCalls {
                empty: dropped(DropReason::Empty),
                undelivered: dropped(DropReason::Undelivered),
                retry: dropped(DropReason::Retry),
            },
            trimmed: self.trimmed as u32,
        }
    }
}
