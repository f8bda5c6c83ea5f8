//! Chains of calls that continue each other. Each becomes one segment.

use std::cmp::Reverse;

use super::set::CallSet;

/// A chain and the calls that belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its label.
    pub kind: Kind,
    /// The calls that belong to it, first to last. What other calls it continues lies in its prompt.
    pub calls: Vec<usize>,
    /// The number of ids of its segment.
    pub tokens: usize,
    /// The number of these that are behind the prompt of its first call.
    pub response: usize,
}

/// What a chain probably is. It is a label, and nothing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The last call belongs to it.
    Final,
    /// Another agent made it.
    Subagent,
    /// One call that continues no other one.
    Turn,
    /// An earlier chain of the agent that made the final one.
    Compaction,
}

impl Kind {
    /// The label of its segment.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Final => "final",
            Self::Subagent => "subagent",
            Self::Turn => "turn",
            Self::Compaction => "compaction",
        }
    }
}

/// Divides the kept calls into chains. Also counts the stop tokens that are not trained.
pub(super) fn divide(set: &CallSet<'_>, is_kept: &[bool]) -> (Vec<Chain>, usize) {
    let mut is_owned: Vec<bool> = is_kept.iter().map(|kept| !kept).collect();
    let mut trimmed = 0;
    let mut chains: Vec<Chain> = Vec::new();
    for end in ends(set, is_kept) {
        let mut calls = vec![end];
        is_owned[end] = true;
        while let Some(link) = set.links[calls[calls.len() - 1]].filter(|link| !is_owned[link.call]) {
            is_owned[link.call] = true;
            trimmed += usize::from(link.trimmed);
            calls.push(link.call);
        }
        calls.reverse();
        let tokens = set.paths.depth(set.places[end].full);
        let response = tokens - set.prompt_len(calls[0]);
        chains.push(Chain { kind: Kind::Compaction, calls, tokens, response });
    }
    chains.sort_unstable_by_key(|chain| set.calls[chain.end()].ended);
    label(set, &mut chains);
    (chains, trimmed)
}

/// The calls that end a chain: the longest chain in sampled ids first, then the one that ended first.
fn ends(set: &CallSet<'_>, is_kept: &[bool]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..is_kept.len()).filter(|&call| is_kept[call]).collect();
    // Parents come first, because their prompts are shorter.
    order.sort_unstable_by_key(|&call| set.prompt_len(call));
    let mut is_continued = vec![false; is_kept.len()];
    let mut sampled = vec![0; is_kept.len()];
    for &call in &order {
        sampled[call] = set.calls[call].ids.len();
        if let Some(link) = set.links[call] {
            is_continued[link.call] = true;
            sampled[call] += sampled[link.call];
        }
    }
    order.retain(|&call| !is_continued[call]);
    order.sort_unstable_by_key(|&call| (Reverse(sampled[call]), set.calls[call].ended));
    order
}

fn label(set: &CallSet<'_>, chains: &mut [Chain]) {
    let last_call = |chain: &Chain| chain.calls.iter().map(|&call| set.calls[call].ended).max();
    let last = (0..chains.len()).max_by_key(|&chain| last_call(&chains[chain]));
    let Some(last) = last else { return };
    let agent = |chain: &Chain| set.calls[chain.end()].agent;
    let main = agent(&chains[last]);
    for (index, chain) in chains.iter_mut().enumerate() {
        chain.kind = match chain.calls[..] {
            _ if index == last => Kind::Final,
            _ if agent(chain) != main => Kind::Subagent,
            [only] if set.links[only].is_none() => Kind::Turn,
            _ => Kind::Compaction,
        };
    }
}

impl Chain {
    /// The call that ends it.
    pub(super) fn end(&self) -> usize {
        self.calls[self.calls.len() - 1]
    }
}
