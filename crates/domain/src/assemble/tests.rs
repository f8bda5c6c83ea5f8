//! The worked examples of the documentation, and random sets of calls against an oracle.

mod oracle;
mod properties;

use forebay_wire::{Retries, Segment, TurnSpan, VersionSpan};

use super::{After, Assembly, Call, CallSet, NoBeginning};
use crate::assemble::{breaks::Break, retries::DropReason};

/// Openers: system, user, assistant, tool.
const S: i32 = 1;
const U: i32 = 2;
const A: i32 = 3;
const T: i32 = 4;
/// The newline that a chat template adds behind the stop token.
const N: i32 = 8;
/// The stop token.
const E: i32 = 9;

/// A call with its whole prompt.
#[derive(Clone, Debug, Default)]
struct Recorded {
    ended: u64,
    prompt: Vec<i32>,
    ids: Vec<i32>,
    logprobs: Option<Vec<f32>>,
    versions: Option<Vec<VersionSpan>>,
    stopped_on_token: bool,
    agent: Option<&'static str>,
    undelivered: bool,
    abandoned: bool,
    retry_count: u32,
    reward: Option<f64>,
    state_key: Option<&'static str>,
    /// What it is given to follow, and how many ids of the prompt are then left out.
    after: Option<(After, usize)>,
}

impl Recorded {
    fn full(&self) -> Vec<i32> {
        [&self.prompt[..], &self.ids].concat()
    }

    fn call(&self) -> Call<'_> {
        Call {
            ended: self.ended,
            after: self.after.map(|(after, _)| after),
            prompt: &self.prompt[self.after.map_or(0, |(_, common)| common)..],
            ids: &self.ids,
            logprobs: self.logprobs.as_deref(),
            versions: self.versions.as_deref(),
            stopped_on_token: self.stopped_on_token,
            agent: self.agent,
            delivered: !self.undelivered,
            abandoned: self.abandoned,
            retry_count: self.retry_count,
            reward: self.reward,
            state_key: self.state_key,
        }
    }
}

/// Calls with these prompts and ids, one after the other. Each has log-probabilities and stops on a stop token.
fn calls(sampled: &[(&[i32], &[i32])]) -> Vec<Recorded> {
    let call = |(number, (prompt, ids)): (usize, &(&[i32], &[i32]))| Recorded {
        ended: number as u64,
        prompt: prompt.to_vec(),
        ids: ids.to_vec(),
        logprobs: Some((0..ids.len()).map(|place| logprob(number, place)).collect()),
        stopped_on_token: true,
        ..Recorded::default()
    };
    sampled.iter().enumerate().map(call).collect()
}

/// A log-probability that no other token has.
fn logprob(call: usize, place: usize) -> f32 {
    -((call * 1_000 + place + 1) as f32)
}

fn assembled(recorded: &[Recorded], retries: Retries) -> (Assembly, Vec<Segment>) {
    let set = CallSet::new(recorded.iter().map(Recorded::call).collect()).expect("every call has a beginning");
    let assembly = set.assemble(retries);
    let segments = assembly.chains.iter().map(|chain| set.segment(chain)).collect();
    (assembly, segments)
}

/// A segment as the documentation writes it: label, prompt, response and mask.
type Written<'a> = (&'a str, &'a [i32], &'a [i32], &'a [u8]);

