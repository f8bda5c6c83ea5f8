//! Credit by turn: what each turn of a rollout is rewarded for, and how much better it did than others.
//!
//! Separate from [`advantage`](crate::advantage), which compares whole rollouts. A turn is a span of a response that the
//! producer named, or a run of tokens with mask 1 if it named none. The rows of rollouts keep their rewards and states,
//! which is all that a decision reads; where the turns are follows from the payload, when a batch is read.

use std::{collections::HashMap, ops::Range, sync::Arc};

use bytes::{Buf as _, BufMut as _};
use forebay_wire::{Gigpo, Norm, Segment, TurnReturn, TurnSpan};
use memchr::memchr;

use crate::advantage::{centred, fit, standardized};

/// The most turns of a rollout whose turns are compared.
pub const TURNS_MAX: usize = 4_096;

/// The most turns of all rollouts of a group, which are in memory while it is decided.
const GROUP_TURNS_MAX: usize = 1 << 20;

/// Bytes of a turn in the row of its rollout.
pub const TURN_BYTES: usize = 16;

/// What the comparison of turns knows of one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Turn {
    /// Its reward; 0 if it has none.
    pub reward: f64,
    /// A hash of the name of the state in which it began; 0 if the producer named none.
    pub state: u64,
}

/// A turn, and its place in the response tokens of all segments of its rollout, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Spanned {
    pub turn: Turn,
    pub range: Range<usize>,
}

/// A rollout that counts in the baseline.
#[derive(Clone, Copy, Debug)]
pub struct Credited<'a> {
    /// The reward of the whole rollout.
    pub reward: f64,
    /// Its turns in order.
    pub turns: &'a [Turn],
}

/// The most turns that a rollout may have in a group of this size.
#[must_use]
pub fn turns_max(group_size: u32) -> usize {
    (GROUP_TURNS_MAX / group_size.max(1) as usize).min(TURNS_MAX)
}

/// The turns of segments in order, of which each has its spans and its mask as sent.
pub fn spanned<'a>(
    segments: impl Iterator<Item = (Option<&'a [TurnSpan]>, &'a [u8])>,
) -> impl Iterator<Item = Spanned> {
    let mut begin = 0;
    segments.flat_map(move |(spans, mask)| {
        let of_segment = begin;
        begin += mask.len();
        let place = move |range: Range<usize>| of_segment + range.start..of_segment + range.end;
        let named = spans.into_iter().flatten().map(move |span| Spanned {
            turn: Turn {
                // Adding 0 turns -0 into 0, as `Facts::reward` does.
                reward: span.reward.unwrap_or(0.0) + 0.0,
                state: span.state_key.as_deref().map_or(0, hash),
            },
            range: place(span.start as usize..(span.start + span.length) as usize),
        });
        let runs = if spans.is_none() { mask } else { &[] };
        named.chain(ones(runs).map(move |run| Spanned { turn: Turn::default(), range: place(run) }))
    })
}

/// The turns of a trajectory, or the first of them if there are more than a rollout may have.
pub fn of_segments(segments: &[Segment]) -> Arc<[Turn]> {
    let segments = segments.iter().map(|segment| (segment.turns.as_deref(), &segment.loss_mask[..]));
    spanned(segments).map(|spanned| spanned.turn).take(TURNS_MAX + 1).collect()
}

/// The runs of tokens with mask 1.
fn ones(mask: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + memchr(1, &mask[from..])?;
        from = memchr(0, &mask[start..]).map_or(mask.len(), |length| start + length);
        Some(start..from)
    })
}

/// States are compared by 64 bits of a hash. That two of a group have the same hash by accident, among a million of them,
/// has a probability of 3e-8.
fn hash(state_key: &str) -> u64 {
    let digest = blake3::hash(state_key.as_bytes());
    (&digest.as_bytes()[..]).get_u64_le().max(1)
}

/// Turns as the row of their rollout has them: reward and state of each, little-endian.
#[must_use]
pub fn pack(turns: &[Turn]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(TURN_BYTES * turns.len());
    for turn in turns {
        packed.put_f64_le(turn.reward);
        packed.put_u64_le(turn.state);
    }
    packed
}

/// Puts rewards into turns that were given to them, each with the number of its turn: the mean of what several scorers gave.
pub fn reward(turns: &mut [Turn], given: impl IntoIterator<Item = (u32, f64)>) {
    let mut counts: HashMap<u32, f64> = HashMap::new();
    for (place, value) in given {
        let Some(turn) = turns.get_mut(place as usize) else { continue };
        let before = counts.entry(place).or_default();
        // Each value is divided before it is added, because a sum of finite values may be infinite.
        turn.reward =
            if *before == 0.0 { value } else { turn.reward * (*before / (*before + 1.0)) + value / (*before + 1.0) };
        *before += 1.0;
    }
}

