//! Why a policy is as it is: a pure function from facts of the ledger to a state, a headline, causes, what is not the
//! reason, and what cannot be known.
//!
//! Separate from [`insight`](super::insight), which reads the facts, so that every rule can be tested as a table. A cause
//! claims only what the facts prove. The order of the states is that of [`PolicyCondition`]: what stops training comes
//! before what slows it, and that before hints about tuning. Every state ends by itself when its condition ends.
//!
//! [`facts`]: what is looked at. `condition`: which state. `causes`: what explains it. `excluded`: what does not,
//! and what cannot be known. `sentence`: numbers in words.

pub mod causes;
pub mod condition;
pub mod excluded;
pub mod facts;
pub mod sentence;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use forebay_wire::PolicyCondition;

use self::facts::Facts;

/// Numbers of a sentence, by their names. All of them are finite.
pub type Numbers = BTreeMap<&'static str, f64>;

/// Causes of one state that are named at most.
const CAUSES_MAX: usize = 8;

/// The answer to "why?" for a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    pub state: PolicyCondition,
    /// The state in one sentence with its most important numbers.
    pub headline: String,
    /// What explains the state, the most important first.
    pub causes: Vec<Cause>,
    /// What was looked at and is not the reason.
    pub ruled_out: Vec<Finding>,
    /// What the ledger cannot say.
    pub unknown: Vec<Finding>,
}

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

/// Explains the state of a policy.
#[must_use]
pub fn explain(facts: &Facts) -> Explanation {
    let state = condition::of(facts);
    let mut causes = causes::of(facts, state);
    // The sort is stable: causes of the same weight stay in the order of the table in the documentation.
    causes.sort_by(|first, second| second.weight.total_cmp(&first.weight));
    causes.truncate(CAUSES_MAX);
    let headline = condition::headline(facts, state, &causes);
    let excluded = |code: &str| causes.iter().any(|cause| cause.code == code);
    let ruled_out = excluded::ruled_out(facts, state).into_iter().filter(|finding| !excluded(finding.code)).collect();
    let unknown = excluded::unknown(facts, state);
    Explanation { state, headline, causes, ruled_out, unknown }
}
