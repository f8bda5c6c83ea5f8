//! Where histories that should have been continued were not.
//!
//! If an agent or a chat template changes what the model has already seen, the next prompt continues no call: it begins
//! a new segment, and everything before it is context that is not trained again. That is correct, but it costs training
//! signal, and users should see it.

use super::set::CallSet;

/// Prompts that share this many ids with an earlier call, or fewer, have nothing in common but a system prompt.
pub const BREAK_IDS_MIN: usize = 64;

/// A prompt that shares much with an earlier call and then differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Break {
    /// The call with the prompt.
    pub call: usize,
    /// The call that the prompt shares most with; if there are several, the one that ended first.
    pub nearest: usize,
    /// The number of ids that they share.
    pub position: usize,
    /// The call that both continue, if there is one.
    pub parent: Option<usize>,
}

/// The breaks among the kept calls, in the order of their ends. A break is at a call that continues no other one, or that
/// continues a call which an earlier one continues as well.
pub(super) fn find(set: &CallSet<'_>, is_kept: &[bool]) -> Vec<Break> {
    let order: Vec<usize> = set.by_end().into_iter().filter(|&call| is_kept[call]).collect();
    let first = first_calls(set, &order);
    let mut is_continued = vec![false; set.calls.len()];
    let mut breaks = Vec::new();
    for call in order {
        let parent = set.links[call].map(|link| link.call);
        if let Some(parent) = parent
            && !std::mem::replace(&mut is_continued[parent], true)
        {
            continue;
        }
        // Each position is visited by at most one call: the first one through it.
        let mut at = set.places[call].prompt;
        let is_earlier = |other: usize| set.calls[other].ended < set.calls[call].ended;
        let nearest = loop {
            match first[at.index()].filter(|&other| is_earlier(other)) {
                Some(other) => break Some(other),
                None => match set.paths.above(at) {
                    Some(above) => at = above,
                    None => break None,
                },
            }
        };
        let position = set.paths.depth(at);
        if let Some(nearest) = nearest
            && position > BREAK_IDS_MIN
            && position < set.prompt_len(call)
        {
            breaks.push(Break { call, nearest, position, parent });
        }
    }
    breaks
}

/// The call that ended first among those whose ids pass each position.
fn first_calls(set: &CallSet<'_>, order: &[usize]) -> Vec<Option<usize>> {
    let positions = set.paths.downwards();
    let mut first: Vec<Option<usize>> = vec![None; positions.len()];
    for &call in order {
        first[set.places[call].full.index()].get_or_insert(call);
    }
    for &at in positions.iter().rev() {
        if let (Some(call), Some(above)) = (first[at.index()], set.paths.above(at)) {
            let other = &mut first[above.index()];
            if other.is_none_or(|other| set.calls[call].ended < set.calls[other].ended) {
                *other = Some(call);
            }
        }
    }
    first
}
