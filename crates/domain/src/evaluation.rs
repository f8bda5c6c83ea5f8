//! Evaluates the filters of a rollout before the transaction that stores it.
//!
//! Separate from [`ingest`](crate::ingest), because a slow expression must not hold up a transaction. The inputs of an
//! evaluation, which are the rules of the group and the versions, are certain only inside the transaction. Filters are
//! therefore first evaluated with the rules and versions that were last seen. A transaction that finds other ones
//! stores nothing and returns [`EvaluationRequest`]s; the filters are then evaluated again, and another transaction
//! stores the bundle.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use forebay_wire::FilterAction;

use crate::{
    ids::{PolicyName, Version},
    ingest::new_rollout::NewRollout,
    rules::{
        Rules,
        filter::{Evaluation, facts::RolloutFacts, reward},
    },
    scores::{self, Standing},
    trajectory::{Facts, ResolvedVersions},
};

/// How often the filters of a bundle are evaluated again before its producer is told to retry. Each repetition means
/// that rules or a version were written in between.
pub const REEVALUATIONS_MAX: usize = 8;

/// The most failed filters that the ledger names per rollout or group.
pub const FAILED_FILTERS_MAX: usize = 16;

/// Policies whose rules are remembered. When there are more, all are forgotten.
const POLICIES_MAX: usize = 4_096;

/// The inputs on which the filters of a rollout must be evaluated.
#[derive(Clone)]
pub struct EvaluationRequest {
    /// Index of the rollout in its bundle.
    pub index: usize,
    /// Rules of its group.
    pub rules: Arc<Rules>,
    /// Whether the rules are those of groups that are opened now.
    pub is_current: bool,
    pub versions: ResolvedVersions,
    /// The policy's version.
    pub current: Version,
}

impl fmt::Debug for EvaluationRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvaluationRequest")
            .field("index", &self.index)
            .field("current", &self.current)
            .finish_non_exhaustive()
    }
}

impl PartialEq for EvaluationRequest {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
            && Arc::ptr_eq(&self.rules, &other.rules)
            && (self.is_current, self.versions, self.current) == (other.is_current, other.versions, other.current)
    }
}

/// The result of the filters of some rules on a rollout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FilterVerdict {
    pub matched: Option<(String, FilterAction)>,
    /// Filters before it that could not be evaluated.
    pub failed: Vec<String>,
    /// The filters among `failed` that would have cost too much.
    pub over_budget: Vec<String>,
    /// The value of the rules' expression of the reward; none without one, and if it could not be evaluated.
    pub reward: Option<f64>,
}

impl From<Evaluation<'_>> for FilterVerdict {
    fn from(evaluation: Evaluation<'_>) -> Self {
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        Self {
            matched: evaluation.matched.map(|found| (found.name.to_owned(), found.action)),
            failed: owned(evaluation.failed),
            over_budget: owned(evaluation.over_budget),
            reward: None,
        }
    }
}

/// The latest result of the filters on a rollout, shared by its clones.
#[derive(Clone, Default)]
pub struct LatestEvaluation(Arc<Mutex<Option<(EvaluationRequest, FilterVerdict)>>>);

impl LatestEvaluation {
    /// The result for these rules and versions. If the rules have no filters of rollouts, it is known without an
    /// evaluation.
    pub fn by(&self, rules: &Rules, versions: ResolvedVersions, current: Version) -> Option<FilterVerdict> {
        let held = self.held();
        let Some((request, verdict)) = held.as_ref() else {
            return (!rules.evaluate_rollouts()).then(FilterVerdict::default);
        };
        let same_versions =
            !rules.depend_on_versions() || (request.versions.version, request.current) == (versions.version, current);
        // Rules for sessions decide what the filters of some rollouts look at.
        let same_rules = std::ptr::eq(&raw const *request.rules, rules)
            || (&request.rules.filter, &request.rules.scores, &request.rules.sessions)
                == (&rules.filter, &rules.scores, &rules.sessions);
        (same_rules && same_versions).then(|| verdict.clone())
    }

