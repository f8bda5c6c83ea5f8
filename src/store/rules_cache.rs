//! Parsed rules by their row: a row of `rules` never changes, so it is parsed and compiled once per process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::StoreError;
use crate::buffer::rules::Rules;

/// Rules kept parsed; more than any operator changes in the life of open groups.
const RULES_MAX: usize = 1_024;

/// Rules by the key of their row.
#[derive(Debug, Default)]
pub(super) struct RulesCache(Mutex<HashMap<i64, Arc<Rules>>>);

impl RulesCache {
    pub(super) fn get(&self, rules_pk: i64) -> Option<Arc<Rules>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&rules_pk).cloned()
    }

    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(super) fn insert(&self, rules_pk: i64, body: &str) -> Result<Arc<Rules>, StoreError> {
        let corrupt = |problem: String| StoreError::Corrupt(format!("rules {rules_pk}: {problem}"));
        let wire = serde_json::from_str(body).map_err(|error| corrupt(error.to_string()))?;
        let rules = Rules::stored(wire).map_err(|violations| corrupt(format!("{violations:?}")))?;
        let rules = Arc::new(rules);
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= RULES_MAX {
            cache.clear();
        }
        cache.insert(rules_pk, Arc::clone(&rules));
        Ok(rules)
    }
}
