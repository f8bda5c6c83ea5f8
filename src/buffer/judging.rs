//! What rollout filters say, asked before the transaction that stores a rollout.
//!
//! Separate from [`ingest`](super::ingest), because expressions are somebody else's programs and must not hold up a
//! transaction. What they ask of it, the rules of the group and the versions, is only certain inside of it. So rollouts
//! are judged by what was last seen to hold, and a transaction that finds something else answers with [`Question`]s
//! instead of evaluating: the rollouts are judged again, and the bundle is stored by another transaction.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use forebay_client::wire::FilterAction;

use super::{
    filter::Judgement,
    ids::{PolicyName, Version},
    ingest::{NewRollout, filter_facts},
    rules::Rules,
    trajectory::ResolvedVersions,
};

/// Times that a bundle is judged again before its producer is told to come back: each time, rules or a version were
/// written in between.
pub(super) const JUDGED_AGAIN_MAX: usize = 8;

/// Policies whose rules are remembered; beyond, all are forgotten.
const POLICIES_MAX: usize = 4_096;

/// What a rollout is to be judged by.
#[derive(Clone)]
pub struct Question {
    /// Place of the rollout in its bundle.
    pub index: usize,
    /// Rules of its group.
    pub rules: Arc<Rules>,
    /// The rules are those of groups that are opened now.
    pub is_current: bool,
    /// Its versions.
    pub versions: ResolvedVersions,
    /// The policy's version.
    pub current: Version,
}

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Question").field("index", &self.index).field("current", &self.current).finish_non_exhaustive()
    }
}

impl PartialEq for Question {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
            && Arc::ptr_eq(&self.rules, &other.rules)
            && (self.is_current, self.versions, self.current) == (other.is_current, other.versions, other.current)
    }
}

/// What the filters of some rules say about a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The filter that matched, and what it does.
    pub matched: Option<(String, FilterAction)>,
    /// Filters before it that could not be evaluated.
    pub failed: Vec<String>,
    /// Those of them that would have cost too much.
    pub over_budget: Vec<String>,
}

impl From<Judgement<'_>> for Verdict {
    fn from(judgement: Judgement<'_>) -> Self {
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        Self {
            matched: judgement.matched.map(|found| (found.name.to_owned(), found.action)),
            failed: owned(judgement.failed),
            over_budget: owned(judgement.over_budget),
        }
    }
}

/// The latest verdict on a rollout, shared by its clones.
#[derive(Clone, Default)]
pub struct Judged(Arc<Mutex<Option<(Question, Verdict)>>>);

impl Judged {
    /// The verdict by these rules and versions. Where the rules have no filters of rollouts it is known.
    pub fn by(&self, rules: &Rules, versions: ResolvedVersions, current: Version) -> Option<Verdict> {
        let held = self.held();
        let Some((question, verdict)) = held.as_ref() else {
            return (!rules.filters().judge_rollouts()).then(Verdict::default);
        };
        let same_versions = !rules.filters().ask_for_versions()
            || (question.versions.version, question.current) == (versions.version, current);
        let same_rules = std::ptr::eq(&raw const *question.rules, rules) || question.rules.filter == rules.filter;
        (same_rules && same_versions).then(|| verdict.clone())
    }

    fn held(&self) -> MutexGuard<'_, Option<(Question, Verdict)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Judged").field(&*self.held()).finish()
    }
}

/// Judges a rollout. Takes up to a second for the worst filters: neither for a transaction nor for an async worker.
pub(super) fn judge(new: &NewRollout, question: Question) {
    let facts = filter_facts(&new.facts, question.versions, question.current);
    let verdict = question.rules.filters().judge_rollout(&facts).into();
    *new.judged.held() = Some((question, verdict));
}

/// Rules and versions that were last seen to hold, for policies with filters of rollouts.
#[derive(Debug, Default)]
pub(super) struct Expected(Mutex<HashMap<PolicyName, (Arc<Rules>, Version)>>);

impl Expected {
    /// What a new rollout will probably be judged by.
    pub(super) fn question(&self, new: &NewRollout, index: usize) -> Option<Question> {
        let (rules, current) = self.held().get(&new.policy).cloned()?;
        let versions = new.facts.versions.resolve(None, current);
        Some(Question { index, rules, is_current: true, versions, current })
    }

    /// Remembers what a transaction found.
    pub(super) fn learn(&self, policy: &PolicyName, question: &Question) {
        let mut held = self.held();
        if !question.is_current {
            return;
        }
        if !question.rules.filters().judge_rollouts() {
            held.remove(policy);
            return;
        }
        if held.len() >= POLICIES_MAX {
            held.clear();
        }
        held.insert(policy.clone(), (Arc::clone(&question.rules), question.current));
    }

    fn held(&self) -> MutexGuard<'_, HashMap<PolicyName, (Arc<Rules>, Version)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_client::wire::{FilterRule, FilterScope, PolicyRules, Trajectory};

    use super::*;
    use crate::{
        buffer::{Buffer, Decisions, refusal::Refusal},
        clock::AnchoredClock,
        config::Config,
        metrics::Metrics,
        store::{self, Ingest},
    };

    #[tokio::test]
    async fn a_transaction_asks_no_filter_but_says_what_is_to_be_asked() {
        let metrics = Arc::new(Metrics::new());
        let config = Config::parse("").expect("the defaults are valid");
        let store = store::open("sqlite::memory:", metrics.store()).await.expect("a temporary store opens");
        let clock = Arc::new(AnchoredClock::new());
        let buffer = Buffer::start(Arc::clone(&store), clock, metrics, config.buffer, Vec::new());
        let buffer = buffer.await.expect("the store can be used");
        let filter = FilterRule {
            name: "low".to_owned(),
            scope: FilterScope::Rollout,
            when: "reward < 0.5".to_owned(),
            action: FilterAction::Drop,
        };
        let rules = PolicyRules { require: Vec::new(), filter: vec![filter], ..PolicyRules::default() };
        let rules = Arc::new(Rules::parse(rules).expect("these rules can work"));
        buffer.put_policy(PolicyName::default(), rules).await.expect("the rules are written");
        let sent = Trajectory { rollout_id: Some("a".to_owned()), reward: Some(0.25), ..Trajectory::default() };
        let bundles = Arc::new(vec![buffer.prepare(vec![sent]).expect("the trajectory is valid")]);
        let store_now = || {
            let (bundles, decide) = (Arc::clone(&bundles), Arc::new(Decisions::default()));
            store.ingest(Ingest { bundles, decide, now: buffer.now() })
        };
        let outcome = store_now().await.expect("the store answers").remove(0);
        let Err(Refusal::Unjudged(questions)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((questions.len(), questions[0].index, questions[0].is_current), (1, 0, true));
        assert!(bundles[0][0].judged.held().is_none(), "nothing was asked in the transaction");
        // Another thread asks, and the next transaction goes by what was said.
        judge(&bundles[0][0], questions[0].clone());
        let outcome = store_now().await.expect("the store answers").remove(0).expect("the bundle is stored");
        assert_eq!(outcome[0].decision.reason.as_deref(), Some("low"));
        assert!(!outcome[0].duplicate, "the first transaction has stored nothing");
    }
}
