//! The assembling rule as it is written, step by step and without any thought of speed. It shares no code with what it
//! checks.

use std::collections::BTreeMap;

use forebay_wire::{Retries, Segment, VersionSpan};

use super::{
    super::{Break, DropReason},
    Recorded,
};

/// What the rule says about a set of calls.
#[derive(Debug, PartialEq)]
pub(super) struct Expected {
    pub(super) segments: Vec<Segment>,
    pub(super) owned: Vec<Vec<usize>>,
    pub(super) dropped: BTreeMap<usize, DropReason>,
    pub(super) breaks: Vec<Break>,
    pub(super) trimmed: usize,
}

pub(super) fn expected(calls: &[Recorded], retries: Retries) -> Expected {
    let has_ids = |call: &usize| !calls[*call].ids.is_empty();
    let parents: Vec<Option<Parent>> =
        (0..calls.len()).map(|call| Some(call).filter(has_ids).and_then(|call| parent(calls, call))).collect();
    let dropped = dropped(calls, &parents, retries);
    let kept: Vec<usize> = (0..calls.len()).filter(|call| !dropped.contains_key(call)).collect();
    let is_end = |call: &&usize| !kept.iter().any(|&other| continues(&parents, other, **call));
    let mut ends: Vec<usize> = kept.iter().filter(is_end).copied().collect();
    let mut chains: Vec<(u64, Vec<usize>)> = Vec::new();
    // The longest chain first, then the one that ended first.
    while !ends.is_empty() {
        let mut best = 0;
        for place in 1..ends.len() {
            let key = |end: usize| {
                let sampled: usize = path(&parents, end).iter().map(|&call| calls[call].ids.len()).sum();
                (usize::MAX - sampled, calls[end].ended)
            };
            if key(ends[place]) < key(ends[best]) {
                best = place;
            }
        }
        let end = ends.remove(best);
        let is_free = |call: &usize| !chains.iter().any(|(_, owned)| owned.contains(call));
        let owned: Vec<usize> = path(&parents, end).into_iter().filter(is_free).collect();
        chains.push((calls[end].ended, owned));
    }
    chains.sort();
    let owned: Vec<Vec<usize>> = chains.into_iter().map(|(_, owned)| owned).collect();
    let mut trimmed = 0;
    let mut segments = Vec::new();
    for chain in &owned {
        segments.push(segment(calls, &parents, chain, label(calls, &parents, &owned, chain), &mut trimmed));
    }
    Expected { segments, breaks: breaks(calls, &parents, &kept), owned, dropped, trimmed }
}

#[derive(Clone, Copy, Debug)]
struct Parent {
    call: usize,
    matched: usize,
    trimmed: bool,
}

fn continues(parents: &[Option<Parent>], call: usize, other: usize) -> bool {
    parents[call].is_some_and(|parent| parent.call == other)
}

fn parent(calls: &[Recorded], of: usize) -> Option<Parent> {
    let prompt = &calls[of].prompt;
    let mut found = Vec::new();
    for (call, other) in calls.iter().enumerate() {
        let full = other.full();
        if call == of || other.ids.is_empty() {
            continue;
        }
        if prompt.starts_with(&full) {
            found.push(Parent { call, matched: full.len(), trimmed: false });
        } else if other.stopped_on_token
            && other.ids.len() > 1
            && prompt.len() >= full.len()
            && prompt[..full.len() - 1] == full[..full.len() - 1]
        {
            found.push(Parent { call, matched: full.len() - 1, trimmed: true });
        }
    }
    found.into_iter().max_by_key(|parent| {
        let other = &calls[parent.call];
        (parent.matched, !other.abandoned, !other.undelivered, other.agent == calls[of].agent, u64::MAX - other.ended)
    })
}

