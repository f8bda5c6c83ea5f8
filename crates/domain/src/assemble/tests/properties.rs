//! Random sets of calls: the properties that make the rule right, and agreement with the oracle.

use std::collections::BTreeSet;

use forebay_wire::{Retries, Segment, VersionSpan};
use proptest::{collection::vec, prelude::*};

use super::{
    super::{After, Assembly},
    Recorded, assembled, logprob, oracle,
};
use crate::assemble::retries::DropReason;

/// The random choices behind one call.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own, not a state machine")]
struct Choice {
    how: u8,
    pick: prop::sample::Index,
    tail: Vec<i32>,
    ids: Vec<i32>,
    stopped_on_token: bool,
    agent: Option<&'static str>,
    undelivered: bool,
    abandoned: bool,
    retry_count: u32,
    is_given_after: bool,
    has_logprobs: bool,
    has_versions: bool,
    time: u8,
}

fn choice() -> impl Strategy<Value = Choice> {
    let flags = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2), any::<bool>());
    let columns = (prop::bool::weighted(0.9), prop::bool::weighted(0.9));
    let ids = (vec(0..3_i32, 0..3), vec(0..3_i32, 0..4));
    let agent = prop_oneof![Just(None), Just(Some("a")), Just(Some("b"))];
    let retry_count = prop_oneof![3 => Just(0), 2 => 1..3_u32];
    let sent = (agent, retry_count);
    (0..9_u8, any::<prop::sample::Index>(), ids, flags, sent, columns, any::<u8>()).prop_map(
        |(
            how,
            pick,
            (tail, ids),
            (stopped_on_token, undelivered, abandoned, is_given_after),
            (agent, retry_count),
            columns,
            time,
        )| Choice {
            how,
            pick,
            tail,
            ids,
            stopped_on_token,
            agent,
            undelivered,
            abandoned,
            retry_count,
            is_given_after,
            has_logprobs: columns.0,
            has_versions: columns.1,
            time,
        },
    )
}

/// Makes a call that begins anew, continues, repeats or almost continues an earlier one.
fn add(calls: &mut Vec<Recorded>, choice: Choice) {
    let number = calls.len();
    let picked = (!calls.is_empty()).then(|| choice.pick.index(calls.len()));
    let full = picked.map(|picked| calls[picked].full()).unwrap_or_default();
    let after = |trimmed, common| {
        let after = picked.map(|call| (After { call, trimmed }, common));
        after.filter(|_| choice.is_given_after)
    };
    let without_last = full.len() - usize::from(picked.is_some_and(|picked| !calls[picked].ids.is_empty()));
    let (mut prompt, after) = match choice.how {
        0 => (choice.tail, None),
        1 => ([vec![7; 65], choice.tail].concat(), None),
        2..=4 => ([&full[..], &choice.tail].concat(), after(false, full.len())),
        5..=6 => ([&full[..without_last], &choice.tail].concat(), after(true, without_last)),
        7 => (picked.map(|picked| calls[picked].prompt.clone()).unwrap_or_default(), None),
        _ => {
            let mut changed = [&full[..], &choice.tail].concat();
            if let Some(last) = changed.len().checked_sub(1) {
                changed[choice.pick.index(last + 1)] = 5;
            }
            (changed, None)
        }
    };
    if prompt.is_empty() {
        prompt.push(0);
    }
    let after = after.filter(|(_, common)| *common <= prompt.len() && *common > 0);
    let length = choice.ids.len() as i64;
    let middle = length / 2;
    let version = 10 * number as i64;
    let spans = [VersionSpan(version, 0, middle), VersionSpan(version + 1, middle, length - middle)];
    calls.push(Recorded {
        ended: number as u64,
        prompt,
        logprobs: choice.has_logprobs.then(|| (0..choice.ids.len()).map(|place| logprob(number, place)).collect()),
        versions: choice.has_versions.then(|| spans.into_iter().filter(|span| span.2 > 0).collect()),
        ids: choice.ids,
        stopped_on_token: choice.stopped_on_token,
        agent: choice.agent,
        undelivered: choice.undelivered,
        abandoned: choice.abandoned,
        retry_count: choice.retry_count,
        reward: None,
        state_key: None,
        after,
    });
}

/// Calls in the order in which they were made, and another order in which they are given.
fn sets() -> impl Strategy<Value = (Vec<Recorded>, Vec<usize>)> {
    (vec(choice(), 1..14), any::<bool>()).prop_flat_map(|(choices, in_order)| {
        let times: Vec<u8> = choices.iter().map(|choice| choice.time).collect();
        let mut calls = Vec::new();
        for choice in choices {
            add(&mut calls, choice);
        }
        if !in_order {
            let mut order: Vec<usize> = (0..calls.len()).collect();
            order.sort_by_key(|&call| times[call]);
            for (place, call) in order.into_iter().enumerate() {
                calls[call].ended = place as u64;
            }
        }
        let order: Vec<usize> = (0..calls.len()).collect();
        (Just(calls), Just(order).prop_shuffle())
    })
}

/// The calls in another order.
fn given_as(calls: &[Recorded], order: &[usize]) -> Vec<Recorded> {
    let place = |call| order.iter().position(|&other| other == call).expect("an order has every call");
    let given = |&call: &usize| {
        let mut recorded = calls[call].clone();
        if let Some((after, _)) = &mut recorded.after {
            after.call = place(after.call);
        }
        recorded
    };
    order.iter().map(given).collect()
}