#[track_caller]
fn expect(recorded: &[Recorded], expected: &[Written<'_>]) -> Assembly {
    let (assembly, segments) = assembled(recorded, Retries::default());
    let found: Vec<Written<'_>> = segments
        .iter()
        .map(|segment| {
            let (prompt, response) = segment.tokens.split_at(segment.tokens.len() - segment.loss_mask.len());
            (segment.kind.as_deref().expect("every segment has a label"), prompt, response, &segment.loss_mask[..])
        })
        .collect();
    assert_eq!(found, expected);
    assembly
}

fn by_agents(mut recorded: Vec<Recorded>, agents: &[&'static str]) -> Vec<Recorded> {
    for (call, agent) in recorded.iter_mut().zip(agents) {
        call.agent = Some(agent);
    }
    recorded
}

#[test]
fn a_call_that_extends_another_one_continues_its_segment() {
    let mut recorded = calls(&[(&[S, U, A], &[11, 12, E]), (&[S, U, A, 11, 12, E, N, T, A], &[13, E])]);
    recorded[0].versions = Some(vec![VersionSpan(5, 0, 3)]);
    recorded[1].versions = Some(vec![VersionSpan(6, 0, 2)]);
    let expected = ("final", &[S, U, A][..], &[11, 12, E, N, T, A, 13, E][..], &[1, 1, 1, 0, 0, 0, 1, 1][..]);
    let assembly = expect(&recorded, &[expected]);
    let (_, segments) = assembled(&recorded, Retries::default());
    assert_eq!(segments[0].versions, Some(vec![VersionSpan(5, 0, 3), VersionSpan(6, 3, 5)]));
    assert_eq!(segments[0].logprobs, Some(vec![-1.0, -2.0, -3.0, 0.0, 0.0, 0.0, -1_001.0, -1_002.0]));
    assert_eq!((assembly.chains[0].tokens, assembly.chains[0].response, assembly.tokens()), (11, 8, 11));
}

#[test]
fn ids_that_came_back_as_other_ids_begin_a_segment() {
    let recorded = calls(&[(&[S, U, A], &[11, 12, E]), (&[S, U, A, 17, E, N, T, A], &[13, E])]);
    let first = ("turn", &[S, U, A][..], &[11, 12, E][..], &[1, 1, 1][..]);
    expect(&recorded, &[first, ("final", &[S, U, A, 17, E, N, T, A], &[13, E], &[1, 1])]);
}

#[test]
fn a_history_without_its_reasoning_begins_a_segment() {
    let recorded = calls(&[
        (&[S, U, A], &[70, 71, 11, E]),
        (&[S, U, A, 70, 71, 11, E, N, T, A], &[72, 13, E]),
        (&[S, U, A, 11, E, N, T, A, 13, E, N, U, A], &[73, 14, E]),
    ]);
    let response = [70, 71, 11, E, N, T, A, 72, 13, E];
    let first = ("compaction", &[S, U, A][..], &response[..], &[1, 1, 1, 1, 0, 0, 0, 1, 1, 1][..]);
    let last = ("final", &[S, U, A, 11, E, N, T, A, 13, E, N, U, A][..], &[73, 14, E][..], &[1, 1, 1][..]);
    expect(&recorded, &[first, last]);
}

#[test]
fn a_sub_agent_has_a_segment_of_its_own_wherever_it_ran_in_time() {
    let recorded = calls(&[
        (&[S, U, A], &[11, E]),
        (&[S, 40, U, A], &[21, E]),
        (&[S, 40, U, A, 21, E, N, T, A], &[22, E]),
        (&[S, U, A, 11, E, N, T, A], &[12, E]),
    ]);
    let sub = ("subagent", &[S, 40, U, A][..], &[21, E, N, T, A, 22, E][..], &[1, 1, 0, 0, 0, 1, 1][..]);
    let main = ("final", &[S, U, A][..], &[11, E, N, T, A, 12, E][..], &[1, 1, 0, 0, 0, 1, 1][..]);
    let recorded = by_agents(recorded, &["main", "sub", "sub", "main"]);
    expect(&recorded, &[sub, main]);
    // The same calls in other orders of time: the segments are the same, ordered by their last calls.
    for (times, sub_is_first) in [([0, 2, 3, 1], false), ([2, 0, 1, 3], true), ([0, 1, 3, 4], true)] {
        let mut recorded = recorded.clone();
        for (call, time) in recorded.iter_mut().zip(times) {
            call.ended = time;
        }
        let (_, segments) = assembled(&recorded, Retries::default());
        let prompts: Vec<i32> = segments.iter().map(|segment| segment.tokens[1]).collect();
        assert_eq!(prompts, if sub_is_first { [40, U] } else { [U, 40] }, "{times:?}");
    }
}

#[test]
fn a_compaction_ends_a_segment_with_its_summary_trained() {
    let recorded = calls(&[
        (&[S, U, A], &[11, E]),
        (&[S, U, A, 11, E, N, T, A], &[12, E]),
        (&[S, U, A, 11, E, N, T, A, 12, E, N, U, A], &[30, 31, E]),
        (&[S, U, 30, 31, A], &[13, E]),
    ]);
    let response = [11, E, N, T, A, 12, E, N, U, A, 30, 31, E];
    let first = ("compaction", &[S, U, A][..], &response[..], &[1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1][..]);
    expect(&recorded, &[first, ("final", &[S, U, 30, 31, A], &[13, E], &[1, 1])]);
}

#[test]
fn a_call_whose_answer_was_lost_is_dropped() {
    let mut recorded = calls(&[(&[S, U, A], &[10, E]), (&[S, U, A], &[11, E]), (&[S, U, A, 11, E, N, T, A], &[12, E])]);
    recorded[0].undelivered = true;
    let merged = ("final", &[S, U, A][..], &[11, E, N, T, A, 12, E][..], &[1, 1, 0, 0, 0, 1, 1][..]);
    let assembly = expect(&recorded, &[merged]);
    assert_eq!(assembly.dropped, [(0, DropReason::Undelivered)]);
}

#[test]
fn what_a_fork_shares_is_trained_once() {
    let recorded = calls(&[
        (&[S, U, A], &[11, E]),
        (&[S, U, A, 11, E, N, T, 50, A], &[12, E]),
        (&[S, U, A, 11, E, N, T, 51, A], &[13, E]),
    ]);
    let first = ("compaction", &[S, U, A][..], &[11, E, N, T, 50, A, 12, E][..], &[1, 1, 0, 0, 0, 0, 1, 1][..]);
    expect(&recorded, &[first, ("final", &[S, U, A, 11, E, N, T, 51, A], &[13, E], &[1, 1])]);
    // The longer chain owns what both share, also if it ended last.
    let mut recorded = recorded;
    recorded[2].ids = vec![13, 14, E];
    recorded[2].logprobs = None;
    let whole = ("final", &[S, U, A][..], &[11, E, N, T, 51, A, 13, 14, E][..], &[1, 1, 0, 0, 0, 0, 1, 1, 1][..]);
    let (assembly, segments) = assembled(&recorded, Retries::default());
    assert_eq!(segments[1].loss_mask, whole.3);
    assert_eq!(assembly.chains.iter().map(|chain| chain.calls.clone()).collect::<Vec<_>>(), [vec![1], vec![0, 2]]);
}

#[test]
fn a_call_with_a_reward_makes_every_call_a_turn() {
    let mut recorded = calls(&[(&[S, U, A], &[11, U]), (&[S, U, A, 11, T, 50, A], &[13, U]), (&[S, T], &[14])]);
    let turns = |recorded: &[Recorded]| -> Vec<Option<Vec<TurnSpan>>> {
        assembled(recorded, Retries::default()).1.into_iter().map(|segment| segment.turns).collect()
    };
    assert_eq!(turns(&recorded), [None, None]);
    recorded[1].reward = Some(0.5);
    recorded[1].state_key = Some("s");
    let span = |start, length, reward, state_key: Option<&str>| TurnSpan {
        start,
        length,
        reward,
        state_key: state_key.map(str::to_owned),
    };
    // The stop token of the first call is not trained, and is not a part of its turn.
    let first = vec![span(0, 1, None, None), span(4, 2, Some(0.5), Some("s"))];
    assert_eq!(turns(&recorded), [Some(first), Some(vec![span(0, 1, None, None)])]);
}

#[test]
fn a_call_that_was_cut_off_is_continued() {
    let mut recorded = calls(&[(&[S, U, A], &[11, 12]), (&[S, U, A, 11, 12, E, N, U, A], &[13, E])]);
    recorded[0].stopped_on_token = false;
    let response = [11, 12, E, N, U, A, 13, E];
    expect(&recorded, &[("final", &[S, U, A], &response, &[1, 1, 0, 0, 0, 0, 1, 1])]);
}

#[test]
fn a_stop_token_that_is_the_next_opener_may_be_replaced() {
    let mut recorded = calls(&[(&[S, U, A], &[11, U]), (&[S, U, A, 11, T, 50, A], &[13, U])]);
    recorded[0].versions = Some(vec![VersionSpan(5, 0, 1), VersionSpan(6, 1, 1)]);
    recorded[1].versions = Some(vec![VersionSpan(7, 0, 2)]);
    let merged = ("final", &[S, U, A][..], &[11, T, 50, A, 13, U][..], &[1, 0, 0, 0, 1, 1][..]);
    assert_eq!(expect(&recorded, &[merged]).trimmed, 1);
    let (_, segments) = assembled(&recorded, Retries::default());
    assert_eq!(segments[0].versions, Some(vec![VersionSpan(5, 0, 1), VersionSpan(7, 1, 5)]));
    assert_eq!(segments[0].logprobs, Some(vec![-1.0, 0.0, 0.0, 0.0, -1_001.0, -1_002.0]));
    // Without the statement that the call stopped on a token, or where nothing follows, nothing is left out.
    recorded[0].stopped_on_token = false;
    assert_eq!(
        expect(
            &recorded,
            &[("turn", &[S, U, A], &[11, U], &[1, 1]), ("final", &[S, U, A, 11, T, 50, A], &[13, U], &[1, 1])]
        )
        .trimmed,
        0
    );
    let cut_short = calls(&[(&[S, U, A], &[11, U]), (&[S, U, A, 11], &[13, U])]);
    assert_eq!(assembled(&cut_short, Retries::default()).0.trimmed, 0);
    // At least one id of a call must be left.
    let only_stop = calls(&[(&[S, U, A], &[U]), (&[S, U, A, T, 50, A], &[13, U])]);
    assert_eq!(assembled(&only_stop, Retries::default()).0.chains.len(), 2);
}

#[test]
fn calls_without_ids_are_counted_and_dropped() {
    let recorded = calls(&[(&[S, U, A], &[]), (&[S, U, A, 5], &[11])]);
    assert_eq!(expect(&recorded, &[("final", &[S, U, A, 5], &[11], &[1])]).dropped, [(0, DropReason::Empty)]);
    let (assembly, segments) = assembled(&recorded[..1], Retries::default());
    assert_eq!((assembly.calls, segments.len(), assembly.dropped.len()), (1, 0, 1));
}

#[test]
fn of_equal_calls_the_one_that_was_used_is_kept_if_the_rules_say_so() {
    // The first of three samples is continued; the others are left over.
    let mut recorded = calls(&[
        (&[S, U], &[10]),
        (&[S, U], &[11]),
        (&[S, U], &[12]),
        (&[S, U, 10, A], &[13]),
        (&[S, U, 10, A], &[14]),
    ]);
    let (assembly, _) = assembled(&recorded, Retries::Last);
    // Of the two samples at the end, the last one is kept.
    assert_eq!(assembly.dropped, [(1, DropReason::Retry), (2, DropReason::Retry), (3, DropReason::Retry)]);
    assert_eq!(assembled(&recorded, Retries::Keep).0.dropped, []);
    // Other agents may use the same prompt.
    recorded[1].agent = Some("other");
    assert_eq!(assembled(&recorded, Retries::Last).0.dropped, [(2, DropReason::Retry), (3, DropReason::Retry)]);
    // What continued the first one was not delivered, but the agent must have had the first one to continue it.
    recorded[1].agent = None;
    recorded.truncate(4);
    recorded[3].undelivered = true;
    let dropped = [(1, DropReason::Retry), (2, DropReason::Retry), (3, DropReason::Undelivered)];
    assert_eq!(assembled(&recorded, Retries::Last).0.dropped, dropped);
    assert_eq!(assembled(&recorded, Retries::Keep).0.dropped, [(3, DropReason::Undelivered)]);
    // That holds even if nobody saw the first one being delivered.
    recorded[0].undelivered = true;
    assert_eq!(assembled(&recorded, Retries::Last).0.dropped, dropped);
    // A sample after it is used later.
    recorded.push(Recorded { ended: 4, ..recorded[1].clone() });
    let dropped =
        [(0, DropReason::Retry), (1, DropReason::Retry), (2, DropReason::Retry), (3, DropReason::Undelivered)];
    assert_eq!(assembled(&recorded, Retries::Last).0.dropped, dropped);
}

#[test]
fn of_an_attempt_that_was_given_up_only_what_the_last_one_continues_is_kept() {
    // The second attempt was answered with the first call, and differs from the second one on. So the third one is over.
    let mut recorded = calls(&[
        (&[S, U], &[10]),
        (&[S, U, 10, T, A], &[11]),
        (&[S, U, 10, T, A, 11, T, A], &[12]),
        (&[S, U, 10, T, 5, A], &[13]),
    ]);
    recorded[1].abandoned = true;
    recorded[2].abandoned = true;
    let dropped = [(1, DropReason::Abandoned), (2, DropReason::Abandoned)];
    for retries in [Retries::Transport, Retries::Last, Retries::Keep] {
        let (assembly, segments) = assembled(&recorded, retries);
        assert_eq!(assembly.dropped, dropped);
        assert_eq!((segments.len(), &segments[0].tokens[..]), (1, &[S, U, 10, T, 5, A, 13][..]));
    }
    // An agent that keeps its conversation goes on behind a call that it does not make again.
    recorded[0].abandoned = true;
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, dropped);
    // It was sampled anew, and the ids are the same by chance: the new call is the one that is continued.
    recorded.insert(0, Recorded { abandoned: false, ..recorded[0].clone() });
    for (number, call) in recorded.iter_mut().enumerate() {
        call.ended = number as u64;
    }
    recorded[0].undelivered = true;
    let (assembly, segments) = assembled(&recorded, Retries::Transport);
    let dropped = [(1, DropReason::Abandoned), (2, DropReason::Abandoned), (3, DropReason::Abandoned)];
    assert_eq!((&assembly.dropped[..], segments.len(), &assembly.chains[0].calls[..]), (&dropped[..], 1, &[0, 4][..]));
}

#[test]
fn all_that_was_delivered_is_trained_unless_the_client_repeated_the_call() {
    // A game in which an observation recurs: nothing continues any call, and all of them were played.
    let mut recorded = calls(&[(&[S, U, 5], &[10]), (&[S, U, 6], &[11]), (&[S, U, 5], &[12]), (&[S, U, 5], &[13])]);
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, []);
    assert_eq!(assembled(&recorded, Retries::Last).0.dropped, [(0, DropReason::Retry), (2, DropReason::Retry)]);
    // The client repeats a call of which it lost the answer, which the service had written.
    recorded[3].retry_count = 1;
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, [(2, DropReason::Retry)]);
    assert_eq!(assembled(&recorded, Retries::Keep).0.dropped, []);
    // Where one of the calls was not delivered, that is the one that was repeated.
    recorded[0].undelivered = true;
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, [(0, DropReason::Undelivered)]);
    // The third attempt repeats the second, which repeats the first, also if neither was delivered in the end.
    recorded[2].retry_count = 1;
    recorded[3] = Recorded { retry_count: 2, undelivered: true, ..recorded[3].clone() };
    recorded[0].undelivered = false;
    let dropped = [(0, DropReason::Retry), (2, DropReason::Retry), (3, DropReason::Undelivered)];
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, dropped);
    // Equal calls of another agent, and a call that is continued, are none that were repeated.
    let mut recorded = calls(&[(&[S, U], &[10]), (&[S, U], &[11]), (&[S, U], &[12]), (&[S, U, 11, A], &[13])]);
    recorded[0].agent = Some("other");
    recorded[2].retry_count = 1;
    assert_eq!(assembled(&recorded, Retries::Transport).0.dropped, []);
}

