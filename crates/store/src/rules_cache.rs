//! Parsed rules by their row. A row of `rules` never changes, so its rules are parsed and compiled once and kept while
//! they are used.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use forebay_domain::rules::Rules;

use crate::error::StoreError;

/// Number of rules that are kept: more than an operator writes while groups are open.
const RULES_MAX: usize = 1_024;

/// Bytes of the rules that are kept, not counting those that were used last. Compiled patterns are large.
const BYTES_MAX: usize = 64 << 20;

/// Rules by the key of their row.
#[derive(Debug, Default)]
pub(super) struct RulesCache(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    rules: HashMap<i64, Entry>,
    bytes: usize,
    /// Number of uses so far, to find the rules that were used last.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    rules: Arc<Rules>,
    last_use: u64,
}

impl RulesCache {
    pub(super) fn get(&self, rules_pk: i64) -> Option<Arc<Rules>> {
        let mut kept = self.kept();
        kept.uses += 1;
        let last_use = kept.uses;
        let entry = kept.rules.get_mut(&rules_pk)?;
        entry.last_use = last_use;
        Some(Arc::clone(&entry.rules))
    }

    pub(super) fn clear(&self) {
        *self.kept() = Kept::default();
    }

    pub(super) fn insert(&self, rules_pk: i64, body: &str) -> Result<Arc<Rules>, StoreError> {
        let corrupt = |problem: String| StoreError::Corrupt(format!("rules {rules_pk}: {problem}"));
        let wire = serde_json::from_str(body).map_err(|error| corrupt(error.to_string()))?;
        let rules = Rules::stored(wire).map_err(|violations| corrupt(format!("{violations:?}")))?;
        let rules = Arc::new(rules);
        self.kept().insert(rules_pk, Arc::clone(&rules));
        Ok(rules)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn insert(&mut self, rules_pk: i64, rules: Arc<Rules>) {
        self.uses += 1;
        self.bytes += rules.bytes_held();
        let replaced = self.rules.insert(rules_pk, Entry { rules, last_use: self.uses });
        self.bytes -= replaced.map_or(0, |entry| entry.rules.bytes_held());
        while self.rules.len() > 1 && (self.bytes > BYTES_MAX || self.rules.len() > RULES_MAX) {
            let oldest = self.rules.iter().min_by_key(|(_, entry)| entry.last_use).map(|(key, _)| *key);
            let removed = oldest.and_then(|key| self.rules.remove(&key));
            self.bytes -= removed.map_or(0, |entry| entry.rules.bytes_held());
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_wire::{FilterAction, FilterRule, FilterScope, PolicyRules};

    use super::*;

    /// Rules whose patterns take a quarter of a MiB each.
    fn body(number: usize) -> String {
        let pattern = |index: usize| format!("metadata.x.matches('{number} {index} \\\\w{{4}}')");
        let filter = |index: usize| FilterRule {
            name: format!("f{index}"),
            scope: FilterScope::Rollout,
            when: pattern(index),
            action: FilterAction::Drop,
        };
        let rules = PolicyRules { filter: (0..4).map(filter).collect(), ..PolicyRules::default() };
        serde_json::to_string(&rules).expect("rules are JSON")
    }

    #[test]
    fn rules_that_are_kept_are_bounded_in_bytes() {
        let cache = RulesCache::default();
        for key in 0..60 {
            cache.insert(key, &body(key as usize)).expect("these rules were accepted before");
            // The first rules are used all the time.
            assert!(cache.get(0).is_some(), "after {key}");
        }
        let kept = cache.kept();
        assert!(kept.bytes <= BYTES_MAX, "{} bytes are kept", kept.bytes);
        assert_eq!(kept.bytes, kept.rules.values().map(|entry| entry.rules.bytes_held()).sum::<usize>());
        assert!((2..60).contains(&kept.rules.len()), "{} are kept", kept.rules.len());
        assert!(kept.rules.contains_key(&59), "the rules that were used last are kept");
    }

    #[test]
    fn rules_that_are_larger_than_all_that_is_kept_can_be_used() {
        let mut kept = Kept { bytes: BYTES_MAX, ..Kept::default() };
        let rules = Arc::new(Rules::parse(PolicyRules::default()).expect("the defaults can work"));
        kept.insert(1, rules);
        assert!(kept.rules.contains_key(&1));
    }
}
