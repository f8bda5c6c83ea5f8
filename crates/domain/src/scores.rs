//! Scores: named numbers about rollouts, which come with them or later, from one scorer or from several.
//!
//! A rollout that lacks a score which the rules require has its place in its group and waits.

use std::collections::BTreeMap;

use forebay_wire::Status;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{clock::Timestamp, ids::LeaseToken, rules::Rules, trajectory::Facts};

/// The name of the score that is the reward, if the rules do not compute another one.
pub const REWARD: &str = "reward";

/// The scorer that the producer of a rollout is. Nobody else can have this name.
pub const PRODUCER: &str = "";

/// A score as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    pub name: String,
    /// The turn that it is the reward of, counted from 0 over all segments; none if it is about the whole rollout.
    pub turn: Option<u32>,
    /// [`PRODUCER`] for the producer.
    pub scorer: String,
    pub value: f64,
    pub rationale: Option<String>,
    /// Whether the decision about the rollout counts it, or will.
    pub applied: bool,
    pub given_at: Timestamp,
    /// The lease with which it was given, and which attempt that was.
    pub lease: Option<(LeaseToken, u32)>,
}

/// What filters read of a rollout that lacks scores and that its row does not have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BesideRow {
    pub temperature: f32,
    pub environment: Option<String>,
    pub metadata: Option<Box<RawValue>>,
}

impl BesideRow {
    /// None if the rules read nothing of it.
    #[must_use]
    pub fn of(rules: &Rules, facts: &Facts) -> Option<Self> {
        let names = |name: &str| {
            rules.filters().rollout_filters_name(&[name]) || rules.reward().is_some_and(|reward| reward.names(&[name]))
        };
        if !["temperature", "environment", "metadata"].into_iter().any(names) {
            return None;
        }
        Some(Self {
            temperature: facts.temperature,
            environment: facts.environment.clone().filter(|_| names("environment")),
            metadata: facts.metadata.clone().filter(|_| names("metadata")),
        })
    }
}

/// The reward components of a rollout with these scores: all but that of the reward, which may be the name of a component,
/// too.
#[must_use]
pub fn components(
    reward_components: &BTreeMap<String, f64>,
    mut scores: BTreeMap<String, f64>,
) -> BTreeMap<String, f64> {
    match reward_components.get(REWARD) {
        Some(value) => scores.insert(REWARD.to_owned(), *value),
        None => scores.remove(REWARD),
    };
    scores
}

/// All scores of a rollout: what its producer sent, and what was given, ordered by name and scorer. If several scorers gave
/// a score, it is the mean of their values. What was given by the producer stands for what it sent. Rewards of turns are not
/// among them.
#[must_use]
pub fn all<'a>(
    reward_components: &BTreeMap<String, f64>,
    reward: Option<f64>,
    given: impl IntoIterator<Item = &'a Score>,
) -> BTreeMap<String, f64> {
    let mut scores = reward_components.clone();
    // A component of this name is not the reward.
    scores.remove(REWARD);
    scores.extend(reward.map(|reward| (REWARD.to_owned(), reward)));
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    for score in given.into_iter().filter(|score| score.turn.is_none()) {
        let Some(mean) = scores.get_mut(&score.name).filter(|_| score.scorer != PRODUCER) else {
            scores.insert(score.name.clone(), score.value);
            continue;
        };
        // Each value is divided before it is added, because a sum of finite values may be infinite.
        let before = counts.entry(&score.name).or_insert(1.0);
        *mean = *mean * (*before / (*before + 1.0)) + score.value / (*before + 1.0);
        *before += 1.0;
    }
    scores
}

/// The rewards of turns among scores, with the numbers of the turns.
pub fn of_turns(given: &[Score]) -> impl Iterator<Item = (u32, f64)> {
    given.iter().filter(|score| score.applied).filter_map(|score| Some((score.turn?, score.value)))
}

/// The same for a rollout with the reward of its row. Rules that use scores make another reward of them, so the producer's is
/// among the given then.
#[must_use]
pub fn of_row<'a>(
    rules: &Rules,
    reward_components: &BTreeMap<String, f64>,
    reward: Option<f64>,
    given: impl IntoIterator<Item = &'a Score>,
) -> BTreeMap<String, f64> {
    all(reward_components, reward.filter(|_| !rules.use_scores()), given)
}

/// Whether a rollout that arrives has the scores that its rules require.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has all of them.
    Complete,
    /// It waits for these.
    Waits(Vec<String>),
    /// It lacks some, and nobody will give them: its execution was aborted, such as a session that expired, and its producer
    /// gave no reward. As without scores, it is dropped unless a filter masks it.
    Unscored,
}

impl Standing {
    /// Of a rollout with these scores.
    #[must_use]
    pub fn of(rules: &Rules, facts: &Facts, scores: &BTreeMap<String, f64>) -> Self {
        let missing = rules.missing_scores(scores);
        if missing.is_empty() {
            Self::Complete
        } else if facts.status == Status::Aborted && facts.reward.is_none() {
            Self::Unscored
        } else {
            Self::Waits(missing)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(scores: &[(&str, f64)]) -> BTreeMap<String, f64> {
        scores.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn a_score_of_several_scorers_is_the_mean_of_their_values() {
        let posted = map(&[("tests", 1.0), ("reward", 7.0)]);
        let given = |name: &str, scorer: &str, value| Score {
            name: name.to_owned(),
            turn: None,
            scorer: scorer.to_owned(),
            value,
            rationale: None,
            applied: true,
            given_at: Timestamp::from_micros(0),
            lease: None,
        };
        let judges = [given("judge", "a", 0.2), given("judge", "b", 0.4), given("judge", "c", 0.9)];
        let found = all(&posted, Some(0.5), judges.iter().chain([&given("tests", "d", 0.0)]));
        assert!((found["judge"] - 0.5).abs() < 1e-12);
        let found: BTreeMap<_, _> = found.into_iter().filter(|(name, _)| name != "judge").collect();
        assert_eq!(found, map(&[("reward", 0.5), ("tests", 0.5)]), "the reward comes before a component of its name");
        assert_eq!(components(&posted, found), map(&[("reward", 7.0), ("tests", 0.5)]), "and the component stays one");
        assert!(!all(&posted, None, []).contains_key("reward"));
        let found = components(&BTreeMap::new(), map(&[("reward", 1.0), ("judge", 0.5)]));
        assert_eq!(found, map(&[("judge", 0.5)]));
        // What the producer sent is in both places.
        let found = all(&posted, None, &[given("reward", PRODUCER, 0.25), given("reward", "e", 0.75)]);
        assert_eq!(found, map(&[("reward", 0.5), ("tests", 1.0)]));
        let large = [given("judge", "a", f64::MAX), given("judge", "b", f64::MAX)];
        assert!(all(&BTreeMap::new(), None, &large)["judge"].is_finite());
    }
}
