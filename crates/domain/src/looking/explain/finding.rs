//! What an explanation consists of.

use std::collections::BTreeMap;

/// Numbers of a sentence, by their names. All of them are finite.
pub type Numbers = BTreeMap<&'static str, f64>;

/// Something that explains a state.
#[derive(Clone, Debug, PartialEq)]
pub struct Cause {
    /// A stable code.
    pub code: &'static str,
    /// The filter that it is about.
    pub filter: Option<String>,
    /// The part of the waiting time, 0 to 1, that would be saved without the cause; causes are ranked by it.
    pub weight: f64,
    /// One sentence.
    pub text: String,
    /// The numbers of the sentence.
    pub numbers: Numbers,
    /// A call that lists what the cause is about.
    pub see: Option<String>,
}

/// Something that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// A stable code.
    pub code: &'static str,
    /// One sentence or phrase.
    pub text: String,
    /// The numbers of the sentence.
    pub numbers: Numbers,
}
