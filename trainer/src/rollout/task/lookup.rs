//! A task with a tool: `3>` asks for entry 3 of a table of digits that the prompt does not show.
//!
//! The model calls the tool with `?3`, reads the tool's answer `:8>`, and repeats the digit: `8`. An answer without the
//! call gets no reward even if it is right, because it can only be a guess.

use std::collections::BTreeMap;

use super::{Outcome, Problem, Reply, Task, Turn, share_right};
use crate::random::Random;

/// Number of entries of the table.
const ENTRIES: usize = 10;

/// Number of calls that the tool answers. One is enough, and the bound ends the rollout of a model that keeps calling.
const CALLS_MAX: usize = 2;

/// Reward of a perfect call: three of the five tokens that the model has to generate.
const CALL_REWARD: f64 = 0.6;

/// The task of asking a tool and repeating its answer.
#[derive(Clone, Copy, Debug)]
pub struct Lookup;

#[derive(Debug)]
struct Question {
    key: usize,
    table: [u32; ENTRIES],
}

impl Task for Lookup {
    fn name(&self) -> &'static str {
        "lookup"
    }

    fn alphabet(&self) -> &'static str {
        "0123456789?:>"
    }

    fn turn_tokens(&self) -> usize {
        3
    }

    fn pose(&self, seed: u64, number: u64) -> Box<dyn Problem> {
        let mut random = Random::new(seed, number);
        let key = (random.uniform() * ENTRIES as f64) as usize;
        let table = std::array::from_fn(|_| (random.uniform() * 10.0) as u32);
        Box::new(Question { key, table })
    }
}

impl Problem for Question {
    fn prompt(&self) -> String {
        format!("{}>", self.key)
    }

    fn reply(&self, turns: &[Turn]) -> Reply {
        let calls = turns.len() - usize::from(turns.last().is_some_and(|turn| called_key(turn).is_none()));
        match turns.last().and_then(called_key) {
            Some(key) if calls <= CALLS_MAX => Reply::Tool(format!(":{}>", self.table[key])),
            _ => Reply::End(self.outcome(turns)),
        }
    }
}

impl Question {
    fn outcome(&self, turns: &[Turn]) -> Outcome {
        let wanted_call = format!("?{}", self.key);
        let call = turns.iter().map(|turn| share_right(turn, &wanted_call)).fold(0.0, f64::max);
        let answer = match turns.last() {
            Some(turn) if call >= 1.0 => share_right(turn, &self.table[self.key].to_string()),
            _ => 0.0,
        };
        let components = BTreeMap::from([("call".to_owned(), call), ("answer".to_owned(), answer)]);
        Outcome { reward: CALL_REWARD * call + (1.0 - CALL_REWARD) * answer, components }
    }
}

/// The key that a turn asks the tool for, if it is a call.
fn called_key(turn: &Turn) -> Option<usize> {
    let key = turn.text.strip_prefix('?').filter(|_| turn.ended)?;
    let mut characters = key.chars();
    match (characters.next(), characters.next()) {
        (Some(character), None) => character.to_digit(10).map(|digit| digit as usize),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a problem that asks for entry 3, which is 8; entry k is otherwise k.
    fn reply(turns: &[&str]) -> Reply {
        let mut table = std::array::from_fn(|index| index as u32);
        table[3] = 8;
        let turn = |text: &&str| match text.strip_suffix('~') {
            Some(cut) => Turn { text: cut.to_owned(), ended: false },
            None => Turn { text: (*text).to_owned(), ended: true },
        };
        Question { key: 3, table }.reply(&turns.iter().map(turn).collect::<Vec<_>>())
    }

    fn reward(turns: &[&str]) -> f64 {
        match reply(turns) {
            Reply::End(outcome) => outcome.reward,
            Reply::Tool(answer) => panic!("the tool answers {answer:?}"),
        }
    }

    #[test]
    fn the_tool_tells_the_secret_and_the_secret_is_the_answer() {
        assert_eq!(reply(&["?3"]), Reply::Tool(":8>".to_owned()));
        assert!((reward(&["?3", "8"]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_guess_earns_nothing() {
        assert!(reward(&["8"]).abs() < 1e-12);
        assert_eq!(reply(&["?5"]), Reply::Tool(":5>".to_owned()));
        // The answer is right but the call was wrong: only the call's question mark earns reward.
        assert!((reward(&["?5", "8"]) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn mistakes_earn_what_precedes_them() {
        assert!((reward(&["?3", "7"]) - 0.6).abs() < 1e-12);
        assert!((reward(&["?3", "8~"]) - 0.8).abs() < 1e-12);
        assert!((reward(&["?3~"]) - 0.4).abs() < 1e-12);
        assert!((reward(&["?33"]) - 0.4).abs() < 1e-12);
        assert!((reward(&["?"]) - 0.2).abs() < 1e-12);
        assert!(reward(&["<eos>"]).abs() < 1e-12);
        assert!(reward(&[""]).abs() < 1e-12);
    }

    #[test]
    fn a_second_call_is_answered_and_a_third_ends_the_rollout() {
        assert_eq!(reply(&["?5", "?3"]), Reply::Tool(":8>".to_owned()));
        assert!((reward(&["?5", "?3", "8"]) - 1.0).abs() < 1e-12);
        assert!((reward(&["?3", "?3", "?3"]) - 0.6).abs() < 1e-12);
    }
}