/// More cases can be asked for with `PROPTEST_CASES`.
fn config() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases.max(3_000), failure_persistence: None, ..config }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_result_is_that_of_the_rule(
        (calls, order) in sets(),
        retries in prop::sample::select(vec![Retries::Transport, Retries::Last, Retries::Keep]),
    ) {
        let (assembly, segments) = assembled(&calls, retries);
        let expected = oracle::expected(&calls, retries);
        prop_assert_eq!(&segments, &expected.segments);
        let owned: Vec<Vec<usize>> = assembly.chains.iter().map(|chain| chain.calls.clone()).collect();
        prop_assert_eq!(&owned, &expected.owned);
        prop_assert_eq!(&assembly.dropped.iter().copied().collect::<std::collections::BTreeMap<_, _>>(), &expected.dropped);
        prop_assert_eq!(&assembly.breaks, &expected.breaks);
        prop_assert_eq!(assembly.trimmed, expected.trimmed);

        every_call_is_in_one_segment_or_dropped(&calls, &assembly)?;
        let repeats = calls.iter().filter(|call| call.retry_count > 0).count();
        let dropped = assembly.dropped.iter().filter(|(_, reason)| *reason == DropReason::Retry).count();
        prop_assert!(retries == Retries::Last || dropped <= repeats, "{dropped} of {repeats} repeats");
        every_trained_token_has_the_context_it_was_sampled_in(&calls, &assembly, &segments)?;
        spans_tile_and_sizes_hold(&assembly, &segments)?;

        let given = given_as(&calls, &order);
        let (other, other_segments) = assembled(&given, retries);
        prop_assert_eq!(&other_segments, &segments);
        let named = |assembly: &Assembly, name: &dyn Fn(usize) -> usize| {
            let calls = assembly.chains.iter().map(|chain| chain.calls.iter().map(|&call| name(call)).collect::<Vec<_>>());
            let breaks = assembly.breaks.iter().map(|found| (name(found.call), name(found.nearest), found.position));
            let dropped = assembly.dropped.iter().map(|&(call, reason)| (name(call), reason));
            (calls.collect::<Vec<_>>(), breaks.collect::<Vec<_>>(), dropped.collect::<Vec<_>>(), assembly.counts())
        };
        prop_assert_eq!(named(&other, &|call| order[call]), named(&assembly, &|call| call));
    }
}

fn every_call_is_in_one_segment_or_dropped(calls: &[Recorded], assembly: &Assembly) -> Result<(), TestCaseError> {
    let owned = assembly.chains.iter().flat_map(|chain| chain.calls.iter().copied());
    let mut met: Vec<usize> = owned.chain(assembly.dropped.iter().map(|(call, _)| *call)).collect();
    met.sort_unstable();
    prop_assert_eq!(met, (0..calls.len()).collect::<Vec<_>>());
    prop_assert_eq!(assembly.calls, calls.len());
    Ok(())
}

/// The trained tokens are recognised by their log-probabilities, which differ for all of them.
fn every_trained_token_has_the_context_it_was_sampled_in(
    calls: &[Recorded],
    assembly: &Assembly,
    segments: &[Segment],
) -> Result<(), TestCaseError> {
    let mut trained = BTreeSet::new();
    let mut missing = 0;
    for (chain, segment) in assembly.chains.iter().zip(segments) {
        let sampled: usize = chain.calls.iter().map(|&call| calls[call].ids.len()).sum();
        missing += sampled - segment.loss_mask.iter().map(|&bit| usize::from(bit)).sum::<usize>();
        let Some(logprobs) = &segment.logprobs else { continue };
        let prompt = segment.tokens.len() - segment.loss_mask.len();
        for (place, &found) in logprobs.iter().enumerate() {
            if segment.loss_mask[place] == 0 {
                prop_assert_eq!(found.to_bits(), 0.0_f32.to_bits());
                continue;
            }
            let number = -found as usize - 1;
            let (call, index) = (&calls[number / 1_000], number % 1_000);
            prop_assert_eq!(segment.tokens[prompt + place], call.ids[index]);
            let context = [&call.prompt[..], &call.ids[..index]].concat();
            prop_assert_eq!(&segment.tokens[..prompt + place], &context[..]);
            prop_assert!(trained.insert(number), "call {} trains token {} twice", number / 1_000, index);
        }
    }
    // Every kept token is trained, except stop tokens that were replaced.
    prop_assert_eq!(missing, assembly.trimmed);
    Ok(())
}

fn spans_tile_and_sizes_hold(assembly: &Assembly, segments: &[Segment]) -> Result<(), TestCaseError> {
    for (chain, segment) in assembly.chains.iter().zip(segments) {
        prop_assert_eq!((chain.tokens, chain.response), (segment.tokens.len(), segment.loss_mask.len()));
        prop_assert!(chain.response > 0 && chain.response < chain.tokens);
        prop_assert!(segment.logprobs.as_ref().is_none_or(|logprobs| logprobs.len() == chain.response));
        let Some(versions) = &segment.versions else { continue };
        let mut next = 0;
        for &VersionSpan(_, start, length) in versions {
            prop_assert!(start == next && length > 0);
            next += length;
        }
        prop_assert_eq!(next, chain.response as i64);
    }
    prop_assert_eq!(assembly.tokens(), segments.iter().map(|segment| segment.tokens.len()).sum::<usize>());
    Ok(())
}
