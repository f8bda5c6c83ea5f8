//! Why a policy is as it is: a pure function from facts of the ledger to a state, a headline, causes, what is not the
//! reason, and what cannot be known.
//!
//! Separate from [`insight`](super::insight), which reads the facts, so that every rule can be tested as a table. A cause
//! claims only what the facts prove. The order of the states is that of [`PolicyCondition`]: what stops training comes
//! before what slows it, and that before hints about tuning. Every state ends by itself when its condition ends.
//!
//! [`facts`]: what is looked at. `condition`: which state. `causes`: what explains it. `excluded`: what does not,
//! and what cannot be known. `finding`: what they consist of. `sentence`: numbers in words.

pub mod causes;
pub mod condition;
pub mod excluded;
pub mod facts;
mod finding;
pub mod sentence;
#[cfg(test)]
mod tests;

use forebay_wire::PolicyCondition;

use self::facts::Facts;

pub use finding::{Cause, Finding, Numbers};

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