/// Calls with the same prompt and agent are judged together, after all calls that continue one of them.
fn dropped(calls: &[Recorded], parents: &[Option<Parent>], retries: Retries) -> BTreeMap<usize, DropReason> {
    let mut dropped = BTreeMap::new();
    let mut judged = vec![false; calls.len()];
    for call in 0..calls.len() {
        if calls[call].ids.is_empty() {
            dropped.insert(call, DropReason::Empty);
            judged[call] = true;
        }
    }
    while let Some(group) = (0..calls.len()).filter(|&call| !judged[call]).map(|call| same(calls, call)).find(|group| {
        group.iter().all(|&member| (0..calls.len()).all(|other| judged[other] || !continues(parents, other, member)))
    }) {
        let is_extended = |&call: &usize| {
            (0..calls.len()).any(|other| continues(parents, other, call) && !dropped.contains_key(&other))
        };
        let unextended: Vec<usize> = group.iter().copied().filter(|call| !is_extended(call)).collect();
        let (given_up, unextended): (Vec<usize>, Vec<usize>) =
            unextended.into_iter().partition(|&call| calls[call].abandoned);
        dropped.extend(given_up.iter().map(|&call| (call, DropReason::Abandoned)));
        let group: Vec<usize> = group.into_iter().filter(|call| !given_up.contains(call)).collect();
        for call in unextended.iter().copied() {
            let used = last_use(calls, parents, call);
            let is_lost = if retries == Retries::Last { used.is_none() } else { calls[call].undelivered };
            if is_lost {
                dropped.insert(call, DropReason::Undelivered);
                continue;
            }
            let is_replaced = match retries {
                Retries::Transport => repeated(calls, &group, &unextended).contains(&call),
                Retries::Last => group.iter().any(|&other| last_use(calls, parents, other) > used),
                Retries::Keep => false,
            };
            if is_replaced {
                dropped.insert(call, DropReason::Retry);
            }
        }
        for call in group.into_iter().chain(given_up) {
            judged[call] = true;
        }
    }
    assert!(judged.iter().all(|&judged| judged), "every call is judged");
    dropped
}

/// The latest end that shows that an agent received an answer: that of its call if it was delivered, and those of all calls
/// behind it, also those that sampled nothing.
fn last_use(calls: &[Recorded], parents: &[Option<Parent>], call: usize) -> Option<u64> {
    let is_behind =
        |&other: &usize| parent(calls, other).is_some_and(|parent| path(parents, parent.call).contains(&call));
    let is_of_last = |other: &usize| !calls[*other].abandoned;
    let behind = (0..calls.len()).filter(is_behind).filter(is_of_last).map(|other| calls[other].ended).max();
    let is_received = !calls[call].undelivered && is_of_last(&call);
    behind.max(is_received.then_some(calls[call].ended))
}

/// What each repeat is a repeat of, in the order of the repeats.
fn repeated(calls: &[Recorded], group: &[usize], unextended: &[usize]) -> Vec<usize> {
    let mut repeats: Vec<usize> = group.iter().copied().filter(|&call| calls[call].retry_count > 0).collect();
    repeats.sort_by_key(|&call| calls[call].ended);
    let mut found: Vec<usize> = Vec::new();
    for repeat in repeats.iter().map(|&call| &calls[call]) {
        let is_candidate = |&&call: &&usize| {
            let earlier = &calls[call];
            earlier.ended < repeat.ended && earlier.retry_count < repeat.retry_count && !found.contains(&call)
        };
        let candidates: Vec<usize> = unextended.iter().filter(is_candidate).copied().collect();
        let key = |&call: &usize| (calls[call].undelivered, calls[call].retry_count, calls[call].ended);
        found.extend(candidates.into_iter().max_by_key(key));
    }
    found
}

fn same(calls: &[Recorded], call: usize) -> Vec<usize> {
    let is_same = |&other: &usize| {
        calls[other].prompt == calls[call].prompt
            && calls[other].agent == calls[call].agent
            && !calls[other].ids.is_empty()
    };
    (0..calls.len()).filter(is_same).collect()
}

/// The calls from the first one to this one.
fn path(parents: &[Option<Parent>], end: usize) -> Vec<usize> {
    let mut path = vec![end];
    while let Some(parent) = parents[path[0]] {
        path.insert(0, parent.call);
    }
    path
}

