//! Which calls are in no segment, and why.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
};

use forebay_wire::Retries;

use super::{call::Call, paths::Position, set::CallSet};

/// Why a call is in no segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// It sampled nothing.
    Empty,
    /// The agent did not receive its answer, and no call continues it.
    Undelivered,
    /// No call continues it, and another call of the same agent with the same prompt took its place.
    Retry,
    /// No call continues it, and it belongs to an attempt that was given up.
    Abandoned,
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
    let used = last_uses(set);
    for group in groups {
        let (continued, ends): (Vec<usize>, Vec<usize>) = group.into_iter().partition(|&call| continuations[call] > 0);
        let (abandoned, ends): (Vec<usize>, Vec<usize>) = ends.into_iter().partition(|&call| set.calls[call].abandoned);
        for call in abandoned {
            dropped[call] = Some(DropReason::Abandoned);
            if let Some(link) = set.links[call] {
                continuations[link.call] -= 1;
            }
        }
        let last = continued.iter().chain(&ends).copied().max_by_key(|&call| used[call]);
        let repeated = repeated(set, &continued, &ends);
        for &call in &ends {
            let is_received = match retries {
                Retries::Transport | Retries::Keep => set.calls[call].delivered,
                Retries::Last => used[call].is_some(),
            };
            let is_replaced = match retries {
                Retries::Transport => repeated.contains(&call),
                Retries::Last => last != Some(call),
                Retries::Keep => false,
            };
            dropped[call] = match (is_received, is_replaced) {
                (false, _) => Some(DropReason::Undelivered),
                (true, true) => Some(DropReason::Retry),
                (true, false) => None,
            };
            if let (Some(_), Some(link)) = (dropped[call], set.links[call]) {
                continuations[link.call] -= 1;
            }
        }
    }
    dropped
}

/// When each call was last seen to be used, by the ends of calls: its own end if its answer was delivered, and the ends of
/// the calls that continue it, whatever became of their answers. None if nothing shows that its agent received it.
fn last_uses(set: &CallSet<'_>) -> Vec<Option<u64>> {
    // What an attempt used that was given up says nothing about the last one.
    let of_delivery = |call: &Call<'_>| (call.delivered && !call.abandoned).then_some(call.ended);
    let mut used: Vec<Option<u64>> = set.calls.iter().map(of_delivery).collect();
    let mut longest_first: Vec<usize> = (0..set.calls.len()).collect();
    longest_first.sort_unstable_by_key(|&call| Reverse(set.prompt_len(call)));
    for call in longest_first {
        if let Some(link) = set.links[call] {
            let ended = (!set.calls[call].abandoned).then_some(set.calls[call].ended);
            used[link.call] = used[link.call].max(used[call]).max(ended);
        }
    }
    used
}

/// The calls that a client repeated, of those with the same agent and the same prompt. Each repeat is of one call with a
/// smaller count of retries that ended before: of one whose answer was not delivered if there is one, then of the one with
/// the largest count, then of the last. A call that is continued was received, so none repeats it.
fn repeated(set: &CallSet<'_>, continued: &[usize], ends: &[usize]) -> HashSet<usize> {
    let mut calls: Vec<(u64, usize, bool)> = Vec::with_capacity(continued.len() + ends.len());
    let timed = |is_end: bool| move |&call: &usize| (set.calls[call].ended, call, is_end);
    calls.extend(continued.iter().map(timed(false)).chain(ends.iter().map(timed(true))));
    calls.sort_unstable();
    let mut repeated = HashSet::new();
    // What may be repeated, by the count of retries and the time.
    let (mut lost, mut delivered) = (BTreeMap::new(), BTreeMap::new());
    for (ended, call, is_end) in calls {
        let Call { retry_count, delivered: is_delivered, .. } = set.calls[call];
        for earlier in [&mut lost, &mut delivered] {
            let found = earlier.range(..(retry_count, 0)).next_back().map(|(&key, _)| key);
            if let Some(found) = found.and_then(|key| earlier.remove(&key)) {
                repeated.insert(found);
                break;
            }
        }
        if is_end {
            let earlier = if is_delivered { &mut delivered } else { &mut lost };
            earlier.insert((retry_count, ended), call);
        }
    }
    repeated
}