/// Reads what [`pack`] wrote; none if it is damaged.
#[must_use]
pub fn unpack(packed: &[u8]) -> Option<Vec<Turn>> {
    let (turns, rest) = packed.as_chunks::<TURN_BYTES>();
    let turn = |mut bytes: &[u8]| Turn { reward: bytes.get_f64_le(), state: bytes.get_u64_le() };
    let turns: Vec<Turn> = turns.iter().map(|bytes| turn(bytes)).collect();
    (rest.is_empty() && turns.iter().all(|turn| turn.reward.is_finite())).then_some(turns)
}

/// Advantages of turns as the row of their rollout has them, little-endian.
#[must_use]
pub fn pack_advantages(advantages: &[f64]) -> Vec<u8> {
    advantages.iter().flat_map(|advantage| advantage.to_le_bytes()).collect()
}

/// Reads what [`pack_advantages`] wrote; none if it is damaged.
#[must_use]
pub fn unpack_advantages(packed: &[u8]) -> Option<Vec<f64>> {
    let (advantages, rest) = packed.as_chunks::<8>();
    rest.is_empty().then(|| advantages.iter().copied().map(f64::from_le_bytes).collect())
}

/// Advantages of the turns of each rollout: (G - mean) / (s + 1e-6) over all turns, where G of turn t is the sum over u >= t
/// of gamma^(u-t) times the reward of turn u, s is the unbiased standard deviation, and the reward of the rollout is added
/// to that of its last turn if `outcome`.
#[must_use]
pub fn turn_return(rule: &TurnReturn, rollouts: &[Credited<'_>]) -> Vec<Vec<f64>> {
    let all: Vec<f64> = rollouts.iter().flat_map(|rollout| returns(rollout, rule.gamma, rule.outcome)).collect();
    by_rollout(rollouts, standardized(&all))
}

/// Advantages of rollouts by their rewards, `A_E`, and of their turns: `A_E + omega * A_S`, where `A_S` compares the returns
/// of turns that began in the same state (`GiGPO`, arXiv 2505.10978).
#[must_use]
pub fn gigpo(rule: &Gigpo, rollouts: &[Credited<'_>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let compared = match rule.norm {
        Norm::Std => standardized,
        Norm::None => centred,
    };
    let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
    let of_rollouts = compared(&rewards);
    let all: Vec<f64> = rollouts.iter().flat_map(|rollout| returns(rollout, rule.gamma, true)).collect();
    let mut places: HashMap<u64, Vec<usize>> = HashMap::new();
    let states = rollouts.iter().flat_map(|rollout| rollout.turns).map(|turn| turn.state);
    for (place, state) in states.enumerate().filter(|(_, state)| *state != 0) {
        places.entry(state).or_default().push(place);
    }
    let mut of_states = vec![0.0; all.len()];
    for places in places.into_values() {
        let values: Vec<f64> = places.iter().map(|&place| all[place]).collect();
        for (place, advantage) in places.into_iter().zip(compared(&values)) {
            of_states[place] = advantage;
        }
    }
    let mut of_turns = by_rollout(rollouts, of_states);
    for (turns, advantage) in of_turns.iter_mut().zip(&of_rollouts) {
        for of_state in turns {
            *of_state = fit(advantage + rule.omega * *of_state);
        }
    }
    (of_rollouts, of_turns)
}

/// The return of each turn.
fn returns(rollout: &Credited<'_>, gamma: f64, outcome: bool) -> Vec<f64> {
    let mut to_go = 0.0;
    let mut found: Vec<f64> = Vec::with_capacity(rollout.turns.len());
    for (place, turn) in rollout.turns.iter().rev().enumerate() {
        let reward = if place == 0 && outcome { turn.reward + rollout.reward } else { turn.reward };
        to_go = reward + gamma * to_go;
        found.push(to_go);
    }
    found.reverse();
    found
}

/// Cuts what was computed of all turns into the turns of each rollout.
fn by_rollout(rollouts: &[Credited<'_>], all: Vec<f64>) -> Vec<Vec<f64>> {
    let mut all = all.into_iter();
    rollouts.iter().map(|rollout| all.by_ref().take(rollout.turns.len()).collect()).collect()
}

#[cfg(test)]
mod tests {
    use forebay_wire::{GigpoKind, TurnReturnKind};

    use super::*;

    fn turn(reward: f64, state: u64) -> Turn {
        Turn { reward, state }
    }

    #[track_caller]
    fn close(found: &[Vec<f64>], expected: &[&[f64]]) {
        assert_eq!(
            found.iter().map(Vec::len).collect::<Vec<_>>(),
            expected.iter().map(|of| of.len()).collect::<Vec<_>>()
        );
        for (found, expected) in found.iter().flatten().zip(expected.iter().copied().flatten()) {
            assert!((found - expected).abs() < 1e-7, "{found} is not {expected}");
        }
    }

    #[test]
    fn worked_numbers_of_returns_hold() {
        let (first, second) = ([turn(0.5, 0), turn(0.0, 0)], [turn(0.0, 0), turn(0.0, 0), turn(0.25, 0)]);
        let rollouts = [Credited { reward: 1.0, turns: &first }, Credited { reward: 0.0, turns: &second }];
        let rule = |outcome| TurnReturn { kind: TurnReturnKind::TurnReturn, gamma: 0.9, outcome };
        let found = turn_return(&rule(true), &rollouts);
        close(&found, &[&[1.420_544, 0.696_238_6], &[-0.747_845_4, -0.707_103_2, -0.661_834_1]]);
        // Without the outcome, the returns are 0.5, 0, and 0.2025, 0.225, 0.25.
        let found = turn_return(&rule(false), &rollouts);
        assert!(found[0][0] > 0.0 && found[0][1] < found[1][0], "{found:?}");
        // Without a turn there is nothing to compare, and a single turn is compared with nobody.
        close(&turn_return(&rule(true), &[Credited { reward: 1.0, turns: &[] }]), &[&[]]);
        close(&turn_return(&rule(true), &[Credited { reward: 1.0, turns: &first[..1] }]), &[&[0.0]]);
    }

    #[test]
    fn worked_numbers_of_states_hold() {
        let (first, second) = ([turn(0.0, 7), turn(0.0, 1)], [turn(0.0, 7), turn(0.0, 7), turn(0.0, 2)]);
        let rollouts = [Credited { reward: 1.0, turns: &first }, Credited { reward: 0.0, turns: &second }];
        let rule = |norm| Gigpo { kind: GigpoKind::Gigpo, gamma: 0.9, omega: 1.0, norm };
        let (of_rollouts, found) = gigpo(&rule(Norm::Std), &rollouts);
        close(&found, &[&[1.861_804_1, 0.707_105_8], &[-1.284_454_9, -1.284_454_9, -0.707_105_8]]);
        close(&[of_rollouts], &[&[0.707_105_8, -0.707_105_8]]);
        let (of_rollouts, found) = gigpo(&rule(Norm::None), &rollouts);
        close(&found, &[&[1.1, 0.5], &[-0.8, -0.8, -0.5]]);
        close(&[of_rollouts], &[&[0.5, -0.5]]);
        // Turns without a state are not compared with each other.
        let (first, second) = ([turn(0.5, 0)], [turn(0.0, 0)]);
        let rollouts = [Credited { reward: 1.0, turns: &first }, Credited { reward: 0.0, turns: &second }];
        close(&gigpo(&rule(Norm::None), &rollouts).1, &[&[0.5], &[-0.5]]);
    }

    #[test]
    fn absurd_rewards_give_finite_advantages() {
        let turns = [turn(f64::MAX, 1), turn(f64::MAX, 1), turn(f64::MIN, 1)];
        let rollouts = [Credited { reward: f64::MAX, turns: &turns }, Credited { reward: f64::MIN, turns: &turns }];
        let finite = |found: &[Vec<f64>]| found.iter().flatten().all(|advantage| (*advantage as f32).is_finite());
        let rule = TurnReturn { kind: TurnReturnKind::TurnReturn, gamma: 1.0, outcome: true };
        assert!(finite(&turn_return(&rule, &rollouts)));
        for norm in [Norm::Std, Norm::None] {
            let rule = Gigpo { kind: GigpoKind::Gigpo, gamma: 1.0, omega: 1e6, norm };
            let (of_rollouts, of_turns) = gigpo(&rule, &rollouts);
            assert!(finite(&[of_rollouts]) && finite(&of_turns), "{norm:?}");
        }
    }

    #[test]
    fn turns_are_spans_or_else_runs_of_trained_tokens() {
        let span = |start, length, reward: Option<f64>, state_key: Option<&str>| TurnSpan {
            start,
            length,
            reward,
            state_key: state_key.map(str::to_owned),
        };
        let named = [span(1, 2, Some(0.5), Some("a")), span(4, 1, None, None)];
        let segments: [(Option<&[TurnSpan]>, &[u8]); 4] =
            [(None, &[0, 1, 1, 0, 1]), (Some(&named), &[1, 1, 0, 1, 1]), (None, &[]), (None, &[1])];
        let found: Vec<Spanned> = spanned(segments.into_iter()).collect();
        let ranges: Vec<_> = found.iter().map(|spanned| spanned.range.clone()).collect();
        assert_eq!(ranges, [1..3, 4..5, 6..8, 9..10, 10..11]);
        let turns: Vec<Turn> = found.iter().map(|spanned| spanned.turn).collect();
        assert_eq!(turns[2], turn(0.5, hash("a")));
        assert_eq!([turns[0], turns[1], turns[3], turns[4]], [Turn::default(); 4]);
        assert_ne!(hash("a"), hash("b"));
        assert_eq!(unpack(&pack(&turns)), Some(turns.clone()));
        assert_eq!(unpack(&pack(&turns)[1..]), None);
        assert_eq!(unpack_advantages(&pack_advantages(&[0.5, -1e-300])), Some(vec![0.5, -1e-300]));
        assert_eq!(unpack_advantages(&[0; 9]), None);
    }

    #[test]
    fn a_large_group_has_fewer_turns_for_each_rollout() {
        assert_eq!([1, 256, 1_024, 65_536].map(turns_max), [4_096, 4_096, 1_024, 16]);
    }
}
