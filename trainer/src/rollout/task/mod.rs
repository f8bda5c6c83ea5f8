//! The content of rollouts: a [`Task`] makes problems, and a [`Problem`] answers the model turn by turn.
//!
//! Tasks work on text and know nothing about tokens, weights or the service. Both traits are deterministic: the same
//! seed makes the same problems, and the same turns get the same reply.

use std::collections::BTreeMap;

mod arithmetic;
mod lookup;

pub use arithmetic::Arithmetic;
pub use lookup::Lookup;

/// A source of problems.
pub trait Task: std::fmt::Debug + Send {
    /// Name on the command line, and environment label of the task's rollouts.
    fn name(&self) -> &'static str;

    /// The characters of prompts, tool answers and right answers.
    fn alphabet(&self) -> &'static str;

    /// Number of tokens of the longest useful turn, including the token that ends it.
    fn turn_tokens(&self) -> usize;

    /// Makes problem `number` of the stream `seed`.
    fn pose(&self, seed: u64, number: u64) -> Box<dyn Problem>;
}

/// One problem, which every rollout of a group works on.
pub trait Problem: std::fmt::Debug {
    /// The prompt: the text that the model continues.
    fn prompt(&self) -> String;

    /// Returns the reply to the last of `turns`, which are all turns of the model so far: a tool's answer, or the end.
    ///
    /// After a turn that was cut off, the reply is always the end.
    fn reply(&self, turns: &[Turn]) -> Reply;
}

/// One turn of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The text of the turn, without the token that ended it.
    pub text: String,
    /// Whether the model ended the turn itself. Otherwise the turn reached its maximum length.
    pub ended: bool,
}

/// The reply to a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// A tool answers, and the model continues after this text.
    Tool(String),
    /// The rollout is over.
    End(Outcome),
}

/// The result of a rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Reward from 0 to 1.
    pub reward: f64,
    /// Named parts of the reward.
    pub components: BTreeMap<String, f64>,
}

/// The built-in tasks, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TaskName {
    /// Sums of two numbers of one digit, answered at once.
    Arithmetic,
    /// A secret digit that only the tool knows; the model asks for it and repeats it.
    Lookup,
}

impl TaskName {
    /// Returns the task of this name.
    #[must_use]
    pub fn task(self) -> Box<dyn Task> {
        match self {
            Self::Arithmetic => Box::new(Arithmetic),
            Self::Lookup => Box::new(Lookup),
        }
    }
}

/// Returns the share of `expected`, including the token that ends it, that `turn` gets right before its first mistake.
///
/// With an all-or-nothing reward, a model of random weights would have no success to learn from.
fn share_right(turn: &Turn, expected: &str) -> f64 {
    let right = turn.text.chars().zip(expected.chars()).take_while(|(said, wanted)| said == wanted).count();
    let wanted = expected.chars().count();
    let ended = usize::from(turn.ended && turn.text == expected);
    (right + ended) as f64 / (wanted + 1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mistake_ends_what_counts() {
        let share = |text: &str, ended| share_right(&Turn { text: text.to_owned(), ended }, "12");
        let close = |share: f64, thirds: f64| (share * 3.0 - thirds).abs() < 1e-12;
        assert!(close(share("12", true), 3.0));
        assert!(close(share("12", false), 2.0));
        assert!(close(share("123", true), 2.0));
        assert!(close(share("1", true), 1.0));
        assert!(close(share("02", true), 0.0));
        assert!(close(share("", true), 0.0));
    }
}
