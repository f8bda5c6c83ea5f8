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
//! 3. `retries`: a call that nothing continues is dropped if its answer was not delivered (`undelivered`), or if another
//!    call with the same prompt took its place (`retry`). The rules of the policy say which calls do.
//! 4. `chains`: every call that nothing continues ends a chain. Each call belongs to one chain: the longest one through
//!    it.
//! 5. `segments`: a chain becomes a segment. Its prompt is the prompt of its first own call.
//!
//! `breaks` reports where histories that should have been continued were not.

pub mod breaks;
pub mod chains;
pub mod parents;
pub mod paths;
pub mod retries;
pub mod segments;
#[cfg(test)]
mod tests;

use forebay_wire::{self as wire, Retries, VersionSpan};

use self::{
    breaks::Break,
    chains::Chain,
    parents::Link,
    paths::{Paths, Position},
    retries::DropReason,
};

/// One call to an inference engine.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Its place in time among the calls of its set: a call that ended earlier has a smaller number. No two calls have
    /// the same one.
    pub ended: u64,
    /// The call whose ids precede `prompt`; none if `prompt` is the whole prompt.
    pub after: Option<After>,
    /// The ids of the prompt, or those behind `after`.
    pub prompt: &'a [i32],
    /// The sampled ids.
    pub ids: &'a [i32],
    /// Log-probabilities of `ids`, as many as there are ids.
    pub logprobs: Option<&'a [f32]>,
    /// Spans of weight versions that tile `ids`.
    pub versions: Option<&'a [VersionSpan]>,
    /// Whether the last id is a stop token. The next prompt may have another id in its place.
    pub stopped_on_token: bool,
    /// Who made the call, if the agent says so.
    pub agent: Option<&'a str>,
    /// Whether the agent received the answer.
    pub delivered: bool,
    /// How often the client has made this call before, by its own account.
    pub retry_count: u32,
}

/// What precedes the ids of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// The index of a call: its prompt and then its ids.
    pub call: usize,
    /// Whether the last of these ids is left out.
    pub trimmed: bool,
}

/// A set of calls, and how their ids continue each other.
#[derive(Debug)]
pub struct CallSet<'a> {
    calls: Vec<Call<'a>>,
    paths: Paths<'a>,
    places: Vec<Place>,
    /// The parents of the calls that have one.
    links: Vec<Option<Link>>,
}

/// Calls that follow each other in a circle, or follow a call that does not exist, by their index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} calls follow each other in a circle or follow a call that does not exist", .0.len())]
pub struct NoBeginning(pub Vec<usize>);

/// Where the ids of a call end in the tree of paths.
#[derive(Clone, Copy, Debug)]
struct Place {
    prompt: Position,
    /// Before the last sampled id.
    trimmed: Position,
    /// After the last sampled id.
    full: Position,
}

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

impl<'a> CallSet<'a> {
    /// Finds out how calls continue each other. This reads every id that is given once.
    pub fn new(calls: Vec<Call<'a>>) -> Result<Self, NoBeginning> {
        let mut paths = Paths::default();
        let places = places(&calls, &mut paths)?;
        let links = parents::find(&calls, &places, &paths);
        Ok(Self { calls, paths, places, links })
    }

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

    /// The indexes of the calls in the order of their ends.
    fn by_end(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.calls.len()).collect();
        order.sort_unstable_by_key(|&call| self.calls[call].ended);
        order
    }

    /// The number of ids of a call's prompt, with those of the calls that it follows.
    fn prompt_len(&self, call: usize) -> usize {
        self.paths.depth(self.places[call].prompt)
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

/// Adds the ids of all calls to the tree, each call after the one that it follows.
fn places<'a>(calls: &[Call<'a>], paths: &mut Paths<'a>) -> Result<Vec<Place>, NoBeginning> {
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); calls.len()];
    let mut next = Vec::new();
    for (call, sent) in calls.iter().enumerate() {
        match sent.after {
            None => next.push(call),
            Some(after) => {
                if let Some(followers) = followers.get_mut(after.call) {
                    followers.push(call);
                }
            }
        }
    }
    let mut places: Vec<Option<Place>> = vec![None; calls.len()];
    while let Some(call) = next.pop() {
        let Call { after, prompt, ids, .. } = calls[call];
        let from = match after.and_then(|after| Some((places[after.call]?, after.trimmed))) {
            None => Position::BEGINNING,
            Some((place, true)) => place.trimmed,
            Some((place, false)) => place.full,
        };
        let (before_last, last) = ids.split_at(ids.len().saturating_sub(1));
        let prompt = paths.extend(from, prompt);
        let trimmed = paths.extend(prompt, before_last);
        places[call] = Some(Place { prompt, trimmed, full: paths.extend(trimmed, last) });
        next.append(&mut followers[call]);
    }
    let missing: Vec<usize> = (0..calls.len()).filter(|&call| places[call].is_none()).collect();
    if missing.is_empty() { Ok(places.into_iter().flatten().collect()) } else { Err(NoBeginning(missing)) }
}