#[test]
fn a_prompt_that_leaves_what_was_recorded_is_a_break() {
    let system: Vec<i32> = (100..170).collect();
    let with = |rest: &[i32]| [&system[..], rest].concat();
    let (first, drifted, short) = (with(&[U, A]), with(&[U, A, 17, E, A]), with(&[40, U]));
    let recorded = calls(&[(&first, &[11, 12, E]), (&drifted, &[13, E]), (&short, &[14]), (&first, &[15])]);
    let (assembly, _) = assembled(&recorded, Retries::Keep);
    // The last call repeats a prompt, which leaves nothing.
    let expected = [
        Break { call: 1, nearest: 0, position: 72, parent: None },
        Break { call: 2, nearest: 0, position: 70, parent: None },
    ];
    assert_eq!(assembly.breaks, expected);
    let few: Vec<Recorded> =
        recorded.iter().map(|call| Recorded { prompt: call.prompt[6..].to_vec(), ..call.clone() }).collect();
    assert_eq!(assembled(&few, Retries::Keep).0.breaks, [Break { call: 1, nearest: 0, position: 66, parent: None }]);
}

#[test]
fn calls_that_follow_each_other_in_a_circle_are_named() {
    let after = |call| Some((After { call, trimmed: false }, 0));
    let mut recorded = calls(&[(&[S], &[11]), (&[N], &[12]), (&[N], &[13]), (&[N], &[14]), (&[N], &[15])]);
    recorded[1].after = after(0);
    recorded[2].after = after(3);
    recorded[3].after = after(2);
    recorded[4].after = after(9);
    let found = CallSet::new(recorded.iter().map(Recorded::call).collect()).expect_err("two calls follow each other");
    assert_eq!(found, NoBeginning(vec![2, 3, 4]));
}

/// The ids that are read are those that are given, whether a prompt is given whole or behind another call.
#[test]
fn every_given_id_is_read_once() {
    const TURNS: usize = 2_000;
    let mut recorded: Vec<Recorded> = Vec::new();
    for number in 0..TURNS {
        let before = recorded.last().map_or(vec![S, U, A], |call| [call.full(), vec![N, T, A]].concat());
        let common = recorded.last().map_or(0, |call| call.full().len());
        let after = number.checked_sub(1).map(|call| (After { call, trimmed: false }, common));
        recorded.push(Recorded {
            ended: number as u64,
            prompt: before,
            ids: vec![11, E],
            after,
            ..Recorded::default()
        });
    }
    let set = CallSet::new(recorded.iter().map(Recorded::call).collect()).expect("every call has a beginning");
    assert_eq!(set.paths.ids_read, TURNS * 5);
    assert!(set.paths.downwards().len() <= 3 * TURNS + 1);
    let assembly = set.assemble(Retries::default());
    assert_eq!((assembly.chains.len(), assembly.tokens()), (1, TURNS * 5));
    assert_eq!(set.segment(&assembly.chains[0]).tokens, recorded[TURNS - 1].full());
}
