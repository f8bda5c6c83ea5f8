//! Which calls are in no segment, and why.

use std::{cmp::Reverse, collections::HashMap};

use forebay_client::wire::Retries;

use super::{CallSet, Position};

/// Why a call is in no segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// It sampled nothing.
    Empty,
    /// The agent did not receive its answer, and no call continues it.
    Undelivered,
    /// No call continues it, and another call of the same agent with the same prompt took its place: one that is
    /// continued, or a later one that was delivered.
    Retry,
}

/// The reasons for which calls are dropped, by call. Prompts are visited from the longest to the shortest, so that all
/// calls that could continue a call are judged before it.
pub(super) fn drop(set: &CallSet<'_>, retries: Retries) -> Vec<Option<DropReason>> {
    let mut dropped = vec![None; set.calls.len()];
    let mut continuations = vec![0_u32; set.calls.len()];
    let mut siblings: HashMap<(Position, Option<&str>), Vec<usize>> = HashMap::new();
    for (call, sent) in set.calls.iter().enumerate() {
        if sent.ids.is_empty() {
            dropped[call] = Some(DropReason::Empty);
            continue;
        }
        siblings.entry((set.places[call].prompt, sent.agent)).or_default().push(call);
        if let Some(link) = set.links[call] {
            continuations[link.call] += 1;
        }
    }
    let mut groups: Vec<Vec<usize>> = siblings.into_values().collect();
    groups.sort_unstable_by_key(|group| Reverse(set.prompt_len(group[0])));
    for group in groups {
        let (continued, ends): (Vec<usize>, Vec<usize>) = group.into_iter().partition(|&call| continuations[call] > 0);
        let delivered = |call: &&usize| set.calls[**call].delivered;
        let last = ends.iter().filter(delivered).max_by_key(|&&call| set.calls[call].ended).copied();
        for &call in &ends {
            let is_replaced = !continued.is_empty() || last != Some(call);
            dropped[call] = match (set.calls[call].delivered, retries) {
                (false, _) => Some(DropReason::Undelivered),
                (true, Retries::Drop) if is_replaced => Some(DropReason::Retry),
                (true, Retries::Drop | Retries::Keep) => None,
            };
            if let (Some(_), Some(link)) = (dropped[call], set.links[call]) {
                continuations[link.call] -= 1;
            }
        }
    }
    dropped
}