    fn held(&self) -> MutexGuard<'_, Option<(EvaluationRequest, FilterVerdict)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LatestEvaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LatestEvaluation").field(&*self.held()).finish()
    }
}

/// What filters see of a rollout.
pub fn filter_facts<'a>(
    facts: &'a Facts,
    scores: &'a BTreeMap<String, f64>,
    versions: ResolvedVersions,
    current: Version,
) -> RolloutFacts<'a> {
    RolloutFacts {
        status: facts.status.as_str(),
        reward: facts.reward,
        reward_components: &facts.reward_components,
        scores,
        environment: facts.environment.as_deref(),
        policy_version: versions.version.0,
        version_current: current.0,
        staleness: current.0.saturating_sub(versions.version.0).max(0),
        segments: i64::from(facts.segments),
        tokens: facts.tokens as i64,
        response_tokens: facts.response_tokens as i64,
        trained_tokens: facts.trained_tokens as i64,
        max_segment_tokens: facts.max_segment_tokens as i64,
        temperature: f64::from(facts.temperature),
        metadata: facts.metadata.as_deref(),
    }
}

/// Evaluates the filters on a rollout. This takes up to a second for the worst filters, so neither a transaction nor an
/// async worker may call it.
pub fn evaluate(new: &NewRollout, request: EvaluationRequest) {
    let rules = &request.rules;
    let facts = &new.form(rules.sessions.retries).facts;
    // Most rules read none, and a rollout may have many components.
    let scores = if rules.use_scores() || rules.filters().rollout_filters_name(&["scores"]) {
        scores::all(&facts.reward_components, facts.reward, [])
    } else {
        BTreeMap::new()
    };
    let standing = Standing::of(rules, facts, &scores);
    let facts = filter_facts(facts, &scores, request.versions, request.current);
    let verdict = judge(rules, &facts, &standing);
    *new.evaluation.held() = Some((request, verdict));
}

/// What the filters say about a rollout, and its reward if it is computed. Filters of a rollout that waits for scores are
/// asked only whether they drop it whatever its scores will be.
#[must_use]
pub fn judge(rules: &Rules, facts: &RolloutFacts<'_>, standing: &Standing) -> FilterVerdict {
    if matches!(standing, Standing::Waits(_)) {
        let found = FilterVerdict::from(rules.filters().evaluate_before_scores(facts));
        let drops = matches!(found.matched, Some((_, FilterAction::Drop)));
        return if drops { found } else { FilterVerdict::default() };
    }
    let expression = rules.reward().filter(|_| *standing == Standing::Complete);
    let reward = expression.map(|expression| expression.value(facts));
    let facts = RolloutFacts { reward: reward.unwrap_or(facts.reward), ..*facts };
    let mut found = FilterVerdict::from(rules.filters().evaluate_rollout(&facts));
    found.reward = reward.flatten();
    if reward == Some(None) {
        found.failed.insert(0, reward::NAME.to_owned());
    }
    found
}

/// Rules and versions that were last seen in a transaction, for policies with filters of rollouts.
#[derive(Debug, Default)]
pub struct LastSeenRules(Mutex<HashMap<PolicyName, (Arc<Rules>, Version)>>);

impl LastSeenRules {
    /// The inputs on which the filters of a new rollout will probably be evaluated.
    pub fn request(&self, new: &NewRollout, index: usize) -> Option<EvaluationRequest> {
        let (rules, current) = self.held().get(&new.policy).cloned()?;
        let versions = new.form(rules.sessions.retries).facts.versions.resolve(None, current);
        Some(EvaluationRequest { index, rules, is_current: true, versions, current })
    }

    /// Remembers the inputs that a transaction found.
    pub fn remember(&self, policy: &PolicyName, request: &EvaluationRequest) {
        let mut held = self.held();
        if !request.is_current {
            return;
        }
        if !request.rules.evaluate_rollouts() {
            held.remove(policy);
            return;
        }
        if held.len() >= POLICIES_MAX {
            held.clear();
        }
        held.insert(policy.clone(), (Arc::clone(&request.rules), request.current));
    }

    fn held(&self) -> MutexGuard<'_, HashMap<PolicyName, (Arc<Rules>, Version)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
