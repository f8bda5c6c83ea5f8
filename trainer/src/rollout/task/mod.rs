//! What rollouts are about: a [`Task`] poses problems, a [`Problem`] answers the model turn by turn.
//!
//! Tasks speak text and know nothing of tokens, weights or the service. Both parts are pure functions: the same seed
//! poses the same problems, and the same turns get the same reply.

use std::collections::BTreeMap;

mod arithmetic;
mod lookup;

pub use arithmetic::Arithmetic;
pub use lookup::Lookup;

/// A source of problems.
pub trait Task: std::fmt::Debug + Send {
    /// Its name on the command line, and the environment of its rollouts.
    fn name(&self) -> &'static str;

    /// The characters of its prompts, its tools and right answers.
    fn alphabet(&self) -> &'static str;

    /// Tokens of the longest turn that makes sense, the one that ends it included.
    fn turn_tokens(&self) -> usize;

    /// Poses problem `number` of the stream `seed`.
    fn pose(&self, seed: u64, number: u64) -> Box<dyn Problem>;
}

/// One problem, which every rollout of a group works on.
pub trait Problem: std::fmt::Debug {
    /// The text that the model goes on from.
    fn prompt(&self) -> String;

    /// What follows the last of `turns`, all that the model said so far: a tool's answer, or the end.
    ///
    /// After a turn that was cut off there is nothing but the end.
    fn reply(&self, turns: &[Turn]) -> Reply;
}

/// What the model said in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its words, without the token that ended the turn.
    pub text: String,
    /// Whether it ended the turn itself; otherwise it ran into the bound of its length.
    pub ended: bool,
}

/// What follows a turn.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// A tool answers, and the model goes on after this text.
    Tool(String),
    /// The rollout is over.
    End(Outcome),
}

/// How a rollout went.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// From 0 to 1.
    pub reward: f64,
    /// Named parts of the reward.
    pub components: BTreeMap<String, f64>,
}

/// The tasks by their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TaskName {
    /// Sums of two numbers of one digit, answered at once.
    Arithmetic,
    /// A secret digit that only a tool knows, asked for and then repeated.
    Lookup,
}

impl TaskName {
    /// The task of this name.
    #[must_use]
    pub fn task(self) -> Box<dyn Task> {
        match self {
            Self::Arithmetic => Box::new(Arithmetic),
            Self::Lookup => Box::new(Lookup),
        }
    }
}

/// The share of `expected`, and of the token that ends it, that `turn` has right before its first mistake.
///
/// All or nothing would leave a model of random weights without a single success to learn from.
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
