//! Sums: the right answer to `7+5=` is `12`, in one turn.

use std::collections::BTreeMap;

use super::{Outcome, Problem, Reply, Task, Turn, share_right};
use crate::random::Random;

/// One more than the largest number.
const NUMBERS: u32 = 10;

/// The task of adding two digits.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic;

#[derive(Debug)]
struct Sum {
    first: u32,
    second: u32,
}

impl Task for Arithmetic {
    fn name(&self) -> &'static str {
        "arithmetic"
    }

    fn alphabet(&self) -> &'static str {
        "0123456789+="
    }

    fn turn_tokens(&self) -> usize {
        3
    }

    fn pose(&self, seed: u64, number: u64) -> Box<dyn Problem> {
        let mut random = Random::new(seed, number);
        let mut digit = || (random.uniform() * f64::from(NUMBERS)) as u32;
        Box::new(Sum { first: digit(), second: digit() })
    }
}

impl Problem for Sum {
    fn prompt(&self) -> String {
        format!("{}+{}=", self.first, self.second)
    }

    fn reply(&self, turns: &[Turn]) -> Reply {
        let expected = (self.first + self.second).to_string();
        let share = turns.first().map_or(0.0, |turn| share_right(turn, &expected));
        let correct = f64::from(u8::from(share >= 1.0));
        Reply::End(Outcome { reward: share, components: BTreeMap::from([("correct".to_owned(), correct)]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &str, ended: bool) -> Outcome {
        let sum = Sum { first: 7, second: 5 };
        match sum.reply(&[Turn { text: text.to_owned(), ended }]) {
            Reply::End(outcome) => outcome,
            Reply::Tool(answer) => panic!("arithmetic has no tool, and yet it answers {answer:?}"),
        }
    }

    #[test]
    fn only_the_whole_sum_is_correct() {
        assert_eq!(outcome("12", true).reward.to_bits(), 1.0_f64.to_bits());
        assert_eq!(outcome("12", true).components["correct"].to_bits(), 1.0_f64.to_bits());
        for (text, ended) in [("12", false), ("1", true), ("11", true), ("012", true), ("<pad>12", true), ("", true)] {
            let outcome = outcome(text, ended);
            assert!(outcome.reward < 1.0, "{text:?} earns {}", outcome.reward);
            assert_eq!(outcome.components["correct"].to_bits(), 0.0_f64.to_bits());
        }
    }

    #[test]
    fn a_digit_too_many_earns_what_precedes_it() {
        assert!((outcome("120", false).reward - 2.0 / 3.0).abs() < 1e-12);
        assert!((outcome("21", true).reward).abs() < 1e-12);
    }

    #[test]
    fn problems_follow_from_seed_and_number() {
        let prompt = |seed, number| Arithmetic.pose(seed, number).prompt();
        let some: Vec<String> = (0..20).map(|number| prompt(1, number)).collect();
        assert_eq!(some, (0..20).map(|number| prompt(1, number)).collect::<Vec<_>>());
        assert_ne!(some, (0..20).map(|number| prompt(2, number)).collect::<Vec<_>>());
        assert!(some.iter().any(|prompt| *prompt != some[0]));
    }
}
