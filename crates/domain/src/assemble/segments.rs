//! The segment of a chain: ids, mask, log-probabilities, spans of versions and turns.

use forebay_wire::{Segment, TurnSpan, VersionSpan};

use super::{call::Call, chains::Chain, set::CallSet};

/// Builds the segment of a chain. Each id that a call of the chain sampled is trained. The ids between two calls have
/// mask 0 and log-probability 0, and belong to the span of versions after them. If some call of the set has a reward or a
/// state, each call is a turn.
pub(super) fn build(set: &CallSet<'_>, chain: &Chain) -> Segment {
    let prompt = set.prompt_len(chain.calls[0]);
    let mut loss_mask = vec![0; chain.response];
    let every = |has: fn(&Call<'_>) -> bool| chain.calls.iter().all(|&call| has(&set.calls[call]));
    let mut logprobs = every(|call| call.logprobs.is_some()).then(|| vec![0.0; chain.response]);
    let mut versions = every(|call| call.versions.is_some()).then(Vec::new);
    let mut turns = set.has_turns.then(|| Vec::with_capacity(chain.calls.len()));
    for (place, &call) in chain.calls.iter().enumerate() {
        let next = chain.calls.get(place + 1).and_then(|&next| set.links[next]);
        let trained = set.calls[call].ids.len() - usize::from(next.is_some_and(|link| link.trimmed));
        let start = set.prompt_len(call) - prompt;
        loss_mask[start..start + trained].fill(1);
        if let (Some(logprobs), Some(sampled)) = (&mut logprobs, set.calls[call].logprobs) {
            logprobs[start..start + trained].copy_from_slice(&sampled[..trained]);
        }
        if let (Some(versions), Some(spans)) = (&mut versions, set.calls[call].versions) {
            add_spans(versions, spans, start, trained);
        }
        if let Some(turns) = &mut turns {
            let Call { reward, state_key, .. } = set.calls[call];
            let (start, length) = (start as i64, trained as i64);
            turns.push(TurnSpan { start, length, reward, state_key: state_key.map(str::to_owned) });
        }
    }
    Segment {
        kind: Some(chain.kind.as_str().to_owned()),
        tokens: set.paths.ids(set.places[chain.end()].full),
        loss_mask,
        logprobs,
        versions,
        turns,
        ..Segment::default()
    }
}

/// Adds the spans of a call whose first id is at `start`. The first of them begins where the spans so far end.
fn add_spans(versions: &mut Vec<VersionSpan>, spans: &[VersionSpan], start: usize, trained: usize) {
    for &VersionSpan(version, first, length) in spans {
        let end = (first + length).min(trained as i64);
        if first < end {
            let from = versions.last().map_or(0, |VersionSpan(_, start, length)| start + length);
            versions.push(VersionSpan(version, from, start as i64 + end - from));
        }
    }
}