fn segment(
    calls: &[Recorded],
    parents: &[Option<Parent>],
    chain: &[usize],
    label: &str,
    trimmed: &mut usize,
) -> Segment {
    let prompt = &calls[chain[0]].prompt;
    let (mut response, mut mask, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
    // Pieces of one version: the version and the number of ids.
    let mut pieces: Vec<(i64, i64)> = Vec::new();
    let mut tail_len = 0;
    for (place, &number) in chain.iter().enumerate() {
        let call = &calls[number];
        let mut ids = call.ids.clone();
        if let Some(next) = chain.get(place + 1)
            && parents[*next].is_some_and(|parent| parent.trimmed)
        {
            ids.pop();
            *trimmed += 1;
        }
        if place > 0 {
            let tail = &call.prompt[prompt.len() + response.len()..];
            response.extend_from_slice(tail);
            mask.extend(tail.iter().map(|_| 0));
            logprobs.extend(tail.iter().map(|_| 0.0));
            tail_len = tail.len() as i64;
        }
        for &VersionSpan(version, start, length) in call.versions.iter().flatten() {
            let length = (0..length).filter(|offset| start + offset < ids.len() as i64).count() as i64;
            if length > 0 {
                pieces.push((version, std::mem::take(&mut tail_len) + length));
            }
        }
        response.extend_from_slice(&ids);
        mask.extend(ids.iter().map(|_| 1));
        logprobs.extend(call.logprobs.iter().flatten().take(ids.len()));
    }
    let every = |has: fn(&Recorded) -> bool| chain.iter().all(|&call| has(&calls[call]));
    let mut start = 0;
    let spans = pieces.into_iter().map(|(version, length)| {
        start += length;
        VersionSpan(version, start - length, length)
    });
    Segment {
        kind: Some(label.to_owned()),
        tokens: [&prompt[..], &response].concat(),
        loss_mask: mask,
        logprobs: every(|call| call.logprobs.is_some()).then_some(logprobs),
        versions: every(|call| call.versions.is_some()).then(|| spans.collect()),
        ..Segment::default()
    }
}

fn label(calls: &[Recorded], parents: &[Option<Parent>], all: &[Vec<usize>], chain: &[usize]) -> &'static str {
    let last = all.iter().flatten().max_by_key(|&&call| calls[call].ended).expect("a chain has a call");
    let main = all.iter().find(|other| other.contains(last)).expect("every kept call belongs to a chain");
    let agent = |chain: &[usize]| calls[chain[chain.len() - 1]].agent;
    if main == chain {
        "final"
    } else if agent(main) != agent(chain) {
        "subagent"
    } else if chain.len() == 1 && parents[chain[0]].is_none() {
        "turn"
    } else {
        "compaction"
    }
}

fn breaks(calls: &[Recorded], parents: &[Option<Parent>], kept: &[usize]) -> Vec<Break> {
    let mut found = Vec::new();
    for &call in kept {
        let earlier: Vec<usize> =
            kept.iter().copied().filter(|&other| calls[other].ended < calls[call].ended).collect();
        let is_root = parents[call].is_none();
        let is_fork = parents[call].is_some_and(|parent| earlier.iter().any(|&o| continues(parents, o, parent.call)));
        let common = |other: usize| {
            calls[call].prompt.iter().zip(calls[other].full()).take_while(|(id, other)| **id == *other).count()
        };
        let nearest = earlier.iter().copied().max_by_key(|&other| (common(other), u64::MAX - calls[other].ended));
        if let Some(nearest) = nearest
            && (is_root || is_fork)
            && common(nearest) > 64
            && common(nearest) < calls[call].prompt.len()
        {
            let parent = parents[call].map(|parent| parent.call);
            found.push(Break { call, nearest, position: common(nearest), parent });
        }
    }
    found.sort_by_key(|found| calls[found.call].ended);
    found
}
